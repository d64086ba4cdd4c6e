"""Reduce the rows that came home: the home role of combine, on the rank that owns the token.

CTAs share the tokens, and with few tokens also the blocks of columns. For its token a CTA waits for exactly that
token's rows (``kernels.combine.arrivals``), sums them and stores the result. CTA 0 checks that all ranks make this call
(``kernels.combine.heads``); it gets tokens only where all CTAs are needed. ``kernels.combine.phases`` launches these
steps separately, for all tokens.

Once all CTAs are done the call is counted as received (``kernels.sync.credit``), so the next call cannot overtake this
one.

Sums: the accumulator starts at +0, in fp32 (fp64 for fp64). It adds the sums of the ranks in ascending order, or
weighted rows in slot order; then the shared expert's row, ``shared=`` and the epilogue's tensor, in that order. It is
rounded once.

Example: W = 3, token 5 went to ranks 0 and 2 (``slot_of[5] = [5, -1, 0]``): wait for flag (0, 5) and flag (2, 0), then
out = round(row(0, 5) + row(2, 5)).
"""

import triton
import triton.language as tl

from moelink.kernels.combine.arrivals import awaited_slots, wait_for_rows
from moelink.kernels.combine.finish import finish
from moelink.kernels.combine.heads import meet_ranks
from moelink.kernels.combine.own_rows import remote_slots, sum_own_rows, with_own_row
from moelink.kernels.combine.present_rows import gather_present_rows
from moelink.kernels.combine.row_format import row_columns
from moelink.kernels.combine.single_rows import rows_here, sum_or_store_rows
from moelink.kernels.nodes.level_rows import sum_of_levels
from moelink.kernels.nodes.levels import after_relaying
from moelink.kernels.records import Lane, Piece
from moelink.kernels.sync.credit import count_read
from moelink.kernels.sync.dependent_launch import allow_next_launch
from moelink.kernels.sync.lamport_slots import is_small, sender_at, sum_rows
from moelink.kernels.sync.signals import context_of, own_block, report_failure
from moelink.memory.protocol import COMBINE_COLLECTED, COMBINE_RECEIVED, PHASE_COMBINE
from moelink.tracing.device.stamps import (
    ARRIVED,
    LAST_MESSAGE,
    LAST_STORED,
    MESSAGE_SEEN,
    ROW_STORED,
    TOLD,
    arrivals,
    stamp,
    stamp_awaited,
    stamp_both,
)
from moelink.tuning import MANY_TOKENS

_PHASE = tl.constexpr(PHASE_COMBINE)
_ROLE = tl.constexpr(COMBINE_RECEIVED)
_COLLECTED = tl.constexpr(COMBINE_COLLECTED)
_MANY_TOKENS = tl.constexpr(MANY_TOKENS)


@triton.jit
def sum_of_rows(ctx, inputs, notes, slots, token, c0, numbers, S: tl.constexpr):
    """Sum columns [c0, c0 + S.BLOCK_SIZE) of a token's rows, which have all arrived, ranks in ascending order."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mine = own_block(ctx.control, S)
    own = sum_own_rows(inputs, notes, slots, ctx.me, token, c0 + tl.arange(0, S.BLOCK_SIZE), numbers, S)
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
    for i in tl.static_range(S.WORLD_SIZE - S.OWN_ROWS_STAY - S.ALLREDUCE):
        rank = sender_at(i, ctx.me, S)
        sent = tl.max(tl.where(r == rank, slots, -1), 0) >= 0
        place = tl.cast(rank * S.MAX_TOKENS + token, tl.int64)
        source = tl.multiple_of((mine + S.OFFSET_ROWS + place * S.ROW_BYTES).to(S.ROW_POINTER), 16)
        total += row_columns(source, c0, sent, S)
    return with_own_row(total, own, S)


@triton.jit
def reduce_and_copy_to_output(ctx, inputs, slots, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Store a ``piece`` of the result of a token whose rows have all arrived."""
    here = rows_here(ctx, inputs, slots, token, numbers, S)
    for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, piece.parts * S.BLOCK_SIZE):
        if not S.SENDS_SUMS:
            total = sum_or_store_rows(ctx, inputs, notes, slots, here, outputs, token, c0, numbers, S)
        elif S.TWO_LEVEL:
            total = sum_of_levels(ctx, slots, token, c0, S)
        else:
            total = sum_of_rows(ctx, inputs, notes, slots, token, c0, numbers, S)
        if S.REDUCES:
            finish(total, outputs, inputs, token, c0 + tl.arange(0, S.BLOCK_SIZE), numbers, S)


@triton.jit
def wait_and_reduce(ctx, inputs, slots, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows and store its result, as :func:`gather_token` does. Rows come with flags."""
    ok = wait_for_rows(ctx, inputs, remote_slots(slots, ctx.me, S), token, piece, numbers, S)
    if piece.is_last:
        allow_next_launch(S)
    if ok > 0:
        reduce_and_copy_to_output(ctx, inputs, slots, notes, outputs, numbers, token, piece, S)
        stamp_both(ctx, ROW_STORED, LAST_STORED, S)
    return ok


@triton.jit
def sum_rows_without_flags(ctx, inputs, slots, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows while summing them, and store its result. Rows come without flags, in Lamport slots.

    An own row that stays is read before the wait, which hides it.
    """
    mine = own_block(ctx.control, S)
    ok = tl.full([], 1, tl.int32)
    awaited = remote_slots(slots, ctx.me, S)
    step = piece.parts * S.BLOCK_SIZE
    for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, step):
        if ok > 0:
            came = arrivals(ctx, ARRIVED, tl.arange(0, S.WORLD_SIZE_POW2), S)
            c = c0 + tl.arange(0, S.BLOCK_SIZE)
            own = sum_own_rows(inputs, notes, slots, ctx.me, token, c, numbers, S)
            ok, peer, total = sum_rows(mine, ctx.me, awaited, token, c0, ctx.limit, came, S)
            is_last = piece.is_last & (c0 + step >= S.HIDDEN_SIZE)
            if is_last:
                allow_next_launch(S)
            total = with_own_row(total, own, S)
            stamp_awaited(ctx, MESSAGE_SEEN, LAST_MESSAGE, awaited, S)
            report_failure(ok, ctx, peer, _PHASE, ctx.call, ctx.call - 1, S)
            if ok > 0:
                finish(total, outputs, inputs, token, c, numbers, S)
                stamp_both(ctx, ROW_STORED, LAST_STORED, S)
    return ok


@triton.jit
def gather_token(ctx, inputs, slots, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows and store a ``piece`` of its result.

    The number of tokens in the call decides whether rows come with flags. Returns OK, TIMED_OUT or POISONED.
    """
    ok = tl.full([], 1, tl.int32)
    small = is_small(ctx.control, numbers.num_tokens, ctx.call, S)
    if S.SENDS_SUMS and S.LAMPORT_TOKENS > 0:
        if small:
            ok = sum_rows_without_flags(ctx, inputs, slots, notes, outputs, numbers, token, piece, S)
    if small == 0:
        ok = wait_and_reduce(ctx, inputs, slots, notes, outputs, numbers, token, piece, S)
    return ok


@triton.jit
def parts_of_token(num_tokens, num_programs, S: tl.constexpr):
    """Return into how many parts of its columns a token is divided: all blocks if the CTAs suffice, else 1.

    It is also all blocks with up to MANY_TOKENS tokens whose rows come without flags: each part has its own wait, so
    only one part of the last row is left to do when it arrives. More tokens are read faster as a whole.
    """
    blocks = (S.HIDDEN_SIZE + S.BLOCK_SIZE - 1) // S.BLOCK_SIZE
    divided = num_tokens * blocks <= num_programs
    if S.LAMPORT_TOKENS > 0:
        divided = divided | (num_tokens <= _MANY_TOKENS)
    return tl.where(divided, blocks, 1)


@triton.jit
def gather_home(program, num_programs, peers, inputs, outputs, notes, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the home role."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    ok, brought, choices = meet_ranks(ctx, program, notes, numbers, S)
    parts = parts_of_token(numbers.num_tokens, num_programs, S)
    items = numbers.num_tokens * parts
    # Where there are CTAs to spare, the first one sums nothing, because it waits for the heads.
    spare = (num_programs > items).to(tl.int32)
    step = tl.maximum(num_programs - spare, 1)
    first = tl.where(program < spare, items, program - spare)
    if S.PRESENT_ROWS and S.OWN_ROWS_STAY:
        if ok > 0:
            share = Lane(program, num_programs)
            ok = gather_present_rows(ctx, inputs, outputs, notes, numbers, brought, choices, share, S)
    else:
        for i in range(first, items, step):
            token = i // parts
            if ok > 0:
                slots = awaited_slots(ctx, notes, token, brought, choices, S)
                piece = Piece(i % parts, parts, (i + step >= items) & (not (S.TWO_LEVEL or S.NUMBERS_IN_TURN)))
                ok = gather_token(ctx, inputs, slots, notes, outputs, numbers, token, piece, S)
    ok = after_relaying(ok, brought & (program == 0), ctx, _COLLECTED, _PHASE, S)
    if not S.ALLREDUCE:
        if (ok > 0) & brought:
            sem: tl.constexpr = "release" if S.LAMPORT_TOKENS > 0 else "relaxed"  # a release after zeros were stored
            count_read(ctx, _PHASE, program, num_programs, S, sem)
            stamp(ctx, TOLD, S)
