"""The protocol with a masked rank under seeded schedules: the words in its place end every wait, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.masked_runs import Form, check_calls, check_mismatch, check_refusals
from tests.tiers import seeds

FORMS = {
    "sums": Form(),
    "every_row": Form((("pre_reduce", False),)),
    "rank": Form((("layout", "rank"),)),
    "planned": Form(world=4),
}
"""With four ranks a planner waits for counts, and the others for headers."""


@seeds(1, 8, why="each form waits for other words of the masked rank")
@pytest.mark.parametrize("form", FORMS)
def test_calls_go_on_without_a_masked_rank(form: str, seeds: range) -> None:
    for seed in seeds:
        check_calls(FORMS[form], seed)


@seeds(1, 4)
def test_refusals_name_a_rank_that_takes_part(seeds: range) -> None:
    for seed in seeds:
        check_refusals(FORMS["sums"], 2, seed)


@seeds(1, 4)
def test_a_mismatch_names_a_rank_that_takes_part(seeds: range) -> None:
    for seed in seeds:
        check_mismatch(FORMS["planned"], 3, seed)
