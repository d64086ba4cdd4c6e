"""Define the formats of e2m1, two codes a byte: mxfp4 and nvfp4.

In both an inf counts as the largest fp32 in amax and saturates, and a NaN makes its group NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.formats.base import BuiltIn, Quantized, join, require_codes, split
from moelink.formats.casts import (
    E2M1_MAX,
    E8M0_NAN,
    amax,
    divide,
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_reciprocal,
    e8m0_to_f32,
    f32_to_e2m1,
    f32_to_e4m3,
    pack_e2m1,
    unpack_e2m1,
)
from moelink.formats.scale_layouts import RowMajor, Tiles128x4


class FP4(BuiltIn):
    """Payload uint8 [n, hidden / 2], the even element in the low nibble."""

    payload_dtype = torch.uint8

    def payload_width(self, hidden: int) -> int:
        return hidden // 2

    @staticmethod
    def encode(scaled: Tensor, dead: Tensor) -> Tensor:
        """Encode fp32 [n, g, group], already divided by the scales, to bytes; groups with ``dead`` [n, g] to zeros."""
        return pack_e2m1(f32_to_e2m1(torch.where(dead[..., None], 0.0, scaled))).flatten(1)

    @staticmethod
    def decode(payload: Tensor) -> Tensor:
        """Decode bytes to fp32 [n, hidden], before the scales."""
        return e2m1_to_f32(unpack_e2m1(payload))


class MXFP4(FP4):
    """Groups of 32 (Modular MAX EP contract, MX with 2-D scales)::

        code = clamp(((bits(amax) + 2**21) >> 23) - 2, 0, 254)     bits: fp32 as an integer
        q    = e2m1(x / 2**(code - 127)), 0 if code is 0
        x'   = q * 2**(code - 127)

    So amax with a mantissa of 1.75 or more counts as the next power of two, less 2, the exponent of e2m1's largest
    value: amax 1.6 -> scale 2**-2, 1.75 -> 2**-1. The division is exact. After it the largest element is in [3.5, 7)
    and saturates above 6. Code 0, which means q 0, is stored for zero groups and for amax < 1.75 * 2**-125; a NaN
    stores code 255 and q 7.

    ``tolerance`` is 1 / 5 (x = amax = 5 scales: between 4 and 6), for amax from 2**-124 to 2**127.
    """

    name = "mxfp4"
    group = 32
    scale_dtype = torch.float8_e8m0fnu
    tolerance = 0.2
    scale_layout = RowMajor()

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        groups = split(self, x, input_scale)
        largest = amax(groups)
        rounded = (((largest.view(torch.int32) + (1 << 21)) >> 23) - 2).clamp(0, 254)
        code = torch.where(largest.isnan(), E8M0_NAN, rounded).to(torch.uint8)
        payload = self.encode(groups * e8m0_reciprocal(code)[..., None], code == 0)
        return Quantized(payload, code.view(self.scale_dtype))

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        scales = require_codes(self, payload, scales)
        return join(self, self.decode(payload), e8m0_to_f32(scales))


class NVFP4(FP4):
    """Groups of 16 and ``input_scale`` s, a positive fp32 (None = 1), each operation rounded once in fp32::

        sf = e4m3(s * (amax / 6))          nearest even, saturating at 448
        d  = f32(sf) / s
        q  = e2m1(x / d), 0 if sf is 0
        x' = q * d

    That is the Modular MAX EP contract's NVFP4 with IEEE division in place of approximate reciprocals. s is the
    inverse of a checkpoint's activation scale, commonly 448 * 6 / (largest activation). sf 0, which means q 0, is
    stored for zero groups and for s * amax / 6 <= 2**-10; a NaN stores sf 0x7f and q 7.

    ``tolerance`` is 3 / 17 (sf rounded up from just above 17/16: an element of 5 between 4 and 6, amax 17/3), while
    s * amax / 6 is in [2**-6, 448], the normal range of sf; below it sf loses bits, above it amax is clipped.
    """

    name = "nvfp4"
    group = 16
    scale_dtype = torch.float8_e4m3fn
    tolerance = 3 / 17 + 2.0**-20
    scale_layout = Tiles128x4()
    uses_input_scale = True

    @staticmethod
    def _global(like: Tensor, input_scale: Tensor | None) -> Tensor:
        return like.new_ones(()) if input_scale is None else input_scale.to(torch.float32).reshape(())

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        groups = split(self, x, input_scale)
        s = self._global(groups, input_scale)
        scales = f32_to_e4m3(s * divide(amax(groups), E2M1_MAX))
        sf = e4m3_to_f32(scales)
        return Quantized(self.encode(groups / (sf / s)[..., None], sf == 0), scales)

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        sf = e4m3_to_f32(require_codes(self, payload, scales))
        return join(self, self.decode(payload), sf / self._global(sf, input_scale))
