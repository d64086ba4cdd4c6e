"""Round sums to the dtypes of rows, with the same bits interpreted and compiled, and small helpers of kernels.

The interpreter of stock Triton truncates fp32 to bf16. So without NATIVE the functions round with integers. NaN becomes
0x7fff, as the conversion instruction gives.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def next_power_of_2(n):
    """Return the least power of two that is ``n``, at least 1, or more. 5 -> 8.

    Kernels call this one, because importing SGLang replaces ``triton.next_power_of_2`` by a plain function, which
    Triton refuses in a kernel.
    """
    return 1 << (n - 1).bit_length()


@triton.constexpr_function
def lesser(a, b):
    """Return the lesser of two constants."""
    return min(a, b)


@triton.constexpr_function
def greater(a, b):
    """Return the greater of two constants."""
    return max(a, b)


@triton.jit
def round_bf16(x, NATIVE: tl.constexpr):
    """Round fp32 to bf16, nearest even. 1 + 2**-8 (a tie) -> 1.0, 1 + 3 * 2**-8 (a tie) -> 1 + 2**-6."""
    if NATIVE:
        return x.to(tl.bfloat16)
    else:
        b = x.to(tl.int32, bitcast=True)
        up = ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF
        code = tl.where((b & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, up)
        return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Round a block of sums (fp32, or fp64 for fp64) to DTYPE, nearest even."""
    if DTYPE == tl.bfloat16:
        return round_bf16(x, NATIVE)
    else:
        return x.to(DTYPE)


@triton.jit
def only(keep, mask):
    """Return ``mask``, a block of conditions, where ``keep`` (a scalar, or a block that fits) holds, else false.

    A scalar is first made a block, because newer interpreters make integers of a scalar in ``&``. A block of equal
    values also keeps the alignment of ``mask`` known, on which the width of loads and stores depends.
    """
    return mask & (tl.zeros(mask.shape, tl.int32) + keep.to(tl.int32) > 0)
