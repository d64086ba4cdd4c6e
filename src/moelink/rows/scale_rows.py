"""Gradients of combine's rows, and conversions between dtypes, for the rows that exist: three operators.

Legend: ``R`` rows, ``H`` hidden_size, ``G`` groups. On CUDA a kernel computes them
(:mod:`moelink.rows.scale_rows_kernel`), elsewhere torch. Either way rows from ``row_offsets[-1]`` on are undefined, in
and out.

==========================  ======================================================================================
``moelink::row_gradients``  the gradients of rows that combine has weighed and summed, and of their weights
``moelink::slot_gradients``  the gradient of the rows of one top-k slot, in place
``moelink::cast_rows``      rows in another dtype, differentiable
==========================  ======================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.rows import eager

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def count_rows(row_offsets: Tensor, rows: int) -> int:
    """How many of ``rows`` rows there are, for tensors on the host."""
    return min(int(row_offsets[-1]), rows)


def cast_rows(rows: Tensor, row_offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``rows`` [R, H] to ``dtype``: ``rows`` itself if it has that dtype. Differentiable.

    Rows from ``row_offsets[-1]`` ([G + 1] int32, same device) on are undefined, and so is their gradient. Between bf16,
    fp16, fp32 and fp64, only the others are converted; torch converts all rows from or to any other dtype.

    >>> cast_rows(torch.ones(3, 2), torch.tensor([0, 1, 2], dtype=torch.int32), torch.bfloat16)[:2].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    if rows.dtype == dtype:
        return rows
    if rows.dtype not in _FLOATS or dtype not in _FLOATS:
        return rows.to(dtype)
    return eager.run(torch.ops.moelink.cast_rows, _cast_rows, _CastRows, rows, row_offsets, dtype)  # type: ignore[no-any-return]


def looks_for_nan() -> bool:
    """Return whether torch examines all gradients for NaN (``torch.autograd.set_detect_anomaly``), tails included."""
    compiled = torch.compiler.is_compiling()
    return not compiled and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def without_tail(rows: Tensor, row_offsets: Tensor) -> Tensor:
    """Return ``rows`` [R, ...] with zeros from ``row_offsets[-1]`` on where :func:`looks_for_nan`, else as they are."""
    if not looks_for_nan():
        return rows
    exists = torch.arange(rows.shape[0], device=rows.device) < row_offsets[-1]
    return rows.where(exists.view(-1, *[1] * (rows.dim() - 1)), 0)


def zero_rows(row_offsets: Tensor, shape: tuple[int | torch.SymInt, int], dtype: torch.dtype) -> Tensor:
    """Make rows [R, H] of ``dtype`` that are zero up to ``row_offsets[-1]``, and undefined from there on."""
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    zero = torch.zeros(1, shape[1], dtype=other, device=row_offsets.device)
    return cast_rows(zero.expand(shape[0], shape[1]), row_offsets, dtype)  # type: ignore[arg-type]


def row_gradients(
    d: Tensor, row_offsets: Tensor, *, y: Tensor | None, weights: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of combine's rows and of their weights, from those of the rows' tokens.

    Args:
        d: [R, H], the gradient of each row's token, which may be returned as the first result.
        row_offsets: [G + 1] int32; rows from ``row_offsets[-1]`` on are undefined, in and out.
        y: [R, H], the rows that combine took, for the gradient of weights; None if it is not wanted.
        weights: [R] fp32 or fp64, the factors of combine, or None for no weights.
        dtype: that of the gradient of rows; None if it is not wanted.

    Returns:
        ``weights[r] d[r]`` [R, H] of ``dtype``, and ``<y[r], d[r]>`` [R] of fp32 (fp64 if ``d`` is fp64); each None
        if it is not wanted.
    """
    if y is None and dtype is None:
        return None, None
    if y is None and weights is None and dtype is not None:
        return cast_rows(d, row_offsets, dtype), None
    if weights is None and d.dtype == dtype:
        return d, _gradients(d, row_offsets, y, None, None)[1]
    dy, dw = _gradients(d, row_offsets, y, weights, dtype)
    return None if dtype is None else dy, None if y is None else dw


def _gradients(*given: Any) -> tuple[Tensor, Tensor]:
    return eager.run(torch.ops.moelink.row_gradients, _row_gradients, None, *given)  # type: ignore[no-any-return]


def twin(d: Tensor, y: Tensor | None, weights: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Both gradients of all rows with torch's operators; the order of the sum is torch's.

    >>> twin(torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 1.0]]), torch.tensor([3.0]), torch.float32)
    (tensor([[3., 6.]]), tensor([7.]))
    """
    wide = d.to(_sum_dtype(d))
    dw = None if y is None else (y.to(wide.dtype) * wide).sum(1)
    return (d if weights is None else wide * weights[:, None]).to(dtype), dw


def _sum_dtype(d: Tensor) -> torch.dtype:
    return torch.float64 if d.dtype == torch.float64 else torch.float32


def _row_gradients(
    d: Tensor, row_offsets: Tensor, y: Tensor | None, weights: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    if eager.takes_kernels(d):
        given = [each.contiguous() for each in (d, row_offsets, y, weights) if each is not None]
        made = [*eager.repeated(tuple(given), _by_kernel, y is not None, weights is not None, dtype)]
        none = d.new_empty(0) if len(made) < 2 else d
        return none if dtype is None else made.pop(0), none if y is None else made.pop()
    dy, dw = _row_gradients_fake(d, row_offsets, y, weights, dtype)
    count = count_rows(row_offsets, d.shape[0])
    rows, dots = twin(
        d[:count], None if y is None else y[:count], None if weights is None else weights[:count], dtype or d.dtype
    )
    if dtype is not None:
        dy[:count] = rows
    if dots is not None:
        dw[:count] = dots
    return dy, dw


def _by_kernel(d: Tensor, row_offsets: Tensor, *given: Any) -> tuple[tuple[Tensor, ...], tuple[()]]:
    """``given``: ``y`` and ``weights`` if there are such, whether there are, and the dtype of the gradient of rows."""
    from moelink.rows.scale_rows_kernel import launch

    *tensors, has_y, has_weights, dtype = given
    y, weights = tensors[0] if has_y else None, tensors[-1] if has_weights else None
    dy = None if dtype is None else d.new_empty(d.shape, dtype=dtype)
    dw = None if y is None else d.new_empty(d.shape[0], dtype=_sum_dtype(d))
    launch(d, row_offsets, weights=weights, other=y, out=dy, dots=dw)
    return tuple(each for each in (dy, dw) if each is not None), ()


def _row_gradients_fake(
    d: Tensor, row_offsets: Tensor, y: Tensor | None, weights: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    dy = d.new_empty(0) if dtype is None else d.new_empty(d.shape, dtype=dtype)
    return dy, d.new_empty(0 if y is None else d.shape[0], dtype=_sum_dtype(d))


torch.library.custom_op("moelink::row_gradients", _row_gradients, mutates_args=()).register_fake(_row_gradients_fake)


@torch.library.custom_op("moelink::slot_gradients", mutates_args=("dy",))
def slot_gradients(dy: Tensor, d: Tensor, src_info: Tensor, row_offsets: Tensor, slot: int) -> None:
    """Store ``d`` [R, H] in the rows of ``dy`` [R, H] that are of top-k slot ``slot``; for slot 0, zeros in the others.

    ``src_info`` [R, 3] int32 names the slot of each row in column 2. Rows from ``row_offsets[-1]`` on are not touched.
    """
    if eager.takes_kernels(d):
        from moelink.rows.scale_rows_kernel import launch

        launch(d.contiguous(), row_offsets, out=dy, src_info=src_info.contiguous(), slot=slot)
        return
    count = count_rows(row_offsets, d.shape[0])
    others = dy.new_zeros(()) if slot == 0 else dy[:count]
    dy[:count] = torch.where(src_info[:count, 2:] == slot, d[:count].to(dy.dtype), others)


@slot_gradients.register_fake
def _slot_gradients_fake(dy: Tensor, d: Tensor, src_info: Tensor, row_offsets: Tensor, slot: int) -> None:
    return None


def _cast_rows(rows: Tensor, row_offsets: Tensor, dtype: torch.dtype) -> Tensor:
    out = rows.new_empty(rows.shape, dtype=dtype)
    if eager.takes_kernels(rows):
        from moelink.rows.scale_rows_kernel import launch

        by_rows = rows.shape[1] == 1 or rows.stride(1) == 1
        launch(rows if by_rows and rows.stride(0) in (0, rows.shape[1]) else rows.contiguous(), row_offsets, out=out)
        return out
    count = count_rows(row_offsets, rows.shape[0])
    out[:count] = rows[:count].to(dtype)
    return out


def _cast_rows_fake(rows: Tensor, row_offsets: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, row_offsets, _ = inputs
    ctx.dtype = rows.dtype
    ctx.save_for_backward(row_offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (row_offsets,) = ctx.saved_tensors
    rows = eager.run(torch.ops.moelink.cast_rows, _cast_rows, _CastRows, grad, row_offsets, ctx.dtype)
    return without_tail(rows, row_offsets), None, None


_CastRows = eager.function_of(_cast_rows, _save, _backward)
_operator = torch.library.custom_op("moelink::cast_rows", _cast_rows, mutates_args=())
_operator.register_fake(_cast_rows_fake)
_operator.register_autograd(_backward, setup_context=_save)
