"""Define mxfp8: float8_e4m3fn with one E8M0 scale per 32 elements (OCP Microscaling), scales in 128x4 tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.formats.base import Format, Quantized
from moelink.formats.casts import (
    E4M3_MAX,
    divide,
    e4m3_to_f32,
    e8m0_reciprocal,
    e8m0_to_f32,
    f32_to_e4m3,
    f32_to_e8m0_up,
)
from moelink.formats.grouping import amax, join, require_scales, split
from moelink.formats.scale_layouts import Tiles128x4


class MXFP8(Format):
    """Groups of 32 (Modular MAX EP contract, NVIDIA block-scaled MXFP8)::

        code = e8m0_up(amax / 448)                    upwards: |x / scale| stays within 448
        q    = e4m3(x / 2**(code - 127)), 0 if code is 0
        x'   = q * 2**(code - 127)

    The division by 448 is IEEE fp32; the one by a power of two is exact but for results below 2**-126, which become
    0. code 0, which means zero codes, is stored for zero groups and for amax / 448 <= 2**-127. An inf counts as the
    largest fp32 in amax and saturates. A NaN makes its group NaN: code 255, q 0x7f. Scales are in 128x4 tiles.

    ``tolerance`` is 1 / 17 (x = amax = 272 scales: between 256 and 288), for amax from 2**-117 to 2**127.
    """

    name = "mxfp8"
    group = 32
    payload_dtype = torch.float8_e4m3fn
    scale_dtype = torch.float8_e8m0fnu
    tolerance = 1 / 17 + 2.0**-20
    scale_layout = Tiles128x4()

    def payload_width(self, hidden: int) -> int:
        return hidden

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        groups = split(self, x, input_scale)
        code = f32_to_e8m0_up(divide(amax(groups), E4M3_MAX))
        scaled = groups * e8m0_reciprocal(code)[..., None]
        payload = f32_to_e4m3(torch.where((code == 0)[..., None], 0.0, scaled))
        return Quantized(payload.view(x.shape), code.view(self.scale_dtype))

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        return join(self, e4m3_to_f32(payload), e8m0_to_f32(require_scales(self, scales)))

    def codec(self) -> Any:
        from moelink.formats.device.mxfp8 import CODEC

        return CODEC
