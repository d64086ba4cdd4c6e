"""The gated activation between the two grouped matmuls, quantised on its way: ``moelink.activation`` as one kernel.

Input rows are [gate | up], 2 H elements. The number of rows is read on the device, from the last of ``row_offsets``, so
a fixed number of programs serves any number of rows. Nothing waits for anything; there is no protocol.

The output rows are one list of groups of GS elements: group f is columns [f % W * GS, f % W * GS + GS) of row f // W,
with W = H / GS. Step s handles groups [s * NG, s * NG + NG), and program p the steps p, p + P, p + 2 P, ... Payloads of
consecutive groups are neighbours in memory, whatever H is. In a format with a scale per row the group is the row,
rounded up to a power of two and filled up with zeros, which are not stored; so W is 1. Scales go where the layout wants
them; in the 128x4 tiles the programs then share the zeroing of the rows behind every group, up to the next multiple of
128.

Every operation is rounded once in fp32, none is fused, and the exponential is a polynomial of such operations, so that
the bits are those of the torch twin.

Example: fp32 rows, H = 4, row_offsets [0, 1, 3], 4 rows of capacity. Silu of 0, 32 and 64 is 0, 32 and 64:

=====  ===============  ==============  ==================
row    gate             up              out
=====  ===============  ==============  ==================
0      [32, 0, 64, 32]  [1, 5, 2, -1]   [32, 0, 128, -32]
1      [0, 64, 32, 32]  [3, 1, 1, 7]    [0, 64, 32, 224]
2      [64, 64, 0, 32]  [2, -2, 9, 3]   [128, -128, 0, 96]
3      anything         anything        not written
=====  ===============  ==============  ==================

With GS = 4, so W = 1, and NG = 1, the 3 rows are 3 steps: program 0 of 2 does rows 0 and 2, program 1 row 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moelink.formats.base import Format
from moelink.formats.device.casts import as_float, as_int
from moelink.kernels.launch.cache_keys import Constants, settle_cache_key
from moelink.kernels.launch.device import is_interpreted
from moelink.kernels.scale_tiles import row_of_word, word_in_tiles

TILES = "tiles_128x4"
LAYOUTS = ("row_major", "transposed", TILES)
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

# Tiles whose tails one program zeroes at a time.
_TAIL_TILES = 16


@triton.jit
def exp(x):
    """e**x, 1.2 ulp for x in [-80, 88.3]: 2**n * P(r), n = round(x / ln 2), r = x - n ln 2. Above 88.38 inf.

    ln 2 is cut so that n times its upper part is exact. Adding 1.5 * 2**23 rounds to an integer. 0 -> 1, -90 -> e**-80
    (for 1 + e**x both are nothing). NaN gives an unspecified value.
    """
    x = tl.minimum(tl.maximum(x, -80.0), 89.0)
    shifted = x * 1.4426950216293335 + 12582912.0
    n = shifted - 12582912.0
    r = (x - n * 0.693359375) - n * -0.00021219444170128554
    p = r * 0.001381459878757596 + 0.008368716575205326
    p = p * r + 0.04166838899254799
    p = p * r + 0.1666652113199234
    p = p * r + 0.4999999403953552
    p = p * r + 1.0
    p = p * r + 1.0
    return p * as_float((as_int(shifted) - 0x4B400000 + 127) << 23)


@triton.jit
def gated(gate, up, CLAMP: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """``gate / (1 + exp(-gate)) * up``, or the clamped variant. NaN stays NaN."""
    if CLAMP:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        power = exp(-(gate * ALPHA))
    else:
        power = exp(-gate)
    return tl.math.div_rn(gate, power + 1.0) * up


@triton.jit
def group_of(row, row_offsets, G: tl.constexpr, HALVINGS: tl.constexpr):
    """The group of each row: the last that starts at or before it."""
    low = (row * 0).to(tl.int32)
    high = low + (G - 1)
    for _ in tl.static_range(HALVINGS):
        middle = (low + high + 1) // 2
        before = tl.load(row_offsets + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit
def clear_tails(
    row_offsets, scales_offsets, scales, rows, program, num_programs, G: tl.constexpr, TILES_PER_ROW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """128x4 tiles: zero the scales of the rows behind each group, in words of the 4 scales of one row."""
    PIECES: tl.constexpr = (TILES_PER_ROW + AT_ONCE - 1) // AT_ONCE
    for i in range(program, G * PIECES, num_programs):
        g = i // PIECES
        start = tl.minimum(tl.load(row_offsets + g), rows)
        size = tl.minimum(tl.load(row_offsets + g + 1), rows) - start
        if size % 128 != 0:
            block = start // 128 + tl.load(scales_offsets + g) + size // 128
            word = tl.arange(0, AT_ONCE * 128)
            tile = i % PIECES * AT_ONCE + word // 128
            inner = row_of_word(word % 128)
            to = scales.to(tl.pointer_type(tl.int32), bitcast=True) + block.to(tl.int64) * (TILES_PER_ROW * 128)
            tl.store(to + tile * 128 + word % 128, word * 0, mask=(inner >= size % 128) & (tile < TILES_PER_ROW))


@dataclass(frozen=True, repr=False, eq=False)
class ActivationConstants(Constants):
    """What the kernel is compiled for.

    Attributes:
        HIDDEN_SIZE: columns of an output row. GROUP_SIZE: elements of a group. GROUPS_PER_STEP: groups at a time.
        GROUP_ELEMENTS: payload elements of a group. NUM_GROUPS: groups of rows; HALVINGS: to find a row's by bisection.
        ENCODE_FN: the format's device function. SCALE_LAYOUT: its layout of scales, "" for formats without them.
        SCALES_PER_WORD: scales in an element of the scale tensor, as it is seen from outside.
        HAS_INPUT_SCALES: there is a global scale for each group of rows.
        CLAMP, ALPHA, LIMIT: the clamped form, and its two numbers. NATIVE_CASTS: the device's narrow conversions.
        TAIL_TILES: 128x4 tiles that are cleared at a time.
    """

    HIDDEN_SIZE: int
    GROUP_SIZE: int
    GROUPS_PER_STEP: int
    GROUP_ELEMENTS: int
    NUM_GROUPS: int
    HALVINGS: int
    ENCODE_FN: Any
    SCALE_LAYOUT: str
    SCALES_PER_WORD: int
    HAS_INPUT_SCALES: bool
    CLAMP: bool
    ALPHA: float
    LIMIT: float
    NATIVE_CASTS: bool
    TAIL_TILES: int


@triton.jit(do_not_specialize=["rows"])
def silu_and_quantize_kernel(x, row_offsets, input_scales, scales_offsets, tokens, scales, rows, S: tl.constexpr):
    """See the module."""
    W: tl.constexpr = (S.HIDDEN_SIZE + S.GROUP_SIZE - 1) // S.GROUP_SIZE
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    for step in range(program, tl.cdiv(total.to(tl.int64) * W, S.GROUPS_PER_STEP).to(tl.int32), num_programs):
        first = tl.cast(step, tl.int64) * S.GROUPS_PER_STEP
        ahead = (first % W).to(tl.int32) + tl.arange(0, S.GROUPS_PER_STEP)
        row = first // W + ahead // W
        group = ahead % W
        here = row < total
        source = x + (row * (2 * S.HIDDEN_SIZE) + group * S.GROUP_SIZE)[:, None] + tl.arange(0, S.GROUP_SIZE)[None, :]
        inside = here[:, None]
        if S.HIDDEN_SIZE % S.GROUP_SIZE:
            inside = inside & (tl.arange(0, S.GROUP_SIZE) < S.HIDDEN_SIZE)[None, :]
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + S.HIDDEN_SIZE, mask=inside, other=0.0).to(tl.float32)
        z = gated(gate, up, S.CLAMP, S.ALPHA, S.LIMIT)
        if S.SCALE_LAYOUT == "tiles_128x4" or S.HAS_INPUT_SCALES:
            expert = group_of(row, row_offsets, S.NUM_GROUPS, S.HALVINGS)
        if S.HAS_INPUT_SCALES:
            factor = tl.load(input_scales + expert)
        else:
            factor = 1.0
        payload, scale = S.ENCODE_FN(z, factor, S.NATIVE_CASTS)
        left = total.to(tl.int64) * (W * S.GROUP_ELEMENTS) - first * S.GROUP_ELEMENTS
        element = tl.arange(0, S.GROUPS_PER_STEP * S.GROUP_ELEMENTS)
        to = tokens + first * S.GROUP_ELEMENTS + element
        stored = element < left
        if S.HIDDEN_SIZE % S.GROUP_SIZE:  # a group is a row, but longer
            ROW: tl.constexpr = S.HIDDEN_SIZE * S.GROUP_ELEMENTS // S.GROUP_SIZE
            to -= (first + element // S.GROUP_ELEMENTS) * (S.GROUP_ELEMENTS - ROW)
            stored = stored & (element % S.GROUP_ELEMENTS < ROW)
        tl.store(to, tl.reshape(payload, (S.GROUPS_PER_STEP * S.GROUP_ELEMENTS,)), mask=stored)
        if S.SCALE_LAYOUT == "row_major":
            tl.store(scales + first + tl.arange(0, S.GROUPS_PER_STEP), scale, mask=here)
        elif S.SCALE_LAYOUT == "transposed":
            P: tl.constexpr = S.SCALES_PER_WORD
            to = scales + (group.to(tl.int64) // P * rows + row) * P
            tl.store(to + group % P, scale, mask=here)
            # Scales past the row's end, in its last word.
            for j in tl.static_range(W % P, P if W % P > 0 else 0):
                tl.store(to + j, tl.zeros([S.GROUPS_PER_STEP], tl.uint8), mask=here & (group == W - 1))
        elif S.SCALE_LAYOUT == "tiles_128x4":
            start = tl.load(row_offsets + expert)
            inner = (row - start).to(tl.int32)
            block = start // 128 + tl.load(scales_offsets + expert, mask=here, other=0) + inner // 128
            tile = block.to(tl.int64) * ((W + 3) // 4) + group // 4
            to = scales + word_in_tiles(tile, inner) * 4
            tl.store(to + group % 4, scale, mask=here)
            # Columns past the row's end, in its last tile.
            for j in tl.static_range(W % 4, 4 if W % 4 > 0 else 0):
                tl.store(to + j, tl.zeros([S.GROUPS_PER_STEP], tl.uint8), mask=here & (group == W - 1))
    if S.SCALE_LAYOUT == "tiles_128x4":
        clear_tails(
            row_offsets, scales_offsets, scales, rows, program, num_programs, S.NUM_GROUPS, (W + 3) // 4, S.TAIL_TILES
        )


def group_elements(fmt: Format, hidden: int) -> int:
    """GS of rows that are encoded: the elements that share a scale, rounded up to a power of two; for formats without
    scales as :func:`even_groups`."""
    return even_groups(hidden) if fmt.scale_dtype is None else triton.next_power_of_2(fmt.elements_per_scale(hidden))


def even_groups(hidden: int) -> int:
    """The largest power of two up to 64 that divides ``hidden``."""
    return min(64, hidden & -hidden)


def scales_per_word(fmt: Format) -> int:
    """Scales in an element of the scale tensor: 4 where an int32 holds four bytes, else 1."""
    return 1 if fmt.scale_dtype is None else fmt.scale_dtype.itemsize // max(1, fmt.codec().SCALE_BYTES)


def warps_of(elements: int) -> int:
    """Warps of a program whose step has ``elements`` elements: 16 for each thread, up to 1024 threads."""
    return max(4, min(32, elements // 512))


def native_conversions(device: torch.device) -> bool:
    """True when the conversion instructions of the device give the formats' bits."""
    if is_interpreted() or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def launch(
    x: torch.Tensor,
    row_offsets: torch.Tensor,
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    scales_offsets: torch.Tensor | None,
    input_scales: torch.Tensor | None,
    fmt: Format,
    clamp: tuple[float, float] | None,
    *,
    block: int | None = None,
    num_programs: int | None = None,
    native: bool | None = None,
) -> None:
    """Fill ``tokens`` and ``scales`` (in the format's layout) for the rows of ``x`` [rows, 2 H].

    Arguments are taken as ``moelink.activation`` has checked them. ``clamp`` is (alpha, limit). ``block``: elements of
    a step; ``num_programs``: at most 8 for each SM; ``native``: use the device's narrow conversions.
    """
    codec, hidden, num_groups = fmt.codec(), x.shape[1] // 2, row_offsets.shape[0] - 1
    if not x.shape[0] or not num_groups:
        return
    cuda = x.device.type == "cuda"
    group = group_elements(fmt, hidden)
    per_step = triton.next_power_of_2(max(1, (block or (2048 if cuda else 16384)) // group))
    if num_programs is None:
        most = 8 * torch.cuda.get_device_properties(x.device).multi_processor_count if cuda else 2
        num_programs = max(1, min(most, triton.cdiv(x.shape[0] * (hidden // group), per_step)))
    alpha, limit = clamp or (1.0, 1.0)
    constants = ActivationConstants(
        HIDDEN_SIZE=hidden,
        GROUP_SIZE=group,
        GROUPS_PER_STEP=per_step,
        GROUP_ELEMENTS=group // codec.GROUP * codec.PAYLOAD_BYTES_PER_GROUP // codec.ELEMENT_BYTES,
        NUM_GROUPS=num_groups,
        HALVINGS=(num_groups - 1).bit_length(),
        ENCODE_FN=codec.encode,
        SCALE_LAYOUT="" if fmt.scale_layout is None else fmt.scale_layout.name,
        SCALES_PER_WORD=scales_per_word(fmt),
        HAS_INPUT_SCALES=input_scales is not None,
        CLAMP=clamp is not None,
        ALPHA=alpha,
        LIMIT=limit,
        NATIVE_CASTS=native_conversions(x.device) if native is None else native,
        TAIL_TILES=_TAIL_TILES if cuda else 64,
    )
    settle_cache_key(silu_and_quantize_kernel)[(num_programs,)](
        x, row_offsets, row_offsets if input_scales is None else input_scales,
        row_offsets if scales_offsets is None else scales_offsets, tokens.view(_UNSIGNED[codec.ELEMENT_BYTES]),
        row_offsets if scales is None else scales if codec.SCALE_BYTES == 4 else scales.view(torch.uint8), x.shape[0],
        S=constants, enable_fp_fusion=False, num_warps=warps_of(group * per_step),
    )  # fmt: skip
