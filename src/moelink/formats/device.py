"""Encode and decode rows in Triton: the arithmetic of ``moelink.formats``, bit for bit.

``Format.codec`` imports this file on first use, so platforms without triton can import all formats.

The interpreter of stock Triton 3.6 rounds casts to bf16 and fp8 wrongly. So with NATIVE False no value narrower than
fp32 is a float: codes are integers, made with integer operations and exact fp32 ones. NaN and inf follow the torch
twins.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
F32_MAX_BITS = tl.constexpr(0x7F7FFFFF)
E8M0_NAN = tl.constexpr(255)


@dataclass(frozen=True)
class Codec:
    """Device functions and constants of one format. A kernel takes ``encode`` and ``decode`` as constexpr arguments.

    Legend: NG groups, GS elements a group, both powers of two; PE payload elements a group. GS is GROUP, except in
    formats with undivided rows (plain ones and fp8_token), which work on blocks of any shape [NG, GS].

    ``encode(x, input_scale, NATIVE)`` -> ``(payload, scale)``:
        x is fp32 [NG, GS], zero in masked elements; input_scale a scalar fp32 (a value or the number 1.0, ignored by
        formats without a global scale) or, in the activation, fp32 [NG]. payload is unsigned [NG, PE] of ELEMENT_BYTES
        bytes: e4m3 bits, two e2m1 codes a byte (even element low), or the raw bits of a plain format. scale is [NG]:
        fp32 for fp8_block128 and fp8_token, uint8 bits for the other quantised formats, and uint8 zeros, not to be
        stored, for plain ones.
    ``decode(payload, scale, input_scale, NATIVE)`` -> fp32 [NG, GS]:
        the inverse, of the same types. A NaN has unspecified bits.

    NATIVE False uses integer operations in place of narrow casts: the same bits under the stock interpreter and on
    every GPU. NATIVE True uses the conversions of NVIDIA GPUs from sm_89, with the same bits; NATIVE 2 is for elements
    that are all exact in bf16, and NATIVE 3 for these with fewer instructions and more registers. Copy rows that are
    already in a plain format's own dtype as bytes, because the codec alters NaN payloads.

    Attributes:
        GROUP: elements that are encoded together (``Format.group``).
        ELEMENT_BYTES: bytes of one payload element.
        PAYLOAD_BYTES_PER_GROUP: bytes of one group's payload.
        SCALE_BYTES: bytes of one scale, 0 without scales. Several may share an element of ``Format.scale_dtype``.
        encode, decode: the functions; None for fp64, whose rows are only copied.
    """

    GROUP: int
    ELEMENT_BYTES: int
    PAYLOAD_BYTES_PER_GROUP: int
    SCALE_BYTES: int
    encode: Any
    decode: Any


@triton.jit
def as_int(x):
    """Return the bits of fp32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """Return int32 bits as fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def largest_bits(x):
    """Return the bits of the largest magnitude, fp32 [NG, GS] -> int32 [NG]; above INF_BITS when there is a NaN.

    Bits of magnitudes order as integers do, NaN last, so the result does not depend on how a maximum treats NaN.
    """
    return tl.max(as_int(x) & MAGNITUDE, 1)


@triton.jit
def amax_from_bits(largest):
    """Return the magnitude, int32 [NG] of :func:`largest_bits` -> fp32 [NG]: inf and NaN become the largest fp32."""
    return as_float(tl.minimum(largest, F32_MAX_BITS))


@triton.jit
def divide(x, value: tl.constexpr):
    """Return ``x / value`` with one IEEE rounding."""
    return tl.math.div_rn(x, tl.full(x.shape, value, tl.float32))


@triton.jit
def divide_by_448(x, NATIVE: tl.constexpr):
    """Return ``x / 448`` with one IEEE rounding, for ``x`` from 1e-4 to the largest fp32, or NaN.

    One correction of the product with the reciprocal is exact for all significands
    (``benchmarks/results/quotients.json``), and takes a third of the instructions of a division.
    """
    if NATIVE:
        rough = x * (1.0 / 448.0)
        return tl.fma(tl.fma(rough, -448.0, x), 1.0 / 448.0, rough)
    return divide(x, 448.0)


@triton.jit
def divide_rows(x, divisor, NATIVE: tl.constexpr):
    """Divide fp32 [NG, GS] by fp32 [NG], one IEEE rounding up to a magnitude of 2**20; beyond, and for inf, at least
    2**19.

    ``divisor`` is NaN or in [2**-100, 2**120]. A GPU's division takes some 20 instructions and branches. Here one
    reciprocal serves a row, and two corrections by the exact remainder round each quotient correctly (P. Markstein, IBM
    Journal of Research and Development 34 (1990) 111: a correctly rounded reciprocal and a quotient that is off by less
    than one ulp). Where elements have at most 8 significant bits, as bf16 has (NATIVE 2), one correction is exact for
    all significands (``benchmarks/results/quotients.json``). Larger quotients saturate in every narrow type, so their
    error does not matter.
    """
    if NATIVE:
        inverse = tl.math.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        inverse = tl.broadcast_to(tl.expand_dims(inverse, 1), x.shape)
        # Negated once a row, because a negation is an instruction.
        minus = tl.broadcast_to(tl.expand_dims(-divisor, 1), x.shape)
        rough = x * inverse
        exact = tl.fma(tl.fma(rough, minus, x), inverse, rough)
        if NATIVE < 2:
            exact = tl.fma(tl.fma(exact, minus, x), inverse, exact)
        quotient = tl.where(tl.abs(rough) < 1048576.0, exact, rough)
        # The corrections turn -0 into +0.
        quotient = as_float(as_int(quotient) | (as_int(x) & SIGN))
    else:
        quotient = tl.math.div_rn(x, tl.broadcast_to(tl.expand_dims(divisor, 1), x.shape))
    return quotient


@triton.jit
def multiply_rows(x, divisor):
    """Return numbers whose e4m3 codes are those of fp32 [NG, GS] / fp32 [NG], for bf16 elements of which ``divisor`` is
    1/448 of the largest, or more.

    The reciprocal of a divisor is the sum of two fp32 numbers, both above 0, exact to 2**-40: a rough one (``/`` is off
    by two ulps at most), made less by three ulps, and the rest. So the product with it, by two instructions, is the
    quotient unless that is as close to the middle of two fp32 numbers, and its code is another one only where that
    middle is half an ulp from one of two e4m3 codes. tests/formats/test_encoder_few.py has every pair of an element and
    a largest element: none is. Zeros keep their sign, and inf stays inf, because neither part is 0.

    Example: 1/3 is about 0x3EAAAAAB, so it is 0x3EAAAAA8 and 8/3 ulps, of 2**-25 each.
    """
    rough = 1.0 / divisor
    below = as_float(as_int(rough) - 3)
    rest = tl.fma(below, -divisor, 1.0) * rough
    below = tl.broadcast_to(tl.expand_dims(below, 1), x.shape)
    return tl.fma(x, below, x * tl.broadcast_to(tl.expand_dims(rest, 1), x.shape))


@triton.jit
def f32_to_e4m3(x, NATIVE: tl.constexpr):
    """Round fp32 to e4m3 bits (uint8): nearest even, saturating at +-448, NaN -> 0x7f."""
    if NATIVE:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = as_int(x)
        magnitude = bits & MAGNITUDE
        a = tl.minimum(magnitude, 0x43E00000)
        normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
        # Below 2**-6 the spacing is 2**-9, the ulp of 2**14: adding 2**14 rounds to it.
        small = as_int(as_float(a) + 16384.0) & 15
        code = tl.where(a < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
        code = tl.where(magnitude > INF_BITS, 0x7F, code).to(tl.uint8)
    return code


@triton.jit
def e4m3_to_f32(codes, NATIVE: tl.constexpr):
    """Convert e4m3 bits (uint8) to fp32, exactly."""
    if NATIVE:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = codes.to(tl.int32)
        magnitude = code & 0x7F
        small = as_int(magnitude.to(tl.float32) * 0.001953125)
        bits = tl.where(magnitude < 8, small, (magnitude << 20) + (120 << 23))
        bits = tl.where(magnitude == 0x7F, NAN_BITS, bits)
        value = as_float(bits | ((code & 0x80) << 24))
    return value


@triton.jit
def f32_to_e2m1(x):
    """Round fp32 to e2m1 codes 0..15 (int32): nearest even, saturating at +-6, NaN -> 7."""
    bits = as_int(x)
    magnitude = bits & MAGNITUDE
    a = tl.minimum(magnitude, 0x40C00000)
    normal = ((a + 0x1FFFFF + ((a >> 22) & 1)) >> 22) - 252
    # Below 1 the spacing is .5, the ulp of 2**22: adding 2**22 rounds to it.
    small = as_int(as_float(a) + 4194304.0) & 3
    code = tl.where(a < 0x3F800000, small, normal) | ((bits >> 28) & 8)
    return tl.where(magnitude > INF_BITS, 7, code)


@triton.jit
def e2m1_to_f32(code):
    """Convert e2m1 codes 0..15 (int32) to fp32, exactly."""
    magnitude = code & 7
    bits = tl.where(magnitude > 1, (magnitude << 22) + (126 << 23), magnitude * 0x3F000000)
    return as_float(bits | ((code & 8) << 28))


@triton.jit
def pack_e2m1(code):
    """Pack codes [NG, GS] into uint8 [NG, GS / 2], the even element in the low nibble."""
    even, odd = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def unpack_e2m1(packed):
    """Unpack uint8 [NG, PE] into codes (int32) [NG, 2 PE]."""
    pair = packed.to(tl.int32)
    return tl.reshape(tl.join(pair & 15, pair >> 4), (packed.shape[0], packed.shape[1] * 2))


@triton.jit
def f32_bits_to_e8m0_up(magnitude):
    """Return the code (int32) of the smallest power of two not below a magnitude, from its fp32 bits (int32), not
    NaN."""
    code = tl.minimum((magnitude + 0x7FFFFF) >> 23, 254)
    return tl.where(magnitude <= 0x400000, 0, code)


@triton.jit
def e8m0_to_f32(codes):
    """Convert an E8M0 code (uint8) to fp32, exactly: 127 -> 1, 0 -> 2**-127, 255 -> NaN."""
    code = codes.to(tl.int32)
    bits = tl.where(code == 0, 0x400000, code << 23)
    return as_float(tl.where(code == E8M0_NAN, NAN_BITS, bits))


@triton.jit
def scale_by_e8m0(x, code):
    """Divide fp32 [NG, GS] by 2**(code - 127), exact for codes (int32 [NG]) 1..253; zeros for code 0, NaN for 255."""
    inverse = as_float(tl.where(code == E8M0_NAN, NAN_BITS, (254 - code) << 23))
    scaled = x * tl.expand_dims(inverse, 1)
    return tl.where(tl.expand_dims(code, 1) == 0, 0.0, scaled)


@triton.jit
def f32_to_bf16(x, NATIVE: tl.constexpr):
    """Round fp32 to bf16 bits (uint16): nearest even, NaN -> 0x7fff."""
    bits = as_int(x)
    if NATIVE:
        code = x.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        code = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
    return tl.where((bits & MAGNITUDE) > INF_BITS, 0x7FFF, code).to(tl.uint16)


@triton.jit
def bf16_to_f32(codes):
    """Convert bf16 bits (uint16) to fp32, exactly, NaN payloads included."""
    return as_float(codes.to(tl.int32) << 16)


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
    if NATIVE == 3:
        quotient = multiply_rows(x, scale)
    else:
        quotient = divide_rows(x, scale, NATIVE)
    return f32_to_e4m3(quotient, NATIVE), scale


@triton.jit
def decode_fp32_scale(payload, scale, input_scale, NATIVE: tl.constexpr):
    return e4m3_to_f32(payload, NATIVE) * tl.expand_dims(scale, 1)


@triton.jit
def _encode_e8m0(x, largest, quotient, NATIVE: tl.constexpr):
    """Divide groups by the smallest power of two not below ``quotient``, fp32 [NG]. ``largest``: their largest bits.

    Four codes of one byte are a word of fp8_block128_e8m0, so packing needs no function.
    """
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
