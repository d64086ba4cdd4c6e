"""The two tiers of the tests: which of the collected tests the quick one runs.

The *quick tier* is what ``pytest`` and ``make test`` run. It runs every test function, each with the first of its
parameter sets. The *full tier*, ``pytest --full`` or ``make test-full``, runs every parameter set.

To write a test for both tiers:

* Put the cheapest parameter set first. A function that repeats its check under many seeds has a parameter ``seeds``:
  ``@seeds(1, 20)`` gives it one seed in the quick tier, and 19 more in the full one.
* Mark what the quick tier must not leave out with ``@pytest.mark.quick("why")``. On a function the mark stands for all
  of its parameter sets. On a ``pytest.param(..., marks=pytest.mark.quick("why"))`` it stands for that one. Every
  planted fault has it, and so has a function whose parameter sets take milliseconds but each check something else.

Tests marked ``gpu`` run with all of their parameter sets in both tiers. A parameter set that the command line names
(``tests/tools/test_cli.py::test_it[case]``) runs as well. The options ``-k`` and ``-m`` choose first: ``-k nvfp4``
runs the first parameter set of each function among those that have nvfp4 in their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def seeds(quick: int, full: int, why: str = "") -> pytest.MarkDecorator:
    """Give a test the parameter ``seeds``: ``range(quick)``, and in the full tier ``range(quick, full)`` as well.

    ``why`` marks the few as ``quick`` for all other parameters of the test, and says the reason.
    """
    marks = [pytest.mark.quick(why)] if why else []
    few = pytest.param(range(quick), marks=marks, id="few")
    return pytest.mark.parametrize("seeds", [few, pytest.param(range(quick, full), id="more")])


def choose(items: Sequence[pytest.Item], arguments: Iterable[str] = ()) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide the collected tests into those that the quick tier runs and those that it leaves out, both in order.

    Args:
        items: the collected tests.
        arguments: of the command line, of which those with a ``[`` name single parameter sets.

    Raises:
        pytest.UsageError: a mark ``quick`` does not say why.
    """
    named = {argument.partition("::")[2] for argument in arguments if "[" in argument}
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen = set()
    for item in items:
        function, _, _ = item.nodeid.partition("[")
        on_gpu, quick = item.get_closest_marker("gpu") is not None, _is_quick(item)
        if function in seen and not (on_gpu or quick or item.nodeid.partition("::")[2] in named):
            left_out.append(item)
            continue
        kept.append(item)
        if not (on_gpu or _is_skipped(item)):  # which would not stand for the function
            seen.add(function)
    return kept, left_out


def _is_quick(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("quick")
    if mark is not None and not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0].strip()):
        raise pytest.UsageError(f'{item.nodeid}: expected pytest.mark.quick("why"), got {mark.args}; give a reason')
    return mark is not None


def _is_skipped(item: pytest.Item) -> bool:
    return item.get_closest_marker("skip") is not None or any(mark.args[0] for mark in item.iter_markers("skipif"))
