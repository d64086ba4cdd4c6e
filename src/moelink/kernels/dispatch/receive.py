"""Receive tokens: the receiver role of dispatch.

Every CTA waits for the ``counts`` of every source, and computes from them where rows go. All CTAs do the same, so none
waits for another of this launch. In layout "rank" the headers of the counts say where rows go. So on one node only CTA
0 waits for the other words. CTA 0 writes the offsets and totals. Each other CTA serves one source and takes the
messages of its senders in order of arrival: it waits for ``message_flag`` and unpacks the message. If rows are in place
it waits for the whole batch, because unpacking early arrivals one by one would delay the next poll. The waits are
acquires (``kernels.sync.signals``), so all stores of a source before its signal are visible.

Over cached routing some of these steps differ (``kernels.dispatch.receive_cached``). Each role passes its own steps to
:func:`receive_by`.

Once all CTAs have read what they need the call is counted as received (``kernels.sync.credit``), and no call overtakes
another (docs/protocol.md, D3 and D4). Where rows stay in the messages (S.IN_PLACE) only headers are read here, and the
caller reads the rows until the next launch (``moelink.lease``).

The row of a pair is the start of its group (sizes rounded up to S.ROW_ALIGNMENT, or with S.MASKED all the same) + the
rows that lower source ranks send to that expert + the pair's position, which came with the message. Hence source ranks
ascend inside a group, then tokens, then slots.

Nothing that came over the wire becomes an address unchecked: an id, position or count out of range drops the row, and
the source's bit in the control word MALFORMED tells the host.

Example: 2 local experts, counts from ranks 0 and 1 [[2, 1], [1, 0]], S.ROW_ALIGNMENT 4: group sizes [3, 1], row_offsets
[0, 4, 8]. Rank 1's first pair of expert 0 (position 0) goes to row 0 + 2 + 0 = 2. Row 3 and rows 5-7 are padding.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.padding import fill_ids_of_no_rows, who_pads, write_padding
from moelink.kernels.dispatch.row_offsets import (
    columns_of,
    group_starts,
    header_word,
    tile_bases,
    wait_for_counts,
    wait_for_expert_counts,
    write_counted_offsets,
    write_nothing,
)
from moelink.kernels.dispatch.unpack import place_by_counts, place_is_known, unpack_group
from moelink.kernels.nodes.internode import between_nodes_or
from moelink.kernels.nodes.levels import after_relaying, forwarder_of
from moelink.kernels.records import Arrived, Destination, Groups, Lane, ReceiverSteps, RowSource, Source
from moelink.kernels.sync.credit import count_read
from moelink.kernels.sync.dependent_launch import allow_next_launch
from moelink.kernels.sync.quiesce import awaits_counts, quiesce_dispatch, wait_for_inter_node
from moelink.kernels.sync.signals import (
    I32,
    I64,
    context_of,
    first_mismatched,
    is_poisoned,
    note_malformed,
    note_refusal,
    own_block,
    report_failure,
    wait_all,
    wait_any,
)
from moelink.memory.protocol import (
    CODE_ABORT,
    CODE_OPTIONS,
    DISPATCH_FORWARDED,
    DISPATCH_RECEIVED,
    OPTIONS_OF_NOBODY,
    PHASE_DISPATCH,
)
from moelink.tracing.device.stamps import (
    ARRIVED,
    BASE_KNOWN,
    LAST_MESSAGE,
    LAST_STORED,
    MESSAGE_SEEN,
    ROW_STORED,
    TOLD,
    stamp,
    stamp_after,
    stamp_both,
    stamp_first,
)

_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_RECEIVED)
_FORWARDED = tl.constexpr(DISPATCH_FORWARDED)
_REFUSED = tl.constexpr(CODE_ABORT)
_OPTIONS = tl.constexpr(CODE_OPTIONS)
_OF_NOBODY = tl.constexpr(OPTIONS_OF_NOBODY)


@triton.jit
def unpack_messages(by, ctx, source, share, place, outputs, notes, numbers, S: tl.constexpr):
    """Wait for a ``share`` of the messages of ``source``, and unpack them. ``by``, ``place``: as in
    ``unpack.unpack_group``.

    A CTA follows S.MESSAGES_PER_STEP cursors, unpacks the messages that have arrived, and moves their cursors on. With
    S.IN_PLACE it waits at all of them.

    All shares together have C = ``share.lanes`` x S.MESSAGES_PER_STEP cursors. With ``source.programs`` = 0 (CTAs count
    alone, and over cached routing) messages arrive in any order, and each cursor takes every C-th. Otherwise they come
    in columns, one for each sending CTA. Messages arrive in order inside a column; columns do not wait for one another.
    With fewer columns than C several cursors share a column, and each takes every ``shares``-th message of it. With
    more columns than cursors, a cursor takes its ``turns`` columns in turn. A column has ``most`` messages at most.

    Example: C = 4 and 2 columns of 3 messages: cursors 0, 1 take messages 0, 2 and 1 of column 0, cursors 2, 3 those of
    column 1. With 8 columns of 2 messages cursor 1 takes message 0 of columns 1 and 5, then message 1 of both.
    """
    mine = own_block(ctx.control, S)
    programs = source.programs
    firsts = (mine + S.OFFSET_FIRSTS).to(I32) + source.rank * (S.MAX_SENDERS + 1)
    cursors = share.lanes * S.MESSAGES_PER_STEP
    cursor = share.lane + tl.arange(0, S.MESSAGES_PER_STEP) * share.lanes
    turns = tl.full([], 1, tl.int32)
    shares = turns
    most = source.most
    if programs > 0:
        # An acquire of a word that was stored after the firsts, which makes them visible.
        word = tl.atomic_add(
            (mine + S.OFFSET_COUNTS).to(I64) + source.rank * S.COUNT_WORDS + 4, 0, sem="acquire", scope="sys"
        )
        most = tl.minimum(tl.maximum((word & 0xFFFFFFFF).to(tl.int32), 0), S.MAX_TOKENS)
        tl.debug_barrier()
        turns = tl.cdiv(programs, cursors)
        shares = tl.minimum(tl.maximum(cursors // programs, 1), tl.maximum(most, 1))
        last = tl.where(cursor < programs * shares, tl.cdiv(most, shares) * turns, 0)
    else:
        last = tl.cdiv(tl.maximum(source.count - cursor, 0), cursors)
    at = tl.zeros([S.MESSAGES_PER_STEP], tl.int32)
    ok = tl.full([], 1, tl.int32)
    while (ok > 0) & (tl.max(last - at, 0) > 0):
        there = at < last
        slot = cursor + at * cursors
        if programs > 0:
            column = cursor // shares + at % turns * cursors
            there = there & (column < programs)
            begin = tl.load(firsts + column, mask=there, other=0)
            end = tl.load(firsts + column + 1, mask=there, other=0)
            slot = begin + at // turns * shares + cursor % shares
            there = there & (slot < end)
        inside = (slot >= 0) & (slot < source.count)
        note_malformed(ctx.control, source.rank, there & (inside == 0))
        there = there & inside
        ready = there
        if tl.max(there.to(tl.int32), 0) > 0:
            slot = tl.where(there, slot, 0)
            flags = (mine + S.OFFSET_MESSAGE_FLAG).to(I64) + (source.rank * S.MAX_TOKENS + slot)
            poison = (mine + S.OFFSET_POISON).to(I64)
            if S.IN_PLACE:
                ok, _, reached = wait_all(flags, there, ctx.call, poison, ctx.limit, S.CLOCK)
            else:
                ok, got = wait_any(flags, there, ctx.call, poison, ctx.limit, S.CLOCK)
                reached = tl.max(got, 0)
                ready = there & (got >= ctx.call)
            report_failure(ok, ctx, forwarder_of(ctx.control, source.rank, ctx.me, S), _PHASE, ctx.call, reached, S)
            if source.is_last & (tl.max(last - at - ready.to(tl.int32), 0) <= 0):
                allow_next_launch(S)
            if ok > 0:
                stamp_first(ctx, ARRIVED, S, source.rank)
                stamp_both(ctx, MESSAGE_SEEN, LAST_MESSAGE, S)
                came = Arrived(source.rank, source.rank * S.MAX_TOKENS + slot, ready)
                ok, place = unpack_group(by, ok, ctx, came, place, outputs, notes, numbers, S)
                stamp_both(ctx, ROW_STORED, LAST_STORED, S)
        at += (ready | ((at < last) & (there == 0))).to(tl.int32)
    return ok


@triton.jit
def quiesce(ok, program, ctx, S: tl.constexpr):
    """Wait as CTA 0 for all messages of a call of which this rank reads nothing, between nodes.

    Returns OK, TIMED_OUT or POISONED.
    """
    if (ok > 0) & (program == 0):
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        messages = header_word(ctx.control, r, 1, 0, S.MAX_TOKENS, S)
        ok = quiesce_dispatch(ctx, messages, header_word(ctx.control, r, 3, 0, S.MAX_SENDERS, S), S)
    return ok


@triton.jit
def wait_for_firsts(ctx, S: tl.constexpr):
    """Wait for the firsts of ranks of other nodes, which come in puts of their own. Returns OK, TIMED_OUT or
    POISONED."""
    cut = header_word(ctx.control, tl.arange(0, S.WORLD_SIZE_POW2), 3, 0, S.MAX_SENDERS, S)
    ok, peer, got = wait_for_inter_node(own_block(ctx.control, S), S.OFFSET_FIRSTS_FLAG, cut > 0, ctx, S)
    report_failure(ok, ctx, peer, _PHASE, ctx.call, got, S)
    return ok


@triton.jit
def compare(ctx, refused, options, S: tl.constexpr):
    """Return [ranks] which ranks refused this call or chose other options, and the options, for :func:`blame`."""
    mask = tells_options(options, S)
    return mask & ((refused != 0) | (options != S.OPTIONS)), options


@triton.jit
def tells_options(options, S: tl.constexpr):
    """Return which of the ranks, with ``options`` [ranks], take part: all that are not masked."""
    return (tl.arange(0, S.WORLD_SIZE_POW2) < S.WORLD_SIZE) & (options != _OF_NOBODY)


@triton.jit
def blame(ctx, options, origin, S: tl.constexpr):
    """Note the rank that chose other ``options`` [ranks] than most."""
    mask = tells_options(options, S)
    note_refusal(ctx, first_mismatched(options, mask), _PHASE, _OPTIONS)


@triton.jit
def return_nothing(outputs, received, numbers, S: tl.constexpr):
    """Write empty outputs, as CTA 0."""
    write_nothing(outputs, received, numbers, S)
    if S.RANK_LAYOUT:
        fill_ids_of_no_rows(outputs.topk_ids, tl.arange(0, S.WORLD_SIZE_POW2) * 0, numbers, 0, 1, S)


@triton.jit
def note_other_call(blame_other, ctx, refused, options, origin, S: tl.constexpr):
    """Note the first rank that ``refused`` [ranks] this call, or else, by ``blame_other``, a mismatched one."""
    peer = tl.min(tl.where(refused != 0, tl.arange(0, S.WORLD_SIZE_POW2), S.WORLD_SIZE), 0)
    if peer < S.WORLD_SIZE:
        note_refusal(ctx, peer, _PHASE, _REFUSED)
    else:
        blame_other(ctx, options, origin, S)


@triton.jit
def prepare(ok, program, ctx, outputs, received, cached, numbers, shared, S: tl.constexpr):
    """Write offsets and totals as CTA 0, in layout "rank" on one node once the counts of experts have come; then wait,
    between nodes, for the firsts.

    Returns OK, TIMED_OUT or POISONED; ``ok`` where it waits for nothing.
    """
    if program == 0:
        if not S.SENDERS_COUNT_PAIRS:
            ok = wait_for_expert_counts(ctx, numbers, S)
        if ok > 0:
            write_counted_offsets(ctx, outputs, received, numbers, shared, S)
        else:  # the other CTAs may store rows all the same, of a communicator that is poisoned
            return_nothing(outputs, received, numbers, S)
    return between_nodes_or(ok, wait_for_firsts, (ctx,), S)


@triton.jit
def first_source(program, num_programs, S: tl.constexpr):
    """Return how many CTAs unpack messages, all but the first one if there are several; the number of CTA ``program``
    among them; and the first source that it serves. With few CTAs each serves every ``others``-th source."""
    others = tl.maximum(num_programs - 1, 1)
    number = program - tl.minimum(num_programs - 1, 1)
    return others, number, tl.maximum(number, 0) % S.WORLD_SIZE


@triton.jit
def share_of(source, others, number, S: tl.constexpr):
    """Return the share that unpacking CTA ``number`` of ``others`` has of the messages of ``source``."""
    return Lane(number // S.WORLD_SIZE, tl.cdiv(tl.maximum(others - source, 1), S.WORLD_SIZE))


@triton.jit
def destination_of(control, source, groups, S: tl.constexpr):
    """Return where the rows of ``source`` go: in each group, or in layout "rank" as a whole, behind those of the
    sources before it."""
    base = groups.starts + source.before
    if S.RANK_LAYOUT:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        base = tl.sum(tl.where(r < source.rank, header_word(control, r, 1, 0, S.MAX_TOKENS, S), 0), 0)
    return Destination(base, source.rows, groups.starts, groups.bases)


@triton.jit
def receive(program, num_programs, peers, outputs, notes, cached, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the receiver role, which counts what it receives. ``cached`` is not read."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    ok = -is_poisoned(peers.record, peers.control, S)
    receive_by(
        ReceiverSteps(
            wait_for_counts, columns_of, compare, blame, prepare, destination_of,
            RowSource(place_is_known, place_by_counts),
        ), ok, ctx, program, num_programs, outputs, notes, cached, numbers, S,
    )  # fmt: skip


@triton.jit
def receive_by(steps, ok, ctx, program, num_programs, outputs, notes, cached, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the receiver role by its ``steps``. ``ok`` is 0, or -1 where no call is made."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    others, number, source = first_source(program, num_programs, S)
    sizes = tl.zeros([S.POLL_WIDTH], tl.int32)
    before = tl.zeros([S.POLL_WIDTH], tl.int32)
    own = tl.zeros([S.POLL_WIDTH], tl.int32)
    if ok == 0:
        if awaits_counts(numbers.status, S):
            ok, sizes, before, own = steps.wait(ctx, cached, source, numbers, S)
        else:
            # A rank that refuses reads nothing, so it drains at once; each peer stores for one call after the other.
            ok += 1
    if numbers.status != 0:
        ok += 0
        ok = between_nodes_or(ok, quiesce, (ok, program, ctx), S)
    elif ok <= 0:
        if program == 0:
            return_nothing(outputs, notes.received, numbers, S)
    else:
        shared = numbers.shared_end - numbers.shared_begin
        starts, aligned, shared_rows = group_starts(sizes, shared, numbers.capacity, S)
        count, programs, most = steps.columns(ctx.control, cached, source, S)
        refused = header_word(ctx.control, r, 0, 0, 1, S)
        messages = header_word(ctx.control, r, 1, 0, S.MAX_TOKENS, S)
        options = header_word(ctx.control, r, 5, 0, 0x7FFFFFFF, S)
        wrong, origin = steps.compare(ctx, refused, options, S)
        if tl.max(wrong.to(tl.int32), 0) > 0:
            if program == 0:
                return_nothing(outputs, notes.received, numbers, S)
                note_other_call(steps.blame, ctx, refused, options, origin, S)
                ok = between_nodes_or(ok, quiesce, (ok, program, ctx), S)
        else:
            bases = starts
            if S.SCALE_LAYOUT == 2:
                bases, _ = tile_bases(starts, aligned, shared_rows, numbers.capacity, S)
            groups = Groups(sizes, starts, aligned, bases, shared, shared_rows)
            stamp_after(ctx, BASE_KNOWN, starts, S)
            ok = steps.prepare(ok, program, ctx, outputs, notes.received, cached, numbers, shared, S)
            pad, pads = who_pads(program, num_programs, tl.max(messages, 0), numbers.num_local_experts, S)
            if pad >= 0:
                write_padding(outputs, messages, groups, numbers, pad, pads, S)
            while (ok > 0) & (number >= 0) & (source < S.WORLD_SIZE):
                is_last = (source + others >= S.WORLD_SIZE) & (not (S.TWO_LEVEL or S.NUMBERS_IN_TURN))
                known = Source(source, count, programs, most, before, own, is_last)
                place = steps.destination(ctx.control, known, groups, S)
                share = share_of(source, others, number, S)
                ok = unpack_messages(steps.by, ctx, known, share, place, outputs, notes, numbers, S)
                source += others
                if (ok > 0) & (source < S.WORLD_SIZE):
                    ok, again, before, own = steps.wait(ctx, cached, source, numbers, S)
                    count, programs, most = steps.columns(ctx.control, cached, source, S)
    ok = after_relaying(ok, program == 0, ctx, _FORWARDED, _PHASE, S)
    if ok > 0:
        count_read(ctx, _PHASE, program, num_programs, S, "relaxed")
        stamp(ctx, TOLD, S)
