"""Share the common part of the 4-bit formats: two e2m1 codes a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.formats.base import Format
from moelink.formats.casts import e2m1_to_f32, f32_to_e2m1, pack_e2m1, unpack_e2m1


class FP4(Format):
    """Payload uint8 [n, hidden / 2], the even element in the low nibble."""

    payload_dtype = torch.uint8

    def payload_width(self, hidden: int) -> int:
        return hidden // 2

    @staticmethod
    def encode(scaled: Tensor, dead: Tensor) -> Tensor:
        """Encode fp32 [n, g, group], already divided by the scales, to bytes; zero codes where ``dead`` [n, g]."""
        return pack_e2m1(f32_to_e2m1(torch.where(dead[..., None], 0.0, scaled))).flatten(1)

    @staticmethod
    def decode(payload: Tensor) -> Tensor:
        """Decode bytes to fp32 [n, hidden], before the scales."""
        return e2m1_to_f32(unpack_e2m1(payload))
