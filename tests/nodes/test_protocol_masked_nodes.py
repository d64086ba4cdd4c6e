"""The protocol between nodes with masked ranks under seeded schedules, with one level and with two.

The network carries nothing to masked ranks. With two levels the ranks whose relay is masked exchange without one.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.masked_runs import Form, check_calls, check_mismatch, check_refusals
from tests.tiers import seeds


def of_nodes(node: int, world: int, *masked: int, **options: Any) -> Form:
    """Return the form of nodes of ``node`` ranks."""
    return Form((("transport", "symmetric"), ("ranks_per_node", node), *options.items()), world, masked)


FORMS = {
    "apart": of_nodes(2, 4, 1, 2, two_level=True),
    "one_level": of_nodes(2, 4, 1),
    "every_row": of_nodes(2, 4, 2, pre_reduce=False),
    "rank": of_nodes(1, 3, 1, layout="rank"),
    "a_node": of_nodes(2, 4, 2, 3),
    "two_of_three": of_nodes(2, 6, 1, 2),
    "levels": of_nodes(2, 4, 2, two_level=True),
    "levels_rank": of_nodes(2, 4, 1, two_level=True, layout="rank"),
    "levels_a_node": of_nodes(2, 4, 2, 3, two_level=True),
    "levels_wide": of_nodes(3, 6, 0, 4, two_level=True),
    "levels_of_three": of_nodes(2, 6, 1, 2, two_level=True),
    "levels_format": of_nodes(2, 4, 3, two_level=True, combine_format="mxfp8", hidden_size=32),
}


@seeds(1, 8)
@pytest.mark.parametrize("form", FORMS)
def test_calls_go_on_without_masked_ranks(form: str, seeds: range) -> None:
    for seed in seeds:
        check_calls(FORMS[form], seed)


WRONG = [("levels", 1), ("levels", 3), ("one_level", 3), ("levels_wide", 1)]
"""Forms, and a rank that takes part."""


@seeds(1, 8)
@pytest.mark.parametrize("form, odd", WRONG)
def test_refusals_name_a_rank_that_takes_part(form: str, odd: int, seeds: range) -> None:
    for seed in seeds:
        check_refusals(FORMS[form], odd, seed)


@seeds(1, 8)
def test_a_home_hears_of_a_refusal_past_a_masked_relay(seeds: range) -> None:
    for seed in seeds:
        check_refusals(FORMS["apart"], 3, seed)


@pytest.mark.full("the refusals above meet the same waits; kernels/test_protocol_masked.py has a mismatch on one node")
@seeds(1, 8)
@pytest.mark.parametrize("form, odd", [("levels", 3), ("levels", 1), ("one_level", 3)])
def test_a_mismatch_names_a_rank_that_takes_part(form: str, odd: int, seeds: range) -> None:
    for seed in seeds:
        check_mismatch(FORMS[form], odd, seed)
