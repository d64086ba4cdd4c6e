"""Define fp8_token: float8_e4m3fn with one fp32 scale per row (per token)."""

from __future__ import annotations

from typing import Any

from moelink.formats.fp8_block128 import FP8Block128
from moelink.formats.scale_layouts import RowMajor


class FP8Token(FP8Block128):
    """The arithmetic of fp8_block128 with the whole row in place of 128 elements::

        scale = max(amax of the row, 1e-4) / 448
        q     = e4m3(x / scale)            nearest even, saturating at +-448
        x'    = q * scale

    A zero row stores scale 1e-4 / 448 and codes 0. An inf counts as the largest fp32 in amax and saturates. A NaN makes
    its row NaN: scale 0x7fc00000, codes 0x7f. Scales are fp32, row-major [rows, 1].

    ``hidden`` is a multiple of 16, so that rows start on multiples of 16 bytes, as fp8 matmuls demand.
    """

    name = "fp8_token"
    group = 16
    row_multiple = 1
    scale_layout = RowMajor()

    def elements_per_scale(self, hidden: int) -> int:
        return hidden

    def codec(self) -> Any:
        from moelink.formats.device.fp8_token import CODEC

        return CODEC
