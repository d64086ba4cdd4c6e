"""Random schedules of a fault amid the steps of a balancer: all ranks use one map, or all end with one named error.

300 of them, and 108 with an exception at each place of a step; the quick tier has the first. What is different with
processes is in ``test_balance_faults.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.nn.balance_schedules import SPAN, WORLD, check, run
from tests.support.simulated_groups import KINDS, TIMEOUT, Fault
from tests.tiers import seeds


@pytest.mark.parametrize(
    "victim, places", [(1, range(6, 11)), *((victim, range(36)) for victim in range(WORLD))], ids=str
)
def test_an_exception_at_each_place_of_a_step(victim: int, places: range) -> None:
    """The step is called off on all ranks, or their communicators end."""
    seen: Counter[Any] = Counter()
    for place in places:
        ranks, said = run(5, Fault("raises", victim, place, 0.0))
        seen[check(ranks, said)] += 1
        assert ranks.hit
    print(seen)
    assert seen["ended"], seen


@pytest.mark.quick("a store whose host is stopped for less than the timeout ended all")
def test_a_late_host_of_the_store_ends_nothing() -> None:
    ranks, said = run(286, Fault("late", 0, 116, TIMEOUT - 0.8))
    assert check(ranks, said) == "finished"
    assert ranks.hit


@seeds(6, 300)
def test_steps_in_which_a_rank_is_hit(seeds: Any) -> None:
    seen: Counter[Any] = Counter()
    for seed in seeds:
        ranks, said = run(seed, Fault.draw(seed, WORLD, SPAN))
        seen[check(ranks, said), ranks.fault.kind] += 1
        seen["hit"] += ranks.hit
        seen["completed"] += sum(len(each.outputs) for each in said)
    print(seen)
    assert seen["hit"] > 3 * len(seeds) // 4, seen
    assert seen["completed"] > len(seeds), seen
    assert all(seen["ended", kind] for kind in KINDS if kind != "late"), seen


def test_steps_without_a_fault() -> None:
    ranks, said = run(0, Fault("killed", 0, 10**6, 0.0))
    assert check(ranks, said) == "finished"
    assert all(len(each.maps) > 2 for each in said)
