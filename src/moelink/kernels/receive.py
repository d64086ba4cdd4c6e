"""Dispatch, receiver role: what each program of the receiving half does.

Every program waits for the ``counts`` of every source (all alike, so none waits for another of this launch), and
computes from the counts where rows go. Program 0 writes the offsets and totals. Each other program takes messages of
one source, whichever of its senders' next ones has arrived: wait for ``message_flag``, place the message. The waits are
acquires (``signals``), so what a source stored before its signal is seen.

The last program to finish knows that all have read what they wanted and counts the call as received; the next launch
tells every source so, which may then overwrite (``kernels.drained``). A source that is a call ahead waits for just
that, and one that is behind has not been answered yet: no call overtakes another.

A row's place: start of its group (sizes rounded up to ALIGN) + rows that lower source ranks send to that expert +
its position, which came with the message. Hence source ranks ascend inside a group, then tokens, then slots.

Example: 2 local experts, counts from ranks 0 and 1 [[2, 1], [1, 0]], ALIGN 4: group sizes [3, 1], row_offsets
[0, 4, 8]. Rank 1's first pair of expert 0 (position 0) goes to row 0 + 2 + 0 = 2. Row 3 and rows 5-7 are padding.

Nothing that came over the wire becomes an address unchecked: an id, position or count out of range drops the row, and
the source's bit in the control word MALFORMED says so to the host.
"""

import triton
import triton.language as tl

from moelink.kernels.drained import count_drained
from moelink.kernels.numeric import only
from moelink.kernels.padding import load_scales, pad_rows, pad_tiles, store_scales
from moelink.kernels.plan import (
    columns_of,
    group_starts,
    header_word,
    malformed,
    sum_rows,
    tile_bases,
    wait_for_counts,
    write_nothing,
    write_plan,
)
from moelink.kernels.signals import (
    I32,
    I64,
    is_poisoned,
    note_malformed,
    note_refusal,
    odd_one_out,
    own_block,
    settle,
    wait_any,
)
from moelink.kernels.swallow import swallow_messages, wait_for_far
from moelink.protocol import (
    CODE_ABORT,
    CODE_OPTIONS,
    DISPATCH_RECEIVED,
    PHASE_DISPATCH,
    ROW_ABSENT,
    ROW_DROPPED,
)

_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_RECEIVED)
_REFUSED = tl.constexpr(CODE_ABORT)
_OPTIONS = tl.constexpr(CODE_OPTIONS)
_ABSENT = tl.constexpr(ROW_ABSENT)
_DROPPED = tl.constexpr(ROW_DROPPED)


@triton.jit
def _row(values, g):
    """Row ``g`` of ``values`` [GATHER, N], none of them below -1."""
    return tl.max(tl.where((tl.arange(0, values.shape[0]) == g)[:, None], values, -1), 0)


@triton.jit
def _element(values, q):
    """Element ``q`` of ``values`` [N], none of them below -1, as a scalar."""
    return tl.max(tl.where(tl.arange(0, values.shape[0]) == q, values, -1), 0)


@triton.jit
def _load_words(mine, at, block, S: tl.constexpr):
    """Words of block ``block`` of the message numbered ``at``; nothing for -1."""
    c = block * S.BLOCK + tl.arange(0, S.BLOCK)
    message = mine + S.O_MESSAGES + at.to(tl.int64) * S.MESSAGE
    return tl.load(tl.multiple_of(message.to(S.WORD_P), 16) + c, mask=only(at >= 0, c < S.NWORDS), other=0)


@triton.jit
def place_group(
    control, mine, source, slot, valid, base, sizes, starts, bases, tokens_out, scales_out, src_info, weights_out,
    topk_ids_out, rows_of_message, message_token, me, rank, num_local, shared_begin, shared_end, capacity, scale_rows,
    S: tl.constexpr,
):  # fmt: skip
    """Copy messages ``slot`` [GATHER] of ``source``, those that are ``valid``, to their rows, and note for combine
    where they are.

    ``base`` [LP]: first row of this source in each expert's group; ``sizes`` [LP]: its rows there. Layout "rank":
    ``base`` is the first row of this source. What is small is read for all of them at once, and each one's payload
    and scales while the one before is stored.
    """
    at = source * S.T + slot
    number = tl.where(valid, at, -1)
    words = _load_words(mine, _element(number, 0), 0, S)
    scales = number
    if S.SW > 0:
        scales = load_scales(mine, _element(number, 0), S)
    message = mine + S.O_MESSAGES + at.to(tl.int64) * S.MESSAGE
    token = tl.load((message + S.M_TOKEN).to(I32), mask=valid, other=0)
    label = rank if S.ALLREDUCE else source
    q = tl.arange(0, S.RP)
    every = valid[:, None] & (q >= 0)[None, :]
    strange = (token < 0) | (token >= S.T)
    shape: tl.constexpr = (S.GATHER, S.RP)
    if S.RANK_LAYOUT:
        k = tl.arange(0, S.KP)
        row = (base + slot)[:, None] + q[None, :]
        keep = every & (row < capacity)
        tl.store(rows_of_message + at[:, None] + q[None, :], tl.where(keep, row, _DROPPED), mask=every)
        info = src_info + row * 3
        tl.store(info + 2, tl.zeros(shape, tl.int32) - 1, mask=keep)
        named = valid[:, None] & (k < S.K)[None, :]
        local = tl.load((message + S.M_IDS).to(I32)[:, None] + k[None, :], mask=named, other=-1)
        known = (local >= -1) & (local < num_local)
        note_malformed(control, source, named & (strange[:, None] | (known == 0)))
        local = tl.where(known, local, -1)
        here = named & (base + slot < capacity)[:, None]
        cell = (base + slot).to(tl.int64)[:, None] * S.K + k[None, :]
        tl.store(topk_ids_out + cell, local, mask=here)
        if S.WEIGHTS:
            w = tl.load((message + S.M_WEIGHTS).to(S.WEIGHT_P)[:, None] + k[None, :], mask=named, other=0.0)
            tl.store(weights_out + cell, tl.where(local >= 0, w, 0.0), mask=here)
        inner = row
        block = row
    else:
        mask = valid[:, None] & (q < S.K)[None, :]
        expert = tl.load((message + S.M_IDS).to(I32)[:, None] + q[None, :], mask=mask, other=-1)
        position = tl.load((message + S.M_POSITIONS).to(I32)[:, None] + q[None, :], mask=mask, other=0)
        named = (expert >= 0) & (expert < num_local)
        e = tl.reshape(tl.where(named, expert, 0), (S.GATHER * S.RP,))
        row = tl.reshape(tl.gather(base, e, 0), shape) + position
        placed = named & (position >= 0) & (position < tl.reshape(tl.gather(sizes, e, 0), shape))
        known = placed | (expert == -1)
        note_malformed(control, source, mask & (strange[:, None] | (known == 0)))
        keep = placed & (row < capacity)
        tl.store(
            rows_of_message + at.to(tl.int64)[:, None] * S.K + q[None, :],
            tl.where(keep, row, tl.where(named, _DROPPED, _ABSENT)), mask=mask,
        )  # fmt: skip
        inner = row - tl.reshape(tl.gather(starts, e, 0), shape)
        block = tl.reshape(tl.gather(bases, e, 0), shape)
        if S.SHARED:
            own = valid & (token >= shared_begin) & (token < shared_end)
            own = own[:, None] & (q == S.K)[None, :] & (tl.zeros(shape, tl.int32) + source == me)
            number_own = tl.broadcast_to((token - shared_begin)[:, None], shape)
            row = tl.where(own, number_own, row)
            keep = keep | (own & (row < capacity))
            inner = tl.where(own, row, inner)
            block = tl.where(own, 0, block)
        info = src_info + row * 3
        tl.store(info + 2, tl.broadcast_to(tl.where(q < S.K, q, -1)[None, :], shape), mask=keep)
        if S.WEIGHTS:
            w = tl.load((message + S.M_WEIGHTS).to(S.WEIGHT_P)[:, None] + q[None, :], mask=mask, other=1.0)
            tl.store(weights_out + row, w, mask=keep)
    tl.store(info, tl.zeros(shape, tl.int32) + label, mask=keep)
    tl.store(info + 1, tl.broadcast_to(token[:, None], shape), mask=keep)
    tl.store(message_token + at, token, mask=valid)

    to_rows = tl.where(keep, row, -1)
    blocks: tl.constexpr = (S.NWORDS + S.BLOCK - 1) // S.BLOCK
    for j in tl.static_range(S.GATHER * blocks):
        following = words
        following_scales = scales
        if j + 1 < S.GATHER * blocks:
            behind = _element(number, (j + 1) // blocks)
            following = _load_words(mine, behind, (j + 1) % blocks, S)
            if S.SW > 0 and (j + 1) % blocks == 0:
                following_scales = load_scales(mine, behind, S)
        c = j % blocks * S.BLOCK + tl.arange(0, S.BLOCK)
        places = _row(to_rows, j // blocks)
        present = (places >= 0).to(tl.int32)
        nth = tl.cumsum(present, 0) - present
        for n in range(0, tl.sum(present, 0)):  # of a message's rows few are here: its other experts are elsewhere
            place = tl.max(tl.where((present > 0) & (nth == n), places, 0), 0)
            to = tokens_out.to(S.WORD_P, bitcast=True) + place.to(tl.int64) * S.NWORDS
            tl.store(to + c, words, mask=c < S.NWORDS)
        if S.SW > 0 and j % blocks == 0:
            store_scales(
                scales, places, _row(inner, j // blocks), _row(block, j // blocks), scales_out, scale_rows, S
            )  # fmt: skip
        words = following
        scales = following_scales


@triton.jit
def place_messages(
    table, record, control, mine, source, lane, lanes, before, own, count, programs, most, starts, bases, tokens_out,
    scales_out, src_info, weights_out, topk_ids_out, rows_of_message, message_token, me, rank, num_local, shared_begin,
    shared_end, capacity, scale_rows, call, limit, S: tl.constexpr,
):  # fmt: skip
    """The ``lane``-th of ``lanes`` shares of the ``count`` messages of ``source``: wait for them and place them.

    A lane follows GATHER cursors, places whatever has arrived at any of them, and moves these on. There are C = lanes x
    GATHER cursors. With ``programs`` = 0 (few tokens) messages arrive in any order, and each cursor takes every C-th.
    Otherwise they come in columns: one for each sending program, in which they arrive in order; columns do not wait for
    one another. With fewer columns than C several cursors share a column, each with every ``shares``-th message of it;
    with more, a cursor takes its ``turns`` columns in turn. A column has ``most`` messages at most.

    ``before``, ``own`` [LP]: rows of the sources before this one, and its own, for each local expert.

    Example: C = 4 and 2 columns of 3 messages: cursors 0, 1 take messages 0, 2 and 1 of column 0, cursors 2, 3 those of
    column 1. With 8 columns of 2 messages cursor 1 takes message 0 of columns 1 and 5, then message 1 of both.
    """
    base = starts + before
    if S.RANK_LAYOUT:
        r = tl.arange(0, S.WP)
        base = tl.sum(tl.where(r < source, header_word(control, r, 1, 0, S.T, S), 0), 0)
    firsts = (mine + S.O_FIRSTS).to(I32) + source * (S.SENDERS + 1)
    cursors = lanes * S.GATHER
    cursor = lane + tl.arange(0, S.GATHER) * lanes
    turns = tl.full([], 1, tl.int32)
    shares = turns
    if programs > 0:
        # An acquire of a word that was stored after the firsts: whoever has it reads these, too.
        word = tl.atomic_add((mine + S.O_COUNTS).to(I64) + source * S.CW + 4, 0, sem="acquire", scope="sys")
        most = tl.minimum(tl.maximum((word & 0xFFFFFFFF).to(tl.int32), 0), S.T)
        tl.debug_barrier()
        turns = tl.cdiv(programs, cursors)
        shares = tl.minimum(tl.maximum(cursors // programs, 1), tl.maximum(most, 1))
        last = tl.where(cursor < programs * shares, tl.cdiv(most, shares) * turns, 0)
    else:
        last = tl.cdiv(tl.maximum(count - cursor, 0), cursors)
    at = tl.zeros([S.GATHER], tl.int32)
    ok = tl.full([], 1, tl.int32)
    while (ok > 0) & (tl.max(last - at, 0) > 0):
        there = at < last
        slot = cursor + at * cursors
        if programs > 0:
            column = cursor // shares + at % turns * cursors
            there = there & (column < programs)
            begin = tl.load(firsts + column, mask=there, other=0)
            end = tl.load(firsts + column + 1, mask=there, other=0)
            slot = begin + at // turns * shares + cursor % shares
            there = there & (slot < end)
        inside = (slot >= 0) & (slot < count)
        note_malformed(control, source, there & (inside == 0))
        there = there & inside
        ready = there
        if tl.max(there.to(tl.int32), 0) > 0:
            slot = tl.where(there, slot, 0)
            flags = (mine + S.O_MESSAGE_FLAG).to(I64) + (source * S.T + slot)
            ok, got = wait_any(flags, there, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK)
            settle(ok, table, record, control, me, source, _PHASE, call, call, tl.max(got, 0), S)
            ready = there & (got >= call)
            if ok > 0:
                place_group(
                    control, mine, source, slot, ready, base, own, starts, bases, tokens_out, scales_out, src_info,
                    weights_out, topk_ids_out, rows_of_message, message_token, me, rank, num_local, shared_begin,
                    shared_end, capacity, scale_rows, S,
                )  # fmt: skip
        at += (ready | ((at < last) & (there == 0))).to(tl.int32)
    return ok


@triton.jit
def receive(
    table, record, control, tokens_out, scales_out, row_offsets, expert_ids, src_info, scales_offsets, weights_out,
    topk_ids_out, num_recv, overflow, counts_out, received, rows_of_message, message_token, me, rank, num_local,
    num_groups, shared_begin, shared_end, capacity, scale_rows, counts_stride, status, program, num_programs, limit,
    S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the receiver role."""
    call = tl.load(control + _ROLE) + 1
    mine = own_block(control, S)
    r = tl.arange(0, S.WP)
    mask = r < S.W
    ok = -is_poisoned(record, control, S)
    if ok == 0:
        reads = status == 0
        if S.NODE < S.W:
            reads = status >= 0
        if reads:
            ok, peer = wait_for_counts(control, me, call, num_local, limit, S)
            settle(ok, table, record, control, me, peer, _PHASE, call, call, call - 1, S)
        else:
            # A rank that refuses reads nothing, so it drains at once; each peer stores for one call after the other.
            ok += 1
    if status != 0:
        ok += 0
        if S.NODE < S.W:
            if (ok > 0) & (program == 0):
                ok = swallow_messages(
                    table, record, control, me, header_word(control, r, 1, 0, S.T, S),
                    header_word(control, r, 3, 0, S.SENDERS, S), call, limit, S,
                )  # fmt: skip
    elif ok <= 0:
        if program == 0:
            write_nothing(
                row_offsets, expert_ids, scales_offsets, num_recv, overflow, counts_out, received, rank, num_local,
                num_groups, counts_stride, S,
            )  # fmt: skip
    else:
        # All but the first place: one source for each where they suffice, its messages to its programs in turn.
        others = tl.maximum(num_programs - 1, 1)
        number = program - tl.minimum(num_programs - 1, 1)
        source = tl.maximum(number, 0) % S.W
        sizes, before, own = sum_rows(control, source, num_local, S)
        count, programs, most = columns_of(control, source, S)
        refused = header_word(control, r, 0, 0, 1, S)
        options = header_word(control, r, 5, 0, 0x7FFFFFFF, S)
        wrong = mask & ((refused != 0) | (options != S.OPTIONS))
        if tl.max(wrong.to(tl.int32), 0) > 0:
            if program == 0:
                write_nothing(
                    row_offsets, expert_ids, scales_offsets, num_recv, overflow, counts_out, received, rank,
                    num_local, num_groups, counts_stride, S,
                )  # fmt: skip
                peer = tl.min(tl.where(refused != 0, r, S.W), 0)
                if peer < S.W:
                    note_refusal(record, me, peer, _PHASE, call, _REFUSED)
                else:
                    odd = odd_one_out(options, mask, S.OPTIONS, S.W)
                    note_refusal(record, me, odd, _PHASE, call, _OPTIONS)
                if S.NODE < S.W:
                    ok = swallow_messages(
                        table, record, control, me, header_word(control, r, 1, 0, S.T, S),
                        header_word(control, r, 3, 0, S.SENDERS, S), call, limit, S,
                    )  # fmt: skip
        else:
            shared = shared_end - shared_begin
            starts, aligned, shared_rows = group_starts(sizes, shared, S)
            bases = starts
            if S.SCALES == 2:
                bases, _ = tile_bases(starts, aligned, shared_rows, capacity, S)
            if program == 0:
                note_malformed(control, r, malformed(control, num_local, S))
                write_plan(
                    control, row_offsets, expert_ids, scales_offsets, num_recv, overflow, counts_out, received, rank,
                    num_local, num_groups, shared, capacity, counts_stride, S,
                )  # fmt: skip
            if S.NODE < S.W:
                cut = header_word(control, r, 3, 0, S.SENDERS, S)
                ok, peer, got = wait_for_far(mine, S.O_FIRSTS_FLAG, cut > 0, me, call, limit, S)
                settle(ok, table, record, control, me, peer, _PHASE, call, call, got, S)
            while (ok > 0) & (number >= 0) & (source < S.W):
                ok = place_messages(
                    table, record, control, mine, source, number // S.W,
                    tl.cdiv(tl.maximum(others - source, 1), S.W), before, own, count, programs, most, starts, bases,
                    tokens_out, scales_out, src_info, weights_out, topk_ids_out, rows_of_message, message_token, me,
                    rank, num_local, shared_begin, shared_end, capacity, scale_rows, call, limit, S,
                )  # fmt: skip
                source += others
                if source < S.W:
                    again, before, own = sum_rows(control, source, num_local, S)
                    count, programs, most = columns_of(control, source, S)
            if S.ALIGN > 1:
                pad_rows(
                    tokens_out, scales_out, src_info, weights_out, sizes, starts, aligned, shared, shared_rows,
                    bases, num_local, program, num_programs, capacity, scale_rows, S,
                )  # fmt: skip
            if S.SCALES == 2:
                pad_tiles(
                    scales_out, sizes, starts, aligned, shared, shared_rows, bases, num_local, program, num_programs,
                    capacity, S,
                )  # fmt: skip
    if ok > 0:
        count_drained(table, control, me, _PHASE, call, num_programs, S)
