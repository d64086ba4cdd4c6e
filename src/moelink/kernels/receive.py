"""Dispatch, receiver role: what each program of the receiving half does.

Every program waits for the ``counts_flag`` of every source (program 0 .. R - 1 alike, so none waits for another of
this launch), and computes from the counts where rows go. Program 0 writes the offsets and totals. Then the programs
share the chunks of all sources, in the order in which senders produce them: wait for ``chunk_flag``, and place each
message of the chunk. The waits are acquires (``signals.wait_all``), so what a source stored before its signal is seen.

The last program to finish knows that all have read what they wanted: it counts the call as received and publishes
``dispatch_drained = call`` to every source, which may then overwrite. A source that is a call ahead waits for just
that, and one that is behind has not been answered yet: no call overtakes another.

A row's place: start of its group (sizes rounded up to ALIGN) + rows that lower source ranks send to that expert +
its position, which came with the message. Hence source ranks ascend inside a group, then tokens, then slots.

Example: 2 local experts, counts from ranks 0 and 1 [[2, 1], [1, 0]], ALIGN 4: group sizes [3, 1], row_offsets
[0, 4, 8]. Rank 1's first pair of expert 0 (position 0) goes to row 0 + 2 + 0 = 2. Row 3 and rows 5-7 are padding.

Nothing that came over the wire becomes an address unchecked: an id, position or count out of range drops the row.
"""

import triton
import triton.language as tl

from moelink.kernels.padding import pad_rows, pad_tiles, scale_places
from moelink.kernels.plan import group_starts, load_counts, tile_bases, write_nothing, write_plan
from moelink.kernels.signals import I32, I64, arrive, is_poisoned, note_refusal, odd_one_out, publish, settle, wait_all
from moelink.protocol import (
    CODE_ABORT,
    CODE_OPTIONS,
    DISPATCH_RECEIVED,
    DONE,
    PHASE_DISPATCH,
    ROW_ABSENT,
    ROW_DROPPED,
)

_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_RECEIVED)
_DONE = tl.constexpr(DONE)
_REFUSED = tl.constexpr(CODE_ABORT)
_OPTIONS = tl.constexpr(CODE_OPTIONS)
_ABSENT = tl.constexpr(ROW_ABSENT)
_DROPPED = tl.constexpr(ROW_DROPPED)


@triton.jit
def wait_for_counts(table, record, control, me, call, limit, S: tl.constexpr):
    """Wait for the counts of every source. Returns 1, or 0 or -1 after an error."""
    r = tl.arange(0, S.WP)
    mine = tl.load(table + me)
    arrived, peer, got = wait_all(
        (mine + S.O_COUNTS_FLAG).to(I64) + r, r < S.W, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK
    )
    settle(arrived, table, record, control, me, peer, _PHASE, call, call, got, S)
    return arrived


@triton.jit
def copy_message(message, row, keep, inner, block, tokens_out, scales_out, scale_rows, S: tl.constexpr):
    """Payload and scales of one message (an int64 address) to the output rows ``row`` [RP] under ``keep``."""
    source = tl.multiple_of(message.to(S.WORD_P), 16)
    to = tokens_out.to(S.WORD_P, bitcast=True) + row.to(tl.int64)[:, None] * S.NWORDS
    for c0 in tl.static_range(0, S.NWORDS, S.BLOCK):
        c = c0 + tl.arange(0, S.BLOCK)
        words = tl.load(source + c, mask=c < S.NWORDS, other=0)
        tl.store(
            to + c[None, :],
            tl.broadcast_to(words[None, :], (S.RP, S.BLOCK)),
            mask=keep[:, None] & (c < S.NWORDS)[None, :],
        )
    if S.SW > 0:
        c = tl.arange(0, S.SWP)
        scale = tl.load((message + S.M_SCALES).to(S.SCALE_P) + c, mask=c < S.SW, other=0)
        width = (S.SW + 3) // 4 * 4 if S.SCALES == 2 else S.SW
        place = scale_places(row[:, None], inner[:, None], block[:, None], c[None, :], scale_rows, S)
        tl.store(
            scales_out.to(S.SCALE_P, bitcast=True) + place, tl.broadcast_to(scale[None, :], (S.RP, S.SWP)),
            mask=keep[:, None] & (c < width)[None, :],
        )  # fmt: skip


@triton.jit
def place_message(
    mine, source, slot, base, sizes, starts, bases, tokens_out, scales_out, src_info, weights_out, topk_ids_out,
    rows_of_message, message_token, me, rank, num_local, shared_begin, shared_end, capacity, scale_rows,
    S: tl.constexpr,
):  # fmt: skip
    """Copy message ``slot`` of ``source`` to its rows, and note for combine where they are.

    ``base`` [LP]: first row of this source in each expert's group; ``sizes`` [LP]: its rows there. Layout "rank":
    ``base`` is the first row of this source.
    """
    at = source * S.T + slot
    message = mine + S.O_MESSAGES + at.to(tl.int64) * S.MESSAGE
    token = tl.load((message + S.M_TOKEN).to(I32))
    label = rank if S.ALLREDUCE else source
    q = tl.arange(0, S.RP)
    if S.RANK_LAYOUT:
        k = tl.arange(0, S.KP)
        row = base + slot + q
        keep = row < capacity
        tl.store(rows_of_message + at + q, tl.where(keep, row, _DROPPED))
        info = src_info + row * 3
        tl.store(info + 2, q - 1, mask=keep)
        local = tl.load((message + S.M_IDS).to(I32) + k, mask=k < S.K, other=-1)
        here = keep & (k < S.K)
        tl.store(topk_ids_out + row.to(tl.int64) * S.K + k, local, mask=here)
        if S.WEIGHTS:
            w = tl.load((message + S.M_WEIGHTS).to(S.WEIGHT_P) + k, mask=k < S.K, other=0.0)
            tl.store(weights_out + row.to(tl.int64) * S.K + k, tl.where(local >= 0, w, 0.0), mask=here)
        inner = q
        block = q
    else:
        expert = tl.load((message + S.M_IDS).to(I32) + q, mask=q < S.K, other=-1)
        position = tl.load((message + S.M_POSITIONS).to(I32) + q, mask=q < S.K, other=0)
        named = (expert >= 0) & (expert < num_local)
        e = tl.where(named, expert, 0)
        row = tl.gather(base, e, 0) + position
        keep = named & (position >= 0) & (position < tl.gather(sizes, e, 0)) & (row < capacity)
        tl.store(
            rows_of_message + at.to(tl.int64) * S.K + q,
            tl.where(keep, row, tl.where(named, _DROPPED, _ABSENT)), mask=q < S.K,
        )  # fmt: skip
        inner = row - tl.gather(starts, e, 0)
        block = tl.gather(bases, e, 0)
        if S.SHARED:
            own = (q == S.K) & (source == me) & (token >= shared_begin) & (token < shared_end)
            row = tl.where(own, token - shared_begin, row)
            keep = keep | (own & (row < capacity))
            inner = tl.where(own, row, inner)
            block = tl.where(own, 0, block)
        info = src_info + row * 3
        tl.store(info + 2, tl.where(q < S.K, q, -1), mask=keep)
        if S.WEIGHTS:
            w = tl.load((message + S.M_WEIGHTS).to(S.WEIGHT_P) + q, mask=q < S.K, other=1.0)
            tl.store(weights_out + row, w, mask=keep)
    tl.store(info, q * 0 + label, mask=keep)
    tl.store(info + 1, q * 0 + token, mask=keep)
    tl.store(message_token + at, token)
    copy_message(message, row, keep, inner, block, tokens_out, scales_out, scale_rows, S)


@triton.jit
def receive(
    table, record, control, tokens_out, scales_out, row_offsets, src_info, scales_offsets, weights_out, topk_ids_out,
    num_recv, overflow, counts_out, received, rows_of_message, message_token, me, rank, num_local, num_groups,
    shared_begin, shared_end, capacity, scale_rows, counts_stride, status, program, num_programs, limit,
    S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the receiver role."""
    call = tl.load(control + _ROLE) + 1
    mine = tl.load(table + me)
    r = tl.arange(0, S.WP)
    mask = r < S.W
    ok = -is_poisoned(table, record, control, me, S)
    if ok == 0:
        if status == 0:
            ok = wait_for_counts(table, record, control, me, call, limit, S)
        else:
            # A rank that refuses reads nothing, so it drains at once; each peer stores for one call after the other.
            ok += 1
    if status != 0:
        ok += 0
    elif ok <= 0:
        if program == 0:
            write_nothing(
                row_offsets, scales_offsets, num_recv, overflow, counts_out, received, me, rank, num_local,
                num_groups, counts_stride, S,
            )  # fmt: skip
    else:
        head = (mine + S.O_COUNTS).to(I32) + r * S.CW
        refused = tl.load(head, mask=mask, other=0)
        odd = odd_one_out(tl.load(head + 5, mask=mask, other=0), mask, S.OPTIONS, S.W)
        if (tl.max(refused, 0) != 0) | (odd >= 0):
            if program == 0:
                write_nothing(
                    row_offsets, scales_offsets, num_recv, overflow, counts_out, received, me, rank, num_local,
                    num_groups, counts_stride, S,
                )  # fmt: skip
                peer = tl.min(tl.where(refused != 0, r, S.W), 0)
                if peer < S.W:
                    note_refusal(record, me, peer, _PHASE, call, _REFUSED)
                else:
                    note_refusal(record, me, odd, _PHASE, call, _OPTIONS)
        else:
            shared = shared_end - shared_begin
            rows, messages = load_counts(mine, num_local, S)
            sizes = tl.sum(rows, 0)
            starts, aligned, shared_rows = group_starts(sizes, shared, S)
            bases = starts
            if S.SCALES == 2:
                bases, _ = tile_bases(starts, aligned, shared_rows, capacity, S)
            if program == 0:
                write_plan(
                    mine, control, rows, messages, row_offsets, scales_offsets, num_recv, overflow, counts_out,
                    received, rank, num_local, num_groups, shared, capacity, counts_stride, S,
                )  # fmt: skip
            per_source = tl.minimum(tl.maximum(tl.load(head + 4, mask=mask, other=1), 1), S.C)
            chunks = tl.minimum(tl.maximum(tl.load(head + 3, mask=mask, other=0), 0), S.C)
            steps = tl.max(tl.cdiv(chunks, per_source) * per_source, 0)
            for i in range(program, steps * S.W, num_programs):
                if ok > 0:
                    # Start with the own rank: its messages arrive first, and no two ranks begin with the same peer.
                    source = (i + me) % S.W
                    here = r == source
                    n = tl.sum(tl.where(here, chunks, 0), 0)
                    per = tl.sum(tl.where(here, per_source, 0), 0)
                    senders = tl.maximum(tl.cdiv(n, per), 1)
                    step = i // S.W
                    c = step % senders * per + step // senders
                    if (step // senders < per) & (c < n):
                        ok, _, got = wait_all(
                            (mine + S.O_CHUNK_FLAG).to(I64) + source * S.C + c + r * 0, here, call,
                            (mine + S.O_POISON).to(I64), limit, S.CLOCK,
                        )  # fmt: skip
                        settle(ok, table, record, control, me, source, _PHASE, call, call, got, S)
                        if ok > 0:
                            ends = (mine + S.O_RANGE).to(I32) + (source * S.C + c) * 2
                            begin = tl.maximum(tl.load(ends), 0)
                            end = tl.minimum(tl.load(ends + 1), S.T)
                            lower = tl.sum(tl.where((r < source)[:, None], rows, 0), 0)
                            own = tl.sum(tl.where(here[:, None], rows, 0), 0)
                            base = starts + lower
                            if S.RANK_LAYOUT:
                                base = tl.sum(tl.where(r < source, messages, 0), 0)
                            for slot in range(begin, end):
                                place_message(
                                    mine, source, slot, base, own, starts, bases, tokens_out, scales_out, src_info,
                                    weights_out, topk_ids_out, rows_of_message, message_token, me, rank, num_local,
                                    shared_begin, shared_end, capacity, scale_rows, S,
                                )  # fmt: skip
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
        if arrive(control + _DONE + _ROLE, num_programs) > 0:
            tl.atomic_xchg(control + _ROLE, call, sem="relaxed", scope="sys")
            base_of = tl.load(table + r, mask=mask, other=0)
            publish((base_of + S.O_DRAINED).to(I64) + me, mask, tl.zeros([S.WP], tl.int64) + call)
