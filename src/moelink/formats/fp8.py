"""Define the formats of float8_e4m3fn: fp8_block128, fp8_token, fp8_block128_e8m0 and mxfp8.

In all of them an inf counts as the largest fp32 in amax and saturates, and a NaN makes its group NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.arith import ceil_div
from moelink.formats.base import BuiltIn, Quantized, ScaleLayout, join, require_codes, split
from moelink.formats.casts import (
    E4M3_MAX,
    amax,
    canonical_nan,
    divide,
    e4m3_to_f32,
    e8m0_reciprocal,
    e8m0_to_f32,
    f32_to_e4m3,
    f32_to_e8m0_up,
)
from moelink.formats.scale_layouts import RowMajor, Tiles128x4, Transposed

AMAX_FLOOR = 1e-4
PER_WORD = 4
"""E8M0 codes in an int32."""


class FP8Block128(BuiltIn):
    """Groups of 128, each operation rounded once in fp32 (Modular MAX EP contract, blockwise FP8)::

        scale = max(amax, 1e-4) / 448
        q     = e4m3(x / scale)            nearest even, saturating at +-448
        x'    = q * scale

    A zero group stores scale 1e-4 / 448 and codes 0, a NaN scale 0x7fc00000 and codes 0x7f. Scales are fp32 stored
    transposed, [hidden / 128, rows], and groups of rows start at multiples of 4 (16 bytes of scales): sizes
    10, 10, 10, 10 give row_offsets 0, 12, 24, 36, 48.

    ``tolerance`` is 16 / 448, half a step of e4m3 at its top, relative to max(amax, 1e-4).
    """

    name = "fp8_block128"
    group = 128
    payload_dtype = torch.float8_e4m3fn
    scale_dtype = torch.float32
    row_multiple = 4
    tolerance = 1 / 28 + 2.0**-20
    scale_layout: ScaleLayout = Transposed()

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        groups = split(self, x, input_scale)
        scales = canonical_nan(divide(amax(groups).clamp(min=AMAX_FLOOR), E4M3_MAX))
        return Quantized(f32_to_e4m3(groups / scales[..., None]).view(x.shape), scales)

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        scales = require_codes(self, payload, scales)
        return join(self, e4m3_to_f32(payload), scales)


class FP8Token(FP8Block128):
    """The arithmetic of fp8_block128 with the whole row in place of 128 elements. Scales are fp32, row-major [rows, 1].

    ``hidden`` is a multiple of 16, so that rows start on multiples of 16 bytes, as fp8 matmuls demand.
    """

    name = "fp8_token"
    group = 16
    row_multiple = 1
    scale_layout = RowMajor()

    def elements_per_scale(self, hidden: int) -> int:
        return hidden


class FP8Block128E8M0(BuiltIn):
    """Groups of 128, whose scale is a power of two::

        code = e8m0_up(max(amax, 1e-4) / 448)         2**ceil(log2(...)): |x / scale| stays within 448
        q    = e4m3(x / 2**(code - 127))              nearest even
        x'   = q * 2**(code - 127)

    The division by 448 is IEEE fp32; the one by a power of two is exact but for results below 2**-126, which become
    0. Codes are 105 to 247. A zero group stores code 105 and q 0, a NaN code 255 and q 0x7f.

    Four codes share an int32: code ``c`` of a row is byte ``c % 4`` of word ``c // 4``, the first the lowest. If
    128 * 4 does not divide ``hidden``, the other bytes of the last word are zero. Words are stored transposed,
    [ceil(hidden / 512), rows], and groups of rows start at multiples of 4 (16 bytes of words), as in fp8_block128.
    Codes 127, 128, 126, 127, 130 of a row are the words 0x7f7e807f and 0x00000082.

    ``tolerance`` is 1 / 17 (x = amax = 272 scales: between 256 and 288), relative to max(amax, 1e-4).
    """

    name = "fp8_block128_e8m0"
    group = 128
    payload_dtype = torch.float8_e4m3fn
    scale_dtype = torch.int32
    row_multiple = 4
    tolerance = 1 / 17 + 2.0**-20
    scale_layout = Transposed()

    def scale_width(self, hidden: int) -> int:
        return ceil_div(hidden, self.group * PER_WORD)

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        groups = split(self, x, input_scale)
        code = f32_to_e8m0_up(divide(amax(groups).clamp(min=AMAX_FLOOR), E4M3_MAX))
        payload = f32_to_e4m3(groups * e8m0_reciprocal(code)[..., None])
        words = torch.nn.functional.pad(code, (0, -code.shape[1] % PER_WORD)).view(torch.int32)
        return Quantized(payload.view(x.shape), words)

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        words = require_codes(self, payload, scales)
        # With one word a row the strides are arbitrary; flattened words can be viewed as bytes.
        codes = words.reshape(-1).view(torch.uint8).view(words.shape[0], words.shape[1] * PER_WORD)
        return join(self, e4m3_to_f32(payload), e8m0_to_f32(codes[:, : payload.shape[1] // self.group]))


class MXFP8(BuiltIn):
    """Groups of 32 (Modular MAX EP contract, NVIDIA block-scaled MXFP8)::

        code = e8m0_up(amax / 448)                    upwards: |x / scale| stays within 448
        q    = e4m3(x / 2**(code - 127)), 0 if code is 0
        x'   = q * 2**(code - 127)

    The division by 448 is IEEE fp32; the one by a power of two is exact but for results below 2**-126, which become
    0. Code 0, which means q 0, is stored for zero groups and for amax / 448 <= 2**-127; a NaN stores code 255 and q
    0x7f. Scales are in 128x4 tiles.

    ``tolerance`` is 1 / 17 (x = amax = 272 scales: between 256 and 288), for amax from 2**-117 to 2**127.
    """

    name = "mxfp8"
    group = 32
    payload_dtype = torch.float8_e4m3fn
    scale_dtype = torch.float8_e8m0fnu
    tolerance = 1 / 17 + 2.0**-20
    scale_layout = Tiles128x4()

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        groups = split(self, x, input_scale)
        code = f32_to_e8m0_up(divide(amax(groups), E4M3_MAX))
        scaled = groups * e8m0_reciprocal(code)[..., None]
        payload = f32_to_e4m3(torch.where((code == 0)[..., None], 0.0, scaled))
        return Quantized(payload.view(x.shape), code.view(self.scale_dtype))

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        scales = require_codes(self, payload, scales)
        return join(self, e4m3_to_f32(payload), e8m0_to_f32(scales))
