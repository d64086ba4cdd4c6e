"""Plan where rows go, once for all receivers of a rank: the work of receiver CTA 0 of dispatch, the *planner*, in calls
with a row table (``kernels.dispatch.row_table``).

It waits for the counts of every source, computes from them where rows go, publishes that for the other receivers, and
only then writes offsets and totals. It also decides for all receivers whether the call is made at all: not if a rank
refused it, or if ranks make it differently. Then it also publishes that, writes empty outputs, and notes the rank to
blame.

Example: 2 local experts, counts from ranks 0 to 3 [[2, 1], [1, 0], [0, 2], [0, 0]], S.ROW_ALIGNMENT 4: the planner
publishes that rank 1's rows begin at [2, 5], and writes row_offsets [0, 4, 8].
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.receive import blame, compare, note_other_call, return_nothing
from moelink.kernels.dispatch.row_offsets import (
    group_starts,
    header_word,
    rows_told,
    tile_bases,
    wait_for_words,
    write_counted_offsets,
)
from moelink.kernels.dispatch.row_table import publish_table
from moelink.memory.protocol import COUNT_HEADER, TABLE_GO, TABLE_NOTHING
from moelink.tracing.device.stamps import BASE_KNOWN, stamp_first

_HEADER = tl.constexpr(COUNT_HEADER)
_GO, _NOTHING = tl.constexpr(TABLE_GO), tl.constexpr(TABLE_NOTHING)


@triton.jit
def publish_plan(ctx, numbers, shared, state, S: tl.constexpr):
    """Compute from the counts of every source where rows go, and publish it. ``state``: TABLE_GO or TABLE_NOTHING."""
    rows = rows_told(ctx.control, numbers, S)
    messages = header_word(ctx.control, tl.arange(0, S.WORLD_SIZE_POW2), 1, 0, S.MAX_TOKENS, S)
    starts, aligned, shared_rows = group_starts(tl.sum(rows, 0), shared, numbers.capacity, S)
    bases = starts
    if S.SCALE_LAYOUT == 2:
        bases, _ = tile_bases(starts, aligned, shared_rows, numbers.capacity, S)
    publish_table(ctx, rows, starts, bases, tl.max(messages, 0), state, S)
    stamp_first(ctx, BASE_KNOWN, S)


@triton.jit
def plan(ctx, outputs, received, numbers, S: tl.constexpr):
    """Run the planner. Returns OK, TIMED_OUT or POISONED."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    ok = wait_for_words(ctx, 0, numbers.num_local_experts + _HEADER, S.WORLD_SIZE_POW2, S.COUNT_WORDS_POW2, S)
    if ok <= 0:
        return_nothing(outputs, received, numbers, S)
    else:
        shared = numbers.shared_end - numbers.shared_begin
        refused = header_word(ctx.control, r, 0, 0, 1, S)
        options = header_word(ctx.control, r, 5, 0, 0x7FFFFFFF, S)
        wrong, origin = compare(ctx, refused, options, S)
        differs = tl.max(wrong.to(tl.int32), 0) > 0
        publish_plan(ctx, numbers, shared, tl.where(differs, _NOTHING, _GO), S)
        if differs:
            return_nothing(outputs, received, numbers, S)
            note_other_call(blame, ctx, refused, options, origin, S)
        else:
            write_counted_offsets(ctx, outputs, received, numbers, shared, S)
    return ok
