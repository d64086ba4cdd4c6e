"""Encode and decode mxfp4 in Triton; ``moelink.formats.mxfp4`` states the arithmetic."""

import triton
import triton.language as tl

from moelink.formats.device.casts import (
    E8M0_NAN,
    F32_MAX_BITS,
    INF_BITS,
    e2m1_to_f32,
    e8m0_to_f32,
    f32_to_e2m1,
    largest_bits,
    pack_e2m1,
    scale_by_e8m0,
    unpack_e2m1,
)
from moelink.formats.device.codec import Codec


@triton.jit
def encode(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    rounded = ((tl.minimum(largest, F32_MAX_BITS) + (1 << 21)) >> 23) - 2
    code = tl.where(largest > INF_BITS, E8M0_NAN, tl.maximum(rounded, 0))
    return pack_e2m1(f32_to_e2m1(scale_by_e8m0(x, code))), code.to(tl.uint8)


@triton.jit
def decode(payload, scale, input_scale, NATIVE: tl.constexpr):
    return e2m1_to_f32(unpack_e2m1(payload)) * tl.expand_dims(e8m0_to_f32(scale), 1)


CODEC = Codec(GROUP=32, ELEMENT_BYTES=1, PAYLOAD_BYTES_PER_GROUP=16, SCALE_BYTES=1, encode=encode, decode=decode)
