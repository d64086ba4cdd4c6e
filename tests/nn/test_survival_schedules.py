"""Random schedules of refreshes and restorations in which ranks die or are interrupted, against brute force."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.nn.survival_schedules import run
from tests.tiers import seeds


@seeds(16, 400)
def test_restored_experts_are_those_that_somebody_had(seeds: Any) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run(seed)
    print(seen)
    assert min(seen[what] for what in ("calm", "killed", "raises", "lost", "restored")) > 0, seen
