"""The command line: exit codes, what goes to stdout and what to stderr, plain text without a terminal, --json."""

import dataclasses
import importlib.metadata
import importlib.util
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

from typer.testing import CliRunner

import moelink
from moelink.env import VARIABLES
from moelink.testing import RankFailedError
from moelink.tools.cli import app as commands
from moelink.tools.cli import main, missing_packages
from moelink.tools.cli.console import bar, make_console, quantity
from moelink.tools.cli.environment import inspect_environment
from moelink.tools.demo import DemoConfig, DemoReport, LayerConfig
from moelink.tools.demo.report import FormatResult
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
        monkeypatch.setattr(commands, "run_demo", lambda *_, changes=changes: make_report(**changes))
        result = CliRunner().invoke(commands.app, ["demo"])
        assert result.exit_code == 1
        assert "FAILED" in result.stdout
        assert "bf16" in result.stderr


def test_demo_passes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "run_demo", lambda *_: make_report())
    result = CliRunner().invoke(commands.app, ["demo"])
    assert result.exit_code == 0
    assert "0.50" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--format", "fp3"], "dispatch_format"),
        (["demo", "--format", "fp8_block128", "--hidden", "96"], "128"),
    ],
)
def test_bad_settings_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_module(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    "arguments", [["demo", "--topk", "40"], ["demo", "--ranks", "0"], ["demo", "--transport", "x"]]
)
def test_usage_errors(arguments: list[str]) -> None:
    assert CliRunner().invoke(commands.app, arguments).exit_code == 2


def test_a_failing_rank_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> DemoReport:
        raise RankFailedError("rank 1: it broke")

    monkeypatch.setattr(commands, "run_demo", fail)
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
    assert document["torch"]["torch_version"] == torch.__version__
    assert document["torch"]["os"]
    assert document["transport"] in ("collective", "symmetric")
    variables = {entry["name"]: entry for entry in document["variables"]}
    assert set(variables) == {variable.name for variable in VARIABLES}
    assert variables["MOELINK_DEBUG"]["value"] == "1"


def test_env_text_shows_every_variable() -> None:
    result = CliRunner().invoke(commands.app, ["env"])
    assert result.exit_code == 0
    for variable in VARIABLES:
        assert variable.name in result.stdout
    assert "transport" in result.stdout
    assert f"PyTorch version: {torch.__version__}" in result.stdout


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
    assert "pip install 'moelink[cli]'" in done.stderr
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
    result = CliRunner().invoke(commands.app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.stdout
    assert "env" in result.stdout


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
