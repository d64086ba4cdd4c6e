"""Dispatch, sender role: the program that counts, and tells every rank what comes.

Where programs count alone (one token each, or up to S.ALONE tokens in all) it counts all tokens by itself; it is the
first program, as nothing can be placed without what it says. Of more tokens it is the last, sums what the others
counted (``kernels.dispatch.block_counts``) and sends ``firsts``, the first message of each of them, and after a fence
the counts. These are words that are their own signal (``kernels.sync.ll_words``): status, totals, rows per local
expert.

Example: 4 experts on 2 ranks, rank 0's ids [[0, 3], [1, 0], [-1, 2]]. Rank 0 is told 2 messages and rows [2, 1], rank 1
2 messages and rows [1, 1].
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.block_counts import send_firsts, sum_tallies
from moelink.kernels.dispatch.route import first_of, owner_of, tally_all
from moelink.kernels.numeric import only
from moelink.kernels.sync.credit import wait_until_drained
from moelink.kernels.sync.internode import direct_or_staged, is_near, put, staged_at
from moelink.kernels.sync.ll_words import tagged
from moelink.kernels.sync.signals import I64, fence, own_block
from moelink.memory.protocol import COUNT_HEADER, DISPATCH_BYTES, INVALID_IDS, PHASE_DISPATCH

_HEADER = tl.constexpr(COUNT_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_INVALID = tl.constexpr(INVALID_IDS)
_BYTES = tl.constexpr(DISPATCH_BYTES)


@triton.jit
def counts_at(base, mine, rank, me, word, S: tl.constexpr):
    """Where to store word ``word`` of this rank's counts for ``rank``, whose block is at ``base``."""
    if S.NODE < S.W:
        row = base + S.O_COUNTS + tl.cast(me, tl.int64) * (S.CW * 8)
        return direct_or_staged(row, mine, rank, me, S.O_STAGED_COUNTS, 1, 0, S.CW * 8, S).to(I64) + word
    else:
        return (base + S.O_COUNTS).to(I64) + (me * S.CW + word)


@triton.jit
def store_expert_counts(table, mine, me, first, num_local, pairs, call, S: tl.constexpr):
    """Store ``pairs`` [EP], each expert's at its owner. Experts that get nothing are told so, too."""
    e = tl.arange(0, S.EP)
    owner = owner_of(tl.where(e < S.E, e, -1), first, num_local, S)
    known = owner >= 0
    to = tl.load(table + tl.where(known, owner, 0), mask=known, other=0)
    local = e - first_of(owner, first, S)
    words = counts_at(to, mine, tl.where(known, owner, me), me, _HEADER, S) + local
    tl.atomic_xchg(words, tagged(call, pairs), mask=known, sem="relaxed", scope="sys")


@triton.jit
def put_counts(table, control, mine, me, alone, movers, call, S: tl.constexpr):
    """Put the counts, and ``firsts`` where there are any, at the ranks of other nodes."""
    fence(control)
    at = tl.cast(me, tl.int64)
    firsts: tl.constexpr = (S.SENDERS + 1) * 4
    for d in range(S.W):
        if is_near(d, me, S) == 0:
            if not alone:
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
def send_counts(
    table, record, control, ids, sent, me, first, num_local, num_tokens, alone, shared_begin, shared_end, status,
    movers, drained, call, limit, S: tl.constexpr,
):  # fmt: skip
    """The counting program: tell every rank how many rows and messages come, and that they do. ``sent`` notes it for
    dispatches over the same routing (``kernels.dispatch.send_cached``). ``alone``: the others count each for itself."""
    r = tl.arange(0, S.WP)
    mask = r < S.W
    mine = own_block(control, S)
    ok = tl.full([], 1, tl.int32)
    if alone:
        if num_tokens <= S.TB:
            pairs, messages, invalid = tally_all(
                ids, num_tokens, me, first, num_local, shared_begin, shared_end, S.TB, S
            )  # fmt: skip
        else:
            pairs, messages, invalid = tally_all(
                ids, num_tokens, me, first, num_local, shared_begin, shared_end, S.TC, S
            )  # fmt: skip
        if invalid > 0:
            tl.atomic_add(control + _INVALID, invalid.to(tl.int64), sem="relaxed", scope="gpu")
    else:
        ok, pairs, messages = sum_tallies(table, record, control, mine, me, movers, call, limit, S)
    if ok > 0:
        ok = wait_until_drained(drained, table, record, control, me, _PHASE, call, limit, S)
    if ok > 0:
        most = tl.full([S.WP], 1, tl.int32)
        programs = tl.zeros([S.WP], tl.int32)
        if not alone:
            programs += movers
            most = send_firsts(table, mine, me, movers, S)
        away = tl.sum(tl.where(r == me, 0, messages), 0).to(tl.int64)
        tl.atomic_add(control + _BYTES, away * S.MESSAGE, sem="relaxed", scope="gpu")
        # What precedes the counts must be seen by who sees them; without it nothing has to be waited for.
        if not alone:
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
        store_expert_counts(table, mine, me, first, num_local, pairs, call, S)
        if S.NODE < S.W:
            put_counts(table, control, mine, me, alone, movers, call, S)
        tl.store(sent + r, messages, mask=only(status == 0, mask))
        tl.store(sent + S.W, (call & 0x7FFFFFFF).to(tl.int32), mask=status == 0)
    return ok
