"""The gated activation between the two grouped matmuls, quantised on its way: ``moelink.activation`` as one kernel.

Input rows are [gate | up], 2 H elements; output rows H, cut into groups and steps as :mod:`moelink.rows.common_kernel`
says. Payloads of consecutive groups are neighbours in memory for every H. In a format with a scale per row the group
is the row, rounded up to a power of two and filled up with zeros, which are not stored; so W is 1. Scales go where the
layout wants them; in the 128x4 tiles the programs then share the zeroing of the rows behind every group, up to the next
multiple of 128.

The arithmetic is that of :mod:`moelink.rows.activation`, bit for bit.

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

from functools import lru_cache

import torch
import triton
import triton.language as tl

from moelink.formats.base import Format
from moelink.formats.device import as_float, as_int
from moelink.kernels.launch.device import has_native_casts
from moelink.kernels.scale_tiles import row_of_word, word_in_tiles
from moelink.kernels.sync.dependent_launch import allow_next_launch, wait_for_previous_launch
from moelink.rows import common_kernel as common
from moelink.rows.common_kernel import RowConstants, bounded, group_of, place


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
def gated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """``gate / (1 + exp(-(ALPHA * gate))) * up``, of bounded ones if KIND is "clamped". NaN stays NaN."""
    if KIND == "clamped":
        gate, up = bounded(gate, up, LIMIT)
    return tl.math.div_rn(gate, exp(-(gate * ALPHA)) + 1.0) * up


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


@triton.jit(do_not_specialize=["rows"])
def silu_and_quantize_kernel(x, row_offsets, input_scales, scales_offsets, tokens, scales, rows, S: tl.constexpr):
    """See the module."""
    allow_next_launch(S)  # whose weights may be loaded meanwhile (``rows.grouped_gluon``, *early*)
    wait_for_previous_launch(S)
    W: tl.constexpr = (S.HIDDEN_SIZE + S.GROUP_SIZE - 1) // S.GROUP_SIZE
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    for step in range(program, tl.cdiv(total.to(tl.int64) * W, S.GROUPS_PER_STEP).to(tl.int32), num_programs):
        first, row, group = place(step, W, S.GROUPS_PER_STEP)
        here = row < total
        source = x + (row * (2 * S.HIDDEN_SIZE) + group * S.GROUP_SIZE)[:, None] + tl.arange(0, S.GROUP_SIZE)[None, :]
        inside = here[:, None]
        if S.HIDDEN_SIZE % S.GROUP_SIZE:
            inside = inside & (tl.arange(0, S.GROUP_SIZE) < S.HIDDEN_SIZE)[None, :]
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + S.HIDDEN_SIZE, mask=inside, other=0.0).to(tl.float32)
        z = gated(gate, up, S.KIND, S.ALPHA, S.LIMIT)
        if S.SCALE_LAYOUT == "tiles_128x4" or S.HAS_INPUT_SCALE:
            expert = group_of(row, row_offsets, S.NUM_GROUPS, S.HALVINGS)
        if S.HAS_INPUT_SCALE:
            factor = tl.load(input_scales + expert)
        else:
            factor = 1.0
        payload, scale = S.CODE_FN(z, factor, S.NATIVE_CASTS)
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


def warps_of(elements: int) -> int:
    """Warps of a program whose step has ``elements`` elements: 16 for each thread, up to 1024 threads."""
    return max(4, min(32, elements // 512))


def rows_of_short_steps(device: torch.device, hidden: int) -> int:
    """Return the likely rows, of ``hidden`` columns of output, up to which steps are short.

    With steps of the usual length they would be two for each SM, or fewer, and each takes its CTA more than a
    microsecond. No step is short on a CPU.
    """
    return 2 * common.sms_of(device) * common.step_elements(device) // hidden if device.type == "cuda" else 0


def launch(
    x: torch.Tensor, row_offsets: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor | None,
    scales_offsets: torch.Tensor | None, input_scales: torch.Tensor | None, fmt: Format,
    clamp: tuple[float, float] | None, *, block: int | None = None, num_programs: int | None = None,
    native: bool | None = None, likely_rows: int | None = None,
) -> None:  # fmt: skip
    """Fill ``tokens`` and ``scales`` (in the format's layout) for the rows of ``x`` [rows, 2 H].

    Arguments are taken as ``moelink.activation`` has checked them. ``clamp`` is (alpha, limit). ``block``: elements of
    a step; ``num_programs``: at most 8 for each SM; ``native``: use the device's narrow conversions;
    ``likely_rows``: as of :func:`moelink.rows.grouped_choice.tile_rows`, None for those of ``x``.
    """
    (rows, columns), num_groups = x.shape, row_offsets.shape[0] - 1
    if not rows or not num_groups:
        return
    device = x.device
    native = has_native_casts(device) if native is None else native
    are_few = (likely_rows or rows) <= rows_of_short_steps(device, columns // 2)
    elements = block or common.step_elements(device) // (4 if are_few else 1)
    form = _form(fmt, columns // 2, num_groups, clamp, input_scales is not None, elements, native, x.is_cuda)
    common.launch(
        silu_and_quantize_kernel,
        (x, row_offsets, input_scales, scales_offsets, *form.views(tokens, scales), rows),
        form.constants, form.steps(rows), absent=row_offsets, num_programs=num_programs,
        num_warps=warps_of(form.elements),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _form(
    fmt: Format, hidden: int, num_groups: int, clamp: tuple[float, float] | None, has_input_scale: bool, elements: int,
    native: bool, on_cuda: bool,
) -> common.Form:  # fmt: skip
    group = common.group_elements(fmt, hidden)
    per_step = triton.next_power_of_2(max(1, elements // group))
    alpha, limit = clamp or (1.0, 1.0)
    constants = RowConstants(
        **common.format_constants(fmt, hidden, num_groups, group, per_step), CODE_FN=fmt.codec().encode,
        SCALE_LAYOUT="" if fmt.scale_layout is None else fmt.scale_layout.name,
        HAS_INPUT_SCALE=has_input_scale, KIND="clamped" if clamp else "silu", ALPHA=alpha, LIMIT=limit,
        NATIVE_CASTS=native, TAIL_TILES=16 if on_cuda else 64,
    )  # fmt: skip
    return common.Form.of(constants, fmt, hidden, group, per_step)
