"""Epilogues of combine as Triton device functions: what ``moelink.epilogues`` puts into ``Hook.triton_fn``.

``reduce.finish`` calls one in place of its store, with the pointers of the hook's tensors, the token [1, 1] and the
columns [1, B] (int64), the sums before rounding [1, B] and the mask [1, B] of columns that exist. Columns are
consecutive, B is a power of two and the first column a multiple of it.

Tensors are rows without gaps, so their width is their stride. It comes as a tensor of one element, in a form that tells
Triton how far it can be divided: int32 counts units of 16 elements, int64 single ones. Without that rows would be
stored an element at a time.

Example: sums [10, 20, 30, 40] of token 2, columns 0-3, width 4. ``bias`` with [1, 2, 3, 4] stores [11, 22, 33, 44] at
elements 8-11; ``quantize_mxfp4`` of a row 32 wide stores 16 bytes at byte 32 and one scale at 2.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from moelink.formats.device import encode_fp32_scale, encode_mxfp4, encode_mxfp8, encode_nvfp4
from moelink.kernels.launch.device import is_interpreted
from moelink.kernels.numeric import round_to

_COMPILED = tl.constexpr(not is_interpreted())


@triton.jit
def row_width(width):
    """The width of a row in elements."""
    count = tl.load(width).to(tl.int64)
    return count * 16 if width.dtype.element_ty == tl.int32 else count


@triton.jit
def _fp32(block):
    return block.to(tl.float32)


@triton.jit
def store(out, width, token, columns, total, mask):
    """``total`` to a row of ``out``, rounded to its dtype; fp64 sums by way of fp32, unless ``out`` is fp64."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    wide = total if DTYPE == tl.float64 else _fp32(total)  # noqa: SIM300
    tl.store(out + token * row_width(width) + columns, round_to(wide, DTYPE, _COMPILED), mask=mask)


@triton.jit
def cast(tensors, token, columns, block, mask):
    """tensors: out, width."""
    store(tensors[0], tensors[1], token, columns, block, mask)


@triton.jit
def bias(tensors, token, columns, block, mask):
    """tensors: out, width, vector [width]."""
    term = tl.load(tensors[2] + columns, mask=mask, other=0.0).to(block.dtype)
    store(tensors[0], tensors[1], token, columns, block + term, mask)


@triton.jit
def residual(tensors, token, columns, block, mask):
    """tensors: out, width, rows [num_tokens, width]."""
    term = tl.load(tensors[2] + token * row_width(tensors[1]) + columns, mask=mask, other=0.0).to(block.dtype)
    store(tensors[0], tensors[1], token, columns, block + term, mask)


@triton.jit
def _quantize(
    tensors, token, columns, block, mask, factor, ENCODE: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr
):
    """tensors: payload [num_tokens, width], scales [num_tokens, width / BYTES], width in bytes. BYTES a group."""
    B: tl.constexpr = block.shape[1]
    GROUPS: tl.constexpr = B // GROUP
    x = tl.reshape(tl.where(mask, _fp32(block), 0.0), (GROUPS, GROUP))
    if _COMPILED:
        codes, scale = ENCODE(x, factor, cuda_capability_geq(8, 9))
    else:
        codes, scale = ENCODE(x, factor, False)
    width = row_width(tensors[2])
    row = tl.sum(token)
    first = tl.multiple_of(tl.min(columns), B) // GROUP
    byte = tl.multiple_of(first * BYTES, GROUPS * BYTES) + tl.arange(0, GROUPS * BYTES)
    payload = tensors[0].to(tl.pointer_type(tl.uint8), bitcast=True) + row * width
    tl.store(payload + byte, tl.reshape(codes, (GROUPS * BYTES,)), mask=byte < width)
    group = first + tl.arange(0, GROUPS)
    tl.store(tensors[1] + row * (width // BYTES) + group, scale, mask=group < width // BYTES)


@triton.jit
def quantize_fp8_block128(tensors, token, columns, block, mask):
    """tensors: payload, scales (fp32), width."""
    _quantize(tensors, token, columns, block, mask, 1.0, encode_fp32_scale, 128, 128)


@triton.jit
def quantize_mxfp8(tensors, token, columns, block, mask):
    """tensors: payload, scales (bits), width."""
    _quantize(tensors, token, columns, block, mask, 1.0, encode_mxfp8, 32, 32)


@triton.jit
def quantize_mxfp4(tensors, token, columns, block, mask):
    """tensors: payload, scales (bits), width."""
    _quantize(tensors, token, columns, block, mask, 1.0, encode_mxfp4, 32, 16)


@triton.jit
def quantize_nvfp4(tensors, token, columns, block, mask):
    """tensors: payload, scales (bits), width, global scale (fp32, one element)."""
    _quantize(tensors, token, columns, block, mask, tl.load(tensors[3]), encode_nvfp4, 16, 8)


QUANTIZE = {
    "fp8_block128": quantize_fp8_block128,
    "mxfp8": quantize_mxfp8,
    "mxfp4": quantize_mxfp4,
    "nvfp4": quantize_nvfp4,
}
