"""Call the operators for a communicator's dispatch and combine: used when a tensor requires grad, or under a tracer.

Everything here is plain Python over tensors, so that a tracer follows it through the operators. Requests and results
are those of the direct path (:mod:`moelink.transports.base`); options that an operator does not have are refused here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moelink.errors import ArgumentError, UnsupportedError
from moelink.hooks import Hook, evaluate_input_scale, evaluate_weights
from moelink.ops import autograd
from moelink.ops.context import OperatorContext
from moelink.output import DispatchOutput
from moelink.transports.base import CallRequest, CombineRequest, DispatchRequest, Pending
from moelink.transports.validation import check_max_tokens, check_recv, check_weigh, refuse_tangents


def needs_operator(request: CallRequest) -> bool:
    """Return True if ``request`` needs an operator, even where no tracer is at work: one of its tensors requires grad,
    or has rules of its own.

    The direct path is faster (``moelink_bench.host``).
    """
    rows = request.x if isinstance(request, DispatchRequest) else request.y
    # A subclass of Tensor, a fake tensor for example, has rules of its own, which the operators' dispatcher applies.
    if type(rows) is not Tensor and type(rows) is not torch.nn.Parameter and isinstance(rows, Tensor):
        return True
    return torch.is_grad_enabled() and any(_requires_grad(value) for value in _differentiable(request))


def _differentiable(request: CallRequest) -> tuple[Tensor | Hook | None, ...]:
    """List the arguments of ``request`` that may require grad."""
    recv = request.recv if isinstance(request, CombineRequest) else None
    if not isinstance(recv, DispatchOutput):
        return request.differentiable
    tokens = None if recv.rows_in_place is not None else recv.tokens  # rows in the workspace have no gradient
    return (*request.differentiable, recv.weights, tokens, recv.topk_weights, recv.handle.carrier)


def call(context: OperatorContext, request: CallRequest) -> Any:
    """Make a call through its operator."""
    return _finish(context, _checked(context, request), None)


def start(context: OperatorContext, request: CallRequest) -> Callable[[], Any]:
    """Start a call and return a function that finishes it. Under a tracer that function makes the whole call."""
    request = _checked(context, request)
    operation = None
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            operation = context.session.call([context.direct(request)])
    return lambda: _finish(context, request, operation)


def _finish(context: OperatorContext, request: CallRequest, operation: Pending[Any] | None) -> Any:
    if isinstance(request, DispatchRequest):
        return _finish_dispatch(context, request, operation)
    return _finish_combine(context, request, operation)


def _checked(context: OperatorContext, request: CallRequest) -> CallRequest:
    """Evaluate the hooks of ``request``, and refuse options that an operator does not have; peers learn of a refusal. A
    tracer makes no call, and all ranks refuse alike under it."""
    if torch.compiler.is_compiling():
        return _check(context, request)
    return context.session.within(
        request.phase, lambda request: _check(context, request), request, lambda: context.unpacked(request.over)
    )


def _check(context: OperatorContext, request: CallRequest) -> CallRequest:
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        refuse_tangents(request)
    if isinstance(request, DispatchRequest):
        return _checked_dispatch(context, request)
    return _checked_combine(context, request)


def _finish_dispatch(
    context: OperatorContext, request: DispatchRequest, operation: Pending[Any] | None
) -> DispatchOutput:
    routing, weights = request.routing, request.topk_weights
    with context.finishing("dispatch", operation):
        outputs = autograd.dispatch(
            context.order,
            request.x,
            request.topk_ids,
            weights,
            request.scales,
            request.input_scale,
            [] if routing is None else context.record(routing),
            request.host_counts,
            context.name,
            max_tokens=request.max_tokens,
        )
    output = context.assemble(
        outputs,
        num_tokens=request.x.shape[0],
        topk_ids=request.topk_ids,
        topk_weights=weights,  # type: ignore[arg-type]
        routing=routing,
    )
    # A subclass of Tensor, a fake tensor for example, may have no values. An operator returns tensors alone, so the
    # list is read once more.
    if not request.host_counts or type(output.row_offsets) is not Tensor:
        return output
    return dataclasses.replace(output, host_counts=output.num_recv_per_expert.tolist())


def _finish_combine(context: OperatorContext, request: CombineRequest, operation: Pending[Any] | None) -> Tensor:
    recv = request.recv
    weights, home_weights = (recv.weights, recv.handle.topk_weights) if request.weigh else (None, None)
    carrier = recv.handle.carrier if context.static.quantised else recv.tokens
    # Weights by which the operator does not multiply may require grad when tokens do not.
    carried = recv.topk_weights if request.weigh or recv.weights is None else recv.weights
    if carried is not None and (carrier is None or not carrier.requires_grad):
        carrier = carried
    with context.finishing("combine", operation):
        out: Tensor = autograd.combine(
            context.order,
            request.y,
            weights,
            request.topk_weights,
            request.shared,
            request.epilogue,
            carrier,
            recv.handle.topk_ids,
            home_weights,
            context.record(recv),
            reduce=request.reduce,
            communicator=context.name,
        )
    return out


def _checked_dispatch(context: OperatorContext, request: DispatchRequest) -> DispatchRequest:
    _refuse_layouts(context)
    _check_types(request, ("x", "topk_ids"), ("topk_weights", "scales", "input_scale"))
    if request.routing is not None:
        check_recv(request.routing, identity=context.static.owner, config=context.config, name="routing")
    _no_out(request.out)
    _no_num_sms(request.num_sms)
    check_max_tokens(context.config, request)
    if request.host_counts and torch.compiler.is_compiling():
        raise UnsupportedError(
            "host_counts: expected False under a compiler, which needs sizes in advance, got True; leave it "
            "False in compiled code"
        )
    if torch.is_grad_enabled():
        if request.scales is not None and _requires_grad(request.x):
            raise UnsupportedError(
                "x: expected no gradient for rows that are already quantised (scales=), got one; detach them"
            )
        for name, value in (("scales", request.scales), ("input_scale", request.input_scale)):
            if _requires_grad(value):
                raise UnsupportedError(
                    f"{name}: expected no gradient (quantisation is straight-through), got one; detach it"
                )
    weights = _weights(context, request.topk_weights, request.x.shape[0], request.x.device)
    scale = request.input_scale
    scale = evaluate_input_scale(scale, device=request.x.device) if isinstance(scale, Hook) else scale
    return dataclasses.replace(request, topk_weights=weights, input_scale=scale)


def _checked_combine(context: OperatorContext, request: CombineRequest) -> CombineRequest:
    _refuse_layouts(context)
    _check_types(request, ("y",), ("topk_weights", "shared", "epilogue"))
    check_recv(request.recv, identity=context.static.owner, config=context.config)
    check_weigh(request)
    _no_out(request.out)
    _no_num_sms(request.num_sms)
    if isinstance(request.epilogue, Hook):
        raise UnsupportedError(
            "epilogue: expected a tensor for a call with gradients or under a tracer, got a Hook, which stores its "
            "result itself; pass a bias or a residual, or apply it to combine's result"
        )
    weights = _weights(context, request.topk_weights, request.recv.handle.num_tokens, request.y.device)
    return dataclasses.replace(request, topk_weights=weights)


def _check_types(request: object, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Check that arguments are tensors, or hooks where optional. The operator checks the rest when it runs."""
    for name in (*required, *optional):
        value = getattr(request, name)
        if not isinstance(value, Tensor) and (name in required or not (value is None or isinstance(value, Hook))):
            raise ArgumentError(name, "a tensor", type(value).__name__)


def _weights(
    context: OperatorContext, weights: Tensor | Hook | None, num_tokens: int, device: torch.device
) -> Tensor | None:
    """Evaluate a weight hook, with gradients; tensors are returned as they are."""
    if not isinstance(weights, Hook):
        return weights
    static = context.static
    return evaluate_weights(weights, num_tokens=num_tokens, topk=static.topk, device=device, dtype=static.weight_dtype)


def _refuse_layouts(context: OperatorContext) -> None:
    if context.config.zero_copy:
        raise UnsupportedError(
            "zero_copy: expected False for a call with gradients or under a tracer, whose results are tensors of their "
            "own, got True; call under torch.no_grad() and outside compiled code, or leave zero_copy out"
        )
    if context.config.layout == "masked":
        raise UnsupportedError(
            "layout: expected 'expert' or 'rank' for a call with gradients or under a tracer, got 'masked', which is "
            "for inference; call under torch.no_grad() and outside compiled code, or use layout='expert'"
        )


def _no_out(out: object) -> None:
    if out is not None:
        raise UnsupportedError(
            "out: expected None for a call with gradients or under a tracer, whose results are new tensors, got a "
            "tensor; leave it out"
        )


def _no_num_sms(num_sms: object) -> None:
    if num_sms is not None:
        raise UnsupportedError(
            "num_sms: expected None for a call with gradients or under a tracer, whose backward would not know it, got "
            f"{num_sms!r}; leave it out, or pass num_sms to init"
        )


def _requires_grad(value: Tensor | Hook | None) -> bool:
    """Return True if ``value``, or a tensor of a hook, requires grad."""
    if isinstance(value, Hook):
        return any(tensor.requires_grad for tensor in value.tensors)
    return isinstance(value, Tensor) and value.requires_grad
