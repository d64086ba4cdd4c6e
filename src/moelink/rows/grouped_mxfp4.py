"""Grouped matrix product of fp8 rows and weights in mxfp4: ``out[r] = rows[r] @ weight[g].T``.

As :mod:`moelink.rows.grouped_fp8` in all but the weights: legend, rows, offsets, tiles, groups of a launch. ``c``
counts blocks of 64 along K, ``kb`` those of 128, and j those of 32 in a block of 128.

==================  ====================  ============================================================================
tensor              shape                 contents
==================  ====================  ============================================================================
``weight``          [G, K / 64, N, 32]    uint8: byte i of (c, n) has the e2m1 codes of elements 64 * c + i and
                                          64 * c + 32 + i of row n
``weight_scales``   [G, K / 128, N]       int32: byte j of (kb, n) has the e8m0 code of elements 128 * kb + 32 * j on
with HAS_BIAS       [G, K / 128 + 1, N]   the same, and (K / 128, n) has the bits of ``bias[n]``, fp32
==================  ====================  ============================================================================

So the bytes of a tile, and its scales, lie side by side in memory. A byte has the bits ``S m s E E e e m``: the first
element is ``s e e m`` and the second one ``S E E m'``, m' being bit 6. Shifted by two and masked, it is the first
element as e4m3, times 2**-6; bits 7, 4 and 3, and bit 6 moved to bit 2, are the second one::

    (byte << 2) & 0x9c                          s 0 0 e e m 0 0
    (byte & 0x98) | ((byte >> 4) & 0x04)        S 0 0 E E m' 0 0

That is five instructions for eight weights, and every value of e2m1, subnormals included, is one of e4m3. With d[j] the
sum of the 32 products of block j of kb, and code[j] its e8m0 code::

    t[kb]     = d[0] * 2**(code[0] - 127) + d[1] * 2**(code[1] - 127) + ...      in this order, fp32
    out[r, n] = sum over kb of t[kb] * scales[kb, r]  +  bias[n]

A d comes from the tensor cores; all else is fp32 outside of them. Products by powers of two are exact. Code 0, which
is 2**-127, counts as zero, and code 255, NaN, as inf, so that the sums it enters are not finite.

Weights are the left operand, from registers: they come as bytes, and only there they become e4m3. Rows are the right
one, if there are few or many.

Example: G = 1, N = 64, K = 128, 2 rows, their codes 1 and scales 2. All bytes are 0b00000010, so first elements are 1
and second ones 0; the e8m0 codes are 127, 128, 127 and 127. Then t = 32 * 1 + 0 + 32 * 1 + 0 and ``out`` is 128, or
131 with biases of 3.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from moelink.formats.device import as_float
from moelink.kernels.launch.device import has_native_casts, is_interpreted
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows.grouped_fp8 import Settings, Tiles, count_tiles, find_tile, launch_tiles, operand, store_part

_BLOCK = tl.constexpr(128)
_PACKED = tl.constexpr(32)


@triton.jit
def halves(packed, S: tl.constexpr):
    """The first and the second elements of bytes [columns, 32], each [columns, 32] in the type of the factors, times
    2**-6: bytes 0b00000010 and 0b11100001 (elements 1 and 0, and -0.5 and -0.5) -> 2**-6 and 0, -2**-7 and -2**-7."""
    if S.OPERANDS == "fp8":
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shl.b32 t, $2, 2;
            and.b32 $0, t, 0x9c9c9c9c;
            shr.u32 t, $2, 4;
            and.b32 t, t, 0x04040404;
            lop3.b32 $1, $2, 0x98989898, t, 0xea;
            }""",
            "=&r,=r,r",
            [packed],
            dtype=(tl.float8e4nv, tl.float8e4nv),
            is_pure=True,
            pack=4,
        )
    else:
        first = (packed.to(tl.int32) << 2) & 0x9C
        second = (packed & 0x98) | ((packed >> 4) & 0x04)
        return operand(first.to(tl.uint8), S), operand(second, S)


@triton.jit
def _tile(codes, scales, weight, weight_scales, out, rows, group, place, bounds, S: tl.constexpr):
    """Compute one tile: ``place`` is (row tile, column tile) in ``group``, which has rows ``bounds``."""
    KB: tl.constexpr = S.K // _BLOCK
    row = bounds[0] + place[0] * S.BLOCK_ROWS + tl.arange(0, S.BLOCK_ROWS)
    present = tl.minimum(row, bounds[1] - 1)
    first_column = place[1] * S.BLOCK_COLUMNS
    column = tl.minimum(first_column + tl.arange(0, S.BLOCK_COLUMNS), S.N - 1)
    inside = tl.arange(0, _PACKED)[None, :]
    own = group.to(tl.int64) * (KB * S.N)
    weight_at = weight + own * (2 * _PACKED) + column[:, None] * _PACKED + inside
    scales_at = weight_scales + own + column
    if S.HAS_BIAS:
        scales_at += group * S.N
    codes_at = codes + present.to(tl.int64)[:, None] * S.K + inside
    sums = tl.zeros([S.BLOCK_COLUMNS, S.BLOCK_ROWS], tl.float32)
    # Scales are loaded a block ahead: a load that nothing prefetches would be waited for behind each product.
    scale, word = tl.load(scales + present), tl.load(scales_at)
    for k in range(KB):
        by_row, word_of_block = scale, word[:, None]
        ahead = tl.minimum(k + 1, KB - 1)
        scale = tl.load(scales + ahead.to(tl.int64) * rows + present)
        word = tl.load(scales_at + ahead * S.N)
        for half in tl.static_range(2):
            first, second = halves(tl.load(weight_at + (2 * k + half) * (S.N * _PACKED)), S)
            left = operand(tl.load(codes_at + (k * _BLOCK + half * 64)), S)
            right = operand(tl.load(codes_at + (k * _BLOCK + half * 64 + 32)), S)
            d = tl.dot(first, left.T, input_precision="ieee", out_dtype=tl.float32)
            e = tl.dot(second, right.T, input_precision="ieee", out_dtype=tl.float32)
            if half == 0:
                t = d * as_float((word_of_block << 23) & 0x7F800000)
                t += e * as_float((word_of_block << 15) & 0x7F800000)
            else:
                t += d * as_float((word_of_block << 7) & 0x7F800000)
                t += e * as_float((word_of_block >> 1) & 0x7F800000)
        sums += t * (by_row * 64.0)[None, :]
    if S.HAS_BIAS:
        sums += as_float(tl.load(scales_at + KB * S.N))[:, None]
    store_part(out, sums, row, bounds[1], first_column, S)


@triton.jit(do_not_specialize=["rows", "least", "most"])
def grouped_mxfp4_kernel(codes, scales, row_offsets, weight, weight_scales, out, rows, least, most, S: tl.constexpr):
    """See the module."""
    follow_previous_launch(S)
    last_tiles = count_tiles(row_offsets, rows, least, most, S)
    for tile in range(tl.program_id(0), tl.max(last_tiles, 0), tl.num_programs(0)):
        group, place, bounds = find_tile(tile, last_tiles, row_offsets, rows, S)
        _tile(codes, scales, weight, weight_scales, out, rows, group, place, bounds, S)


_tiles = partial(Tiles, swapped=True, descriptors=False)
INTERPRETED = Settings(few=_tiles(16, 64), many=_tiles(32, 128, band=2), most_few=8)
"""Small tiles, of which small tests have several."""
HOPPER = Settings(
    few=_tiles(16, num_stages=3, programs=4, registers=128), many=_tiles(32, num_stages=4, programs=2), most_few=16
)
"""The fastest of ``mxfp4_sweep_h200.json``."""
OTHERS = Settings(
    few=_tiles(16, 64, num_stages=2, programs=2), many=_tiles(64, 64, num_stages=2, programs=2), most_few=16
)
"""Of other devices, on which nothing was measured."""


def default_settings(device: torch.device) -> Settings:
    """The settings of launches on ``device``."""
    if is_interpreted():
        return INTERPRETED
    return HOPPER if has_native_casts(device) and torch.cuda.get_device_capability(device)[0] == 9 else OTHERS


def launch(
    codes: torch.Tensor, scales: torch.Tensor, row_offsets: torch.Tensor, weight: torch.Tensor,
    weight_scales: torch.Tensor, out: torch.Tensor, settings: Settings | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [R, N] for the rows there are. All tensors are contiguous, of the shapes in the module's table."""
    groups, blocks, columns, _ = weight.shape
    shape = torch.Size((groups, columns, 64 * blocks))
    launch_tiles(
        grouped_mxfp4_kernel, (codes, scales, row_offsets, weight, weight_scales, out), shape,
        settings or default_settings(out.device), biased=weight_scales.shape[1] > blocks // 2,
    )  # fmt: skip
