"""Define nvfp4: e2m1 with one e4m3 scale per 16 elements and one fp32 scale for all, scales in 128x4 tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.formats.base import Quantized
from moelink.formats.casts import E2M1_MAX, divide, e4m3_to_f32, f32_to_e4m3
from moelink.formats.fp4 import FP4
from moelink.formats.grouping import amax, join, require_scales, split
from moelink.formats.scale_layouts import Tiles128x4


class NVFP4(FP4):
    """Groups of 16 and ``input_scale`` s, a positive fp32 (None = 1), each operation rounded once in fp32::

        sf = e4m3(s * (amax / 6))          nearest even, saturating at 448
        d  = f32(sf) / s
        q  = e2m1(x / d), 0 if sf is 0
        x' = q * d

    That is the Modular MAX EP contract's NVFP4 with IEEE division in place of approximate reciprocals. s is the
    inverse of a checkpoint's activation scale, commonly 448 * 6 / (largest activation). sf 0, which means zero codes,
    is stored for zero groups and for s * amax / 6 <= 2**-10. An inf counts as the largest fp32 in amax and saturates.
    A NaN makes its group NaN: sf 0x7f, q 7.

    ``tolerance`` is 3 / 17 (sf rounded up from just above 17/16: an element of 5 between 4 and 6, amax 17/3), while
    s * amax / 6 is in [2**-6, 448], the normal range of sf; below it sf loses bits, above it amax is clipped.
    """

    name = "nvfp4"
    group = 16
    scale_dtype = torch.float8_e4m3fn
    tolerance = 3 / 17 + 2.0**-20
    scale_layout = Tiles128x4()

    @property
    def uses_input_scale(self) -> bool:
        return True

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
        sf = e4m3_to_f32(require_scales(self, scales))
        return join(self, self.decode(payload), sf / self._global(sf, input_scale))

    def codec(self) -> Any:
        from moelink.formats.device.nvfp4 import CODEC

        return CODEC
