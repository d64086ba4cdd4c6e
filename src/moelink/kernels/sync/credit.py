"""When what lies in a peer's block may be overwritten: who has read a call to its end, who says so and who asks.

A rank has *drained* call n of a phase once all programs of its receiving role have read what call n brought. These
count the call (:func:`count_drained`) and tell nobody: a fence and a store at the end of a launch would delay
whatever comes after it. The next launch that sends, of either phase, tells all ranks of this node both counts as the
first thing that its program 0 does (:func:`tell_drained`). Whoever stores for call n + 1 waits until all have told n.

Why that is safe: what a launch has loaded is in registers when it ends, and the next one starts after it in stream
order, so a relaxed store tells the truth. Where a launch also stored what the next call relies on, zeros in place of
rows (``kernels.sync.small_calls``), it counts with a release. The word is raised by a maximum, because launches of both
phases tell and two of them may be captured into different streams. A store waits for the answer of the look before it,
on which it depends.

Why nobody waits in vain: a launch tells before it waits, and in every call every rank sends, be it a refusal. In the
usual turn of dispatch and combine nobody waits at all: that a rank drained dispatch n, its combine n has told. Ranks of
one process on CPUs may run one after the other, so there a receiving half that is launched alone is followed by a
launch that tells (:func:`ep_tell_drained_kernel`). Ranks of other nodes are told at once by the last program to finish
(``network.tell_far``): it takes longer.

Example: ranks 0 and 1 have read 3 dispatches and 2 combines; with its third combine each rank raises the other's words
to (3, 2), so that a fourth dispatch may store at once, and a third combine may, too.
"""

import triton
import triton.language as tl

from moelink.kernels.sync.internode import near_only, tell_far
from moelink.kernels.sync.signals import (
    I64,
    agree,
    arrive,
    calls_made,
    count_arrival,
    fence,
    has_poison,
    own_block,
    settle,
    wait_all,
)
from moelink.memory.protocol import CALL_SHIFT, COMBINE_RECEIVED, DISPATCH_RECEIVED, DONE, PHASE_COMBINE, PHASE_DISPATCH

_READ = tl.constexpr(DISPATCH_RECEIVED)
_DONE = tl.constexpr(DONE)
_SHIFT = tl.constexpr(CALL_SHIFT)
_NEXT = tl.constexpr((COMBINE_RECEIVED - DISPATCH_RECEIVED) // (PHASE_COMBINE - PHASE_DISPATCH))


@triton.jit
def drained_at(block, phase, rank, S: tl.constexpr):
    """The word of ``block`` that says how many calls of ``phase`` ``rank`` has drained."""
    return (block + S.O_DRAINED).to(I64) + (phase * S.W + rank)


@triton.jit
def tell_drained(table, control, me, S: tl.constexpr):
    """Tell every rank of this node how many calls of both phases this one has read."""
    r = tl.arange(0, S.WP)
    near = near_only(r < S.W, r, me, S)
    base = tl.load(table + r, mask=r < S.W, other=0)
    for phase in tl.static_range(2):
        read = calls_made(control, _READ + phase * _NEXT)
        words = drained_at(base, phase, me, S)
        tl.atomic_max(words, tl.zeros([S.WP], tl.int64) + read, mask=near, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=("me", "programs"))
def ep_tell_drained_kernel(table, record, control, me, programs, S: tl.constexpr):
    """One program that tells, for ranks that cannot wait for another one's next launch."""
    tell_drained(table, control, me, S)


@triton.jit
def count_drained(
    table, control, me, phase, call, program, num_programs, S: tl.constexpr, sem: tl.constexpr
):  # fmt: skip
    """Program ``program`` of a receiving role has read what call ``call`` of ``phase`` brought: all of them together
    count it as drained. The last one tells ranks of other nodes, for which the order of ``signals.arrive`` is needed.
    """
    role = _READ + phase * _NEXT
    if S.NODE < S.W:
        if arrive(control + _DONE + role, num_programs) > 0:
            tl.atomic_xchg(control + role, call << _SHIFT, sem="relaxed", scope="gpu")
            fence(control)
            tell_far(table, me, S.O_DRAINED + phase * S.W * 8, call, S)
    else:
        count_arrival(control, role, program, num_programs, sem)


@triton.jit
def glance(control, phase, call, S: tl.constexpr):
    """How a sender finds things: -1 when this rank is poisoned, 1 when every rank has already drained the call before
    ``call``, else 0. One look at both, to be begun early; each thread's own until :func:`wait_until_drained`."""
    r = tl.arange(0, S.WP)
    words = drained_at(own_block(control, S), phase, r, S)
    told = tl.load(words, mask=r < S.W, other=call, volatile=True)
    state = tl.min((told >= call - 1).to(tl.int32), 0)
    return tl.where(has_poison(control, S) > 0, -1, state)


@triton.jit
def wait_until_drained(looked, table, record, control, me, phase, call, limit, S: tl.constexpr):
    """Wait until every rank has drained the call before ``call``, unless ``looked`` (:func:`glance`) says so.

    Returns 1, or 0 or -1 after an error.
    """
    ok = agree(looked)
    if ok < 0:
        settle(ok, table, record, control, me, me, phase, call, call, call, S)
    elif ok == 0:
        r = tl.arange(0, S.WP)
        mine = own_block(control, S)
        words = drained_at(mine, phase, r, S)
        ok, peer, got = wait_all(words, r < S.W, call - 1, (mine + S.O_POISON).to(I64), limit, S.CLOCK)
        # A peer told what it drained when it began the call after: that one is the last it was seen in.
        settle(ok, table, record, control, me, peer, phase, call, call, got + 1, S)
    return ok
