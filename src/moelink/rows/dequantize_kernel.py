"""Dequantise the rows that exist: codes and scales of received rows to bf16, fp16 or fp32.

How many rows exist is read on the device, from the last of ``row_offsets``; later rows of the output are not written.
Nothing waits for anything; there is no protocol.

The rows are one list of groups of GS elements, those of a scale (of 64 at most where there are none, or one a row):
group f is columns [f % W * GS, f % W * GS + GS) of row f // W, with W = H / GS. Step s handles groups [s * N, s * N +
N), and program p the steps p, p + P, p + 2 P, ... A group's scale is where the layout puts it
(:mod:`moelink.formats.scale_layouts`). The number is that of the format's device function, ``code * scale`` in fp32,
rounded to the output's dtype.

Example: format fp8_block128, H = 256, so W = 2; row_offsets [0, 1, 2], 4 rows of capacity; scales transposed, [2, 4].
Codes 2 and 3 of row 1's groups with scales 0.5 and 4 give 1 and 12; rows 2 and 3 are not written.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moelink.formats.base import Format
from moelink.formats.device.casts import f32_to_bf16
from moelink.kernels.launch.cache_keys import Constants, settle_cache_key
from moelink.kernels.scale_tiles import place_in_tiles
from moelink.rows.activation_kernel import (
    LAYOUTS,
    even_groups,
    group_elements,
    group_of,
    native_conversions,
    scales_per_word,
)

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def can_dequantize(fmt: Format) -> bool:
    """Whether the format has a device function, and its scales a layout, that the kernel knows."""
    if fmt.scale_layout is not None and fmt.scale_layout.name not in LAYOUTS:
        return False
    return fmt.codec().decode is not None


@dataclass(frozen=True, repr=False, eq=False)
class DequantizeConstants(Constants):
    """What the kernel is compiled for.

    Attributes:
        HIDDEN_SIZE: columns of a row. GROUP_SIZE: elements of a group. GROUPS_PER_STEP: groups at a time.
        GROUP_ELEMENTS: payload elements of a group. NUM_GROUPS: groups of rows; HALVINGS: to find a row's by bisection.
        DECODE_FN: the format's device function. SCALE_LAYOUT: its layout of scales, "" for formats without them.
        SCALES_PER_WORD: scales in an element of the scale tensor. ONE_SCALE: a row has one.
        HAS_INPUT_SCALE: there is a global scale. TO_BF16: the output is bf16, stored as its bits.
        NATIVE_CASTS: the device's narrow conversions.
    """

    HIDDEN_SIZE: int
    GROUP_SIZE: int
    GROUPS_PER_STEP: int
    GROUP_ELEMENTS: int
    NUM_GROUPS: int
    HALVINGS: int
    DECODE_FN: Any
    SCALE_LAYOUT: str
    SCALES_PER_WORD: int
    ONE_SCALE: bool
    HAS_INPUT_SCALE: bool
    TO_BF16: bool
    NATIVE_CASTS: bool


@triton.jit
def scale_of(scales, row_offsets, scales_offsets, row, group, here, rows, S: tl.constexpr):
    """The scales of groups ``group`` of rows ``row``, as the layout has them."""
    W: tl.constexpr = S.HIDDEN_SIZE // S.GROUP_SIZE
    if S.SCALE_LAYOUT == "row_major":
        P: tl.constexpr = S.SCALES_PER_WORD
        return tl.load(scales + (row if S.ONE_SCALE else row * ((W + P - 1) // P * P) + group), mask=here, other=0)
    elif S.SCALE_LAYOUT == "transposed":
        P: tl.constexpr = S.SCALES_PER_WORD
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
    W: tl.constexpr = S.HIDDEN_SIZE // S.GROUP_SIZE
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    steps = tl.cdiv(total.to(tl.int64) * W, S.GROUPS_PER_STEP).to(tl.int32)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        first = tl.cast(step, tl.int64) * S.GROUPS_PER_STEP
        ahead = (first % W).to(tl.int32) + tl.arange(0, S.GROUPS_PER_STEP)
        row, group = first // W + ahead // W, ahead % W
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
        value = S.DECODE_FN(payload, scale, factor, S.NATIVE_CASTS)
        if S.TO_BF16:
            value = f32_to_bf16(value, S.NATIVE_CASTS)
        to = out + (row * S.HIDDEN_SIZE + group * S.GROUP_SIZE)[:, None] + tl.arange(0, S.GROUP_SIZE)[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=here[:, None])


def launch(
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    row_offsets: torch.Tensor,
    scales_offsets: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    out: torch.Tensor,
    fmt: Format,
    *,
    by_row: bool = False,
) -> None:
    """Fill ``out`` [rows, hidden] from ``tokens`` [rows, width] and ``scales``, all contiguous, for the rows there are.

    ``fmt`` is one that :func:`can_dequantize` takes; ``scales`` are in its layout, with the ``scales_offsets`` of 128x4
    tiles, or row-major if ``by_row`` (layout "rank"); None for formats without.
    """
    codec, hidden, num_groups, cuda = fmt.codec(), out.shape[1], row_offsets.shape[0] - 1, out.is_cuda
    if not out.numel() or not num_groups:
        return
    one_scale = fmt.scale_dtype is not None and fmt.elements_per_scale(hidden) > fmt.group
    group = even_groups(hidden) if one_scale else group_elements(fmt, hidden)
    per_step = triton.next_power_of_2(max(1, (2048 if cuda else 16384) // group))
    most = 8 * torch.cuda.get_device_properties(out.device).multi_processor_count if cuda else 2
    num_programs = max(1, min(most, triton.cdiv(out.shape[0] * (hidden // group), per_step)))
    constants = DequantizeConstants(
        HIDDEN_SIZE=hidden,
        GROUP_SIZE=group,
        GROUPS_PER_STEP=per_step,
        GROUP_ELEMENTS=group // codec.GROUP * codec.PAYLOAD_BYTES_PER_GROUP // codec.ELEMENT_BYTES,
        NUM_GROUPS=num_groups,
        HALVINGS=(num_groups - 1).bit_length(),
        DECODE_FN=codec.decode,
        SCALE_LAYOUT="" if fmt.scale_layout is None else "row_major" if by_row else fmt.scale_layout.name,
        SCALES_PER_WORD=scales_per_word(fmt),
        ONE_SCALE=one_scale,
        HAS_INPUT_SCALE=input_scale is not None,
        TO_BF16=out.dtype == torch.bfloat16,
        NATIVE_CASTS=native_conversions(out.device),
    )
    settle_cache_key(dequantize_rows_kernel)[(num_programs,)](
        tokens.view(_UNSIGNED[codec.ELEMENT_BYTES]),
        row_offsets if scales is None else scales if codec.SCALE_BYTES == 4 else scales.view(torch.uint8),
        row_offsets, row_offsets if scales_offsets is None else scales_offsets,
        row_offsets if input_scale is None else input_scale, out.view(torch.uint16) if constants.TO_BF16 else out,
        out.shape[0], S=constants, enable_fp_fusion=False,
    )  # fmt: skip
