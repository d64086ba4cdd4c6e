"""Grouped matrix product of fp8 rows and fp8 weights, both with their scales: ``out[r] = rows[r] @ weight[g].T``.

Legend: ``R`` rows of the buffer, ``K`` columns of a row, ``G`` groups, ``N`` columns of the output; ``kb`` counts
blocks of 128 along K and ``nb`` along N. Group g is rows ``row_offsets[g]`` to ``row_offsets[g + 1]``.

==================  ======================  ==========================================================================
tensor              shape                   contents
==================  ======================  ==========================================================================
``codes``           [R, K] e4m3             rows, as dispatch lays them out
``scales``          [K / 128, R] fp32       ``scales[kb, r]`` of elements kb * 128 to kb * 128 + 127 of row r
``weight``          [G, N, K] e4m3          weights
``weight_scales``   [G, nb, K / 128] fp32   one a block of 128 x 128
``out``             [R, N]                  bf16, fp16 or fp32
==================  ======================  ==========================================================================

With d the sum of the 128 products of codes of block kb::

    out[r, n] = sum over kb of d[r, n, kb] * (scales[kb, r] * weight_scales[g, n // 128, kb])

A d comes from the tensor cores; the sum over kb is fp32, outside of them (their accumulators of fp8 products keep about
14 bits on compute capability 9.0). It goes up in kb with all tiles. The order inside of a d is the tensor core's, so no
bits are promised between tiles, though tiles of 16 and of 64 rows gave the same bits on H200.

The number of rows of each group is read on the device. The kernel lists *tiles* of BLOCK_ROWS rows x BLOCK_COLUMNS
columns of the groups that it serves, those of ``least`` to ``most`` rows; program p of P computes tiles p, p + P, ...
and ends behind the last one. So two launches can share the groups, each with the tiles that suit its groups
(:class:`Settings`). Rows from ``row_offsets[G]`` on are not written. Nothing waits for anything; there is no protocol.

*Swapped* tiles multiply weight by transposed rows, because the tensor core takes at least 64 rows of its left operand
at a time: few rows then waste nothing.

Example: G = 2, N = K = 128, row_offsets [0, 4, 4], all codes 1, all scales of rows 2, all of weights 0.5: rows 0 to 3
of ``out`` are 128 * (2 * 0.5) = 128, others as they were. With BLOCK_ROWS = 16 and BLOCK_COLUMNS = 64 the one group
with rows has 1 x 2 tiles; of 4 programs, 0 and 1 compute one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from moelink.arith import ceil_div
from moelink.formats.device import e4m3_to_f32
from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.launch.device import has_native_casts, is_interpreted
from moelink.kernels.launch.row_launch import Block
from moelink.kernels.numeric import round_to
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import common_kernel as common

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)


@dataclass(frozen=True, repr=False, eq=False)
class GroupedConstants(Constants):
    """Launch constants of the kernel.

    Attributes:
        K, N: columns of a row and of the output. NUM_GROUPS: groups; GROUPS_POW2: the next power of two.
        BLOCK_ROWS: rows of a tile. BLOCK_COLUMNS: columns of a part of a tile, 64 or 128; PARTS: parts side by side, 1
            or 2, which share the loaded rows.
        BAND: tiles of rows that the tiles in progress span before they go on to the next columns.
        SWAPPED: multiply weight by transposed rows. DESCRIPTORS: load tiles through tensor descriptors.
        OPERANDS: the type of the factors: "fp8" if the device can, else "fp16" (exact), or "fp32" interpreted.
        HAS_BIAS: add biases, of weights in mxfp4 (:mod:`moelink.rows.grouped_mxfp4`).
        NATIVE_CASTS: the device's narrow conversions. DEPENDENT_LAUNCH: as of ``rows.common_kernel``.
    """

    K: int
    N: int
    NUM_GROUPS: int
    GROUPS_POW2: int
    BLOCK_ROWS: int
    BLOCK_COLUMNS: int
    PARTS: int
    BAND: int
    SWAPPED: bool
    DESCRIPTORS: bool
    OPERANDS: str
    NATIVE_CASTS: bool
    HAS_BIAS: bool = False
    DEPENDENT_LAUNCH: bool = False


@triton.jit
def operand(block, S: tl.constexpr):
    """Convert codes to the type of the factors."""
    if S.OPERANDS == "fp8":
        return block
    elif S.OPERANDS == "fp16":
        return e4m3_to_f32(block, S.NATIVE_CASTS).to(tl.float16)
    else:
        return e4m3_to_f32(block, S.NATIVE_CASTS)


@triton.jit
def _load_block(source, row, first_row, k, S: tl.constexpr):
    """Codes [rows, 128] of block ``k``: rows ``first_row`` on by descriptor, or rows ``row``, which all exist."""
    if S.DESCRIPTORS:
        block = source.load([first_row, k * _BLOCK])
    else:
        at = row.to(tl.int64)[:, None] * S.K + tl.arange(0, _BLOCK)[None, :]
        block = tl.load(source + at + k * _BLOCK)
    return operand(block, S)


@triton.jit
def _times(rows, weight, S: tl.constexpr):
    """The sums of products of a block: [columns, rows] if swapped, else [rows, columns]."""
    if S.SWAPPED:
        return tl.dot(weight, rows.T, input_precision="ieee", out_dtype=tl.float32)
    else:
        return tl.dot(rows, weight.T, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def _along_rows(values, S: tl.constexpr):
    """A value of each row of a tile, shaped to fit its sums."""
    return values[None, :] if S.SWAPPED else values[:, None]


@triton.jit
def store_part(out, sums, row, end, first_column, S: tl.constexpr):
    """Round a part of a tile and store it, as far as its rows and columns exist."""
    if S.SWAPPED:
        sums = sums.T
    column = first_column + tl.arange(0, S.BLOCK_COLUMNS)
    at = row.to(tl.int64)[:, None] * S.N + column[None, :]
    mask = (row < end)[:, None] & (column < S.N)[None, :]
    tl.store(out + at, round_to(sums, out.dtype.element_ty, S.NATIVE_CASTS), mask=mask)


@triton.jit
def tile_in_group(number, row_tiles, S: tl.constexpr):
    """``(row tile, column tile)`` of tile ``number`` of a group with ``row_tiles`` x (column tiles) tiles.

    Tiles go down the rows of a band, then to the next column. 3 row tiles, 2 column tiles, BAND 2:
    (0, 0), (1, 0), (0, 1), (1, 1), then (2, 0), (2, 1).
    """
    COLUMN_TILES: tl.constexpr = (S.N + S.BLOCK_COLUMNS * S.PARTS - 1) // (S.BLOCK_COLUMNS * S.PARTS)
    band = number // (S.BAND * COLUMN_TILES)
    inside = number - band * (S.BAND * COLUMN_TILES)
    height = tl.minimum(row_tiles - band * S.BAND, S.BAND)
    return band * S.BAND + inside % height, inside // height


@triton.jit
def count_tiles(row_offsets, rows, least, most, S: tl.constexpr):
    """The number of tiles of each group and of those before it, [GROUPS_POW2], of groups of ``least`` to ``most`` rows.

    Groups of 3, 0 and 20 rows, ``most`` 16, BLOCK_ROWS 16, two tiles of columns: 2, 2, 2.
    """
    COLUMN_TILES: tl.constexpr = (S.N + S.BLOCK_COLUMNS * S.PARTS - 1) // (S.BLOCK_COLUMNS * S.PARTS)
    groups = tl.arange(0, S.GROUPS_POW2)
    starts = tl.load(row_offsets + groups, mask=groups < S.NUM_GROUPS, other=0)
    ends = tl.load(row_offsets + groups + 1, mask=groups < S.NUM_GROUPS, other=0)
    sizes = tl.minimum(ends, rows) - tl.minimum(starts, rows)
    served = (sizes >= least) & (sizes <= most)
    return tl.cumsum(tl.where(served, tl.cdiv(sizes, S.BLOCK_ROWS) * COLUMN_TILES, 0), 0)


@triton.jit
def find_tile(tile, last_tiles, row_offsets, rows, S: tl.constexpr):
    """``(group, (row tile, column tile), (first row, end))`` of tile number ``tile``; ``last_tiles`` as of
    :func:`count_tiles`."""
    before = last_tiles <= tile
    group = tl.sum(before.to(tl.int32), 0)
    start = tl.load(row_offsets + group)
    end = tl.minimum(tl.load(row_offsets + group + 1), rows)
    inside = tile - tl.max(tl.where(before, last_tiles, 0), 0)
    return group, tile_in_group(inside, tl.cdiv(end - start, S.BLOCK_ROWS), S), (start, end)


@triton.jit
def _tile(codes, scales, weight, weight_scales, out, rows, group, place, bounds, S: tl.constexpr):
    """Compute one tile: ``place`` is (row tile, column tile) in ``group``, which has rows ``bounds``."""
    KB: tl.constexpr = S.K // _BLOCK
    NB: tl.constexpr = (S.N + _BLOCK - 1) // _BLOCK
    first_row = bounds[0] + place[0] * S.BLOCK_ROWS
    row = first_row + tl.arange(0, S.BLOCK_ROWS)
    present = tl.minimum(row, bounds[1] - 1)
    first_column = place[1] * (S.BLOCK_COLUMNS * S.PARTS)
    column = first_column + tl.arange(0, S.BLOCK_COLUMNS)
    weight_row = group.to(tl.int64) * S.N + tl.minimum(column, S.N - 1)
    first_scale = weight_scales + (group * NB + first_column // _BLOCK) * KB
    shape: tl.constexpr = [S.BLOCK_COLUMNS, S.BLOCK_ROWS] if S.SWAPPED else [S.BLOCK_ROWS, S.BLOCK_COLUMNS]
    sums = tl.zeros(shape, tl.float32)
    next_scale = first_scale
    if S.PARTS == 2:
        next_column = tl.minimum(column + S.BLOCK_COLUMNS, S.N - 1)
        next_row = group.to(tl.int64) * S.N + next_column
        # The last column tile may have no second part: then this is the scale of the last column.
        next_block = tl.minimum(first_column + S.BLOCK_COLUMNS, S.N - 1) // _BLOCK
        next_scale = weight_scales + (group * NB + next_block) * KB
        next_sums = tl.zeros(shape, tl.float32)
    # Scales are loaded a block ahead: a load that nothing prefetches would be waited for behind each product.
    scale, by_scale, next_by = tl.load(scales + present), tl.load(first_scale), tl.load(next_scale)
    for k in range(KB):
        factor, next_factor = scale * by_scale, scale * next_by
        ahead = tl.minimum(k + 1, KB - 1)
        scale = tl.load(scales + ahead.to(tl.int64) * rows + present)
        by_scale = tl.load(first_scale + ahead)
        block = _load_block(codes, present, first_row, k, S)
        by = _load_block(weight, weight_row, group * S.N + first_column, k, S)
        sums += _times(block, by, S) * _along_rows(factor, S)
        if S.PARTS == 2:
            next_by = tl.load(next_scale + ahead)
            by = _load_block(weight, next_row, group * S.N + first_column + S.BLOCK_COLUMNS, k, S)
            next_sums += _times(block, by, S) * _along_rows(next_factor, S)
    store_part(out, sums, row, bounds[1], first_column, S)
    if S.PARTS == 2:
        store_part(out, next_sums, row, bounds[1], first_column + S.BLOCK_COLUMNS, S)


@triton.jit(do_not_specialize=["rows", "least", "most"])
def grouped_fp8_kernel(codes, scales, row_offsets, weight, weight_scales, out, rows, least, most, S: tl.constexpr):
    """See the module."""
    follow_previous_launch(S)
    last_tiles = count_tiles(row_offsets, rows, least, most, S)
    for tile in range(tl.program_id(0), tl.max(last_tiles, 0), tl.num_programs(0)):
        group, place, bounds = find_tile(tile, last_tiles, row_offsets, rows, S)
        _tile(codes, scales, weight, weight_scales, out, rows, group, place, bounds, S)


@dataclass(frozen=True)
class Tiles:
    """How a launch computes the groups that it serves.

    Attributes:
        rows: of a tile, a power of two, 16 to 128.
        columns: of a part of a tile, 64 or 128.
        parts: side by side in a tile, 1 or 2.
        swapped: weight is the left operand.
        descriptors: tiles are loaded through tensor descriptors, by the TMA unit if there is one.
        num_warps, num_stages: of the compiled kernel; stages are the blocks of K in flight.
        programs: of each SM.
        band: tiles of rows that tiles in progress span.
        registers: the most of a thread; None for the compiler's choice.
    """

    rows: int
    columns: int = 128
    parts: int = 1
    swapped: bool = False
    descriptors: bool = True
    num_warps: int = 4
    num_stages: int = 4
    programs: int = 1
    band: int = 16
    registers: int | None = None


@dataclass(frozen=True)
class Settings:
    """The launches of a product.

    Groups of up to ``most_few`` rows are computed by tiles ``few``, larger ones by ``many`` in a launch of its own.
    A buffer of at most ``most_few`` rows has one launch.
    """

    few: Tiles = Tiles(64, num_warps=4, num_stages=3, programs=3)
    many: Tiles = Tiles(128, parts=2, num_warps=8, num_stages=4)
    most_few: int = 64


INTERPRETED = Settings(
    few=Tiles(16, 64, swapped=True, descriptors=False), many=Tiles(32, 128, parts=2, descriptors=False, band=2),
    most_few=8,
)  # fmt: skip
"""Small tiles, of which small tests have several."""
HOPPER = Settings()
BLACKWELL = Settings(many=Tiles(128, num_warps=8, num_stages=4))
"""Of compute capability 10.x: accumulators come out of tensor memory into registers, which two parts overflow."""
SMALL_CACHE = Settings(
    few=Tiles(16, 64, swapped=True, descriptors=False, num_stages=3, programs=2),
    many=Tiles(64, 64, descriptors=False, num_stages=3, programs=2),
)
"""Of other devices that multiply fp8: about 100 KB of shared memory an SM."""
WITHOUT_FP8 = Settings(
    few=Tiles(16, 64, descriptors=False, num_stages=2, programs=2),
    many=Tiles(64, 64, descriptors=False, num_stages=2, programs=2),
)
"""Of devices whose matrix units do not take these codes."""


def default_settings(device: torch.device) -> Settings:
    """Return the settings of launches on ``device``."""
    if is_interpreted():
        return INTERPRETED
    if not has_native_casts(device):
        return WITHOUT_FP8
    return {9: HOPPER, 10: BLACKWELL}.get(torch.cuda.get_device_capability(device)[0], SMALL_CACHE)


def constants_of(
    tiles: Tiles, weight: torch.Size, *, operands: str, native: bool, biased: bool = False
) -> GroupedConstants:
    """Launch constants of the kernel for weights of shape [G, N, K]."""
    groups, columns, inner = weight
    return GroupedConstants(
        K=inner, N=columns, NUM_GROUPS=groups, GROUPS_POW2=triton.next_power_of_2(groups), BLOCK_ROWS=tiles.rows,
        BLOCK_COLUMNS=tiles.columns, PARTS=tiles.parts, BAND=tiles.band, SWAPPED=tiles.swapped,
        DESCRIPTORS=tiles.descriptors, OPERANDS=operands, NATIVE_CASTS=native, HAS_BIAS=biased,
    )  # fmt: skip


@dataclass(frozen=True)
class OneLaunch:
    """A launch of a product with weights of one shape.

    Attributes:
        most: rows of the groups that it serves; 0 for all groups that are larger than ``least``.
        column_tiles: of a row of tiles.
        operands: dtype that codes are taken in.
        rows, columns: shapes of the blocks that a load takes; None without descriptors.
    """

    constants: GroupedConstants
    tiles: Tiles
    least: int
    most: int
    column_tiles: int
    operands: torch.dtype
    rows: tuple[int, int] | None
    columns: tuple[int, int] | None


@lru_cache(maxsize=256)
def launches_of(
    settings: Settings | None, weight: torch.Size, device: torch.device, biased: bool = False
) -> tuple[OneLaunch, OneLaunch]:
    """Return the launches for groups of few rows and of many."""
    settings, native = settings or default_settings(device), has_native_casts(device)
    operands = "fp8" if native else "fp32" if is_interpreted() else "fp16"
    few, many = (
        OneLaunch(
            constants_of(tiles, weight, operands=operands, native=native, biased=biased), tiles, least, most,
            ceil_div(weight[1], tiles.columns * tiles.parts), torch.float8_e4m3fn if native else torch.uint8,
            (tiles.rows, BLOCK) if tiles.descriptors else None, (tiles.columns, BLOCK) if tiles.descriptors else None,
        )
        for tiles, least, most in (
            (settings.few, 1, settings.most_few), (settings.many, settings.most_few + 1, 0),
        )
    )  # fmt: skip
    return few, many


def launch(
    codes: torch.Tensor, scales: torch.Tensor, row_offsets: torch.Tensor, weight: torch.Tensor,
    weight_scales: torch.Tensor, out: torch.Tensor, settings: Settings | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [R, N] for the rows there are. All tensors are contiguous, of the shapes in the module's table."""
    launch_tiles(grouped_fp8_kernel, (codes, scales, row_offsets, weight, weight_scales, out), weight.shape, settings)


def launch_tiles(
    kernel: Any, tensors: Sequence[torch.Tensor], shape: torch.Size, settings: Settings | None, biased: bool = False
) -> None:
    """Launch ``kernel`` for groups of few rows and of many, with ``tensors`` as :func:`launch` takes them; the weights
    are [G, N, K], which is ``shape``, or have it in another form."""
    codes, scales, row_offsets, weight, weight_scales, out = tensors
    rows = out.shape[0]
    if not rows or not shape[1]:
        return
    launches = launches_of(settings, shape, out.device, biased)
    few = launches[0]
    if few.operands != codes.dtype:
        codes = codes.view(few.operands)
    if weight.dtype == torch.float8_e4m3fn:
        weight = weight.view(few.operands).view(-1, shape[2])
    for one in launches if rows > few.most else launches[:1]:
        tiles = one.tiles
        left: Any = codes if one.rows is None else Block(codes, one.rows)
        right: Any = weight if one.columns is None else Block(weight, one.columns)
        # A group begins at most one tile that is not full.
        row_tiles = min(rows, ceil_div(rows, tiles.rows) + shape[0])
        bounded = {} if tiles.registers is None else {"maxnreg": tiles.registers}
        # The sum over kb uses FMAs: the kernel was tuned with them, and promises no bits.
        common.launch(
            kernel, (left, scales, row_offsets, right, weight_scales, out, rows, one.least, one.most or rows),
            one.constants, row_tiles * one.column_tiles, absent=row_offsets, per_sm=tiles.programs, fused=True,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **bounded,
        )  # fmt: skip
