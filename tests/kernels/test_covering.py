"""Covering arrays: every pair that the rules allow meets in a row, and no row breaks a rule."""

import doctest
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import covering
from tests.kernels.covering import covering_rows, needs, pairs_of

NAMES = "abcde"


@st.composite
def arrays(draw):
    """Switches, and rules that forbid some combinations of two or three of them."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=len(NAMES)))
    switches = {name: tuple(range(size)) for name, size in zip(NAMES, sizes, strict=False)}
    rules = []
    for _ in range(draw(st.integers(0, 4))):
        over = draw(st.lists(st.sampled_from(sorted(switches)), min_size=1, max_size=3, unique=True))
        product = list(itertools.product(*(switches[name] for name in over)))
        forbidden = frozenset(draw(st.lists(st.sampled_from(product), max_size=4)))
        rules.append(rule_of(over, forbidden))
    return switches, rules


def rule_of(over, forbidden):
    """A rule of the switches ``over`` that forbids some of their combinations."""
    scope = {"forbidden": forbidden}
    exec(f"def rule({', '.join(over)}): return ({', '.join(over)},) not in forbidden", scope)
    return scope["rule"]


def keeps(row, rules):
    return all(rule(**{name: row[name] for name in rule.__code__.co_varnames}) for rule in rules)


@settings(deadline=None, max_examples=60, database=None)
@given(arrays(), st.integers(0, 3))
def test_every_possible_pair_meets_and_rules_hold(array, seed):
    switches, rules = array
    rows = covering_rows(switches, rules, seed=seed, tries=3)
    assert all(keeps(row, rules) for row in rows)
    product = (dict(zip(switches, values, strict=True)) for values in itertools.product(*switches.values()))
    assert pairs_of(rows) == pairs_of(row for row in product if keeps(row, rules))
    assert rows == covering_rows(switches, rules, seed=seed, tries=3)


def test_rows_are_few():
    """A product of 2 ** 13 * 9 * 3 has rows for 27 pairs of its largest switches, and little more."""
    switches = {"format": range(9), "kernel": range(3)} | {f"switch{i}": (False, True) for i in range(13)}
    rows = covering_rows(switches)
    assert 27 <= len(rows) <= 31


def test_more_than_two_values_meet_where_that_is_wanted():
    switches, part = {name: (0, 1) for name in NAMES}, {"a": 1, "b": 1, "c": 0, "e": 1}
    rows = covering_rows(switches, needs("d", 1, a=(0,)), wanted=[part])
    assert any(part.items() <= row.items() and row["d"] == 0 for row in rows)
    with pytest.raises(ValueError, match="wanted: expected values that the rules let meet"):
        covering_rows(switches, needs("d", 1, a=(0,)), wanted=[{"a": 1, "d": 1}])


def test_the_examples_of_the_docstring():
    assert doctest.testmod(covering).failed == 0


def test_a_value_that_need_meet_no_other_is_in_a_row():
    rows = covering_rows({"a": (0, 1, 2), "b": (0, 1)}, meets={"a": ()})
    assert len(rows) == 3
    assert {row["a"] for row in rows} == {0, 1, 2}
