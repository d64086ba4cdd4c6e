"""Seeded schedules in which a rank stops anywhere, for good or for a while, and the others recover without it.

All ranks run in one process on one thread (:mod:`moelink_testing`): every store and every atomic is a place to stop at.
Time passes only when nobody can go on, so that a wait expires exactly when what it waits for never comes; a schedule
takes milliseconds, whatever the time-out. Peers are asked who lives by the real
:class:`~moelink.control.failure_detector.FailureDetector`, over a pretended network. What is really different with
processes (sockets, SIGKILL, memory) is in ``test_faults.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import moelink
from moelink import reference
from moelink.control.failure_detector import FailureDetector
from moelink.control.probe import Failure, ProbeResult
from moelink.memory import create_all
from moelink.memory.workspace import Workspace
from moelink.testing import assert_bitwise_equal
from moelink.transports.symmetric import SymmetricTransport
from moelink_testing import Scheduler
from tests.support.cases import FIELDS, Case, Setup, check_rows
from tests.support.symmetric_ranks import combine_requests, dispatch_requests, poison_memory

WORLD = 3
SPAN = 300
"""Switches of a schedule without a fault, about."""

GARBAGE = ("messages", "rows", "counts", "row_table", "firsts", "block_counts")


class StoppingScheduler(Scheduler):
    """A schedule in which one rank may be stopped: all its programs, with what is in their store buffers.

    Attributes:
        silent: the rank that is stopped now, or is gone, or None.
        gone: its process is.
    """

    silent: int | None = None
    gone = False
    _stopped: Sequence[Any] = ()

    def stop(self, victim: int) -> None:
        """Rank ``victim`` is not chosen any more."""
        self.silent = victim
        self._stopped = [p for p in self._live if p.name.split(":")[0] == f"rank{victim}"]
        self._live[:] = [p for p in self._live if p not in self._stopped]
        self._idle = 0

    def resume(self) -> None:
        """The stopped rank continues where it was."""
        self.silent = None
        self._live += self._stopped
        self._stopped = []

    def abandon(self) -> None:
        """The stopped rank is dead. Stores that were under way arrive, or do not. It stays silent."""
        self.gone = True
        for program in self._stopped:
            while program.stores and self._random.random() < 0.5:
                self._drain_one(program)
            program.stores.clear()
        self._stopped = []

    def state(self, rank: int) -> str:
        """ "" for a rank that lives, "stopped" or "gone"."""
        return "" if rank != self.silent else "gone" if self.gone else "stopped"


class FaultScheduler(StoppingScheduler):
    """Stops rank ``victim`` at switch number ``when``; for good if it ``dies``.

    Attributes:
        now: the clock. With nobody able to go on it moves past ``limit``, which every wait's time-out is below.
    """

    def __init__(self, seed: int, *, victim: int, when: int, limit: int, dies: bool) -> None:
        super().__init__(seed, patience=12)
        self._victim, self._when, self._limit, self._dies = victim, when, limit, dies
        self.now = 0

    def pause(self, progress: bool) -> None:
        """As in any schedule; a rank that is stopped is not chosen any more."""
        if self.silent is None and 0 <= self._when <= self.switches:
            self._when = -1
            self.stop(self._victim)
            if self._dies:
                self.abandon()
        if self._idle >= self._patience * len(self._live):
            self.now += self._limit + 1
            self._idle = 0
        super().pause(progress)


@dataclass
class PretendedProbeServer:
    """What a FailureDetector needs of a probe server."""

    progress: tuple[int, str] = 0, "dispatch"
    failure: Failure | None = None
    masked: tuple[int, int] | None = None
    closed: bool = False

    @property
    def call(self) -> int:
        """The number in ``progress``."""
        return self.progress[0]

    def enter(self, phase: str) -> int:
        """As :meth:`moelink.control.probe.ProbeServer.enter`."""
        self.progress = self.call + 1, phase
        return self.call

    def close(self, after: float = 0.0) -> None:
        """Do not answer any more, unless that is to be later."""
        self.closed = self.closed or after == 0


@dataclass
class Silence:
    """In place of a scheduler: the rank that is stopped, or None."""

    rank: int | None = None

    def state(self, rank: int) -> str:
        """As :meth:`StoppingScheduler.state`."""
        return "stopped" if rank == self.rank else ""


@dataclass
class PretendedAddress:
    """Where a rank of this process is asked: at once, and without an answer while it is stopped, or once it is gone."""

    old_rank: int
    probe_server: PretendedProbeServer
    scheduler: Any

    def probe(self, report: Failure | None) -> ProbeResult:
        """As :func:`moelink.control.probe.probe`."""
        self.probe_server.failure = self.probe_server.failure or report  # in a stopped rank's socket until it continues
        state = "gone" if self.probe_server.closed else self.scheduler.state(self.old_rank)
        if state:
            return ProbeResult(call=None, stopped=state == "stopped", lost=state == "gone")
        return ProbeResult(*self.probe_server.progress)


def probe_all(
    addresses: Sequence[PretendedAddress], ranks: Sequence[int], report: Failure | None = None
) -> dict[int, ProbeResult]:
    """As :func:`moelink.control.probe.probe_all`."""
    return {rank: addresses[rank].probe(report) for rank in ranks}


class Oracle:
    """What every rank must get of a case; each is computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, case: Case, world: int) -> tuple[Any, Any]:
        """Rows of dispatch and results of combine, by rank."""
        if (case, world) not in self._known:
            config, ranks = case.setup.config(world), range(world)
            datas = [case.data(rank) for rank in ranks]
            xs, ids = [d.x for d in datas], [d.topk_ids for d in datas]
            rows = reference.reference_dispatch(config, xs, ids, [d.topk_weights for d in datas])
            ys = [case.expert_rows(rank, rows[rank].tokens.shape[0]) for rank in ranks]
            self._known[case, world] = rows, reference.reference_combine(config, ys, rows, ids, None)
        return self._known[case, world]


@dataclass
class Generation:
    """One communicator: the transports of its ranks, what each rank's completed calls returned, and when each rank has
    entered its last one."""

    world: int
    transports: list[SymmetricTransport]
    outputs: list[list[tuple[Case, Any, Any]]]
    scheduler: FaultScheduler
    entered: list[int]

    @classmethod
    def make(cls, setup: Setup, old_ranks: Sequence[int], scheduler: FaultScheduler) -> Generation:
        """Over these ranks, whose memory holds garbage where nobody promised zeros."""
        world = len(old_ranks)
        configs = [setup.config(world, rank) for rank in range(world)]
        workspace = Workspace(configs[0])
        memories = create_all(["cpu"] * world, workspace.nbytes)
        for memory in memories:
            for region in workspace.regions:
                if region.name in GARBAGE:
                    poison_memory(region.view(memory.local))
        addresses = [PretendedAddress(old, PretendedProbeServer(), scheduler) for old in old_ranks]
        transports = []
        for rank, (config, memory, address) in enumerate(zip(configs, memories, addresses, strict=True)):
            detector = FailureDetector(rank=rank, probe_server=address.probe_server, addresses=addresses)  # type: ignore[arg-type]
            transports.append(SymmetricTransport([config], [memory], "test", detector))
        return cls(world, transports, [[] for _ in range(world)], scheduler, [0] * world)

    def call(self, rank: int, case: Case) -> None:
        """One dispatch and one combine of ``case``; what completed is kept."""
        self.entered[rank] = self.scheduler.now
        (recv,) = self.transports[rank].dispatch(dispatch_requests(case, [rank]), fused=True).wait()
        self.outputs[rank].append((case, recv, None))
        self.entered[rank] = self.scheduler.now
        (out,) = self.transports[rank].combine(combine_requests(case, [rank], [recv]), fused=True).wait()
        self.outputs[rank][-1] = (case, recv, out)

    def check(self, oracle: Oracle) -> int:
        """Every completed call of every rank returned what the oracle says. How many there were."""
        calls = 0
        for rank, completed in enumerate(self.outputs):
            for case, recv, out in completed:
                rows, outs = oracle.of(case, self.world)
                check_rows(f"rank {rank}", rows[rank], {name: getattr(recv, name) for name in FIELDS})
                if out is not None:
                    assert_bitwise_equal(out, outs[rank], f"rank {rank}: combine")
                calls += 1 + (out is not None)
        return calls


@dataclass
class Outcome:
    """Of one schedule.

    Attributes:
        victim, dies: the rank that stopped, and whether for good.
        errors: of the first generation, by rank. Empty if all calls were over before the rank stopped.
        waited: the time for which each of them was waited for in its dispatch or combine.
        calls: dispatches and combines completed, on all ranks together, in each generation.
        switches: of the whole schedule.
    """

    victim: int
    dies: bool
    errors: dict[int, moelink.PeerTimeoutError]
    waited: dict[int, int]
    calls: list[int]
    switches: int


def run_schedule(
    seed: int,
    before: Sequence[Case],
    after: Sequence[Case],
    oracle: Oracle,
    clocks: list[FaultScheduler],
    *,
    limit: int,
) -> Outcome:
    """``before`` on three ranks, one of which stops somewhere; ``after`` on the other two, once both have raised.

    Half of the stopped ranks are dead. The other half continue while the survivors are at work, and go on storing.
    """
    choice = random.Random(seed)
    victim, dies = choice.randrange(WORLD), choice.random() < 0.5
    scheduler = FaultScheduler(seed, victim=victim, when=choice.randrange(SPAN), limit=limit, dies=dies)
    clocks[:] = [scheduler]
    survivors = [rank for rank in range(WORLD) if rank != victim]
    old = Generation.make(before[0].setup, range(WORLD), scheduler)
    new: list[Generation] = []
    done: set[int] = set()
    over: list[bool] = []
    errors: dict[int, moelink.PeerTimeoutError] = {}
    waited: dict[int, int] = {}

    def main(rank: int) -> Callable[[], None]:
        def run() -> None:
            try:
                for case in before:
                    old.call(rank, case)
                done.add(rank)
                while not (over or len(done) == WORLD or scheduler.silent is not None or errors):
                    scheduler.pause(False)
                over.append(len(done) == WORLD and not errors)
                if over[0]:  # whoever gets here first decides for all
                    return
                old.call(rank, before[0])  # a program goes on calling, and so learns that a rank is missing
            except moelink.PeerTimeoutError as error:
                errors[rank], waited[rank] = error, scheduler.now - old.entered[rank]
            if rank == victim:
                return
            while not all(other in errors for other in survivors):  # recover waits for all of them
                scheduler.pause(False)
            if not new:
                if not dies:
                    scheduler.resume()
                new.append(Generation.make(after[0].setup, survivors, scheduler))
            for case in after:
                new[0].call(survivors.index(rank), case)

        return run

    scheduler.run([main(rank) for rank in range(WORLD)])
    calls = [generation.check(oracle) for generation in (old, *new)]
    return Outcome(victim, dies, errors, waited, calls, scheduler.switches)
