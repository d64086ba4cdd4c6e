"""Multiply the rows that exist by their weights, convert them, and take their dot products with other rows.

These are the gradients of combine (:mod:`moelink.ops.autograd`), and conversions between dtypes. With ``d`` [R, H]::

    out[r] = weights[r] d[r]        rounded once, to the dtype of ``out``; without weights a conversion
    dots[r] = <d[r], other[r]>      in fp32 or fp64

The arithmetic is fp32, or fp64 where DOUBLE says so. A result of fp64 arithmetic that is stored as bf16 or fp16 is
rounded to fp32 first, as torch's conversions do.

Step s handles rows [s * N, s * N + N), N = ROWS, C = COLUMNS columns of them at a time.
:mod:`moelink.rows.common_kernel` says which steps a program has.

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

from functools import lru_cache

import torch
import triton
import triton.language as tl

from moelink.arith import ceil_div
from moelink.kernels.launch.device import has_native_casts
from moelink.kernels.numeric import only
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import common_kernel as common
from moelink.rows.common_kernel import RowConstants, number, rounded

_MOST_COLUMNS = 1024


@triton.jit(do_not_specialize=["rows", "slot"])
def scale_rows_kernel(d, other, weights, src_info, row_offsets, out, dots, rows, slot, S: tl.constexpr):
    """See the module."""
    follow_previous_launch(S)
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
            weight = number(tl.load(weights + row, mask=mine, other=0.0), S.DOUBLE)[:, None]
        sums = number(tl.zeros([S.ROWS, S.COLUMNS], tl.float32), S.DOUBLE)
        for first in range(0, S.HIDDEN_SIZE, S.COLUMNS):
            column = (first + tl.arange(0, S.COLUMNS))[None, :]
            read, written = mine[:, None], stored[:, None]
            if S.HIDDEN_SIZE % S.COLUMNS != 0:
                read, written = read & (column < S.HIDDEN_SIZE), written & (column < S.HIDDEN_SIZE)
            value = number(tl.load(d + (row * S.STRIDE)[:, None] + column, mask=read, other=0.0), S.DOUBLE)
            place = (row * S.HIDDEN_SIZE)[:, None] + column
            if S.HAS_DOTS:
                sums += value * number(tl.load(other + place, mask=read, other=0.0), S.DOUBLE)
            if S.HAS_OUT:
                to = out + place
                value = value * weight if S.HAS_WEIGHTS else value
                tl.store(to, rounded(value, to.dtype.element_ty, S), mask=written)
        if S.HAS_DOTS:
            tl.store(dots + row, tl.sum(sums, 1), mask=exists)


def launch(
    d: torch.Tensor, row_offsets: torch.Tensor, *, weights: torch.Tensor | None = None,
    other: torch.Tensor | None = None, out: torch.Tensor | None = None, dots: torch.Tensor | None = None,
    src_info: torch.Tensor | None = None, slot: int = 0,
) -> None:  # fmt: skip
    """Fill ``out`` [R, H] or ``dots`` [R], or both, from ``d`` [R, H], for the rows there are.

    Every dtype but that of ``row_offsets`` and ``src_info`` (int32) is bf16, fp16, fp32 or fp64; ``dots`` is fp32 or
    fp64. All tensors are contiguous, except that the rows of ``d`` may be one row (stride 0). The arithmetic is fp64 if
    any tensor is. ``dots`` needs ``other`` [R, H]; with ``src_info`` only ``out`` of the rows of ``slot`` is stored.
    """
    rows, hidden = d.shape
    if not rows or not hidden:
        return
    parts = (weights is not None, out is not None, dots is not None, src_info is not None)
    constants, per_step = _constants(
        hidden, row_offsets.shape[0] - 1, d.stride(0) if rows > 1 else hidden, parts,
        any(tensor is not None and tensor.dtype == torch.float64 for tensor in (d, weights, other, out, dots)),
        common.step_elements(d.device), has_native_casts(d.device),
    )  # fmt: skip
    common.launch(
        scale_rows_kernel,
        (d, other, weights, row_offsets if src_info is None else src_info, row_offsets,
         None if out is None else common.bits(out), dots, rows, slot),
        constants, ceil_div(rows, per_step), absent=d,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _constants(
    hidden: int, num_groups: int, stride: int, parts: tuple[bool, ...], double: bool, elements: int, native: bool
) -> tuple[RowConstants, int]:
    """Return the launch constants, and the rows of a step. ``parts``: which of weights, rows, dots and slots there
    are."""
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(hidden))
    per_step = max(1, elements // columns)
    has_weights, has_out, has_dots, by_slot = parts
    return RowConstants(
        HIDDEN_SIZE=hidden, NUM_GROUPS=num_groups, NATIVE_CASTS=native, DOUBLE=double, STRIDE=stride, COLUMNS=columns,
        ROWS=per_step, HAS_WEIGHTS=has_weights, HAS_OUT=has_out, HAS_DOTS=has_dots, BY_SLOT=by_slot,
    ), per_step  # fmt: skip
