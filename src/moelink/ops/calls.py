"""Dispatch and combine of a communicator through the operators: what runs when something requires grad, or is traced.

Everything here is plain Python over tensors, so that a tracer can follow it to the operators and past them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moelink.errors import ArgumentError, UnsupportedError
from moelink.hooks import Hook, evaluate_input_scale, evaluate_weights
from moelink.ops import library
from moelink.ops.context import Endpoint, Request
from moelink.output import DispatchOutput
from moelink.transports.base import CombineRequest, DispatchRequest, Pending, Phase
from moelink.transports.validation import check_recv


def needs_operator(request: DispatchRequest | CombineRequest) -> bool:
    """True when ``request`` has to be an operator: it is being traced, or one of its tensors requires grad.

    Otherwise the operator would only cost time (``moelink.tools.bench.host``).
    """
    if torch.compiler.is_compiling():
        return True
    rows = request.x if isinstance(request, DispatchRequest) else request.y
    # A subclass is a tensor under rules of its own, a fake one for example: operators know what to do with it.
    if type(rows) is not Tensor and type(rows) is not torch.nn.Parameter and isinstance(rows, Tensor):
        return True
    return torch.is_grad_enabled() and any(_requires_grad(value) for value in _differentiable(request))


def _differentiable(request: DispatchRequest | CombineRequest) -> tuple[Tensor | Hook | None, ...]:
    """What of ``request`` gradients may flow to."""
    if isinstance(request, DispatchRequest):
        return (request.x, request.topk_weights, request.scales, request.input_scale)
    recv = request.recv
    given = (request.y, request.topk_weights, request.shared, request.epilogue)
    if not isinstance(recv, DispatchOutput):
        return given
    return (*given, recv.weights, recv.tokens, recv.topk_weights, recv.handle.carrier)


def dispatch(endpoint: Endpoint, request: DispatchRequest) -> DispatchOutput:
    """One dispatch."""
    return _finish_dispatch(endpoint, _checked_dispatch(endpoint, request), None)


def start_dispatch(endpoint: Endpoint, request: DispatchRequest) -> Callable[[], DispatchOutput]:
    """Start a dispatch; what is returned finishes it. Traced, where nothing overlaps, all of it happens there."""
    request = _checked_dispatch(endpoint, request)
    operation = None
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            operation = endpoint.session.dispatch([endpoint.direct(request)])
    return lambda: _finish_dispatch(endpoint, request, operation)


def combine(endpoint: Endpoint, request: CombineRequest) -> Tensor:
    """One combine."""
    return _finish_combine(endpoint, _checked_combine(endpoint, request), None)


def start_combine(endpoint: Endpoint, request: CombineRequest) -> Callable[[], Tensor]:
    """Start a combine; see :func:`start_dispatch`."""
    request = _checked_combine(endpoint, request)
    operation = None
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            operation = endpoint.session.combine([endpoint.direct(request)])
    return lambda: _finish_combine(endpoint, request, operation)


def _finish_dispatch(endpoint: Endpoint, request: DispatchRequest, operation: Pending[Any] | None) -> DispatchOutput:
    routing, weights = request.routing, request.topk_weights
    with endpoint.finishing("dispatch", operation):
        outputs = library.dispatch(
            endpoint.order,
            request.x,
            request.topk_ids,
            weights,
            request.scales,
            request.input_scale,
            [] if routing is None else endpoint.record(routing),
            request.host_counts,
            endpoint.name,
        )
    return endpoint.assemble(
        outputs,
        num_tokens=request.x.shape[0],
        topk_ids=request.topk_ids,
        topk_weights=weights,  # type: ignore[arg-type]
        routing=routing,
    )


def _finish_combine(endpoint: Endpoint, request: CombineRequest, operation: Pending[Any] | None) -> Tensor:
    recv = request.recv
    carrier = recv.handle.carrier if endpoint.traits.quantised else recv.tokens
    if recv.topk_weights is not None and (carrier is None or not carrier.requires_grad):
        carrier = recv.topk_weights  # layout "rank": weights may learn where tokens do not
    with endpoint.finishing("combine", operation):
        out: Tensor = library.combine(
            endpoint.order,
            request.y,
            recv.weights,
            request.topk_weights,
            request.shared,
            request.epilogue,
            carrier,
            recv.handle.topk_ids,
            recv.handle.topk_weights,
            endpoint.record(recv),
            request.reduce,
            endpoint.name,
        )
    return out


def _checked_dispatch(endpoint: Endpoint, request: DispatchRequest) -> DispatchRequest:
    """``request`` with hooks evaluated. What an operator cannot do is refused, towards peers too."""
    with _refusing(endpoint, "dispatch", request):
        _check_types(request, ("x", "topk_ids"), ("topk_weights", "scales", "input_scale"))
        if request.routing is not None:
            check_recv(request.routing, identity=endpoint.traits.owner, config=endpoint.config)
        _no_out(request.out)
        if request.host_counts and torch.compiler.is_compiling():
            raise UnsupportedError(
                "host_counts: a compiler needs sizes that are known beforehand: leave it False in what is compiled"
            )
        if torch.is_grad_enabled():
            if request.scales is not None and _requires_grad(request.x):
                raise UnsupportedError("x: rows that are already quantised (scales=) have no gradient; detach them")
            for name, value in (("scales", request.scales), ("input_scale", request.input_scale)):
                if _requires_grad(value):
                    raise UnsupportedError(
                        f"{name}: no gradient flows to it (quantisation is straight-through); detach it"
                    )
        weights = _weights(endpoint, request.topk_weights, request.x.shape[0], request.x.device)
        scale = request.input_scale
        scale = evaluate_input_scale(scale, device=request.x.device) if isinstance(scale, Hook) else scale
    return dataclasses.replace(request, topk_weights=weights, input_scale=scale)


def _checked_combine(endpoint: Endpoint, request: CombineRequest) -> CombineRequest:
    with _refusing(endpoint, "combine", request):
        _check_types(request, ("y",), ("topk_weights", "shared", "epilogue"))
        check_recv(request.recv, identity=endpoint.traits.owner, config=endpoint.config)
        _no_out(request.out)
        if isinstance(request.epilogue, Hook):
            raise UnsupportedError(
                "epilogue: a Hook stores for itself, which no gradient follows and no compiler traces: pass a bias or "
                "a residual, or apply it to combine's result"
            )
        weights = _weights(endpoint, request.topk_weights, request.recv.handle.num_tokens, request.y.device)
    return dataclasses.replace(request, topk_weights=weights)


def _check_types(request: object, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Tensors where tensors (or, for optional ones, hooks) belong; all else is checked when the operator runs."""
    for name in (*required, *optional):
        value = getattr(request, name)
        if not isinstance(value, Tensor) and (name in required or not (value is None or isinstance(value, Hook))):
            raise ArgumentError(name, "a tensor", type(value).__name__)


def _refusing(endpoint: Endpoint, phase: Phase, request: Request) -> AbstractContextManager[None]:
    """Peers hear of what is refused inside; not while tracing, when no call is made and all ranks refuse alike."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return endpoint.session.refusing(phase, lambda: endpoint.direct(request).over)


def _weights(endpoint: Endpoint, weights: Tensor | Hook | None, num_tokens: int, device: torch.device) -> Tensor | None:
    """A hook's weights, with the gradients that torch gives them."""
    if not isinstance(weights, Hook):
        return weights
    traits = endpoint.traits
    return evaluate_weights(weights, num_tokens=num_tokens, topk=traits.topk, device=device, dtype=traits.weight_dtype)


def _no_out(out: object) -> None:
    if out is not None:
        raise UnsupportedError("out: results that carry gradients, or are traced, are new tensors; leave it out")


def _requires_grad(value: Tensor | Hook | None) -> bool:
    """Whether ``value``, or a tensor of a hook, requires grad."""
    if isinstance(value, Hook):
        return any(tensor.requires_grad for tensor in value.tensors)
    return isinstance(value, Tensor) and value.requires_grad
