"""Publish where rows go, and look it up: the row table between the planner of dispatch and the other receivers of its
rank (S.ROW_TABLE; ``memory.workspace`` says when, and why).

Receiver CTA 0, the *planner* (``kernels.dispatch.receive_planned``), alone waits for the counts of every source. From
them it computes where the rows of each source go, and publishes that in the region ``row_table`` of this rank's own
block. The others look up the few words that the rows of a message need.

======  ==========================================================================================================
row     words, of which each has a column for every local expert e
======  ==========================================================================================================
0       the head: 4 x the most messages of a source + what to do (TABLE_GO, TABLE_NOTHING)
1 + r   first row of source r in e's group; of W, one past the last source, the row after the last one
W + 2   first 128-row block of e's scales, where these are in tiles
======  ==========================================================================================================

Row 1 so begins each group, and the difference of two rows is how many rows a source has there. Against that a position
that came over the wire is checked.

Who writes: the planner, in each call that counts and of which it has the counts, also if another rank refused the call.
Over cached routing nobody reads the table. There receiver CTA 0 only gives the words the call's number
(:func:`renew_table`), because 31 bits of it tell calls apart only if 2**31 calls never pass without a write. Calls that
this rank refuses, and refused ones over cached routing, write nothing; each of them ends in an error.

Who waits: every other receiver, once, until all words belong to the call (:func:`wait_for_table`). The planner has the
lowest number of the receivers, so it has begun before another one waits for it, and it waits for no CTA of this launch
itself. If its own wait for counts fails it publishes nothing. Then this rank is poisoned, which ends all waits.

Why no order is needed: words carry their call, as counts do (``kernels.sync.ll_words``), so each is valid by itself,
whenever it arrives. Receivers load the words that they need after the wait.

Why the next call cannot overtake: only receivers of this rank read the table. They have read what they need before they
count the call as received. Only after all of them have does this rank grant credit for it, and a source tells counts of
the next call only with that credit; so the next planner has nothing to publish before. Besides, the next launch begins
after this one has ended.

Example: 2 local experts, counts from ranks 0 to 3 [[2, 1], [1, 0], [0, 2], [0, 0]], 3 messages at most from one of
them, S.ROW_ALIGNMENT 4. The head is 4 x 3 + TABLE_GO = 13, the rows of the sources begin at [[0, 4], [2, 5], [3, 5],
[3, 7]], and the last ones end at [3, 7]. Rank 1 has 3 - 2 = 1 row of expert 0, row 2.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.row_offsets import group_starts
from moelink.kernels.numeric import next_power_of_2
from moelink.kernels.records import Groups
from moelink.kernels.sync.ll_words import ll_word, value_at, wait_ll_words
from moelink.kernels.sync.signals import I64, own_block, report_failure
from moelink.memory.protocol import PHASE_DISPATCH
from moelink.tracing.device.stamps import BASE_KNOWN, stamp_first

_PHASE = tl.constexpr(PHASE_DISPATCH)


@triton.jit
def _words(control, row, e, S: tl.constexpr):
    """Return where column ``e`` of row ``row`` of the table is."""
    return (own_block(control, S) + S.OFFSET_ROW_TABLE).to(I64) + (row * S.MAX_LOCAL_EXPERTS + e)


@triton.jit
def _publish_rows(ctx, row, values, mask, S: tl.constexpr):
    """Publish ``values`` [n, columns] in the rows ``row`` [n] under ``mask`` [n]."""
    e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)[None, :]
    words = _words(ctx.control, row[:, None], e, S)
    mask = mask[:, None] & (e < S.MAX_LOCAL_EXPERTS)
    tl.atomic_xchg(words, ll_word(ctx.call, values), mask=mask, sem="relaxed", scope="gpu")


@triton.jit
def publish_table(ctx, rows, starts, bases, most, state, S: tl.constexpr):
    """Publish the table as the planner.

    ``rows`` [ranks, columns]: rows of each source. ``starts``, ``bases`` [columns]: first row and first 128-row block
    of each group. ``most``: the most messages of a source. ``state``: TABLE_GO or TABLE_NOTHING.
    """
    one = tl.arange(0, 1)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    starts = starts[None, :]
    _publish_rows(ctx, one, starts * 0 + (4 * most + state), one == 0, S)
    _publish_rows(ctx, 1 + r, starts + tl.cumsum(rows, 0) - rows, r < S.WORLD_SIZE, S)
    _publish_rows(ctx, 1 + S.WORLD_SIZE + one, starts + tl.sum(rows, 0)[None, :], one == 0, S)
    if S.SCALE_LAYOUT == 2:
        _publish_rows(ctx, 2 + S.WORLD_SIZE + one, bases[None, :], one == 0, S)


@triton.jit
def renew_table(ctx, S: tl.constexpr):
    """Give all words of the table the number of this call, in which nobody reads them."""
    count: tl.constexpr = (S.WORLD_SIZE + 3) * S.MAX_LOCAL_EXPERTS
    i = tl.arange(0, next_power_of_2(count))
    tl.atomic_xchg(_words(ctx.control, 0, i, S), ll_word(ctx.call, i * 0), mask=i < count, sem="relaxed", scope="gpu")


@triton.jit
def wait_for_table(ctx, S: tl.constexpr):
    """Wait for the table.

    Returns OK, TIMED_OUT or POISONED; then TABLE_GO or TABLE_NOTHING, and the most messages of a source. Callers
    look words up afterwards, because a thread has not checked those that another one holds (``kernels.sync.signals``).
    The planner has begun earlier, and takes no longer than one wait until it publishes or poisons this rank. Callers
    report an error (:func:`report_no_table`) where they hold no rows in registers, which a call would spill.
    """
    count: tl.constexpr = (S.WORLD_SIZE + (3 if S.SCALE_LAYOUT == 2 else 2)) * S.MAX_LOCAL_EXPERTS
    i = tl.arange(0, next_power_of_2(count))[None, :]
    poison = (own_block(ctx.control, S) + S.OFFSET_POISON).to(I64)
    words = _words(ctx.control, 0, i, S)
    ok, _ = wait_ll_words(words, i < count, ctx.call, poison, 2 * ctx.limit, S.CLOCK)
    stamp_first(ctx, BASE_KNOWN, S)
    head = value_at(_words(ctx.control, 0, 0, S), ok > 0)
    return ok, head % 4, head // 4


@triton.jit
def report_no_table(ok, ctx, S: tl.constexpr):
    """Write the error record if a wait for the table has failed (``ok`` is not OK). After another error, which has been
    reported, it does nothing, because only the first report of a rank counts."""
    report_failure(ok, ctx, ctx.me, _PHASE, ctx.call, ctx.call - 1, S)


@triton.jit
def first_row(control, source, e, mask, S: tl.constexpr):
    """Look up the first row of ``source`` in the groups of experts ``e`` (a block), 0 where masked."""
    return value_at(_words(control, 1 + source, e, S), mask)


@triton.jit
def first_block(control, e, mask, S: tl.constexpr):
    """Look up the first 128-row blocks of the scales of experts ``e`` (a block), 0 where masked."""
    return value_at(_words(control, 2 + S.WORLD_SIZE, e, S), mask)


@triton.jit
def groups_in_table(control, numbers, S: tl.constexpr):
    """Look up where all groups are."""
    e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)
    mask = e < numbers.num_local_experts
    starts = first_row(control, 0, e, mask, S)
    sizes = first_row(control, S.WORLD_SIZE, e, mask, S) - starts
    shared = numbers.shared_end - numbers.shared_begin
    _, aligned, shared_rows = group_starts(sizes, shared, numbers.capacity, S)
    bases = starts
    if S.SCALE_LAYOUT == 2:
        bases = first_block(control, e, mask, S)
    return Groups(sizes, starts, aligned, bases, shared, shared_rows)
