"""Seeded schedules over a network that fails: puts late, in part twice, out of order, lost, links cut for a time.

All ranks and their network proxies run in one process on one thread (:mod:`moelink_testing`). Time is virtual: every
switch is a tick, and when nobody can go on, the clock jumps to just before the waits expire and then passes slowly, so
that they expire in the order in which they began. Peers are asked who lives by the real failure detector over a
pretended network of its own (:mod:`fault_schedules`), as hosts have beside the one that carries puts.

A schedule (:class:`Plan`) is drawn from its seed: nodes and ranks, few tokens or many, the way home, counted or cached
routing, one launch a call or two, and what goes wrong. :func:`run_plan` plays it and checks everything that is
promised. Where a rank stops, in place of the network, its proxy stops with it: what it has not put yet never arrives,
nor what it would have passed on for the other ranks of its node.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import moelink
from moelink import reference
from moelink.control.failure_detector import FailureDetector
from moelink.testing import assert_bitwise_equal
from moelink.transports.symmetric import SymmetricTransport
from moelink_testing import Deadlock
from moelink_testing.network import Cut, NetworkFaults
from tests.control.fault_schedules import PretendedAddress, PretendedProbeServer, StoppingScheduler
from tests.support.cases import FIELDS, Case, Setup, check_rows
from tests.support.protocol_runs import ScheduledProxy, Small, SpitefulProxy, transports
from tests.support.symmetric_ranks import combine_requests, dispatch_requests, over

SHAPES = ((2, 1), (3, 1), (4, 2))
"""(ranks, ranks of a node)."""
TICKS = 1_000_000
"""A wait's limit."""
SLOWLY = 4_000
"""Ticks before the end of a wait from which on the clock passes slowly. No call begins its waits so far apart."""
FEW, MANY = (2, 3, 1, 2), (7, 4, 9, 5)
"""Tokens of each rank. Of up to three, CTAs count alone; with more they share block counts."""
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sums": ({}, {}),
    "rows": ({"pre_reduce": False}, {"weights": "combine"}),
    "unreduced": ({}, {"weights": "none", "reduce": False}),
}
"""Ways home: options of the setup and of the case."""
KINDS = ("late", "repeated", "cut for a time", "lost", "cut for good")
"""What goes wrong with puts. Of the last two kinds some never arrive. Puts overtake one another in all."""
STOPS = ("stopped", "dead")
"""What happens to a rank instead: it continues when the others have raised, or never."""
SPAN = 2500
"""Switches of a schedule of four ranks with few tokens, about."""


class TimedScheduler(StoppingScheduler):
    """A schedule with a clock. ``stops``: rank, switch number and whether for good, if a rank stops.

    Attributes:
        now: the clock.
        lossy: something may have been lost, so that waits must expire. Else nobody able to go on is a deadlock.
    """

    def __init__(self, seed: int, *, stops: tuple[int, int, bool] | None = None, **options: Any) -> None:
        super().__init__(seed, patience=10**6, **options)
        self.now = 0
        self.lossy = False
        self._stops = stops
        self._rests, self._waits = 0, False

    def pause(self, progress: bool) -> None:
        """As in any schedule; where nobody can go on, time passes until waits expire."""
        if self._stops is not None and self.switches >= self._stops[1]:
            victim, _, dies = self._stops
            self._stops, self.lossy = None, True
            self.stop(victim)
            if dies:
                self.abandon()
        if progress:
            self._rests, self._waits = 0, False
        idle = self._idle - 40 * len(self._live)  # programs also go on without changing anything, for a while
        if idle >= 0 and self._rests > 2 and self.lossy and not self._waits:
            self.now += TICKS - SLOWLY
            self._waits = True
        self.now += 20 if self._waits else 1
        if idle > (4 * SLOWLY if self.lossy else 200 * len(self._live)):
            raise Deadlock(f"waits have not ended, {idle} switches after the last thing that happened")
        super().pause(progress)

    def rest(self, progress: bool) -> None:
        """Let others run, as the network, which has moved something, or will, if ``progress``."""
        self._rests += 1
        self.pause(progress)

    @property
    def moved(self) -> bool:
        """Whether somebody has made progress lately."""
        return self._idle < 2 * len(self._live)


class Detector(FailureDetector):
    """A failure detector whose rank lets others run where it would sleep."""

    scheduler: TimedScheduler

    def _await_report(self) -> None:
        for _ in range(20):
            if self.reported is None:
                self.scheduler.pause(False)


@dataclass(frozen=True)
class Plan:
    """One schedule.

    Attributes:
        seed: of everything.
        world, node: ranks, and ranks of a node.
        way, many, cached, fused: way home; whether tokens are many; whether each dispatch is repeated over its routing;
            whether a call is one launch.
        kind: what goes wrong.
        spiteful: whether puts are held back until later ones to the same word have arrived.
        rounds: how often ranks dispatch and combine.
        again: whether all call over a new communicator after an error.
        options: more options of the setup.
    """

    seed: int
    world: int
    node: int
    way: str
    many: bool
    cached: bool
    fused: bool
    kind: str
    spiteful: bool
    rounds: int
    options: tuple[tuple[str, Any], ...] = ()
    again: bool = True

    @classmethod
    def draw(cls, seed: int, options: tuple[tuple[str, Any], ...] = (), *, cheap: bool = False) -> Plan:
        """Draw the schedule of ``seed``. Consecutive seeds have every kind of fault, shape and way home in turn.

        ``cheap``: few tokens, which are sent once.
        """
        draw = random.Random(f"network {seed}")
        world, node = SHAPES[seed // len(KINDS) % len(SHAPES)]
        way = list(WAYS)[seed // len(KINDS) // len(SHAPES) % len(WAYS)]
        many, cached, fused, spiteful, twice = (draw.random() < share for share in (0.3, 0.3, 0.7, 0.3, 0.5))
        if cheap:
            many, fused, twice, spiteful, cached = False, True, False, seed % 5 == 1, seed % 5 == 2
            way = list(WAYS)[seed % len(WAYS)]
        kind = KINDS[seed % len(KINDS)]
        return cls(seed, world, node, way, many, cached, fused, kind, spiteful, 1 + twice, options)

    @property
    def loses(self) -> bool:
        """Whether puts may never arrive."""
        return self.kind in ("lost", "cut for good")

    @property
    def stops(self) -> tuple[int, int, bool] | None:
        """Which rank stops, at which switch, and whether for good; None where the network fails instead."""
        draw = random.Random(f"stop {self.seed}")
        return (draw.randrange(self.world), draw.randrange(SPAN), self.kind == "dead") if self.kind in STOPS else None

    @property
    def calls(self) -> int:
        """Calls that all ranks make in a round."""
        return (3 if self.cached else 2) * self.world

    def cases(self) -> list[Case]:
        """Two rounds, of which the second one is that of the new communicator, too."""
        of_setup, of_case = WAYS[self.way]
        fields = {"max_tokens_per_rank": 10, "hidden_size": 8, "ranks_per_node": self.node, **of_setup}
        setup = Setup("bf16", (*fields.items(), *self.options), num_experts=self.world + 1, topk=2)
        tokens = MANY if self.many else FEW
        later = tuple(max(1, each - 1) for each in tokens)
        return [
            WideSmall(setup, "uniform", seed=self.seed + number, tokens=each, **of_case)
            for number, each in enumerate((tokens, later))
        ]

    def faults(self, rank: int) -> NetworkFaults:
        """What goes wrong with the puts of ``rank``; one rank's links are the worst."""
        draw = random.Random(f"faults {self.seed}")
        victim = draw.randrange(self.world)
        far = [peer for peer in range(self.world) if peer // self.node != victim // self.node]
        after = draw.randrange(12)
        if self.kind in STOPS:
            return NetworkFaults(late=0.1, latest=60.0)
        if self.kind == "late":
            return NetworkFaults(late=0.3, latest=300.0)
        if self.kind == "repeated":
            return NetworkFaults(late=0.2, latest=60.0, repeat=0.5)
        if self.kind == "lost":
            return NetworkFaults(late=0.1, latest=60.0, repeat=0.2, lose=0.15 if rank == victim else 0.0)
        lasts = math.inf if self.kind == "cut for good" else 60.0 + draw.randrange(400)
        cuts = (Cut(draw.choice(far), after, lasts),) if rank == victim else ()
        return NetworkFaults(late=0.1, latest=60.0, cuts=cuts)


class WideSmall(Small):
    """As many tokens as ``tokens`` says, of up to ten."""

    def data(self, rank: int) -> Any:
        whole = dataclasses.replace(self, small=False)
        data = Case.data(whole, rank)
        if len(data.x) < self.tokens[rank]:
            more = Case.data(dataclasses.replace(whole, seed=self.seed + 1000), rank + 2)
            parts = zip(vars(data).values(), vars(more).values(), strict=True)
            data = type(data)(*map(torch.cat, parts))
        n = self.tokens[rank]
        return dataclasses.replace(data, x=data.x[:n], topk_ids=data.topk_ids[:n], topk_weights=data.topk_weights[:n])


@functools.lru_cache(maxsize=8)
def expected(case: Case, world: int) -> tuple[Any, Any]:
    """What every rank must get of ``case``: rows of dispatch and results of combine, by rank."""
    config, data = case.setup.config(world), [case.data(rank) for rank in range(world)]
    xs, ids, weights = [d.x for d in data], [d.topk_ids for d in data], [d.topk_weights for d in data]
    rows = reference.reference_dispatch(config, xs, ids, weights if case.travel else None)
    ys = [case.expert_rows(rank, rows[rank].tokens.shape[0]) for rank in range(world)]
    given = weights if case.weights == "combine" else None
    return rows, reference.reference_combine(config, ys, rows, ids, given, reduce=case.reduce)


@dataclass
class Group:
    """One communicator: its transports, and what each rank's completed calls returned."""

    plan: Plan
    transports: list[SymmetricTransport]
    outputs: list[tuple[int, Case, Any, Any]] = field(default_factory=list)

    @classmethod
    def make(cls, plan: Plan, scheduler: TimedScheduler, *, faulty: bool) -> Group:
        """With the faults of ``plan`` if ``faulty``; else puts are late and repeated."""
        setup = plan.cases()[0].setup
        addresses = [PretendedAddress(r, PretendedProbeServer(), scheduler) for r in range(plan.world)]
        detectors = []
        for rank, address in enumerate(addresses):
            detector = Detector(
                rank=rank, probe_server=address.probe_server, addresses=addresses,  # type: ignore[arg-type]
                ranks_per_node=plan.node,
            )  # fmt: skip
            detector.scheduler = scheduler
            detectors.append(detector)
        kind = SpitefulProxy if plan.spiteful else ScheduledProxy

        def proxy(memory: Any, *, seed: int, **options: Any) -> ScheduledProxy:
            quiet = dataclasses.replace(plan, kind="repeated")
            faults = (plan if faulty else quiet).faults(memory.rank)
            return kind(memory, seed=seed, **options, faults=faults.links(seed))

        seed = plan.seed if faulty else plan.seed + 7
        made = transports(setup, plan.world, seed=seed, proxies=proxy, detectors=detectors)
        for transport in made:
            transport.ranks[0].limit = TICKS
        return cls(plan, made)

    @property
    def proxies(self) -> list[ScheduledProxy]:
        return [transport.ranks[0].network.proxy for transport in self.transports]  # type: ignore[attr-defined]

    def call(self, rank: int, case: Case) -> None:
        """One dispatch, one over its routing if the plan says so, and one combine; what completed is kept."""
        transport, fused = self.transports[rank], self.plan.fused
        requests = dispatch_requests(case, [rank])
        (recv,) = transport.dispatch(requests, fused=fused).wait()
        self.outputs.append((rank, case, recv, None))
        if self.plan.cached:
            (recv,) = transport.dispatch(over([recv], requests), fused=fused).wait()
            self.outputs.append((rank, case, recv, None))
        (out,) = transport.combine(combine_requests(case, [rank], [recv]), fused=fused).wait()
        self.outputs.append((rank, case, recv, out))

    def check(self) -> int:
        """Every completed call returned what the oracle says. How many there were."""
        for rank, case, recv, out in self.outputs:
            rows, outs = expected(case, self.plan.world)
            check_rows(f"rank {rank}", rows[rank], {name: getattr(recv, name) for name in FIELDS})
            if out is not None:
                assert_bitwise_equal(out, outs[rank], f"rank {rank}: combine")
        return len(self.outputs)


@dataclass
class Outcome:
    """Of one schedule.

    Attributes:
        links: (source, destination) of each put that never arrived.
        errors: by rank; empty where all calls completed. A dead rank has none.
        calls: completed in each communicator.
    """

    links: set[tuple[int, int]]
    errors: dict[int, moelink.PeerTimeoutError]
    calls: list[int]


def run_plan(plan: Plan, clocks: list[TimedScheduler]) -> Outcome:
    """Play ``plan``: calls over the faulty network, and after an error, if ``plan.again``, calls over a new
    communicator of all ranks, unless one is dead."""
    scheduler = TimedScheduler(plan.seed, stops=plan.stops)
    victim = plan.stops[0] if plan.stops is not None else -1
    clocks[:] = [scheduler]
    old, new = Group.make(plan, scheduler, faulty=True), []
    first, last = plan.cases()
    errors: dict[int, moelink.PeerTimeoutError] = {}
    done: set[int] = set()
    left: list[int] = list(range(plan.world))
    over: list[bool] = []

    def call(rank: int, case: Case) -> None:
        begin = scheduler.now
        try:
            old.call(rank, case)
        except moelink.PeerTimeoutError:
            waited = (scheduler.now - begin) / TICKS
            # A wait may begin after others have expired, and another rank may be asked what it knows.
            most = math.inf if rank == victim else 2.5 if plan.world > 2 else 2.1
            assert waited < most, f"rank {rank} has waited for {waited} timeouts"
            raise

    def main(rank: int) -> None:
        try:
            for case in (first, last)[: plan.rounds]:
                call(rank, case)
            done.add(rank)
            while not (over or errors or len(done) == plan.world or scheduler.silent is not None):
                scheduler.pause(False)
            over.append(len(done) == plan.world and not errors)
            if over[0]:  # whoever gets here first decides for all
                return
            call(rank, first)  # a program goes on calling, and so learns that a rank has failed
        except moelink.PeerTimeoutError as error:
            errors[rank] = error
        stays_poisoned(old.transports[rank], first, rank, errors[rank])
        if not scheduler.gone and all(other in errors for other in range(plan.world) if other != scheduler.silent):
            resume()
        while len(errors) + scheduler.gone < plan.world:
            scheduler.pause(False)
        if scheduler.gone or not plan.again:
            return
        if not new:  # recover: new memory and a new network; what is still under way reaches the old memory
            new.append(Group.make(plan, scheduler, faulty=False))
        new[0].call(rank, last)

    def resume() -> None:
        if scheduler.silent is not None:
            scheduler.resume()

    def ended(rank: int) -> None:
        main(rank)
        left.remove(rank)
        if left == [scheduler.silent]:
            left.clear() if scheduler.gone else resume()

    def carry() -> None:
        while left:
            proxies = [
                proxy for group in (old, *new) for rank, proxy in enumerate(group.proxies) if rank != scheduler.silent
            ]
            # Nothing but the network moves where all others wait: then its time passes faster, which saves switches.
            hurry = 1 if scheduler.moved else 10
            moved = [any(proxy.step() for _ in range(hurry)) for proxy in proxies]
            stopped = scheduler.silent is not None
            scheduler.lossy = not new and (stopped or any(proxy.lost or proxy.stuck for proxy in old.proxies))
            scheduler.rest(any(moved) or not all(proxy.idle for proxy in proxies))

    scheduler.run([*(functools.partial(ended, rank) for rank in range(plan.world)), carry])
    calls = [group.check() for group in (old, *new)]
    links = {(rank, peer) for rank, proxy in enumerate(old.proxies) for peer in (*proxy.lost, *proxy.stuck)}
    for group in (old, *new):
        for transport in group.transports:
            transport.close()
    return Outcome(links, errors, calls)


def stays_poisoned(transport: SymmetricTransport, case: Case, rank: int, error: moelink.PeerTimeoutError) -> None:
    """Every further use raises the same error at once."""
    uses: tuple[Callable[[], Any], ...] = (
        lambda: transport.dispatch(dispatch_requests(case, [rank]), fused=True),
        transport.check,
    )
    for use in uses:
        with pytest.raises(moelink.PeerTimeoutError) as again:
            use()
        assert str(again.value) == str(error)
