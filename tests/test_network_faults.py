"""The network between nodes fails: seeded schedules in which puts are late, repeated, lost, and links are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

import fault_schedules
import moelink
from moelink.control import failure_detector
from moelink.kernels.launch import constants
from network_schedules import KINDS, Plan, TimedScheduler, run_plan

QUICK, ALL, CHUNK = 15, 300, 15


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TimedScheduler]]:
    """Kernels read the clock of the scheduler in this list. Launch constants hold the clock, so none is kept."""
    running: list[TimedScheduler] = []
    monkeypatch.setattr(constants, "host_clock", lambda: running[0].now)
    monkeypatch.setattr(failure_detector, "probe_all", fault_schedules.probe_all)
    kept = (constants.dispatch_spec, constants.combine_spec)
    for specs in kept:
        specs.cache_clear()
    yield running
    for specs in kept:
        specs.cache_clear()


@pytest.mark.parametrize("seeds", [range(first, first + CHUNK) for first in range(0, ALL, CHUNK)], ids=lambda s: f"{s[0]}")
def test_schedules_over_a_network_that_fails(seeds: range, clocks: list[TimedScheduler]) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        plan = Plan.draw(seed)
        print(plan)  # of a failure pytest shows it
        outcome = run_plan(plan, clocks)
        calls = (3 if plan.cached else 2) * plan.world
        seen[plan.kind] += 1
        if not outcome.errors:
            assert outcome.calls == [2 * calls], "calls are missing, and nobody was told"
            continue
        seen["failed"] += 1
        assert plan.loses, f"nothing was lost, but {outcome.errors}"
        assert outcome.links
        assert outcome.calls[1] == calls, "calls of the new communicator are missing"
        ends = {rank for link in outcome.links for rank in link}
        sources = {source for source, _ in outcome.links}
        (peer,) = {error.peer for error in outcome.errors.values()}
        assert peer in ends, f"{peer} is at neither end of a link that lost something, {outcome.links}"
        seen["source"] += peer in sources
        for error in outcome.errors.values():
            assert error.node == peer // plan.node
            assert f"rank {peer} of node {peer // plan.node}" in str(error)
            seen["undelivered"] += isinstance(error, moelink.UndeliveredError)
    print(seen)
    assert all(seen[kind] for kind in KINDS)
    assert seen["failed"] >= CHUNK // len(KINDS)
