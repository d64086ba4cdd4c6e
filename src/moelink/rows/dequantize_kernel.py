"""Dequantise the rows that exist: codes and scales of received rows to bf16, fp16 or fp32.

The rows are cut into groups and steps as :mod:`moelink.rows.common_kernel` says. The elements of a group are those of a
scale, 64 at most where there are none, or one a row. A group's scale is where the layout puts it
(:mod:`moelink.formats.scale_layouts`). The number is that of the format's device function, ``code * scale`` in fp32,
rounded to the output's dtype.

Example: format fp8_block128, H = 256, so W = 2; row_offsets [0, 1, 2], 4 rows of capacity; scales transposed, [2, 4].
Codes 2 and 3 of row 1's groups with scales 0.5 and 4 give 1 and 12; rows 2 and 3 are not written.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from moelink.formats.base import Format
from moelink.kernels.launch.device import has_native_casts
from moelink.kernels.scale_tiles import place_in_tiles
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import common_kernel as common
from moelink.rows.common_kernel import RowConstants, group_of, place, rounded


def can_dequantize(fmt: Format) -> bool:
    """Whether the format has a device function, and its scales a layout, that the kernel knows."""
    if fmt.scale_layout is not None and fmt.scale_layout.name not in common.LAYOUTS:
        return False
    return fmt.codec().decode is not None


@triton.jit
def scale_of(scales, row_offsets, scales_offsets, row, group, here, rows, S: tl.constexpr):
    """The scales of groups ``group`` of rows ``row``, as the layout has them."""
    W: tl.constexpr = S.HIDDEN_SIZE // S.GROUP_SIZE
    P: tl.constexpr = S.SCALES_PER_WORD
    if S.SCALE_LAYOUT == "row_major":
        return tl.load(scales + (row if S.ONE_SCALE else row * ((W + P - 1) // P * P) + group), mask=here, other=0)
    elif S.SCALE_LAYOUT == "transposed":
        return tl.load(scales + (group.to(tl.int64) // P * rows + row) * P + group % P, mask=here, other=0)
    else:
        expert = group_of(row, row_offsets, S.NUM_GROUPS, S.HALVINGS)
        start = tl.load(row_offsets + expert)
        inner = (row - start).to(tl.int32)
        block = start // 128 + tl.load(scales_offsets + expert) + inner // 128
        tile = block.to(tl.int64) * ((W + 3) // 4) + group // 4
        return tl.load(scales + place_in_tiles(tile, inner, group), mask=here, other=0)


@triton.jit(do_not_specialize=["rows"])
def dequantize_rows_kernel(tokens, scales, row_offsets, scales_offsets, input_scale, out, rows, S: tl.constexpr):
    """See the module."""
    follow_previous_launch(S)
    W: tl.constexpr = S.HIDDEN_SIZE // S.GROUP_SIZE
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    steps = tl.cdiv(total.to(tl.int64) * W, S.GROUPS_PER_STEP).to(tl.int32)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        _, row, group = place(step, W, S.GROUPS_PER_STEP)
        here = row < total
        element = tl.arange(0, S.GROUP_ELEMENTS)[None, :]
        codes = (row * (W * S.GROUP_ELEMENTS) + group * S.GROUP_ELEMENTS)[:, None] + element
        payload = tl.load(tokens + codes, mask=here[:, None], other=0)
        if S.SCALE_LAYOUT == "":
            scale = (group * 0).to(tl.uint8)
        else:
            scale = scale_of(scales, row_offsets, scales_offsets, row, group, here, rows, S)
        if S.HAS_INPUT_SCALE:
            factor = tl.load(input_scale)
        else:
            factor = 1.0
        value = rounded(S.CODE_FN(payload, scale, factor, S.NATIVE_CASTS), out.dtype.element_ty, S)
        to = out + (row * S.HIDDEN_SIZE + group * S.GROUP_SIZE)[:, None] + tl.arange(0, S.GROUP_SIZE)[None, :]
        tl.store(to, value, mask=here[:, None])


def launch(
    tokens: torch.Tensor, scales: torch.Tensor | None, row_offsets: torch.Tensor, scales_offsets: torch.Tensor | None,
    input_scale: torch.Tensor | None, out: torch.Tensor, fmt: Format, *, by_row: bool = False,
) -> None:  # fmt: skip
    """Fill ``out`` [rows, hidden] from ``tokens`` [rows, width] and ``scales``, all contiguous, for the rows there are.

    ``fmt`` is one that :func:`can_dequantize` takes; ``scales`` are in its layout, with the ``scales_offsets`` of 128x4
    tiles, or row-major if ``by_row`` (layout "rank"); None for formats without.
    """
    (rows, hidden), num_groups = out.shape, row_offsets.shape[0] - 1
    if not rows or not hidden or not num_groups:
        return
    device = out.device
    form = _form(
        fmt, hidden, num_groups, by_row, input_scale is not None, common.step_elements(device), has_native_casts(device)
    )
    codes, scales = form.views(tokens, scales)
    common.launch(
        dequantize_rows_kernel, (codes, scales, row_offsets, scales_offsets, input_scale, common.bits(out), rows),
        form.constants, form.steps(rows), absent=row_offsets,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _form(
    fmt: Format, hidden: int, num_groups: int, by_row: bool, has_input_scale: bool, elements: int, native: bool
) -> common.Form:
    one_scale = fmt.scale_dtype is not None and fmt.elements_per_scale(hidden) > fmt.group
    group = common.even_groups(hidden) if one_scale else common.group_elements(fmt, hidden)
    per_step = triton.next_power_of_2(max(1, elements // group))
    constants = RowConstants(
        **common.format_constants(fmt, hidden, num_groups, group, per_step), CODE_FN=fmt.codec().decode,
        SCALE_LAYOUT="" if fmt.scale_layout is None else "row_major" if by_row else fmt.scale_layout.name,
        ONE_SCALE=one_scale, HAS_INPUT_SCALE=has_input_scale, NATIVE_CASTS=native,
    )  # fmt: skip
    return common.Form.of(constants, fmt, hidden, group, per_step)
