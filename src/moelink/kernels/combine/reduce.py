"""Reduce the rows that came home: the home role of combine, on the rank that owns the token.

Its steps for a token are ``wait_for_all_arrivals`` and ``reduce_and_copy_to_output``. ``kernels.combine.phases``
launches them separately, for all tokens.

CTAs share the tokens, and with few tokens also the blocks of columns. For its token a CTA waits for exactly that
token's rows: ``combine_flag`` of rank r, in the token's message slot there (``slot_of``, noted by dispatch's sender),
must have reached the call. The waits are acquires, so the rows are visible. CTA 0 waits for the ``combine_head`` of
every rank, whether or not that rank sends rows. CTA 0 gets tokens only where all CTAs are needed.

Once all CTAs are done the call is counted as received. The next launch then grants credit to every rank, which may
overwrite ``rows`` (``kernels.sync.credit``). So the next call cannot overtake this one. A rank that refused a call
counts it at once. Without sums other ranks may store the same rows in the next call; therefore the peers of a rank that
refused wait, before they finish, for the rows that they themselves sent to it.

Sums: the accumulator starts at +0, in fp32 (fp64 for fp64). It adds the sums of the ranks in ascending order, or
weighted rows in slot order; then the shared expert's row, ``shared=`` and the epilogue's tensor, in that order. It is
rounded once.

In allreduce mode nothing travels: rows are read where they are, and no signal is used.

Example: W = 3, token 5 went to ranks 0 and 2 (``slot_of[5] = [5, -1, 0]``): wait for flag (0, 5) and flag (2, 0), then
out = round(row(0, 5) + row(2, 5)).
"""

import triton
import triton.language as tl

from moelink.kernels.combine.arrivals import (
    awaited_slots,
    wait_for_all_arrivals,
    wait_for_inter_node_rows,
)
from moelink.kernels.combine.finish import finish, shared_expert_output
from moelink.kernels.combine.heads import meet_ranks
from moelink.kernels.combine.own_rows import find_own_rows, others_slots, own_sum
from moelink.kernels.combine.row_format import row_columns
from moelink.kernels.combine.send import weighted_sum
from moelink.kernels.combine.single_rows import rows_here, sum_or_store_rows
from moelink.kernels.nodes.collect import sum_of_levels, wait_for_levels
from moelink.kernels.nodes.internode import between_nodes_or
from moelink.kernels.nodes.levels import after_relaying
from moelink.kernels.numeric import only
from moelink.kernels.records import Piece
from moelink.kernels.sync.credit import count_read
from moelink.kernels.sync.dependent_launch import allow_next_launch
from moelink.kernels.sync.lamport_slots import is_small, sum_rows
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
def reduce_and_copy_to_output(ctx, inputs, slots, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Store a ``piece`` of the result of a token whose rows have all arrived."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mine = tl.load(ctx.table + ctx.me)
    slot = tl.max(tl.where(r == 0, slots, -1), 0)
    rows = notes.rows_of_message + tl.maximum(slot, 0).to(tl.int64) * S.SLOTS_PER_MESSAGE
    here = r < 0
    if not S.SENDS_SUMS:
        here = rows_here(ctx, mine, inputs, slots, token, numbers, S)
    for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, piece.parts * S.BLOCK_SIZE):
        c = c0 + tl.arange(0, S.BLOCK_SIZE)
        total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
        if not S.SENDS_SUMS:
            total = sum_or_store_rows(total, mine, inputs, rows, here, outputs, token, c0, numbers, S)
        elif S.ALLREDUCE:
            if slot >= 0:
                total = weighted_sum(
                    inputs.y, numbers.y_rows, inputs.row_weights, inputs.home_weights + token * S.TOPK, rows, c, S
                )
        elif S.TWO_LEVEL:
            total = sum_of_levels(ctx, slots, token, c0, S)
        else:
            for rank in tl.static_range(S.WORLD_SIZE):
                sent = tl.max(tl.where(r == rank, slots, -1), 0) >= 0
                place = tl.cast(rank * S.MAX_TOKENS + token, tl.int64)
                source = tl.multiple_of((mine + S.OFFSET_ROWS + place * S.ROW_BYTES).to(S.ROW_POINTER), 16)
                total += row_columns(source, c0, sent, S)
        if S.REDUCES:
            if S.FUSED_SHARED_EXPERT:
                total += shared_expert_output(inputs.y, numbers, token, c, S).to(S.SUM_DTYPE)
            finish(total, outputs, inputs, token, c, S)


@triton.jit
def wait_and_reduce(ctx, inputs, slots, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows and store its result, as :func:`gather_token` does. Rows come with flags."""
    ok = tl.full([], 1, tl.int32)
    if S.TWO_LEVEL:
        ok = wait_for_levels(ctx, slots, token, S)
    elif not S.ALLREDUCE:
        ok = wait_for_all_arrivals(ctx, slots, piece.part, piece.parts, S)
    if not S.SENDS_SUMS:
        if ok > 0:
            ok = between_nodes_or(ok, wait_for_inter_node_rows, (ctx, inputs.topk_ids, slots, token, numbers), S)
    if piece.is_last:
        allow_next_launch(S)
    if ok > 0:
        reduce_and_copy_to_output(ctx, inputs, slots, notes, outputs, numbers, token, piece, S)
        stamp_both(ctx, ROW_STORED, LAST_STORED, S)
    return ok


@triton.jit
def sum_rows_without_flags(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows while summing them, and store its result. Rows come without flags, in Lamport slots.

    An own row that stays is read before the wait, which hides it.
    """
    mine = own_block(ctx.control, S)
    ok = tl.full([], 1, tl.int32)
    if S.OWN_ROWS_STAY:
        slots = others_slots(slots, ctx.me, S)
    step = piece.parts * S.BLOCK_SIZE
    for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, step):
        if ok > 0:
            came = arrivals(ctx, ARRIVED, tl.arange(0, S.WORLD_SIZE_POW2), S)
            c = c0 + tl.arange(0, S.BLOCK_SIZE)
            if S.OWN_ROWS_STAY:
                beside = own_sum(inputs, notes, numbers.y_rows, own, c, S)
            ok, peer, total = sum_rows(mine, ctx.me, slots, token, c0, ctx.limit, came, S)
            if piece.is_last & (c0 + step >= S.HIDDEN_SIZE):
                allow_next_launch(S)
            if S.OWN_ROWS_STAY:
                total += beside.to(S.SUM_DTYPE)
            stamp_awaited(ctx, MESSAGE_SEEN, LAST_MESSAGE, slots, S)
            report_failure(ok, ctx, peer, _PHASE, ctx.call, ctx.call - 1, S)
            if ok > 0:
                if S.FUSED_SHARED_EXPERT:
                    total += shared_expert_output(inputs.y, numbers, token, c, S).to(S.SUM_DTYPE)
                finish(total, outputs, inputs, token, c, S)
                stamp_both(ctx, ROW_STORED, LAST_STORED, S)
    return ok


@triton.jit
def gather_beside_own_rows(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Do as :func:`wait_and_reduce` where own rows stay (``kernels.combine.own_rows``)."""
    mine = own_block(ctx.control, S)
    slots = others_slots(slots, ctx.me, S)
    place = tl.cast((1 - ctx.me) * S.MAX_TOKENS + token, tl.int64)
    source = tl.multiple_of((mine + S.OFFSET_ROWS + place * S.ROW_BYTES).to(S.ROW_POINTER), 16)
    ok = wait_for_all_arrivals(ctx, slots, piece.part, piece.parts, S)
    if piece.is_last:
        allow_next_launch(S)
    if ok > 0:
        for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, piece.parts * S.BLOCK_SIZE):
            c = c0 + tl.arange(0, S.BLOCK_SIZE)
            beside = own_sum(inputs, notes, numbers.y_rows, own, c, S)
            total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE) + row_columns(source, c0, tl.max(slots, 0) >= 0, S)
            total += beside.to(S.SUM_DTYPE)
            if S.FUSED_SHARED_EXPERT:
                total += shared_expert_output(inputs.y, numbers, token, c, S).to(S.SUM_DTYPE)
            finish(total, outputs, inputs, token, c, S)
        stamp_both(ctx, ROW_STORED, LAST_STORED, S)
    return ok


@triton.jit
def gather_token(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows and store a ``piece`` of its result. ``own`` names its own rows, where these stay.

    The number of tokens in the call decides whether rows come with flags. Returns OK, TIMED_OUT or POISONED.
    """
    ok = tl.full([], 1, tl.int32)
    small = is_small(ctx.control, numbers.num_tokens, ctx.call, S)
    if S.SENDS_SUMS and S.LAMPORT_TOKENS > 0:
        if small:
            ok = sum_rows_without_flags(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S)
    if small == 0:
        if S.OWN_ROWS_STAY:
            ok = gather_beside_own_rows(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S)
        else:
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
def load_slots(notes, token, exists, S: tl.constexpr):
    """Load the message slots [ranks] of ``token``. They are undefined if it does not exist, and past the last rank."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    return tl.load(notes.slot_of + token * S.WORLD_SIZE + r, mask=only(exists, r < S.WORLD_SIZE))


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
    own = tl.full([], -1, tl.int32)
    if S.OWN_ROWS_STAY:
        # Prefetch the numbers of own rows two parts ahead, and one: they take two loads, one after the other. If
        # dispatch brought no rows, or was not complete, its notes name no row.
        noted = tl.where(brought & (ok > 0), items, 0)
        near = load_slots(notes, first // parts, first < noted, S)
        far = load_slots(notes, (first + step) // parts, first + step < noted, S)
        next_own = find_own_rows(notes, near, ctx.me, first < noted, S)
    for i in range(first, items, step):
        token = i // parts
        if S.OWN_ROWS_STAY:
            own = next_own
            slots = tl.where(brought, near, -1)
            next_own = find_own_rows(notes, far, ctx.me, i + step < noted, S)
            near = far
            far = load_slots(notes, (i + 2 * step) // parts, i + 2 * step < noted, S)
        if ok > 0:
            if not S.OWN_ROWS_STAY:
                slots = awaited_slots(notes, token, brought, choices, S)
            piece = Piece(i % parts, parts, (i + step >= items) & (not S.TWO_LEVEL))
            ok = gather_token(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S)
    if S.TWO_LEVEL:
        if brought:
            ok = after_relaying(ok, program, ctx, _COLLECTED, _PHASE, S)
    if not S.ALLREDUCE:
        if (ok > 0) & brought:
            sem: tl.constexpr = "release" if S.LAMPORT_TOKENS > 0 else "relaxed"  # a release after zeros were stored
            count_read(ctx, _PHASE, program, num_programs, S, sem)
            stamp(ctx, TOLD, S)
