"""Rounding of sums to the dtypes of rows, the same bits interpreted and compiled.

Stock Triton's interpreter truncates fp32 to bf16; so without NATIVE the rounding is done in integers. NaN becomes
0x7fff, as the conversion instruction gives.
"""

import triton
import triton.language as tl


@triton.jit
def round_bf16(x, NATIVE: tl.constexpr):
    """fp32 to bf16, nearest even. 1 + 2**-8 (a tie) -> 1.0, 1 + 3 * 2**-8 (a tie) -> 1 + 2**-6."""
    if NATIVE:
        return x.to(tl.bfloat16)
    else:
        b = x.to(tl.int32, bitcast=True)
        up = ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF
        code = tl.where((b & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, up)
        return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """A block of sums (fp32, or fp64 for fp64) rounded to DTYPE, nearest even."""
    if DTYPE == tl.bfloat16:
        return round_bf16(x, NATIVE)
    else:
        return x.to(DTYPE)


@triton.jit
def only(keep, mask):
    """``mask``, a block of conditions, where ``keep`` (a scalar, or a block that fits) holds, else nothing.

    A scalar becomes a block first: and-ed as it is, newer interpreters make integers of it. A block of equal values
    also leaves the alignment of ``mask`` known, on which the width of loads and stores depends.
    """
    return mask & (tl.zeros(mask.shape, tl.int32) + keep.to(tl.int32) > 0)
