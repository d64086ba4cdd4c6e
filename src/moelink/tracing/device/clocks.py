"""Compare the clocks of ranks, so that their traces have one time.

Rank 0 asks each other rank in turn, ``numbers.rounds`` times: it notes its clock, stores the number of the question in
the peer's control word CLOCK_ASKED, and waits for the answer. The peer waits for the question, reads its clock, and
stores it in rank 0's word CLOCK_TOLD. If the answer came after a round trip of T, the peer read its clock between the
two readings of rank 0, so halfway is wrong by T / 2 at most. The shortest of all rounds counts.

Writers and waits: a rank has one word of each kind. Only rank 0 stores CLOCK_ASKED of rank r, and counts it up. Only
the rank that was asked stores CLOCK_TOLD of rank 0, which asks no more before that answer. An answer is twice the clock
plus the lowest bit of the question's number, so two answers in a row differ even at equal clocks. ``numbers.first`` and
``numbers.rounds`` are even, so the bit is 0 before the first question and after the last. The words announce no other
data, so their order among other stores does not matter. Waits end after ``numbers.limit``, or when this rank is
poisoned.

Example: rank 0 asks at 100, rank 1 answers 7_000_130, rank 0 has the answer at 160: rank 1's clock is 7_000_000 ahead,
give or take 30.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import I64
from moelink.kernels.sync.signals import OK, UNFINISHED, check_timeout, clock, own_block
from moelink.memory.protocol import CLOCK_ASKED, CLOCK_TOLD

_ASKED, _TOLD = tl.constexpr(CLOCK_ASKED), tl.constexpr(CLOCK_TOLD)
_FAR = tl.constexpr(1 << 62)


class ClockNumbers(NamedTuple):
    """Numbers of a comparison.

    Attributes:
        me: this rank's place in the table of peers.
        first: questions that earlier comparisons asked of each rank.
        rounds: questions of this one, an even number.
        limit: ticks of the clock until a wait has expired, int64.
        programs: CTAs that work: 1.
    """

    me: Any
    first: Any
    rounds: Any
    limit: Any
    programs: Any


@triton.jit
def _wait(word, least, bit, poison, limit, S: tl.constexpr):
    """Wait until ``word`` is at least ``least``, and odd (``bit`` 1), even (0) or either (-1). Returns (OK, TIMED_OUT
    or POISONED; the word)."""
    start = clock(S.CLOCK)
    got = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
    state = tl.where((got >= least) & ((bit < 0) | ((got & 1) == bit)), OK, UNFINISHED)
    while state == UNFINISHED:
        got = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
        state = tl.where((got >= least) & ((bit < 0) | ((got & 1) == bit)), OK, UNFINISHED)
        if state == UNFINISHED:
            state = check_timeout(poison, start, limit, S.CLOCK)
    return state, got


@triton.jit
def _ask(peers, out, numbers, S: tl.constexpr):
    """Ask every other rank, as rank 0. Returns OK, TIMED_OUT or POISONED."""
    mine = own_block(peers.control, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    ok = tl.full([], 1, tl.int32)
    for rank in range(1, S.WORLD_SIZE):
        ask = (tl.load(peers.table + rank) + S.OFFSET_CONTROL).to(I64) + _ASKED
        best = tl.full([], 0, tl.int64) + _FAR
        ahead = tl.full([], 0, tl.int64)
        for i in range(numbers.rounds):
            if ok > 0:
                number = (numbers.first + i + 1).to(tl.int64)
                before = clock(S.CLOCK)
                tl.atomic_xchg(ask, number, sem="relaxed", scope="sys")
                ok, told = _wait(peers.control + _TOLD, 0, number & 1, poison, numbers.limit, S)
                trip = clock(S.CLOCK) - before
                ahead = tl.where(trip < best, (told >> 1) - before - trip // 2, ahead)
                best = tl.minimum(trip, best)
        tl.store(out + 2 * rank, ahead)
        tl.store(out + 2 * rank + 1, (best + 1) // 2)
    return ok


@triton.jit
def _answer(peers, numbers, S: tl.constexpr):
    """Answer rank 0's questions. Returns OK, TIMED_OUT or POISONED."""
    mine = own_block(peers.control, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    tell = (tl.load(peers.table) + S.OFFSET_CONTROL).to(I64) + _TOLD
    ok = tl.full([], 1, tl.int32)
    for i in range(numbers.rounds):
        if ok > 0:
            number = (numbers.first + i + 1).to(tl.int64)
            ok, _ = _wait(peers.control + _ASKED, number, -1, poison, numbers.limit, S)
            if ok > 0:
                tl.atomic_xchg(tell, 2 * clock(S.CLOCK) + (number & 1), sem="relaxed", scope="sys")
    return ok


@triton.jit
def ep_compare_clocks_kernel(peers, out, numbers, S: tl.constexpr):
    """Compare clocks with one CTA. Rank 0 writes ``out`` [W, 2] int64: the lead of each rank's clock over rank 0's, and
    the largest error of it, in ticks. ``out[0, 0]``: 1 after a comparison that ended well."""
    if numbers.me == 0:
        ok = _ask(peers, out, numbers, S)
    else:
        ok = _answer(peers, numbers, S)
    tl.store(out, ok.to(tl.int64))
