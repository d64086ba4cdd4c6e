"""``moelink plan``, ``plan fit`` and ``plan check`` as typed: what is printed, written and drawn, what is refused."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner, Result

from moelink.tools.cli import app as commands
from moelink.tools.cli import main
from tests.plan.plan_ranks import bench_document

ASSUMED = ["--nvlink", "360", "--net", "45", "--latency", "10"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(commands.app, ["plan", *arguments])


def document_of(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def fails(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that is refused."""
    monkeypatch.setattr(sys, "argv", ["moelink", "plan", *arguments])
    assert main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


def results(folder: Path, ranks: int = 4, factor: float = 1.0) -> Path:
    """A result whose times are 10 us and 20 (combine 40) us for 128 tokens."""
    times = [
        {"tokens": t, "dispatch": factor * (10 + 20 * t / 128), "combine": factor * (10 + 40 * t / 128)}
        for t in (1, 128, 4096)
    ]
    path = folder / f"{ranks}-{factor}.json"
    path.write_text(json.dumps(bench_document(ranks, times)))
    return path


def test_the_package_s_constants_are_used_and_named() -> None:
    said = run("--ranks", "2..4").stdout
    for words in ("fitted: moelink/tools/plan/constants.json", "measured on NVIDIA H200", "decode_after_2xh200.json"):
        assert words in said
    assert "extrapolated" not in said
    assert "extrapolated: the constants were fitted to 2, 4 ranks" in run("--ranks", "8").stdout


def test_the_plan_of_the_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelink.tools.plan.packaged_constants", commands_constants)
    document = document_of(
        "--experts", "256", "--topk", "8", "--hidden", "7168", "--tokens", "128", "--ranks", "8..2048",
        "--ranks-per-node", "8", *ASSUMED, "--routing", "uniform",
    )  # fmt: skip
    assert document["schema_version"] == 1
    assert [size["ranks"] for size in document["sizes"]] == [8 << i for i in range(9)]
    assert [size["nodes"] for size in document["sizes"]] == [1 << i for i in range(9)]
    assert [size["idle_ranks"] for size in document["sizes"]][-4:] == [0, 256, 768, 1792]
    for size in document["sizes"]:
        for copies in ("rank", "node"):
            for phase in ("dispatch", "combine"):
                entry = size["schemes"][copies][phase]
                assert entry["time"]["total_us"] > 10
                assert (entry["links"]["network"] > 0) == (size["nodes"] > 1)
                assert entry["time"]["limit"] == ("NVLink" if size["nodes"] == 1 else "network")
        across, within = size["schemes"]["rank"]["dispatch"], size["schemes"]["node"]["dispatch"]
        fewer = within["links"]["total_network"] < across["links"]["total_network"]
        assert fewer == (1 < size["nodes"] < 32), "a relay has 4 bytes for every rank"
        assert within["links"]["total_nvlink"] >= across["links"]["total_nvlink"]
    assert not document["constants"]["measured"]
    assert document["constants"]["sources"] == {
        "floor_us": "assumed: --latency 10", "nvlink_gb_per_s": "assumed: --nvlink 360",
        "network_gb_per_s": "assumed: --net 45",
    }  # fmt: skip


def test_text_says_that_times_rest_on_assumptions() -> None:
    said = run("--ranks", "8..16", *ASSUMED).stdout
    for words in (
        "Times rest on assumptions given on the command line",
        "assumed: --net 45",
        "two_level=True",
        "113.79 MB",
    ):
        assert words in said
    assert said.isascii()


def test_without_constants_there_are_bytes_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelink.tools.plan.packaged_constants", commands_constants)
    said = run("--ranks", "8..16").stdout
    assert "No times: no constant of the model is fitted or given." in said
    assert re.findall("give (--[a-z]+), (?:us|GB/s)", " ".join(said.split())) == ["--latency", "--nvlink", "--net"]
    assert "4.48 MB" in said
    document = document_of("--ranks", "8")
    assert document["sizes"][0]["schemes"]["rank"]["dispatch"]["time"]["total_us"] is None
    assert document["constants"]["sources"] == {}


def test_the_output_says_why_times_are_missing_and_which_parts_are_hidden() -> None:
    said = " ".join(run("--ranks", "8..16").stdout.split())
    reason = "Times are missing (-): no fitted constant for network, because no run that shows it was measured"
    assert f"{reason}; give --net, GB/s of a rank's network in one direction." in said
    assert "are missing" not in run("--ranks", "8..16", "--net", "45").stdout
    lines = run("--ranks", "8,16").stdout.splitlines()
    few, many = (line.split() for line in lines if "hidden" in line and line.split()[0].isdigit())
    assert (few[4], many[3]) == ("hidden", "hidden"), "arithmetic of few rows, weights of many"
    assert "0.0" not in few + many


def commands_constants() -> Any:
    """What a package without a file of constants has."""
    from moelink.tools.plan import Constants

    return Constants()


def test_a_trace_a_file_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "trace.npy", np.random.default_rng(0).integers(0, 16, size=(50, 2)))
    small = ["--experts", "16", "--topk", "2", "--hidden", "256", "--tokens", "9", "--ranks", "2,4,8..32"]
    options = [*small, "--ranks-per-node", "4", "--routing", str(tmp_path / "trace.npy"), "--format", "bf16"]
    pictures = (
        ("a.png", ASSUMED),
        ("b.svg", []),
        ("c.png", ["--ranks", "8"]),
        ("d.png", ["--transport", "collective"]),
    )
    for name, extra in pictures:
        done = run(*options, *extra, "--out", str(tmp_path / "deep" / "plan.json"), "--plot", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).stat().st_size > 10_000
    document = json.loads((tmp_path / "deep" / "plan.json").read_text())
    assert document["routing"] == "trace.npy, 50 tokens"
    assert run(*small, "--plot", str(tmp_path / "x.nothing")).exit_code == 2


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "8..100"], "ranks: expected a range that doubling reaches"),
        (["--ranks", "12"], "ranks: expected a multiple of ranks_per_node = 8"),
        (["--hidden", "100"], "hidden_size: expected a multiple of 128"),
        (["--routing", "skewed"], "routing: expected 'uniform', 'zipf' or the path"),
        (["--nvlink", "0"], "nvlink_gb_per_s: expected a positive number"),
        (["--latency", "-1"], "floor_us: expected microseconds"),
    ],
)
def test_what_is_refused_is_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in fails(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_fit_then_plan_then_check(tmp_path: Path) -> None:
    constants = tmp_path / "constants.json"
    done = run("fit", str(results(tmp_path)), "--out", str(constants))
    assert done.exit_code == 0, done.output
    assert "largest error 0.0 %" in done.stdout
    document = document_of("--ranks", "4..16", "--constants", str(constants), "--tokens", "128")
    times = [size["schemes"]["rank"]["dispatch"]["time"] for size in document["sizes"]]
    assert times[0]["total_us"] == pytest.approx(30, rel=1e-3)
    assert (times[2]["total_us"], times[2]["missing"]) == (None, ["network_gb_per_s"])
    assert [size["extrapolated"] for size in document["sizes"]] == [False, True, True]
    assert document["constants"]["measured"]
    said = run("--ranks", "4,8", "--constants", str(constants)).stdout
    for words in ("fitted: constants.json", "measured on Some GPU", "extrapolated: the constants were fitted to 4"):
        assert words in said
    assert "assum" not in said
    good = run("check", str(results(tmp_path)), "--constants", str(constants))
    assert good.exit_code == 0, good.output


def test_check_fails_when_a_prediction_is_too_far_off(tmp_path: Path) -> None:
    constants = tmp_path / "constants.json"
    run("fit", str(results(tmp_path)), "--out", str(constants))
    slower = str(results(tmp_path, factor=1.25))  # predictions are 20 % below
    far = run("check", slower, "--constants", str(constants), "--json", "--out", str(tmp_path / "check.json"))
    assert far.exit_code == 1
    assert "20.0 % off, 15 % allowed" in far.stderr
    document = json.loads((tmp_path / "check.json").read_text())
    assert document == json.loads(far.stdout)
    assert len(document["rows"]) == 6
    assert document["largest_error"] == pytest.approx(0.2, abs=1e-4)
    chosen = run("check", slower, "--constants", str(constants), "--within", "21", "--tokens", "128", "--json")
    assert chosen.exit_code == 0, chosen.output
    assert {row["tokens"] for row in json.loads(chosen.stdout)["rows"]} == {128}
    assert run("check", slower, "--constants", str(constants), "--tokens", "7").exit_code == 1


def test_check_without_constants_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelink.tools.plan.packaged_constants", commands_constants)
    done = run("check", str(results(tmp_path)))
    assert done.exit_code == 1
    assert "constants are missing; give --constants" in done.stderr


def test_other_files_are_no_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(ROOT / "benchmarks" / "results" / "collective_vs_topk.json")
    said = fails("check", other, monkeypatch=monkeypatch, capsys=capsys)
    assert "JSON files of moelink bench or moelink bench layer, with 'moelink bench' or" in said
    assert "as benchmark, got \"'collective_vs_topk' in collective_vs_topk.json\"" in said


@pytest.mark.parametrize("page", ["docs/plan.md", "docs/multi-node.md", "README.md"])
def test_the_commands_of_the_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    for ranks in (2, 4, 8):
        results(tmp_path / "results", ranks).rename(tmp_path / "results" / f"{ranks}gpus.json")
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    lines = [line for line in lines if line.startswith("moelink plan")]
    assert lines
    for line in lines:
        done = run(*shlex.split(line, comments=True)[2:])
        # The made-up results do not scale as links do, so that a check may find what it is there to find.
        assert done.exit_code == 0 or " % allowed" in done.stderr, (line, done.output)


def test_redundant_experts_even_the_ranks() -> None:
    command = ["plan", "--experts", "64", "--topk", "4", "--routing", "zipf", "--ranks", "4,128"]
    command += ["--ranks-per-node", "128", "--json"]
    plain, placed = (
        json.loads(CliRunner().invoke(commands.app, [*command, *extra]).stdout) for extra in ([], ["--redundant", "8"])
    )
    assert (plain["redundant_experts"], placed["redundant_experts"]) == (0, 8)
    before, after = plain["sizes"][0], placed["sizes"][0]
    assert before["imbalance"] == after["imbalance"] > 2
    assert 1.0 <= after["imbalance_placed"] < before["imbalance_placed"] < before["imbalance"]
    assert placed["sizes"][1]["imbalance_placed"] is None, "72 physical experts for 128 ranks"
