"""Convert between fp32 and narrow types in Triton device functions; the twins of ``moelink.formats.casts``.

When interpreted, stock Triton 3.6 rounds casts to bf16 and fp8 wrongly. So with NATIVE False no value narrower than
fp32 is a float: codes are integers, made with integer operations and exact fp32 ones. NaN and inf follow the torch
twins.
"""

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
F32_MAX_BITS = tl.constexpr(0x7F7FFFFF)
E8M0_NAN = tl.constexpr(255)


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
        if NATIVE != 2:
            exact = tl.fma(tl.fma(exact, minus, x), inverse, exact)
        quotient = tl.where(tl.abs(rough) < 1048576.0, exact, rough)
        # The corrections turn -0 into +0.
        quotient = as_float(as_int(quotient) | (as_int(x) & SIGN))
    else:
        quotient = tl.math.div_rn(x, tl.broadcast_to(tl.expand_dims(divisor, 1), x.shape))
    return quotient


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
