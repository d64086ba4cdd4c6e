"""Encode and decode mxfp8 in Triton; ``moelink.formats.mxfp8`` states the arithmetic."""

import triton
import triton.language as tl

from moelink.formats.device.casts import (
    E8M0_NAN,
    INF_BITS,
    amax_from_bits,
    as_int,
    divide,
    e4m3_to_f32,
    e8m0_to_f32,
    f32_bits_to_e8m0_up,
    f32_to_e4m3,
    largest_bits,
    scale_by_e8m0,
)
from moelink.formats.device.codec import Codec


@triton.jit
def encode(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    code = f32_bits_to_e8m0_up(as_int(divide(amax_from_bits(largest), 448.0)))
    code = tl.where(largest > INF_BITS, E8M0_NAN, code)
    return f32_to_e4m3(scale_by_e8m0(x, code), NATIVE), code.to(tl.uint8)


@triton.jit
def decode(payload, scale, input_scale, NATIVE: tl.constexpr):
    return e4m3_to_f32(payload, NATIVE) * tl.expand_dims(e8m0_to_f32(scale), 1)


CODEC = Codec(GROUP=32, ELEMENT_BYTES=1, PAYLOAD_BYTES_PER_GROUP=32, SCALE_BYTES=1, encode=encode, decode=decode)
