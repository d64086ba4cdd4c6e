"""The experts of few rows in one launch: gate and up, the activation that is quantised on its way, and down.

The three launches that this one takes the place of are :mod:`moelink.rows.grouped_fp8`,
:mod:`moelink.rows.activation_kernel` and the former again, and its arithmetic is theirs, bit for bit. With few rows the
weights take less time than the launches: each begins behind the last tile of the one before, and finds its groups anew.

Legend as of ``grouped_fp8``, with H columns of a token and I of what down multiplies. A *row tile* is up to 16 rows of a
group; number ``t`` counts them over all groups. It has ``2 I / 128`` tiles of gate and up, and ``H / 128`` of down.

CTAs take tiles by a *ticket*, an atomic counter: first those of gate and up of all row tiles, then those of down. Per
row tile there is a count of its tiles of gate and up that are stored::

    tile of gate and up:  stores its columns, then adds 1 to the count (release). The CTA that makes the count whole
                          (acquire) activates and quantises the rows, then adds 1 once more (release).
    tile of down:         waits until the count is whole plus 1 (acquire), then multiplies.

Why a wait ends: a CTA that waits has a ticket of down, so all tickets of gate and up are taken, by CTAs that run. These
wait for nothing before they have added to the counts. So it does not matter how many CTAs run at a time, nor what else
the device runs.

Why counts are right: a count is written after the stores of its CTA (a barrier of the CTA, then release), and read before
the loads that follow (acquire, then a barrier). The last CTA to end sets all counters to zero, which all others have
left; the next launch on the stream begins after that. So calls with the same counters must follow one another, as calls
of a communicator do.

Example: 2 groups of 3 and 0 rows, H = I = 128: 1 row tile, with tickets 0 and 1 for gate and up and 2 for down. CTA 0
takes ticket 0, CTA 1 ticket 1, CTA 0 ticket 2. The count goes from 0 to 2, by whichever CTA stores last, which then
activates 3 rows and makes it 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from moelink.arith import ceil_div
from moelink.formats import get_format
from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.launch.device import has_native_casts, is_interpreted
from moelink.kernels.launch.row_launch import Block
from moelink.kernels.numeric import round_to
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import common_kernel as common
from moelink.rows.activation_kernel import gated
from moelink.rows.grouped_fp8 import BLOCK, operand

_BLOCK = tl.constexpr(BLOCK)
ROWS, COLUMNS = 16, 128
"""Of a tile."""
AT_ONCE = 4
"""Rows that are activated at a time. Dispatch fills groups up to a multiple of it."""


@dataclass(frozen=True, repr=False, eq=False)
class ExpertsConstants(Constants):
    """Launch constants of the kernel.

    Attributes:
        H, I: columns of a token, and of what down multiplies. NUM_GROUPS: groups; GROUPS_POW2: the next power of two.
        BLOCKS_POW2: blocks of 128 in I, rounded up to a power of two.
        BLOCK_ROWS, BLOCK_COLUMNS, AT_ONCE: of this module. SWAPPED: as of ``grouped_fp8``; always true.
        N: columns of the product whose tile is stored.
        DESCRIPTORS: load weights through tensor descriptors. OPERANDS, NATIVE_CASTS: as of ``grouped_fp8``.
        CODE_FN, KIND, ALPHA, LIMIT: of the activation.
        DEPENDENT_LAUNCH: as of ``rows.common_kernel``.
    """

    H: int
    I: int
    NUM_GROUPS: int
    GROUPS_POW2: int
    BLOCKS_POW2: int
    DESCRIPTORS: bool
    OPERANDS: str
    NATIVE_CASTS: bool
    CODE_FN: Any
    KIND: str
    ALPHA: float
    LIMIT: float
    AT_ONCE: int = AT_ONCE
    BLOCK_ROWS: int = ROWS
    BLOCK_COLUMNS: int = COLUMNS
    SWAPPED: bool = True
    DEPENDENT_LAUNCH: bool = False


@triton.jit
def _row_tiles(row_offsets, rows, S: tl.constexpr):
    """The number of row tiles of each group and of those before it, [GROUPS_POW2]. Groups of 3, 0, 20 rows: 1, 1, 3."""
    groups = tl.arange(0, S.GROUPS_POW2)
    starts = tl.load(row_offsets + groups, mask=groups < S.NUM_GROUPS, other=0)
    ends = tl.load(row_offsets + groups + 1, mask=groups < S.NUM_GROUPS, other=0)
    return tl.cumsum(tl.cdiv(tl.minimum(ends, rows) - tl.minimum(starts, rows), S.BLOCK_ROWS), 0)


@triton.jit
def _place(number, last, row_offsets, rows, S: tl.constexpr):
    """``(group, first row, end)`` of row tile ``number``; ``last`` as of :func:`_row_tiles`."""
    before = last <= number
    group = tl.sum(before.to(tl.int32), 0)
    first = tl.load(row_offsets + group) + (number - tl.max(tl.where(before, last, 0), 0)) * S.BLOCK_ROWS
    end = tl.minimum(tl.load(row_offsets + group + 1), rows)
    return group, first, tl.minimum(first + S.BLOCK_ROWS, end)


@triton.jit
def _multiply(codes, scales, weight, weight_scales, out, rows, place, column_tile, K: tl.constexpr, N: tl.constexpr, S: tl.constexpr):
    """Compute one tile of a product with K columns of a row and N of the output, and store it."""
    KB: tl.constexpr = K // _BLOCK
    NB: tl.constexpr = (N + _BLOCK - 1) // _BLOCK
    group, first, end = place
    row = first + tl.arange(0, S.BLOCK_ROWS)
    present = tl.minimum(row, end - 1)
    column = column_tile * S.BLOCK_COLUMNS
    own = weight_scales + (group * NB + column // _BLOCK) * KB
    codes_at = codes + present.to(tl.int64)[:, None] * K + tl.arange(0, _BLOCK)[None, :]
    weight_row = group.to(tl.int64) * N + tl.minimum(column + tl.arange(0, S.BLOCK_COLUMNS), N - 1)
    sums = tl.zeros([S.BLOCK_COLUMNS, S.BLOCK_ROWS], tl.float32)
    # Scales are loaded a block ahead: a load that nothing prefetches would be waited for behind each product.
    scale, by_scale = tl.load(scales + present), tl.load(own)
    for k in range(KB):
        factor = scale * by_scale
        ahead = tl.minimum(k + 1, KB - 1)
        scale = tl.load(scales + ahead.to(tl.int64) * rows + present)
        by_scale = tl.load(own + ahead)
        block = operand(tl.load(codes_at + k * _BLOCK), S)
        if S.DESCRIPTORS:
            by = operand(weight.load([group * N + column, k * _BLOCK]), S)
        else:
            at = weight_row[:, None] * K + tl.arange(0, _BLOCK)[None, :]
            by = operand(tl.load(weight + at + k * _BLOCK), S)
        products = tl.dot(by, block.T, input_precision="ieee", out_dtype=tl.float32)
        # By name, as nothing else is fused: the activation's bits are torch's.
        sums = tl.math.fma(products, tl.broadcast_to(factor[None, :], products.shape), sums)
    place_of = column + tl.arange(0, S.BLOCK_COLUMNS)
    at = row.to(tl.int64)[:, None] * N + place_of[None, :]
    tl.store(out + at, round_to(sums.T, out.dtype.element_ty, S.NATIVE_CASTS), mask=(row < end)[:, None] & (place_of < N)[None, :])


@triton.jit
def _activate(between, inner, inner_scales, rows, place, S: tl.constexpr):
    """Activate and quantise the rows of a row tile, AT_ONCE at a time."""
    KB: tl.constexpr = S.I // _BLOCK
    _, first, end = place
    each = tl.arange(0, S.AT_ONCE * S.BLOCKS_POW2)
    for begin in range(first, end, S.AT_ONCE):
        row, block = begin + each // S.BLOCKS_POW2, each % S.BLOCKS_POW2
        here = (row < end) & (block < KB)
        inside = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        at = between + row.to(tl.int64)[:, None] * (2 * S.I) + inside
        gate = tl.load(at, mask=here[:, None], other=0.0).to(tl.float32)
        up = tl.load(at + S.I, mask=here[:, None], other=0.0).to(tl.float32)
        payload, scale = S.CODE_FN(gated(gate, up, S.KIND, S.ALPHA, S.LIMIT), 1.0, S.NATIVE_CASTS)
        payload = tl.reshape(payload, (S.AT_ONCE * S.BLOCKS_POW2, _BLOCK))
        tl.store(inner + row.to(tl.int64)[:, None] * S.I + inside, payload, mask=here[:, None])
        tl.store(inner_scales + block.to(tl.int64) * rows + row, scale, mask=here)


@triton.jit(do_not_specialize=["rows"])
def experts_kernel(
    codes, scales, row_offsets, gate_up, gate_up_scales, down, down_scales, between, inner, inner_scales, counters, out,
    rows, S: tl.constexpr,
):  # fmt: skip
    """See the module. ``counters``: [2 + row tiles] int32, zero: tickets, CTAs that have ended, and the counts."""
    follow_previous_launch(S)
    FIRST: tl.constexpr = 2 * S.I // S.BLOCK_COLUMNS
    SECOND: tl.constexpr = (S.H + S.BLOCK_COLUMNS - 1) // S.BLOCK_COLUMNS
    last = _row_tiles(row_offsets, rows, S)
    row_tiles = tl.max(last, 0)
    counts = counters + 2
    if S.OPERANDS == "fp8":
        codes_of_inner = inner.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        codes_of_inner = inner
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < row_tiles * (FIRST + SECOND):
        if ticket < row_tiles * FIRST:
            number = ticket // FIRST
            place = _place(number, last, row_offsets, rows, S)
            _multiply(codes, scales, gate_up, gate_up_scales, between, rows, place, ticket % FIRST, S.H, 2 * S.I, S)
            tl.debug_barrier()
            if tl.atomic_add(counts + number, 1, sem="acq_rel") == FIRST - 1:
                _activate(between, inner, inner_scales, rows, place, S)
                tl.debug_barrier()
                tl.atomic_add(counts + number, 1, sem="release")
        else:
            later = ticket - row_tiles * FIRST
            number = later // SECOND
            place = _place(number, last, row_offsets, rows, S)
            while tl.atomic_add(counts + number, 0, sem="acquire") <= FIRST:
                pass
            _multiply(codes_of_inner, inner_scales, down, down_scales, out, rows, place, later % SECOND, S.I, S.H, S)
        ticket = tl.atomic_add(counters, 1, sem="relaxed")
    if tl.atomic_add(counters + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counters, 0)
        tl.store(counters + 1, 0)
        for number in range(row_tiles):
            tl.store(counts + number, 0)


@lru_cache(maxsize=256)
def _constants(groups: int, hidden: int, intermediate: int, clamp: tuple[float, float] | None, device: torch.device) -> ExpertsConstants:
    native = has_native_casts(device)
    alpha, limit = clamp or (1.0, 1.0)
    return ExpertsConstants(
        H=hidden, I=intermediate, NUM_GROUPS=groups, GROUPS_POW2=triton.next_power_of_2(groups),
        BLOCKS_POW2=triton.next_power_of_2(intermediate // BLOCK), DESCRIPTORS=not is_interpreted(),
        OPERANDS="fp8" if native else "fp32" if is_interpreted() else "fp16", NATIVE_CASTS=native,
        CODE_FN=get_format("fp8_block128").codec().encode, KIND="clamped" if clamp else "silu", ALPHA=alpha, LIMIT=limit,
    )  # fmt: skip


def counters_for(rows: int, groups: int) -> int:
    """Return the number of counters for a buffer of ``rows`` rows."""
    return 2 + min(rows, ceil_div(rows, ROWS) + groups)


def launch(
    codes: torch.Tensor, scales: torch.Tensor, row_offsets: torch.Tensor, gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor], room: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    counters: torch.Tensor, out: torch.Tensor, clamp: tuple[float, float] | None = None, *, programs: int | None = None,
    num_stages: int = 4, per_sm: int = 2, num_warps: int = 4,
) -> None:  # fmt: skip
    """Fill ``out`` [R, H]. ``room``: (between [R, 2 I] of the dtype of ``out``, codes [R, I], scales [I / 128, R])."""
    groups, hidden, intermediate = down[0].shape
    rows = out.shape[0]
    S = _constants(groups, hidden, intermediate, clamp, out.device)
    native = S.OPERANDS == "fp8"
    kind = torch.float8_e4m3fn if native else torch.uint8
    between, inner, inner_scales = room

    def weight(of: torch.Tensor) -> Any:
        flat = of.view(kind).view(-1, of.shape[2])
        return Block(flat, (COLUMNS, BLOCK)) if S.DESCRIPTORS else flat

    row_tiles = counters_for(rows, groups) - 2
    common.launch(
        experts_kernel,
        (codes.view(kind), scales, row_offsets, weight(gate_up[0]), gate_up[1], weight(down[0]), down[1], between,
         inner.view(torch.uint8), inner_scales, counters, out, rows),
        S, row_tiles * (2 * intermediate // COLUMNS), absent=row_offsets, per_sm=per_sm, num_programs=programs, fused=False,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
