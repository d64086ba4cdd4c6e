"""The bench from end to end: the smoke preset, what is made of its result, and the gate."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest
import torch

import moelink
from moelink.formats import get_format
from moelink.tools.cli import main
from moelink.tools.results import COLLECTIVE, SYMMETRIC
from moelink_bench import Case, make_plan, ranks, render, run, timing
from moelink_bench.ceiling import CeilingSamples
from moelink_bench.contenders import MoelinkContender, check_transports, compacted, first_difference
from moelink_bench.measure import PhaseSamples
from moelink_bench.names import PEERS
from moelink_bench.presets import SMOKE
from moelink_bench.report import RankReport, RankRow
from moelink_bench.workload import Batch, make_workload, rank_batch
from tests.bench import bench_ranks

SMALL = Case(tokens=4, hidden_size=64, num_experts=6, topk=2, format="bf16")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of the smoke preset, by the command that a user types, in this process: its ranks interpret faster."""
    out = tmp_path_factory.mktemp("bench") / "deep" / "smoke.json"
    arguments = ["moelink", "bench", "--preset", "smoke", "--out", str(out), "--json"]
    run_peer = run.run_peer

    def kept_before(plan: Any, peer: Any, program: Any) -> Any:
        shutil.copy(out, out.with_name(f"before-{peer}.json"))
        return run_peer(plan, peer, program)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as log:
        patch.setattr("sys.argv", arguments)
        patch.setattr(run, "run_peer", kept_before)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0, log.getvalue()
    assert json.loads(said.getvalue()) == json.loads(out.read_text())
    assert "starting 2 ranks" in log.getvalue()
    return out


def test_smoke_result_has_everything(smoke: Path) -> None:
    document = json.loads(smoke.read_text())
    head = {"schema_version", "benchmark", "preset", "date", "command", "commit", "dirty", "versions", "host"}
    rest = {
        "variables",
        "device",
        "devices",
        "ranks",
        "settings",
        "gate",
        "method",
        "bytes_formula",
        "ceiling",
        "cases",
    }
    last = {"rows", "rule", "verdicts", "faster_everywhere", "at_the_wire_everywhere", "speed_gate", "published"}
    assert set(document) == head | rest | last
    assert (document["schema_version"], document["benchmark"], document["preset"]) == (1, "moelink bench", "smoke")
    assert (document["ranks"], document["device"], document["devices"]) == (2, "cpu", ["CPU", "CPU"])
    assert {"torch", "triton", "moelink", "python", "cuda", "nccl"} <= set(document["versions"])
    # Typed with the whole path, which is nobody else's business.
    assert document["command"] == "moelink bench --preset smoke --out smoke.json --json"
    assert document["gate"]["passed"]
    assert len(document["gate"]["checked"]) == len(document["cases"]) == 3
    assert document["gate"]["checked"][2].startswith("3 tokens, fp8_block128, by rank, views, quantised: " + COLLECTIVE)
    assert document["ceiling"]["gb_per_s"] > 0
    assert len(document["ceiling"]["by_rank"]) == 2
    assert all(case["capacity"] >= 1 and case["dispatch"]["busiest"] > 0 for case in document["cases"])
    assert document["at_the_wire_everywhere"] is None
    assert document["published"] == [], "of other sizes"


def test_a_run_that_is_ended_leaves_what_it_has_measured(smoke: Path) -> None:
    """Before each library the file has all rows, of which later ones say that they were not reached."""
    document = json.loads(smoke.read_text())
    cases = make_plan("smoke", ranks=2, device="cpu").cases
    for reached, peer in enumerate(PEERS):
        so_far = json.loads(smoke.with_name(f"before-{peer}.json").read_text())
        assert [row["contender"] for row in so_far["rows"]] == [row["contender"] for row in document["rows"]]
        later = {name for one in PEERS[reached:] for case in cases for name in run.names_of(one, case)}
        for row, last in zip(so_far["rows"], document["rows"], strict=True):
            if row["contender"] in later:
                assert (row["reason"], row["phases"]) == ("was not reached", {})
            else:
                assert row == last


def test_smoke_rows_have_baseline_first_and_figures(smoke: Path) -> None:
    document = json.loads(smoke.read_text())
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for index in range(3):
        rows = [row for row in document["rows"] if row["case"] == index]
        one_sided = ["FlashInfer one-sided", "FlashInfer as engines call it"]
        library = one_sided if index == 2 else ["FlashInfer + permute + sum"]
        ours = [COLLECTIVE] if index < 2 else []  # with rows by rank it is what others are compared with
        assert [row["contender"] for row in rows] == [*ours, "torch all_to_all_vdev_2d", *library, SYMMETRIC]
        for row in rows[len(ours) : -1]:
            assert row["reason"] == "runs on CUDA devices only"
            assert row["phases"] == {}
        for row in (*rows[: len(ours)], rows[-1]) if interpreted else rows[: len(ours)]:
            assert row["reason"] == ""
            assert list(row["phases"]) == ["dispatch", "combine", "both"]
            for phase in row["phases"].values():
                figure = phase["eager"]
                assert 0 < figure["p20"] <= figure["median"] <= figure["p80"]
                assert figure["skew"] >= 0
                assert figure["samples"] == 1
                assert phase["share_of_ceiling"] > 0
                assert phase["graph"] is None
                assert "graph" in phase["note"] or "alone only between events" in phase["note"]
    assert len(document["verdicts"]) == (9 if interpreted else 0)
    for verdict in document["verdicts"]:
        assert len(verdict["duels"]) == (verdict["case"] < 2)
        for duel in verdict["duels"]:
            assert (duel["contender"], duel["method"]) == (COLLECTIVE, "eager")
            assert duel["ratio"] == pytest.approx(duel["theirs"] / duel["ours"])
            assert verdict["faster"] == (duel["ours"] < duel["theirs"])
        kind = {0: "whole operation", 1: "whole operation", 2: "like for like"}[verdict["case"]]
        assert verdict["kind"] == (kind if verdict["phase"] == "both" else "phase")
        assert verdict["counts"] == (verdict["phase"] == "both")
    for comparison, cases in zip(document["speed_gate"]["comparisons"], ("2", "01"), strict=True):
        assert (comparison["won"], comparison["cases"], comparison["passed"] is True) == (0, 0, False)
        if interpreted:
            assert comparison["missing"] == [document["cases"][int(index)]["label"] for index in cases]
            assert comparison["reasons"] == ["runs on CUDA devices only"]


def test_a_plan_reads_the_times_of_a_result(smoke: Path) -> None:
    from moelink.tools.plan.fit import points_of

    document = json.loads(smoke.read_text())
    points = points_of(document, "smoke.json", contender=COLLECTIVE)
    assert [(p.layer.tokens, p.layer.dispatch_format, p.routing, p.phase, p.method) for p in points] == [
        (5, "bf16", "uniform", "dispatch", "eager"), (5, "bf16", "uniform", "combine", "eager"),
        (3, "fp8_block128", "zipf", "dispatch", "eager"), (3, "fp8_block128", "zipf", "combine", "eager"),
    ]  # fmt: skip
    assert all(point.measured_us > 0 and point.links.nvlink > 0 for point in points)
    # Drawn bytes fluctuate around the expected ones, a good deal with five tokens.
    for point in points[:2]:
        counted = document["cases"][0][point.phase]
        assert 0.5 < point.links.total_nvlink / counted["total"] < 2


def test_results_are_shown_and_drawn(smoke: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from moelink.tools.cli.console import make_console
    from moelink_bench.picture import points_of
    from moelink_bench.view import view

    document = json.loads(smoke.read_text())
    console = make_console()
    console.print(view(console, document))
    text = capsys.readouterr().out
    gate = "NOT passed" if document["speed_gate"]["passed"] is False else "not judged"
    said = ("correctness gate passed in 3 cases", COLLECTIVE, "runs on CUDA devices only", f"speed gate: {gate}")
    for words in (*said, "5 tokens, bf16"):
        assert words in text
    assert {point.tokens for point in points_of(document)} == {5}, "neither skewed routing nor rows by rank"
    other = {**document, "ranks": 4}
    (tmp_path / "other.json").write_text(json.dumps(other))
    for name in ("bench.png", "bench.svg"):
        done = run_main("bench", "plot", str(smoke), str(tmp_path / "other.json"), "--out", str(tmp_path / name))
        assert done == 0
        assert (tmp_path / name).stat().st_size > 10_000


def test_results_become_a_table(smoke: Path) -> None:
    document = json.loads(smoke.read_text())
    table = render.speed_table(document)
    assert "| 5 tokens, bf16 | moelink collective | " in table
    assert "FlashInfer + permute + sum did not run with 5 tokens, bf16: runs on CUDA devices only." in table
    assert table in render.page([("smoke.json", document)])
    assert render.speed_summary([document]) == render.claim([document]) == "", "neither decode nor prefill"
    marked = "a\n<!-- speed: begin -->\nold\n<!-- speed: end -->\nb\n"
    assert render.between(marked, "speed", "new") == marked.replace("old", "new")
    assert render.between(marked, "speed", "") == marked.replace("old\n", "")


def run_main(*arguments: str) -> int:
    """The command line in this process."""
    from typer.testing import CliRunner

    from moelink.tools.cli import app

    return CliRunner().invoke(app.app, list(arguments)).exit_code


def test_what_cannot_be_written_or_read_is_said_in_a_line(smoke: Path, tmp_path: Path) -> None:
    """Before anything is measured, where it is about a result that has yet to be made."""
    from typer.testing import CliRunner

    from moelink.tools.cli import app

    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    for arguments in (
        ["bench", "--preset", "smoke", "--out", str(blocked / "x.json")],
        ["bench", "--preset", "smoke", "--plot", str(blocked / "x.png")],
        ["bench", "plot", str(smoke), "--out", str(blocked / "x.png")],
    ):
        done = CliRunner().invoke(app.app, arguments)
        assert done.exit_code == 2
        assert f"Invalid value for {arguments[-2]}: cannot write " in done.output
        assert "starting" not in done.output
    for text in ("# not JSON", "{}", '{"benchmark": "pairs"}'):
        blocked.write_text(text)
        done = CliRunner().invoke(app.app, ["bench", "plot", str(blocked), "--out", str(tmp_path / "x.png")])
        assert isinstance(done.exception, moelink.ConfigError), done.output
        assert "results: expected JSON files of moelink bench" in str(done.exception)
    assert not (tmp_path / "x.png").exists()


def test_a_red_gate_shows_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "moelink_main", bench_ranks.broken_combine_main)
    ensure_running()  # ranks of other tests come from the same server, and triton may be loaded there
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    out = tmp_path / "red.json"
    arguments = ["moelink", "bench", "--preset", "smoke", "--format", "bf16", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "the correctness gate failed, no figures: 5 tokens, bf16: rank 1: moelink collective: combine" in said.err
    assert not out.exists()


def test_a_red_document_has_no_figure() -> None:
    plan = make_plan("smoke", ranks=2, device="cpu")
    red = RankReport(device="CPU", gate="broken", ceiling=CeilingSamples(0, (), "none"))
    document = run.make_document(plan, [red, red], [], commit="abc", command="")
    assert document["gate"] == {"passed": False, "fault": "broken", "checked": []}
    assert document["commit"] == "abc"
    assert not {"rows", "cases", "ceiling", "verdicts"} & set(document)


def one_rank_case(fmt: str, layout: str, zero_copy: bool = False, quantised: bool = False) -> tuple[Case, Batch]:
    case = dataclasses.replace(
        SMALL, format=fmt, hidden_size=256, layout=layout, zero_copy=zero_copy, quantised=quantised and fmt != "bf16"
    )
    return case, rank_batch(case, seed=3, rank=0, copy=0, world_size=1, device=CPU)


class Spoiled:
    """A communicator whose dispatch or combine returns something else."""

    def __init__(self, ep: moelink.Communicator, phase: str) -> None:
        self._ep, self._phase = ep, phase

    def dispatch(self, *args: object, **options: object) -> moelink.DispatchOutput:
        recv = self._ep.dispatch(*args, **options)
        if self._phase == "dispatch":
            recv.src_info.view(-1)[1] += 1
        return recv

    def combine(self, *args: object) -> torch.Tensor:
        out = self._ep.combine(*args)
        return out * 1.1 if self._phase == "combine" else out

    def check(self) -> None:
        self._ep.check()


OF_VIEWS = [pytest.param(form, marks=pytest.mark.quick("other rows")) for form in ("views", "quantised views")]


@pytest.mark.parametrize("layout", ["expert", "rank", *OF_VIEWS])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128", "nvfp4"])
def test_the_gate_accepts_what_is_right_and_names_what_is_not(fmt: str, layout: str) -> None:
    views, quantised = layout.endswith("views"), layout.startswith("quantised")
    layout = "rank" if views else layout
    case, batch = one_rank_case(fmt, layout, views, quantised)
    sizes = {"num_experts": 6, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 4, "dispatch_format": fmt}
    sizes |= {"layout": layout, "zero_copy": views}
    with moelink.init(**sizes, transport="collective") as ep:
        check = {"batch": batch, "case": case, "rank": 0, "world_size": 1}
        assert check_transports({"one": ep, "two": ep}, **check) == ""
        wrong = check_transports({"one": ep, "two": Spoiled(ep, "combine")}, **check)
        assert wrong.startswith("two: combine differs from the layer's result in ")
        assert "two: dispatch differs from one in src_info" in check_transports(
            {"one": ep, "two": Spoiled(ep, "dispatch")}, **check
        )


class Noting:
    """A communicator that notes what its dispatch is given."""

    def __init__(self, ep: moelink.Communicator) -> None:
        self._ep = ep
        self.config, self.device, self.given = ep.config, ep.device, []

    def dispatch(self, *args: torch.Tensor, **options: object) -> moelink.DispatchOutput:
        self.given.append((args[0].dtype, getattr(options["scales"], "dtype", None)))
        return self._ep.dispatch(*args, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._ep, name)


@pytest.mark.quick("another input, same contract")
@pytest.mark.parametrize("fmt", ["fp8_block128", "nvfp4"])
def test_rows_that_come_quantised_are_the_same_rows(fmt: str) -> None:
    """What contenders and the gate dispatch is in the format already, and arrives as if dispatch had made it."""
    case, batch = one_rank_case(fmt, "rank", zero_copy=True, quantised=True)
    sizes = {"num_experts": 6, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 4, "dispatch_format": fmt}
    workload = make_workload(case, SMOKE, rank=0, world_size=1, device=CPU)
    with moelink.init(**sizes, layout="rank", zero_copy=True, transport="collective") as ep:
        contender = MoelinkContender(workload, transport="collective", device=CPU, timeout=60.0)
        contender.ep = noting = Noting(contender.ep)
        made, recv = workload.batches[0], contender.dispatch(0)
        plain = ep.dispatch(made.x, made.topk_ids, made.topk_weights)
        assert first_difference(compacted(recv), compacted(plain), case) == ""
        assert contender.combine(0, recv).shape == made.x.shape
        assert check_transports({"noting": noting}, batch, case, rank=0, world_size=1) == ""
        assert noting.given == [(get_format(fmt).payload_dtype, get_format(fmt).scale_dtype)] * 2
        contender.close()


@pytest.mark.quick("needs no rank")
def test_kernels_are_compiled_ahead_once_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of SM limits too, by calls of communicators without one: open limits would have to fit the device."""
    cases = (*make_plan("sms", ranks=2, device="cuda", tokens=(4096,), num_sms=(24, 64)).cases,
             *make_plan("layouts", ranks=2, device="cuda", tokens=(1,)).cases)  # fmt: skip
    plan = dataclasses.replace(make_plan("sms", ranks=2, device="cuda"), cases=(*cases, cases[0]))
    opened: list[Case] = []
    compiled: list[tuple[Case, bool, int | None]] = []

    def note(ep: Case, *, quantised: bool, num_sms: int | None) -> None:
        compiled.append((ep, quantised, num_sms))

    monkeypatch.setattr(run, "open_communicator", lambda case, **_: opened.append(case) or nullcontext(case))
    monkeypatch.setattr(run, "compile_calls", note)
    monkeypatch.setattr(timing, "everyone", lambda value: [value])
    for rank in (0, 1):
        run.compile_ahead(plan, rank, 2, torch.device("cuda", rank))
    assert {case.num_sms for case in opened} == {None}
    assert len(opened) == 2 * len(set(opened)), "each once on each rank"
    wanted = {(dataclasses.replace(c, num_sms=None, quantised=False), c.quantised, c.num_sms) for c in plan.cases}
    assert set(compiled) == wanted
    assert len(compiled) == len(wanted) == 7


def test_presets_for_gpus_are_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["moelink", "bench", "--preset", "decode"])
    assert main() == 2
    assert "smoke" in capsys.readouterr().err


def test_peers_that_cannot_run_say_why() -> None:
    plan, by_rank_plan = (
        make_plan("decode", ranks=2, device="cuda", **fields) for fields in ({"num_sms": 16}, {"layout": "rank"})
    )
    for peer, count in (("vdev", 10), ("flashinfer", 15)):
        rows = run.run_peer(dataclasses.replace(plan, device="cpu"), peer, bench_ranks.broken_combine_main)
        assert [row.reason for row in rows[1]] == ["runs on CUDA devices only"] * count
    by_expert, by_rank = (
        run.run_peer(one, "vdev", bench_ranks.broken_combine_main)
        for one in (
            dataclasses.replace(plan, cases=plan.cases[::2]),
            dataclasses.replace(by_rank_plan, cases=by_rank_plan.cases[1::2]),
        )
    )
    assert by_expert == by_rank
    assert {row.reason for row in by_rank[0]} == {"has no SM limit and no rows by rank"}
    with pytest.raises(moelink.ConfigError, match="peers: expected some of vdev, flashinfer, got 'nccl'"):
        make_plan("decode", ranks=2, device="cuda", peers=["nccl"])
    assert ranks.last_line("Traceback:\n  File x\nRuntimeError: it broke\n\n") == "RuntimeError: it broke"


def test_rows_of_a_peer_are_merged_in_order() -> None:
    plan = make_plan("smoke", ranks=2, device="cpu", formats=("bf16",))
    plan = dataclasses.replace(plan, cases=plan.cases[:1])
    samples = {"dispatch": PhaseSamples(eager=(1.0, 2.0))}
    own = (RankRow(0, COLLECTIVE, phases=samples), RankRow(0, SYMMETRIC, phases=samples))
    report = RankReport("CPU", "", CeilingSamples(0, (), "none"), ("ok",), (((1, 2),),), (16,), own)
    peers = [[RankRow(0, "peer", reason="because")]] * 2
    document = run.make_document(plan, [report, report], peers, commit=None, command="")
    assert [row["contender"] for row in document["rows"]] == [COLLECTIVE, "peer", SYMMETRIC]
    method = document["ceiling"]["method"]
    assert document["ceiling"] == {"gb_per_s": None, "by_rank": [], "method": method, "reason": "none"}
    assert document["cases"][0]["wire_us"] == {"dispatch": None, "combine": None, "both": None}
    assert json.loads(json.dumps(document)) == document


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(500)
def test_a_small_run_on_gpus(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "moelink", "bench", "--preset", "decode", "--tokens", "16", "--samples", "4"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False, timeout=450)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    whole, by_rank = (row for row in document["rows"] if row["contender"] == SYMMETRIC)
    for name, phase in whole["phases"].items():
        assert phase["graph"]["median"] > 0
        assert (phase["pairs"] is None) == (name == "both"), phase["note"]
        assert all(kernel.startswith("ep_") for kernel in phase["kernels"])
    for name, phase in by_rank["phases"].items():  # calls of views alternate, so no phase is repeated alone
        assert (phase["graph"] is None) == (phase["pairs"] is not None) == (name != "both"), phase["note"]
    assert document["ceiling"]["gb_per_s"] > 10
