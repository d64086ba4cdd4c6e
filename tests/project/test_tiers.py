"""The tiers of the tests: what the quick one runs, what it may take, and what a run says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers
from tests.support import costs
from tests.support.costs import Clock, Costs
from tests.support.paths import ROOT
from tests.support.processes import run_pytest
from tests.support.quick_tier import starts_torch
from tests.tiers import BUDGETS, NEW_PROCESSES, OWN_TIERS, choose, folder_of, over_budget


def item(nodeid: str, *marks: pytest.MarkDecorator) -> Any:
    """As much of a pytest item as :func:`tiers.choose` looks at."""
    found = [mark.mark for mark in marks]
    return SimpleNamespace(
        nodeid=nodeid,
        iter_markers=lambda name: [mark for mark in found if mark.name == name],
        get_closest_marker=lambda name: next((mark for mark in found if mark.name == name), None),
    )


def chosen(*items: Any, arguments: tuple[str, ...] = ()) -> list[str]:
    kept, left_out = choose(items, arguments)
    assert sorted(i.nodeid for i in kept + left_out) == sorted(i.nodeid for i in items)
    return [i.nodeid for i in kept]


def test_the_quick_tier_runs_every_function_with_its_first_parameters() -> None:
    items = [item(name) for name in ("a.py::f[1]", "a.py::f[2]", "a.py::g", "b.py::f[1]", "b.py::C::f[x[0]]")]
    assert chosen(*items) == ["a.py::f[1]", "a.py::g", "b.py::f[1]", "b.py::C::f[x[0]]"]


def test_the_quick_tier_runs_what_is_marked_and_what_needs_a_gpu() -> None:
    quick, gpu = pytest.mark.quick("a planted fault"), pytest.mark.gpu
    assert chosen(item("f[1]", quick), item("f[2]", quick)) == ["f[1]", "f[2]"]
    assert chosen(item("f[1]"), item("f[2]"), item("f[3]", quick)) == ["f[1]", "f[3]"]
    assert chosen(item("f[1]", gpu), item("f[2]", gpu), item("f[3]"), item("f[4]")) == ["f[1]", "f[2]", "f[3]"]


def test_a_skipped_parameter_set_does_not_stand_for_its_function() -> None:
    skipped, runs = pytest.mark.skipif(True, reason="no GPU"), pytest.mark.skipif(False, reason="no GPU")
    assert chosen(item("f[1]", skipped), item("f[2]", runs), item("f[3]")) == ["f[1]", "f[2]"]


def test_the_command_line_may_name_parameter_sets() -> None:
    items = [item(f"tests/a.py::f[{case}]") for case in "123"]
    assert chosen(*items, arguments=("a.py::f[3]", "tests/b.py")) == ["tests/a.py::f[1]", "tests/a.py::f[3]"]
    assert chosen(items[1], arguments=("a.py::f[2]",)) == ["tests/a.py::f[2]"]


@pytest.mark.quick("both ways to leave the reason out")
@pytest.mark.parametrize("mark", [pytest.mark.quick, pytest.mark.quick(" ")], ids=["nothing", "blank"])
def test_a_mark_without_a_reason_is_refused(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match=r'a.py::f: expected pytest.mark.quick\("why"\)'):
        choose([item("a.py::f", mark)])


def test_the_full_tier_alone_runs_what_is_marked_full() -> None:
    full = pytest.mark.full("takes a minute")
    items = [item("tests/nn/a.py::f", full), item("tests/nn/a.py::g"), item("tests/nn/a.py::h[1]", full)]
    assert chosen(*items) == ["tests/nn/a.py::g"]
    assert chosen(*items, arguments=("tests/nn/a.py",)) == ["tests/nn/a.py::g"]
    assert chosen(*items, arguments=("tests/nn/a.py::f",)) == ["tests/nn/a.py::f", "tests/nn/a.py::g"]
    assert chosen(*items, arguments=("tests/nn/a.py::h",)) == ["tests/nn/a.py::g", "tests/nn/a.py::h[1]"]


def test_a_tier_of_its_own_runs_if_the_command_line_names_its_folder() -> None:
    items = [item("tests/plan/a.py::f"), item("tests/integrations/vllm/a.py::f"), item("tests/nn/a.py::f")]
    assert chosen(*items) == ["tests/nn/a.py::f"]
    assert chosen(*items, arguments=("tests",)) == ["tests/nn/a.py::f"]
    for argument in ("tests/plan", "tests/plan/", "tests/plan/a.py", "tests/plan/a.py::f"):
        assert chosen(*items, arguments=(argument,)) == ["tests/plan/a.py::f", "tests/nn/a.py::f"]


def test_every_folder_has_a_budget_or_a_tier_of_its_own() -> None:
    folders = {folder_of(path.relative_to(ROOT).as_posix()) for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders - {*BUDGETS, *OWN_TIERS} == set()
    assert set(BUDGETS) - folders == {"testing"}
    assert sum(BUDGETS.values()) <= 550
    assert len(NEW_PROCESSES) <= 10
    assert all(why.strip() for why in NEW_PROCESSES.values())
    for name in NEW_PROCESSES:
        file, _, function = name.partition("::")
        place = ROOT / file
        assert place.exists(), name
        assert not function or f"def {function.rpartition('::')[2]}(" in place.read_text(), name


def test_a_folder_over_its_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "BUDGETS", {"nn": 10, "ops": 5})
    assert over_budget({"nn": 13.9, "ops": 1.0, "plan": 999.0}) == {}
    errors = over_budget({"nn": 14.1, "ops": 1.0, "new": 0.1})
    assert errors.keys() == {"nn", "new"}
    assert errors["nn"].startswith("nn: expected at most 10 processor seconds, got 14; ")


@pytest.mark.quick("each is another way to start Python")
@pytest.mark.parametrize("command, heavy", [
    (["python3", "-c", "import sys, torch"], True), (["/a/python3.11", "-m", "moelink", "env"], True),
    (["ip", "netns", "exec", "a", "python3", "-c", "import moelink"], True), (["python3", "script.py"], True),
    (["python3", "-c", "open('/pytest/moelink')"], False), (["python3", "-I", "-S", "/moelink/responder.py"], False),
    (["ip", "netns", "list"], False), (["python3", "/moelink/tests/support/programs.py", "torch"], False),
], ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))  # fmt: skip
def test_commands_that_load_torch_are_found(command: list[str], heavy: bool) -> None:
    assert starts_torch(command) is heavy


def test_costs_are_added_up_at_the_pace_of_the_budgets() -> None:
    found = Costs()
    assert (found.pace, found.by_folder(folder_of), found.slowest(5)) == (1.0, {}, [])
    found.note("tests/nn/a.py::f", [("other", "x"), ("processor_seconds", 3.0), ("pace", 2.0)])
    found.note("tests/nn/a.py::g", [("processor_seconds", 1.0), ("pace", 1.0)])
    found.note("testing/tests/a.py::g", [("processor_seconds", 5.0), ("pace", 4.0)])
    assert found.pace == 2.0
    assert found.by_folder(folder_of) == {"nn": 2.0, "testing": 2.5}
    assert found.slowest(2) == [(5.0, "testing/tests/a.py::g"), (3.0, "tests/nn/a.py::f")]


def test_a_clock_counts_processes_that_live_and_those_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_SHORT", 0.0)  # a test as short as this one starts no process
    clock = Clock()
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        alive = clock.lap()
        process.communicate("\n")
    assert alive >= 0.2  # the system counts in ticks
    assert clock.lap() < 0.29  # what has been counted is not counted again when the process has ended
    while sum(os.times()[:2]) - clock._own < 0.2:
        pass
    assert clock.lap() >= 0.1


EXAMPLE = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_first(number): assert number in (0, 3)

@pytest.mark.quick("a reason")
@pytest.mark.parametrize("number", range(2))
def test_both(number): pass
"""


@pytest.mark.parametrize("workers, full, closing", [
    ("0", [], "3 passed, 3 deselected"),
    ("2", [], "3 passed, 3 deselected"),
    ("0", ["--full"], "2 failed, 4 passed"),
])  # fmt: skip
def test_pytest_reports_what_the_quick_tier_leaves_out(
    tmp_path: Path, workers: str, full: list[str], closing: str
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "tiers.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "tests" / "support")
    (tmp_path / "tests" / "test_example.py").write_text(EXAMPLE)
    done = run_pytest(tmp_path, "-n", workers, *full)
    assert closing in done.stdout.splitlines()[-1], done.stdout + done.stderr
