"""Make eager calls of a kind that was made before with little host time: the quick lane of the symmetric transport.

An eager call costs the host far more than its launch: a request, its checks, objects that stand for the call, records
of arguments. Most calls are like an earlier one, though, but for the addresses and values of their tensors. For these,
the *kind* of the call (shapes and dtypes) says that it passes the checks, which kernel runs, and where each address
stands in the parameters of the kernel. A quick call looks up its kind, makes its output, and launches.

The quick lane takes calls without options that are not traced and need no gradient. It answers None to any other call,
before anything has happened, and the caller makes the call in the ordinary way. It learns a kind from the first
ordinary call of that kind. What it does for a call, and in which order, is what the session and the transport do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from moelink.kernels.launch.direct import DirectKernel
from moelink.memory.layout import ALIGNMENT
from moelink.output import DispatchOutput, version_of
from moelink.transports.base import CombineRequest, DispatchRequest, Phase
from moelink.transports.session import Session
from moelink.transports.symmetric.combine import Combine
from moelink.transports.symmetric.dispatch import Dispatch
from moelink.transports.symmetric.rank import Rank

MOST_KINDS = 4096
"""Kinds that are kept. A program with more, such as one whose token count is never the same, is not slower for it."""


class Transport(Protocol):
    """The parts of a symmetric transport that a quick call needs."""

    half_done: bool

    def raise_error(self) -> None:
        """Raise what the error records say, without waiting."""

    def refuse(self, phase: Phase, *, over: DispatchOutput | None = None) -> None:
        """Tell peers that a call which was begun brings nothing."""

    def launch_quick(self, phase: Phase, rank: Rank, launch: Callable[[], None]) -> None:
        """Count a call of one local rank and launch it."""


@dataclass(frozen=True)
class _Kind:
    """Calls of one kind.

    Attributes:
        plan: all that they have in common.
        direct: the kernel of both roles; None where it is interpreted.
        shape: of ids and weights (dispatch), or of y (combine).
    """

    plan: Any
    direct: DirectKernel | None
    shape: torch.Size


class QuickLane:
    """Quick calls of a session with one local rank, which ``transport`` makes for ``rank``."""

    def __init__(self, session: Session, transport: Transport, rank: Rank) -> None:
        self._session, self._transport, self._rank = session, transport, rank
        self._config, self._identity = session.configs[0], session.identity
        self._device = -1 if rank.device.type == "cpu" else rank.device.index
        self._kinds: dict[Any, _Kind | None] = {}

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor | None, max_tokens: int | None) -> DispatchOutput | None:
        """Make a dispatch of a known kind and return its output, or do nothing and return None."""
        if type(x) is not Tensor or type(ids) is not Tensor or (weights is not None and type(weights) is not Tensor):
            return None
        if self._rank.trace is not None:  # kinds are those of kernels that do not stamp
            return None
        if max_tokens is not None and type(max_tokens) is not int:
            return None
        kind = self._kinds.get((x.shape, x.dtype, ids.dtype, None if weights is None else weights.dtype, max_tokens))
        if kind is None or not self._fits(x, ids, weights, kind):
            return None
        session, transport = self._session, self._transport
        try:
            session.begin("dispatch")
            transport.half_done = session.settled = True
            transport.raise_error()
            try:
                request = DispatchRequest(x, ids, weights, None, None, None, False, None, max_tokens)
                call = Dispatch(self._rank, request, self._identity, kind.plan)
            except Exception:  # for instance no memory for the outputs; peers are already in the call
                transport.refuse("dispatch")
                raise
            transport.launch_quick("dispatch", self._rank, self._launch(call, kind))
            return call.output
        except BaseException as error:
            session.unwind("dispatch", error)
            raise
        finally:
            session.guard.leave()

    def _fits(self, x: Tensor, ids: Tensor, weights: Tensor | None, kind: _Kind) -> bool:
        """Return whether a dispatch is of this kind in what the look-up does not compare."""
        gradients = torch.is_grad_enabled()
        if ids.shape != kind.shape or not self._plain(x, gradients) or not self._plain(ids, False):
            return False
        if weights is not None and (weights.shape != kind.shape or not self._plain(weights, gradients)):
            return False
        if self._device >= 0 or not ids.numel():
            return True
        return int(ids.min()) >= -1 and int(ids.max()) < self._config.num_experts

    def _plain(self, tensor: Tensor, gradients: bool) -> bool:
        """Return whether kernels take this tensor as it is."""
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT or tensor.get_device() != self._device:
            return False
        return not (gradients and tensor.requires_grad)

    def combine(self, y: Tensor, recv: DispatchOutput) -> Tensor | None:
        """Make a combine of a known kind and return its result, or do nothing and return None."""
        if type(recv) is not DispatchOutput or type(y) is not Tensor or self._rank.trace is not None:
            return None
        fields = recv.__dict__
        if "_arena" not in fields:
            return None
        handle = recv.handle
        ids, weights, tokens = handle.topk_ids, handle.topk_weights, fields["tokens"]
        kind = self._kinds.get((y.shape, handle.num_tokens, ids.dtype, weights is None))
        if kind is None or handle.owner != self._identity or handle.rank != self._config.rank:
            return None
        if tokens.shape[-2] != y.shape[-2] or y.dtype != self._config.combine_dtype:
            return None
        if handle.ids_version is not None and version_of(ids) != handle.ids_version:
            return None
        gradients = torch.is_grad_enabled()
        if not self._plain(y, gradients) or (gradients and tokens.requires_grad):
            return None
        if ids.data_ptr() % ALIGNMENT or (weights is not None and weights.data_ptr() % ALIGNMENT):
            return None
        session, transport = self._session, self._transport
        try:
            session.begin("combine")
            transport.half_done = session.settled = True
            transport.raise_error()
            try:
                call = Combine(self._rank, CombineRequest(y, recv), kind.plan)
            except Exception:
                transport.refuse("combine", over=recv)
                raise
            transport.launch_quick("combine", self._rank, self._launch(call, kind))
            return call.out
        except BaseException as error:
            session.unwind("combine", error, lambda: recv)
            raise
        finally:
            session.guard.leave()

    def _launch(self, call: Dispatch | Combine, kind: _Kind) -> Callable[[], None]:
        """Return what launches the call."""
        if kind.direct is None:
            return partial(self._each, call)
        return partial(self._rank.launcher.launch_direct, kind.direct, *call.direct())

    def _each(self, call: Dispatch | Combine) -> None:
        for launch in call.launches():
            self._rank.launcher.launch(*launch)

    def learn_dispatch(self, request: DispatchRequest) -> None:
        """Note the kind of an ordinary dispatch without options that was made."""
        x, ids, weights = request.x, request.topk_ids, request.topk_weights
        key = (x.shape, x.dtype, ids.dtype, weights.dtype if isinstance(weights, Tensor) else None, request.max_tokens)
        if key in self._kinds or type(x) is not Tensor or type(ids) is not Tensor:
            return
        if weights is not None and (type(weights) is not Tensor or weights.dtype != self._rank.weight_dtype):
            return
        if self._fits(x, ids, weights, _Kind(None, None, ids.shape)):
            plan = Dispatch.plan_of(self._rank, request)
            self._learn(key, plan, ids.shape, [x, ids, *([] if weights is None else [weights])], plan.layout is None)

    def learn_combine(self, request: CombineRequest) -> None:
        """Note the kind of an ordinary combine without options that was made."""
        y, recv = request.y, request.recv
        key = (y.shape, recv.handle.num_tokens, recv.handle.topk_ids.dtype, recv.handle.topk_weights is None)
        if key in self._kinds or "_arena" not in recv.__dict__ or type(y) is not Tensor:
            return
        call = Combine(self._rank, request)
        if all(self._plain(tensor, True) for tensor in call.given):
            self._learn(key, call.launch_plan, y.shape, call.given, len(call.passes) == 1)

    def _learn(self, key: Any, plan: Any, shape: torch.Size, given: list[Tensor], one_launch: bool) -> None:
        """Note a kind, or that calls like it are not for the quick lane."""
        if len(self._kinds) >= MOST_KINDS or self._rank.trace is not None:
            return
        direct = self._rank.launcher.direct_form(plan.both, given)
        possible = direct is not None or self._device < 0
        self._kinds[key] = _Kind(plan, direct, shape) if possible and one_launch else None
