"""The product of few bf16 rows and a bf16 weight with fp32 sums: :mod:`moelink.rows.wide_product` as one kernel.

A program computes one tile of the output, ROWS x COLUMNS, by tensor cores. Few rows have few tiles, so the sums are cut
within a program: columns of a row are taken in steps of PARTS * CHUNK, part p of each step has the CHUNK columns from
p * CHUNK on, and the parts are the batch of a batched product, in which warps have parts of their own. At the end each
tile adds up its parts. For one or two rows this takes longer than FMAs: then a program has one column, and its sums
CHUNK parts. All this has the same order in every call with as many rows, and so the same bits.

A product of two bf16 numbers is exact in fp32. A library lets several CTAs share a sum of so few rows, and a second
launch adds their parts up.

Example: x = [[1, 2], [3, 4]] and weight = [[1, 1], [1, 0], [0, 2]] give out = [[3, 1, 4], [7, 3, 8]]. With 2 PARTS and
a CHUNK of 1, part 0 of the sums is [[1, 1, 0], [3, 3, 0]] and part 1 is [[2, 0, 4], [4, 0, 8]].
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moelink.arith import ceil_div
from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.launch.device import is_interpreted
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import common_kernel as common


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        rows, columns: of a tile of the output.
        parts: of a sum, side by side; 0 for one column and FMAs. chunk: columns of a row that a part takes at a time.
            Powers of two.
        num_warps, num_stages: of the compiler.
    """

    rows: int
    columns: int
    parts: int
    chunk: int
    num_warps: int
    num_stages: int


BY_FMA, SMALL, LARGE = Tiles(2, 1, 0, 1024, 4, 1), Tiles(8, 8, 8, 128, 8, 4), Tiles(16, 8, 4, 128, 4, 5)
"""Tiles of up to BY_FMA.rows rows; of more, as long as there are at most MOST_SMALL; of still more. A program of the
latter two has 96 KiB of shared memory, as GPUs of compute capability 8.0 and later do."""
MOST_SMALL = 128


@dataclass(frozen=True, repr=False, eq=False)
class WideConstants(Constants):
    """Launch constants of the kernel.

    Attributes:
        K, N: columns of a row and of the output.
        ROWS, COLUMNS, PARTS, CHUNK: as of :class:`Tiles`.
        FACTORS: the dtype of what is multiplied, fp32 interpreted, since the interpreter multiplies no bf16.
        DEPENDENT_LAUNCH: as of ``rows.common_kernel``.
    """

    K: int
    N: int
    ROWS: int
    COLUMNS: int
    PARTS: int
    CHUNK: int
    FACTORS: Any
    DEPENDENT_LAUNCH: bool = False


@triton.jit
def _by_fma(x, weight, out, rows, S: tl.constexpr):
    """Compute one column for all rows."""
    column = tl.program_id(0)
    row, place = tl.arange(0, S.ROWS)[:, None], tl.arange(0, S.CHUNK)[None, :]
    sums = tl.zeros([S.ROWS, S.CHUNK], tl.float32)
    for first in tl.static_range(0, S.K, S.CHUNK):
        exists = first + place < S.K
        by = tl.load(weight + column * S.K + first + place, mask=exists, other=0.0).to(tl.float32)
        mine = tl.load(x + row * S.K + first + place, mask=exists & (row < rows), other=0.0).to(tl.float32)
        sums += mine * by
    tl.store(out + row * S.N + column, tl.sum(sums, 1)[:, None], mask=row < rows)


@triton.jit
def _by_tensor_cores(x, weight, out, rows, S: tl.constexpr):
    """Compute tile p % A of columns and p // A of rows, with A tiles side by side."""
    ACROSS: tl.constexpr = (S.N + S.COLUMNS - 1) // S.COLUMNS
    row = tl.program_id(0) // ACROSS * S.ROWS + tl.arange(0, S.ROWS)
    column = tl.program_id(0) % ACROSS * S.COLUMNS + tl.arange(0, S.COLUMNS)
    # [parts, rows, columns of a row] and [parts, columns of a row, columns]
    first = tl.arange(0, S.PARTS)[:, None, None] * S.CHUNK
    place, across = first + tl.arange(0, S.CHUNK)[None, None, :], first + tl.arange(0, S.CHUNK)[None, :, None]
    mine, by = x + row[None, :, None] * S.K + place, weight + column[None, None, :] * S.K + across
    sums = tl.zeros([S.PARTS, S.ROWS, S.COLUMNS], tl.float32)
    for begin in range(0, S.K, S.PARTS * S.CHUNK):
        left = tl.load(mine + begin, mask=(row < rows)[None, :, None] & (begin + place < S.K), other=0.0)
        right = tl.load(by + begin, mask=(column < S.N)[None, None, :] & (begin + across < S.K), other=0.0)
        sums = tl.dot(left.to(S.FACTORS), right.to(S.FACTORS), sums, input_precision="ieee")
    at = row[:, None] * S.N + column[None, :]
    tl.store(out + at, tl.sum(sums, 0), mask=(row < rows)[:, None] & (column < S.N)[None, :])


@triton.jit(do_not_specialize=["rows"])
def wide_product_kernel(x, weight, out, rows, S: tl.constexpr):
    """See the module. Each program has one tile."""
    follow_previous_launch(S)
    if S.PARTS == 0:
        _by_fma(x, weight, out, rows, S)
    else:
        _by_tensor_cores(x, weight, out, rows, S)


def tiles_of(rows: int, columns: int) -> Tiles:
    """Return the tiles of an output of so many ``rows`` and ``columns``."""
    if rows <= BY_FMA.rows:
        return BY_FMA
    small = ceil_div(rows, SMALL.rows) * ceil_div(columns, SMALL.columns)
    return SMALL if small <= MOST_SMALL else LARGE


@lru_cache(maxsize=256)
def _constants(tiles: Tiles, columns: int, inner: int) -> WideConstants:
    return WideConstants(
        K=inner, N=columns, ROWS=tiles.rows, COLUMNS=tiles.columns, PARTS=tiles.parts, CHUNK=tiles.chunk,
        FACTORS=tl.float32 if is_interpreted() else tl.bfloat16,
    )  # fmt: skip


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tiles: Tiles | None = None) -> None:
    """Fill ``out`` [R, N] fp32 with few rows ``x`` [R, K] times ``weight`` [N, K] transposed, both bf16. All are
    contiguous. ``tiles``: in place of those that follow from R; BY_FMA for at most BY_FMA.rows rows."""
    (rows, inner), columns = x.shape, weight.shape[0]
    tiles = tiles or tiles_of(rows, columns)
    programs = ceil_div(rows, tiles.rows) * ceil_div(columns, tiles.columns)
    stages = min(2, tiles.num_stages) if torch.version.hip else tiles.num_stages  # AMD's have 64 KiB
    # Products are exact, so FMAs change no bit.
    common.launch(
        wide_product_kernel, (x, weight, out, rows), _constants(tiles, columns, inner), programs, absent=out,
        num_programs=programs, fused=True, num_warps=tiles.num_warps, num_stages=stages,
    )  # fmt: skip
