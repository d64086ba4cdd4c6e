"""Send expert outputs home: the expert role of combine (``send_tokens_back``).

Each CTA takes messages of one home rank that dispatch brought, in slot order. For each message it writes to row ``me``
of ``rows`` at the home rank, at the message's *token*, the sum of the rows that the message filled here, or without
pre-reduction each of these rows (``kernels.combine.single_rows``). Then it publishes ``combine_flag[slot] = call``
there, a release after the rows that the flag announces. Sums of a small call travel without flags
(``kernels.sync.lamport_slots``). A rank is not one of its own homes where its own rows stay
(``kernels.combine.own_rows``).

With few tokens a message's columns travel in S.PARTS_PER_ROW parts. Each part has its own flag and, as far as the CTAs
suffice, its own CTA, because one CTA that sums all columns takes several memory latencies. CTA 0 then sends no rows
unless it is the only CTA, because it tells heads (``kernels.combine.heads``).

Before its first store a CTA waits for every home rank's credit for the previous call, and for nothing else, so no call
overtakes another (docs/protocol.md, C1).

Sums: the accumulator starts at +0, slots ascend, each product is rounded before it is added (no fused multiply-add),
and the sum is rounded once to the row's dtype, or encoded in the combine format (``kernels.combine.row_format``). A
slot of another rank, a row dropped for ``capacity`` and a row number out of range contribute nothing.

Example: topk 3, a message with rows [4, -1, 9] and weights w[4] = .5, w[9] = 2: the row sent is .5 y[4] + 2 y[9].
"""

import triton
import triton.language as tl

from moelink.kernels.combine.heads import is_refused, tell_heads
from moelink.kernels.combine.present_rows import send_present_rows
from moelink.kernels.combine.row_format import store_columns
from moelink.kernels.combine.single_rows import send_rows_one_by_one
from moelink.kernels.nodes.internode import direct_or_staged, intra_node_only
from moelink.kernels.nodes.levels import first_stop, in_one_level, in_two_levels, place_at_stop
from moelink.kernels.nodes.past import put_row_past, staged_past
from moelink.kernels.nodes.put_rows import put_kept, put_row
from moelink.kernels.numeric import only
from moelink.kernels.records import Message, Share
from moelink.kernels.sync.credit import grant_credits, poll_once, wait_for_credits
from moelink.kernels.sync.lamport_slots import is_small, place_of_sum, store_sum
from moelink.kernels.sync.signals import I64, context_of, count_arrival, own_block, publish
from moelink.memory.protocol import COMBINE_BYTES, COMBINE_SENT, PHASE_COMBINE
from moelink.tracing.device.stamps import (
    FIRST_STORE,
    IDS_READ,
    LAST_PUBLISHED,
    PUBLISHED,
    TOLD,
    stamp,
    stamp_after,
    stamp_both,
    stamp_first,
    traced_if,
)

_PHASE = tl.constexpr(PHASE_COMBINE)
_ROLE = tl.constexpr(COMBINE_SENT)
_BYTES = tl.constexpr(COMBINE_BYTES)


@triton.jit
def weighted_row(y, y_rows, row_weights, home_weight, row, c, S: tl.constexpr):
    """Return row ``row`` of ``y`` at columns ``c`` times its weight, or zeros where it is not below ``y_rows``: a
    summand of :func:`weighted_sum`. ``home_weight``: a pointer to the weight of its slot."""
    keep = (row >= 0) & (row < y_rows)
    source = y + row.to(tl.int64) * S.HIDDEN_SIZE
    part = tl.load(source + c, mask=only(keep, c < S.HIDDEN_SIZE), other=0.0, eviction_policy=S.EVICTION).to(
        S.SUM_DTYPE
    )
    if S.HAS_ROW_WEIGHTS:
        part = part * tl.load(row_weights + row, mask=keep, other=0.0)
    elif S.HAS_HOME_WEIGHTS:
        part = part * tl.load(home_weight, mask=keep, other=0.0)
    return part


@triton.jit
def weighted_sum(y, y_rows, row_weights, home_weights, rows, c, S: tl.constexpr):
    """Sum over slots, at columns ``c``, the rows that ``rows`` names (a pointer to S.SLOTS_PER_MESSAGE row numbers), in
    S.SUM_DTYPE.

    Weights are those of the rows, or (``home_weights``: a pointer to as many) those of the token's slots.
    """
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
    for k in tl.static_range(S.SLOTS_PER_MESSAGE):
        total += weighted_row(y, y_rows, row_weights, home_weights + k, tl.load(rows + k), c, S)
    return total


@triton.jit
def send_columns(to, flip, part, valid, y, y_rows, row_weights, rows, S: tl.constexpr):
    """Store part ``part`` of the sum of a message's rows to the row at ``to``, if ``valid``.

    Its bits are inverted if ``flip`` is -1.
    """
    for c0 in tl.static_range(0, S.HIDDEN_SIZE, S.PARTS_PER_ROW * S.BLOCK_SIZE):
        c = c0 + part * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        total = weighted_sum(y, y_rows, row_weights, row_weights, rows, c, S)
        if S.ENCODE_FN is not None:
            store_columns(to, c0 + part * S.BLOCK_SIZE, total, valid, S)
        else:
            store_sum(to, c, total, valid, flip, S)


@triton.jit
def send_message_back(ctx, home, peer, message, share, small, inputs, y_rows, slot_begin, S: tl.constexpr):
    """Send a ``share`` of the rows of ``message`` to rank ``peer``, if it is valid; its block is at address ``home``,
    or with two levels that of its collector on this node.

    Returns how many rows travel; they are counted with part 0.
    """
    mine = own_block(ctx.control, S)
    place = place_at_stop(peer, ctx.me, S)
    last = peer
    peer = first_stop(peer, ctx.me, S)
    slot = message.slot
    token = message.token
    valid = message.valid
    rows = message.rows
    y = inputs.y
    moved = (valid & (share.begin == 0)).to(tl.int32)
    if S.SENDS_SUMS:
        address = home + S.OFFSET_ROWS + tl.cast(place * S.MAX_TOKENS + token, tl.int64) * S.ROW_BYTES
        address = direct_or_staged(
            address, mine, peer, ctx.me, S.OFFSET_STAGED_ROWS, S.MAX_TOKENS, slot, S.ROW_BYTES, S
        )
        address, flip, valid = place_of_sum(home, address, token, valid, small, ctx.me, S)
        address = staged_past(address, ctx, last, token, S)
        to = tl.multiple_of(address.to(S.ROW_POINTER), 16)
        if S.PARTS_PER_ROW == 1:
            send_columns(to, flip, 0, valid, y, y_rows, inputs.row_weights, rows, S)
        else:
            for part in range(share.begin, share.begin + share.count):
                send_columns(to, flip, part, valid, y, y_rows, inputs.row_weights, rows, S)
        word = mine + S.OFFSET_COMBINE_FLAG + tl.cast(ctx.me * S.MAX_TOKENS + slot, tl.int64) * 8
        in_one_level(put_row, (ctx, mine, address, ctx.me * S.MAX_TOKENS + token, word, peer, valid), S)
        in_two_levels(put_row_past, (ctx, address, last, token, slot, valid), S)
    else:
        moved *= send_rows_one_by_one(ctx, home, peer, message, share, inputs, y_rows, slot_begin, S)
    return moved


@triton.jit
def send_rows_home(ctx, inputs, notes, home, lane, lanes, numbers, S: tl.constexpr):
    """Send the rows of every ``lanes``-th message of rank ``home``, from the ``lane``-th, and publish their flags.

    Where messages travel in parts, send every ``lanes``-th share of a message; ``spread`` CTAs share a message, and
    ``spread`` divides S.PARTS_PER_ROW.
    """
    stop = first_stop(home, ctx.me, S)
    block = tl.load(ctx.table + stop)
    mine = own_block(ctx.control, S)
    moved = tl.full([], 0, tl.int32)
    p = tl.arange(0, S.PARTS_POW2)
    flags = (block + S.OFFSET_COMBINE_FLAG).to(I64) + place_at_stop(home, ctx.me, S) * S.MAX_TOKENS * S.PARTS_PER_ROW
    small = is_small(ctx.control, tl.load(notes.received + home * 2 + 1), ctx.call, S)
    if S.PRESENT_ROWS:
        moved += send_present_rows(ctx, inputs, notes, home, lane, lanes, numbers, S)
    elif S.PARTS_PER_ROW == 1:
        for slot in range(lane, tl.load(notes.received + home * 2), lanes):
            at = home * S.MAX_TOKENS + slot
            token = tl.load(notes.message_token + at)
            stamp_after(ctx, IDS_READ, token + p * 0, S)
            valid = (token >= 0) & (token < S.MAX_TOKENS)
            if valid:
                rows = notes.rows_of_message + at.to(tl.int64) * S.SLOTS_PER_MESSAGE
                moved += send_message_back(
                    ctx, block, home, Message(slot, token, valid, rows), Share(0, 1), small, inputs, numbers.y_rows,
                    numbers.slot_begin, S,
                )  # fmt: skip
                stamp_first(ctx, FIRST_STORE, S)
            else:
                in_one_level(put_kept, (ctx, mine, tl.zeros([S.TOPK_POW2], tl.int32), home, slot, True), S)
                in_two_levels(put_row_past, (ctx, block, home, 0, slot, False), S)
            if small == 0:
                publish(
                    flags + slot + p,
                    intra_node_only(p < 1, stop, ctx.me, S),
                    tl.zeros([S.PARTS_POW2], tl.int64) + ctx.call,
                )
            stamp_both(ctx, PUBLISHED, LAST_PUBLISHED, S)
    else:
        parts = S.PARTS_PER_ROW // numbers.spread
        item = lane
        more = item < S.MAX_TOKENS * numbers.spread
        while more:
            slot = item // numbers.spread
            begin = item % numbers.spread * parts
            at = home * S.MAX_TOKENS + slot
            # The number of messages is read beside the message, not before it, and a slot without a message takes
            # no branch. So the loads of row numbers wait for nothing.
            count = tl.load(notes.received + home * 2)
            token = tl.load(notes.message_token + at)
            rows = notes.rows_of_message + at.to(tl.int64) * S.SLOTS_PER_MESSAGE
            there = slot < count
            seen = traced_if(ctx, there, S)
            stamp_after(seen, IDS_READ, token + p * 0, S)
            valid = there & (token >= 0) & (token < S.MAX_TOKENS)
            moved += send_message_back(
                ctx, block, home, Message(slot, tl.where(valid, token, 0), valid, rows), Share(begin, parts), small,
                inputs, tl.where(valid, numbers.y_rows, 0), numbers.slot_begin, S,
            )  # fmt: skip
            stamp_first(seen, FIRST_STORE, S)
            if small == 0:
                shared = only(there, p < parts)
                publish(
                    flags + (slot * S.PARTS_PER_ROW + begin) + p, shared, tl.zeros([S.PARTS_POW2], tl.int64) + ctx.call
                )
            stamp_both(seen, PUBLISHED, LAST_PUBLISHED, S)
            item += lanes
            more = item < count * numbers.spread
    if (stop != ctx.me) & (moved > 0):
        tl.atomic_add(ctx.control + _BYTES, moved.to(tl.int64) * S.ROW_BYTES, sem="relaxed", scope="gpu")


@triton.jit
def nth_home(i, me, S: tl.constexpr):
    """Return the ``i``-th rank that rank ``me`` sends rows home to. No two ranks begin with the same one.

    Example: rank 2 of 4 sends to ranks 2, 3, 0, 1; and rank 1 of 2, whose own rows stay, to rank 0.
    """
    return (i + S.OWN_ROWS_STAY + me) % S.WORLD_SIZE


@triton.jit
def send_tokens_back(program, num_programs, peers, inputs, notes, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the expert role. ``notes.received`` says whether the dispatch brought anything at all."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    call = ctx.call
    credits = poll_once(peers.control, _PHASE, call, S)
    failed = tl.load(notes.received + 2 * S.WORLD_SIZE) | is_refused(peers.control, call, numbers.slot_begin)
    if failed == 0:
        if program == 0:
            grant_credits(peers.table, peers.control, numbers.me, S)
        ok = wait_for_credits(credits, ctx, _PHASE, S)
        if ok > 0:
            if program == 0:
                tell_heads(ctx, notes.received, numbers.status, S)
            # With few tokens all but the first CTA send rows: what the first publishes must arrive before it goes on.
            apart: tl.constexpr = 1 if S.PARTS_PER_ROW > 1 else 0
            others = tl.maximum(num_programs - apart, 1)
            number = program - tl.minimum(num_programs - 1, apart)
            if (numbers.status == 0) & (number >= 0):
                # One home rank for each CTA where the CTAs suffice.
                homes: tl.constexpr = S.WORLD_SIZE - S.OWN_ROWS_STAY
                for i in range(number % homes, homes, others):
                    lanes = tl.cdiv(tl.maximum(others - i, 1), homes)
                    send_rows_home(ctx, inputs, notes, nth_home(i, numbers.me, S), number // homes, lanes, numbers, S)
            count_arrival(peers.control, _ROLE, program, num_programs, "relaxed")
            stamp(ctx, TOLD, S)
