"""Grouped matrix product of fp8 rows and fp8 weights for compute capability 9.0, with warps that only load.

The product, its tensors and its sums are those of :mod:`moelink.rows.grouped_fp8`. That kernel waits for each product
of a block before it scales it, and its tensor cores rest meanwhile. This one, in Gluon, splits the warps of a CTA:

* One warp, the *producer*, loads tiles by TMA into a ring of STAGES stages in shared memory. It goes on with the next
  tile while the one before is still multiplied or stored.
* Two *consumers* of four warps multiply. Each has 64 rows of a tile of 128 rows x 2 parts of 128 columns. While one
  scales the products of a block and adds them to its sums in fp32, the other one's products keep the tensor cores busy.

There is one CTA an SM. CTA p of P computes tile p, in the order of ``tile_in_group``, and then takes the next tile that
nobody has (:mod:`moelink.kernels.launch.tile_counters`). So CTAs at work are at neighbouring tiles, which share weights
and rows, and these come from memory once and then from the second-level cache. A consumer none of whose rows exist does
not multiply: it gives the stages back.

Protocol of the ring. Block number b, counted over all tiles of a CTA, is in stage ``b % STAGES``; it is use
``u = b // STAGES`` of the stage. Consumers take two blocks in a turn of their loop. So if a tile has an odd number of
them, an empty one follows: the producer loads nothing and arrives, and each consumer waits for that and gives the stage
back. If consumers did not wait, two phases of `empty` could end between two waits of the producer; without the
producer's wait, two of `ready` could end between two of a consumer. STAGES is even, so both blocks of a turn have the
same use u.

Each stage has two mbarriers. A wait for parity q returns once the phase of parity q has ended; the phase before the
first counts as one of parity 1.

========  =============================================  ===============================================================
barrier   a phase ends with                              waited for by
========  =============================================  ===============================================================
`ready`   the producer's arrival and 49152 bytes, or     consumers, before they read block b, or give it back
          the arrival alone for an empty block, or the   unread: parity ``u % 2``
          end of the tiles
`empty`   one arrival of each consumer, which has        the producer, before it loads block b, or arrives for an
          waited for its products of the block, or, if   empty one or the end: parity ``(u + 1) % 2``
          it does not read it, for the block
========  =============================================  ===============================================================

With the first block of a tile the producer writes the tile's place beside the stage, before it arrives: (first row,
end of the group, group, tile of columns). So the producer alone searches the groups. Consumers read it after waiting. A
place whose end is 0 follows the last tile; with it consumers end. Rows of a tile from the end of its group on are
loaded (as zeros behind the buffer) and multiplied beside others that exist, but never stored.

An EARLY launch begins while the one before it runs: its producer finds its first tile and loads weights of that, as
many blocks as there are stages, and only then waits (``kernels.sync.dependent_launch``). So ``row_offsets`` and weights
must be final by then. They are if another product of the same groups, which is not early, was launched and one launch
since: of experts gate and up, then the activation, then down. Down begins once all CTAs of the activation have begun,
which is once all of gate and up have passed their wait, for the launch that made ``row_offsets``. PTX promises what a
launch sees only behind its wait; that an allowed launch sees what was visible when it was allowed is observed
(``test_an_early_product_follows_the_offsets_that_a_product_before_it_had``). All else that a CTA reads or writes
follows the bytes of its rows, which its producer asks for behind the wait, as it takes tiles. The producer of a CTA
without a tile waits before it adds to the counter (``end_tiles``), which the launch before may still use. A CTA ends
after its producer. So all CTAs end after the wait, which the next launch relies on: it takes this one's end for the end
of those before it.

Example: STAGES = 4, K = 256, so 2 blocks a tile, and a CTA with 3 tiles. Blocks 0 to 3, of tiles 0 and 1, are loaded
at once. Block 4, the first of tile 2, is use 1 of stage 0: the producer waits until phase 0 of ``empty[0]`` has ended,
which is when both consumers have multiplied block 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.launch.row_launch import Block
from moelink.kernels.sync.dependent_launch import follow_previous_launch, wait_for_previous_launch
from moelink.rows import common_kernel as common
from moelink.rows.grouped_fp8 import BLOCK, tile_in_group

ROWS, PART_ROWS, PARTS, STAGES = 128, 64, 2, 4
"""Rows of a tile and of a consumer, parts of a tile, stages of the ring, an even number: 4 x 48 KB."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Of a thread. 128 threads with the first number (three warps do nothing) and 256 with the second fill an SM."""
IN_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
"""The layout of blocks of codes in shared memory, in which the TMA unit writes and tensor cores read."""

_BLOCK, _PART_ROWS = gl.constexpr(BLOCK), gl.constexpr(PART_ROWS)
_STAGE_BYTES = gl.constexpr((ROWS + PARTS * BLOCK) * BLOCK)
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = gl.constexpr(PRODUCER_REGISTERS), gl.constexpr(CONSUMER_REGISTERS)

load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Copies a block into shared memory by the TMA unit. Its name before Triton 3.8 is gone in 3.9."""


@dataclass(frozen=True, repr=False, eq=False)
class GluonConstants(Constants):
    """Launch constants of the kernel.

    Attributes:
        K, N: columns of a row and of the output. NUM_GROUPS: groups; GROUPS_POW2: the next power of two.
        BLOCK_ROWS: rows of a tile. BLOCK_COLUMNS, PARTS: columns of a part of a tile, and parts.
        BAND: tiles of rows that tiles in progress span.
        STAGES: of the ring. EARLY: load weights before the launch before this one has ended.
        DEPENDENT_LAUNCH: as of ``rows.common_kernel``.
    """

    K: int
    N: int
    NUM_GROUPS: int
    GROUPS_POW2: int
    BLOCK_ROWS: int = ROWS
    BLOCK_COLUMNS: int = BLOCK
    PARTS: int = PARTS
    BAND: int = 16
    STAGES: int = STAGES
    EARLY: bool = False
    DEPENDENT_LAUNCH: bool = False


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def tiles_of_groups(row_offsets, rows, S: gl.constexpr):
    """The number of tiles of each group [GROUPS_POW2], in one warp."""
    COLUMN_TILES: gl.constexpr = (S.N + S.BLOCK_COLUMNS * S.PARTS - 1) // (S.BLOCK_COLUMNS * S.PARTS)
    group = gl.arange(0, S.GROUPS_POW2, gl.BlockedLayout([1], [32], [1], [0]))
    start = gl.load(row_offsets + group, mask=group < S.NUM_GROUPS, other=0)
    end = gl.load(row_offsets + group + 1, mask=group < S.NUM_GROUPS, other=0)
    size = gl.minimum(end, rows) - gl.minimum(start, rows)
    return gl.cdiv(size, S.BLOCK_ROWS) * COLUMN_TILES


@gluon.jit
def find_tile(tile, last_tiles, row_offsets, rows, S: gl.constexpr):
    """``(group, first row, end of the group, tile of columns)`` of tile number ``tile``; ``last_tiles``: tiles of each
    group and of those before it."""
    before = last_tiles <= tile
    group = gl.sum(before.to(gl.int32), 0)
    start = gl.load(row_offsets + group)
    end = gl.minimum(gl.load(row_offsets + group + 1), rows)
    inside = tile - gl.max(gl.where(before, last_tiles, 0), 0)
    row_tile, column_tile = tile_in_group(inside, gl.cdiv(end - start, S.BLOCK_ROWS), S)
    return group, start + row_tile * S.BLOCK_ROWS, end, column_tile


@gluon.jit
def next_tile(counter):
    """Take the next tile, or a number behind the last one, after which this CTA takes nothing."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def end_tiles(counter, S: gl.constexpr):
    """Say that this CTA takes no more tiles. The last one to say so sets the counter to zero."""
    if S.EARLY:
        wait_for_previous_launch(S)  # for a CTA without a tile; others have waited
    if gl.atomic_add(counter + 1, 1, sem="relaxed") == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0, sem="relaxed")
        gl.atomic_xchg(counter + 1, 0, sem="relaxed")


@gluon.jit
def load_weight(weight, row, k, right, stage, bar, S: gl.constexpr):
    """Load block ``k`` of the weight of a tile, from its ``row`` on, into ``stage``."""
    for part in gl.static_range(S.PARTS):
        to = right.index(stage * S.PARTS + part)
        load_block(weight, [row + part * S.BLOCK_COLUMNS, k * _BLOCK], bar, to)


@gluon.jit
def _produce(codes, weight, row_offsets, rows, counter, ring, S: gl.constexpr):
    """Load all blocks of this CTA's tiles, in order, each into its stage as soon as that is empty."""
    left, right, places, ready, empty = ring
    FIRST: gl.constexpr = min(S.STAGES, S.K // _BLOCK) if S.EARLY else 0
    last_tiles = gl.associative_scan(tiles_of_groups(row_offsets, rows, S), 0, add)
    field = gl.arange(0, 4, gl.BlockedLayout([4], [32], [1], [0]))
    total = gl.max(last_tiles, 0)
    block, tile = 0, gl.program_id(0)
    while tile < total:
        group, row, end, column_tile = find_tile(tile, last_tiles, row_offsets, rows, S)
        place = gl.where(field == 0, row, gl.where(field == 1, end, gl.where(field == 2, group, column_tile)))
        weight_row = group * S.N + column_tile * (S.BLOCK_COLUMNS * S.PARTS)
        is_first = tile == gl.program_id(0)
        if S.EARLY:
            if is_first:
                places.index(0).store(place)
                for k in gl.static_range(FIRST):
                    mbarrier.expect(ready.index(k), _STAGE_BYTES)
                    load_weight(weight, weight_row, k, right, k, ready.index(k), S)
                follow_previous_launch(S)
        for k in range(S.K // _BLOCK):
            stage = block % S.STAGES
            mbarrier.wait(empty.index(stage), (block // S.STAGES + 1) & 1)
            bar = ready.index(stage)
            if (k >= FIRST) | (not is_first):
                if k == 0:
                    places.index(stage).store(place)
                mbarrier.expect(bar, _STAGE_BYTES)
                load_weight(weight, weight_row, k, right, stage, bar, S)
            for part in gl.static_range(2):
                to = left.index(stage * 2 + part)
                load_block(codes, [row + part * _PART_ROWS, k * _BLOCK], bar, to)
            block += 1
        if S.K // _BLOCK % 2 == 1:
            mbarrier.wait(empty.index(block % S.STAGES), (block // S.STAGES + 1) & 1)
            mbarrier.arrive(ready.index(block % S.STAGES), count=1)
            block += 1
        tile = next_tile(counter)
    end_tiles(counter, S)
    mbarrier.wait(empty.index(block % S.STAGES), (block // S.STAGES + 1) & 1)
    places.index(block % S.STAGES).store(field * 0)
    mbarrier.arrive(ready.index(block % S.STAGES), count=1)


@gluon.jit
def field_of(place, NUMBER: gl.constexpr, layout: gl.constexpr):
    """Number NUMBER of a place; each thread has all four, so nothing is exchanged."""
    return gl.sum(gl.where(gl.arange(0, 4, layout) == NUMBER, place, 0), 0)


@gluon.jit
def _plus(sums, products, factor):
    """``sums`` plus the products of a block, times the factor of each row."""
    return gl.fma(products, gl.expand_dims(factor, 1).broadcast_to(products.shape), sums)


@gluon.jit
def store_part(out, sums, first_row, end, first_column, layout: gl.constexpr, EVICTION: gl.constexpr, S: gl.constexpr):
    """Store a part of a tile [rows, BLOCK_COLUMNS] in ``layout``, as far as its rows and columns exist. EVICTION: when
    it leaves the second-level cache, as Triton names it."""
    values = gl.convert_layout(sums, layout)
    row = first_row + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, S.BLOCK_COLUMNS, gl.SliceLayout(0, layout))
    mask = gl.expand_dims(row < end, 1)
    PARTLY: gl.constexpr = S.N % (S.BLOCK_COLUMNS * S.PARTS)
    if PARTLY != 0:
        mask = mask & gl.expand_dims(column < S.N, 0)
    at = out + gl.expand_dims(row.to(gl.int64) * S.N, 1) + gl.expand_dims(column, 0)
    gl.store(at, values, mask=mask, eviction_policy=EVICTION)


@gluon.jit
def _scales_of(k, at, S: gl.constexpr):
    """The scales of the rows and of both parts for block ``k``, or for the last one if there is no block ``k``."""
    rows, scale_at, first_at, second_at = at
    block = gl.minimum(k, S.K // _BLOCK - 1)
    return gl.load(scale_at + block.to(gl.int64) * rows), gl.load(first_at + block), gl.load(second_at + block)


@gluon.jit
def _multiply(k, stage, phase, at, numbers, factors, ring, HALF: gl.constexpr, S: gl.constexpr):
    """``numbers`` with the products of block ``k`` added to both sums, and the ``factors`` of the next block."""
    left, right, _, ready, empty = ring
    products, first, second = numbers
    scale, by_first, by_second = factors
    mbarrier.wait(ready.index(stage), phase)
    mine, by = left.index(stage * 2 + HALF), right.index(stage * S.PARTS).permute((1, 0))
    # ``products`` stands for registers here, its numbers are not added.
    products = warpgroup_mma(mine, by, products, use_acc=False, is_async=True)
    first_factor, second_factor = scale * by_first, scale * by_second
    # A block ahead: nothing else hides the way of scales from memory.
    factors = _scales_of(k + 1, at, S)
    products = warpgroup_mma_wait(0, deps=[products])
    # Waits that take sums hold these back from moving behind the next product, which would then need registers of its
    # own, more than there are. The one for ``second`` is there because the kernel is faster with it.
    first = warpgroup_mma_wait(0, deps=[_plus(first, products, first_factor)])
    by = right.index(stage * S.PARTS + 1).permute((1, 0))
    products = warpgroup_mma(mine, by, products, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(empty.index(stage), count=1)
    second = warpgroup_mma_wait(0, deps=[_plus(second, products, second_factor)])
    return (products, first, second), factors


@gluon.jit
def after(stage, phase, S: gl.constexpr, BLOCKS: gl.constexpr = 1):
    """The stage of the block that follows BLOCKS blocks, and the parity of its use. STAGES is a multiple of BLOCKS."""
    last = stage == S.STAGES - BLOCKS
    return gl.where(last, 0, stage + BLOCKS), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _consume(scales, weight_scales, out, rows, ring, HALF: gl.constexpr, S: gl.constexpr):
    """Multiply the rows of half HALF of this CTA's tiles, and store them."""
    _, _, places, ready, empty = ring
    KB: gl.constexpr = S.K // _BLOCK
    NB: gl.constexpr = (S.N + _BLOCK - 1) // _BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BLOCK_COLUMNS, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    fields: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    stage, phase = 0, 0
    mbarrier.wait(ready.index(stage), phase)
    place = places.index(stage).load(fields)
    while field_of(place, 1, fields) > 0:
        row, end = field_of(place, 0, fields) + HALF * _PART_ROWS, field_of(place, 1, fields)
        # A multiple that the compiler knows, so that 16 bytes are stored at a time.
        group, column = field_of(place, 2, fields), field_of(place, 3, fields) * (S.BLOCK_COLUMNS * S.PARTS)
        if row < end:
            scale_at = scales + gl.minimum(row + gl.arange(0, _PART_ROWS, gl.SliceLayout(1, layout)), end - 1)
            first_at = weight_scales + (group * NB + column // _BLOCK) * KB
            # The last column tile may have no second part: then this is the scale of the last column.
            second_at = weight_scales + (group * NB + gl.minimum(column + S.BLOCK_COLUMNS, S.N - 1) // _BLOCK) * KB
            at = (rows, scale_at, first_at, second_at)
            factors = _scales_of(gl.to_tensor(0), at, S)
            zeros = gl.zeros([_PART_ROWS, S.BLOCK_COLUMNS], gl.float32, layout)
            numbers = (zeros, zeros, zeros)
            for pair in range(KB // 2):
                for inside in gl.static_range(2):
                    k = pair * 2 + inside
                    numbers, factors = _multiply(k, stage + inside, phase, at, numbers, factors, ring, HALF, S)
                stage, phase = after(stage, phase, S, 2)
            if KB % 2 == 1:
                numbers, factors = _multiply(gl.to_tensor(KB - 1), stage, phase, at, numbers, factors, ring, HALF, S)
                mbarrier.wait(ready.index(stage + 1), phase)
                mbarrier.arrive(empty.index(stage + 1), count=1)
                stage, phase = after(stage, phase, S, 2)
            products, first, second = numbers
            store_part(out, first.to(out.dtype.element_ty), row, end, column, stored, "", S)
            store_part(out, second.to(out.dtype.element_ty), row, end, column + S.BLOCK_COLUMNS, stored, "", S)
        else:
            for _pair in range((KB + 1) // 2):
                for inside in gl.static_range(2):
                    mbarrier.wait(ready.index(stage + inside), phase)
                    mbarrier.arrive(empty.index(stage + inside), count=1)
                stage, phase = after(stage, phase, S, 2)
        mbarrier.wait(ready.index(stage), phase)
        place = places.index(stage).load(fields)


@gluon.jit(do_not_specialize=["rows"])
def grouped_gluon_kernel(codes, scales, row_offsets, weight, weight_scales, out, rows, counter, S: gl.constexpr):
    """See the module."""
    if not S.EARLY:
        follow_previous_launch(S)
    left = gl.allocate_shared_memory(gl.float8e4nv, [2 * S.STAGES, _PART_ROWS, _BLOCK], codes.layout)
    right = gl.allocate_shared_memory(gl.float8e4nv, [S.PARTS * S.STAGES, S.BLOCK_COLUMNS, _BLOCK], weight.layout)
    places = gl.allocate_shared_memory(gl.int32, [S.STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [S.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S.STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(S.STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    ring = (left, right, places, ready, empty)
    gl.warp_specialize([
        (_consume, (scales, weight_scales, out, rows, ring, 0, S)),
        (_consume, (scales, weight_scales, out, rows, ring, 1, S)),
        (_produce, (codes, weight, row_offsets, rows, counter, ring, S)),
    ], [4, 1], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS])  # fmt: skip


@lru_cache(maxsize=256)
def constants_of(weight: torch.Size, *, early: bool = False) -> GluonConstants:
    """Launch constants of the kernel for weights of shape [G, N, K]."""
    groups, columns, inner = weight
    return GluonConstants(
        K=inner, N=columns, NUM_GROUPS=groups, GROUPS_POW2=triton.next_power_of_2(groups), EARLY=early
    )


def launch(
    codes: torch.Tensor, scales: torch.Tensor, row_offsets: torch.Tensor, weight: torch.Tensor,
    weight_scales: torch.Tensor, out: torch.Tensor, *, early: bool = False, num_programs: int | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [R, N] for the rows there are, on a device of compute capability 9.0.

    All tensors are contiguous, of the shapes in the table of :mod:`moelink.rows.grouped_fp8`. ``early``: another
    product of these groups, which is not early, was launched, and one launch since. ``num_programs``: CTAs, in place of
    one for each SM.
    """
    if not out.numel():
        return
    flat = weight.view(-1, weight.shape[2])
    row_tiles = min(len(codes), triton.cdiv(len(codes), ROWS) + weight.shape[0])
    # The sums use FMAs by name; nothing else is fused.
    common.launch(
        grouped_gluon_kernel,
        (Block(codes, (PART_ROWS, BLOCK), IN_SHARED), scales, row_offsets, Block(flat, (BLOCK, BLOCK), IN_SHARED),
         weight_scales, out, len(codes)),
        constants_of(weight.shape, early=early), row_tiles * triton.cdiv(weight.shape[1], BLOCK * PARTS),
        absent=row_offsets, per_sm=1, num_programs=num_programs, counted=True, num_warps=4,
    )  # fmt: skip
