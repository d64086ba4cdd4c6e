"""Grouped matrix product of fp8 rows and fp8 weights for compute capability 9.0, for few rows of each group.

The product, its tensors and its sums are those of :mod:`moelink.rows.grouped_fp8`. With few rows of each group, to load
weights takes most of the time. So here one warp of a CTA, the *producer*, only loads, as many blocks ahead as shared
memory holds, and goes on with the next tile while the one before is multiplied or stored. Tiles are *swapped*: 128
columns x BLOCK_ROWS rows, and each of two *consumers* of four warps multiplies 64 of these columns, which are rows of
the weight, by all rows of the tile. There is one CTA an SM. CTA p of P computes tile p, in the order of
``tile_in_group``, and then takes the next tile that nobody has (:mod:`moelink.kernels.launch.tile_counters`): memory
serves some SMs faster than others.

Protocol of the ring. Block number b, counted over all tiles of a CTA, is in stage ``b % STAGES``; it is use
``u = b // STAGES`` of the stage. A stage holds 128 x 128 numbers of the weight and their scale, as many of each row of
the tile and their scales, and the tile's place: (first row, end of the group, tile of columns, 0). Each stage has two
mbarriers. A wait for parity q returns once the phase of parity q has ended; the phase before the first counts as one
of parity 1.

========  ==================================================  ==========================================================
barrier   a phase ends with                                   waited for by
========  ==================================================  ==========================================================
`ready`   the producer's arrival, the bytes that it expects,  consumers, before they read block b: parity ``u % 2``
          and an arrival of each of its 32 threads, once its
          copies of scales have ended
`empty`   one arrival of each consumer, which has read the    the producer, before it loads block b: parity
          scales and waited for its products of the block     ``(u + 1) % 2``
========  ==================================================  ==========================================================

Stages become empty one after the other, so the producer waits once for TOGETHER blocks, for the last of them: then it
loads 512 bytes of each weight row at a time, which memory has side by side. A place whose end is 0 follows the last
tile; with it consumers end. So the producer alone searches the groups, and it waits for the launch before this one: all
else follows from what it loads. EARLY launches are described in :mod:`moelink.rows.grouped_gluon`.

Of a tile's rows the producer loads those of its group, in boxes of ROW_BOX; the last box may have rows behind the
group's end (zeros behind the buffer). Other rows keep the numbers that the stage held; they are multiplied, but never
stored.

Example: 3 groups of 5, 0 and 20 rows, 256 columns and BLOCK_ROWS = 16: 1 x 2, 0 and 2 x 2 tiles. CTA 0 of 4 ends its
tile first, then the others do, and CTA 1 takes tile 5. So CTA 0 computes tiles 0 and 4: rows 0 to 4 and columns 0 to
127 of group 0, then rows 5 to 20 and columns 128 to 255 of group 2. With K = 256 a tile has two blocks. Blocks 0 to 3
are loaded at once, behind two waits, for the stages of blocks 3 and 5. If CTA 0 asks last, it gets number 5, for tile
9, which does not exist. If it is also the last to say so, it finds 3 in the counter's second word, and sets both words
to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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

from moelink.kernels.launch.cache_keys import Constants
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
    load_weight,
    next_tile,
    store_part,
    tiles_of_groups,
)

COLUMNS, ROW_BOX = 64, 16
"""Columns of a consumer, of which a tile has two parts, and rows that are loaded at a time."""
RING_BYTES = 200 << 10
"""Most bytes of rows and weights in the ring."""
PRODUCER_REGISTERS, REGISTERS = 56, {16: 96, 32: 96, 64: 128}
"""Of a thread of the producer, and of all threads in the mean, by the rows of a tile. Fewer than there are, so that
CTAs of the next launch find room."""

_BLOCK, _PRODUCER_REGISTERS = gl.constexpr(BLOCK), gl.constexpr(PRODUCER_REGISTERS)

load_items = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Copies an item of a thread into shared memory, renamed as ``load_block``."""


@dataclass(frozen=True, repr=False, eq=False)
class FewConstants(Constants):
    """Launch constants of the kernel.

    Attributes:
        K, N: columns of a row and of the output. NUM_GROUPS: groups; GROUPS_POW2: the next power of two.
        BLOCK_ROWS: rows of a tile. ROW_BOX: rows that are loaded at a time.
        BLOCK_COLUMNS, PARTS: columns of a consumer, and consumers. BAND: tiles of rows that tiles in progress span.
        STAGES: of the ring. TOGETHER: blocks that are loaded at a time. REGISTERS: of a consumer's thread.
        EARLY: load weights before the launch before this one has ended. DEPENDENT_LAUNCH: as of ``rows.common_kernel``.
    """

    K: int
    N: int
    NUM_GROUPS: int
    GROUPS_POW2: int
    BLOCK_ROWS: int
    ROW_BOX: int
    STAGES: int
    REGISTERS: int
    BLOCK_COLUMNS: int = COLUMNS
    PARTS: int = 2
    BAND: int = 16
    TOGETHER: int = 4
    EARLY: bool = False
    DEPENDENT_LAUNCH: bool = False


@gluon.jit
def expect(bar, boxes, WEIGHT_BYTES: gl.constexpr, S: gl.constexpr):
    """Arrive, and expect the bytes of a block of the weight and of ``boxes`` boxes of rows."""
    for count in gl.static_range(1, S.BLOCK_ROWS // S.ROW_BOX + 1):
        mbarrier.expect(bar, count * S.ROW_BOX * _BLOCK + WEIGHT_BYTES, pred=boxes == count)


@gluon.jit
def _produce(codes, scales, row_offsets, weight, weight_scales, rows, counter, ring, S: gl.constexpr):
    """Load all blocks of this CTA's tiles, in order, each into its stage as soon as that is empty."""
    left, right, row_scales, by_scales, places, ready, empty = ring
    KB: gl.constexpr = S.K // _BLOCK
    FIRST: gl.constexpr = min(S.STAGES, KB) if S.EARLY else 0
    if not S.EARLY:
        follow_previous_launch(S)
    COLUMN_TILES: gl.constexpr = (S.N + _BLOCK - 1) // _BLOCK
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    last_tiles = gl.associative_scan(tiles_of_groups(row_offsets, rows, S), 0, add)
    field = gl.arange(0, 4, gl.BlockedLayout([4], [32], [1], [0]))
    inside_tile, four = gl.arange(0, S.BLOCK_ROWS, lanes), gl.arange(0, 4, lanes)
    total = gl.max(last_tiles, 0)
    stage, phase, tile = 0, 1, gl.program_id(0)
    while tile < total:
        group, row, end, column_tile = find_tile(tile, last_tiles, row_offsets, rows, S)
        place = gl.where(field == 0, row, gl.where(field == 1, end, gl.where(field == 2, column_tile, 0)))
        weight_row = group * S.N + column_tile * _BLOCK
        scale_at = scales + gl.minimum(row + inside_tile, end - 1)
        by_at = weight_scales + (group * COLUMN_TILES + column_tile) * KB + four * 0
        boxes = gl.cdiv(gl.minimum(end - row, S.BLOCK_ROWS), S.ROW_BOX)
        is_first = tile == gl.program_id(0)
        if S.EARLY:
            if is_first:
                places.index(0).store(place)
                for k in gl.static_range(FIRST):
                    expect(ready.index(k), boxes, _BLOCK * _BLOCK, S)
                    load_weight(weight, weight_row, k, right, k, ready.index(k), S)
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
                expect(bar, boxes, _BLOCK * _BLOCK, S)
                load_weight(weight, weight_row, k, right, stage, bar, S)
            for box in gl.static_range(S.BLOCK_ROWS // S.ROW_BOX):
                to = left.index(stage).slice(box * S.ROW_BOX, S.ROW_BOX)
                at = [row + box * S.ROW_BOX, k * _BLOCK]
                load_block(codes, at, bar, to, pred=box < boxes)
            load_items(row_scales.index(stage), scale_at + k * rows)
            load_items(by_scales.index(stage), by_at + k)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = after(stage, phase, S)
        tile = next_tile(counter)
    end_tiles(counter, S)
    mbarrier.wait(empty.index(stage), phase)
    places.index(stage).store(field * 0)
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def _consume(out, ring, PART: gl.constexpr, S: gl.constexpr):
    """Multiply the columns of part PART of this CTA's tiles, and store them."""
    left, right, row_scales, by_scales, places, ready, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BLOCK_ROWS, 32])
    along_rows: gl.constexpr = gl.SliceLayout(0, layout)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    fields: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    products = gl.zeros([S.BLOCK_COLUMNS, S.BLOCK_ROWS], gl.float32, layout)
    stage, phase = 0, 0
    mbarrier.wait(ready.index(stage), phase)
    place = places.index(stage).load(fields)
    end = field_of(place, 1, fields)
    while end > 0:
        # A multiple that the compiler knows, so that 16 bytes are stored at a time.
        row, column = field_of(place, 0, fields), field_of(place, 2, fields) * _BLOCK + PART * S.BLOCK_COLUMNS
        sums = gl.zeros([S.BLOCK_COLUMNS, S.BLOCK_ROWS], gl.float32, layout)
        for _ in range(S.K // _BLOCK):
            mbarrier.wait(ready.index(stage), phase)
            by = right.index(stage * S.PARTS + PART)
            # ``products`` stands for registers here, its numbers are not added.
            products = warpgroup_mma(by, left.index(stage).permute((1, 0)), products, use_acc=False, is_async=True)
            factor = row_scales.index(stage).load(along_rows) * field_of(by_scales.index(stage).load(fields), 0, fields)
            products = warpgroup_mma_wait(0, deps=[products])
            mbarrier.arrive(empty.index(stage), count=1)
            sums = gl.fma(products, gl.expand_dims(factor, 0).broadcast_to(products.shape), sums)
            stage, phase = after(stage, phase, S)
        values = sums.to(out.dtype.element_ty).permute((1, 0))
        # Combine reads what down stores, which is EARLY, behind weights that would drive it out of the cache.
        store_part(out, values, row, end, column, stored, "evict_last" if S.EARLY else "", S)
        mbarrier.wait(ready.index(stage), phase)
        place = places.index(stage).load(fields)
        end = field_of(place, 1, fields)


@gluon.jit(do_not_specialize=["rows"])
def grouped_gluon_few_kernel(codes, scales, row_offsets, weight, weight_scales, out, rows, counter, S: gl.constexpr):
    """See the module."""
    left = gl.allocate_shared_memory(gl.float8e4nv, [S.STAGES, S.BLOCK_ROWS, _BLOCK], codes.layout)
    right = gl.allocate_shared_memory(gl.float8e4nv, [S.STAGES * S.PARTS, S.BLOCK_COLUMNS, _BLOCK], weight.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_scales = gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BLOCK_ROWS], plain)
    by_scales = gl.allocate_shared_memory(gl.float32, [S.STAGES, 4], plain)
    places = gl.allocate_shared_memory(gl.int32, [S.STAGES, 4], plain)
    ready = gl.allocate_shared_memory(gl.int64, [S.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S.STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(S.STAGES):
        mbarrier.init(ready.index(stage), count=33)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    ring = (left, right, row_scales, by_scales, places, ready, empty)
    gl.warp_specialize([
        (_consume, (out, ring, 0, S)),
        (_consume, (out, ring, 1, S)),
        (_produce, (codes, scales, row_offsets, weight, weight_scales, rows, counter, ring, S)),
    ], [4, 1], [S.REGISTERS, _PRODUCER_REGISTERS])  # fmt: skip


@lru_cache(maxsize=256)
def constants_of(weight: torch.Size, tile_rows: int, *, early: bool = False) -> FewConstants:
    """Launch constants of the kernel for weights of shape [G, N, K] and tiles of so many rows."""
    groups, columns, inner = weight
    return FewConstants(
        K=inner, N=columns, NUM_GROUPS=groups, GROUPS_POW2=triton.next_power_of_2(groups), BLOCK_ROWS=tile_rows,
        ROW_BOX=ROW_BOX, STAGES=RING_BYTES // ((tile_rows + BLOCK) * BLOCK), REGISTERS=REGISTERS[tile_rows],
        EARLY=early,
    )  # fmt: skip


def launch(
    codes: torch.Tensor, scales: torch.Tensor, row_offsets: torch.Tensor, weight: torch.Tensor,
    weight_scales: torch.Tensor, out: torch.Tensor, tile_rows: int, *, early: bool = False,
    num_programs: int | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [R, N] for the rows there are, on a device of compute capability 9.0.

    All tensors are contiguous, of the shapes in the table of :mod:`moelink.rows.grouped_fp8`. ``tile_rows``: of a tile,
    16, 32 or 64. ``early`` and ``num_programs``: as of :func:`moelink.rows.grouped_gluon.launch`.
    """
    if not out.numel():
        return
    flat = weight.view(-1, weight.shape[2])
    row_tiles = min(len(codes), triton.cdiv(len(codes), tile_rows) + weight.shape[0])
    # The sums use FMAs by name; nothing else is fused.
    common.launch(
        grouped_gluon_few_kernel,
        (Block(codes, (ROW_BOX, BLOCK), IN_SHARED), scales, row_offsets, Block(flat, (COLUMNS, BLOCK), IN_SHARED),
         weight_scales, out, len(codes)),
        constants_of(weight.shape, tile_rows, early=early), row_tiles * triton.cdiv(weight.shape[1], BLOCK),
        absent=row_offsets, per_sm=1, num_programs=num_programs, counted=True, num_warps=4,
        maxnreg=REGISTERS[tile_rows],
    )  # fmt: skip
