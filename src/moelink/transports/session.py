"""Hold what a communicator of one rank and one of many devices share: state, checks, and the transport."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.failure_detector import FailureDetector
from moelink.errors import ClosedError, PendingError, UnsupportedError
from moelink.hooks import Hook, evaluate_input_scale, evaluate_weights
from moelink.output import DispatchOutput
from moelink.transports.base import CombineRequest, DispatchRequest, Pending, Phase, Traffic, Transport
from moelink.transports.validation import check_combine, check_dispatch, check_ids, kind_of

T = TypeVar("T")


class PendingOperation(Generic[T]):
    """A dispatch or combine under way, as ``dispatch_async`` and ``combine_async`` return it.

    Inputs must stay alive and unmodified until :meth:`wait` has returned.
    """

    def __init__(
        self,
        phase: Phase,
        operation: Pending[T],
        given: object,
        *,
        finished: Callable[[], None],
        closed: Callable[[], bool],
    ) -> None:
        self._phase, self._operation, self._finished, self._closed = phase, operation, finished, closed
        # Only this object refers to what hooks returned, and the call may read it on a stream of its own.
        self._given: object = given
        self._done = False
        self._failure: Exception | None = None

    def wait(self) -> T:
        """Return the result, the same as the synchronous call's. May be called again. Raises the call's error, if any.

        Raises:
            ClosedError: the communicator was closed before, and with it what the call needs.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if not self._done and self._closed():
            raise ClosedError(self._phase)
        try:
            result = self._operation.wait()
        except Exception as failure:
            self._failure = failure
            raise
        finally:
            self._finished()
        self._done, self._given = True, None
        return result


class Session:
    """Local ranks of one communicator.

    Attributes:
        configs: one configuration per local rank.
        devices: the device of each local rank.
        identity: name of this communicator, the same on every rank.
        detector: the failure detector of its peers; None if all ranks are in this process.
        closed: whether calls are no longer possible.
    """

    def __init__(
        self,
        configs: Sequence[EPConfig],
        devices: Sequence[torch.device],
        transport: Transport,
        identity: str,
        detector: FailureDetector | None = None,
    ) -> None:
        self.configs, self.devices, self.identity = tuple(configs), tuple(devices), identity
        self.transport, self.detector = transport, detector
        self._pending: dict[Phase, object] = {}
        self._checked: set[Hashable] = set()
        self.closed = False

    def dispatch(self, requests: Sequence[DispatchRequest], *, fused: bool = False) -> Pending[list[DispatchOutput]]:
        """Check the arguments of every local rank and start a dispatch. ``fused``: the caller waits right away."""
        self._enter("dispatch")
        try:
            for config, device, request in zip(self.configs, self.devices, requests, strict=True):
                self._check_dispatch(config, device, request)
                if torch.is_grad_enabled():
                    _refuse_gradients(request.x, request.topk_weights, request.input_scale)
            requests = [_without_hooks(*each) for each in zip(self.configs, self.devices, requests, strict=True)]
        except Exception:
            self._refuse("dispatch", requests[0].over)
            raise
        operation = self.transport.dispatch(requests, fused=fused)
        return operation if fused else self._started("dispatch", operation, requests)

    def _check_dispatch(self, config: EPConfig, device: torch.device, request: DispatchRequest) -> None:
        """Check a dispatch. Most calls are of the same kind as an earlier one, which takes a quarter of the time to
        find out."""
        kind = (config.rank, kind_of(request))
        if kind in self._checked:
            check_ids(config, request.topk_ids)
            return
        check_dispatch(config, request, identity=self.identity, device=device)
        if kind[1] is not None:
            self._checked.add(kind)

    def combine(self, requests: Sequence[CombineRequest], *, fused: bool = False) -> Pending[list[Tensor]]:
        """Check the arguments of every local rank and start a combine. ``fused``: the caller waits right away."""
        self._enter("combine")
        try:
            for config, device, request in zip(self.configs, self.devices, requests, strict=True):
                check_combine(config, request, identity=self.identity, device=device)
                if torch.is_grad_enabled():
                    _refuse_gradients(request.y, request.topk_weights, request.shared, request.epilogue)
            requests = [_without_weight_hook(*each) for each in zip(self.configs, self.devices, requests, strict=True)]
        except Exception:
            self._refuse("combine", requests[0].over)
            raise
        operation = self.transport.combine(requests, fused=fused)
        return operation if fused else self._started("combine", operation, requests)

    @contextmanager
    def refusing(self, phase: Phase, over: Callable[[], object]) -> Iterator[None]:
        """Return a context that checks arguments. A refusal inside is also told to the peers, which would otherwise
        wait.

        ``over``: returns the earlier output that the call was to use, unchecked; called once something is refused.

        Raises ClosedError or PendingError when no such call is possible now; peers are not told of these.
        """
        self._enter(phase)
        try:
            yield
        except Exception:
            self._refuse(phase, over())
            raise

    def _enter(self, phase: Phase) -> None:
        if self.closed:
            raise ClosedError(phase)
        if phase in self._pending:
            raise PendingError(f"{phase}: expected no pending {phase}, got one without wait(); call its wait() first")

    def _refuse(self, phase: Phase, over: object) -> None:
        mine = isinstance(over, DispatchOutput) and over.handle.owner == self.identity
        self.transport.refuse(phase, over=over if mine else None)  # type: ignore[arg-type]

    def _started(self, phase: Phase, operation: Pending[T], given: object) -> PendingOperation[T]:
        self._pending[phase] = operation

        def finished() -> None:
            if self._pending.get(phase) is operation:
                del self._pending[phase]

        return PendingOperation(phase, operation, given, finished=finished, closed=lambda: self.closed)

    def warmup(self) -> None:
        """Compile and allocate what the first call would."""
        self._require_open("warmup")
        self.transport.warmup()

    def check(self) -> None:
        """Synchronise and raise the first error."""
        self._require_open("check")
        self.transport.check()

    def traffic(self) -> Traffic:
        """Return the bytes of rows sent to other ranks."""
        self._require_open("traffic")
        return self.transport.traffic()

    def dev_ptrs(self) -> list[Tensor]:
        """Per local rank the [2, 3] pointer table."""
        self._require_open("dev_ptrs")
        return self.transport.dev_ptrs()

    def atomic_counters(self) -> list[tuple[Tensor, Tensor]]:
        """Per local rank the counters of both groups."""
        self._require_open("atomic_counters")
        return self.transport.atomic_counters()

    def _require_open(self, what: str) -> None:
        if self.closed:
            raise ClosedError(what)

    def release(self) -> None:
        """Release the transport. Calls are no longer possible, but peers that probe this rank still get an answer."""
        if not self.closed:
            self.closed = True
            self.transport.close()

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        try:
            self.release()
        finally:
            if self.detector is not None:
                self.detector.close()


def _without_hooks(config: EPConfig, device: torch.device, request: DispatchRequest) -> DispatchRequest:
    """Return ``request`` with the values of its hooks, which may be refused as any argument may."""
    weights, scale = request.topk_weights, request.input_scale
    if isinstance(weights, Hook):
        weights = _evaluated(config, device, weights, request.x.shape[0])
        request = dataclasses.replace(request, topk_weights=weights)
    if isinstance(scale, Hook):
        request = dataclasses.replace(request, input_scale=evaluate_input_scale(scale, device=device))
    return request


def _without_weight_hook(config: EPConfig, device: torch.device, request: CombineRequest) -> CombineRequest:
    weights = request.topk_weights
    if not isinstance(weights, Hook):
        return request
    tokens = request.recv.handle.num_tokens
    return dataclasses.replace(request, topk_weights=_evaluated(config, device, weights, tokens))


def _evaluated(config: EPConfig, device: torch.device, weights: Hook, num_tokens: int) -> Tensor | None:
    with torch.no_grad():
        return evaluate_weights(
            weights, num_tokens=num_tokens, topk=config.topk, device=device, dtype=config.weight_dtype
        )


def _refuse_gradients(*values: object) -> None:
    """Refuse tensors that require grad: they belong to :mod:`moelink.ops`. A graph that ended here silently would train
    wrongly."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        raise UnsupportedError(
            "init_devices: expected tensors without gradients, got one that requires grad; use moelink.init in one "
            "process per rank, or pass detached tensors"
        )
