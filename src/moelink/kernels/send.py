"""Dispatch, sender role: what each program of the sending half does.

One program counts, the others move rows. None of them waits for anything of this call from another rank: they wait
only until every destination has *drained the previous call* (read all it was sent), after which its staging may be
overwritten, and for lower programs. That is why any sequence of calls is safe with one buffer.

Tokens are cut in one of two ways. Few of them: one token a program, or several programs a token, each of which serves
every ``split``-th rank; what lies before its token every program counts by itself. The counting program is the first
one, and the others let its few words go ahead of their rows, as nothing can be placed without them and a link keeps the
order. Many: ``tokens_per_program`` consecutive tokens each; programs share their counts (``kernels.tallies``), so the
counting program is the last one.

Who writes what, at destination d, in row ``me`` of each region:

* a row program, for every token that goes to d: the message in the token's slot, then ``message_flag[slot] = call``,
  a few tokens at a time.
* the counting program: with many tokens ``firsts`` and a fence; then ``counts``, words that are their own signal
  (``kernels.tagged``): status, totals, rows per local expert of d.

``message_flag`` is a release after the stores it speaks for (``signals.publish``). The last program to finish counts
the call as sent; a later call of this rank starts after it in stream order.

Order without a sort: a message's slot at d is the number of earlier tokens of this rank with any id on d, and a pair's
*position* the number of earlier pairs (token, then slot) of this rank with the same expert.

Example: 4 experts on 2 ranks, topk 2, rank 0's ids [[0, 3], [1, 0], [-1, 2]]. Destination 0 gets tokens 0, 1 in slots
0, 1 with local ids [0, -1], [1, 0] and positions [0, 0], [0, 1] (token 1's expert 0 is the second pair of expert 0);
destination 1 gets tokens 0, 2 in slots 0, 1 with local ids [-1, 1], [-1, 0]. Counts: [2, 1] for rank 0, [1, 1] for
rank 1.
"""

import triton
import triton.language as tl

from moelink.kernels.network import direct_or_staged, is_near, near_only, put, staged_at
from moelink.kernels.payload import load_piece, store_piece
from moelink.kernels.routes import count_pairs, experts_at, first_of, owner_of, ranks_of, tally
from moelink.kernels.signals import I32, I64, count_arrival, fence, is_poisoned, publish, settle, wait_all
from moelink.kernels.tagged import tagged
from moelink.kernels.tallies import publish_tally, send_firsts, sum_tallies
from moelink.protocol import COUNT_HEADER, COUNTS_SENT, DISPATCH_BYTES, DISPATCH_SENT, INVALID_IDS, PHASE_DISPATCH

_HEADER = tl.constexpr(COUNT_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_SENT)
_INVALID = tl.constexpr(INVALID_IDS)
_BYTES = tl.constexpr(DISPATCH_BYTES)
_SENT = tl.constexpr(COUNTS_SENT)


@triton.jit
def wait_until_drained(table, record, control, me, phase, call, offset, limit, S: tl.constexpr):
    """Wait until every rank has read what this one sent in the previous call. Returns 1, or 0 or -1 after an error."""
    r = tl.arange(0, S.WP)
    mask = r < S.W
    mine = tl.load(table + me)
    arrived, peer, got = wait_all(
        (mine + offset).to(I64) + r, mask, call - 1, (mine + S.O_POISON).to(I64), limit, S.CLOCK
    )
    settle(arrived, table, record, control, me, peer, phase, call, call - 1, got, S)
    return arrived


@triton.jit
def counts_at(base, mine, rank, me, word, S: tl.constexpr):
    """Where to store word ``word`` of this rank's counts for ``rank``, whose block is at ``base``."""
    if S.NODE < S.W:
        row = base + S.O_COUNTS + tl.cast(me, tl.int64) * (S.CW * 8)
        return direct_or_staged(row, mine, rank, me, S.O_STAGED_COUNTS, 1, 0, S.CW * 8, S).to(I64) + word
    else:
        return (base + S.O_COUNTS).to(I64) + (me * S.CW + word)


@triton.jit
def put_counts(table, control, mine, me, few, movers, call, S: tl.constexpr):
    """Put the counts, and ``firsts`` where there are any, at the ranks of other nodes."""
    fence(control)
    at = tl.cast(me, tl.int64)
    firsts: tl.constexpr = (S.SENDERS + 1) * 4
    for d in range(S.W):
        if is_near(d, me, S) == 0:
            if not few:
                put(
                    table, mine + S.O_FIRSTS + at * firsts, staged_at(mine, d, me, S.O_STAGED_FIRSTS, 1, 0, firsts, S),
                    (movers + 1) * 4, mine + S.O_FIRSTS_FLAG + at * 8, call, d, S,
                )  # fmt: skip
            put(
                table, mine + S.O_COUNTS + at * (S.CW * 8),
                staged_at(mine, d, me, S.O_STAGED_COUNTS, 1, 0, S.CW * 8, S), S.CW * 8,
                mine + S.O_COUNTS_FLAG + at * 8, call, d, S,
            )  # fmt: skip


@triton.jit
def put_messages(table, control, mine, me, own, slot, call, S: tl.constexpr):
    """Put messages at the ranks of other nodes: of each of BATCH tokens, at those where ``own`` [BATCH, WP], in
    ``slot`` [BATCH, WP]."""
    fence(control)
    t = tl.arange(0, S.BATCH)[:, None]
    r = tl.arange(0, S.WP)[None, :]
    for i in range(S.BATCH * S.W):
        d = i % S.W
        one = (t == i // S.W) & (r == d)
        goes = tl.max(tl.max((one & own).to(tl.int32), 1), 0)
        if (goes > 0) & (is_near(d, me, S) == 0):
            place = tl.max(tl.max(tl.where(one, slot, 0), 1), 0)
            there = tl.cast(me * S.T + place, tl.int64)
            put(
                table, mine + S.O_MESSAGES + there * S.MESSAGE,
                staged_at(mine, d, me, S.O_STAGED_MESSAGES, S.T, place, S.MESSAGE, S), S.MESSAGE,
                mine + S.O_MESSAGE_FLAG + there * 8, call, d, S,
            )  # fmt: skip


@triton.jit
def send_counts(
    table, record, control, ids, me, first, num_local, num_tokens, tokens_per_program, shared_begin, shared_end, status,
    movers, call, limit, S: tl.constexpr,
):  # fmt: skip
    """The counting program: tell every rank how many rows and messages come, and that they do."""
    r = tl.arange(0, S.WP)
    mask = r < S.W
    mine = tl.load(table + me)
    few = tokens_per_program <= 1
    ok = tl.full([], 1, tl.int32)
    if few:
        pairs, messages, invalid = tally(ids, 0, num_tokens, me, first, num_local, shared_begin, shared_end, S)
        if invalid > 0:
            tl.atomic_add(control + _INVALID, invalid.to(tl.int64), sem="relaxed", scope="gpu")
    else:
        ok, pairs, messages = sum_tallies(table, record, control, mine, me, movers, call, limit, S)
    if ok > 0:
        ok = wait_until_drained(table, record, control, me, _PHASE, call, S.O_DRAINED, limit, S)
    if ok > 0:
        most = tl.full([S.WP], 1, tl.int32)
        programs = tl.zeros([S.WP], tl.int32)
        if not few:
            programs += movers
            most = send_firsts(table, mine, me, movers, S)
        away = tl.sum(tl.where(r == me, 0, messages), 0).to(tl.int64)
        tl.atomic_add(control + _BYTES, away * S.MESSAGE, sem="relaxed", scope="gpu")
        # What precedes the counts must be seen by who sees them; without it nothing has to be waited for.
        if not few:
            fence(control)
        base = tl.load(table + r, mask=mask, other=0)
        row = counts_at(base, mine, r, me, 0, S)
        h = tl.arange(0, _HEADER)[None, :]
        head = tl.where(h == 1, messages[:, None], 0) + tl.where(h == 3, programs[:, None], 0)
        head += tl.where(h == 4, most[:, None], 0)
        head += tl.where(h == 0, status, 0) + tl.where(h == 2, num_tokens, 0) + tl.where(h == 5, S.OPTIONS, 0)
        tl.atomic_xchg(
            row[:, None] + h, tagged(call, head), mask=mask[:, None] & (h >= 0), sem="relaxed", scope="sys"
        )  # fmt: skip
        # Expert e's count goes to its owner. Experts that get nothing are told so, too.
        e = tl.arange(0, S.EP)
        owner = owner_of(tl.where(e < S.E, e, -1), first, num_local, S)
        known = owner >= 0
        to = tl.load(table + tl.where(known, owner, 0), mask=known, other=0)
        local = e - first_of(owner, first, S)
        words = counts_at(to, mine, tl.where(known, owner, me), me, _HEADER, S) + local
        tl.atomic_xchg(words, tagged(call, pairs), mask=known, sem="relaxed", scope="sys")
        if S.NODE < S.W:
            put_counts(table, control, mine, me, few, movers, call, S)
        tl.debug_barrier()
        tl.atomic_xchg(control + _SENT, call, sem="relaxed", scope="sys")
    return ok


@triton.jit
def _store_headers(
    ids_of, position, owner, token, places, weights, first, num_tokens, S: tl.constexpr
):  # fmt: skip
    """What is small in a message: token, local ids, positions and weights, of a block of tokens at once.

    ``ids_of``, ``position``, ``owner``: [N, KP]; ``token`` [N]; ``places`` [N, WP] addresses, 0 for none.
    """
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    goes = places != 0
    tl.store((places + S.M_TOKEN).to(I32), tl.broadcast_to(token[:, None], (S.BATCH, S.WP)), mask=goes)
    named = goes[:, :, None] & (k < S.K)[None, None, :]
    local = tl.where(
        owner[:, None, :] == r[None, :, None], ids_of[:, None, :] - first_of(r, first, S)[None, :, None], -1
    )
    shape: tl.constexpr = (S.BATCH, S.WP, S.KP)
    tl.store((places + S.M_IDS).to(I32)[:, :, None] + k[None, None, :], local, mask=named)
    tl.store(
        (places + S.M_POSITIONS).to(I32)[:, :, None] + k[None, None, :],
        tl.broadcast_to(position[:, None, :], shape), mask=named,
    )  # fmt: skip
    if S.WEIGHTS:
        inside = (token < num_tokens)[:, None] & (k < S.K)[None, :]
        w = tl.load(weights + token[:, None] * S.K + k[None, :], mask=inside, other=0.0)
        to = (places + S.M_WEIGHTS).to(S.WEIGHT_P)
        tl.store(to[:, :, None] + k[None, None, :], tl.broadcast_to(w[:, None, :], shape), mask=named)


@triton.jit
def send_rows(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens,
    tokens_per_program, split, shared_begin, shared_end, program, call, limit, S: tl.constexpr,
):  # fmt: skip
    """Row program ``program``: send its tokens, to the ranks that are its."""
    begin = program // split * tokens_per_program
    end = tl.minimum(begin + tokens_per_program, num_tokens)
    part = program % split
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    i = tl.arange(0, S.BATCH * S.KP)
    mask = r < S.W
    mine = tl.load(table + me)
    base = tl.load(table + r, mask=mask, other=0)
    row = load_piece(x, begin, 0, end, S)
    ok = tl.full([], 1, tl.int32)
    if tokens_per_program <= 1:
        pairs, sent, _ = tally(ids, 0, begin, me, first, num_local, shared_begin, shared_end, S)
    else:
        pairs, sent, invalid = tally(ids, begin, end, me, first, num_local, shared_begin, shared_end, S)
        publish_tally(mine, program, pairs, sent, call, S)
        if invalid > 0:
            tl.atomic_add(control + _INVALID, invalid.to(tl.int64), sem="relaxed", scope="gpu")
        ok, pairs, sent = sum_tallies(table, record, control, mine, me, program, call, limit, S)
    if ok > 0:
        ok = wait_until_drained(table, record, control, me, _PHASE, call, S.O_DRAINED, limit, S)
    if (ok > 0) & (tokens_per_program <= 1) & (num_tokens > S.AHEAD):
        ok, _, got = wait_all(control + _SENT + r * 0, r == 0, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK)
        settle(ok, table, record, control, me, me, _PHASE, call, call, got, S)
    if ok > 0:
        for t0 in range(begin, end, S.BATCH):
            token = t0 + tl.arange(0, S.BATCH)
            inside = (token < end)[:, None] & (k < S.K)[None, :]
            expert = experts_at(ids, token[:, None] * S.K + k[None, :], inside, S)
            owner = owner_of(expert, first, num_local, S)
            goes = ranks_of(owner, token, end, me, shared_begin, shared_end, S)
            slot = sent[None, :] + tl.cumsum(goes, 0) - goes

            flat = tl.reshape(tl.where(owner >= 0, expert, -1), (S.BATCH * S.KP,))
            earlier = (flat[None, :] == flat[:, None]) & (i[None, :] < i[:, None])
            position = tl.gather(pairs, tl.maximum(flat, 0), 0) + tl.sum(earlier.to(tl.int32), 1)
            position = tl.reshape(tl.where(flat >= 0, position, 0), (S.BATCH, S.KP))

            own = (goes > 0) & (mask & (r % split == part))[None, :]
            noted = (token < end)[:, None] & (mask & (r % split == part))[None, :]
            tl.store(slot_of + token[:, None] * S.W + r[None, :], tl.where(goes > 0, slot, -1), mask=noted)
            places = base[None, :] + S.O_MESSAGES + (me * S.T + slot).to(tl.int64) * S.MESSAGE
            places = direct_or_staged(
                places, mine, r[None, :], me, S.O_STAGED_MESSAGES, S.T, slot, S.MESSAGE, S
            )  # fmt: skip
            places = tl.where(own, places, 0)
            _store_headers(expert, position, owner, token, places, weights, first, num_tokens, S)
            for t in range(t0, tl.minimum(t0 + S.BATCH, end)):
                to = tl.sum(tl.where((token == t)[:, None], places, 0), 0)
                for piece in tl.static_range(S.PIECES):
                    following = load_piece(x, t + (piece + 1) // S.PIECES, (piece + 1) % S.PIECES, end, S)
                    store_piece(row, piece, scales, t, to, input_scale, S)
                    row = following
            flags = (base + S.O_MESSAGE_FLAG).to(I64)[None, :] + (me * S.T + slot)
            publish(flags, near_only(own, r[None, :], me, S), tl.zeros([S.BATCH, S.WP], tl.int64) + call)
            if S.NODE < S.W:
                put_messages(table, control, mine, me, own, slot, call, S)
            if t0 + S.BATCH < end:
                sent += tl.sum(goes, 0)
                pairs += count_pairs(expert, owner, S.BATCH * S.KP, S)
    return ok


@triton.jit
def send(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens,
    tokens_per_program, split, shared_begin, shared_end, status, program, num_programs, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the sender role."""
    call = tl.load(control + _ROLE) + 1
    # The counting program's number; with few tokens it is the first one.
    counting = tl.where(tokens_per_program <= 1, 0, num_programs - 1)
    if is_poisoned(table, record, control, me, S) == 0:
        if program == counting:
            ok = send_counts(
                table, record, control, ids, me, first, num_local, num_tokens, tokens_per_program, shared_begin,
                shared_end, status, num_programs - 1, call, limit, S,
            )  # fmt: skip
        else:
            ok = send_rows(
                table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local,
                num_tokens, tokens_per_program, split, shared_begin, shared_end,
                program - tl.where(counting == 0, 1, 0), call, limit, S,
            )  # fmt: skip
        if ok > 0:
            count_arrival(control, _ROLE, call, num_programs)
