"""Ranks whose calls an exception enters at a chosen line, and what all ranks can do afterwards."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.testing import assert_bitwise_equal
from tests.support.fault_ranks import FIELDS, data
from tests.support.patience import HANG, join

PACKAGE = str(Path(moelink.__file__).parent)
KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError, ZeroDivisionError)
VICTIM = 1
SECONDS = 2 * HANG
"""Within which peers must hear, of a timeout twice as long: at once, but for a machine that is busy with other things.
"""

Place = tuple[str, int]


@dataclass
class Tracer:
    """Raises ``kind`` when a call of ``ep`` comes to ``target`` for the first time, on any of its threads.

    Lines that come before a call has begun are between two calls, so they do not count. Kernels do not either: there an
    interpreter runs.

    Attributes:
        seen: lines in the order in which calls came to them.
        elsewhere: whether it was raised on a thread of the transport's. Python does not trace a thread any more once
            its tracer has raised.
    """

    ep: Any = None
    target: Place | None = None
    kind: type[BaseException] = KeyboardInterrupt
    armed: bool = False
    raised: bool = False
    elsewhere: bool = False
    seen: dict[Place, None] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or (f"{PACKAGE}/kernels/" in name and not name.endswith("launcher.py")):
            return None
        if event == "line" and self.armed and self._begun():
            place = (name[len(PACKAGE) + 1 :], frame.f_lineno)
            self.seen.setdefault(place)
            if not self.raised and not self._unwinding(frame) and self._is_here(place):
                self.raised = True
                self.elsewhere = threading.current_thread() is not threading.main_thread()
                raise self.kind(f"at {place[0]}:{place[1]}")
        return self

    def _is_here(self, place: Place) -> bool:
        return place == self.target

    def _begun(self) -> bool:
        session, thread = self.ep._session, threading.current_thread()
        if thread is not threading.main_thread():  # the wire's, or one that answers or asks peers
            return thread.name.startswith("moelink-wire") and not session.transport._wire._complete
        return not session.complete or session.transport.partly_sent

    @staticmethod
    def _unwinding(frame: FrameType) -> bool:
        """Whether an exception is being handled already, or the call has left."""
        return sys.exc_info()[0] is not None


@dataclass
class Countdown(Tracer):
    """Raises at the ``left``-th line that calls come to."""

    left: int = 0

    def _is_here(self, place: Place) -> bool:
        self.left -= 1
        if self.left == 0:
            self.target = place
        return self.left == 0


def attempt(call: Any) -> tuple[Any, BaseException | None, float]:
    start = time.monotonic()
    try:
        result, error = call(), None
    except BaseException as caught:  # noqa: BLE001 - KeyboardInterrupt among them
        result, error = None, caught.with_traceback(None)
    return result, error, time.monotonic() - start


def everyone(value: Any, world_size: int) -> list[Any]:
    """``value`` of each rank, over a way that is not moelink's."""
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def make(transport: str, tracer: Tracer, **options: Any) -> moelink.Communicator:
    tracer.ep = join(2 * SECONDS, **FIELDS, transport=transport, **options)
    return tracer.ep


def trial(
    ep: Any, tracer: Tracer, rank: int, world_size: int, phase: str, seed: int, victim: int = VICTIM
) -> tuple[bool, str]:
    """One call of ``phase`` that is interrupted on ``victim``: whether the communicator goes on, and how it ended."""
    d = data(rank, seed)
    recv = ep.dispatch(d.x, d.topk_ids) if phase == "combine" else None
    call = (lambda: ep.dispatch(d.x, d.topk_ids)) if recv is None else (lambda: ep.combine(recv.tokens, recv))
    everyone(None, world_size)  # peers have ended the calls before, which they would else hear of this in
    tracer.armed, tracer.raised, tracer.elsewhere = rank == victim, False, False
    sys.settrace(tracer)
    result, error, seconds = attempt(call)
    sys.settrace(None)
    tracer.armed = False
    assert seconds < SECONDS, f"rank {rank}: {error!r} after {seconds:.1f} s"
    assert torch.is_grad_enabled(), f"rank {rank}: {error!r}"
    if rank != victim:
        allowed = (moelink.PeerAbortedError, moelink.PeerLeftError)
        assert error is None or (isinstance(error, allowed) and error.peer == victim), repr(error)
    elif error is not None:
        assert tracer.raised, repr(error)
        assert isinstance(error, (tracer.kind, moelink.PeerLeftError)), repr(error)
    ended = everyone(type(error).__name__, world_size)
    words = f"{phase} {tracer.target}: {ended}"
    # A call that was refused or lost its result is made again, in step, or all ranks hear that there is no other.
    _, told, seconds = attempt(lambda: check(ep, rank, seed + 1))
    assert seconds < SECONDS, f"{words}: rank {rank}: {told!r} after {seconds:.1f} s"
    after = everyone(type(told).__name__, world_size)
    assert len(set(after)) == 1, f"{words}, then {after}: rank {rank}: {told!r}"
    words = f"{words}, then {after[0]}"
    if told is None:
        return not any(everyone(tracer.elsewhere, world_size)), words
    assert isinstance(told, moelink.PeerLeftError), f"{words}: rank {rank}: {told!r}"
    assert told.peer == victim, f"{words}: rank {rank}: {told!r}"
    _, same, seconds = attempt(lambda: ep.combine(d.x, recv))
    assert str(same) == str(told), f"{words}: rank {rank}: {same!r}"
    assert seconds < SECONDS
    return False, words


def check(ep: Any, rank: int, seed: int) -> None:
    """A round trip is right, so that no row of another call came."""
    d = data(rank, seed)
    recv = ep.dispatch(d.x, d.topk_ids)
    got = ep.combine(recv.tokens, recv)
    routed = (d.topk_ids >= 0).sum(1, keepdim=True)
    assert_bitwise_equal(got, (d.x.float() * routed + 0.0).to(got.dtype), "the next call")


def interrupted(rank: int, world_size: int, transport: str, every: int, first: int) -> list[str]:
    """Interrupt calls at every ``every``-th line of their host path from ``first`` on; say how each ended."""
    tracer = Tracer()
    threading.settrace(tracer)
    ep = make(transport, tracer)
    ends = []
    for phase in ("dispatch", "combine"):
        check(ep, rank, 1)
        tracer.target, tracer.seen = None, {}
        trial(ep, tracer, rank, world_size, phase, 2)
        (places,) = [seen for seen in everyone(list(tracer.seen), world_size) if seen]
        for number, place in enumerate(places[first::every]):
            tracer.target, tracer.kind = place, KINDS[number % len(KINDS)]
            goes_on, words = trial(ep, tracer, rank, world_size, phase, 3 + number)
            ends.append(f"{tracer.kind.__name__} {words}")
            if not goes_on:
                ep.close()
                ep = make(transport, tracer)
                check(ep, rank, 1)
    ep.check()
    ep.close()
    return ends
