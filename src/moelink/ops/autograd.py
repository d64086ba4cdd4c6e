"""Define the gradients of the operators: the backward of dispatch is a combine, that of combine a dispatch.

Legend: ``R`` rows, ``H`` hidden_size, ``T`` tokens of this rank, ``K`` topk; t(r), k(r) the token and slot of row r.

Dispatch copies tokens and weights to rows: ``tokens[r] = x[t(r)]``, ``weights[r] = topk_weights[t(r), k(r)]``. So::

    dx[t]               = sum over rows r of token t of dtokens[r]                  an unweighted combine
    dtopk_weights[t, k] = dweights[r] of the row r of (t, k), 0 where there is none   the same, of rows of K numbers

A format with scales rounds; its gradient is straight-through, that is, computed as if it did not round: ``dtokens`` is
then the gradient of the dequantised rows (:mod:`moelink.rows.dequantize`), and the ``carrier`` output brings it here.

Combine sums rows: ``out[t] = sum over rows r of token t of w[r] y[r]``, plus ``shared`` and ``epilogue``. So, with
``d[r] = dout[t(r)]``, a dispatch of dout over the same routing::

    dy[r] = w[r] d[r]        dw[r] = <y[r], d[r]>        dshared = dout        depilogue = dout (a bias: its sum)

dw is the gradient of w. Weights that came with dispatch pass it on to dispatch's backward. Combine's own
``topk_weights`` travel with dout, and their gradients return as those of dispatch's weights do. With ``reduce=False``
row r alone is ``out[t(r), k(r)]``, so the backward makes one dispatch per slot.

Combine does not read dropped rows or padding: their gradient is zero. Rows past the last offset are undefined in the
forward, and so is their gradient, which nothing here computes (:mod:`moelink.rows.scale_rows`), but for zeros where
torch looks for NaN in gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental import proxy_tensor

from moelink.ops import library
from moelink.ops.context import CARRIER, FIELDS, NUM_OUTPUTS, REGISTRY, record_of
from moelink.rows.eager import is_unseen
from moelink.rows.scale_rows import cast_rows, row_gradients, slot_gradients, without_tail, zero_rows

_TOKENS, _SRC_INFO, _TOPK_IDS = (FIELDS.index(name) for name in ("tokens", "src_info", "topk_ids"))
_WEIGHTS, _TOPK_WEIGHTS = (FIELDS.index(name) for name in ("weights", "topk_weights"))


def _valid(rows: Tensor, row_offsets: Tensor) -> Tensor:
    """Mask [R, 1] bool of the rows of ``rows`` [R, ...] before the last offset."""
    return (torch.arange(rows.shape[0], device=row_offsets.device) < row_offsets[-1])[:, None]


def _saved_unchecked(order: Tensor) -> Tensor:
    """Return ``order``, marked for AOTAutograd as saved without a check of its version.

    Regions that are compiled apart all declare to write it, so its version has moved on when the backward of an earlier
    one runs. In eager mode ``order`` is an attribute of ``ctx``, whose version nobody checks either. Releases of torch
    that do not know the mark check the version, and refuse such a backward.
    """
    proxies = getattr(proxy_tensor, "_get_proxies", None)
    if proxies is not None and proxy_tensor.get_proxy_mode() is not None:
        for proxy in proxies(order):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True
    return order


def by_slot(values: Tensor, src_info: Tensor, slots: Tensor) -> Tensor:
    """Spread ``values`` [R] to [R, K]: ``values[r]`` in the column of row r's slot, zeros elsewhere. Rows past the last
    offset are undefined. ``slots`` [K] are 0, 1, ..., K - 1."""
    return torch.where(src_info[:, 2:] == slots, values[:, None], 0)


class Dispatch(torch.autograd.Function):
    """``moelink::dispatch`` with a tensor that requires grad."""

    @staticmethod
    def forward(
        ctx: Any,
        order: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None,
        scales: Tensor | None,
        input_scale: Tensor | None,
        settings: tuple[bool, str, int | None],
        *routing: Tensor,
    ) -> tuple[Tensor, ...]:
        host_counts, communicator, max_tokens = settings
        context = REGISTRY.find(communicator, "dispatch")
        static = context.static
        _saved_unchecked(order)
        outputs: tuple[Tensor, ...] = library.without_gradient(
            library.dispatch, order, x, topk_ids, topk_weights, scales, input_scale, list(routing), host_counts,
            communicator, max_tokens=max_tokens,
        )  # fmt: skip
        rows, weights = CARRIER if static.quantised else _TOKENS, _TOPK_WEIGHTS if static.ranked else _WEIGHTS
        wanted = {rows: ctx.needs_input_grad[1], weights: ctx.needs_input_grad[3]}
        ctx.mark_non_differentiable(*(outputs[i] for i in range(NUM_OUTPUTS) if not wanted.get(i, False)))
        ctx.set_materialize_grads(False)
        # Not the given name: an exported graph keeps that of the ranks for which it was made.
        ctx.order, ctx.communicator, ctx.rows, ctx.weights = order, context.name, rows, weights
        ctx.num_rows, ctx.x_dtype = outputs[_SRC_INFO].shape[0], x.dtype
        ctx.weight_dtype = None if topk_weights is None else topk_weights.dtype
        ctx.save_for_backward(topk_ids, outputs[_TOPK_IDS], *record_of(outputs, routing, static))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        context = REGISTRY.find_latest(ctx.communicator, "dispatch (backward)")
        static, hidden = context.static, context.config.hidden_size
        topk_ids, local_ids, *record = ctx.saved_tensors
        rows = weights = None
        if ctx.needs_input_grad[1]:
            rows = grads[ctx.rows]
            if rows is None:
                # No expert of this rank used the rows. Those of other ranks may have, so this rank makes the call.
                rows = zero_rows(record[0], (ctx.num_rows, hidden), static.combine_dtype)
            rows = cast_rows(rows, record[0], static.combine_dtype).contiguous()
        if ctx.needs_input_grad[3]:
            weights = grads[ctx.weights]
            if weights is None:
                weights = topk_ids.new_zeros((ctx.num_rows, static.topk), dtype=static.weight_dtype)
            elif static.ranked:
                here = _valid(weights, record[0]) & (local_ids >= 0)
                weights = torch.where(here, weights, weights.new_zeros(()))
            else:
                weights = by_slot(weights, record[1], torch.arange(static.topk, device=weights.device))
        dx, dweights = library.without_gradient(
            library.dispatch_backward, _saved_unchecked(ctx.order), rows, weights, topk_ids, record, ctx.communicator
        )
        return (
            None,
            None if rows is None else dx.to(ctx.x_dtype),
            None,
            None if weights is None else dweights.to(ctx.weight_dtype),
            *[None] * (len(ctx.needs_input_grad) - 4),
        )


class Combine(torch.autograd.Function):
    """``moelink::combine`` with a tensor that requires grad."""

    @staticmethod
    def forward(
        ctx: Any,
        order: Tensor,
        y: Tensor,
        weights: Tensor | None,
        topk_weights: Tensor | None,
        shared: Tensor | None,
        epilogue: Tensor | None,
        carrier: Tensor | None,
        topk_ids: Tensor,
        settings: tuple[bool, str, Tensor | None],
        *record: Tensor,
    ) -> Tensor:
        reduce, communicator, home_weights = settings
        _saved_unchecked(order)
        out: Tensor = library.without_gradient(
            library.combine, order, y, weights, topk_weights, shared, epilogue, carrier, topk_ids, home_weights,
            list(record), reduce=reduce, communicator=communicator,
        )  # fmt: skip
        ctx.order, ctx.reduce, ctx.y_dtype = order, reduce, y.dtype
        ctx.communicator = REGISTRY.find(communicator, "combine").name
        ctx.added = [None if term is None else (term.dim(), term.dtype) for term in (shared, epilogue)]
        weighted = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        ctx.save_for_backward(
            y if weighted and reduce else None,
            weights if reduce else None,
            topk_weights,
            topk_ids,
            *record,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, weights, topk_weights, topk_ids, *record = ctx.saved_tensors
        grad = grad.contiguous()
        dy = dweights = dtopk_weights = None
        # The gradients of rows, of their weights, of combine's weights and of the carrier need a call of all ranks.
        if any(ctx.needs_input_grad[i] for i in (1, 2, 3, 6)):
            if ctx.reduce:
                dy, dweights, dtopk_weights = _weighted_sum_backward(
                    ctx, grad, y=y, weights=weights, topk_weights=topk_weights, topk_ids=topk_ids, record=record
                )
            else:
                dy = _slots_backward(ctx, grad, topk_ids, record)
        added = [
            _added_backward(grad, *term) if term is not None and needed else None
            for term, needed in zip(ctx.added, ctx.needs_input_grad[4:6], strict=True)
        ]
        dy, dweights = (None if rows is None else without_tail(rows, record[0]) for rows in (dy, dweights))
        rest = [None] * (len(ctx.needs_input_grad) - 6)
        return (None, dy, dweights, dtopk_weights, *added, *rest)


def _weighted_sum_backward(
    ctx: Any,
    grad: Tensor,
    *,
    y: Tensor | None,
    weights: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    record: list[Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of y, of the rows' weights, and of combine's ``topk_weights``."""
    static = REGISTRY.find_latest(ctx.communicator, "combine (backward)").static
    row_offsets, src_info = record[:2]
    d, home = library.without_gradient(
        library.combine_backward, _saved_unchecked(ctx.order), grad, topk_weights, topk_ids, record, ctx.communicator
    )
    dy, dw = row_gradients(
        d, row_offsets, y=y, weights=weights if topk_weights is None else home,
        dtype=ctx.y_dtype if ctx.needs_input_grad[1] else None,
    )  # fmt: skip
    if topk_weights is None or not ctx.needs_input_grad[3]:
        return dy, dw, None
    assert dw is not None
    spread = by_slot(dw, src_info, torch.arange(static.topk, device=dw.device))
    _, dtopk = library.without_gradient(
        library.dispatch_backward, _saved_unchecked(ctx.order), None, spread, topk_ids, record, ctx.communicator
    )
    return dy, None, dtopk.to(topk_weights.dtype)


def _slots_backward(ctx: Any, grad: Tensor, topk_ids: Tensor, record: list[Tensor]) -> Tensor | None:
    """Compute the gradient of y for ``reduce=False``: [T, K, H] to rows, slot by slot."""
    row_offsets, src_info = record[:2]
    dy = grad.new_empty(src_info.shape[0], grad.shape[2], dtype=ctx.y_dtype)
    for slot in range(grad.shape[1]):
        tokens = grad[:, slot].contiguous()
        d, _ = library.without_gradient(
            library.combine_backward, _saved_unchecked(ctx.order), tokens, None, topk_ids, record, ctx.communicator
        )
        slot_gradients(dy, d, src_info, row_offsets, slot)
    return dy if ctx.needs_input_grad[1] else None


def _added_backward(grad: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Compute the gradient of an added tensor: one row for all tokens (dim 1), or one row per token (dim 2)."""
    if dim == 2:
        return grad.to(dtype)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.sum(0, dtype=wide).to(dtype)


def _requires_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def dispatch(*given: Any, max_tokens: int | None = None) -> tuple[Tensor, ...]:
    """``moelink::dispatch`` with its gradient; an eager call that records one does not pass torch's dispatcher."""
    return (_dispatch if is_unseen(given) else library.dispatch)(*given, max_tokens=max_tokens)  # type: ignore[no-any-return]


def combine(*given: Any, reduce: bool, communicator: str) -> Tensor:
    """``moelink::combine``, likewise."""
    run = _combine if is_unseen(given) else library.combine
    return run(*given, reduce=reduce, communicator=communicator)  # type: ignore[no-any-return]


def _dispatch(*given: Any, max_tokens: int | None = None) -> tuple[Tensor, ...]:
    *tensors, routing, host_counts, communicator = given
    if _requires_grad(tensors[1], tensors[3]):
        return Dispatch.apply(*tensors, (host_counts, communicator, max_tokens), *routing)  # type: ignore[no-any-return, no-untyped-call]
    return library.without_gradient(library.dispatch, *given, max_tokens=max_tokens)  # type: ignore[no-any-return]


def _combine(*given: Any, reduce: bool, communicator: str) -> Tensor:
    *tensors, home_weights, record = given
    if _requires_grad(*tensors[1:7]):
        return Combine.apply(*tensors, (reduce, communicator, home_weights), *record)  # type: ignore[no-any-return, no-untyped-call]
    return library.without_gradient(library.combine, *given, reduce=reduce, communicator=communicator)  # type: ignore[no-any-return]


library.LIBRARY.impl("dispatch", _dispatch, "Autograd")
library.LIBRARY.impl("combine", _combine, "Autograd")
