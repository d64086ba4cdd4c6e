"""Receive tokens by a plan that one CTA makes: the receiver role of dispatch with a row table
(``kernels.dispatch.row_table``).

CTA 0 is the planner (``kernels.dispatch.plan``). Each other CTA waits for the header of its source, then for the
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
slot 1 of rank 2 names expert 1, position 1. Rank 2's rows of expert 1 begin at row 5 and end before row 7, so position
1 is its last one, row 6.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.padding import pad_rows, pad_tiles, who_pads
from moelink.kernels.dispatch.plan import plan
from moelink.kernels.dispatch.receive import return_nothing, unpack_messages
from moelink.kernels.dispatch.row_offsets import columns_of, header_word, wait_for_words
from moelink.kernels.dispatch.row_table import (
    first_block,
    first_row,
    groups_in_table,
    report_no_table,
    wait_for_table,
)
from moelink.kernels.dispatch.unpack import load_first, load_headers, store_group, store_slots, store_sources
from moelink.kernels.numeric import only
from moelink.kernels.records import Placed, PlannedSteps, Source
from moelink.kernels.sync.credit import count_read
from moelink.kernels.sync.signals import context_of, is_poisoned, note_malformed, own_block
from moelink.memory.protocol import (
    COUNT_HEADER,
    DISPATCH_RECEIVED,
    PHASE_DISPATCH,
    ROW_ABSENT,
    ROW_DROPPED,
    TABLE_GO,
)
from moelink.tracing.device.stamps import TOLD, stamp

_HEADER = tl.constexpr(COUNT_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_RECEIVED)
_ABSENT = tl.constexpr(ROW_ABSENT)
_DROPPED = tl.constexpr(ROW_DROPPED)
_GO = tl.constexpr(TABLE_GO)


@triton.jit
def look_up_headers(ctx, source, at, valid, header, outputs, notes, numbers, S: tl.constexpr):
    """Find the rows of messages as ``unpack.unpack_headers`` does, by the table. Returns where they go, rows -1 for
    none."""
    q = tl.arange(0, S.ROWS_PER_MESSAGE_POW2)
    mask = valid[:, None] & (q < S.TOPK)[None, :]
    strange = (header.token < 0) | (header.token >= S.MAX_TOKENS)
    local = tl.where(mask, header.local_ids, -1)
    named = (local >= 0) & (local < numbers.num_local_experts)
    first = first_row(ctx.control, source, local, named, S)
    rows = first_row(ctx.control, source + 1, local, named, S) - first
    row = first + header.positions
    fits = named & (header.positions >= 0) & (header.positions < rows)
    known = fits | (local == -1)
    note_malformed(ctx.control, source, mask & (strange[:, None] | (known == 0)))
    inner = row
    block = row
    if S.MASKED:
        inner = row - local * numbers.capacity
        block = local * numbers.capacity // 128
    elif S.SCALE_LAYOUT == 2 and not S.SCALES_LATER:
        inner = row - first_row(ctx.control, 0, local, named, S)
        block = first_block(ctx.control, local, named, S)
    keep = fits & ((inner if S.MASKED else row) < numbers.capacity)
    tl.store(
        notes.rows_of_message + at.to(tl.int64)[:, None] * S.TOPK + q[None, :],
        tl.where(keep, row, tl.where(named, _DROPPED, _ABSENT)),
        mask=mask,
    )
    placed = store_slots(ctx, source, valid, header, Placed(row, keep, inner, block), outputs, numbers, S)
    to_rows = store_sources(source, header.token, placed, outputs, numbers, S)
    tl.store(notes.message_token + at, header.token, mask=valid)
    return Placed(to_rows, placed.keep, placed.inner, placed.block)


@triton.jit
def unpack_planned(ok, ctx, source, slot, valid, state, outputs, notes, numbers, S: tl.constexpr):
    """Unpack messages as ``unpack.unpack_group`` does, by the table.

    ``state``: what the table says, 0 if this CTA has not seen it. It then waits for the table once headers and the
    first payload are on their way. Returns ``ok``, TIMED_OUT or POISONED, and the state.
    """
    mine = own_block(ctx.control, S)
    at = source * S.MAX_TOKENS + slot
    number = tl.where(valid, at, -1)
    words, scales = load_first(number, mine, S)
    message = mine + S.OFFSET_MESSAGES + at.to(tl.int64) * S.MESSAGE_BYTES
    header = load_headers(message, valid, True, True, S)
    if state == 0:
        ok, state, _ = wait_for_table(ctx, S)
    valid = only((ok > 0) & (state == _GO), valid)
    placed = look_up_headers(ctx, source, at, valid, header, outputs, notes, numbers, S)
    store_group(ctx, at, number, words, scales, placed, outputs, numbers, S)
    return ok, state


@triton.jit
def write_padding(ctx, program, num_programs, outputs, numbers, S: tl.constexpr):
    """Wait for the table, and write as CTA ``program`` its share of the padding.

    Returns OK, TIMED_OUT or POISONED, and the head of the table.
    """
    ok, state, most = wait_for_table(ctx, S)
    report_no_table(ok, ctx, S)
    if (ok > 0) & (state == _GO):
        pad, pads = who_pads(program, num_programs, most, numbers.num_local_experts, S)
        if pad >= 0:
            groups = groups_in_table(ctx.control, numbers, S)
            if S.ROW_ALIGNMENT > 1:
                pad_rows(outputs, groups, numbers, pad, pads, S)
            if S.SCALE_LAYOUT == 2 and not S.SCALES_LATER and not S.MASKED:
                pad_tiles(outputs.scales, groups, numbers, pad, pads, S)
    return ok, state


@triton.jit
def seen(control, source, state, S: tl.constexpr):
    """Return what this CTA has seen of the table, and the sending CTAs of ``source``."""
    return state, source.programs


@triton.jit
def unpack_sources(ctx, program, num_programs, outputs, notes, numbers, S: tl.constexpr):
    """Write padding and unpack messages as CTA ``program``. Returns OK, TIMED_OUT or POISONED."""
    # All but the first place: one source for each where they suffice, its messages to its programs in turn.
    others = tl.maximum(num_programs - 1, 1)
    number = program - tl.minimum(num_programs - 1, 1)
    source = tl.maximum(number, 0) % S.WORLD_SIZE
    lane = number // S.WORLD_SIZE
    ok = tl.full([], 1, tl.int32)
    state = tl.full([], 0, tl.int32)
    pads: tl.constexpr = S.ROW_ALIGNMENT > 1 or (S.SCALE_LAYOUT == 2 and not S.SCALES_LATER and not S.MASKED)
    if pads:
        ok, state = write_padding(ctx, program, num_programs, outputs, numbers, S)
    while (ok > 0) & (number >= 0) & (source < S.WORLD_SIZE):
        ok = wait_for_words(ctx, source, _HEADER, 1, _HEADER, S)
        if ok > 0:
            count, senders, most = columns_of(ctx.control, 0, source, S)
            count = tl.where(header_word(ctx.control, source, 0, 0, 1, S) != 0, 0, count)
            lanes = tl.cdiv(tl.maximum(others - source, 1), S.WORLD_SIZE)
            told = Source(source, count, senders, most, 0, 0, source + others >= S.WORLD_SIZE)
            ok = unpack_messages(
                PlannedSteps(seen, unpack_planned), ctx, told, lane, lanes, state, outputs, notes, numbers, S
            )
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
