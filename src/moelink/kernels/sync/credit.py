"""When what lies in a peer's block may be overwritten: who has read a call to its end, who says so and who asks.

A rank has *drained* call n of a phase once all programs of its receiving role have read what call n brought. These
count the call (:func:`count_read`) and tell nobody: a fence and a store at the end of a launch would delay
whatever comes after it. The next launch that sends, of either phase, tells all ranks of this node both counts as the
first thing that its program 0 does (:func:`grant_credits`). Whoever stores for call n + 1 waits until all have told n.

Why that is safe: what a launch has loaded is in registers when it ends, and the next one starts after it in stream
order, so a relaxed store tells the truth. Where a launch also stored what the next call relies on, zeros in place of
rows (``kernels.sync.lamport_slots``), it counts with a release. The word is raised by a maximum, because launches of
both phases tell and two of them may be captured into different streams. A store waits for the answer of the look before
it, on which it depends.

Why nobody waits in vain: a launch tells before it waits, and in every call every rank sends, be it a refusal. In the
usual turn of dispatch and combine nobody waits at all: that a rank drained dispatch n, its combine n has told. Ranks of
one process on CPUs may run one after the other, so there a receiving half that is launched alone is followed by a
launch that tells (:func:`ep_grant_credits_kernel`). Ranks of other nodes are told at once by the last program to finish
(``network.tell_inter_node``): it takes longer.

Example: ranks 0 and 1 have read 3 dispatches and 2 combines; with its third combine each rank raises the other's words
to (3, 2), so that a fourth dispatch may store at once, and a third combine may, too.
"""

import triton
import triton.language as tl

from moelink.kernels.sync.internode import intra_node_only, tell_inter_node
from moelink.kernels.sync.signals import (
    I64,
    arrive,
    block_uniform,
    calls_made,
    count_arrival,
    fence,
    has_poison,
    own_block,
    report_failure,
    wait_all,
)
from moelink.memory.protocol import CALL_SHIFT, COMBINE_RECEIVED, DISPATCH_RECEIVED, DONE, PHASE_COMBINE, PHASE_DISPATCH

_READ = tl.constexpr(DISPATCH_RECEIVED)
_DONE = tl.constexpr(DONE)
_SHIFT = tl.constexpr(CALL_SHIFT)
_NEXT = tl.constexpr((COMBINE_RECEIVED - DISPATCH_RECEIVED) // (PHASE_COMBINE - PHASE_DISPATCH))


@triton.jit
def credit_at(block, phase, rank, S: tl.constexpr):
    """The word of ``block`` that says how many calls of ``phase`` ``rank`` has drained."""
    return (block + S.OFFSET_CREDIT).to(I64) + (phase * S.WORLD_SIZE + rank)


@triton.jit
def grant_credits(table, control, me, S: tl.constexpr):
    """Tell every rank of this node how many calls of both phases this one has read."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    near = intra_node_only(r < S.WORLD_SIZE, r, me, S)
    base = tl.load(table + r, mask=r < S.WORLD_SIZE, other=0)
    for phase in tl.static_range(2):
        read = calls_made(control, _READ + phase * _NEXT)
        words = credit_at(base, phase, me, S)
        tl.atomic_max(words, tl.zeros([S.WORLD_SIZE_POW2], tl.int64) + read, mask=near, sem="relaxed", scope="sys")


@triton.jit
def ep_grant_credits_kernel(peers, numbers, S: tl.constexpr):
    """One program that tells, for ranks that cannot wait for another one's next launch."""
    grant_credits(peers.table, peers.control, numbers.me, S)


@triton.jit
def count_read(ctx, phase, program, num_programs, S: tl.constexpr, sem: tl.constexpr):
    """Program ``program`` of a receiving role has read what call ``call`` of ``phase`` brought: all of them together
    count it as drained. The last one tells ranks of other nodes, for which the order of ``signals.arrive`` is needed.
    """
    role = _READ + phase * _NEXT
    if S.NODE_SIZE < S.WORLD_SIZE:
        if arrive(ctx.control + _DONE + role, num_programs) > 0:
            tl.atomic_xchg(ctx.control + role, ctx.call << _SHIFT, sem="relaxed", scope="gpu")
            fence(ctx.control)
            tell_inter_node(ctx.table, ctx.me, S.OFFSET_CREDIT + phase * S.WORLD_SIZE * 8, ctx.call, S)
    else:
        count_arrival(ctx.control, role, program, num_programs, sem)


@triton.jit
def poll_once(control, phase, call, S: tl.constexpr):
    """How a sender finds things: -1 when this rank is poisoned, 1 when every rank has already drained the call before
    ``call``, else 0. One look at both, to be begun early; each thread's own until :func:`wait_for_credits`."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    words = credit_at(own_block(control, S), phase, r, S)
    told = tl.load(words, mask=r < S.WORLD_SIZE, other=call, volatile=True)
    state = tl.min((told >= call - 1).to(tl.int32), 0)
    return tl.where(has_poison(control, S) > 0, -1, state)


@triton.jit
def wait_for_credits(looked, ctx, phase, S: tl.constexpr):
    """Wait until every rank has drained the call before ``call``, unless ``looked`` (:func:`poll_once`) says so.

    Returns 1, or 0 or -1 after an error.
    """
    ok = block_uniform(looked)
    if ok < 0:
        report_failure(ok, ctx, ctx.me, phase, ctx.call, ctx.call, S)
    elif ok == 0:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        mine = own_block(ctx.control, S)
        words = credit_at(mine, phase, r, S)
        ok, peer, got = wait_all(
            words, r < S.WORLD_SIZE, ctx.call - 1, (mine + S.OFFSET_POISON).to(I64), ctx.limit, S.CLOCK
        )
        # A peer told what it drained when it began the call after: that one is the last it was seen in.
        report_failure(ok, ctx, peer, phase, ctx.call, got + 1, S)
    return ok
