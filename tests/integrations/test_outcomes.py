"""Own tests of a framework are compared: one that fails with moelink alone is found, one that fails anyway is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations import outcomes

TESTS = """
import os
import pytest

MOELINK = os.environ["WITH"] == "1"

def test_good(): pass
def test_bad(): assert False
if not MOELINK or {present}:
    def test_changed(): {changed}

@pytest.fixture
def ending():
    yield
    assert not MOELINK or {ends}

def test_that_ends(ending): pass
"""


def run(folder: Path, *, changed: str = "pass", present: bool = True, ends: bool = True) -> list[str]:
    """Run tests in both ways, and return pytest's own files."""
    (folder / "test_theirs.py").write_text(TESTS.format(changed=changed, present=present, ends=ends))
    files = [str(folder / f"{flag}.xml") for flag in "01"]
    for flag, file in zip("01", files, strict=True):
        options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={file}"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, "test_theirs.py"],
            cwd=folder, env={"WITH": flag, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, check=False, capture_output=True,
        )  # fmt: skip
    return files


def test_a_test_that_fails_in_both_runs_is_the_frameworks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcomes.main(*run(tmp_path, changed="assert MOELINK")) == 0
    told = capsys.readouterr().out
    assert told == "without moelink: 2 passed, 2 failure\nwith moelink:    3 passed, 1 failure\n"


@pytest.mark.parametrize(
    "change, told",
    [
        ({"changed": "assert not MOELINK"}, "test_changed: passed without moelink, failure with it"),
        ({"changed": "MOELINK and pytest.skip()"}, "test_changed: passed without moelink, skipped with it"),
        ({"present": False}, "test_changed: passed without moelink, absent with it"),
        ({"ends": False}, "test_that_ends: passed without moelink, error with it"),
    ],
    ids=str,
)
def test_a_test_that_comes_out_worse_is_named(
    change: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcomes.main(*run(tmp_path, **change)) == 1  # type: ignore[arg-type]
    assert f"test_theirs::{told}\n" in capsys.readouterr().out


def test_runs_without_a_test_that_passes_are_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without, with_it = run(tmp_path, changed="1 / 0")
    empty = str(tmp_path / "none.xml")
    assert outcomes.main(empty, empty) == 1
    assert outcomes.main(without, empty) == 1
    assert "with moelink:    nothing ran\n" in capsys.readouterr().out
    assert outcomes.main(empty, with_it) == 1, "failures that no run without moelink has"
