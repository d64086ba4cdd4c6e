"""Dispatch, sender role: how the programs of one rank share their counting when tokens are many.

Program p counts its own tokens, stores the result in row p of ``tallies`` and publishes ``tally_flag[p] = call``. Who
needs the sum of the first n programs waits for their flags. Programs wait only for lower ones, which start earlier and
publish before they wait for anything, so nobody waits in vain on a GPU or in the interpreter. The next call's rows are
stored by the next launch, in stream order.

Example: 3 programs with messages [2, 1], [0, 3], [1, 1] for two ranks: program 2 starts at slots [2, 4], and the firsts
sent are [0, 2, 2, 3] to rank 0 and [0, 1, 4, 5] to rank 1.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.route import tally
from moelink.kernels.sync.internode import direct_or_staged
from moelink.kernels.sync.signals import I32, I64, publish, settle, wait_all
from moelink.memory.protocol import INVALID_IDS, PHASE_DISPATCH

_PHASE = tl.constexpr(PHASE_DISPATCH)
_INVALID = tl.constexpr(INVALID_IDS)


@triton.jit
def publish_tally(mine, program, pairs, messages, call, S: tl.constexpr):
    """Store what this program counted, for the programs after it."""
    row = (mine + S.O_TALLIES).to(I32) + program * S.TALLY
    r = tl.arange(0, S.WP)
    tl.store(row + tl.arange(0, S.EP), pairs)
    tl.store(row + S.EP + r, messages)
    flag = (mine + S.O_TALLY_FLAG).to(I64) + program + r * 0
    publish(flag, r == 0, tl.zeros([S.WP], tl.int64) + call)


@triton.jit
def tell_tally(
    control, mine, ids, begin, end, me, first, num_local, shared_begin, shared_end, program, call, S: tl.constexpr
):  # fmt: skip
    """Tell what tokens [begin, end) of ``program`` need."""
    pairs, sent, invalid = tally(ids, begin, end, me, first, num_local, shared_begin, shared_end, S.TB, S)
    publish_tally(mine, program, pairs, sent, call, S)
    if invalid > 0:
        tl.atomic_add(control + _INVALID, invalid.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def sum_tallies(table, record, control, mine, me, programs, call, limit, S: tl.constexpr):
    """Pairs [EP] and messages [WP] of programs [0, programs). Returns 1, or 0 or -1 after an error, before them."""
    p = tl.arange(0, S.SENDERS)
    flags = (mine + S.O_TALLY_FLAG).to(I64) + p
    ok, _, got = wait_all(flags, p < programs, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK)
    settle(ok, table, record, control, me, me, _PHASE, call, call, got, S)
    e = tl.arange(0, S.EP)
    r = tl.arange(0, S.WP)
    pairs = tl.zeros([S.TR, S.EP], tl.int32)
    messages = tl.zeros([S.TR, S.WP], tl.int32)
    if ok > 0:
        for p0 in range(0, programs, S.TR):
            q = p0 + tl.arange(0, S.TR)
            row = (mine + S.O_TALLIES).to(I32) + q * S.TALLY
            mask = (q < programs)[:, None]
            pairs += tl.load(row[:, None] + e[None, :], mask=mask & (e >= 0)[None, :], other=0)
            messages += tl.load(row[:, None] + (S.EP + r)[None, :], mask=mask & (r >= 0)[None, :], other=0)
    return ok, tl.sum(pairs, 0), tl.sum(messages, 0)


@triton.jit
def send_firsts(table, mine, me, programs, S: tl.constexpr):
    """Tell every rank where each program's messages to it begin. Returns the most that one program has, per rank."""
    r = tl.arange(0, S.WP)
    base = tl.load(table + r, mask=r < S.W, other=0)
    to = (base + S.O_FIRSTS).to(I32) + me * (S.SENDERS + 1)
    if S.NODE < S.W:
        row: tl.constexpr = (S.SENDERS + 1) * 4
        to = direct_or_staged(to.to(tl.int64), mine, r, me, S.O_STAGED_FIRSTS, 1, 0, row, S).to(I32)
    p = tl.arange(0, S.SENDERS)
    mask = (p < programs)[:, None] & (r < S.W)[None, :]
    row = (mine + S.O_TALLIES).to(I32) + p * S.TALLY + S.EP
    count = tl.load(row[:, None] + r[None, :], mask=mask, other=0)
    tl.store(to[None, :] + p[:, None], tl.cumsum(count, 0) - count, mask=mask)
    tl.store(to + programs, tl.sum(count, 0), mask=r < S.W)
    return tl.max(count, 0)
