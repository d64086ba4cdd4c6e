"""Define bf16, fp32 and fp64: rows travel unchanged, without scales.

A row that is already of the payload dtype is carried bit for bit, NaN payloads included. Other float inputs are
converted: widening is exact; fp32 and fp16 become bf16 by round to nearest even, with NaN -> 0x7fff.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.formats.base import BuiltIn, Quantized, check_codes, check_rows
from moelink.formats.casts import to_bf16


class Plain(BuiltIn):
    """A format without scales. ``group`` is 1, so it takes every hidden size."""

    group = 1
    scale_dtype = None
    tolerance = 0.0
    scale_layout = None

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        check_rows(self, x, input_scale)
        return Quantized(x.to(self.payload_dtype), None)

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        check_codes(self, "payload", payload, self.payload_dtype)
        return payload.to(torch.float32)


class BF16(Plain):
    """bfloat16 rows. bf16 input is unchanged; ``tolerance`` is the half ulp of fp32 and fp16 input."""

    name = "bf16"
    payload_dtype = torch.bfloat16
    tolerance = 2.0**-8

    def quantize(self, x: Tensor, input_scale: Tensor | None = None) -> Quantized:
        check_rows(self, x, input_scale)
        return Quantized(to_bf16(x), None)


class FP32(Plain):
    """float32 rows: every accepted input is carried exactly."""

    name = "fp32"
    payload_dtype = torch.float32


class FP64(Plain):
    """float64 rows, for gradient checks: every accepted input, also float64, is carried exactly."""

    name = "fp64"
    payload_dtype = torch.float64
    input_dtypes = (*BuiltIn.input_dtypes, torch.float64)

    def dequantize(self, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
        check_codes(self, "payload", payload, self.payload_dtype)
        return payload
