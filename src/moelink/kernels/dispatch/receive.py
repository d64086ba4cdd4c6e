"""Dispatch, receiver role: what each program of the receiving half does.

Every program waits for the ``counts`` of every source (all alike, so none waits for another of this launch), and
computes from the counts where rows go. Program 0 writes the offsets and totals. Each other program takes messages of
one source, whichever of its senders' next ones has arrived: wait for ``message_flag``, place the message. The waits are
acquires (``signals``), so what a source stored before its signal is seen.

CACHED: only the headers are waited for. They must name the call whose routing this is, the same one on every rank;
where rows go was found out there (``kernels.dispatch.row_offsets``, ``kernels.dispatch.unpack``). If that call brought
nothing, this one is none.

Once all programs have read what they wanted the call is counted as received; the next launch
tells every source so, which may then overwrite (``kernels.sync.credit``). A source that is a call ahead waits for just
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

from moelink.kernels.dispatch.padding import pad_rows, pad_tiles, who_pads
from moelink.kernels.dispatch.row_offsets import (
    columns_of,
    group_starts,
    header_word,
    malformed,
    tile_bases,
    wait_for_counts,
    write_nothing,
    write_plan,
)
from moelink.kernels.dispatch.unpack import place_group
from moelink.kernels.sync.credit import count_drained
from moelink.kernels.sync.quiesce import swallow_messages, wait_for_far
from moelink.kernels.sync.signals import (
    I32,
    I64,
    calls_made,
    first_stray,
    is_poisoned,
    note_malformed,
    note_refusal,
    odd_one_out,
    own_block,
    settle,
    wait_any,
)
from moelink.memory.protocol import (
    CODE_ABORT,
    CODE_OPTIONS,
    CODE_ROUTING,
    DISPATCH_RECEIVED,
    PHASE_DISPATCH,
)

_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_RECEIVED)
_REFUSED = tl.constexpr(CODE_ABORT)
_OPTIONS = tl.constexpr(CODE_OPTIONS)
_ROUTING = tl.constexpr(CODE_ROUTING)


@triton.jit
def place_messages(
    table, record, control, mine, source, lane, lanes, before, own, count, programs, most, starts, bases, tokens_out,
    scales_out, src_info, weights_out, topk_ids_out, rows_of_message, message_token, me, rank, num_local, shared_begin,
    shared_end, capacity, scale_rows, call, limit, S: tl.constexpr,
):  # fmt: skip
    """The ``lane``-th of ``lanes`` shares of the ``count`` messages of ``source``: wait for them and place them.

    A lane follows GATHER cursors, places whatever has arrived at any of them, and moves these on. There are C = lanes x
    GATHER cursors. With ``programs`` = 0 (each counted alone, and CACHED) messages arrive in any order, and each cursor
    takes every C-th. Otherwise they come in columns: one for each sending program, in which they arrive in order;
    columns do not wait for one another. With fewer columns than C several cursors share a column, each with every
    ``shares``-th message of it; with more, a cursor takes its ``turns`` columns in turn. A column has ``most`` messages
    at most.

    ``before``, ``own`` [LOOK]: rows of the sources before this one, and its own, for each local expert; CACHED: ``own``
    is that of all sources.

    Example: C = 4 and 2 columns of 3 messages: cursors 0, 1 take messages 0, 2 and 1 of column 0, cursors 2, 3 those of
    column 1. With 8 columns of 2 messages cursor 1 takes message 0 of columns 1 and 5, then message 1 of both.
    """
    base = starts + before
    if S.CACHED:
        programs = programs * 0
    elif S.RANK_LAYOUT:
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
    program, num_programs, table, record, control, tokens_out, scales_out, row_offsets, expert_ids, src_info,
    scales_offsets, weights_out, topk_ids_out, num_recv, overflow, counts_out, received, rows_of_message, message_token,
    routed, routed_counts, me, rank, num_local, num_groups, shared_begin, shared_end, capacity, scale_rows,
    counts_stride, status, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the receiver role. ``routed``, ``routed_counts``: ``received`` and ``counts_out`` of the
    call whose routing this is, which the message tensors are of, too (CACHED)."""
    call = calls_made(control, _ROLE) + 1
    mine = own_block(control, S)
    r = tl.arange(0, S.WP)
    mask = r < S.W
    noted = routed_counts + (rank if S.ALLREDUCE else 0)
    ok = -is_poisoned(record, control, S)
    if S.CACHED:
        ok = tl.where(tl.load(routed + 2 * S.W) != 0, -1, ok)
    # All but the first place: one source for each where they suffice, its messages to its programs in turn.
    others = tl.maximum(num_programs - 1, 1)
    number = program - tl.minimum(num_programs - 1, 1)
    source = tl.maximum(number, 0) % S.W
    lane = number // S.W
    sizes = tl.zeros([S.LOOK], tl.int32)
    before = tl.zeros([S.LOOK], tl.int32)
    own = tl.zeros([S.LOOK], tl.int32)
    if ok == 0:
        reads = status == 0
        if S.NODE < S.W:
            reads = status >= 0
        if reads:
            ok, peer, sizes, before, own = wait_for_counts(
                control, noted, counts_stride, source, me, num_local, call, limit, S
            )  # fmt: skip
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
        shared = shared_end - shared_begin
        starts, aligned, shared_rows = group_starts(sizes, shared, S)
        count, programs, most = columns_of(control, routed, source, S)
        refused = header_word(control, r, 0, 0, 1, S)
        messages = header_word(control, r, 1, 0, S.T, S)
        options = header_word(control, r, 5, 0, 0x7FFFFFFF, S)
        wrong = mask & ((refused != 0) | (options != S.OPTIONS))
        origin = options
        if S.CACHED:
            origin = header_word(control, r, 6, 0, 0x7FFFFFFF, S)
            wrong = wrong | (mask & (origin != tl.sum(tl.where(r == me, origin, 0), 0)))
        if tl.max(wrong.to(tl.int32), 0) > 0:
            if program == 0:
                write_nothing(
                    row_offsets, expert_ids, scales_offsets, num_recv, overflow, counts_out, received, rank,
                    num_local, num_groups, counts_stride, S,
                )  # fmt: skip
                peer = tl.min(tl.where(refused != 0, r, S.W), 0)
                if peer < S.W:
                    note_refusal(record, me, peer, _PHASE, call, _REFUSED)
                elif S.CACHED:
                    odd = first_stray(options, mask)
                    if odd < S.W:
                        note_refusal(record, me, odd, _PHASE, call, _OPTIONS)
                    else:
                        note_refusal(record, me, first_stray(origin, mask), _PHASE, call, _ROUTING)
                else:
                    odd = odd_one_out(options, mask, S.OPTIONS, S.W)
                    note_refusal(record, me, odd, _PHASE, call, _OPTIONS)
                if S.NODE < S.W:
                    ok = swallow_messages(
                        table, record, control, me, header_word(control, r, 1, 0, S.T, S),
                        header_word(control, r, 3, 0, S.SENDERS, S), call, limit, S,
                    )  # fmt: skip
        else:
            bases = starts
            if S.SCALES == 2:
                bases, _ = tile_bases(starts, aligned, shared_rows, capacity, S)
            if program == 0:
                note_malformed(control, r, malformed(control, routed, num_local, S))
                write_plan(
                    control, row_offsets, expert_ids, scales_offsets, num_recv, overflow, counts_out, received, noted,
                    routed, rank, num_local, num_groups, shared, capacity, counts_stride, call, S,
                )  # fmt: skip
            if S.NODE < S.W and not S.CACHED:
                cut = header_word(control, r, 3, 0, S.SENDERS, S)
                ok, peer, got = wait_for_far(mine, S.O_FIRSTS_FLAG, cut > 0, me, call, limit, S)
                settle(ok, table, record, control, me, peer, _PHASE, call, call, got, S)
            pad, pads = who_pads(program, num_programs, tl.max(messages, 0), num_local, S)
            if pad >= 0:
                if S.ALIGN > 1:
                    pad_rows(
                        tokens_out, scales_out, src_info, weights_out, sizes, starts, aligned, shared, shared_rows,
                        bases, num_local, pad, pads, capacity, scale_rows, S,
                    )  # fmt: skip
                if S.SCALES == 2 and not S.LATER:
                    pad_tiles(
                        scales_out, sizes, starts, aligned, shared, shared_rows, bases, num_local, pad, pads, capacity,
                        S,
                    )  # fmt: skip
            while (ok > 0) & (number >= 0) & (source < S.W):
                lanes = tl.cdiv(tl.maximum(others - source, 1), S.W)
                ok = place_messages(
                    table, record, control, mine, source, lane, lanes, before, own, count, programs, most, starts,
                    bases, tokens_out, scales_out, src_info, weights_out, topk_ids_out, rows_of_message, message_token,
                    me, rank, num_local, shared_begin, shared_end, capacity, scale_rows, call, limit, S,
                )  # fmt: skip
                source += others
                if (ok > 0) & (source < S.W):
                    ok, peer, again, before, own = wait_for_counts(
                        control, noted, counts_stride, source, me, num_local, call, limit, S
                    )  # fmt: skip
                    settle(ok, table, record, control, me, peer, _PHASE, call, call, call - 1, S)
                    count, programs, most = columns_of(control, routed, source, S)
    if ok > 0:
        count_drained(table, control, me, _PHASE, call, program, num_programs, S, "relaxed")
