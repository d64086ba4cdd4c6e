"""Make eager calls whose gradients are recorded, without the operators: one autograd function for a call.

An operator takes and returns tensors alone, so a dispatch through it makes some twenty of them, and a later call makes
objects of these again. Where nothing traces (:func:`moelink.rows.eager.is_unseen`), an autograd function may hold any
object. The functions here make calls without options on the fast path of the transport
(:class:`moelink.transports.base.FastPath`), in the forward and in the backward. Their gradients are those of
:mod:`moelink.ops.autograd`, which has the formulas and the legend. All other calls that record gradients go through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moelink.ops.autograd import by_slot
from moelink.ops.context import earlier_forward
from moelink.output import DispatchOutput, carrier_of
from moelink.rows import eager
from moelink.rows.scale_rows import cast_rows, row_gradients, without_tail, zero_rows
from moelink.transports.base import CombineRequest, DispatchRequest, FastPath

if TYPE_CHECKING:
    from moelink.ops.context import OperatorContext


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
"""Of tensors that are made without this key torch does not know that they are views. An autograd function must return
none, or they could not be changed in place."""


def records(*given: Any) -> bool:
    """Return whether a gradient is recorded of a call with one of these arguments, of which any may be no tensor."""
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(each, Tensor) and each.requires_grad for each in given)


def records_combine(y: Any, recv: Any) -> bool:
    """Return whether a gradient is recorded of a combine. Fields that nobody has looked at have none."""
    if not torch.is_grad_enabled():
        return False
    if records(y) or not isinstance(recv, DispatchOutput):
        return records(y)
    return records(*recv.__dict__.values(), carrier_of(recv))


def dispatch(
    context: OperatorContext, path: FastPath, x: Any, ids: Any, weights: Any, max_tokens: int | None
) -> DispatchOutput | None:
    """Make a dispatch of which a gradient is recorded, or do nothing and return None for one that needs an operator."""
    given = x, ids, weights
    if not context.has_nodes or not isinstance(x, Tensor) or not eager.is_unseen(given):
        return None
    if not isinstance(ids, Tensor) or not (weights is None or isinstance(weights, Tensor)):
        return None
    made: list[DispatchOutput] = []
    rows, row_weights = eager.apply(_Dispatch, x, weights, ids, max_tokens, (context, path, made))
    (output,) = made
    fields = output.__dict__
    if context.static.quantised:
        fields["_source"].carrier = rows
    else:
        fields["tokens"] = rows
    if weights is not None:
        fields["weights"] = row_weights
    return output


def combine(context: OperatorContext, path: FastPath, y: Any, recv: Any) -> Tensor | None:
    """Make a combine of which a gradient is recorded, or do nothing and return None for one that needs an operator."""
    if type(recv) is not DispatchOutput or not context.has_nodes or not eager.is_unseen((y,)):
        return None
    fields = recv.__dict__
    source = fields.get("_source")
    if not isinstance(y, Tensor) or source is None or source.again is not None:
        return None
    if source.owner != context.static.owner:
        return None
    carrier = source.carrier if context.static.quantised else fields["tokens"]
    return eager.apply(_Combine, y, fields.get("weights"), carrier, recv, (context, path))  # type: ignore[no-any-return]


class _Dispatch(torch.autograd.Function):
    """A dispatch. Returns the tensor that gradients of rows arrive at, and the rows' weights; the output itself is put
    into the list that comes with the call."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, ids: Tensor, max_tokens: int | None, call: Any
    ) -> tuple[Tensor, Tensor | None]:
        context, path, made = call
        given = None if weights is None else weights.detach()  # what an output holds must not hold the graph
        output = path.dispatch(x, ids, given, max_tokens)
        if output is None:
            output = path.ordinary(DispatchRequest(x, ids, given, max_tokens=max_tokens))
        made.append(output)
        source = output.__dict__["_source"]
        row_weights = None
        with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
            rows = output.tokens
            if context.static.quantised:
                rows = context.zero.expand(source.plan.rows, context.config.hidden_size)
            if weights is not None:
                row_weights = source.field("weights")
        wanted = ctx.needs_input_grad
        constant = [t for t, needed in ((rows, wanted[0]), (row_weights, wanted[1])) if t is not None and not needed]
        if constant:
            ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.context, ctx.received, ctx.x_dtype = context, source.part, x.dtype
        ctx.weight_dtype = None if weights is None else weights.dtype
        ctx.save_for_backward(source.memory, ids)
        return rows, row_weights

    @staticmethod
    @eager.once_differentiable
    def backward(ctx: Any, rows: Tensor | None, weights: Tensor | None) -> tuple[Tensor | None, ...]:
        context, received = ctx.context, ctx.received(*ctx.saved_tensors)
        if received.owner != context.static.owner:
            raise earlier_forward("dispatch (backward)")
        gradients, static = context.gradients, context.static
        wants_rows, wants_weights = ctx.needs_input_grad[:2]
        dx = dweights = None
        if wants_rows:
            # If no expert of this rank used the rows, those of other ranks may have. So this rank makes the call.
            if rows is None:
                shape = received.plan.rows, context.config.hidden_size
                rows = zero_rows(received.field("row_offsets"), shape, static.combine_dtype)
            elif rows.dtype != static.combine_dtype:
                rows = cast_rows(rows, received.field("row_offsets"), static.combine_dtype)
            dx = gradients.path(gradients.sums()).sum_rows(rows.contiguous(), received)
            if dx.dtype != ctx.x_dtype:
                dx = dx.to(ctx.x_dtype)
        if wants_weights:
            if weights is None:
                spread = received.memory.new_zeros((received.plan.rows, static.topk), dtype=static.weight_dtype)
            else:
                spread = by_slot(weights, received.field("src_info"), context.slots)
            dweights = gradients.path(gradients.weights()).sum_rows(spread, received)
            if dweights.dtype != ctx.weight_dtype:
                dweights = dweights.to(ctx.weight_dtype)
        return dx, dweights, None, None, None


class _Combine(torch.autograd.Function):
    """A combine. ``carrier`` makes the result depend on dispatch's output, also if the experts do not."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: Tensor | None, carrier: Tensor | None, recv: DispatchOutput, call: Any
    ) -> Tensor:
        context, path = call
        out = path.combine(y, recv)
        if out is None:
            out = path.ordinary(CombineRequest(y, recv))
        source = recv.__dict__["_source"]
        ctx.context, ctx.received, ctx.y_dtype = context, source.part, y.dtype
        ctx.weighted = source.weights is not None
        ctx.save_for_backward(source.memory, source.ids, y if ctx.needs_input_grad[1] else None, weights)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @eager.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        memory, ids, y, weights = ctx.saved_tensors
        received, context = ctx.received(memory, ids), ctx.context
        if received.owner != context.static.owner:
            raise earlier_forward("combine (backward)")
        if weights is None and ctx.weighted:
            weights = received.field("weights")
        row_offsets = received.field("row_offsets")
        d = context.gradients.path(context.gradients.rows()).rows_again(grad.contiguous(), received)
        dy, dw = row_gradients(
            d, row_offsets, y=y, weights=weights, dtype=ctx.y_dtype if ctx.needs_input_grad[0] else None
        )
        dy, dw = (None if rows is None else without_tail(rows, row_offsets) for rows in (dy, dw))
        return dy, dw, None, None, None
