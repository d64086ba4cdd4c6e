"""Dispatch, sender role: what each program of the sending half does.

Program 0 counts; programs 1 .. P move rows. None of them waits for another program of this launch, nor for anything of
this call from another rank: they wait only until every destination has *drained the previous call* (read all it was
sent), after which its staging may be overwritten. That is why any sequence of calls is safe with one buffer.

Who writes what, at destination d, in row ``me`` of each region:

* program 0: ``counts`` (status, messages, tokens, chunks; rows per local expert of d), then ``counts_flag = call``.
* program p: for each of its chunks (consecutive tokens) the messages and ``chunk_range``, then
  ``chunk_flag[chunk] = call``.

Both signals are releases after the stores they speak for (``signals.publish``). The last program to finish counts the
call as sent; a later call of this rank starts after it in stream order.

Order without a sort: a message's slot at d is the number of earlier tokens of this rank with any id on d, and a pair's
*position* the number of earlier pairs (token, then slot) of this rank with the same expert. Every program counts what
lies before its own tokens by itself, so no program waits for a count.

Example: 4 experts on 2 ranks, topk 2, rank 0's ids [[0, 3], [1, 0], [-1, 2]]. Destination 0 gets tokens 0, 1 in slots
0, 1 with local ids [0, -1], [1, 0] and positions [0, 0], [0, 1] (token 1's expert 0 is the second pair of expert 0);
destination 1 gets tokens 0, 2 in slots 0, 1 with local ids [-1, 1], [-1, 0]. Counts: [2, 1] for rank 0, [1, 1] for
rank 1.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import round_to
from moelink.kernels.routes import experts_at, first_of, owner_of, tally
from moelink.kernels.signals import I32, I64, U8, arrive, is_poisoned, publish, settle, wait_all
from moelink.protocol import COUNT_HEADER, DISPATCH_BYTES, DISPATCH_SENT, DONE, INVALID_IDS, PHASE_DISPATCH

_HEADER = tl.constexpr(COUNT_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_SENT)
_DONE = tl.constexpr(DONE)
_INVALID = tl.constexpr(INVALID_IDS)
_BYTES = tl.constexpr(DISPATCH_BYTES)


@triton.jit
def wait_until_drained(table, record, control, me, phase, call, offset, limit, S: tl.constexpr):
    """Wait until every rank has read what this one sent in the previous call. Returns 1, or 0 after an error."""
    r = tl.arange(0, S.WP)
    mask = r < S.W
    mine = tl.load(table + me)
    arrived, peer, got = wait_all(
        (mine + offset).to(I64) + r, mask, call - 1, (mine + S.O_POISON).to(I64), limit, S.CLOCK
    )
    settle(arrived, table, record, control, me, peer, phase, call, call - 1, got, S)
    return arrived


@triton.jit
def send_counts(
    table, record, control, ids, me, first, num_local, num_tokens, num_chunks, chunks_per_program, shared_begin,
    shared_end, status, call, limit, S: tl.constexpr,
):  # fmt: skip
    """Program 0: tell every rank how many rows and messages come, and that they do."""
    pairs, messages, invalid = tally(ids, 0, num_tokens, me, first, num_local, shared_begin, shared_end, S)
    ok = wait_until_drained(table, record, control, me, _PHASE, call, S.O_DRAINED, limit, S)
    if ok > 0:
        if invalid > 0:
            tl.atomic_add(control + _INVALID, invalid.to(tl.int64), sem="relaxed", scope="gpu")
        r = tl.arange(0, S.WP)
        mask = r < S.W
        away = tl.sum(tl.where(r == me, 0, messages), 0).to(tl.int64)
        tl.atomic_add(control + _BYTES, away * S.MESSAGE, sem="relaxed", scope="gpu")
        base = tl.load(table + r, mask=mask, other=0)
        head = (base + S.O_COUNTS).to(I32) + me * S.CW
        tl.store(head, tl.zeros([S.WP], tl.int32) + status, mask=mask)
        tl.store(head + 1, messages, mask=mask)
        tl.store(head + 2, tl.zeros([S.WP], tl.int32) + num_tokens, mask=mask)
        tl.store(head + 3, tl.zeros([S.WP], tl.int32) + num_chunks, mask=mask)
        tl.store(head + 4, tl.zeros([S.WP], tl.int32) + chunks_per_program, mask=mask)
        tl.store(head + 5, tl.zeros([S.WP], tl.int32) + S.OPTIONS, mask=mask)
        # Expert e's count goes to its owner. Experts that get nothing are told so, too.
        e = tl.arange(0, S.EP)
        owner = owner_of(tl.where(e < S.E, e, -1), first, num_local, S)
        known = owner >= 0
        to = tl.load(table + tl.where(known, owner, 0), mask=known, other=0)
        local = e - first_of(owner, first, S)
        tl.store((to + S.O_COUNTS).to(I32) + (me * S.CW + _HEADER) + local, pairs, mask=known)
        publish((base + S.O_COUNTS_FLAG).to(I64) + me, mask, tl.zeros([S.WP], tl.int64) + call)
    return ok


@triton.jit
def _store_payload(x, token, messages, present, input_scale, S: tl.constexpr):
    """Read token's row once, bring it into the format once, and store it from registers to every message under
    ``present`` (int64 addresses [WP])."""
    if S.SOURCE == 0:
        source = x.to(S.WORD_P, bitcast=True) + tl.cast(token, tl.int64) * S.NWORDS
        to = tl.multiple_of(messages.to(S.WORD_P), 16)[:, None]
        for c0 in tl.static_range(0, S.NWORDS, S.BLOCK):
            c = c0 + tl.arange(0, S.BLOCK)
            row = tl.load(source + c, mask=c < S.NWORDS, other=0)
            tl.store(
                to + c[None, :],
                tl.broadcast_to(row[None, :], (S.WP, S.BLOCK)),
                mask=present[:, None] & (c < S.NWORDS)[None, :],
            )
    elif S.SOURCE == 1:
        to = tl.multiple_of(messages.to(S.DTYPE_P), 16)[:, None]
        for c0 in tl.static_range(0, S.H, S.BLOCK):
            c = c0 + tl.arange(0, S.BLOCK)
            wide = tl.load(x + tl.cast(token, tl.int64) * S.H + c, mask=c < S.H, other=0.0)
            row = round_to(wide.to(tl.float64 if S.DTYPE == tl.float64 else tl.float32), S.DTYPE, S.NATIVE)
            tl.store(
                to + c[None, :],
                tl.broadcast_to(row[None, :], (S.WP, S.BLOCK)),
                mask=present[:, None] & (c < S.H)[None, :],
            )
    else:
        to = tl.multiple_of(messages.to(U8), 16)[:, None]
        to_scales = (messages + S.M_SCALES).to(S.SCALE_P)[:, None]
        factor = tl.load(input_scale) if S.INPUT_SCALE else 1.0
        for g0 in tl.static_range(0, S.NG, S.GB):
            g = g0 + tl.arange(0, S.GB)
            c = g[:, None] * S.GROUP + tl.arange(0, S.GROUP)[None, :]
            wide = tl.load(x + tl.cast(token, tl.int64) * S.H + c, mask=c < S.H, other=0.0).to(tl.float32)
            payload, scale = S.ENCODE_FN(wide, factor, S.NATIVE)
            row = tl.reshape(payload, (S.GB * S.PB,))
            b = tl.arange(0, S.GB * S.PB)
            keep = g0 * S.PB + b < S.NG * S.PB
            tl.store(
                to + (g0 * S.PB + b)[None, :], tl.broadcast_to(row[None, :], (S.WP, S.GB * S.PB)),
                mask=present[:, None] & keep[None, :],
            )  # fmt: skip
            scale = scale.to(S.SCALE, bitcast=True)
            tl.store(
                to_scales + g[None, :],
                tl.broadcast_to(scale[None, :], (S.WP, S.GB)),
                mask=present[:, None] & (g < S.NG)[None, :],
            )


@triton.jit
def _store_ready_scales(scales, token, messages, present, S: tl.constexpr):
    """Scales of a row that came quantised, to every message."""
    c = tl.arange(0, S.SWP)
    row = tl.load(scales.to(S.SCALE_P, bitcast=True) + tl.cast(token, tl.int64) * S.SW + c, mask=c < S.SW, other=0)
    to = (messages + S.M_SCALES).to(S.SCALE_P)[:, None]
    tl.store(to + c[None, :], tl.broadcast_to(row[None, :], (S.WP, S.SWP)), mask=present[:, None] & (c < S.SW)[None, :])


@triton.jit
def send_rows(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens, chunk,
    num_chunks, chunks_per_program, shared_begin, shared_end, program, call, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` >= 0: send the tokens of chunks [program * chunks_per_program, ...)."""
    begin = program * chunks_per_program
    end = tl.minimum(begin + chunks_per_program, num_chunks)
    ok = tl.full([], 1, tl.int32)
    if begin < end:
        pairs, sent, _ = tally(ids, 0, begin * chunk, me, first, num_local, shared_begin, shared_end, S)
        ok = wait_until_drained(table, record, control, me, _PHASE, call, S.O_DRAINED, limit, S)
        if ok > 0:
            r = tl.arange(0, S.WP)
            k = tl.arange(0, S.KP)
            mask = r < S.W
            base = tl.load(table + r, mask=mask, other=0)
            for c in range(begin, end):
                from_slot = sent
                for token in range(c * chunk, tl.minimum((c + 1) * chunk, num_tokens)):
                    expert = experts_at(ids, token * S.K + k, k < S.K, S)
                    owner = owner_of(expert, first, num_local, S)
                    goes = owner[None, :] == r[:, None]
                    present = tl.max(goes.to(tl.int32), 1) > 0
                    if S.SHARED:
                        present = present | ((r == me) & (token >= shared_begin) & (token < shared_end))
                    bins = tl.where(owner >= 0, expert, S.E)
                    earlier = (bins[None, :] == bins[:, None]) & (k[None, :] < k[:, None])
                    position = tl.gather(pairs, bins, 0) + tl.sum(earlier.to(tl.int32), 1)
                    position = tl.where(owner >= 0, position, 0)

                    tl.store(slot_of + token * S.W + r, tl.where(present, sent, -1), mask=mask)
                    messages = base + S.O_MESSAGES + (me * S.T + sent).to(tl.int64) * S.MESSAGE
                    _store_payload(x, token, messages, present, input_scale, S)
                    if S.SOURCE == 0 and S.SW > 0:
                        _store_ready_scales(scales, token, messages, present, S)
                    tl.store((messages + S.M_TOKEN).to(I32), tl.zeros([S.WP], tl.int32) + token, mask=present)
                    named = present[:, None] & (k < S.K)[None, :]
                    local = tl.where(goes, expert[None, :] - first_of(r, first, S)[:, None], -1)
                    tl.store((messages + S.M_IDS).to(I32)[:, None] + k[None, :], local, mask=named)
                    tl.store(
                        (messages + S.M_POSITIONS).to(I32)[:, None] + k[None, :],
                        tl.broadcast_to(position[None, :], (S.WP, S.KP)), mask=named,
                    )  # fmt: skip
                    if S.WEIGHTS:
                        w = tl.load(weights + token * S.K + k, mask=k < S.K, other=0.0)
                        to = (messages + S.M_WEIGHTS).to(S.WEIGHT_P)
                        tl.store(to[:, None] + k[None, :], tl.broadcast_to(w[None, :], (S.WP, S.KP)), mask=named)
                    sent += present.to(tl.int32)
                    pairs += tl.histogram(bins, S.EP)
                ends = (base + S.O_RANGE).to(I32) + (me * S.C + c) * 2
                tl.store(ends, from_slot, mask=mask)
                tl.store(ends + 1, sent, mask=mask)
                publish((base + S.O_CHUNK_FLAG).to(I64) + me * S.C + c, mask, tl.zeros([S.WP], tl.int64) + call)
    return ok


@triton.jit
def send(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens, chunk,
    num_chunks, chunks_per_program, shared_begin, shared_end, status, program, num_programs, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the sender role."""
    call = tl.load(control + _ROLE) + 1
    if is_poisoned(table, record, control, me, S) == 0:
        if program == 0:
            ok = send_counts(
                table, record, control, ids, me, first, num_local, num_tokens, num_chunks, chunks_per_program,
                shared_begin, shared_end, status, call, limit, S,
            )  # fmt: skip
        else:
            ok = send_rows(
                table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local,
                num_tokens, chunk, num_chunks, chunks_per_program, shared_begin, shared_end, program - 1, call, limit,
                S,
            )  # fmt: skip
        if ok > 0:
            if arrive(control + _DONE + _ROLE, num_programs) > 0:
                tl.atomic_xchg(control + _ROLE, call, sem="relaxed", scope="sys")
