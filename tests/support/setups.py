"""Draw set-ups, forms of calls and scenarios such that every two of them meet, to compare results with the oracle.

A :class:`Draw` has one value of each axis of :data:`AXES`. :data:`RULES` say which values go together.
:func:`covering` chooses draws in which every pair of values meets that the rules allow. The choice depends on its seed
alone. To add an axis, add a field with its default, its values, and a rule for each combination that is refused.

Draws are printed as what makes them, so that a line of a failure can be pasted:

    >>> Draw(form="cached", scenario="holes", seed=3)
    Draw(form='cached', scenario='holes', seed=3)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moelink.config import COMBINE_DTYPES, COMBINE_FORMATS
from moelink.formats import get_format
from tests.support.cases import FORMATS, HIDDEN, SCENARIOS, Case, Setup

MAX_TOKENS = 7
ROOM = {"tight": {"expert": 5, "rank": 2, "masked": 4}, "none": {"expert": 0, "rank": 0, "masked": 0}}
"""Rows of an output, by layout; of each expert for layout "masked"."""

AXES: dict[str, tuple[Any, ...]] = {
    "apart": (False, True),
    "wire": ("symmetric", "nodes", "levels", "collective"),
    "fmt": FORMATS,
    "form": (
        "eager", "split", "cached", "in_place", "bounded", "exact", "quantised", "unreduced", "bound", "quick", "lanes",
        "launchers",
    ),
    "ranks": (2, 3, 1, 4),
    "layout": ("expert", "rank", "masked", "zero_copy"),
    "mode": ("alltoall", "allreduce"),
    "cut": ("usual", "one", "few", "many", "parts", "whole", "flags", "at_once"),
    "home": ("sums", "rows"),
    "shared": ("none", "given", "fused"),
    "weights": ("dispatch", "combine", "none", "left"),
    "combine_format": (None, *COMBINE_FORMATS),
    "combine_dtype": COMBINE_DTYPES,
    "input_dtype": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "id_dtype": (torch.int32, torch.int64),
    "room": ("worst", *ROOM),
    "alignment": (1, 3, 130),
    "global_ids": (False, True),
    "num_sms": (None, 1),
    "experts": (5, 2, 8),
    "topk": (2, 1, 3),
    "tokens": ("few", "more"),
    "hidden": ("wide", "narrow"),
    "scenario": SCENARIOS,
}  # fmt: skip
"""By field of a draw, in the order in which they are chosen: first what rules out most."""

BY_RANK = ("rank", "zero_copy")
SCATTERED = ("fp8_block128", "fp8_block128_e8m0", "mxfp8", "nvfp4")
"""Formats whose scales lie elsewhere than their rows."""
ALONE = ("bound", "quick", "lanes")
"""Forms of a communicator of one rank, which a process has that drives all ranks only if there is one."""


@dataclass(frozen=True, repr=False)
class Draw:
    """A set-up, a form of calls and a scenario.

    Attributes:
        apart: each rank is a process; else all ranks are in one.
        wire: "collective", "symmetric", "nodes" (the same with each rank a node) or "levels" (two levels of two nodes).
        form: how calls are made (``tests.transports.forms``).
        layout: that of the configuration, or "zero_copy": layout "rank" whose rows stay where they arrived.
        cut: how launches are cut (``tests.transports.cuts``), or "usual".
        home: "sums" (``pre_reduce``) or "rows".
        shared: rows of a shared expert: "none", "given" to combine, or "fused".
        weights: as of :class:`tests.support.cases.Case`.
        room: of an output: the worst case, less than comes ("tight"), or "none".
        tokens: of a rank: at most 3, or at most 7.
        hidden: "narrow": a group of the format, one element where it has none; "wide": no power of two.
        scenario: which experts tokens go to, and which ranks have any.
        seed: of tokens, ids and weights.
    """

    apart: bool = False
    wire: str = "symmetric"
    fmt: str = "bf16"
    form: str = "eager"
    ranks: int = 2
    layout: str = "expert"
    mode: str = "alltoall"
    cut: str = "usual"
    home: str = "sums"
    shared: str = "none"
    weights: str = "dispatch"
    combine_format: str | None = None
    combine_dtype: torch.dtype = torch.bfloat16
    input_dtype: torch.dtype = torch.bfloat16
    id_dtype: torch.dtype = torch.int32
    room: str = "worst"
    alignment: int = 1
    global_ids: bool = False
    num_sms: int | None = None
    experts: int = 5
    topk: int = 2
    tokens: str = "few"
    hidden: str = "wide"
    scenario: str = "uniform"
    seed: int = 0

    def __repr__(self) -> str:
        fields = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"Draw({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields)})"

    @property
    def plain_layout(self) -> str:
        """``layout=`` of the configuration."""
        return "rank" if self.layout == "zero_copy" else self.layout

    @property
    def rows(self) -> int | None:
        """Rows of an output where they are bounded. Scales in tiles have tiles of 128 rows in each group."""
        if self.room == "worst":
            return None
        rows = ROOM[self.room][self.plain_layout]
        return 128 if rows and self.layout == "masked" and self.fmt in ("mxfp8", "nvfp4") else rows

    @property
    def hidden_size(self) -> int:
        """A multiple of the groups of both formats."""
        size = HIDDEN[self.fmt] if self.hidden == "wide" else get_format(self.fmt).group
        home = get_format(self.combine_format).group if self.combine_format is not None else 1
        return math.lcm(size, home) if size % home else size

    @property
    def setup(self) -> Setup:
        """The configuration. Fields that have their default are left out."""
        options: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "max_tokens_per_rank": MAX_TOKENS,
            "transport": "collective" if self.wire == "collective" else "symmetric",
            "layout": self.plain_layout,
            "mode": self.mode,
            "pre_reduce": self.home == "sums",
            "zero_copy": self.layout == "zero_copy",
            "fused_shared_expert": self.shared == "fused",
            "combine_format": self.combine_format,
            "combine_dtype": self.combine_dtype,
            "expert_alignment": self.alignment,
            "global_ids": self.global_ids,
            "num_sms": self.num_sms,
            "lanes": 2 if self.form == "lanes" else 1,
        }
        if self.rows is not None:
            options["rows_per_expert" if self.layout == "masked" else "capacity"] = self.rows
        if self.wire in ("nodes", "levels"):
            options |= {"ranks_per_node": 1 if self.wire == "nodes" else 2, "two_level": self.wire == "levels"}
        return Setup(self.fmt, tuple(options.items()), num_experts=self.experts, topk=self.topk)

    def case(self, **changes: Any) -> Case:
        """A dispatch and combine of this draw."""
        case = Case(
            self.setup, self.scenario, self.weights, self.form != "unreduced", self.shared == "given", self.seed,
            small=self.tokens == "few", input_dtype=self.input_dtype, id_dtype=self.id_dtype,
        )  # fmt: skip
        return dataclasses.replace(case, **changes)


RULES: tuple[Callable[..., bool], ...] = (
    # Two levels sum on the way home, and need several nodes of several ranks, each with forwarders that wait.
    lambda wire, apart: wire != "levels" or apart,
    lambda apart, ranks: ranks > 1 or not apart,
    lambda wire, ranks: ranks == 4 if wire == "levels" else ranks > 1 or wire != "nodes",
    lambda wire, mode: wire != "levels" or mode == "alltoall",
    lambda wire, home: wire != "levels" or home == "sums",
    # Rows stay where they arrived only within a node, and without another place to go to.
    lambda layout, wire: layout != "zero_copy" or wire in ("symmetric", "collective"),
    lambda layout, mode: layout != "zero_copy" or mode == "alltoall",
    lambda layout, room: layout != "zero_copy" or room == "worst",
    lambda layout, form: layout != "zero_copy" or form != "in_place",
    # What a layout does not have.
    lambda layout, home: layout not in BY_RANK or home == "sums",
    lambda layout, shared: layout == "expert" or shared != "fused",
    lambda layout, alignment: layout == "expert" or alignment == 1,
    lambda layout, global_ids: layout in BY_RANK or not global_ids,
    # What is never asked for where nothing travels, or what nothing can carry.
    lambda mode, combine_format: mode == "alltoall" or combine_format is None,
    lambda mode, shared: mode == "alltoall" or shared != "given",
    lambda combine_format, combine_dtype: combine_format is None or combine_dtype != torch.float64,
    lambda fmt, input_dtype: input_dtype in get_format(fmt).input_dtypes,
    lambda home, weights: home == "rows" or weights != "combine",
    # Forms.
    lambda form, apart, ranks: form not in ALONE or apart or ranks == 1,
    lambda form, fmt: form != "quantised" or get_format(fmt).scale_dtype is not None,
    lambda form, layout: form != "unreduced" or layout not in BY_RANK,
    lambda form, shared: form != "unreduced" or shared == "none",
    lambda form, wire: form != "unreduced" or wire != "levels",
    lambda form, weights: form != "unreduced" or weights != "combine",
    lambda form, weights: form != "bound" or weights in ("dispatch", "none"),
    lambda form, apart: form != "launchers" or not apart,
    lambda form, wire: form != "launchers" or wire in ("symmetric", "nodes"),
    lambda form, cut: form != "launchers" or cut == "usual",
    lambda form, layout: form != "launchers" or layout == "expert",
    lambda form, weights: form != "launchers" or weights != "left",
    lambda form, weights, home: form != "launchers" or weights != "dispatch" or home == "sums",
    lambda form, combine_format: form != "launchers" or combine_format is None,
    lambda form, num_sms: form != "launchers" or num_sms is None,
    lambda form, wire, mode: form != "launchers" or wire == "symmetric" or mode == "alltoall",
    # Launches are cut anew in this process alone.
    lambda cut, apart: cut == "usual" or not apart,
    lambda cut, wire: cut == "usual" or wire in ("symmetric", "nodes"),
    lambda cut, layout: cut != "at_once" or layout == "expert",
    lambda cut, fmt: cut != "at_once" or fmt in SCATTERED,
)
"""Combinations that a configuration or a call refuses. A rule is asked when the axes are chosen that it names."""


@functools.cache
def _rules() -> dict[str, list[tuple[tuple[str, ...], Callable[..., bool]]]]:
    """Rules by each axis that they name."""
    rules: dict[str, list[tuple[tuple[str, ...], Callable[..., bool]]]] = {axis: [] for axis in AXES}
    for rule in RULES:
        names = tuple(inspect.signature(rule).parameters)
        for name in names:
            rules[name].append((names, rule))
    return rules


def allowed(values: dict[str, Any], axis: str) -> bool:
    """Whether ``values`` pass every rule about ``axis`` that names none of the axes that are still to be chosen."""
    for names, rule in _rules()[axis]:
        if all(name in values for name in names) and not rule(*[values[name] for name in names]):
            return False
    return True


Order = Callable[[dict[str, Any], str], Sequence[Any]]
"""Given the values so far: those of the next axis, from the one to try first."""


def complete(fixed: dict[str, Any], order: Order = lambda values, axis: AXES[axis]) -> dict[str, Any] | None:
    """Choose a value for each axis that is not in ``fixed``. None if the rules allow no choice."""
    free = [axis for axis in AXES if axis not in fixed]

    def choose(values: dict[str, Any], number: int) -> bool:
        if number == len(free):
            return True
        axis = free[number]
        for value in order(values, axis):
            values[axis] = value
            if allowed(values, axis) and choose(values, number + 1):
                return True
            del values[axis]
        return False

    values = dict(fixed)
    return values if all(allowed(values, axis) for axis in fixed) and choose(values, 0) else None


Pair = tuple[str, Any, str, Any]


def possible(fixed: dict[str, Any], axes: Sequence[str]) -> list[Pair]:
    """Pairs of values of ``axes`` that can meet beside ``fixed``."""
    return [
        (one, a, other, b)
        for one, other in itertools.combinations(axes, 2)
        for a, b in itertools.product(AXES[one], AXES[other])
        if (fixed.get(one, a), fixed.get(other, b)) == (a, b) and complete({**fixed, one: a, other: b}) is not None
    ]


def meetings(draws: Sequence[Draw], axes: Sequence[str]) -> set[Pair]:
    """Pairs of values of ``axes`` that meet in some draw."""
    return {
        (one, getattr(draw, one), other, getattr(draw, other))
        for draw in draws
        for one, other in itertools.combinations(axes, 2)
    }


def covering(fixed: dict[str, Any], axes: Sequence[str] = tuple(AXES), *, seed: int = 0) -> list[Draw]:
    """Draws with the values ``fixed`` in which every possible pair of values of ``axes`` meets.

    Each draw begins with a pair that has not met. Every other axis takes the value that brings together most that has
    not, with what is chosen already, then the one whose pairs have met least, then rather the first than the last.
    """
    rng = random.Random(seed)
    left = dict.fromkeys(possible(fixed, axes))
    open_pairs = Counter(place for one, a, other, b in left for place in ((one, a), (other, b)))
    rank = {axis: number for number, axis in enumerate(axes)}

    def order(values: dict[str, Any], axis: str) -> list[Any]:
        def gain(value: Any) -> tuple[float, ...]:
            new = 0
            for other in values if axis in rank else ():
                if other in rank:
                    pair = (other, values[other], axis, value)
                    new += (pair if rank[other] < rank[axis] else (*pair[2:], *pair[:2])) in left
            return new, open_pairs[axis, value], rng.random() / (1 + AXES[axis].index(value))

        return sorted(AXES[axis], key=gain, reverse=True)

    draws: list[Draw] = []
    while left:
        one, a, other, b = rng.choice(list(left))
        values = complete({**fixed, one: a, other: b}, order)
        assert values is not None
        draws.append(Draw(**values, seed=1000 * seed + len(draws)))
        for pair in meetings(draws[-1:], axes):
            if pair in left:
                del left[pair]
                open_pairs.subtract((pair[:2], pair[2:]))
    return draws
