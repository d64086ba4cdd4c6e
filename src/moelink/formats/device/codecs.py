"""Encode and decode rows of each format in Triton; the torch twins in ``moelink.formats`` state the arithmetic.

Scales are fp32, or codes of one byte. Four E8M0 codes in a row are a word of fp8_block128_e8m0, so packing needs no
function. bf16 and fp32 are raw bits of fp32 values; fp64 is only copied.
"""

import triton
import triton.language as tl

from moelink.formats.device import Codec
from moelink.formats.device.casts import (
    E8M0_NAN,
    F32_MAX_BITS,
    INF_BITS,
    NAN_BITS,
    amax_from_bits,
    as_float,
    as_int,
    bf16_to_f32,
    divide,
    divide_by_448,
    divide_rows,
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_to_f32,
    f32_bits_to_e8m0_up,
    f32_to_bf16,
    f32_to_e2m1,
    f32_to_e4m3,
    largest_bits,
    pack_e2m1,
    scale_by_e8m0,
    unpack_e2m1,
)


@triton.jit
def encode_bf16(x, input_scale, NATIVE: tl.constexpr):
    return f32_to_bf16(x, NATIVE), tl.zeros([x.shape[0]], tl.uint8)


@triton.jit
def decode_bf16(payload, scale, input_scale, NATIVE: tl.constexpr):
    return bf16_to_f32(payload)


@triton.jit
def encode_fp32(x, input_scale, NATIVE: tl.constexpr):
    return x.to(tl.uint32, bitcast=True), tl.zeros([x.shape[0]], tl.uint8)


@triton.jit
def decode_fp32(payload, scale, input_scale, NATIVE: tl.constexpr):
    return payload.to(tl.float32, bitcast=True)


@triton.jit
def encode_fp32_scale(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    scale = divide_by_448(tl.maximum(amax_from_bits(largest), 1e-4), NATIVE)
    scale = as_float(tl.where(largest > INF_BITS, NAN_BITS, as_int(scale)))
    return f32_to_e4m3(divide_rows(x, scale, NATIVE), NATIVE), scale


@triton.jit
def decode_fp32_scale(payload, scale, input_scale, NATIVE: tl.constexpr):
    return e4m3_to_f32(payload, NATIVE) * tl.expand_dims(scale, 1)


@triton.jit
def _encode_e8m0(x, largest, quotient, NATIVE: tl.constexpr):
    """Divide groups by the smallest power of two not below ``quotient`` (fp32 [NG]); ``largest``: of `largest_bits`."""
    code = f32_bits_to_e8m0_up(as_int(quotient))
    code = tl.where(largest > INF_BITS, E8M0_NAN, code)
    return f32_to_e4m3(scale_by_e8m0(x, code), NATIVE), code.to(tl.uint8)


@triton.jit
def encode_block128_e8m0(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    quotient = divide_by_448(tl.maximum(amax_from_bits(largest), 1e-4), NATIVE)
    return _encode_e8m0(x, largest, quotient, NATIVE)


@triton.jit
def encode_mxfp8(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    return _encode_e8m0(x, largest, divide(amax_from_bits(largest), 448.0), NATIVE)


@triton.jit
def decode_e8m0(payload, scale, input_scale, NATIVE: tl.constexpr):
    return e4m3_to_f32(payload, NATIVE) * tl.expand_dims(e8m0_to_f32(scale), 1)


@triton.jit
def encode_mxfp4(x, input_scale, NATIVE: tl.constexpr):
    largest = largest_bits(x)
    rounded = ((tl.minimum(largest, F32_MAX_BITS) + (1 << 21)) >> 23) - 2
    code = tl.where(largest > INF_BITS, E8M0_NAN, tl.maximum(rounded, 0))
    return pack_e2m1(f32_to_e2m1(scale_by_e8m0(x, code))), code.to(tl.uint8)


@triton.jit
def decode_mxfp4(payload, scale, input_scale, NATIVE: tl.constexpr):
    return e2m1_to_f32(unpack_e2m1(payload)) * tl.expand_dims(e8m0_to_f32(scale), 1)


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
def encode_nvfp4(x, input_scale, NATIVE: tl.constexpr):
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
def decode_nvfp4(payload, scale, input_scale, NATIVE: tl.constexpr):
    _, step = _step(scale, input_scale, NATIVE)
    return e2m1_to_f32(unpack_e2m1(payload)) * tl.expand_dims(step, 1)


def _codec(group, element_bytes, payload_bytes, scale_bytes, encode, decode):
    return Codec(
        GROUP=group, ELEMENT_BYTES=element_bytes, PAYLOAD_BYTES_PER_GROUP=payload_bytes, SCALE_BYTES=scale_bytes,
        encode=encode, decode=decode,
    )  # fmt: skip


CODECS = {
    "bf16": _codec(1, 2, 2, 0, encode_bf16, decode_bf16),
    "fp32": _codec(1, 4, 4, 0, encode_fp32, decode_fp32),
    "fp64": _codec(1, 8, 8, 0, None, None),
    "fp8_block128": _codec(128, 1, 128, 4, encode_fp32_scale, decode_fp32_scale),
    "fp8_block128_e8m0": _codec(128, 1, 128, 1, encode_block128_e8m0, decode_e8m0),
    "fp8_token": _codec(16, 1, 16, 4, encode_fp32_scale, decode_fp32_scale),
    "mxfp8": _codec(32, 1, 32, 1, encode_mxfp8, decode_e8m0),
    "nvfp4": _codec(16, 1, 8, 1, encode_nvfp4, decode_nvfp4),
    "mxfp4": _codec(32, 1, 16, 1, encode_mxfp4, decode_mxfp4),
}
"""Codec by the name of the format."""
