"""Encode and decode fp8_block128_e8m0 in Triton; ``moelink.formats.fp8_block128_e8m0`` states the arithmetic.

Here a scale is one byte, as in mxfp8. Packing needs no function: four bytes in a row are a word.
"""

import triton
import triton.language as tl

from moelink.formats.device.casts import (
    E8M0_NAN,
    INF_BITS,
    amax_from_bits,
    as_int,
    divide_by_448,
    f32_bits_to_e8m0_up,
    f32_to_e4m3,
    largest_bits,
    scale_by_e8m0,
)
from moelink.formats.device.codec import Codec
from moelink.formats.device.mxfp8 import decode


@triton.jit
def encode(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    code = f32_bits_to_e8m0_up(as_int(divide_by_448(tl.maximum(amax_from_bits(largest), 1e-4), NATIVE)))
    code = tl.where(largest > INF_BITS, E8M0_NAN, code)
    return f32_to_e4m3(scale_by_e8m0(x, code), NATIVE), code.to(tl.uint8)


CODEC = Codec(GROUP=128, ELEMENT_BYTES=1, PAYLOAD_BYTES_PER_GROUP=128, SCALE_BYTES=1, encode=encode, decode=decode)
