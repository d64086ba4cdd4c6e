"""The network between nodes fails: seeded schedules in which puts are late, repeated, lost, and links are cut."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import moelink
from moelink.control import failure_detector
from moelink.kernels.launch import constants, device
from moelink.testing import run_ranks
from moelink_testing import Deadlock, Scheduler
from moelink_testing.network import Cut, NetworkFaults
from tests.control import fault_schedules
from tests.nodes.network_ranks import over_a_network
from tests.nodes.network_schedules import KINDS, STOPS, WAYS, Plan, TimedScheduler, run_plan
from tests.support.cases import Setup
from tests.support.patience import HANG, ROOMY, SHORT
from tests.support.protocol_runs import ScheduledProxy, Small, check, rank_main, transports
from tests.support.protocol_runs import play as play_schedule

ALL, CHUNK = 300, 15


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TimedScheduler]]:
    """Kernels read the clock of the scheduler in this list. Launch constants hold the clock, so none is kept."""
    running: list[TimedScheduler] = []
    monkeypatch.setattr(device, "host_clock", lambda: running[0].now)
    monkeypatch.setattr(failure_detector, "probe_all", fault_schedules.probe_all)
    kept = (constants.dispatch_spec, constants.combine_spec)
    for specs in kept:
        specs.cache_clear()
    yield running
    for specs in kept:
        specs.cache_clear()


def play(plan: Plan, clocks: list[TimedScheduler], seen: Counter[str]) -> None:
    """Play ``plan`` and check what it came to."""
    print(plan)  # of a failure pytest shows it
    outcome = run_plan(plan, clocks)
    seen[plan.kind] += 1
    if not outcome.errors:
        assert outcome.calls == [plan.rounds * plan.calls], "calls are missing, and nobody was told"
        return
    seen["failed"] += 1
    assert plan.loses, f"nothing was lost, but {outcome.errors}"
    assert outcome.calls[1] == plan.calls, "calls of the new communicator are missing"
    ends = {rank for link in outcome.links for rank in link}
    (peer,) = {error.peer for error in outcome.errors.values()}
    assert peer in ends, f"{peer} is at neither end of a link that lost something, {outcome.links}"
    seen["source"] += peer in {source for source, _ in outcome.links}
    for error in outcome.errors.values():
        assert error.node == peer // plan.node
        assert f"rank {peer} of node {peer // plan.node}" in str(error)
        seen["undelivered"] += isinstance(error, moelink.UndeliveredError)


@pytest.mark.parametrize("seeds", [
    pytest.param((12, 13), id="2x2"),
    pytest.param((0, 1, 2), marks=pytest.mark.quick("a link that fails, too"), id="2x1"),
    pytest.param((3, 4), id="2x1, more"), pytest.param((6, 39), id="3x1"),
])  # fmt: skip
def test_cheap_schedules(seeds: tuple[int, ...], clocks: list[TimedScheduler]) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        play(Plan.draw(seed, cheap=True), clocks, seen)
    print(seen)
    assert seen["failed"] == sum(seen[kind] for kind in KINDS[3:])


FIRST = [range(2, 3), *(range(first, first + CHUNK) for first in range(0, ALL, CHUNK))]


@pytest.mark.parametrize("seeds", FIRST, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_schedules(seeds: range, clocks: list[TimedScheduler]) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        play(Plan.draw(seed), clocks, seen)
    print(seen)
    if len(seeds) == CHUNK:
        assert all(seen[kind] for kind in KINDS)
        assert seen["failed"] >= CHUNK // len(KINDS)


LEVELS = (("two_level", True), ("transport", "symmetric"))


@pytest.mark.parametrize("seeds", [(3,), range(10), range(10, 30)], ids=["lost", "cheap", "any"])
def test_two_levels(seeds: Sequence[int], clocks: list[TimedScheduler]) -> None:
    """Two nodes of two ranks, where one rank of a node passes on what crossed the network."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        plan = Plan.draw(seed, LEVELS, cheap=seed < 10)
        play(dataclasses.replace(plan, world=4, node=2, way="sums"), clocks, seen)
    print(seen)
    assert len(seeds) == 1 or seen["failed"], "nothing was lost in any of them"


STOPPED = [range(first, first + 8) for first in range(0, 40, 8)]


@pytest.mark.full("seconds a schedule; test_fault_schedules.py has the quick ones of one level, of the same detector")
@pytest.mark.parametrize("seeds", STOPPED, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_a_rank_of_two_levels_stops(seeds: range, clocks: list[TimedScheduler]) -> None:
    """Anywhere, for good or for a while. Who waits for it lacks what it would have passed on, of others as well."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        plan = Plan.draw(seed, LEVELS, cheap=True)
        kind, again = STOPS[seed % len(STOPS)], seed % 8 == 0
        plan = dataclasses.replace(plan, world=4, node=2, way="sums", kind=kind, again=again, cached=False)
        print(plan, plan.stops)  # of a failure pytest shows it
        outcome = run_plan(plan, clocks)
        assert plan.stops is not None
        victim, _, dies = plan.stops
        if not outcome.errors:
            assert outcome.calls == [plan.rounds * plan.calls], "calls are missing, and nobody was told"
            continue
        seen[plan.kind] += 1
        assert outcome.errors.keys() == {rank for rank in range(plan.world) if rank != victim or not dies}
        assert {error.peer for error in outcome.errors.values()} == {victim}
        assert outcome.calls[1:] == [plan.calls] * (again and not dies), "calls of the new communicator are missing"
        for rank, error in outcome.errors.items():
            assert error.node == victim // plan.node
            assert rank == victim or isinstance(error, moelink.PeerLostError) == dies
    print(seen)
    assert sum(seen.values()) > len(seeds) // 2, seen


class RepeatingProxy(ScheduledProxy):
    """Does what no network may: what has arrived arrives again after its signal, when something later has come.

    ``before`` is shared by all ranks. Of ``signals`` it has the last one for each word, else the last data for each
    place, and which rank sent it; both come again half of the times that a later one, or another rank's, arrives.
    """

    def __init__(self, memory: Any, *, signals: bool, before: dict[Any, Any], **options: Any) -> None:
        super().__init__(memory, **options)
        self._signals, self._before = signals, before

    def _advance(self, put: Any) -> None:
        arrives = not put.pieces
        super()._advance(put)
        if not arrives:
            return
        block, again = self._blocks[put.peer], self._random.random() < 0.5
        if self._signals:
            if again and (put.peer, put.word) in self._before:
                block[: self._nbytes // 8 * 8].view("int64")[put.word] = self._before[put.peer, put.word]
            self._before[put.peer, put.word] = put.value
            return
        rank, data = self._before.get((put.peer, put.target), (self._rank, None))
        self._before[put.peer, put.target] = self._rank, block[put.target : put.target + 16].copy()
        if again and rank != self._rank:
            block[put.target : put.target + 16] = data


@pytest.mark.quick("a network that the protocol is not for must be told from one that it is for")
@pytest.mark.parametrize(
    "signals, way, world", [(True, "sums", 2), (False, "rows", 3)], ids=["a signal", "a row of another rank"]
)
def test_what_arrives_again_after_its_signal_does_harm(signals: bool, way: str, world: int) -> None:
    """So the network must not do it: ``memory.nodes.network_proxy`` says why."""
    of_setup, of_case = WAYS[way]
    fields = {"max_tokens_per_rank": 4, "hidden_size": 8, "ranks_per_node": 1, **of_setup}
    setup = Setup("bf16", tuple(fields.items()), num_experts=world, topk=2)
    cases = [Small(setup, "uniform", seed=seed, tokens=(2, 1, 1), **of_case) for seed in range(2)]

    def harm(seed: int) -> bool:
        proxies = functools.partial(RepeatingProxy, signals=signals, before={})
        group, results = transports(setup, world, seed=seed, proxies=proxies), {}
        mains = [rank_main(transport, rank, cases, results, fused=True) for rank, transport in enumerate(group)]
        try:
            play_schedule(Scheduler(seed, patience=60), group, mains)
            check(cases, results, world=world)
        except (Deadlock, moelink.MoelinkError, AssertionError):
            return True
        return False

    assert any(harm(seed) for seed in range(20))


def only(rank: int, peer: int, **cut: float) -> dict[int, NetworkFaults]:
    """Faults of one link that is cut after a round."""
    return {rank: NetworkFaults(cuts=(Cut(peer, 9, **cut),))}


@pytest.mark.parametrize(
    "world_size, faults",
    [(2, only(0, 1)), (2, only(1, 0)), (3, only(2, 1)), (4, only(1, 2)), (2, {0: NetworkFaults(lose=0.2)}),
     (4, {3: NetworkFaults(lose=0.2, peers=frozenset({1}))})],
    ids=["2x1", "2x1 back", "3x1", "2x2", "2x1 lossy", "2x2 lossy"],
)  # fmt: skip
@pytest.mark.parametrize("pre_reduce", [True, False], ids=["sums", "rows"])
def test_a_link_that_is_cut_is_named_in_time_and_ranks_recover(
    world_size: int, faults: dict[int, NetworkFaults], pre_reduce: bool
) -> None:
    node = max(1, world_size // 2) if world_size != 3 else 1
    fields = {"ranks_per_node": node, "pre_reduce": pre_reduce}
    # Of two ranks each is at an end of the link. A third one computes meanwhile, which takes time on a busy machine.
    seconds = SHORT if world_size == 2 else 5.0
    results = run_ranks(over_a_network, world_size, fields, faults, 50, seconds, timeout=200)
    ((source, fault),) = faults.items()
    ends = {source, *(cut.peer for cut in fault.cuts), *(fault.peers or range(2 if fault.lose else 0))}
    for result in results:
        assert result is not None, "nobody was told"
        name, peer, at, took = result
        assert name in ("UndeliveredError", "PeerTimeoutError")
        assert at == peer // node
        assert took < HANG
        assert peer in ends
    assert len({peer for _, peer, _, _ in results}) == 1


def test_links_that_are_cut_for_a_time_and_everything_late_and_twice() -> None:
    bad = NetworkFaults(late=0.3, latest=0.02, repeat=0.3, cuts=(Cut(0, 20, 0.2), Cut(1, 35, 0.2)))
    faults = {0: dataclasses.replace(bad, cuts=(Cut(1, 15, 0.3),)), 1: bad}
    assert run_ranks(over_a_network, 2, {"ranks_per_node": 1}, faults, 3, ROOMY, timeout=200) == [None] * 2
