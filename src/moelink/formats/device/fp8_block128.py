"""Encode and decode fp8_block128 in Triton; ``moelink.formats.fp8_block128`` states the arithmetic."""

import triton
import triton.language as tl

from moelink.formats.device.casts import (
    INF_BITS,
    NAN_BITS,
    amax_from_bits,
    as_float,
    as_int,
    divide_by_448,
    divide_rows,
    e4m3_to_f32,
    f32_to_e4m3,
    largest_bits,
)
from moelink.formats.device.codec import Codec


@triton.jit
def encode(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    scale = divide_by_448(tl.maximum(amax_from_bits(largest), 1e-4), NATIVE)
    scale = as_float(tl.where(largest > INF_BITS, NAN_BITS, as_int(scale)))
    return f32_to_e4m3(divide_rows(x, scale, NATIVE), NATIVE), scale


@triton.jit
def decode(payload, scale, input_scale, NATIVE: tl.constexpr):
    return e4m3_to_f32(payload, NATIVE) * tl.expand_dims(scale, 1)


CODEC = Codec(GROUP=128, ELEMENT_BYTES=1, PAYLOAD_BYTES_PER_GROUP=128, SCALE_BYTES=4, encode=encode, decode=decode)
