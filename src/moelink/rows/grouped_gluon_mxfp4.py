"""Grouped matrix product of fp8 rows and weights in mxfp4 for compute capability 9.0, for few rows of each group.

The product, its tensors and its sums, in their order, are those of :mod:`moelink.rows.grouped_mxfp4`, whose bits it
has. CTAs, tiles, the ring and its protocol are those of :mod:`moelink.rows.grouped_gluon_few`, with these differences:

* PARTS *consumers* share a tile of 64 * PARTS columns, and ``empty`` expects an arrival of each. Tiles of up to 32 rows
  have four, because consumers take longer here: they convert bytes, and scale four products of a block.
* A stage holds two boxes of bytes of the weight, and a word of scales of each column.
* A place is (first row, end of the group, group, tile of columns). Biases are read from memory, behind the last block.

A box of bytes has 32 of each column. Side by side in memory, they are loaded as *lines* of 128, those of four columns;
so N is a multiple of 4. The TMA unit stores piece p (16 bytes) of line l as piece ``p ^ (l % 8)``. Consumers read the
same memory as rows of 32 bytes (``AS_COLUMNS``). 16 bytes of each of 8 columns are four pieces of each of two lines,
all in other banks: so one instruction (``ldmatrix``) loads a left operand without a conflict, into the registers that
the tensor core takes it from, and there the bytes become e4m3.

Example: 3 groups of 5, 0 and 20 rows, 512 columns, tiles of 16 rows and 4 parts: 1 x 2, 0 and 2 x 2 tiles. If CTA 0 of
4 ends its tile first, it computes tiles 0 and 4: rows 0 to 4 and columns 0 to 255 of group 0, then rows 5 to 20 and
columns 256 to 511 of group 2. Bytes 16 to 31 of column 9 are piece 3 of line 2, which is stored as piece 1, at byte
2 * 128 + 16 of a part's 2048.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moelink.formats.device import as_float
from moelink.kernels.launch.row_launch import Block
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import common_kernel as common
from moelink.rows.grouped_fp8 import BLOCK
from moelink.rows.grouped_gluon import (
    IN_SHARED,
    add,
    after,
    end_tiles,
    field_of,
    find_tile,
    load_block,
    next_tile,
    store_part,
    tiles_of_groups,
)
from moelink.rows.grouped_gluon_few import (
    COLUMNS,
    PRODUCER_REGISTERS,
    RING_BYTES,
    ROW_BOX,
    FewConstants,
    expect,
    load_items,
)
from moelink.rows.grouped_mxfp4 import halves

LINE = 128
"""Bytes of a line."""


class Form(NamedTuple):
    """Consumers of a tile, and registers: of a thread, in the mean, and of a consumer's thread."""

    parts: int
    registers: int
    of_consumer: int


FORMS = {16: Form(4, 96, 96), 32: Form(4, 96, 104), 64: Form(2, 168, 216)}
"""By the rows of a tile, the fastest with sizes of DeepSeek-V3, but for less than 1 %. Lab, *Weights in MXFP4*."""
WORDS_IN_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
"""The layout of words of scales, as in memory."""
AS_COLUMNS = gl.SharedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 0], [2, 0], [4, 16], [9, 0], [18, 0], [32, 0]], [], 1024
)
"""(column, byte) that is 2 ** i bytes behind the first of a part, i = 0, 1, ...; others follow by XOR."""

_BLOCK, _LINE, _PRODUCER_REGISTERS = gl.constexpr(BLOCK), gl.constexpr(LINE), gl.constexpr(PRODUCER_REGISTERS)
_AS_COLUMNS = gl.constexpr(AS_COLUMNS)

_Shared = gl.shared_memory_descriptor
see_as = _Shared.reinterpret if hasattr(_Shared, "reinterpret") else _Shared._reinterpret
"""Gives shared memory another dtype, shape and layout. Its name before Triton 3.9 is gone there."""


@dataclass(frozen=True, repr=False, eq=False)
class Mxfp4Constants(FewConstants):
    """Launch constants of the kernel.

    Attributes:
        HAS_BIAS: add biases. OPERANDS: the type of the factors, as of ``rows.grouped_fp8``.
    """

    HAS_BIAS: bool = False
    OPERANDS: str = "fp8"


@gluon.jit
def _load_weight(weight, words, group, column_tile, k, right, scale_words, stage, bar, S: gl.constexpr):
    """Load block ``k`` of the weight of a tile, and its scales, into ``stage``."""
    TILE: gl.constexpr = S.BLOCK_COLUMNS * S.PARTS
    word_row = group * (S.K // _BLOCK + S.HAS_BIAS) + k
    load_block(words, [word_row, column_tile * TILE], bar, scale_words.index(stage))
    for half in gl.static_range(2):
        line = (group * (S.K // 64) + 2 * k + half) * (S.N // 4) + column_tile * (TILE // 4)
        load_block(weight, [line, 0], bar, right.index(2 * stage + half))


@gluon.jit
def _produce(codes, scales, row_offsets, weight, words, rows, counter, ring, S: gl.constexpr):
    """Load all blocks of this CTA's tiles, in order, each into its stage as soon as that is empty."""
    left, right, row_scales, scale_words, places, ready, empty = ring
    KB: gl.constexpr = S.K // _BLOCK
    BYTES: gl.constexpr = S.PARTS * S.BLOCK_COLUMNS * (_BLOCK // 2 + 4)
    FIRST: gl.constexpr = min(S.STAGES, KB) if S.EARLY else 0
    if not S.EARLY:
        follow_previous_launch(S)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    last_tiles = gl.associative_scan(tiles_of_groups(row_offsets, rows, S), 0, add)
    field = gl.arange(0, 4, gl.BlockedLayout([4], [32], [1], [0]))
    inside_tile = gl.arange(0, S.BLOCK_ROWS, lanes)
    total = gl.max(last_tiles, 0)
    stage, phase, tile = 0, 1, gl.program_id(0)
    while tile < total:
        group, row, end, column_tile = find_tile(tile, last_tiles, row_offsets, rows, S)
        place = gl.where(field == 0, row, gl.where(field == 1, end, gl.where(field == 2, group, column_tile)))
        scale_at = scales + gl.minimum(row + inside_tile, end - 1)
        boxes = gl.cdiv(gl.minimum(end - row, S.BLOCK_ROWS), S.ROW_BOX)
        is_first = tile == gl.program_id(0)
        if S.EARLY:
            if is_first:
                places.index(0).store(place)
                for k in gl.static_range(FIRST):
                    expect(ready.index(k), boxes, BYTES, S)
                    _load_weight(weight, words, group, column_tile, k, right, scale_words, k, ready.index(k), S)
                follow_previous_launch(S)
        for k in range(KB):
            if k % S.TOGETHER == 0:
                last, its_phase = stage, phase
                for _ in gl.static_range(S.TOGETHER - 1):
                    last, its_phase = after(last, its_phase, S)
                mbarrier.wait(empty.index(last), its_phase)
            bar = ready.index(stage)
            if (k >= FIRST) | (not is_first):
                if k == 0:
                    places.index(stage).store(place)
                expect(bar, boxes, BYTES, S)
                _load_weight(weight, words, group, column_tile, k, right, scale_words, stage, bar, S)
            for box in gl.static_range(S.BLOCK_ROWS // S.ROW_BOX):
                to = left.index(stage).slice(box * S.ROW_BOX, S.ROW_BOX)
                at = [row + box * S.ROW_BOX, k * _BLOCK]
                load_block(codes, at, bar, to, pred=box < boxes)
            load_items(row_scales.index(stage), scale_at + k * rows)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = after(stage, phase, S)
        tile = next_tile(counter)
    end_tiles(counter, S)
    mbarrier.wait(empty.index(stage), phase)
    places.index(stage).store(field * 0)
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def _multiply(rows, first_bytes, second_bytes, layout: gl.constexpr, S: gl.constexpr):
    """Begin the products of the four blocks of 32 of a block: each [BLOCK_COLUMNS, BLOCK_ROWS]."""
    zeros = gl.zeros([S.BLOCK_COLUMNS, S.BLOCK_ROWS], gl.float32, layout)
    operands: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    first, second = halves(first_bytes.load(operands), S)
    third, fourth = halves(second_bytes.load(operands), S)
    d = warpgroup_mma(first, rows.slice(0, 32, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    e = warpgroup_mma(second, rows.slice(32, 32, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    f = warpgroup_mma(third, rows.slice(64, 32, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    g = warpgroup_mma(fourth, rows.slice(96, 32, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return d, e, f, g


@gluon.jit
def _add(sums, products, word, by_row):
    """``sums`` plus the products of a block, with the scales of its four parts, times the scale of each row."""
    d, e, f, g = products
    word = gl.expand_dims(word, 1)
    t = d * as_float((word << 23) & 0x7F800000)
    t = gl.fma(e, as_float((word << 15) & 0x7F800000).broadcast_to(d.shape), t)
    t = gl.fma(f, as_float((word << 7) & 0x7F800000).broadcast_to(d.shape), t)
    t = gl.fma(g, as_float((word >> 1) & 0x7F800000).broadcast_to(d.shape), t)
    return gl.fma(t, gl.expand_dims(by_row * 64.0, 0).broadcast_to(d.shape), sums)


@gluon.jit
def _consume(out, weight_scales, ring, PART: gl.constexpr, S: gl.constexpr):
    """Multiply the columns of part PART of this CTA's tiles, and store them."""
    left, right, row_scales, words, places, ready, empty = ring
    KB: gl.constexpr = S.K // _BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BLOCK_ROWS, 32])
    along_rows: gl.constexpr = gl.SliceLayout(0, layout)
    along_columns: gl.constexpr = gl.SliceLayout(1, layout)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    fields: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    right = see_as(right, gl.uint8, [S.STAGES * 2 * S.PARTS, S.BLOCK_COLUMNS, 32], _AS_COLUMNS)
    words = see_as(words, gl.int32, [S.STAGES * S.PARTS, S.BLOCK_COLUMNS], plain)
    stage, phase = 0, 0
    mbarrier.wait(ready.index(stage), phase)
    place = places.index(stage).load(fields)
    end = field_of(place, 1, fields)
    while end > 0:
        row, group = field_of(place, 0, fields), field_of(place, 2, fields)
        column = field_of(place, 3, fields) * (S.BLOCK_COLUMNS * S.PARTS) + PART * S.BLOCK_COLUMNS
        sums = gl.zeros([S.BLOCK_COLUMNS, S.BLOCK_ROWS], gl.float32, layout)
        for _ in range(KB):
            mbarrier.wait(ready.index(stage), phase)
            part = 2 * S.PARTS * stage + PART
            products = _multiply(left.index(stage), right.index(part), right.index(part + S.PARTS), layout, S)
            word = words.index(stage * S.PARTS + PART).load(along_columns)
            by_row = row_scales.index(stage).load(along_rows)
            products = warpgroup_mma_wait(0, deps=products)
            mbarrier.arrive(empty.index(stage), count=1)
            sums = _add(sums, products, word, by_row)
            stage, phase = after(stage, phase, S)
        if S.HAS_BIAS:
            here = gl.minimum(column + gl.arange(0, S.BLOCK_COLUMNS, along_columns), S.N - 1)
            sums += gl.expand_dims(as_float(gl.load(weight_scales + (group * (KB + 1) + KB) * S.N + here)), 1)
        values = sums.to(out.dtype.element_ty).permute((1, 0))
        # As in ``grouped_gluon_few``.
        store_part(out, values, row, end, column, stored, "evict_last" if S.EARLY else "", S)
        mbarrier.wait(ready.index(stage), phase)
        place = places.index(stage).load(fields)
        end = field_of(place, 1, fields)


@gluon.jit(do_not_specialize=["rows"])
def grouped_gluon_mxfp4_kernel(
    codes, scales, row_offsets, weight, words, weight_scales, out, rows, counter, S: gl.constexpr,
):  # fmt: skip
    """See the module."""
    TILE: gl.constexpr = S.BLOCK_COLUMNS * S.PARTS
    left = gl.allocate_shared_memory(gl.float8e4nv, [S.STAGES, S.BLOCK_ROWS, _BLOCK], codes.layout)
    right = gl.allocate_shared_memory(gl.uint8, [S.STAGES * 2, TILE // 4, _LINE], weight.layout)
    scale_words = gl.allocate_shared_memory(gl.int32, [S.STAGES, 1, TILE], words.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_scales = gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BLOCK_ROWS], plain)
    places = gl.allocate_shared_memory(gl.int32, [S.STAGES, 4], plain)
    ready = gl.allocate_shared_memory(gl.int64, [S.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S.STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(S.STAGES):
        mbarrier.init(ready.index(stage), count=33)
        mbarrier.init(empty.index(stage), count=S.PARTS)
    fence_async_shared()
    ring = (left, right, row_scales, scale_words, places, ready, empty)
    if S.PARTS == 4:
        gl.warp_specialize([
            (_consume, (out, weight_scales, ring, 0, S)),
            (_consume, (out, weight_scales, ring, 1, S)),
            (_consume, (out, weight_scales, ring, 2, S)),
            (_consume, (out, weight_scales, ring, 3, S)),
            (_produce, (codes, scales, row_offsets, weight, words, rows, counter, ring, S)),
        ], [4, 4, 4, 1], [S.REGISTERS, S.REGISTERS, S.REGISTERS, _PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (out, weight_scales, ring, 0, S)),
            (_consume, (out, weight_scales, ring, 1, S)),
            (_produce, (codes, scales, row_offsets, weight, words, rows, counter, ring, S)),
        ], [4, 1], [S.REGISTERS, _PRODUCER_REGISTERS])  # fmt: skip


@lru_cache(maxsize=256)
def constants_of(weight: torch.Size, tile_rows: int, *, biased: bool = False, early: bool = False) -> Mxfp4Constants:
    """Launch constants of the kernel for weights of shape [G, N, K] and tiles of so many rows."""
    (groups, columns, inner), form = weight, FORMS[tile_rows]
    stage = tile_rows * (BLOCK + 4) + COLUMNS * form.parts * (BLOCK // 2 + 4)
    return Mxfp4Constants(
        K=inner, N=columns, NUM_GROUPS=groups, GROUPS_POW2=triton.next_power_of_2(groups), BLOCK_ROWS=tile_rows,
        ROW_BOX=ROW_BOX, PARTS=form.parts, STAGES=RING_BYTES // stage, REGISTERS=form.of_consumer, HAS_BIAS=biased,
        EARLY=early,
    )  # fmt: skip


def launch(
    codes: torch.Tensor, scales: torch.Tensor, row_offsets: torch.Tensor, weight: torch.Tensor,
    weight_scales: torch.Tensor, out: torch.Tensor, tile_rows: int, *, early: bool = False,
    num_programs: int | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [R, N] for the rows there are, on a device of compute capability 9.0.

    All tensors are contiguous, of the shapes in the table of :mod:`moelink.rows.grouped_mxfp4`, N a multiple of 4.
    ``tile_rows``: of a tile, 16, 32 or 64. ``early`` and ``num_programs``: as of
    :func:`moelink.rows.grouped_gluon.launch`.
    """
    if not out.numel():
        return
    groups, blocks, columns, _ = weight.shape
    form, words = FORMS[tile_rows], weight_scales.view(-1, columns)
    biased, tile = len(words) > groups * (blocks // 2), COLUMNS * form.parts
    row_tiles = min(len(codes), triton.cdiv(len(codes), tile_rows) + groups)
    # The sums use FMAs by name; nothing else is fused.
    common.launch(
        grouped_gluon_mxfp4_kernel,
        (Block(codes, (ROW_BOX, BLOCK), IN_SHARED), scales, row_offsets,
         Block(weight.view(-1, LINE), (tile // 4, LINE), IN_SHARED), Block(words, (1, tile), WORDS_IN_SHARED),
         weight_scales, out, len(codes)),
        constants_of(torch.Size((groups, columns, 64 * blocks)), tile_rows, biased=biased, early=early),
        row_tiles * triton.cdiv(columns, tile), absent=row_offsets, per_sm=1, num_programs=num_programs, counted=True,
        num_warps=4, maxnreg=form.registers,
    )  # fmt: skip
