"""Convert between fp32 and the narrow types of the formats, in torch.

No function synchronises, and each gives the same bits on CPU and CUDA. All but :func:`amax` and the two that pack codes
are elementwise. ``moelink.formats.device`` has the Triton twins.

=====  ============================================  =====================================================
type   values                                        from fp32
=====  ============================================  =====================================================
e4m3   float8_e4m3fn: 2**-9 .. 448, NaN 0x7f         nearest even, saturates at +-448 (inf too), NaN -> 0x7f
e2m1   {0, .5, 1, 1.5, 2, 3, 4, 6} = codes 0..7,     nearest even, saturates at +-6 (inf too), NaN -> code 7
       code 8..15 negative; no NaN
e8m0   2**(code - 127), code 0..254, NaN 255         upwards, saturates at code 254 (inf too), NaN -> 255
bf16   bfloat16                                      nearest even, NaN -> 0x7fff
=====  ============================================  =====================================================
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_NAN = 255
F32_MAX = torch.finfo(torch.float32).max

_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_MAGNITUDE = 0x7FFFFFFF


def divide(x: Tensor, value: float) -> Tensor:
    """Return ``x / value`` with one IEEE rounding. (Dividing by a Python number multiplies by its reciprocal on
    CUDA.)"""
    return x / x.new_full((), value)


def canonical_nan(x: Tensor) -> Tensor:
    """Return fp32 with every NaN replaced by 0x7fc00000."""
    return torch.where(x.isnan(), math.nan, x)


def amax(groups: Tensor) -> Tensor:
    """Return the largest magnitude of each group, [n, g, group] to [n, g]. An inf counts as the largest fp32; a NaN
    gives NaN."""
    return groups.abs().amax(dim=-1).clamp(max=F32_MAX)


def f32_to_e4m3(x: Tensor) -> Tensor:
    """Round fp32 to float8_e4m3fn. 448.1 -> 448, 17.0 (tie of 16 and 18) -> 16, 19.0 -> 20, NaN -> 0x7f."""
    return canonical_nan(x.clamp(-E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn)


def e4m3_to_f32(codes: Tensor) -> Tensor:
    """Convert float8_e4m3fn (or its bits as uint8) to fp32, exactly."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def f32_to_e2m1(x: Tensor) -> Tensor:
    """Round fp32 to e2m1 codes 0..15, uint8, one a byte.

    Ties: .25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4. A negative result 0 -> code 8.
    """
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    a = magnitude.clamp(max=0x40C00000)
    normal = ((a + 0x1FFFFF + ((a >> 22) & 1)) >> 22) - 252
    # Below 1 the spacing is .5, the ulp of 2**22: adding 2**22 rounds to it.
    small = (a.view(torch.float32) + 4194304.0).view(torch.int32) & 3
    code = torch.where(a < 0x3F800000, small, normal) | ((bits >> 28) & 8)
    return torch.where(magnitude > _INF_BITS, 7, code).to(torch.uint8)


def e2m1_to_f32(codes: Tensor) -> Tensor:
    """Convert e2m1 codes 0..15 (uint8, one a byte) to fp32, exactly."""
    code = codes.to(torch.int32)
    magnitude = code & 7
    normal = (magnitude << 22) + (126 << 23)
    bits = torch.where(magnitude > 1, normal, magnitude * 0x3F000000)
    return torch.where(code > 7, bits | -0x80000000, bits).view(torch.float32)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack [..., 2m] codes into [..., m] bytes, the even element in the low nibble: codes 1, 2 -> 0x21."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Unpack [..., m] bytes into [..., 2m] codes, the inverse of :func:`pack_e2m1`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def f32_to_e8m0_up(x: Tensor) -> Tensor:
    """Return the E8M0 code (uint8) of the smallest power of two that is not below the magnitude of an fp32.

    1.0 -> 127, 1.0 + ulp -> 128, 1.5 -> 128; from 0 to 2**-127 -> 0; above 2**127 and inf -> 254.
    """
    magnitude = x.view(torch.int32) & _MAGNITUDE
    code = ((magnitude + 0x7FFFFF) >> 23).clamp(max=254)
    code = torch.where(magnitude <= 0x400000, 0, code)
    return torch.where(magnitude > _INF_BITS, E8M0_NAN, code).to(torch.uint8)


def e8m0_to_f32(codes: Tensor) -> Tensor:
    """Convert E8M0 (float8_e8m0fnu or its bits as uint8) to fp32, exactly: 127 -> 1.0, 0 -> 2**-127, 255 -> NaN."""
    code = codes.view(torch.uint8).to(torch.int32)
    bits = torch.where(code == 0, 0x400000, code << 23)
    return torch.where(code == E8M0_NAN, _NAN_BITS, bits).view(torch.float32)


def e8m0_reciprocal(codes: Tensor) -> Tensor:
    """Return 2**(127 - code) of E8M0 codes 1..253 (uint8), exact, so that multiplying by it equals dividing by the
    scale.

    255 -> NaN; 0 and 254, which the formats never divide by, give 2**127 and 0.
    """
    code = codes.to(torch.int32)
    return torch.where(code == E8M0_NAN, _NAN_BITS, (254 - code) << 23).view(torch.float32)


def to_bf16(x: Tensor) -> Tensor:
    """Round fp16 or fp32 to bfloat16, nearest even, NaN -> 0x7fff. bfloat16 is returned unchanged."""
    if x.dtype == torch.bfloat16:
        return x
    return x.to(torch.bfloat16).view(torch.int16).masked_fill(x.isnan(), 0x7FFF).view(torch.bfloat16)
