"""Define the operators: schemas, implementations, and fakes, which return tensors of the right shapes for a tracer.

===============================  =======================================================================================
``moelink::dispatch``            x, ids, weights -> the tensors of a DispatchOutput
``moelink::combine``             rows -> tokens
``moelink::dispatch_backward``   gradients of rows and of their weights -> gradients of tokens and of weights
``moelink::combine_backward``    gradients of tokens -> gradients of rows, and the rows' weights
===============================  =======================================================================================

**Order.** Ranks must make the same calls in the same order, so a compiler may neither drop an operator nor reorder two.
Every operator therefore declares that it writes ``order``, a tensor of one element that all communicators of a device
share, because calls of two communicators must also keep their order. Nothing is in fact written. Compilers keep writes
to an input, and keep their order, in the forward and in the backward graph. The marker made for this purpose,
``EffectType.ORDERED``, does not stop Inductor (torch 2.11, 2.13) from reordering calls with independent results.

**Shapes.** Outputs have their worst-case size, which follows from the configuration and ``max_tokens``. An output that
this communicator does not have is an empty tensor.

Importing this module registers the operators, so that a compiled or exported graph finds them by name. It touches no
device.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moelink.formats import get_format
from moelink.ops.context import NUM_OUTPUTS, REGISTRY, OperatorContext
from moelink.rows.eager import is_unseen
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.session import Session

LIBRARY = torch.library.Library("moelink", "DEF")
"""The registrations live as long as this object."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)  # rows are contiguous, here and on the wire

LIBRARY.define(
    "dispatch(Tensor(a!) order, Tensor x, Tensor topk_ids, Tensor? topk_weights, Tensor? scales, Tensor? input_scale, "
    "Tensor[] routing, bool host_counts, str communicator, *, SymInt? max_tokens=None) -> "
    f"({', '.join(['Tensor'] * NUM_OUTPUTS)})",
    tags=_TAGS,
)
LIBRARY.define(
    "combine(Tensor(a!) order, Tensor y, Tensor? weights, Tensor? topk_weights, Tensor? shared, Tensor? epilogue, "
    "Tensor? carrier, Tensor topk_ids, Tensor? home_weights, Tensor[] record, *, bool reduce, str communicator) "
    "-> Tensor",
    tags=_TAGS,
)
LIBRARY.define(
    "dispatch_backward(Tensor(a!) order, Tensor? rows, Tensor? row_weights, Tensor topk_ids, Tensor[] record, "
    "str communicator) -> (Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.define(
    "combine_backward(Tensor(a!) order, Tensor tokens, Tensor? topk_weights, Tensor topk_ids, Tensor[] record, "
    "str communicator) -> (Tensor, Tensor)",
    tags=_TAGS,
)


def _dispatch(
    order: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    input_scale: Tensor | None,
    routing: list[Tensor],
    host_counts: bool,
    communicator: str,
    *,
    max_tokens: int | None = None,
) -> tuple[Tensor, ...]:
    """Return the fields of a DispatchOutput, flattened.

    With ``routing``, counts are left out, and the parts of the plan that are not this call's own.
    """
    context = REGISTRY.find(communicator, "dispatch")
    operation = context.started("dispatch")
    if operation is None:
        request = DispatchRequest(
            x,
            topk_ids,
            topk_weights,
            scales=scales,
            input_scale=input_scale,
            routing=context.restore(routing, topk_ids=topk_ids) if routing else None,
            host_counts=host_counts,
            max_tokens=max_tokens,
            separate=True,
        )
        operation = context.session.call([request], fused=True)
    (output,) = operation.wait()
    return context.flatten(output, with_plan=not routing)


def _dispatch_fake(
    order: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    input_scale: Tensor | None,
    routing: list[Tensor],
    host_counts: bool,
    communicator: str,
    *,
    max_tokens: int | None = None,
) -> tuple[Tensor, ...]:
    context = REGISTRY.find(communicator, "dispatch")
    # Over an earlier routing the output has the rows of that one, whose src_info is the second part of a record.
    rows: int | torch.SymInt = routing[1].shape[0] if routing else context.config.output_rows(max_tokens)
    if host_counts:
        rows = torch.library.get_ctx().new_dynamic_size()
    return context.allocate(
        num_tokens=x.shape[0],
        rows=rows,
        weighted=topk_weights is not None,
        with_plan=not routing,
        device=x.device,
    )


def _combine(
    order: Tensor,
    y: Tensor,
    weights: Tensor | None,
    topk_weights: Tensor | None,
    shared: Tensor | None,
    epilogue: Tensor | None,
    carrier: Tensor | None,
    topk_ids: Tensor,
    home_weights: Tensor | None,
    record: list[Tensor],
    *,
    reduce: bool,
    communicator: str,
) -> Tensor:
    """Return tokens.

    ``weights`` belong to rows, ``topk_weights`` are combine's own, ``home_weights`` went into dispatch.

    ``carrier`` is not read. It makes the result depend on dispatch's output whatever the experts do, so that the
    backward of dispatch runs on every rank, a rank without rows included.
    """
    context = REGISTRY.find(communicator, "combine")
    operation = context.started("combine")
    if operation is None:
        recv = context.restore(record, topk_ids=topk_ids, weights=weights, home_weights=home_weights)
        request = CombineRequest(y, recv, topk_weights, reduce=reduce, epilogue=epilogue, shared=shared)
        operation = context.session.call([request], fused=True)
    out: Tensor = operation.wait()[0]
    return out


def _combine_fake(
    order: Tensor,
    y: Tensor,
    weights: Tensor | None,
    topk_weights: Tensor | None,
    shared: Tensor | None,
    epilogue: Tensor | None,
    carrier: Tensor | None,
    topk_ids: Tensor,
    home_weights: Tensor | None,
    record: list[Tensor],
    *,
    reduce: bool,
    communicator: str,
) -> Tensor:
    tokens, topk = topk_ids.shape
    middle = () if reduce else (topk,)
    return y.new_empty(tokens, *middle, y.shape[1])


def _dispatch_backward(
    order: Tensor,
    rows: Tensor | None,
    row_weights: Tensor | None,
    topk_ids: Tensor,
    record: list[Tensor],
    communicator: str,
) -> tuple[Tensor, Tensor]:
    """Return the sums of ``rows`` by token, and those of ``row_weights`` [rows, topk]; empty for None."""
    context = REGISTRY.find_latest(communicator, "dispatch (backward)")
    dx = topk_ids.new_empty(0, dtype=context.static.combine_dtype)
    dweights = topk_ids.new_empty(0, dtype=context.static.weight_dtype)
    if rows is not None:
        dx = _sum_home(context, context.gradients.sums(), rows, topk_ids, record)
    if row_weights is not None:
        dweights = _sum_home(context, context.gradients.weights(), row_weights, topk_ids, record)
    return dx, dweights


def _sum_home(
    context: OperatorContext, session: Session, rows: Tensor, topk_ids: Tensor, record: list[Tensor]
) -> Tensor:
    """Combine ``rows`` over ``session`` without weights."""
    recv = context.restore(record, topk_ids=topk_ids, session=session)
    out: Tensor = session.call([CombineRequest(rows, recv)], fused=True).wait()[0]
    return out


def _dispatch_backward_fake(
    order: Tensor,
    rows: Tensor | None,
    row_weights: Tensor | None,
    topk_ids: Tensor,
    record: list[Tensor],
    communicator: str,
) -> tuple[Tensor, Tensor]:
    static, tokens = REGISTRY.find(communicator, "dispatch (backward)").static, topk_ids.shape[0]
    return (
        topk_ids.new_empty(0 if rows is None else (tokens, rows.shape[1]), dtype=static.combine_dtype),
        topk_ids.new_empty(0 if row_weights is None else (tokens, static.topk), dtype=static.weight_dtype),
    )


def _combine_backward(
    order: Tensor,
    tokens: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    record: list[Tensor],
    communicator: str,
) -> tuple[Tensor, Tensor]:
    """Return each row's token (undefined past the last offset) and its weight of ``topk_weights`` (empty without)."""
    context = REGISTRY.find_latest(communicator, "combine (backward)")
    session = context.gradients.rows()
    routing = context.restore(record, topk_ids=topk_ids, session=session)
    request = DispatchRequest(tokens, topk_ids, topk_weights, routing=routing)
    (output,) = session.call([request], fused=True).wait()
    return output.tokens, output.row_offsets.new_empty(0) if output.weights is None else output.weights


def _combine_backward_fake(
    order: Tensor,
    tokens: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    record: list[Tensor],
    communicator: str,
) -> tuple[Tensor, Tensor]:
    context = REGISTRY.find(communicator, "combine (backward)")
    rows, dtype = record[1].shape[0], get_format(context.gradients.row_format).payload_dtype
    weighted = topk_weights is not None and not context.static.ranked
    return (
        tokens.new_empty(rows, tokens.shape[1], dtype=dtype),
        tokens.new_empty(rows, dtype=context.static.weight_dtype) if weighted else record[0].new_empty(0),
    )


for _name, _run, _fake in (
    ("dispatch", _dispatch, _dispatch_fake),
    ("combine", _combine, _combine_fake),
    ("dispatch_backward", _dispatch_backward, _dispatch_backward_fake),
    ("combine_backward", _combine_backward, _combine_backward_fake),
):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moelink::{_name}", _fake, lib=LIBRARY)

dispatch = torch.ops.moelink.dispatch.default
combine = torch.ops.moelink.combine.default
dispatch_backward = torch.ops.moelink.dispatch_backward.default
combine_backward = torch.ops.moelink.combine_backward.default
_IMPLEMENTATIONS = MappingProxyType({
    dispatch: _dispatch, combine: _combine, dispatch_backward: _dispatch_backward, combine_backward: _combine_backward,
})  # fmt: skip


def without_gradient(operator: Any, *given: Any, **options: Any) -> Any:
    """Call ``operator`` without its gradient, or where nothing must see the call its implementation alone."""
    run: Any = _IMPLEMENTATIONS[operator] if is_unseen(given) else operator
    with torch._C._AutoDispatchBelowAutograd():
        return run(*given, **options)
