"""Multiply the rows that exist by their weights, convert them, and take their dot products with other rows.

These are the gradients of combine (:mod:`moelink.ops.autograd`), and conversions between dtypes. With ``d`` [R, H]::

    out[r] = weights[r] d[r]        rounded once, to the dtype of ``out``; without weights a conversion
    dots[r] = <d[r], other[r]>      in fp32 or fp64

The arithmetic is fp32, or fp64 where DOUBLE says so. A result of fp64 arithmetic that is stored as bf16 or fp16 is
rounded to fp32 first, as torch's conversions do.

How many rows exist is read on the device, from the last of ``row_offsets``; of later rows nothing is read or written.
So a fixed number of programs serves any number of rows, and a call costs what its rows cost, not what its buffers could
hold. Nothing waits for anything; there is no protocol.

Step s handles rows [s * N, s * N + N), N = ROWS, and program p the steps p, p + P, p + 2 P, ... It reads C = COLUMNS
columns of its rows at a time.

**Order of a dot product:** each product is rounded; sum c takes those of columns c, c + C, c + 2 C, ... one by one.
Then the C sums are added, those of a thread one by one, those of threads in pairs; which columns a thread has, the
compiler chooses, once for each compiled form. A product passes through fewer than ceil(H / C) + 32 roundings, so the
error is at most that many eps times the sum of the products' magnitudes, with eps = 2**-24 in fp32.

With BY_SLOT, only rows of top-k slot ``slot`` are stored, those of which column 2 of ``src_info`` [R, 3] says so; for
slot 0, zeros in all others. Calls for the slots 0, 1, ... in this order thus fill every row that exists.

Example: H = 2, row_offsets [0, 1, 2], 3 rows of capacity.

=====  ========  ========  ========  =========  =========  ========================
row    d         weights   other     out        dots       out by slot 1 of slots 0, 1
=====  ========  ========  ========  =========  =========  ========================
0      [1, 2]    3         [5, 1]    [3, 6]     7          as it was
1      [4, -1]   2         [2, 3]    [8, -2]    5          [8, -2]
2      anything  anything  anything  as it was  as it was  as it was
=====  ========  ========  ========  =========  =========  ========================
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moelink.formats.device.casts import f32_to_bf16
from moelink.kernels.launch.cache_keys import Constants, settle_cache_key
from moelink.kernels.numeric import only
from moelink.rows.activation_kernel import native_conversions

_MOST_COLUMNS = 1024


@dataclass(frozen=True, repr=False, eq=False)
class ScaleRowsConstants(Constants):
    """What the kernel is compiled for.

    Attributes:
        HIDDEN_SIZE: columns of a row. STRIDE: elements from a row of ``d`` to the next, 0 where all rows are one.
        COLUMNS: columns at a time. ROWS: rows of a step.
        NUM_GROUPS: groups of rows; the last of ``row_offsets`` is the number of rows.
        HAS_WEIGHTS, HAS_OUT, HAS_DOTS: whether there are weights, and what is computed.
        BY_SLOT: only rows of one slot are stored.
        DOUBLE: the arithmetic is fp64. TO_BF16: ``out`` is bf16, stored as its bits.
        NATIVE_CASTS: the device's narrow conversions.
    """

    HIDDEN_SIZE: int
    STRIDE: int
    COLUMNS: int
    ROWS: int
    NUM_GROUPS: int
    HAS_WEIGHTS: bool
    HAS_OUT: bool
    HAS_DOTS: bool
    BY_SLOT: bool
    DOUBLE: bool
    TO_BF16: bool
    NATIVE_CASTS: bool


@triton.jit
def _number(value, DOUBLE: tl.constexpr):
    """``value`` in the dtype of the arithmetic."""
    return value.to(tl.float64) if DOUBLE else value.to(tl.float32)


@triton.jit
def _store(to, value, mask, S: tl.constexpr):
    """Round ``value`` to the dtype of ``out``, and store it."""
    if to.dtype.element_ty == tl.float64:
        tl.store(to, value.to(tl.float64), mask=mask)
    elif S.TO_BF16:
        tl.store(to, f32_to_bf16(value.to(tl.float32), S.NATIVE_CASTS), mask=mask)
    else:
        tl.store(to, value.to(tl.float32).to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "slot"])
def scale_rows_kernel(d, other, weights, src_info, row_offsets, out, dots, rows, slot, S: tl.constexpr):
    """See the module."""
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    for step in range(tl.program_id(0), tl.cdiv(total, S.ROWS), tl.num_programs(0)):
        row = tl.cast(step, tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
        exists = row < total
        mine = exists
        stored = exists
        if S.BY_SLOT:
            mine = exists & (tl.load(src_info + row * 3 + 2, mask=exists, other=-1) == slot)
            stored = mine | only(slot == 0, exists)
        if S.HAS_WEIGHTS:
            weight = _number(tl.load(weights + row, mask=mine, other=0.0), S.DOUBLE)[:, None]
        sums = _number(tl.zeros([S.ROWS, S.COLUMNS], tl.float32), S.DOUBLE)
        for first in range(0, S.HIDDEN_SIZE, S.COLUMNS):
            column = (first + tl.arange(0, S.COLUMNS))[None, :]
            read, written = mine[:, None], stored[:, None]
            if S.HIDDEN_SIZE % S.COLUMNS != 0:
                read, written = read & (column < S.HIDDEN_SIZE), written & (column < S.HIDDEN_SIZE)
            value = _number(tl.load(d + (row * S.STRIDE)[:, None] + column, mask=read, other=0.0), S.DOUBLE)
            place = (row * S.HIDDEN_SIZE)[:, None] + column
            if S.HAS_DOTS:
                sums += value * _number(tl.load(other + place, mask=read, other=0.0), S.DOUBLE)
            if S.HAS_OUT:
                _store(out + place, value * weight if S.HAS_WEIGHTS else value, written, S)
        if S.HAS_DOTS:
            tl.store(dots + row, tl.sum(sums, 1), mask=exists)


def launch(
    d: torch.Tensor,
    row_offsets: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dots: torch.Tensor | None = None,
    src_info: torch.Tensor | None = None,
    slot: int = 0,
) -> None:
    """Fill ``out`` [R, H] or ``dots`` [R], or both, from ``d`` [R, H], for the rows there are.

    Every dtype but that of ``row_offsets`` and ``src_info`` (int32) is bf16, fp16, fp32 or fp64; ``dots`` is fp32 or
    fp64. All tensors are contiguous, except that the rows of ``d`` may be one row (stride 0). The arithmetic is fp64 if
    any tensor is. ``dots`` needs ``other`` [R, H]; with ``src_info`` only ``out`` of the rows of ``slot`` is stored.
    """
    rows, hidden = d.shape
    if not rows or not hidden:
        return
    cuda = d.is_cuda
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(hidden))
    per_step = max(1, (2048 if cuda else 16384) // columns)
    most = 8 * torch.cuda.get_device_properties(d.device).multi_processor_count if cuda else 2
    tensors = [tensor for tensor in (d, weights, other, out, dots) if tensor is not None]
    to_bf16 = out is not None and out.dtype == torch.bfloat16
    constants = ScaleRowsConstants(
        HIDDEN_SIZE=hidden,
        STRIDE=d.stride(0) if rows > 1 else hidden,
        COLUMNS=columns,
        ROWS=per_step,
        NUM_GROUPS=row_offsets.shape[0] - 1,
        HAS_WEIGHTS=weights is not None,
        HAS_OUT=out is not None,
        HAS_DOTS=dots is not None,
        BY_SLOT=src_info is not None,
        DOUBLE=any(tensor.dtype == torch.float64 for tensor in tensors),
        TO_BF16=to_bf16,
        NATIVE_CASTS=native_conversions(d.device),
    )
    settle_cache_key(scale_rows_kernel)[(max(1, min(most, triton.cdiv(rows, per_step))),)](
        d, d if other is None else other, d if weights is None else weights,
        row_offsets if src_info is None else src_info, row_offsets,
        d if out is None else out.view(torch.uint16) if to_bf16 else out, d if dots is None else dots, rows, slot,
        S=constants, enable_fp_fusion=False,
    )  # fmt: skip
