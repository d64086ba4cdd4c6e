"""Seeded schedules of ranks that have calls of two lanes under way at a time, one of which a fault hits anywhere.

A rank starts a dispatch in each lane and waits for them in an order of its own, and so for combines. On the symmetric
transport every store of the kernels is a place to stop at (:mod:`tests.control.fault_schedules`); on the collective one
every message, probe and report is, of the real wire (:mod:`tests.support.simulated_groups`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import moelink
from moelink.communicator import Communicator
from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World
from moelink.memory import create_all
from moelink.memory.workspace import Workspace
from moelink.ops.context import OperatorContext
from moelink.ops.lanes import Lanes
from moelink.testing import assert_bitwise_equal
from moelink.transports.endings import Fate
from moelink.transports.session import Session
from moelink.transports.symmetric import SymmetricTransport
from tests.control.fault_schedules import WORLD, FaultScheduler, Oracle, PretendedAddress, PretendedProbeServer
from tests.support.cases import FIELDS, Case, Setup, check_rows
from tests.support.simulated_groups import AT_ONCE, PATIENCE, Fault, OddError, Rank, Ranks

LANES = 2
SETUP = Setup("bf16", (("max_tokens_per_rank", 3), ("hidden_size", 8)), num_experts=4, topk=2)
TOKEN = Case(SETUP, "uniform", seed=9)
SPAN = 500
"""Switches of a schedule of one turn on the symmetric transport, about."""
PLACES = 90
"""Places that a rank passes in three turns on the collective one, about."""


@dataclass
class Said:
    """What one rank got.

    Attributes:
        outputs: of its completed calls: the case, the rows, and the result or None.
        aborted: peers that refused a call.
        error: what ended its lanes.
        longest, after: the longest time that a call took, and one after the error.
    """

    outputs: list[tuple[Case, Any, Any]] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    error: moelink.PeerTimeoutError | None = None
    longest: float = 0.0
    after: float = 0.0

    def check(self, oracle: Oracle, rank: int) -> int:
        """Every completed call returned what the oracle says. How many there were."""
        for case, recv, out in self.outputs:
            rows, outs = oracle.of(case, WORLD)
            check_rows(f"rank {rank}", rows[rank], {name: getattr(recv, name) for name in FIELDS})
            if out is not None:
                assert_bitwise_equal(out, outs[rank], f"rank {rank}: combine")
        return sum(1 + (out is not None) for *_, out in self.outputs)


class Program:
    """What one rank does with its lanes; ``now`` tells the time."""

    def __init__(self, ep: Communicator, rank: int, said: Said, now: Callable[[], float], seed: int) -> None:
        self._lanes = [ep.lane(number) for number in range(LANES)]
        self._ep, self._rank, self._said, self._now = ep, rank, said, now
        self._choice = random.Random(f"lanes {seed} {rank}")

    def turn(self, cases: Sequence[Case]) -> None:
        """Dispatch and combine ``cases``, one in each lane, at a time."""
        datas = [case.data(self._rank) for case in cases]
        recvs = self._all([
            lambda lane=lane, d=d: lane.dispatch_async(d.x, d.topk_ids, d.topk_weights)
            for lane, d in zip(self._lanes, datas, strict=True)
        ])  # fmt: skip
        places = {}
        for number, recv in recvs.items():
            places[number] = len(self._said.outputs)
            self._said.outputs.append((cases[number], recv, None))
        ys = {number: cases[number].expert_rows(self._rank, recv.tokens.shape[0]) for number, recv in recvs.items()}
        starts = [
            (lambda n=n: self._lanes[n].combine_async(ys[n], recvs[n])) if n in recvs else None for n in range(LANES)
        ]
        for number, out in self._all(starts).items():
            self._said.outputs[places[number]] = (cases[number], recvs[number], out)

    def _all(self, starts: Sequence[Callable[[], Any] | None]) -> dict[int, Any]:
        """Start a call in each lane, wait for all; results by lane, of those that were not refused."""
        pending: dict[int, Any] = {}
        results: dict[int, Any] = {}
        for number, start in enumerate(starts):
            if start is not None:
                self._keep(pending, number, start)
        for number in self._choice.sample(sorted(pending), len(pending)):
            self._keep(results, number, pending[number].wait)
        return results

    def _keep(self, results: dict[int, Any], number: int, call: Callable[[], Any]) -> None:
        """Make ``call``, again where a handler's exception came: the caller still has what it waits with. Keep what it
        returns, unless a peer has refused it."""
        for left in reversed(range(3)):
            begin = self._now()
            try:
                results[number] = call()
                return
            except moelink.PeerAbortedError as error:
                self._said.aborted.append(error.peer)
                return
            except OddError:
                if not left:
                    raise
            finally:
                self._said.longest = max(self._said.longest, self._now() - begin)

    def leave(self) -> None:
        """End the program by an exception, which its ``with`` block notices."""
        self._ep._session.leave()
        error = self._ep._session.fate.error
        assert error is not None
        self.end(error)

    def end(self, error: moelink.PeerTimeoutError) -> None:
        """All lanes raise the same error at once."""
        self._said.error = error
        d = TOKEN.data(self._rank)
        for lane in self._choice.sample(self._lanes, LANES):
            for use in (lambda lane=lane: lane.dispatch_async(d.x, d.topk_ids), self._ep.check):
                begin = self._now()
                with pytest.raises(moelink.PeerTimeoutError) as again:
                    use()
                assert str(again.value) == str(error)
                self._said.after = max(self._said.after, self._now() - begin)


def run_collective(seed: int, fault: Fault, turns: Sequence[Sequence[Case]]) -> tuple[Ranks, list[Said]]:
    """``turns`` over the collective transport's wire; then calls until every rank has learned of an error."""
    ranks, said = Ranks(seed, fault, WORLD), [Said() for _ in range(WORLD)]

    def main(process: Rank) -> None:
        fields = dict(SETUP.options, num_experts=SETUP.num_experts, topk=SETUP.topk, lanes=LANES)
        program = Program(ranks.communicator(**fields), process.rank, said[process.rank], process.now, seed)
        process.arm()
        try:
            with torch.no_grad():
                for cases in (*turns, *turns[:1]):
                    program.turn(cases)
        except moelink.PeerTimeoutError as error:
            program.end(error)
        except OddError:  # it came when a call was over, whose result is lost
            program.leave()

    ranks.run(main)
    return ranks, said


def check_collective(ranks: Ranks, said: Sequence[Said], turns: int, oracle: Oracle) -> str:
    """Check what is promised; return how the schedule ended: "finished" or "ended"."""
    fault, victim = ranks.fault, ranks.fault.victim
    missing = ranks.hit and fault.kind in ("killed", "stopped")
    living = [rank for rank in range(WORLD) if not (missing and rank == victim)]
    ended = [rank for rank in living if said[rank].error is not None]
    assert not ended or (ranks.hit and not fault.is_harmless), f"{fault}: nothing happened, but {said}"
    for rank in range(WORLD):
        calls, error, where = said[rank].check(oracle, rank), said[rank].error, f"{fault}: rank {rank}"
        more = fault.seconds if rank == victim else 0.0
        assert said[rank].longest <= PATIENCE + more, f"{where} has waited for {said[rank].longest}"
        assert said[rank].after <= AT_ONCE + more, f"{where} has waited for {said[rank].after} after the error"
        if error is not None:
            # A late rank that has come by the time the others ask is not known any more: then nobody is named.
            assert error.peer == victim or (fault.kind == "late" and error.peer == -1), f"{where}: {error}"
        elif rank in living and fault.kind != "raises":
            assert calls == 2 * LANES * (turns + 1), f"{where}: calls are missing, and nobody was told"
        assert set(said[rank].aborted) <= {victim}, f"{where}: {said[rank]}"
    return "ended" if ended else "finished"


class Group:
    """Ranks with lanes over symmetric memory, in one schedule."""

    def __init__(self, scheduler: FaultScheduler) -> None:
        self._scheduler = scheduler
        configs = [SETUP.config(WORLD, rank) for rank in range(WORLD)]
        self._configs, nbytes = configs, Workspace(configs[0]).nbytes
        self._memories = [create_all(["cpu"] * WORLD, nbytes) for _ in range(LANES)]
        self._addresses = [
            [PretendedAddress(rank, PretendedProbeServer(), scheduler) for rank in range(WORLD)] for _ in range(LANES)
        ]

    def communicator(self, rank: int) -> Communicator:
        """Return that of ``rank``, as :func:`moelink.communicator.open_communicator` does."""
        config, fate, device, contexts = self._configs[rank], Fate(), torch.device("cpu"), []
        for number, (memories, addresses) in enumerate(zip(self._memories, self._addresses, strict=True)):
            server, identity = addresses[rank].probe_server, f"lane {number}"
            detector = FailureDetector(rank=rank, probe_server=server, addresses=addresses)  # type: ignore[arg-type]
            transport = SymmetricTransport([config], [memories[rank]], identity, detector)
            session = Session([config], [device], transport, identity, detector, fate)
            contexts.append(OperatorContext(session, World(rank, WORLD)))
        further = [Communicator(Lanes([each]), number=number) for number, each in enumerate(contexts) if number]
        return Communicator(Lanes(contexts), further)


@dataclass
class Outcome:
    """Of one schedule of kernels: who stopped, whether for good, what ranks got, and the switches."""

    victim: int
    dies: bool
    said: list[Said]
    switches: int


def run_kernels(seed: int, cases: Sequence[Case], clocks: list[FaultScheduler], *, limit: int) -> Outcome:
    """A turn on three ranks, one of which stops somewhere, and a turn more, in which all learn of it."""
    choice = random.Random(f"lanes {seed}")
    victim, dies = choice.randrange(WORLD), choice.random() < 0.5
    scheduler = FaultScheduler(seed, victim=victim, when=choice.randrange(SPAN), limit=limit, dies=dies)
    clocks[:] = [scheduler]
    group, said = Group(scheduler), [Said() for _ in range(WORLD)]
    done: set[int] = set()
    over: list[bool] = []

    def main(rank: int) -> Callable[[], None]:
        def run() -> None:
            program = Program(group.communicator(rank), rank, said[rank], lambda: scheduler.now, seed)
            try:
                program.turn(cases)
                done.add(rank)
                while not (over or len(done) == WORLD or scheduler.silent is not None or any(s.error for s in said)):
                    scheduler.pause(False)
                over.append(len(done) == WORLD and not any(s.error for s in said))
                if not over[0]:  # whoever gets here first decides for all
                    program.turn(cases)
            except moelink.PeerTimeoutError as error:
                program.end(error)
            if all(said[other].error for other in range(WORLD) if other != victim) and not dies:
                scheduler.resume()

        return run

    with torch.no_grad():
        scheduler.run([main(rank) for rank in range(WORLD)])
    return Outcome(victim, dies, said, scheduler.switches)
