"""Hold the state, the checks and the transport that a communicator of one rank and one of many devices share.

An exception may enter a call anywhere: a signal's handler, KeyboardInterrupt, MemoryError, a hook of the user. The
session then leaves the rank's calls in step with its peers', or ends its part (:meth:`Session.unwind`). A call has
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

``complete`` is cleared first and set as soon as a state says so, on this thread alone. So an exception at any line
finds the part that the call is in, or an earlier one of the same meaning. The time before the clearing is between two
calls. Peers cannot overtake: a refused call takes part in its exchange as any other, and a poisoned rank makes no
further call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
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
    PendingError,
)
from moelink.output import DispatchOutput
from moelink.transports.base import CallRequest, DispatchRequest, FastPath, Finished, Pending, Phase, Traffic, Transport
from moelink.transports.guard import Guard
from moelink.transports.pending import PendingOperation, Started
from moelink.transports.validation import (
    check_ids,
    check_num_sms,
    check_request,
    check_rows_are_there,
    kind_of,
    refuse_gradients,
    without_hooks,
)

T = TypeVar("T")
R = TypeVar("R")

_STOP: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
"""The exception with which torch ends a recomputation once it has all that it needs. If checkpointing had kept an
operator's result, the operator did not run, so there was no call that could be refused."""


class Fate:
    """The error that ends the sessions of one communicator together: those of its lanes and those that gradients travel
    over.

    Attributes:
        error: the first PeerTimeoutError that a call of any of them met; all later calls raise it.
        sessions: those of them that are open; a closed one is freed when nobody else refers to it.
    """

    def __init__(self) -> None:
        self.error: PeerTimeoutError | None = None
        self.sessions: list[Session] = []


class Session:
    """Local ranks of one communicator.

    Attributes:
        configs: one configuration per local rank.
        devices: the device of each local rank.
        identity: name of this communicator, the same on every rank.
        detector: the failure detector of its peers; None if all ranks are in this process.
        guard: admits one thread of this process.
        fate: the error that has ended it, shared with the sessions of its gradients.
        complete: whether the present call needs nothing told any more (see the module's docstring).
        closed: whether calls are no longer possible.
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

    def call(self, requests: Sequence[CallRequest], *, fused: bool = False) -> Pending[list[Any]]:
        """Check the arguments of every local rank and start a call. ``fused``: it is over when this returns."""
        return self.within(requests[0].phase, partial(self.start, fused=fused), requests, lambda: requests[0].over)

    def start(self, requests: Sequence[CallRequest], *, fused: bool) -> Pending[list[Any]]:
        """Do :meth:`call` for a caller that is within a call already (:meth:`within`)."""
        gradients, phase = torch.is_grad_enabled(), requests[0].phase
        try:
            for config, device, request in zip(self.configs, self.devices, requests, strict=True):
                self._check(config, device, request)
                if gradients:
                    refuse_gradients(*request.differentiable)
            requests = [without_hooks(*each) for each in zip(self.configs, self.devices, requests, strict=True)]
            self.transport.partly_sent = self.complete = True
            begin: Callable[..., Pending[list[Any]]] = getattr(self.transport, phase)
            operation = begin(requests, fused=fused)
            return self._waited(operation) if fused else self._started(phase, operation, requests)
        except BaseException:
            # An exception that comes between the end of a block under no_grad and its exit leaves gradients disabled.
            torch.set_grad_enabled(gradients)
            raise

    def _waited(self, operation: Pending[T]) -> Finished[T]:
        """Wait for ``operation``, to which nothing else refers."""
        self._waiting = operation
        result = Finished(operation.wait())
        self._waiting = None
        return result

    def _check(self, config: EPConfig, device: torch.device, request: CallRequest) -> None:
        """Check a call. Most dispatches repeat the kind of an earlier one; to find that out takes a quarter of the
        time."""
        kind = kind_of(request) if isinstance(request, DispatchRequest) else None
        if kind is not None and (config.rank, kind) in self._checked:
            check_ids(config, request.topk_ids)  # type: ignore[union-attr]
            return
        check_request(config, request, identity=self.identity, device=device)
        check_num_sms(config, request.num_sms, transport=self.transport.name, device=device)
        if kind is not None:
            self._checked.add((config.rank, kind))

    def fast_path(self) -> FastPath | None:
        """Return the fast path, if the transport has one."""
        return self.transport.fast_path(self)  # type: ignore[no-any-return, attr-defined]

    def within(self, phase: Phase, call: Callable[[R], T], request: R, over: Callable[[], object] = lambda: None) -> T:
        """Return ``call(request)``, a call of ``phase`` from its :meth:`begin` to its end. All calls are made in here.

        An exception that leaves it is brought in order (:meth:`unwind`), also where ``call`` only checks arguments:
        peers are told of a refusal, so that they do not wait.

        ``over``: returns the earlier output that the call was to use, unchecked; called once something is refused.

        Raises ClosedError or PendingError when no such call is possible now; peers are not told of these.
        """
        try:
            self.begin(phase)
            return call(request)
        except BaseException as error:
            self.unwind(phase, error, over)
            raise
        finally:
            self.guard.leave()

    def repeat(self, call: Callable[[CallRequest], T], request: CallRequest) -> T:
        """Make a bound call (:mod:`moelink.transports.bound`), within a call: ``call`` hands ``request`` over and
        waits."""
        check_rows_are_there(request.over)
        self.transport.partly_sent = self.complete = True
        return call(request)

    def begin(self, phase: Phase) -> None:
        """Begin a call of ``phase``: an exception from now on is told to the peers, until the call is complete.

        Raises an error that makes the call impossible now; peers are not told of it.
        """
        self.guard.enter(phase)
        self.complete, self._phase = False, phase
        if self.closed or self.fate.error is not None or phase in self._pending:
            self._finish_dropped(phase)

    def _finish_dropped(self, phase: Phase) -> None:
        """Finish a call that was dropped without wait(), or raise the error that makes the next one impossible."""
        if self.closed:
            self.complete = True
            raise ClosedError(phase)
        self.raise_fate()
        started = self._pending.get(phase)
        if started is None:
            return
        if started.holder() is not None:
            self.complete = True
            raise PendingError(
                f"{phase}: expected no pending {phase}, got one without wait(), {started.words}; call its wait() first"
            )
        try:
            started.operation.wait()
        except PeerTimeoutError:
            self.complete = True
            raise
        except Exception:  # noqa: BLE001, S110 - with its result the caller dropped its error
            pass
        self.forget(phase, started.operation)

    def raise_fate(self) -> None:
        """Raise the error that has ended this communicator, if one has."""
        if self.fate.error is not None:
            self.complete = True
            raise self.fate.error.with_traceback(None)

    def unwind(self, phase: Phase, error: BaseException, over: Callable[[], object] = lambda: None) -> None:
        """Bring an exception that leaves a call in order (see the module's docstring).

        ``over``: returns the earlier output that the call was to use, unchecked; called where the call is refused.
        """
        if isinstance(error, (ForkedError, ConcurrencyError)):
            return
        if isinstance(error, _STOP):
            self.complete = True
            return
        waiting, complete = self._waiting, self.complete
        # A call that goes on is also partly sent if the caller has no object left by which to wait for it.
        partly_sent = self.transport.partly_sent or (waiting is not None and not waiting.over)
        self.transport.partly_sent, self.complete, self._waiting = False, True, None
        if isinstance(error, PeerTimeoutError):
            self._end(error)
        elif partly_sent and not isinstance(error, PeerError):
            self._end(self.transport.abandon(self._own_failure(phase, INTERRUPTED)))
        elif not complete:
            self._refuse(phase, over())
            self.transport.partly_sent = False

    def _end(self, error: PeerTimeoutError) -> None:
        """Make all later calls raise ``error``, with those of the other sessions, and tell their peers."""
        if self.fate.error is not None:
            return
        self.fate.error = error
        for session in tuple(self.fate.sessions):
            if session is not self and not session.closed:
                session.transport.abandon(Failure.of(error))

    def _own_failure(self, phase: Phase, how: int) -> Failure:
        call = 0 if self.detector is None else self.detector.probe_server.call
        return Failure(self.configs[0].rank, phase, call, expected=call, got=how)

    def end(self, cause: PeerTimeoutError | None) -> PeerTimeoutError:
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
        self.transport.refuse(phase, over=over if mine else None)  # type: ignore[arg-type]

    def _started(self, phase: Phase, operation: Pending[T], given: object) -> PendingOperation[T]:
        pending = PendingOperation(self, phase, operation, given)
        call = "" if self.detector is None else f"call {self.detector.probe_server.call}, "
        self._pending[phase] = Started.of(operation, pending, call)
        return pending

    def failure_after(self, error: BaseException) -> BaseException:
        """Return the error that later waits of a call raise after ``error``: the one that has ended the communicator,
        or that."""
        return self.fate.error or error

    def forget(self, phase: Phase, operation: object) -> None:
        """Note that ``operation`` is no longer pending."""
        started = self._pending.get(phase)
        if started is not None and started.operation is operation:
            del self._pending[phase]

    def warmup(self, num_sms: Sequence[int] = ()) -> None:
        """Compile and allocate for the first call, also for one with each of these SM limits."""
        self.require_open("warmup")
        if not isinstance(num_sms, Sequence):
            raise ArgumentError("num_sms", "a sequence of integers", f"a {type(num_sms).__name__}")
        for config, device in zip(self.configs, self.devices, strict=True):
            for limit in num_sms:
                check_num_sms(config, limit, transport=self.transport.name, device=device)
        self.transport.warmup(num_sms)

    def check(self) -> None:
        """Synchronise and raise the first error."""
        self.require_open("check")
        self.raise_fate()
        for phase in tuple(self._pending):
            if self._pending[phase].holder() is None:
                self._finish_dropped(phase)
        try:
            self.transport.check()
        except PeerTimeoutError as error:
            self._end(error)
            raise

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

    def release(self) -> None:
        """Release the transport. Calls are no longer possible, but peers that probe this rank still get an answer."""
        if not self.closed:
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
