"""Define mxfp4: e2m1 with one E8M0 scale per 32 elements (OCP Microscaling), scales row-major."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.formats.base import Quantized
from moelink.formats.casts import E8M0_NAN, e8m0_reciprocal, e8m0_to_f32
from moelink.formats.fp4 import FP4
from moelink.formats.grouping import amax, join, require_scales, split
from moelink.formats.scale_layouts import RowMajor


class MXFP4(FP4):
    """Groups of 32 (Modular MAX EP contract, MX with 2-D scales)::

        code = clamp(((bits(amax) + 2**21) >> 23) - 2, 0, 254)     bits: fp32 as an integer
        q    = e2m1(x / 2**(code - 127)), 0 if code is 0
        x'   = q * 2**(code - 127)

    So amax with a mantissa of 1.75 or more counts as the next power of two, less 2, the exponent of e2m1's largest
    value: amax 1.6 -> scale 2**-2, 1.75 -> 2**-1. The division is exact. After it the largest element is in [3.5, 7)
    and saturates above 6. code 0, which means zero codes, is stored for zero groups and for amax < 1.75 * 2**-125.
    An inf counts as the largest fp32 in amax and saturates. A NaN makes its group NaN: code 255, q 7.

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
        return join(self, self.decode(payload), e8m0_to_f32(require_scales(self, scales)))

    def codec(self) -> Any:
        from moelink.formats.device.mxfp4 import CODEC

        return CODEC
