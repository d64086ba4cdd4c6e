"""Define fp8_block128_e8m0: float8_e4m3fn with one E8M0 scale per 128 elements, four scales in an int32, as DeepGEMM
reads them on Blackwell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.arith import ceil_div
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
from moelink.formats.fp8_block128 import AMAX_FLOOR
from moelink.formats.grouping import amax, join, require_scales, split
from moelink.formats.scale_layouts import Transposed

PER_WORD = 4


class FP8Block128E8M0(Format):
    """Groups of 128, whose scale is a power of two::

        code = e8m0_up(max(amax, 1e-4) / 448)         2**ceil(log2(...)): |x / scale| stays within 448
        q    = e4m3(x / 2**(code - 127))              nearest even
        x'   = q * 2**(code - 127)

    The division by 448 is IEEE fp32; the one by a power of two is exact but for results below 2**-126, which become
    0. Codes are 105 to 247. A zero group stores code 105 and q 0. An inf counts as the largest fp32 in amax and
    saturates. A NaN makes its group NaN: code 255, q 0x7f.

    Four codes share an int32: code ``c`` of a row is byte ``c % 4`` of word ``c // 4``, the first the lowest. Where
    128 * 4 does not divide ``hidden``, the last word's other bytes are zero. Words are stored transposed,
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

    def payload_width(self, hidden: int) -> int:
        return hidden

    def scale_width(self, hidden: int) -> int:
        return ceil_div(hidden, self.group * PER_WORD)

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        groups = split(self, x, input_scale)
        code = f32_to_e8m0_up(divide(amax(groups).clamp(min=AMAX_FLOOR), E4M3_MAX))
        payload = f32_to_e4m3(groups * e8m0_reciprocal(code)[..., None])
        words = torch.nn.functional.pad(code, (0, -code.shape[1] % PER_WORD)).view(torch.int32)
        return Quantized(payload.view(x.shape), words)

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        words = require_scales(self, scales)
        # Of one word a row the strides may be any; flattened, words can be viewed as bytes.
        codes = words.reshape(-1).view(torch.uint8).view(words.shape[0], words.shape[1] * PER_WORD)
        return join(self, e4m3_to_f32(payload), e8m0_to_f32(codes[:, : payload.shape[1] // self.group]))

    def codec(self) -> Any:
        from moelink.formats.device.fp8_block128_e8m0 import CODEC

        return CODEC
