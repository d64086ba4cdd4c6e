"""Stamp moments of a call (S.TRACE): the times at which a CTA had read, counted, waited, stored, published.

Each CTA has a record of its own in its rank's trace buffer (``tracing.device.layout``). :func:`open_record` clears it
as the CTA begins; the other functions store into it. No CTA reads a stamp or waits for one, and the launch's end makes
stamps visible to the host, so they take no part in the protocol.

The control word TRACE_AT holds the address of the buffer, 0 while no trace is open. So a CUDA graph that was captured
with stamps stores nothing after the trace. Without S.TRACE all functions compile to nothing.

A compiled kernel stamps the device's ``%globaltimer``, nanoseconds. An interpreted one stamps steps: a counter in
rank 0's control word TRACE_STEPS that every stamp of every rank counts up by one, which orders the stamps of all ranks.

A clock may be read while an earlier load is under way. :func:`stamp_after` reads it after a value has been loaded.

Example: 2 ranks, CTA 1 of dispatch's sender role stamps "published" (number 6, a first time) at step 40, and again at
step 44: word 2 + 6 holds 2**62 - 40, and word 2 + 7, "last published", 44.
"""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import I64
from moelink.kernels.numeric import next_power_of_2, only
from moelink.kernels.records import CallContext, Stamps
from moelink.memory.protocol import TRACE_AT, TRACE_STEPS
from moelink.tracing.device import layout

_AT, _STEPS = tl.constexpr(TRACE_AT), tl.constexpr(TRACE_STEPS)
_CALLS, _ROLES = tl.constexpr(layout.TRACE_CALLS), tl.constexpr(layout.TRACE_ROLES)
_HEADER, _MOMENTS = tl.constexpr(layout.TRACE_HEADER), tl.constexpr(layout.NUM_MOMENTS)
_PEER_MOMENTS, _FIRST_FROM = tl.constexpr(layout.PEER_MOMENTS), tl.constexpr(layout.FIRST_FROM)
_BEGUN = tl.constexpr(layout.BEGUN)
TOLD, IDS_READ, COUNTED = tl.constexpr(layout.TOLD), tl.constexpr(layout.IDS_READ), tl.constexpr(layout.COUNTED)
CREDIT_SEEN, FIRST_STORE = tl.constexpr(layout.CREDIT_SEEN), tl.constexpr(layout.FIRST_STORE)
PUBLISHED, LAST_PUBLISHED = tl.constexpr(layout.PUBLISHED), tl.constexpr(layout.LAST_PUBLISHED)
COUNTS_SEEN, BASE_KNOWN = tl.constexpr(layout.COUNTS_SEEN), tl.constexpr(layout.BASE_KNOWN)
MESSAGE_SEEN, LAST_MESSAGE = tl.constexpr(layout.MESSAGE_SEEN), tl.constexpr(layout.LAST_MESSAGE)
ROW_STORED, LAST_STORED = tl.constexpr(layout.ROW_STORED), tl.constexpr(layout.LAST_STORED)
WAITED, ARRIVED = tl.constexpr(layout.WAITED), tl.constexpr(layout.ARRIVED)


@triton.jit
def _now(steps, CLOCK: tl.constexpr):
    """Return the time, int64: nanoseconds, or (interpreted) the next step of the counter at ``steps``."""
    if CLOCK == "ptx":
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return tl.atomic_add(steps.to(I64), tl.full([], 1, tl.int64), sem="relaxed", scope="sys") + 1


@triton.jit
def _now_with(value, steps, CLOCK: tl.constexpr):
    """Return the time at which each element of ``value``, int32, is in its thread's register."""
    if CLOCK == "ptx":
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0x80000000; mov.u64 $0, 0; @p mov.u64 $0, %globaltimer; }",
            "=l,r", [value], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.zeros(value.shape, tl.int64) + _now(steps, CLOCK)


@triton.jit
def _sm(CLOCK: tl.constexpr):
    """Return the number of this CTA's SM; interpreted, the number of the CTA in its launch."""
    if CLOCK == "ptx":
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.program_id(0)


@triton.jit
def open_record(peers, role, program, call, S: tl.constexpr):
    """Clear the record of CTA ``program`` of ``role`` for call ``call``, and stamp that it has begun.

    Returns the place of the record, for :class:`CallContext`; 0 without S.TRACE.
    """
    if S.TRACE:
        steps = tl.full([], 0, tl.int64)
        if S.CLOCK != "ptx":
            steps = tl.load(peers.table) + S.OFFSET_CONTROL + _STEPS * 8
        begun = _now(steps, S.CLOCK)
        words: tl.constexpr = _HEADER + _MOMENTS + _PEER_MOMENTS * S.WORLD_SIZE
        record = ((call % _CALLS) * _ROLES + role) * S.TRACE_CTAS + program
        buffer = tl.load(peers.control + _AT)
        at = tl.where((buffer != 0) & (program < S.TRACE_CTAS), buffer + record * (words * 8), 0)
        w = tl.arange(0, next_power_of_2(words))
        value = tl.where(w == 0, call, tl.where(w == 1, _sm(S.CLOCK) + 1, tl.where(w == _HEADER + _BEGUN, begun, 0)))
        tl.store((at + w * 8).to(I64), value, mask=only(at != 0, w < words))
        tl.debug_barrier()
        return Stamps(at, steps)
    else:
        return 0


@triton.jit
def _word(ctx, moment: tl.constexpr, peer, S: tl.constexpr):
    """Return the address of the word of ``moment``, or of its words for ``peer`` [N]; 0 while no trace is open."""
    if moment < _MOMENTS:
        at = ctx.trace.at + (_HEADER + moment) * 8 + 0 * peer
    else:
        at = ctx.trace.at + (_HEADER + _MOMENTS + (moment - _MOMENTS) * S.WORLD_SIZE) * 8 + tl.cast(peer, tl.int64) * 8
    return tl.where(ctx.trace.at != 0, at, 0)


@triton.jit
def traced_if(ctx, there, S: tl.constexpr):
    """Return ``ctx``, or if not ``there`` a context without stamps, for a CTA that looks for work and finds none."""
    if S.TRACE:
        stamps = Stamps(tl.where(there, ctx.trace.at, 0), ctx.trace.steps)
        return CallContext(ctx.table, ctx.record, ctx.control, ctx.me, ctx.limit, ctx.call, stamps)
    else:
        return ctx


@triton.jit
def stamp(ctx, moment: tl.constexpr, S: tl.constexpr):
    """Stamp ``moment``, in place of an earlier stamp of this call."""
    if S.TRACE:
        at = _word(ctx, moment, 0, S)
        tl.store(at.to(I64), _now(ctx.trace.steps, S.CLOCK), mask=at != 0)


@triton.jit
def stamp_first(ctx, moment: tl.constexpr, S: tl.constexpr, peer=0):
    """Stamp ``moment`` (with a word for each peer: that of ``peer``), unless it was stamped in this call."""
    if S.TRACE:
        at = _word(ctx, moment, peer, S)
        _keep_first(at, _now(ctx.trace.steps, S.CLOCK), at != 0)


@triton.jit
def stamp_after(ctx, moment: tl.constexpr, value, S: tl.constexpr):
    """Call :func:`stamp_first` after ``value`` [N], int32, has been loaded."""
    if S.TRACE:
        i = tl.arange(0, value.shape[0])
        at = _word(ctx, moment, i * 0, S)
        _keep_first(at, _now_with(value, ctx.trace.steps, S.CLOCK), (at != 0) & (i == 0))


@triton.jit
def stamp_both(ctx, first: tl.constexpr, last: tl.constexpr, S: tl.constexpr):
    """Stamp the moments ``first``, unless it was stamped in this call, and ``last``."""
    if S.TRACE:
        now = _now(ctx.trace.steps, S.CLOCK)
        at = _word(ctx, first, 0, S)
        _keep_first(at, now, at != 0)
        at = _word(ctx, last, 0, S)
        tl.store(at.to(I64), now, mask=at != 0)


@triton.jit
def stamp_awaited(ctx, first: tl.constexpr, last: tl.constexpr, slots, S: tl.constexpr):
    """Call :func:`stamp_both` after a wait for a token's rows, unless it awaited none. ``slots`` [ranks]: the message
    slot of each row, -1 for none."""
    if S.TRACE:
        if tl.max(slots, 0) >= 0:
            stamp_both(ctx, first, last, S)


@triton.jit
def _keep_first(at, now, mask):
    """Store the time ``now`` at the addresses ``at`` under ``mask``, unless they hold an earlier one."""
    tl.atomic_max(at.to(I64), tl.full([], _FIRST_FROM, tl.int64) - now, mask=mask, sem="relaxed", scope="gpu")


@triton.jit
def arrivals(ctx, moment: tl.constexpr, peer, S: tl.constexpr):
    """Return the places of ``moment`` of the ranks ``peer`` [N], for :func:`note_reached`; ranks from W on have none.
    Without S.TRACE: 0."""
    if S.TRACE:
        return Stamps(tl.where(peer < S.WORLD_SIZE, _word(ctx, moment, peer, S), 0), ctx.trace.steps)
    else:
        return 0


@triton.jit
def note_reached(where, reached, CLOCK: tl.constexpr, TRACE: tl.constexpr):
    """Stamp, at ``where`` (:func:`arrivals`), the ranks that a poll has found ``reached`` [N] for the first time."""
    if TRACE:
        new = reached & (where.at != 0)
        if CLOCK == "ptx":
            _keep_first(where.at, _now(where.steps, CLOCK), new)
        else:  # a poll that finds nothing new is no step: schedules would take it for progress
            new = new & (tl.load(where.at.to(I64), mask=new, other=1) == 0)
            if tl.max(new.to(tl.int32), 0) > 0:
                _keep_first(where.at, _now(where.steps, CLOCK), new)


@triton.jit
def note_late(late, missing, rank, S: tl.constexpr):
    """Return ``late`` [N], int64, with the bit of ``rank`` where an element of its row is ``missing``, for
    :func:`note_whole`."""
    if S.TRACE:
        late = late | tl.where(missing, tl.full([], 1, tl.int64) << rank, 0)
    return late


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def note_whole(where, awaited, late, S: tl.constexpr):
    """Call :func:`note_reached` for ``awaited`` ranks [ranks] without late elements. ``late`` [N], int64, has a bit for
    each rank: that element has not come."""
    if S.TRACE:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        bits = tl.reduce(late, 0, _either)
        note_reached(where, awaited & (((bits >> r) & 1) == 0), S.CLOCK, S.TRACE)
