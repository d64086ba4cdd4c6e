"""Make the calls of a communicator: check the arguments of its local ranks, and hand them to the transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from moelink.config import EPConfig
from moelink.errors import (
    ClosedError,
    MoelinkError,
    PeerError,
    PendingError,
)
from moelink.transports.base import CallRequest, DispatchRequest, FastPath, Finished, Pending, Phase
from moelink.transports.endings import Endings
from moelink.transports.pending import IntoEarlier, PendingOperation, Started
from moelink.transports.validation import (
    check_ids,
    check_num_sms,
    check_request,
    check_rows_are_there,
    kind_of,
    refuse_gradients,
    refuse_tangents,
    without_hooks,
)

T = TypeVar("T")
R = TypeVar("R")


class Session(Endings):
    """Calls of the local ranks of one communicator, one at a time: one thread makes them, one after the other."""

    def call(self, requests: Sequence[CallRequest], *, fused: bool = False) -> Pending[list[Any]]:
        """Check the arguments of every local rank and start a call. ``fused``: it is over when this returns."""
        return self.within(requests[0].phase, partial(self.start, fused=fused), requests, lambda: requests[0].over)

    def start(self, requests: Sequence[CallRequest], *, fused: bool) -> Pending[list[Any]]:
        """Do :meth:`call` for a caller that is within a call already (:meth:`within`)."""
        gradients, phase = torch.is_grad_enabled(), requests[0].phase
        try:
            for config, device, request in zip(self.configs, self.devices, requests, strict=True):
                if forward_ad._current_level >= 0:
                    refuse_tangents(request)
                self._check(config, device, request)
                if gradients:
                    refuse_gradients(*request.differentiable)
            requests = [without_hooks(*each) for each in zip(self.configs, self.devices, requests, strict=True)]
            self.transport.partly_sent = self.complete = True
            begin: Callable[..., Pending[list[Any]]] = getattr(self.transport, phase)
            operation = begin(requests, fused=fused)
            if phase == "dispatch" and any(request.out is not None for request in requests):
                operation = IntoEarlier(operation, [request.out for request in requests])  # type: ignore[misc]
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
        except Exception as error:  # noqa: BLE001 - with its result the caller dropped its error
            if isinstance(error, PeerError) and error.ends_communicator:
                self.complete = True
                raise
        self.forget(phase, started.operation)

    def _started(self, phase: Phase, operation: Pending[T], given: object) -> PendingOperation[T]:
        pending = PendingOperation(self, phase, operation, given)
        call = "" if self.detector is None else f"call {self.detector.probe_server.call}, "
        self._pending[phase] = Started.of(operation, pending, call)
        return pending

    def forget(self, phase: Phase, operation: object) -> None:
        """Note that ``operation`` is no longer pending."""
        started = self._pending.get(phase)
        if started is not None and started.operation is operation:
            del self._pending[phase]

    def check(self) -> None:
        """Synchronise and raise the first error."""
        self.require_open("check")
        self.raise_fate()
        try:
            for phase in tuple(self._pending):
                if self._pending[phase].holder() is None:
                    self._finish_dropped(phase)
            self.transport.check()
        except MoelinkError as error:
            self.fate.failures.add("check", error)
            if isinstance(error, PeerError) and error.ends_communicator:
                self._meet(error)
            raise
