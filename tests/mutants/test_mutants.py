"""The rows of ``make mutants`` can be planted and name tests of the quick tier; the runner reports what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import mutants
from tests.mutants.mutants import PACKAGE, ROOT, TESTS, Mutant
from tests.mutants.mutants_table import MUTANTS
from tests.tiers import OWN_TIERS, folder_of


def test_every_row_can_be_planted() -> None:
    assert {mutant.fault: why for mutant in MUTANTS if (why := mutant.problem(ROOT))} == {}
    for mutant in MUTANTS:
        source = mutant.path(ROOT).read_text(encoding="utf-8")
        changed = source.replace(mutant.old, mutant.new)
        assert changed != source, mutant.fault
        compile(changed, mutant.file, "exec")


def test_there_are_forty_faults_at_least_and_each_is_its_own() -> None:
    assert len(MUTANTS) >= 40
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_row_names_a_test_of_the_quick_tier(tests_of_the_quick_tier) -> None:
    """Or of a tier of its own, which runs if its folder is named."""
    tests = {mutant.test for mutant in MUTANTS}
    own = {test for test in tests if folder_of(f"{TESTS}/{test}") in OWN_TIERS}
    files = sorted({f"{TESTS}/{test.partition('::')[0]}" for test in tests - own})
    ids = {node.removeprefix(f"{TESTS}/") for node in tests_of_the_quick_tier(files)}
    ids |= {test.partition("[")[0] for test in ids}
    assert sorted(tests - own - ids) == []
    for test in own:
        file, _, function = test.partition("[")[0].partition("::")
        assert f"def {function.rpartition('::')[2]}(" in (ROOT / TESTS / file).read_text(), test


SOURCE = '"""A toy."""\n\n\ndef add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n'
CHECKS = """\
import pytest
from moelink.toy import add, twice


def test_add():
    assert add(1, 2) == 3


@pytest.mark.parametrize("a", [0, 1])
def test_twice(a):
    assert twice(a) == a + a


def test_wrong():
    assert add(1, 2) == 4


@pytest.mark.skip(reason="a toy")
def test_skipped():
    assert add(1, 2) == 3


class TestMore:
    def test_add(self):
        assert add(2, 2) == 4
"""
DIFFERENCE = Mutant("a difference", "toy.py", "a + b", "a - b", "test_toy.py::test_add")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of one module and its tests, in a folder of the package's name, in one with a space."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a pytest without plugins starts in a third of the time
    root = tmp_path / "a clone" / "moelink"
    for path, text in {
        "src/moelink/__init__.py": "", "src/moelink/toy.py": SOURCE, "tests/test_toy.py": CHECKS,
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }.items():  # fmt: skip
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def changed(**fields: str) -> Mutant:
    return Mutant(**{**vars(DIFFERENCE), **fields})


def test_what_is_caught_and_what_survives(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        changed(test="test_toy.py::TestMore::test_add"),
        changed(fault="seen by one parameter set", old="2 * a", new="2 ** a", test="test_toy.py::test_twice"),
        changed(fault="not seen", old="2 * a", new="3 * a", test="test_toy.py::test_twice[0]"),
        changed(fault="no program", old="def add(", new="def odd(", test="test_toy.py::test_twice"),
    ]
    assert mutants.run(rows[:1], toy, imports=()) == 0
    assert "1 of 1 faults caught" in capsys.readouterr().out
    assert mutants.run(rows, toy, workers=1, imports=()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 tests pass without a fault")
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["caught"] * 2 + ["SURVIVED", "pytest ended with 4"]
    assert lines[-1].startswith("2 of 4 faults caught")
    assert (toy / PACKAGE / "toy.py").read_text() == SOURCE
    assert not list(toy.rglob("__pycache__")), "tests run in copies alone"


def test_texts_that_are_not_there_once(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [DIFFERENCE, changed(old="a * b"), changed(old="def "), changed(file="none.py")]
    assert mutants.run(rows, toy) == 1
    assert capsys.readouterr().out.splitlines() == [
        "toy.py: text found 0 times: 'a * b' (a difference)",
        "toy.py: text found 2 times: 'def ' (a difference)",
        "none.py: no such file: 'a + b' (a difference)",
    ]


def test_tests_that_do_not_pass_without_a_fault(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = {"test_wrong": "failure: ", "test_skipped": "skipped: a toy"}
    assert mutants.run([DIFFERENCE, *(changed(test=f"test_toy.py::{test}") for test in tests)], toy, imports=()) == 1
    printed = capsys.readouterr().out
    for test, why in tests.items():
        assert f"test_toy.py::{test} does not pass without a fault: {why}" in printed
    assert "test_add does not" not in printed
    assert "faults caught" not in printed
    assert mutants.run([changed(test="test_toy.py::test_none")], toy, imports=()) == 1
    assert "test_none does not pass without a fault: it did not run" in capsys.readouterr().out


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--list", "-k", "ROUTING.PY"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all("routing.py: " in line for line in lines)
    with pytest.raises(SystemExit):
        mutants.main(["-k", "no row has this word"])
