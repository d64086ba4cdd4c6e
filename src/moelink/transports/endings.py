"""Hold a communicator beside its calls: its state, the error that has ended it, and the order after an exception.

An exception may enter a call anywhere: a signal's handler, KeyboardInterrupt, MemoryError, a hook of the user. The
session then leaves the rank's calls in step with its peers', or ends its part (:meth:`Endings.unwind`). A call has
three parts:

===========  ===========================================================================================================
checking     nothing has been sent: the exception is told to the peers as a refusal. They raise PeerAbortedError, and
             the next call works.
partly sent  (``transport.partly_sent``, or a wait that the caller cannot repeat) peers wait for rows that this rank
             will not send, or have seen some: ``transport.abandon`` poisons all ranks, which raise PeerLeftError at
             once.
complete     the call is over, was refused, or goes on by itself, as an asynchronous one does on the collective
             transport: nothing is told, and the next call is in step.
===========  ===========================================================================================================

An error with ``ends_communicator`` is that of all later calls: of an expired wait, or of a mismatched call. The
transport has told the peers of the former; of a mismatch (:mod:`moelink.control.mismatch`) the session tells them.

``complete`` is cleared first and set as soon as a state says so, on this thread alone. So an exception at any line
finds the part that the call is in, or an earlier one of the same meaning. The time before the clearing is between two
calls. Peers cannot overtake: a refused call takes part in its exchange as any other, and a poisoned rank makes no
further call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from threading import RLock
from typing import Any

import torch.utils.checkpoint
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.failure_detector import FailureDetector
from moelink.control.probe import GONE, INTERRUPTED, LEFT, NO_ANSWER, Failure
from moelink.errors import (
    ArgumentError,
    ClosedError,
    ConcurrencyError,
    ForkedError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
)
from moelink.output import DispatchOutput
from moelink.transports.base import EVERY_CALL, Pending, Phase, Rehearsal, Traffic, Transport
from moelink.transports.counters import Failures
from moelink.transports.guard import Guard
from moelink.transports.pending import Started
from moelink.transports.validation import check_num_sms

_STOP: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
"""The exception with which torch ends a recomputation once it has all that it needs. If checkpointing had kept an
operator's result, the operator did not run, so there was no call that could be refused."""


class Fate:
    """The error that ends the sessions of one communicator together: those of its lanes and those that gradients travel
    over.

    Attributes:
        error: the first error with ``ends_communicator`` that a call of any of them met; all later calls raise it.
        sessions: those of them that are open; a closed one is freed when nobody else refers to it.
        failures: of their calls.
    """

    def __init__(self) -> None:
        self.error: PeerError | None = None
        self.sessions: list[Endings] = []
        self.failures = Failures()


class Endings:
    """Local ranks of one communicator beside their calls, which :class:`~moelink.transports.session.Session` adds.

    Attributes:
        configs: one configuration per local rank.
        devices: the device of each local rank.
        identity: name of this communicator, the same on every rank.
        detector: the failure detector of its peers; None if all ranks are in this process.
        guard: admits one thread of this process.
        fate: the error that has ended it, shared with the sessions of its gradients.
        complete: whether the present call needs nothing told any more (see the module's docstring).
        closed: whether calls are no longer possible.
        masked: ranks that calls go on without, ascending.
        after_end: called once a call has met a PeerTimeoutError; it may raise another one in its place, and let the
            communicator go on.
        reading: held by a thread that reads the transport's counters, which is not released meanwhile.
    """

    def __init__(
        self,
        configs: Sequence[EPConfig],
        devices: Sequence[torch.device],
        transport: Transport,
        identity: str,
        detector: FailureDetector | None = None,
        fate: Fate | None = None,
    ) -> None:
        self.configs, self.devices, self.identity = tuple(configs), tuple(devices), identity
        self.transport, self.detector = transport, detector
        self.guard, self.fate = Guard(), fate or Fate()
        self.fate.sessions.append(self)
        self._pending: dict[Phase, Started] = {}
        self._checked: set[Hashable] = set()
        self._phase: Phase = "dispatch"
        self._waiting: Pending[Any] | None = None
        self.complete, self.closed = True, False
        self.masked: tuple[int, ...] = ()
        self.after_end: Callable[[PeerTimeoutError], None] = lambda error: None
        self.reading = RLock()

    def raise_fate(self) -> None:
        """Raise the error that has ended this communicator, if one has."""
        if self.fate.error is not None:
            self.complete = True
            raise self.fate.error.with_traceback(None)

    def unwind(self, phase: Phase, error: BaseException, over: Callable[[], object] = lambda: None) -> None:
        """Bring an exception that leaves a call in order (see the module's docstring).

        ``over``: returns the earlier output that the call was to use, unchecked; called where the call is refused.
        """
        if isinstance(error, _STOP):
            self.complete = True
            return
        self.fate.failures.add(phase, error)
        if isinstance(error, (ForkedError, ConcurrencyError)):
            return
        waiting, complete = self._waiting, self.complete
        # A call that goes on is also partly sent if the caller has no object left by which to wait for it.
        partly_sent = self.transport.partly_sent or (waiting is not None and not waiting.over)
        self.transport.partly_sent, self.complete, self._waiting = False, True, None
        if isinstance(error, PeerError) and error.ends_communicator:
            self._meet(error)
        elif partly_sent and not isinstance(error, PeerError):
            self._end(self.transport.abandon(self._own_failure(phase, INTERRUPTED)))
        elif not complete:
            self._refuse(phase, over())
            self.transport.partly_sent = False

    def _meet(self, error: PeerError) -> None:
        """End the communicator with ``error``, unless ``after_end`` lets it go on. A mismatch is no rank's end, so it
        masks none."""
        self._end(error)
        if isinstance(error, PeerTimeoutError):
            self.after_end(error)

    def _end(self, error: PeerError) -> None:
        """Make all later calls raise ``error``, with those of the other sessions, and tell their peers.

        A transport has told its peers of its own PeerTimeoutError, and leaves a mismatch to its session.
        """
        if self.fate.error is not None:
            return
        self.fate.error = error
        self.fate.failures.add(error.phase, error)
        has_told = isinstance(error, PeerTimeoutError)
        for session in tuple(self.fate.sessions):
            if not session.closed and not (session is self and has_told):
                session.transport.abandon(Failure.of(error))

    def _own_failure(self, phase: Phase, how: int) -> Failure:
        call = 0 if self.detector is None else self.detector.probe_server.call
        return Failure(self.configs[0].rank, phase, call, expected=call, got=how)

    def end(self, cause: PeerTimeoutError | None) -> PeerError:
        """End the communicator for a failure outside of its calls, and tell the peers; return the error that it raises
        now.

        ``cause`` names the rank at fault, or nobody (-1), and so do all ranks then; None: an exception came over this
        rank when peers counted on it.
        """
        if self.fate.error is None and not self.closed:
            failure = self._own_failure(self._phase, INTERRUPTED)
            if cause is not None:
                lost = isinstance(cause, PeerLostError)
                got = GONE if lost else NO_ANSWER
                failure = dataclasses.replace(failure, peer=cause.peer, expected=failure.call + 1, got=got)
            self._end(self.transport.abandon(failure))
        assert self.fate.error is not None
        return self.fate.error

    def leave(self) -> None:
        """Tell the peers that an exception ends this rank's part, so that none waits for it."""
        travels = self.configs[0].mode == "alltoall"
        if travels and self.detector is not None and not self.closed and self.fate.error is None:
            self._end(self.transport.abandon(self._own_failure(self._phase, LEFT)))

    def _refuse(self, phase: Phase, over: object) -> None:
        mine = isinstance(over, DispatchOutput) and over.handle.owner == self.identity
        try:
            self.transport.refuse(phase, over=over if mine else None)  # type: ignore[arg-type]
        except ProtocolError as error:
            self._end(error)

    def failure_after(self, error: BaseException) -> BaseException:
        """Return the error that later waits of a call raise after ``error``: the one that has ended the communicator,
        or that."""
        return self.fate.error or error

    def warmup(self, num_sms: Sequence[int] = (), calls: Rehearsal = EVERY_CALL, *, load: bool = True) -> None:
        """See :class:`moelink.transports.base.Transport`."""
        self.require_open("warmup")
        if not isinstance(num_sms, Sequence):
            raise ArgumentError("num_sms", "a sequence of integers", f"a {type(num_sms).__name__}")
        for config, device in zip(self.configs, self.devices, strict=True):
            for limit in num_sms:
                check_num_sms(config, limit, transport=self.transport.name, device=device)
        self.transport.warmup(num_sms, calls, load=load)

    def traffic(self) -> Traffic:
        """Return the bytes of rows sent to other ranks."""
        self.require_open("traffic")
        return self.transport.traffic()

    def dev_ptrs(self) -> list[Tensor]:
        """Per local rank the [2, 3] pointer table."""
        self.require_open("dev_ptrs")
        return self.transport.dev_ptrs()

    def atomic_counters(self) -> list[tuple[Tensor, Tensor]]:
        """Per local rank the counters of both groups."""
        self.require_open("atomic_counters")
        return self.transport.atomic_counters()

    def require_open(self, what: str) -> None:
        """Raise ClosedError after close, and ForkedError in a child of the process that made the communicator."""
        self.guard.require_own_process(what)
        if self.closed:
            raise ClosedError(what)

    @property
    def has_pending(self) -> bool:
        """Whether a call was started and not waited for."""
        return any(started.holder() is not None for started in self._pending.values())

    def change(self, identity: str, detector: FailureDetector | None, masked: tuple[int, ...]) -> None:
        """Go on without the ranks ``masked``, after the transport has changed. Its fate is open again."""
        self.identity, self.detector, self.masked = identity, detector, masked
        self.fate.error = None
        self._pending.clear()
        self.complete, self._waiting = True, None

    def release(self) -> None:
        """Release the transport. Calls are no longer possible, but peers that probe this rank still get an answer."""
        if not self.closed:
            with self.reading:
                self.closed = True
            self.fate.sessions.remove(self)
            self.transport.close()

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        self.guard.require_own_process("close")
        try:
            self.release()
        finally:
            if self.detector is not None:
                self.detector.close()
