"""Benchmarks that are started on their own: what of them needs no GPU."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moelink.errors import MoelinkError
from moelink.memory.workspace import Workspace
from moelink.tools.cli import app
from moelink_bench import (
    Case,
    batch_invariance,
    command,
    contenders,
    document,
    first_result,
    host,
    launchers,
    membership,
    ncu,
    quotients,
    sweep,
)
from moelink_bench.measure import PHASES
from moelink_bench.names import SCRIPTS
from moelink_bench.script import Script, main_of
from moelink_bench.timing import WallClock
from moelink_bench.workload import rank_batch
from tests.support.paths import ROOT

SMALL = Case(tokens=4, hidden_size=64, num_experts=6, topk=2, format="bf16")
CPU = torch.device("cpu")
RESULTS = ROOT / "benchmarks" / "results"


def test_every_result_has_a_command_that_exists() -> None:
    """The table of benchmarks/results/README.md names every file, and only modules that are there."""
    text = (RESULTS / "README.md").read_text()
    presets = re.search(r"`PRESET_Nxh200.json` \(([a-z, ]+)\)", text)
    assert presets is not None
    names = "|".join(presets[1].split(", "))
    for path in RESULTS.glob("*.json"):
        assert f"`{path.name}`" in text or re.fullmatch(rf"({names})_\dxh[12]00\.json", path.name), path.name
    modules = set(re.findall(r"-m (moelink_bench\.[a-z0-9_.]+)", text))
    assert len(modules) >= 6
    for module in modules:
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_explain_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the command, which passes what follows to them, ``--help`` too, and the modules that are started."""
    text = importlib.import_module(f"moelink_bench.{name}").__doc__ or ""
    done = CliRunner().invoke(app.app, ["bench", name, "--help"])
    assert done.exit_code == 0, done.output
    with pytest.raises(SystemExit) as ended:
        main_of(name)(["--help"])
    assert ended.value.code == 0
    for said in (done.output, capsys.readouterr().out):
        assert text.splitlines()[0] in " ".join(said.split())


@pytest.mark.quick("each is refused elsewhere")
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("collective", ["--topk", "100", "--num-experts", "4"], "topk: expected at most num_experts = 4, got 100"),
        ("collective", ["--ranks", "0"], "argument --ranks: invalid positive value: '0'"),
        ("host", ["nothing"], "invalid choice: 'nothing'"),
        ("host", ["calls", "--device", "cuda"], "device: expected cpu on a machine without a CUDA device, got 'cuda'"),
        ("launchers", ["--formats", "fp3"], "argument --formats: invalid choice: 'fp3'"),
        ("sweep", ["--tokens", "-1"], "argument --tokens: invalid positive value: '-1'"),
        ("sweep", [], "sweep: expected a rank of torchrun"),
        ("ncu", ["run", "--format", "fp3"], "argument --format: invalid choice: 'fp3'"),
    ],
)
def test_scripts_refuse_wrong_arguments_with_status_2(
    name: str, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moelink.testing.multiprocessing", None)  # before ranks start
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = main_of(name)(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert words in capsys.readouterr().err


def test_subcommands_are_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, which the command has imported, is there before a script could choose its interpreter."""
    started: list[list[str]] = []
    monkeypatch.setattr(command.subprocess, "call", lambda words: started.append(words) or 3)
    typed = [["launchers", "--ranks", "2", "--out", "x.json"], ["sweep", "--tokens", "1", "32", "--", "80,316,8,80"]]
    assert [CliRunner().invoke(app.app, ["bench", *words]).exit_code for words in typed] == [3, 3]
    assert started == [[sys.executable, "-m", f"moelink_bench.{name}", *given] for name, *given in typed]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_launchers_are_compared_with_a_communicator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "launchers.json"
    sizes = "--tokens 2 --ranks 1 2 --formats bf16 fp8_block128 --hidden-size 128 --experts 4 --topk 2 --samples 2"
    monkeypatch.setattr(sys, "argv", ["launchers", *sizes.split(), "--out", str(out), "--commit", "abc1234"])
    launchers.main()
    result = json.loads(out.read_text())
    assert (result["benchmark"], result["schema_version"], result["gate"]["passed"]) == ("launchers", 1, True)
    assert [(row["ranks"], row["form"], row["case"]["format"]) for row in result["rows"]] == [
        (1, "fused", "bf16"), (1, "fused", "fp8_block128"), (2, "split", "bf16"), (2, "split", "fp8_block128"),
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["us"].keys() == {"launchers", "communicator"}
        assert all(figure["samples"] == 2 and figure["median"] > 0 for figure in row["us"].values())
        assert row["quotient"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_launchers_are_launched_as_a_communicator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels with the same options and as many CTAs, and constants that differ in where they count from."""
    from moelink.kernels.launch.launcher import Launcher

    launched: list[tuple[str, int, dict[str, Any]]] = []
    launch = Launcher.launch

    def noting(self: Launcher, kernel: Any, *args: Any, **more: Any) -> None:
        launched.append((kernel.function.__name__, kernel.count, kernel.options))
        launch(self, kernel, *args, **more)

    monkeypatch.setattr(Launcher, "launch", noting)
    for ranks in (1, 3):
        for fmt in ("bf16", "fp8_block128"):
            case = Case(tokens=5, hidden_size=128, num_experts=6, topk=2, format=fmt)
            given, kinds = launchers.inputs(case, ranks, CPU), []
            for side_of in (launchers.TransportSide, launchers.LauncherSide):
                side = side_of(case, given, CPU, 20.0)
                launched.clear()
                side.pair()
                side.check()
                kinds.append(sorted(map(str, launched)))
                side.close()
            assert kinds[0] == kinds[1]


def test_the_head_of_a_result_can_be_typed_again(tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    script = Script("host", "", lambda _: None, lambda args, save: made.append(save("ops_overhead", {})) or 0)
    assert script.main(["--out", str(tmp_path / "x.json"), "--commit", "abc1234"]) == 0
    (head,) = made
    assert head["command"] == "python -m moelink_bench.host --out x.json --commit abc1234"
    assert json.loads((tmp_path / "x.json").read_text()) == head
    assert (head["schema_version"], head["benchmark"], head["commit"], head["dirty"]) == (
        1,
        "ops_overhead",
        "abc1234",
        None,
    )
    assert head["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_the_profiler_runs_the_module_that_called_it() -> None:
    call = ncu.command(["--launch-skip", "4"], "bf16")
    assert call[:5] == ["ncu", "--clock-control", "none", "--launch-skip", "4"]
    assert call[call.index(sys.executable) :] == [
        sys.executable, "-m", ncu.__name__, "run", "--format", "bf16",
    ]  # fmt: skip


def test_of_a_report_that_is_read_only_its_commit_is_told(tmp_path: Path) -> None:
    report, out = tmp_path / "report.txt", tmp_path / "x.json"
    report.write_text("")
    assert ncu.main(["counters", "--read", str(report), "--commit", "abc", "--out", str(out)]) == 0
    described = ["method", "tokens", "topk", "num_experts", "hidden_size", "format", "kernels"]
    made = json.loads(out.read_text())
    assert (list(made), made["commit"]) == (["schema_version", "benchmark", "commit", *described], "abc")


def test_samples_are_condensed_to_the_hottest_instructions() -> None:
    add, load, cold = (
        ncu.Instruction(at, text, samples)
        for at, text, samples in (
            (16, "IADD", {"long_scoreboard": 3, "wait": 1}), (0, "LDG", {"wait": 2}), (32, "EXIT", {"barrier": 1})
        )
    )  # fmt: skip
    assert ncu.condense([add, cold, load], hottest=2) == {
        "samples": 7,
        "reasons": {"long_scoreboard": 42.9, "wait": 42.9, "barrier": 14.3},
        "hottest": [
            {"at": 0, "text": "LDG", "percent": 28.57, "reason": "wait"},
            {"at": 16, "text": "IADD", "percent": 57.14, "reason": "long_scoreboard"},
        ],
    }


def test_counters_are_read_from_a_profiler_s_report() -> None:
    """Of lines that look alike, those in the unit that is kept; numbers with thousands set apart."""
    report = """==PROF== Profiling "ep_x_kernel"
  ep_x_kernel (132, 1, 1)x(256, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Memory Throughput                 %        23.90
    Duration                         us       148.22
    Memory Throughput          Tbyte/s         1.15
    Executed Instructions         inst   44,569,537
  ep_y_kernel (7, 1, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Duration                         us         3.00
"""
    assert ncu.parse(report) == [
        {"kernel": "ep_x_kernel", "programs": 132, "threads": 256, "us": 148.22, "dram_tb_per_s": 1.15,
         "instructions": 44569537},
        {"kernel": "ep_y_kernel", "programs": 7, "threads": 128, "us": 3.0},
    ]  # fmt: skip


def test_a_sweep_s_settings_are_in_force_while_it_says_so() -> None:
    workspace = Workspace(SMALL.ep_config(0, 2))

    def spec() -> Any:
        return sweep.dispatching.dispatch_spec(
            workspace, CPU, input_dtype=torch.bfloat16, quantized=False, weights=True
        )  # fmt: skip

    usual = spec()
    fields = dict(map(sweep.field, ["TOKENS_PER_BATCH=3", "SCALES_LATER=0"]))
    with sweep.in_force(sweep.setting("3,5,4,80,8"), "dispatch", fields):
        assert spec().TOKENS_PER_BATCH == 3
        assert spec().BLOCK_SIZE == 8
        assert sweep.dispatching.dispatch_launch() == sweep.Launch(3, 5, num_warps=4, maxnreg=80)
    assert spec() == usual
    with sweep.in_force(sweep.setting("3,5,4,80,8"), "combine", fields):
        assert spec().TOKENS_PER_BATCH == usual.TOKENS_PER_BATCH


def test_a_sweep_rotates_inputs_and_closes_what_it_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the collective transport. Outputs stand for all inputs in pairs, for two of them in one phase."""
    opened: list[Any] = []

    def collective(case: Case, **given: Any) -> Any:
        assert given.pop("transport") == "symmetric"
        opened.append(contenders.open_communicator(case, **given, transport="collective"))
        return opened[-1]

    def called(call: Any, clock: Any) -> float:
        made = [call(i) for i in range(3)]
        taken = {getattr(one, "tokens", one).data_ptr() for one in made}
        rotated = 2 if phases == ("dispatch",) else 3
        assert len(taken) == (rotated if hasattr(made[0], "tokens") else 1)
        return 1.0

    monkeypatch.setattr(sweep, "open_communicator", collective)
    monkeypatch.setattr(sweep, "microseconds", called)
    data = [rank_batch(SMALL, seed=0, rank=0, copy=copy, world_size=1, device=CPU) for copy in range(3)]
    for phases in (PHASES, ("dispatch",)):
        assert sweep.measure(SMALL, phases, data, WallClock(), rows=2) == dict.fromkeys(phases, 1.0)
        assert opened[-1].config.capacity == 11 * SMALL.tokens + 512
    with pytest.raises(KeyError):
        sweep.measure(SMALL, ("neither",), data, WallClock(), rows=1)
    for ep in opened:
        with pytest.raises(MoelinkError, match="closed"):
            ep.check()


def test_the_router_is_timed_after_it_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On CPUs the chain of operators chooses the same experts as the twin; a wrong choice would end with 1."""
    sizes = "--device cpu --models mixtral deepseek-v3 --tokens 1 3 --samples 1"
    assert main_of("router")([*sizes.split(), "--out", str(tmp_path / "router.json")]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = json.loads((tmp_path / "router.json").read_text())
    assert (found["rows"], found["gate"]) == (rows, "passed")
    assert [(row["model"], row["tokens"]) for row in rows] == [
        ("mixtral", 1), ("mixtral", 3), ("deepseek-v3", 1), ("deepseek-v3", 3),
    ]  # fmt: skip
    assert all(row["same_ids"] == 1 and row["bits_of_twin"] and row["router_us"] > 0 for row in rows)


def test_multiplications_with_additions_round_once() -> None:
    """Against exact fractions, and where rounding to fp64 in between would land on the middle of two fp32."""
    fma = quotients.fma
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-40, 3, (3, 500), generator=generator)
    a, b, c = torch.randn(3, 500, generator=generator) * torch.exp2(exponents.float())
    for x, y, z, got in zip(*(t.tolist() for t in (a, b, c, fma(a, b, c))), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = [got, *(torch.nextafter(torch.tensor(got), torch.tensor(to)).item() for to in (9e9, -9e9))]
        assert min(near, key=lambda value: abs(Fraction(value) - exact)) == got
    a, b, c = (torch.tensor([value]) for value in (2.0**-24 * (1 + 2.0**-18), 1 - 2.0**-18, 1 + 2.0**-23))
    for sign in (1, -1):  # 2**-60 below the middle
        assert fma(sign * a, b, sign * c).item() == sign * (1 + 2.0**-23)
        assert (sign * a.double() * b.double() + sign * c.double()).float().item() == sign * (1 + 2.0**-22)


def test_rows_home_by_the_formula_are_those_of_all_choices() -> None:
    """Of 2 of 6 experts on 3 ranks, seen from rank 0."""
    choices = list(itertools.combinations(range(6), 2))
    for index, count in enumerate((lambda ids: len({e // 2 for e in ids} - {0}), lambda ids: sum(e > 1 for e in ids))):
        mean = sum(map(count, choices)) / len(choices)
        assert batch_invariance.rows_home(3, 6, 2)[index] == pytest.approx(mean)


def test_a_layer_whose_bits_depend_on_the_token_alone_is_compared(tmp_path: Path) -> None:
    out = tmp_path / "bits.json"
    sizes = "--ranks 2 --hidden-size 32 --intermediate-size 16 --num-experts 4 --topk 2 --iterations 1"
    assert batch_invariance.main([*sizes.split(), "--out", str(out), "--commit", "abc1234"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["dtype"], row["tokens"]) for row in rows] == [(d, t) for d in ("fp32", "bf16") for t in (1, 16, 128)]
    assert all(row["time_ratio"] > 0 and row["bytes_home"]["on"] >= row["bytes_home"]["off"] > 0 for row in rows)


def test_pauses_of_a_kill_and_an_admission_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "pauses.json"
    assert membership.main(["--ranks", "2", "--rounds", "1", "--out", str(out), "--commit", "abc1234"]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    names = ["step", "find", "mask", "first step masked", "admit", "first step admitted"]
    assert list(row["ms"]) == names
    assert all(0 < row["ms"][name]["min"] <= row["ms"][name]["median"] <= row["ms"][name]["max"] for name in names)


def test_users_type_until_the_first_command_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a clone"
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *author, "commit", "--quiet", "--allow-empty", "-m", "a"], check=True)
    users = {
        "one": first_result.User("words", ("TORCH", "test -f torch")),
        "two": first_result.User("nothing", ("false", "true")),
    }
    monkeypatch.setattr(first_result, "USERS", users)
    out = tmp_path / "users.json"
    given = ["--source", str(folder), "--torch", "touch torch", "--out", str(out), "--commit", "abc1234"]
    assert first_result.main(given) == 1
    one, two = json.loads(out.read_text())["rows"]
    assert one["reached"]
    assert re.fullmatch("[0-9a-f]{40}", one["cloned"])
    assert [step["command"] for step in one["steps"]] == ["git clone", "touch torch", "test -f torch"]
    assert not two["reached"]
    assert [(step["command"], step["status"]) for step in two["steps"]] == [("git clone", 0), ("false", 1)]
    assert first_result.main([*given, "--user", "one"]) == 0


def test_one_correction_makes_quotients_of_bf16_right() -> None:
    """The script's example, and a part of what it tries."""
    one = quotients.corrected(*(torch.tensor([value]) for value in (1.0, 3.0, 0.25, 0.5)))
    assert one.item() == 0.375
    found = quotients.measure(scale_bits=9)
    assert found["bf16_by_fp32"]["pairs"] == 128 * 512
    for wrong in (found["bf16_by_fp32"]["wrong"], found["fp32_by_448"]["wrong"]):
        assert wrong[0] > 0
        assert wrong[1:] == [0, 0]


def test_host_time_of_calls_is_measured_with_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that plays a GPU, with few batches."""
    for name, value in {"BATCHES": 2, "CALLS": 2, "WARMUP": 3}.items():
        monkeypatch.setattr(host, name, value)
    made = {**document.head("host_time", command="", commit="abc1234"), **host.calls_fields("cpu")}
    us = made["microseconds"]
    assert made["tensors_of_a_pair"] == 4
    assert all(us[part] > 0 for part in ("tensors", "launches", "pair", "pair, looked at", "bound pair", *host.TARGETS))
    assert us["own"] == round(us["pair"] - us["tensors"] - us["launches"], 1)
    table = host.times_table([("host_time_x.json", made)]).splitlines()
    assert f" {us['pair']:.1f} " in table[2]
    assert "GPU played" in table[2]
    assert "**40**" in table[3]


def test_metrics_are_measured_beside_calls_that_no_one_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that plays a GPU, with few batches."""
    for name, value in {"BLOCKS": 3, "BLOCK": 2}.items():
        monkeypatch.setattr(host, name, value)
    made = host.metrics_fields("cpu")
    more, us = made["more_a_call"], made["us"]
    assert more["low"] < more["mean"] < more["high"]
    assert more["mean"] == pytest.approx((us["on"]["mean"] - us["off"]["mean"]) / 2)
    assert more["mean"] > 0, "with a scrape in two pairs"
    assert made["scrape_us"]["p20"] > 0


def test_a_verdict_says_whose_the_time_is() -> None:
    def verdict(**us: float) -> str:
        return host.verdict("x.json", {"microseconds": us})

    assert "13.2 more than its target; the launches alone were not measured" in verdict(pair=53.2, tensors=9.0)
    near = verdict(pair=42.0, tensors=10.0, launches=12.0, own=20.0)
    assert "22.0 of it are the driver's launches and PyTorch's tensors, and 20.0 moelink's Python" in near
    assert near.endswith("with 18.0 of that the target would be met.")
    assert verdict(pair=62.0, tensors=20.0, launches=22.0, own=20.0).endswith("it would still take 42.0.")
    met = verdict(pair=39.0, tensors=10.0, launches=12.0, own=17.0, **{"bound dispatch": 15.5, "bound combine": 14.0})
    assert "within its target of 40. " in met
    assert met.endswith("Over 15 is a bound dispatch.")


def test_the_operators_are_judged_by_their_budget() -> None:
    def words(more: float) -> str:
        medians = {"direct": 60.0, "operator": 60.0 + more, "operator, gradients": 400.0, "choice": 2.0}
        return host.overhead_of({
            "rows": [{"tokens": 1, "us": {name: {"median": value} for name, value in medians.items()}}],
            "device": "cuda", "devices": ["NVIDIA H200"], "case": {"transport": "symmetric"}, "date": "2026-11-25",
            "versions": {"torch": "2.11.0"},
        })  # fmt: skip

    assert "of 250 and 400 µs is kept. One rank of the symmetric transport, NVIDIA H200" in words(200.0)
    assert "of 250 and 400 µs is exceeded" in words(251.0)
