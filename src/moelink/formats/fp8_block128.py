"""Define fp8_block128: float8_e4m3fn with one fp32 scale per 128 elements (the DeepSeek-V3 activation format)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.formats.base import Format, Quantized, ScaleLayout
from moelink.formats.casts import E4M3_MAX, canonical_nan, divide, e4m3_to_f32, f32_to_e4m3
from moelink.formats.grouping import amax, join, require_scales, split
from moelink.formats.scale_layouts import Transposed

AMAX_FLOOR = 1e-4


class FP8Block128(Format):
    """Groups of 128, each operation rounded once in fp32 (Modular MAX EP contract, blockwise FP8)::

        scale = max(amax, 1e-4) / 448
        q     = e4m3(x / scale)            nearest even, saturating at +-448
        x'    = q * scale

    A zero group stores scale 1e-4 / 448 and codes 0. An inf counts as the largest fp32 in amax and saturates. A NaN
    makes its group NaN: scale 0x7fc00000, codes 0x7f. Scales are fp32 stored transposed, [hidden / 128, rows], and
    groups of rows start at multiples of 4 (16 bytes of scales): sizes 10, 10, 10, 10 give row_offsets
    0, 12, 24, 36, 48.

    ``tolerance`` is 16 / 448, half a step of e4m3 at its top, relative to max(amax, 1e-4).
    """

    name = "fp8_block128"
    group = 128
    payload_dtype = torch.float8_e4m3fn
    scale_dtype = torch.float32
    row_multiple = 4
    tolerance = 1 / 28 + 2.0**-20
    scale_layout: ScaleLayout = Transposed()

    def payload_width(self, hidden: int) -> int:
        return hidden

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        groups = split(self, x, input_scale)
        scales = canonical_nan(divide(amax(groups).clamp(min=AMAX_FLOOR), E4M3_MAX))
        return Quantized(f32_to_e4m3(groups / scales[..., None]).view(x.shape), scales)

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        return join(self, e4m3_to_f32(payload), require_scales(self, scales))

    def codec(self) -> Any:
        from moelink.formats.device.fp8_block128 import CODEC

        return CODEC
