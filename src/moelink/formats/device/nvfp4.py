"""Encode and decode nvfp4 in Triton; ``moelink.formats.nvfp4`` states the arithmetic."""

import triton
import triton.language as tl

from moelink.formats.device.casts import (
    INF_BITS,
    amax_from_bits,
    divide,
    divide_rows,
    e2m1_to_f32,
    e4m3_to_f32,
    f32_to_e2m1,
    f32_to_e4m3,
    largest_bits,
    pack_e2m1,
    unpack_e2m1,
)
from moelink.formats.device.codec import Codec


@triton.jit
def _step(scale, input_scale, NATIVE: tl.constexpr):
    """Return (f32(sf), f32(sf) / s) [NG]."""
    sf = e4m3_to_f32(scale, NATIVE)
    return sf, tl.math.div_rn(sf, tl.zeros(sf.shape, tl.float32) + input_scale)


@triton.jit
def _is_usual(input_scale):
    """Return whether every input scale (one, or a block of them) gives ``divide_rows`` a divisor in its range."""
    s = tl.cast(input_scale, tl.float32)
    usual = (s > 2.0**-90) & (s < 2.0**90)
    if len(s.shape) > 0:
        usual = tl.min(usual.to(tl.int32), 0) > 0
    return usual


@triton.jit
def encode(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    scale = f32_to_e4m3(divide(amax_from_bits(largest), 6.0) * input_scale, NATIVE)
    scale = tl.where(largest > INF_BITS, 0x7F, scale).to(tl.uint8)
    sf, step = _step(scale, input_scale, NATIVE)
    # A zero step would divide by zero. Groups with a zero step store zero codes.
    dead = tl.broadcast_to(tl.expand_dims(sf == 0.0, 1), x.shape)
    divisor = tl.where(sf == 0.0, 1.0, step)
    if _is_usual(input_scale):
        scaled = divide_rows(x, divisor, NATIVE)
    else:
        scaled = tl.math.div_rn(x, tl.broadcast_to(tl.expand_dims(divisor, 1), x.shape))
    return pack_e2m1(f32_to_e2m1(tl.where(dead, 0.0, scaled))), scale


@triton.jit
def decode(payload, scale, input_scale, NATIVE: tl.constexpr):
    _, step = _step(scale, input_scale, NATIVE)
    return e2m1_to_f32(unpack_e2m1(payload)) * tl.expand_dims(step, 1)


CODEC = Codec(GROUP=16, ELEMENT_BYTES=1, PAYLOAD_BYTES_PER_GROUP=8, SCALE_BYTES=1, encode=encode, decode=decode)
