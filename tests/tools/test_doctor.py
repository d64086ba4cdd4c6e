"""``moelink doctor`` says what is wrong with a job's machines, where, and ends in time."""

from __future__ import annotations

import json
import re
from io import StringIO
from typing import Any

import pytest
import torch

import moelink

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from moelink.control.stores import BoundedError
from moelink.testing import run_ranks
from moelink.tools.cli import app as commands
from moelink.tools.cli import doctor as command
from moelink.tools.doctor import Examination, diagnose, run
from moelink.tools.doctor.facts import facts_of, nvlinked
from moelink.tools.doctor.pairs import Pair, link_of, nominal_gb_per_s, rounds
from tests.tools import doctor_ranks

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
GPU: dict[str, Any] = {
    "versions": {"torch": "2.11.0"}, "host": "one", "nvshmem": True, "network": ["mlx5_0"],
    "device": {
        "kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "free": 79 << 30, "total": 80 << 30, "nvlinked": [0, 1, 2, 3],
        "driver": {
            "index": "0", "driver_version": "580.1", "clocks.max.sm": "1980", "clocks.sm": "1980",
            "clocks_event_reasons.hw_slowdown": "Not Active",
        },
    },
}  # fmt: skip


def gpu(index: int = 0, driver: dict[str, str] | None = None, **change: Any) -> dict[str, Any]:
    """Facts of a rank with a GPU."""
    device = {**GPU["device"], **change.pop("device", {})}
    device["driver"] = {**device["driver"], "index": str(index), **(driver or {})}
    return {**GPU, **change, "device": device}


@pytest.mark.parametrize("world_size", [4, 1, 2, 5, 8])
def test_every_pair_is_measured_once_and_no_rank_twice_at_a_time(world_size: int) -> None:
    found = rounds(world_size)
    pairs = [pair for together in found for pair in together]
    assert sorted(pairs) == [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    for together in found:
        ranks = [rank for pair in together for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_healthy_ranks_have_no_problem() -> None:
    found, problems = run_ranks(doctor_ranks.examined, 4, "none")[0]
    assert len(found.pairs) == 6
    assert all(pair.latency_us > 0 and pair.gb_per_s > 0 for pair in found.pairs)
    assert list(found.formats) == [dict.fromkeys(doctor_ranks.FORMATS, "ok")] * 4
    # Ranks of a busy machine wait for one another; "slow link" below has a clock of its own.
    assert [problem for problem in problems if not problem.where.startswith("ranks ")] == []


FAULTS = {
    "version": ("rank 2", "expected torch .* as on most ranks, got 2.10.0"),
    "closed port": ("rank 2", r"expected an answer .*, got none from ranks \[0, 1\] \(refuses\)"),
    "absent": ("rank 2", "expected its facts, got none in time"),
    "slow link": ("ranks 0 and 2", "expected about .* as other pairs over memory, got .* at best, in 3 measurements"),
    "broken link": ("ranks 0 and 2", "expected messages to pass, got Connection reset by peer"),
}


@pytest.mark.quick("each ends at another step")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault: str) -> None:
    answers = [answer for answer in run_ranks(doctor_ranks.examined, 3, fault) if answer is not None]
    where, what = FAULTS[fault]
    for found, problems in answers:
        (told,) = [problem for problem in problems if problem.where == where]
        assert re.match(what, told.what), told
        assert told.advice
        assert (not found.formats) == (fault in ("closed port", "absent", "broken link"))


def test_a_pair_that_was_slow_once_is_measured_again() -> None:
    found, problems = run_ranks(doctor_ranks.examined, 3, "once slow")[0]
    assert problems == []
    assert {(pair.first, pair.second): pair.samples for pair in found.pairs} == {(0, 1): 1, (0, 2): 2, (1, 2): 1}


def test_ranks_end_whose_store_has_a_stopped_host(tmp_path: Any) -> None:
    facts = run_ranks(doctor_ranks.host_stopped, 3, str(tmp_path))
    assert min(facts) >= 1


def test_a_store_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = run_ranks(doctor_ranks.unreachable, 2)[1]
    # Both ends of the wait are at the same moment: that of the connection, which has a reason, and that of the caller.
    where = "rank 1: expected the store at 127.0.0.1:9, which rank 0 or the launcher serves, got"
    assert re.match(rf"{where} (nothing answers at .*|no answer); set MASTER_ADDR", said), said
    for name, value in {"MASTER_ADDR": "h", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "bounded", lambda *_: (_ for _ in ()).throw(BoundedError()))
    with pytest.raises(moelink.UnsupportedError, match="store at h:9, .*, got no answer; set MASTER_ADDR"):
        run.rank_main(1, 2, "cpu", ("bf16",), "collective", 1.0)


def test_a_format_that_there_is_not_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_ranks", None)
    with pytest.raises(moelink.ConfigError, match="format: expected one of bf16, .*, got 'bf61'"):
        run.run_doctor(2, device="cpu", formats=("bf16", "bf61"))


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "NVLink": (
        {"facts": [gpu(0), gpu(1)], "pairs": [Pair(0, 1, 9.0, 100.0)]},
        "ranks 0 and 1", "expected more than 180 GB/s of NVLink, got 100.0",
    ),
    "device": ({"facts": [gpu(), gpu(), gpu(device={"name": "A100"})]}, "rank 2", "expected a device NVIDIA"),
    "driver": ({"facts": [gpu(), gpu(), gpu(driver={"driver_version": "570"})]}, "rank 2", "expected driver 580.1"),
    "clock": ({"facts": [gpu(), gpu(), gpu(driver={"clocks.max.sm": "900"})]}, "rank 2", "expected highest clock"),
    "slowdown": (
        {"facts": [gpu(driver={"clocks_event_reasons.hw_slowdown": "Active", "clocks.sm": "300"})]},
        "rank 0", r"expected a device at full speed, got .*\(300 of 1980 MHz\)",
    ),
    "memory": ({"facts": [gpu(device={"free": 3 << 30})]}, "rank 0", "expected at least half .* free, got 3.0"),
    "time": ({"facts": [gpu(), gpu(), gpu()], "times": [100.0, 130.0, 100.5]}, "rank 1", r"expected the .* \+29.5 s"),
    "mesh": ({"facts": [gpu(), gpu()], "mesh": ["ok", None]}, "rank 1", "expected a process .* no word in time"),
    "latency": (
        {"facts": [gpu(host=str(r)) for r in range(4)], "pairs": [Pair(a, b, 2000.0 if (a, b) == (1, 3) else 20.0, 40.0)
                                                                 for together in rounds(4) for a, b in together]},
        "ranks 1 and 3", "expected about 20 us as other pairs over network, got 2000",
    ),
    "format": (
        {"facts": [gpu(), gpu()], "formats": [{"bf16": "ok"}, {"bf16": "3 of 16 tokens came home changed"}]},
        "format bf16", r"expected tokens to come home unchanged, got on ranks \[1\]: 3 of 16",
    ),
}  # fmt: skip


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize("found, where, what", CASES.values(), ids=CASES)
def test_what_is_wrong_is_told(found: dict[str, Any], where: str, what: str) -> None:
    (problem,) = diagnose(Examination(**found))
    assert problem.where == where
    assert re.match(what, problem.what), problem.what
    assert str(problem) == f"{where}: {problem.what}; {problem.advice}"


def test_links_and_rates() -> None:
    assert link_of(gpu(0), gpu(1)) == "NVLink"
    assert link_of(gpu(0), gpu(7)) == "PCIe"
    assert link_of(gpu(0), gpu(0, host="two")) == "network"
    assert nominal_gb_per_s("NVLink", "NVIDIA H200") == 450.0
    assert nominal_gb_per_s("NVLink", "some new device") is None
    assert nominal_gb_per_s("network", "NVIDIA H200") is None
    assert nvlinked("", 0) == []
    assert facts_of(torch.device("cpu"))["device"]["total"] > 1 << 30


def test_the_command_marks_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    facts = [facts_of(torch.device("cpu")) for _ in range(2)]
    broken = Examination(facts=facts, mesh=["ok", "ok"], pairs=[], broken={(0, 1): "a reset"})
    fine = Examination(facts=facts, pairs=[Pair(0, 1, 20.0, 1.5)], formats=[{"bf16": "ok"}] * 2)
    for found, status, words in (
        (broken, 1, "ranks 0 and 1: expected messages to pass"),
        (fine, 0, "Nothing is wrong."),
    ):
        monkeypatch.setattr("moelink.tools.doctor.run_doctor", lambda *_, found=found, **__: found)
        out = tmp_path / "found.json"
        result = CliRunner().invoke(commands.app, ["doctor", "--ranks", "2", "--out", str(out)])
        assert result.exit_code == status, result.output
        assert words in result.output
        document = json.loads(out.read_text())
        assert document["report"] == "moelink doctor"
        assert len(document["problems"]) == status


def examined(world_size: int, slow: tuple[int, int]) -> Examination:
    """An examination of ranks on two machines, in which one pair is slow."""
    facts = [gpu(rank % 4, host="one" if rank < world_size // 2 else "two") for rank in range(world_size)]
    pairs = [
        Pair(a, b, 9.0, 0.7, 3) if (a, b) == slow else Pair(a, b, 5.0, 400.0 + a)
        for a in range(world_size)
        for b in range(a + 1, world_size)
    ]
    return Examination(facts=facts, pairs=pairs)


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("world_size", "width", "names", "cells"),
    [
        (8, 100, [str(rank) for rank in range(8)], {(1, 6): "0.7", (6, 1): "9", (0, 1): "400", (1, 0): "5"}),
        (64, 120, [f"{rank}-{rank + 4}" for rank in range(0, 60, 5)] + ["60-63"], {(0, 1): "0.7", (1, 0): "9"}),
        (64, 80, ["0-6", "7-13"], {(0, 0): "0.7"}),
    ],
)
def test_pairs_are_a_matrix_that_fits_the_terminal(
    world_size: int, width: int, names: list[str], cells: dict[tuple[int, int], str]
) -> None:
    found = examined(world_size, (1, 6))
    problems = diagnose(found)
    assert [problem.where for problem in problems] == ["ranks 1 and 6"]
    said = StringIO()
    console = Console(file=said, width=width, force_terminal=True)
    shown = command.pairs_table(console, found, problems)
    console.print(shown)
    grid = shown.renderables[0]
    assert max(len(line) for line in ESCAPE.sub("", said.getvalue()).splitlines()) <= width
    assert "…" not in said.getvalue()
    assert [str(column.header) for column in grid.columns][1 : len(names) + 1] == names
    columns = [list(column.cells) for column in grid.columns[1:]]
    for (row, column), text in cells.items():
        cell = columns[column][row]
        assert str(cell) == text
        assert (cell.style == command.RED) == (text in ("0.7", "9"))
    marked = [str(cell) for column in columns for cell in column if cell.style == command.RED]
    assert sorted(marked) == sorted(text for text in cells.values() if text in ("0.7", "9"))
    assert "measured again because they looked slow: 1" in str(command.links_text(found))


def test_a_real_run_of_the_command() -> None:
    result = CliRunner().invoke(
        commands.app,
        ["doctor", "--ranks", "2", "--device", "cpu", "--format", "bf16", "--transport", "collective", "--json"],
    )
    steps = re.findall(r"\((\d) of (\d)\)$", result.stderr, re.MULTILINE)
    assert {("1", "5"), ("5", "5")} <= set(steps), "facts, connections, group, one round of pairs, one format"
    document = json.loads(result.stdout)
    assert [pair["first"] for pair in document["pairs"]] == [0]
    assert document["formats"] == [{"bf16": "ok"}] * 2
    assert result.exit_code == bool(document["problems"])
