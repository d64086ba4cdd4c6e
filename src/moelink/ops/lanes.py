"""Open the lanes of a communicator, apply operations on the communicator to all of them, and open those of survivors.

A lane is a session with connections and, on the symmetric transport, a block of memory of its own, so that a call in it
may be in flight beside one of the same phase in another lane. Lanes share their fate
(:class:`moelink.transports.endings.Fate`). They do not share a failure detector's count of calls, because ranks may be
in different calls of two lanes at the same time and still be in step: each lane meets anew, as the sessions of
gradients do (:mod:`moelink.ops.gradient_communicators`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from moelink.config import EPConfig
from moelink.control.group import World, meet_again
from moelink.control.recovery import (
    LINGER_SECONDS,
    Surroundings,
    check_survivors,
    config_of_survivors,
    go_on,
    named_as_before,
    regroup,
)
from moelink.errors import ClosedError, PeerTimeoutError
from moelink.ops.context import OperatorContext
from moelink.transports.base import EVERY_CALL, Rehearsal, Traffic
from moelink.transports.build import open_session
from moelink.transports.counters import Counters

_log = logging.getLogger("moelink")


class Lanes:
    """Lanes of one communicator, by number; or one of them alone.

    Attributes:
        contexts: of each lane. A context has the lane's session, and those of its gradients.
        successor: the lanes of the survivors' communicator, once it has recovered.
    """

    def __init__(self, contexts: Sequence[OperatorContext]) -> None:
        self.contexts = tuple(contexts)
        self.successor: Lanes | None = None

    @classmethod
    def open(cls, config: EPConfig, device: torch.device, world: World) -> Lanes:
        """Open ``config.lanes`` lanes of this rank of ``world``. Collective over it.

        Raises: as :func:`moelink.transports.build.build_in_group`. Lanes that were opened are closed then.
        """
        session = open_session(config, device, world)
        _log.info("rank %d of %d: transport %s on %s", config.rank, config.world_size, session.transport.name, device)
        contexts = [OperatorContext(session, world)]
        with ExitStack() as opened:
            opened.callback(session.close)
            alone = dataclasses.replace(config, lanes=1)
            for _ in range(1, config.lanes):
                own = meet_again(world, config.timeout)
                beside = open_session(alone, device, own, session.fate)
                opened.callback(beside.close)
                contexts.append(OperatorContext(beside, own))
            opened.pop_all()
        return cls(contexts)

    def warmup(
        self, num_sms: Sequence[int] = (), calls: Rehearsal = EVERY_CALL, *, gradients: bool = False, load: bool = True
    ) -> None:
        """Compile and allocate for the first of these calls, also for calls with these SM limits. ``gradients``: and
        for their backwards, whose communicators are made where they are not yet. That is collective."""
        for lane in self.contexts:
            lane.session.warmup(num_sms, calls, load=load)
            if gradients:
                lane.gradients.warmup(load=load)

    def check(self) -> None:
        """Synchronise and raise the first error."""
        for lane in self.contexts:
            lane.session.check()
            lane.gradients.check()

    def traffic(self) -> Traffic:
        """Return the bytes of rows sent to other ranks, gradients included."""
        sent = [part.traffic() for lane in self.contexts for part in (lane.session, lane.gradients)]
        return Traffic(sum(each.dispatch for each in sent), sum(each.combine for each in sent))

    def counters(self) -> list[Counters | None]:
        """Return the counters of each lane, without those of its gradients; None of a closed one. From any thread."""
        found: list[Counters | None] = []
        for lane in self.contexts:
            session = lane.session
            with session.reading:
                found.append(None if session.closed else session.transport.counters()[0])
        return found

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and cannot recover."""
        session = self.contexts[0].session
        return session.closed and (session.detector is None or session.detector.closed)

    def release(self) -> None:
        """Release memory and SMs. Calls are no longer possible, but peers that probe this rank still get an answer."""
        for lane in self.contexts:
            lane.gradients.close()
            lane.session.release()

    def recover(self, ranks: Iterable[int]) -> Lanes:
        """Open the lanes of the survivors' communicator (:meth:`moelink.Communicator.recover`), and release these."""
        session = self.contexts[0].session
        own, detector = session.configs[0], session.detector
        session.guard.require_own_process("recover")
        if self.has_ended:
            raise ClosedError("recover")
        survivors = check_survivors(ranks, own)
        config = config_of_survivors(own, survivors)
        world = World(rank=0, world_size=1)
        around = Surroundings(detector) if detector is not None else None
        if around is not None and detector is not None:
            if detector.left_out is not None:
                raise detector.left_out
            if len(survivors) > 1:
                try:
                    world = regroup(around, survivors, own.timeout)
                except PeerTimeoutError as error:
                    detector.left_out = error if error.peer == error.rank else None
                    raise
        # Memory and SMs of the old generation make room for the new one.
        self.release()
        with named_as_before(around, survivors):
            recovered = self.successor = Lanes.open(config, session.devices[0], world)
        if around is not None:
            go_on(around, survivors)
            for lane in self.contexts:
                if lane.session.detector is not None:
                    lane.session.detector.close(after=3 * own.timeout + LINGER_SECONDS)
        return recovered

    def close(self) -> None:
        """Release everything, even if one lane raises. A second call does nothing."""
        with ExitStack() as closing:
            for lane in reversed(self.contexts):
                closing.callback(lane.session.close)
                closing.callback(lane.gradients.close)
