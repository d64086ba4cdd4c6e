"""Random schedules of refreshes and restorations in which ranks die or are interrupted, against brute force."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.nn.survival_schedules import newer_copy, run, run_at
from tests.tiers import seeds


@seeds(10, 400)
def test_restored_experts_are_those_that_somebody_had(seeds: Any) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run(seed)
    print(seen)
    assert min(seen[what] for what in ("calm", "killed", "raises", "lost", "restored")) > 0, seen


@pytest.mark.parametrize("places", [range(66, 71), range(132)], ids=["last vote of a layer", "all"])
def test_a_death_at_each_place_of_a_restoration_loses_nothing_of_the_living(places: range) -> None:
    assert all(run_at(place) for place in places)


def test_the_newest_copy_is_taken() -> None:
    newer_copy(min)
    newer_copy(max)
