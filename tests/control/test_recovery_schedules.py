"""Survivors never split and never hang: the real agreement under random faults, in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moelink.control import recovery
from tests.control.recovery_schedules import Simulation, prefixed
from tests.tiers import seeds


@pytest.fixture(autouse=True)
def _simulated_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "PrefixStore", prefixed)


def groups_of(seed: int, *, lingers: bool = True) -> tuple[Counter[str], int]:
    """How the ranks of a schedule ended, and how many groups living ranks believe in.

    Ranks of one group that have finished in the same corner are one group, whoever of it has not: they find that out
    in their first call, and the others are left out.
    """
    simulation = Simulation(seed, lingers=lingers)
    assert simulation.run(), f"seed {seed}: a rank hangs: {simulation.nodes}"
    nodes = [node for node in simulation.nodes if node.outcome == "finished" and not node.dies < simulation.clock.now]
    groups = {node.name if len(node.finished) > 1 else str(node.finished) for node in nodes}
    return Counter(node.outcome for node in simulation.nodes if node.outcome), len(groups)


@seeds(200, 5000)
def test_survivors_never_split(seeds: Any) -> None:
    ended: Counter[str] = Counter()
    for seed in seeds:
        outcomes, groups = groups_of(seed)
        assert groups <= 1, f"seed {seed}: {groups} groups believe that they are the survivors"
        assert "gave up" not in outcomes, f"seed {seed}: {outcomes}"
        ended += outcomes
    print(f"seeds {seeds}: {ended}")
    assert ended["finished"] > len(seeds)
    assert ended["dead"] > len(seeds) // 4


def test_a_probe_server_that_closes_at_once_splits_survivors() -> None:
    """What the simulation finds where a rank that has gone on looks like a dead one."""
    assert any(groups_of(seed, lingers=False)[1] > 1 for seed in range(2000))
