"""Whatever the set-up, the form of calls and the scenario, dispatch and combine give the bits of the oracle.

One test for all of them. Draws come from :mod:`tests.support.setups`; a failure prints the line that makes the draw
again. To repeat it, put that line into :data:`KEPT`.

The quick tier has three sets of draws:

* the collective transport, and the symmetric one with all ranks in one process, on one node and between nodes: in each
  of the two sets **every two values of all axes of ``setups.AXES`` meet** that the rules allow, so each format meets
  each layout and each form, each form each layout and each scenario, and so on;
* ranks that are processes, on every wire and with two levels: every two values of :data:`APART` meet.

The full tier has more of both, in which processes meet every two values of all axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moelink.testing import run_ranks
from tests.support.cases import check_case, real_shapes, run_cases
from tests.support.setups import ALONE, AXES, BY_RANK, Draw, complete, covering, meetings, possible
from tests.tiers import seeds
from tests.transports import cuts, forms

APART = ("wire", "form", "layout", "mode")
"""Axes of which every two values meet in processes, in the quick tier."""

HERE = {
    "collective": {"apart": False, "wire": "collective"},
    "symmetric": {"apart": False},
}
PARTS = 4

KEPT: dict[str, Draw] = {
    "allreduce": Draw(mode="allreduce"),
    "collective": Draw(wire="collective", alignment=3, shared="fused", room="tight"),
    "collective, exact": Draw(wire="collective", fmt="fp8_block128", form="exact", alignment=3),
    "collective, weighed by experts": Draw(wire="collective", weights="left"),
    "collective, bound": Draw(wire="collective", form="bound", ranks=1, tokens="more", scenario="holes"),
    "collective, home in a format": Draw(wire="collective", combine_format="mxfp8"),
    "home in a format": Draw(combine_format="mxfp8"),
    "in place": Draw(layout="zero_copy"),
    "in place, exact": Draw(layout="zero_copy", form="exact"),
    "in place, bound": Draw(layout="zero_copy", form="bound", ranks=1),
    "in place, quantised": Draw(layout="zero_copy", fmt="fp8_block128", form="quantised", cut="one", tokens="more"),
    "bounded": Draw(form="bounded", room="tight", scenario="one_expert"),
    "levels": Draw(apart=True, wire="levels", ranks=4),
}
"""Draws that catch a planted fault, or have caught one."""


@functools.cache
def draws_of(kind: str, seed: int) -> list[Draw]:
    """The draws of one set."""
    if kind == "apart":
        return covering({"apart": True}, APART if seed == 0 else tuple(AXES), seed=seed)
    return covering(HERE[kind], seed=seed)


def equals_oracle(draw: Draw) -> None:
    """Play a draw with all ranks in this process."""
    try:
        with cuts.applied(draw), forms.filled_memory():
            played = forms.play(draw)
        forms.check(draw, [played])
    except Exception as error:
        raise AssertionError(f"{draw!r}: {error}") from error


def equal_oracle(draws: Sequence[Draw]) -> None:
    """Play draws of as many ranks each, which are processes."""
    played = run_ranks(forms.play_all, draws[0].ranks, list(draws), timeout=280)
    for draw, parts in zip(draws, zip(*played, strict=True), strict=True):
        try:
            forms.check(draw, parts)
        except AssertionError as error:
            raise AssertionError(f"{draw!r}: {error}") from error


@seeds(1, 12, why="every two values of all axes meet")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", HERE)
@pytest.mark.timeout(1800)
def test_all_ranks_in_one_process(kind: str, part: int, seeds: range) -> None:
    for seed in seeds:
        for draw in draws_of(kind, seed)[part::PARTS]:
            equals_oracle(draw)


@pytest.mark.parametrize(
    "ranks, seeds",
    [
        *[pytest.param(ranks, range(1), id=f"{ranks}-few") for ranks in AXES["ranks"] if ranks > 1],
        *[pytest.param(ranks, range(1, 4), id=f"{ranks}-more") for ranks in AXES["ranks"] if ranks > 1],
        pytest.param(8, range(2), id="8"),
    ],
)
@pytest.mark.timeout(1800)
def test_each_rank_is_a_process(ranks: int, seeds: range) -> None:
    """Eight ranks make the draws of four, whose two nodes are then four."""
    for seed in seeds:
        draws = [draw for draw in draws_of("apart", seed) if draw.ranks == min(ranks, 4)]
        draws = [dataclasses.replace(draw, ranks=ranks) for draw in draws]
        for first in range(0, len(draws), 20):
            equal_oracle(draws[first : first + 20])


def test_shapes_of_real_models() -> None:
    cases = real_shapes()
    results = run_ranks(run_cases, 2, cases, {"transport": "collective"}, timeout=240)
    for case, *parts in zip(cases, *results, strict=True):
        check_case(case, 2, parts)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.quick("each is a fault that was there once, or is planted")
def test_kept_draws(name: str) -> None:
    if KEPT[name].apart:
        equal_oracle([KEPT[name]])
    else:
        equals_oracle(KEPT[name])


IMPOSSIBLE: dict[tuple[str, str], set[tuple[Any, Any]]] = {
    ("fmt", "layout"): set(),
    ("fmt", "form"): {(fmt, "quantised") for fmt in ("bf16", "fp32", "fp64")},  # they have no scales
    ("form", "layout"): {
        *[("unreduced", layout) for layout in BY_RANK], ("in_place", "zero_copy"),
        *[("launchers", layout) for layout in AXES["layout"] if layout != "expert"],
    },
    ("form", "scenario"): set(),
    ("wire", "form"): {
        ("collective", "launchers"), *[("levels", form) for form in AXES["form"]], *[("nodes", form) for form in ALONE],
    },
}  # fmt: skip
"""Of ranks in one process: all pairs of values of some axes that need not meet."""


def test_every_two_values_meet_in_the_quick_tier() -> None:
    for kind, fixed in HERE.items():
        assert set(possible(fixed, tuple(AXES))) <= meetings(draws_of(kind, 0), tuple(AXES))
    assert set(possible({"apart": True}, APART)) <= meetings(draws_of("apart", 0), APART)
    met = meetings(draws_of("symmetric", 0), tuple(AXES))
    for (one, other), never in IMPOSSIBLE.items():
        here = {(a, b) if first == one else (b, a) for first, a, second, b in met if {first, second} == {one, other}}
        assert set(itertools.product(AXES[one], AXES[other])) - here == never, (one, other)
    apart = meetings(draws_of("apart", 0), APART)
    levels = {b if a == "levels" else a for _, a, second, b in apart if "levels" in (a, b) and second == "form"}
    assert set(AXES["form"]) - levels == {"launchers", "unreduced"}


@pytest.mark.quick("milliseconds")
@pytest.mark.parametrize("kind", [*HERE, "apart"])
def test_draws_are_what_a_configuration_accepts(kind: str) -> None:
    for draw in draws_of(kind, 0):
        assert draw.setup.config(draw.ranks).transport == ("collective" if draw.wire == "collective" else "symmetric")
        assert eval(repr(draw), {"Draw": Draw, "torch": torch}) == draw


def test_draws_are_a_function_of_their_seed() -> None:
    assert covering(HERE["collective"], APART, seed=3) == covering(HERE["collective"], APART, seed=3)
    assert covering(HERE["collective"], APART, seed=3) != covering(HERE["collective"], APART, seed=4)
    assert complete({"wire": "levels", "ranks": 2}) is None
