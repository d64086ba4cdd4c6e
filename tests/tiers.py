"""Choose which of the collected tests the quick tier runs, and say how many seconds each folder of tests may take.

The *quick tier* is what ``pytest`` and ``make test`` run. It is a choice: each folder in :data:`BUDGETS` has a budget
of processor seconds, and a run that spends more fails. So a test that takes seconds has to be worth them. The *full
tier*, ``pytest --full`` or ``make test-full``, runs everything. Folders without a budget (:data:`OWN_TIERS`) run in the
full tier, and when the command line names them.

The quick tier takes of each test function the first parameter set. Two marks change that:

* ``@pytest.mark.quick("why")``: the quick tier must not leave this out. On a function the mark stands for all of its
  parameter sets. On a ``pytest.param(..., marks=pytest.mark.quick("why"))`` it stands for that one. Every planted fault
  has it, and so has a function whose parameter sets take milliseconds but each check something else.
* ``@pytest.mark.full("why")``: only the full tier runs this. The reason names the quick test that sees the same
  faults, or says why nobody meets them between two full runs.

Put the cheapest parameter set first. A function that repeats its check under many seeds has a parameter ``seeds``:
``@seeds(1, 20)`` gives it one seed in the quick tier, and 19 more in the full one.

A test of the quick tier does not start Python anew, as importing torch takes seconds: commands and ranks come from fork
servers (``tests/support/``). :data:`NEW_PROCESSES` lists the tests that must; :mod:`tests.support.quick_tier` fails
others.

Tests marked ``gpu`` run with all of their parameter sets in both tiers. A parameter set that the command line names
(``tests/tools/test_cli.py::test_it[case]``) runs as well. The options ``-k`` and ``-m`` choose first: ``-k nvfp4``
runs the first parameter set of each function among those that have nvfp4 in their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest

BUDGETS = {
    "kernels": 112, "transports": 130, "control": 47, "nodes": 53, "contract": 20, "formats": 10, "memory": 6,
    "nn": 30, "ops": 16, "reference": 2, "rows": 24, "tracing": 8, "tools": 16, "gpu": 9, "mutants": 5,
    "project": 54, "testing": 8,
}  # fmt: skip
"""Processor seconds of each folder in the quick tier, on the machine of :mod:`tests.support.costs`; 550 at most in all.
``testing`` is the folder of the distribution moelink-testing."""
OWN_TIERS = ("bench", "integrations", "plan")
"""Folders with a tier of their own."""
ALLOWED = 1.4
"""A folder that takes more than its budget times this fails the run: two runs of the same tests differ by a tenth on
one kind of processor, and differed by a third on two kinds."""
NEW_PROCESSES = {
    "tests/project/test_tiers.py::test_pytest_reports_what_the_quick_tier_leaves_out": "runs pytest",
    "tests/tools/test_cli.py::test_the_missing_extra_is_one_sentence_and_the_pip_line": "imports",
    "tests/project/test_layering.py::test_importing_loads_no_optional_package_and_touches_no_device": "imports",
    "tests/project/test_layering.py::test_the_plots_import_matplotlib_only_when_they_draw": "imports",
    "tests/project/test_layering.py::test_the_benchmarks_choose_the_interpreter_before_triton_is_imported": "imports",
    "tests/project/test_layering.py::test_the_command_line_answers_without_its_extra": "imports",
    "tests/formats/test_formats_layouts.py::test_import_does_not_load_triton": "imports",
    "tests/tools/test_cli.py::test_wrong_arguments_end_with_status_2_before_torch_is_imported": "imports",
    "tests/mutants/test_mutants.py": "the runner's own server, and the collection of the quick tier",
    "testing/tests/": "loads Triton without torch",
}
"""Tests of the quick tier, or folders, that may start Python anew, and why; ten at most."""


def seeds(quick: int, full: int, why: str = "", *, part: int = 0) -> pytest.MarkDecorator:
    """Give a test the parameter ``seeds``: ``range(quick)``, and in the full tier ``range(quick, full)`` as well.

    ``why`` marks the few as ``quick`` for all other parameters of the test, and says the reason. ``part``: at most that
    many at a time, so that workers of pytest-xdist share schedules that take minutes.
    """
    marks = [pytest.mark.quick(why)] if why else []
    few = pytest.param(range(quick), marks=marks, id="few")
    if not part:
        return pytest.mark.parametrize("seeds", [few, pytest.param(range(quick, full), id="more")])
    parts = [range(first, min(first + part, full)) for first in range(quick, full, part)]
    more = [pytest.param(each, id=f"{each.start}-{each.stop - 1}") for each in parts]
    return pytest.mark.parametrize("seeds", [few, *more])


def folder_of(nodeid: str) -> str:
    """Return the folder of a test: ``nn`` of ``tests/nn/test_moe.py::test_it``, ``testing`` of all in that folder."""
    first, _, rest = nodeid.partition("/")
    return rest.partition("/")[0] if first == "tests" and "/" in rest else first


def choose(items: Sequence[pytest.Item], arguments: Iterable[str] = ()) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide the collected tests into those that the quick tier runs and those that it leaves out, both in order.

    Args:
        items: the collected tests.
        arguments: of the command line, of which those with a ``::`` name single tests, and others folders and files.

    Raises:
        pytest.UsageError: a mark ``quick`` or ``full`` does not say why.
    """
    arguments = list(arguments)
    named = tuple(argument for argument in arguments if "::" in argument)
    asked = {folder_of(argument.rstrip("/") + "/") for argument in arguments}
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen = set()
    for item in items:
        function, _, _ = item.nodeid.partition("[")
        on_gpu, quick, full = item.get_closest_marker("gpu") is not None, _says("quick", item), _says("full", item)
        folder = folder_of(item.nodeid)
        elsewhere = (folder in OWN_TIERS and folder not in asked) or (full and not function.endswith(named))
        known = function in seen and not quick
        if (elsewhere or known) and not (on_gpu or item.nodeid.endswith(named)):
            left_out.append(item)
            continue
        kept.append(item)
        if not (on_gpu or _is_skipped(item)):  # which would not stand for the function
            seen.add(function)
    return kept, left_out


def over_budget(seconds: Mapping[str, float]) -> dict[str, str]:
    """Return an error by folder for those of ``seconds`` (processor seconds by folder) that took more than they may."""
    return {
        folder: f"{folder}: expected at most {BUDGETS.get(folder, 0)} processor seconds, got {spent:.0f}; make its "
        f"tests cheaper, mark some as full, or raise its budget in tests/tiers.py and say why"
        for folder, spent in seconds.items()
        if folder not in OWN_TIERS and spent > ALLOWED * BUDGETS.get(folder, 0)
    }  # fmt: skip


def _says(name: str, item: pytest.Item) -> bool:
    mark = item.get_closest_marker(name)
    if mark is not None and not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0].strip()):
        raise pytest.UsageError(f'{item.nodeid}: expected pytest.mark.{name}("why"), got {mark.args}; give a reason')
    return mark is not None


def _is_skipped(item: pytest.Item) -> bool:
    return item.get_closest_marker("skip") is not None or any(mark.args[0] for mark in item.iter_markers("skipif"))
