"""Grant and await credit: a receiver's statement that it has read a call to the end, so that senders may overwrite.

A rank has read call n of a phase to the end once all CTAs of its receiving role have read what call n brought. These
CTAs count the call (:func:`count_read`) but tell no rank, because a fence and a store at the end of a launch would
delay the next launch. The next launch that sends, of either phase, grants credit: the first thing that its CTA 0 does
is to tell all ranks of this node both counts (:func:`grant_credits`). A rank that stores for call n + 1 first waits
until every rank has granted credit for call n (:func:`wait_for_credits`).

Why that is safe: what a launch has loaded is in registers when it ends, and the next launch starts after it in stream
order. So a relaxed store is enough to tell the count. If a launch also stored values that the next call relies on,
zeros in place of rows (``kernels.sync.lamport_slots``), it counts with a release. A maximum raises the word, because
launches of both phases grant credit and two of them may be captured into different streams. A sender's stores wait for
the result of the poll before them, on which they depend.

Why every wait ends: a launch grants credit before it waits, and every rank sends in every call, even if only a refusal.
When dispatch and combine alternate, as usual, no sender waits at all: combine n has already granted the credit for
dispatch n. Ranks of one process run one after the other on CPUs, and where they share a GPU. There a separate launch
grants credit after a receiving half that is launched alone (:func:`ep_grant_credits_kernel`), with ``zero_copy`` before
the next call. Ranks of other nodes are told at once, by the last CTA to finish (``internode.tell_inter_node``), because
that takes longer.

Example: ranks 0 and 1 have read 3 dispatches and 2 combines; with its third combine each rank raises the other's words
to (3, 2), so that a fourth dispatch and a third combine may store at once.
"""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import between_nodes_or, intra_node_only, tell_inter_node
from moelink.kernels.sync.signals import (
    I64,
    POISONED,
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
from moelink.tracing.device.stamps import CREDIT_SEEN, WAITED, arrivals, stamp

_READ = tl.constexpr(DISPATCH_RECEIVED)
_DONE = tl.constexpr(DONE)
_SHIFT = tl.constexpr(CALL_SHIFT)
_NEXT = tl.constexpr((COMBINE_RECEIVED - DISPATCH_RECEIVED) // (PHASE_COMBINE - PHASE_DISPATCH))


@triton.jit
def credit_at(block, phase, rank, S: tl.constexpr):
    """Return the word of ``block`` that says how many calls of ``phase`` rank ``rank`` has granted credit for."""
    return (block + S.OFFSET_CREDIT).to(I64) + (phase * S.WORLD_SIZE + rank)


@triton.jit
def grant_credits(table, control, me, S: tl.constexpr):
    """Tell every rank of this node how many calls of both phases this rank has read."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    intra_node = intra_node_only(r < S.WORLD_SIZE, r, me, S)
    base = tl.load(table + r, mask=r < S.WORLD_SIZE, other=0)
    for phase in tl.static_range(2):
        read = calls_made(control, phase * _NEXT + _READ)
        words = credit_at(base, phase, me, S)
        tl.atomic_max(
            words, tl.zeros([S.WORLD_SIZE_POW2], tl.int64) + read, mask=intra_node, sem="relaxed", scope="sys"
        )


@triton.jit
def ep_grant_credits_kernel(peers, numbers, S: tl.constexpr):
    """Grant credits with one CTA, for ranks that cannot wait for another rank's next launch."""
    grant_credits(peers.table, peers.control, numbers.me, S)


@triton.jit
def _count_and_tell(ctx, phase, role, num_programs, S: tl.constexpr):
    """Count the call as the last CTA, and tell ranks of other nodes; the others only arrive. Returns 1."""
    if arrive(ctx.control + _DONE + role, num_programs) > 0:
        tl.atomic_xchg(ctx.control + role, ctx.call << _SHIFT, sem="relaxed", scope="gpu")
        fence(ctx.control)
        tell_inter_node(ctx.table, ctx.me, S.OFFSET_CREDIT + phase * S.WORLD_SIZE * 8, ctx.call, S)
    return 1


@triton.jit
def count_read(ctx, phase, program, num_programs, S: tl.constexpr, sem: tl.constexpr):
    """Count call ``call`` of ``phase`` as read, together with all other CTAs of the receiving role, as CTA ``program``.

    Between nodes the last CTA tells ranks of other nodes, for which the order of ``signals.arrive`` is needed.
    """
    role = phase * _NEXT + _READ
    if between_nodes_or(0, _count_and_tell, (ctx, phase, role, num_programs), S) == 0:
        count_arrival(ctx.control, role, program, num_programs, sem)


@triton.jit
def poll_once(control, phase, call, S: tl.constexpr):
    """Poll the credits once: -1 if this rank is poisoned, 1 if every rank has granted credit for the call before
    ``call``, else 0.

    Both words are read at once, and early. Each thread has its own result until :func:`wait_for_credits`.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    words = credit_at(own_block(control, S), phase, r, S)
    told = tl.load(words, mask=r < S.WORLD_SIZE, other=call, volatile=True)
    state = tl.min((told >= call - 1).to(tl.int32), 0)
    return tl.where(has_poison(control, S) > 0, POISONED, state)


@triton.jit
def wait_for_credits(looked, ctx, phase, S: tl.constexpr):
    """Wait until every rank has granted credit for the call before ``call``, unless ``looked`` (:func:`poll_once`) has
    found it.

    Returns OK, TIMED_OUT or POISONED.
    """
    ok = block_uniform(looked)
    if ok < 0:
        report_failure(ok, ctx, ctx.me, phase, ctx.call, ctx.call, S)
    elif ok == 0:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        mine = own_block(ctx.control, S)
        words = credit_at(mine, phase, r, S)
        ok, peer, got = wait_all(
            words, r < S.WORLD_SIZE, ctx.call - 1, (mine + S.OFFSET_POISON).to(I64), ctx.limit, S.CLOCK,
            arrivals(ctx, WAITED, r, S), S.TRACE,
        )  # fmt: skip
        # A peer grants credit as it begins the next call: that is the last call in which it was seen.
        report_failure(ok, ctx, peer, phase, ctx.call, got + 1, S)
    stamp(ctx, CREDIT_SEEN, S)
    return ok
