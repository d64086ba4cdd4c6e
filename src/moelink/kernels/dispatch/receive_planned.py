"""Receive tokens by a plan that one CTA makes: the receiver role of dispatch with a row table
(``kernels.dispatch.row_table``).

CTA 0 is the *planner*. It waits for the counts of every source, computes from them where rows go, publishes that for
the other receivers, and only then writes offsets and totals. It also decides for all receivers whether the call is made
at all: not if a rank refused it, or if ranks make it differently. Then it also publishes that, writes empty outputs,
and notes the rank to blame. Each other CTA waits for the header of its source, then for the
``message_flag`` of its next messages, in order of arrival. It begins to load a message, and only then looks up its
rows. So it neither polls the counts of all sources nor holds their sums in registers. If padding must be written, CTAs
wait for the table before they wait for messages, and write padding while these are on their way. Everything else is as
in ``kernels.dispatch.receive``, whose loop over messages this role shares.

Why a CTA may wait for messages before it knows that the call is made at all: a source that says how many messages it
sends also sends them, in every case. Its CTAs store once they have credit for the call before, for which they wait
before they say anything; no refusal or option of a rank stops a sender. That holds with and without weights, and over
cached routing: slots count from 0 without holes. A source that refused the call sends no message, and none is awaited.
Messages of a call that is not made are awaited like others, and nothing of them is stored (TABLE_NOTHING). A source
that ends half way is named by the wait for its messages.

Example: 2 local experts, counts from ranks 0 to 3 [[2, 1], [1, 0], [0, 2], [0, 0]], S.ROW_ALIGNMENT 4. The message in
slot 1 of rank 2 names expert 1, position 1. The planner publishes that rank 1's rows begin at [2, 5], and writes
row_offsets [0, 4, 8]. Rank 2's rows of expert 1 begin at row 5 and end before row 7, so position
1 is its last one, row 6.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.padding import who_pads, write_padding
from moelink.kernels.dispatch.receive import (
    blame,
    compare,
    first_source,
    note_other_call,
    return_nothing,
    share_of,
    unpack_messages,
)
from moelink.kernels.dispatch.row_offsets import (
    columns_of,
    group_starts,
    header_word,
    rows_told,
    tile_bases,
    wait_for_words,
    write_counted_offsets,
)
from moelink.kernels.dispatch.row_table import (
    first_block,
    first_row,
    groups_in_table,
    publish_table,
    report_no_table,
    wait_for_table,
)
from moelink.kernels.dispatch.unpack import place_by_position
from moelink.kernels.numeric import only
from moelink.kernels.records import RowSource, Source
from moelink.kernels.sync.credit import count_read
from moelink.kernels.sync.signals import context_of, is_poisoned
from moelink.memory.protocol import (
    COUNT_HEADER,
    DISPATCH_RECEIVED,
    PHASE_DISPATCH,
    TABLE_GO,
    TABLE_NOTHING,
)
from moelink.tracing.device.stamps import BASE_KNOWN, TOLD, stamp, stamp_first

_HEADER = tl.constexpr(COUNT_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_RECEIVED)
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


@triton.jit
def group_by_table(ctx, source, local, named, place, numbers, S: tl.constexpr):
    """Return of the groups of experts ``local`` [n, slots] what ``unpack.group_by_counts`` does, by the table."""
    first = first_row(ctx.control, source, local, named, S)
    rows = first_row(ctx.control, source + 1, local, named, S) - first
    begin = tl.zeros(local.shape, tl.int32)
    block = begin
    if S.MASKED:
        begin = local * numbers.capacity
        block = begin // 128
    elif S.SCALE_LAYOUT == 2 and not S.SCALES_LATER:
        begin = first_row(ctx.control, 0, local, named, S)
        block = first_block(ctx.control, local, named, S)
    return first, rows, begin, block


@triton.jit
def place_by_table(ctx, came, header, place, notes, numbers, S: tl.constexpr):
    """Return where the rows of messages go as ``unpack.place_by_counts`` does, by the table."""
    return place_by_position(group_by_table, ctx, came, header, place, notes, numbers, S)


@triton.jit
def await_table(ok, ctx, state, valid, S: tl.constexpr):
    """Wait for the table once headers and the first payload of messages are on their way, unless this CTA has seen it:
    ``state`` is what it says, else 0. Returns ``ok``, TIMED_OUT or POISONED; the state; and the messages to unpack."""
    if state == 0:
        ok, state, _ = wait_for_table(ctx, S)
    return ok, state, only((ok > 0) & (state == _GO), valid)


@triton.jit
def pad_by_table(ctx, program, num_programs, outputs, numbers, S: tl.constexpr):
    """Wait for the table, and write as CTA ``program`` its share of the padding.

    Returns OK, TIMED_OUT or POISONED, and the head of the table.
    """
    ok, state, most = wait_for_table(ctx, S)
    report_no_table(ok, ctx, S)
    if (ok > 0) & (state == _GO):
        pad, pads = who_pads(program, num_programs, most, numbers.num_local_experts, S)
        if pad >= 0:
            write_padding(outputs, most, groups_in_table(ctx.control, numbers, S), numbers, pad, pads, S)
    return ok, state


@triton.jit
def unpack_sources(ctx, program, num_programs, outputs, notes, numbers, S: tl.constexpr):
    """Write padding and unpack messages as CTA ``program``. Returns OK, TIMED_OUT or POISONED."""
    others, number, source = first_source(program, num_programs, S)
    ok = tl.full([], 1, tl.int32)
    state = tl.full([], 0, tl.int32)
    pads: tl.constexpr = S.ROW_ALIGNMENT > 1 or S.PADS_TILES
    if pads:
        ok, state = pad_by_table(ctx, program, num_programs, outputs, numbers, S)
    while (ok > 0) & (number >= 0) & (source < S.WORLD_SIZE):
        ok = wait_for_words(ctx, source, _HEADER, 1, _HEADER, S)
        if ok > 0:
            count, senders, most = columns_of(ctx.control, 0, source, S)
            count = tl.where(header_word(ctx.control, source, 0, 0, 1, S) != 0, 0, count)
            told = Source(source, count, senders, most, 0, 0, source + others >= S.WORLD_SIZE)
            ok = unpack_messages(
                RowSource(await_table, place_by_table), ctx, told, share_of(source, others, number, S), state, outputs,
                notes, numbers, S,
            )  # fmt: skip
        source += others
    if not pads:
        report_no_table(ok, ctx, S)
    return ok


@triton.jit
def receive_planned(program, num_programs, peers, outputs, notes, cached, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the receiver role, which counts what it receives. ``cached`` is not read."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    ok = 1 - is_poisoned(peers.record, peers.control, S)
    if numbers.status == 0:  # a rank that refuses reads nothing
        if program == 0:
            if ok > 0:
                ok = plan(ctx, outputs, notes.received, numbers, S)
            else:
                return_nothing(outputs, notes.received, numbers, S)
        if ok > 0:
            ok = unpack_sources(ctx, program, num_programs, outputs, notes, numbers, S)
    if ok > 0:
        count_read(ctx, _PHASE, program, num_programs, S, "relaxed")
        stamp(ctx, TOLD, S)
