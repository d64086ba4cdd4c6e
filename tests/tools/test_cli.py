"""The command line: exit codes, what goes to stdout and what to stderr, plain text without a terminal, --json."""

import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

import moelink
from moelink.env import VARIABLES
from moelink.testing import RankFailedError
from moelink.tools.cli import app as commands
from moelink.tools.cli import console as console_of
from moelink.tools.cli import main, missing_packages
from moelink.tools.cli.console import bar, make_console, quantity
from moelink.tools.cli.environment import inspect_environment
from moelink.tools.demo import DemoConfig, DemoReport, LayerConfig
from moelink.tools.demo.report import FormatResult
from moelink.tools.trace import TraceRun
from tests.support.commands import run_in_terminal, run_python

SMALL = ["--ranks", "2", "--tokens", "12", "--experts", "6", "--topk", "2", "--hidden", "128"]
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "moelink", *arguments, environment={**os.environ, **environment}, timeout=200)


def make_report(**changes: object) -> DemoReport:
    """A report that no run made."""
    result = FormatResult(
        format="bf16", combine_dtype="bfloat16", transport="collective", bytes_per_token=256, dispatch_bytes=3000,
        combine_bytes=2000, copies_dispatch_bytes=6000, copies_combine_bytes=4000, rounding_error=0.5,
        relative_error=0.001, allowed_error=0.01,
    )  # fmt: skip
    layer = LayerConfig(num_experts=3, topk=2, hidden_size=128)
    return DemoReport(
        config=DemoConfig(ranks=2, tokens_per_rank=3, formats=("bf16",), layer=layer), device="cpu", num_tokens=6,
        tokens_by_rank_and_expert=((1, 2, 3), (3, 3, 0)), remote_copies=5, remote_messages=4,
        formats=(dataclasses.replace(result, **changes),),
    )  # fmt: skip


def test_demo_json_of_a_real_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"It was the best of times, it was the worst of times")
    done = run_module("demo", *SMALL, "--format", "bf16", "--format", "mxfp8", "--text", str(text), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["passed"]
    assert document["num_tokens"] == 24
    assert [entry["format"] for entry in document["formats"]] == ["bf16", "mxfp8"]
    assert all(entry["passed"] and entry["wire_ratio"] > 0 for entry in document["formats"])
    assert sum(document["tokens_per_expert"]) == 24 * 2
    assert "starting 2 ranks" in done.stderr
    assert "mxfp8" in done.stderr


def test_demo_as_text_without_a_terminal() -> None:
    done = run_module("demo", *SMALL, "--format", "bf16")
    assert done.returncode == 0, done.stderr
    assert not ESCAPE.search(done.stdout + done.stderr)
    assert done.stdout.isascii()
    for words in ("Tokens per expert", "#####", "bf16", "ok", "one copy per expert", "rounding", "precision"):
        assert words in done.stdout


def test_demo_fails_when_the_error_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"rounding_error": 1.01}, {"relative_error": 0.0101}, {"rounding_error": float("nan")}):
        monkeypatch.setattr("moelink.tools.demo.run_demo", lambda *_, changes=changes: make_report(**changes))
        result = CliRunner().invoke(commands.app, ["demo"])
        assert result.exit_code == 1
        assert "FAILED" in result.stdout
        assert "bf16" in result.stderr


def test_demo_passes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelink.tools.demo.run_demo", lambda *_: make_report())
    result = CliRunner().invoke(commands.app, ["demo"])
    assert result.exit_code == 0
    assert "0.50" in result.stdout


def test_bad_settings_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("moelink.tools.demo.run.run_ranks", None)  # refused before ranks start
    monkeypatch.setattr(sys, "argv", ["moelink", "demo", "--format", "fp8_block128", "--hidden", "96"])
    assert main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "moelink: hidden_size: expected a multiple of 128 (the group of format 'fp8_block128'), got 96\n"


AT_ONCE = [
    ["--nothing"],
    ["nothing"],
    ["demo", "--topk", "40"],
    ["demo", "--ranks", "0"],
    ["demo", "--transport", "x"],
    ["demo", "--format", "fp3"],
    ["demo", "--text", "/no/file"],
    ["doctor", "--format", "bf61"],
    ["doctor", "--out", "/proc/no/file"],
    ["doctor", "--device", "gpu"],
    ["trace", "--format", "fp3"],
    ["trace", "--pairs", "17"],
    ["plan", "--topk", "300"],
    ["plan", "--format", "fp3"],
    ["plan", "--out", "/proc/no/file"],
    ["plan", "check", "/no/file"],
    ["plot", "/no/file", "--out", "a.png"],
    ["bench", "--preset", "x"],
    ["bench", "--preset", "smoke", "--format", "fp3"],
    ["bench", "--preset", "layer-smoke", "--out", "/proc/no/file"],
]
"""Arguments that are refused without torch."""


def test_wrong_arguments_end_with_status_2_before_torch_is_imported() -> None:
    code = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from moelink.tools.cli.app import app\n"
        f"for arguments in {AT_ONCE!r}:\n"
        "    done = CliRunner().invoke(app, arguments)\n"
        "    assert done.exit_code == 2, (arguments, done.output)\n"
        "    assert 'Error: ' in done.stderr and not done.stdout, (arguments, done.output)\n"
        "for arguments in (['--help'], ['demo', '--help'], ['bench', '--help'], ['--version']):\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.quick("each is refused elsewhere")
@pytest.mark.parametrize(
    ("arguments", "words", "environment"),
    [
        (["trace", "--topk", "9"], "expected at most the number of experts, 8, got 9", {}),
        (["trace", "--graph"], "expected ranks on CUDA devices, got ranks on CPUs", {}),
        (["trace", "--plot", "a.nothing"], "expected a file of ", {}),
        (["trace", "--device", "cuda"], "expected at most 0 CUDA devices, got 1", {}),
        (["doctor", "--device", "cuda", "--ranks", "2"], "expected at most 0 CUDA devices, got 2", {}),
        (["doctor", "--ranks", "3"], "expected 2, the launcher's, or no value, got 3", {"WORLD_SIZE": "2"}),
        (["bench", "--preset", "smoke", "--plot", "a.nothing"], "expected a file of ", {}),
    ],
)
def test_wrong_arguments_end_with_status_2_before_ranks_start(
    arguments: list[str], words: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("moelink.testing.multiprocessing", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(commands.app, arguments)
    assert done.exit_code == 2, done.output
    assert words in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_trace_whose_sizes_are_refused_starts_no_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moelink.testing.multiprocessing", None)
    monkeypatch.setattr(sys, "argv", ["moelink", "trace", "--device", "cpu", "--format", "mxfp8", "--hidden", "33"])
    assert main() == 2
    assert "hidden_size: expected a multiple of 32" in capsys.readouterr().err


def test_trace_prints_its_table_or_its_json(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TraceRun({"traceEvents": [], "summary": {"unit": "steps"}}, "a table")
    monkeypatch.setattr("moelink.tools.trace.run_trace", lambda config, progress: made)
    shown, printed = (
        CliRunner().invoke(commands.app, ["trace", "--device", "cpu", *more]) for more in ([], ["--json"])
    )
    assert shown.stdout == "a table\n"
    assert json.loads(printed.stdout) == made.document


def test_the_version_and_the_completion_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(commands.app, ["--version"]).stdout == f"moelink {moelink.__version__}\n"
    # As the script that --install-completion writes asks for what may follow "moelink demo --format fp8".
    asked = {"_MOELINK_COMPLETE": "complete_bash", "COMP_WORDS": "moelink demo --format fp8", "COMP_CWORD": "3"}
    done = CliRunner().invoke(commands.app, [], prog_name="moelink", env=asked)
    assert done.stdout.split() == ["fp8_block128", "fp8_block128_e8m0", "fp8_token"]


def test_a_failing_rank_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> DemoReport:
        raise RankFailedError("rank 1: it broke")

    monkeypatch.setattr("moelink.tools.demo.run_demo", fail)
    monkeypatch.setattr(sys, "argv", ["moelink", "demo"])
    assert main() == 1
    assert "rank 1: it broke" in capsys.readouterr().err


def test_env_json_has_versions_and_every_variable() -> None:
    done = run_module("env", "--json", MOELINK_DEBUG="1")
    assert done.returncode == 0
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert set(document["versions"]) == {"moelink", "python", "torch", "triton", "numpy"}
    assert document["versions"]["moelink"] == moelink.__version__
    assert "torch" not in document
    assert document["transport"] in ("collective", "symmetric")
    variables = {entry["name"]: entry for entry in document["variables"]}
    assert set(variables) == {variable.name for variable in VARIABLES}
    assert variables["MOELINK_DEBUG"]["value"] == "1"


def test_env_is_short_and_full_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("MOELINK_DEBUG", "1")
    short, full = (CliRunner().invoke(commands.app, ["env", *extra]) for extra in ([], ["--full"]))
    assert (short.exit_code, full.exit_code) == (0, 0)
    assert len(short.stdout.splitlines()) < 15
    assert re.search(r"MOELINK_DEBUG +1\s", short.stdout)
    release = re.escape(torch.__version__.partition("+")[0])  # of a wheel for CUDA the metadata have that alone
    assert re.search(rf"torch +{release}(\+\w+)?\s", short.stdout)
    assert "transport" in short.stdout
    assert VARIABLES[1].name not in short.stdout, "it is not set"
    for variable in VARIABLES:
        assert variable.name in full.stdout
    assert f"PyTorch version: {torch.__version__}" in full.stdout


def test_a_variable_that_is_not_set_is_shown_as_such() -> None:
    document = inspect_environment({})
    assert all(variable["value"] is None for variable in document["variables"])


def in_terminal(**environment: str) -> str:
    """Output of ``moelink env`` when stdout is a terminal."""
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return run_in_terminal("-m", "moelink", "env", environment={**clean, "TERM": "xterm-256color", **environment})


def test_a_terminal_gets_lines_and_no_color_is_honoured() -> None:
    assert "╭" in in_terminal()
    codes = {code for match in ESCAPE.findall(in_terminal(NO_COLOR="1")) for code in match.split(";")}
    assert not codes & {str(code) for code in (*range(30, 38), 38, *range(90, 98))}


def test_the_missing_extra_is_one_sentence_and_the_pip_line() -> None:
    code = (
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name in ('typer', 'rich') else find(name, *rest)\n"
        "from moelink.tools.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "pip install typer rich" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert missing_packages() == []


def test_without_its_distribution_the_benchmark_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.find_spec(commands.__name__)
    assert spec is not None
    assert spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "entry_points", lambda **_: ())
        spec.loader.exec_module(alone)
    monkeypatch.setattr(sys, "argv", ["moelink", "bench", "--preset", "decode", "--ranks", "2"])
    assert alone.run() == 1
    words = "bench: expected the distribution moelink-bench, got none; run pip install ./benchmarks in a clone"
    assert words in capsys.readouterr().err


def test_help_lists_the_commands() -> None:
    for group, some in ((), {"demo", "env", "plan", "plot"}), (("bench",), {"plot", "whole"}), (("plan",), {"check"}):
        result = CliRunner().invoke(commands.app, [*group, "--help"])
        assert result.exit_code == 0
        listed = result.stdout.partition("Commands:")[2].strip().splitlines()
        assert {line.split()[0] for line in listed} >= some
        assert not [line for line in listed if line.endswith("...")], "80 columns cut off the first sentence"


def test_a_terminal_shows_how_far_the_work_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(console_of, "make_console", lambda **_: Console(file=said, force_terminal=True, width=100))
    with console_of.progress_on_stderr() as progress:
        progress("starting 2 ranks")
        progress("[bf16]: compared (2 of 4)")
    text = ESCAPE.sub("", said.getvalue())
    assert "[bf16]: compared" in text
    assert "(2 of 4)" not in text, "the bar shows it"
    assert re.search(r"compared +━{15,25}╺?━* +\S+\s", text)


def test_small_helpers() -> None:
    console = make_console()
    assert [quantity(n) for n in (512, 5000, 1_234_567, 2 * 10**9)] == ["512 B", "5.00 kB", "1.23 MB", "2.00 GB"]
    assert bar(console, 5, 10) == "#" * 20
    assert bar(console, 0, 0) == ""


@pytest.mark.full("starts torchrun; test_demo_json_of_a_real_run has the same ranks")
def test_demo_under_torchrun_reports_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "moelink"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "demo", *SMALL[2:], "--format", "bf16", "--json"],  # without --ranks: torchrun's world
        capture_output=True, text=True, check=False, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["passed"]
    assert (document["config"]["ranks"], document["num_tokens"]) == (2, 24)
