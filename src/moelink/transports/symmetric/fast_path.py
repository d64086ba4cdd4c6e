"""Repeat eager calls of a known kind with little host time: the fast path of the symmetric transport.

An eager call costs the host far more than its launch: a request, its checks, objects that stand for the call, records
of arguments. Most calls differ from an earlier one only in the addresses and values of their tensors. For these, the
*kind* of the call (shapes and dtypes) says that it passes the checks, which kernel runs, and where each address stands
in the parameters of the kernel (:mod:`moelink.transports.symmetric.kinds`). A call on this path looks up its kind,
makes its output, writes the addresses, and launches.

The fast path takes calls without options that are not traced and need no gradient. It answers None to any other call,
before anything has happened, and the caller makes the call in the ordinary way. It learns a kind from the first
ordinary call of that kind. What it does for a call, and in which order, is what the session and the transport do: up
to its launch an exception, such as that there is no memory for the output, is told to the peers as a refusal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from moelink.kernels.launch.launcher import has_hooks
from moelink.memory.layout import ALIGNMENT
from moelink.output import DispatchOutput, is_captured
from moelink.transports.base import CombineRequest, DispatchRequest, Phase
from moelink.transports.session import Session
from moelink.transports.symmetric.combine import Combine
from moelink.transports.symmetric.dispatch import Dispatch
from moelink.transports.symmetric.kinds import (
    COMBINE_ADDRESSES,
    DISPATCH_ADDRESSES,
    DirectCombine,
    DirectDispatch,
    InterpretedCombine,
    InterpretedDispatch,
)
from moelink.transports.symmetric.rank import Rank
from moelink.transports.symmetric.received import Received

MOST_KINDS = 4096
"""Kinds that are kept. A program with more, such as one whose token count is never the same, is not slower for it."""


class Transport(Protocol):
    """The parts of a symmetric transport that the fast path needs."""

    partly_sent: bool

    def raise_error(self) -> None:
        """Raise the error of the error records, without waiting."""

    def launch_quick(self, phase: Phase, rank: Rank, stream: int, launch: Callable[[int], None]) -> None:
        """Count a call of one local rank and launch it."""


class SymmetricFastPath:
    """The fast path of a session with one local rank, which ``transport`` makes for ``rank``."""

    def __init__(self, session: Session, transport: Transport, rank: Rank) -> None:
        self._session, self._transport, self._rank = session, transport, rank
        self._most_id = session.configs[0].num_experts - 1
        self._on_cpu = rank.device.type == "cpu"
        self._device = -1 if self._on_cpu else rank.device.index
        self._dispatches: dict[Any, DirectDispatch | InterpretedDispatch | None] = {}
        self._combines: dict[Any, DirectCombine | InterpretedCombine | None] = {}

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor | None, max_tokens: int | None) -> DispatchOutput | None:
        """Make a dispatch of a known kind and return its output, or do nothing and return None."""
        key = _kind_of_dispatch(x, ids, weights, max_tokens)
        kind = None if key is None else self._dispatches.get(key)
        # Kinds are those of kernels that do not stamp.
        if kind is None or has_hooks() or self._rank.trace is not None:
            return None
        gradients = torch.is_grad_enabled()
        x_at, ids_at = self._address(x, gradients), self._address(ids, False)
        weights_at = 0 if weights is None else self._address(weights, gradients)
        if x_at < 0 or ids_at < 0 or weights_at < 0 or (self._on_cpu and not self._in_range(ids)):
            return None
        session, transport, rank = self._session, self._transport, self._rank
        try:
            session.begin("dispatch")
            if rank.has_error():
                self._raise_error()
            stream = rank.stream_to_go_on()
            # Of a handle that is 0, the default stream, nothing is captured.
            unknown = ids.is_inference() or (stream != 0 and is_captured(ids))
            version = None if unknown else ids._version
            output = kind.prepare(x, x_at, ids, ids_at, weights, weights_at, version)
            transport.partly_sent = session.complete = True
            transport.launch_quick("dispatch", rank, stream, kind.launch)
            if rank.calls is not None:
                output.rows_in_place.renew()  # type: ignore[union-attr]
            return output
        except BaseException as error:
            session.unwind("dispatch", error)
            raise
        finally:
            session.guard.leave()

    def combine(self, y: Tensor, recv: DispatchOutput) -> Tensor | None:
        """Make a combine of a known kind and return its result, or do nothing and return None."""
        if type(recv) is not DispatchOutput or type(y) is not Tensor or self._rank.trace is not None:
            return None
        fields = recv.__dict__
        received: Received | None = fields.get("_source")
        if received is None or received.again is not None:
            return None
        ids, weights = received.ids, received.weights
        kind = self._combines.get(_kind_of_combine(y, received))
        if kind is None or has_hooks() or ("_rows" in fields and not fields["_rows"].is_latest):
            return None
        if received.version is not None and ids._version != received.version:
            return None
        gradients = torch.is_grad_enabled()
        if gradients and _any_requires_grad(fields):
            return None
        y_at, ids_at, weights_at = self._address(y, gradients), ids.data_ptr(), 0
        if weights is not None:
            weights_at = weights.data_ptr()
        if y_at < 0 or ids_at % ALIGNMENT or weights_at % ALIGNMENT:
            return None
        session, transport, rank = self._session, self._transport, self._rank
        try:
            session.begin("combine")
            if rank.has_error():
                self._raise_error()
            out = kind.prepare(y, y_at, recv, ids_at, weights_at, received)
            transport.partly_sent = session.complete = True
            transport.launch_quick("combine", rank, rank.stream_to_go_on(), kind.launch)
            return out
        except BaseException as error:
            session.unwind("combine", error, partial(_itself, recv))
            raise
        finally:
            session.guard.leave()

    def _raise_error(self) -> None:
        """Raise the error of an earlier call. No rank makes this call: the peers raise the same error."""
        self._transport.partly_sent = self._session.complete = True
        self._transport.raise_error()

    def _address(self, tensor: Tensor, gradients: bool) -> int:
        """Return the address of a tensor that kernels take as it is, or -1 of any other."""
        at = tensor.data_ptr()
        if at % ALIGNMENT or tensor.get_device() != self._device or not tensor.is_contiguous():
            return -1
        return -1 if gradients and tensor.requires_grad else at

    def _in_range(self, ids: Tensor) -> bool:
        """Return whether all ids are in range. On a GPU the kernels find out, as the host would have to wait."""
        return not ids.numel() or (int(ids.min()) >= -1 and int(ids.max()) <= self._most_id)

    def learn_dispatch(self, request: DispatchRequest) -> None:
        """Note the kind of an ordinary dispatch without options that was made."""
        x, ids, weights = request.x, request.topk_ids, request.topk_weights
        key = _kind_of_dispatch(x, ids, weights, request.max_tokens)
        if key is None or key in self._dispatches or len(self._dispatches) >= MOST_KINDS:
            return
        if self._rank.trace is not None:
            return
        given = [x, ids] if weights is None else [x, ids, weights]
        if given[2:] and given[2].dtype != self._rank.weight_dtype:  # type: ignore[union-attr]
            return
        if any(self._address(tensor, True) < 0 for tensor in given):  # type: ignore[arg-type]
            return
        rank, plan, owner = self._rank, Dispatch.plan_of(self._rank, request), self._session.identity
        kind: DirectDispatch | InterpretedDispatch | None = None
        if plan.layout is None and self._on_cpu:
            kind = InterpretedDispatch(rank, owner, request.max_tokens)
        elif plan.layout is None:
            nothing = [rank.nothing_at] * len(DISPATCH_ADDRESSES)
            direct = rank.launcher.direct_form(plan.both, given, nothing, plan.fused)  # type: ignore[arg-type]
            kind = None if direct is None else DirectDispatch(rank, plan, direct, owner)
        self._dispatches[key] = kind

    def learn_combine(self, request: CombineRequest, out: Tensor) -> None:
        """Note the kind of an ordinary combine without options that was made; ``out`` is its result."""
        y, received = request.y, request.recv.__dict__.get("_source")
        if received is None or received.again is not None or type(y) is not Tensor or self._rank.trace is not None:
            return
        key = _kind_of_combine(y, received)
        if key in self._combines or len(self._combines) >= MOST_KINDS:
            return
        rank, call = self._rank, Combine(self._rank, dataclasses.replace(request, out=out))
        if any(self._address(tensor, True) < 0 for tensor in call.given):
            return
        kind: DirectCombine | InterpretedCombine | None = None
        if len(call.passes) == 1 and self._on_cpu:
            kind = InterpretedCombine(rank)
        elif len(call.passes) == 1:
            ((both, _, numbers, given),) = call.launches()
            nothing = [rank.nothing_at] * len(COMBINE_ADDRESSES)
            direct = rank.launcher.direct_form(both, given, nothing, numbers)
            kind = None if direct is None else DirectCombine(rank, call.launch_plan, received.plan, direct)
        self._combines[key] = kind


def _kind_of_dispatch(x: Any, ids: Any, weights: Any, max_tokens: Any) -> Any:
    """Return the key of a dispatch's kind, or None if it has no kind."""
    if type(x) is not Tensor or type(ids) is not Tensor or not (max_tokens is None or type(max_tokens) is int):
        return None
    if weights is None:
        return x.shape, x.dtype, ids.shape, ids.dtype, max_tokens
    if type(weights) is not Tensor:
        return None
    return x.shape, x.dtype, ids.shape, ids.dtype, max_tokens, weights.shape, weights.dtype


def _kind_of_combine(y: Tensor, received: Received) -> Any:
    """Return what combines of one kind have in common. A plan belongs to one rank of one communicator, so no kind is
    found for the output of another."""
    return received.plan, y.shape, y.dtype, received.ids.dtype


def _itself(recv: DispatchOutput) -> DispatchOutput:
    return recv


def _any_requires_grad(fields: dict[str, Any]) -> bool:
    """Return whether a tensor of an output requires grad. Fields that nobody has looked at do not."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in fields.values())
