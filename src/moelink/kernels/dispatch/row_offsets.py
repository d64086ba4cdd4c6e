"""Compute where rows go from the counts of all sources, and write the outputs that say so: part of dispatch's receiver
role.

Every CTA sums the very counts that it polled (:func:`wait_for_counts`). So between the arrival of the counts and the
first row nothing is loaded from memory a second time. Where one CTA plans for all
(``kernels.dispatch.receive_planned``) it waits for these counts, and every other receiver for the header of its own
source (:func:`wait_for_words`).

Over cached routing the offsets come from the earlier call (``kernels.dispatch.receive_cached``).

Example: 2 local experts, counts from ranks 0 and 1 [[2, 1], [1, 0]], S.ROW_ALIGNMENT 4: group sizes [3, 1], row_offsets
[0, 4, 8], handle.counts [[2, 1], [1, 0]].

With layout "masked" (S.MASKED) every group has ``numbers.capacity`` rows.

Example: the same counts with capacity 2: row_offsets [0, 2, 4], 3 rows are kept and 1 is lost.

Where rows stay in the messages (S.IN_PLACE) the groups are the source ranks, of ``numbers.capacity`` rows each.

Example: 3 messages from rank 0 and 1 from rank 1, capacity 2: row_offsets [0, 2, 4], 3 rows are kept and 1 is lost.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import lesser, only
from moelink.kernels.sync.ll_words import value_at, wait_ll_words
from moelink.kernels.sync.quiesce import first_failure, wait_for_inter_node
from moelink.kernels.sync.signals import (
    I64,
    OK,
    UNFINISHED,
    check_timeout,
    clock,
    looks_of,
    note_malformed,
    own_block,
    report_failure,
)
from moelink.memory.protocol import COUNT_HEADER, MASKED_CALL, OVERFLOW, PHASE_DISPATCH
from moelink.tracing.device.stamps import COUNTS_SEEN, WAITED, arrivals, note_reached, stamp_first

_HEADER = tl.constexpr(COUNT_HEADER)
_MASKED = tl.constexpr(MASKED_CALL)
_OVERFLOW = tl.constexpr(OVERFLOW)
_PHASE = tl.constexpr(PHASE_DISPATCH)


@triton.jit
def _look_at_counts(ctx, source, awaited, num_local, S: tl.constexpr):
    """Poll the counts until all sources' words belong to ``call``, if they are ``awaited``, and sum them.

    Words of masked ranks (``memory.absence``) have value 0 and are not awaited.
    Returns the same as :func:`wait_for_counts`; if several sources are missing, the first of them. Each of S.POLL_WIDTH
    elements reads a word of the headers, and the count of one local expert from each source, several of them in flight
    at a time.
    """
    looks: tl.constexpr = looks_of(S.CLOCK)
    step: tl.constexpr = lesser(S.WORLD_SIZE_POW2, 8)
    counts = (own_block(ctx.control, S) + S.OFFSET_COUNTS).to(I64)
    poison = (own_block(ctx.control, S) + S.OFFSET_POISON).to(I64)
    i = tl.arange(0, S.POLL_WIDTH)
    heads = only(awaited, i < S.WORLD_SIZE * _HEADER)
    local = only(awaited, i < num_local)
    stamp = ctx.call & 0x7FFFFFFF
    sizes = tl.zeros([S.POLL_WIDTH], tl.int32)
    before = tl.zeros([S.POLL_WIDTH], tl.int32)
    own = tl.zeros([S.POLL_WIDTH], tl.int32)
    missing = tl.full([], 0, tl.int32)
    came = arrivals(ctx, WAITED, tl.where(i % _HEADER == 0, i // _HEADER, S.WORLD_SIZE), S)
    start = clock(S.CLOCK)
    look = tl.full([], 0, tl.int32)
    state = look + UNFINISHED
    while state == UNFINISHED:
        sizes = tl.zeros([S.POLL_WIDTH], tl.int32)
        before = tl.zeros([S.POLL_WIDTH], tl.int32)
        own = tl.zeros([S.POLL_WIDTH], tl.int32)
        word = tl.load(counts + i // _HEADER * S.COUNT_WORDS + i % _HEADER, mask=heads, other=0, volatile=True)
        note_reached(came, heads & ((word >> 32) == stamp), S.CLOCK, S.TRACE)
        late = tl.where(heads & ((word >> 32) != stamp) & ((word >> 32) != _MASKED), S.WORLD_SIZE - i // _HEADER, 0)
        for s0 in range(0, S.WORLD_SIZE, step):
            for j in tl.static_range(step):
                s = s0 + j
                mask = only(s < S.WORLD_SIZE, local)
                word = tl.load(counts + s * S.COUNT_WORDS + _HEADER + i, mask=mask, other=0, volatile=True)
                late = tl.maximum(
                    late, tl.where(mask & ((word >> 32) != stamp) & ((word >> 32) != _MASKED), S.WORLD_SIZE - s, 0)
                )
                rows = tl.minimum(tl.maximum((word & 0xFFFFFFFF).to(tl.int32), 0), S.MAX_TOKENS * S.TOPK)
                sizes += rows
                before += tl.where(s < source, rows, 0)
                own += tl.where(s == source, rows, 0)
        missing = tl.max(late, 0)
        state = tl.where(missing > 0, UNFINISHED, OK)
        look += 1
        if (state == UNFINISHED) & (look % looks == 0):
            state = check_timeout(poison, start, ctx.limit, S.CLOCK)
    tl.debug_barrier()
    return state, tl.where(missing > 0, S.WORLD_SIZE - missing, 0), sizes, before, own


@triton.jit
def wait_for_counts_signals(ctx, S: tl.constexpr):
    """Wait for the signals of the counts that other nodes put here.

    A word that a network carries announces nothing, not even its own bytes. Returns (arrived, source that is missing).
    """
    mine = own_block(ctx.control, S)
    every = tl.arange(0, S.WORLD_SIZE_POW2) >= 0
    arrived, missing, _ = wait_for_inter_node(mine, S.OFFSET_COUNTS_FLAG, every, ctx, S)
    return arrived, missing


@triton.jit
def report_missing(before, missing_before, arrived, missing, ctx, S: tl.constexpr):
    """Report the first of two waits that failed: the one for signals, or the one for words. Returns whether both
    arrived: OK, TIMED_OUT or POISONED."""
    arrived, missing = first_failure(before, missing_before, arrived, missing, S)
    report_failure(arrived, ctx, missing, _PHASE, ctx.call, ctx.call - 1, S)
    stamp_first(ctx, COUNTS_SEEN, S)
    return arrived


@triton.jit
def wait_for_counts(ctx, cached, source, numbers, S: tl.constexpr):
    """Wait for the counts of every source and sum them.

    Returns arrived (OK, TIMED_OUT or POISONED), and per local expert [S.POLL_WIDTH] the rows of all sources, of
    those before ``source``, and of ``source``. A second look at the same call does not wait.
    In layout "rank" on one node it waits for the headers alone, and rows are 0.
    """
    before, missing_before = wait_for_counts_signals(ctx, S)
    awaited = numbers.num_local_experts if S.SENDERS_COUNT_PAIRS else 0
    arrived, missing, sizes, earlier, own = _look_at_counts(ctx, source, before > 0, awaited, S)
    return report_missing(before, missing_before, arrived, missing, ctx, S), sizes, earlier, own


@triton.jit
def wait_for_expert_counts(ctx, numbers, S: tl.constexpr):
    """Wait for all words of the counts of every source. Returns OK, TIMED_OUT or POISONED."""
    arrived, missing, _, _, _ = _look_at_counts(ctx, 0, tl.full([], 1, tl.int1), numbers.num_local_experts, S)
    report_failure(arrived, ctx, missing, _PHASE, ctx.call, ctx.call - 1, S)
    return arrived


@triton.jit
def wait_for_words(ctx, first, count, RANKS: tl.constexpr, WORDS: tl.constexpr, S: tl.constexpr):
    """Wait, on one node, for the first ``count`` words, WORDS at most, of the counts of RANKS sources from ``first``.

    Returns OK, TIMED_OUT or POISONED.
    """
    mine = own_block(ctx.control, S)
    r = first + tl.arange(0, RANKS)
    c = tl.arange(0, WORDS)[None, :]
    words = (mine + S.OFFSET_COUNTS).to(I64) + r[:, None] * S.COUNT_WORDS + c
    mask = (r < S.WORLD_SIZE)[:, None] & (c < count)
    came = arrivals(ctx, WAITED, r, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    arrived, missing = wait_ll_words(words, mask, ctx.call, poison, ctx.limit, S.CLOCK, came, S.TRACE)
    report_failure(arrived, ctx, first + missing, _PHASE, ctx.call, ctx.call - 1, S)
    stamp_first(ctx, COUNTS_SEEN, S)
    return arrived


@triton.jit
def header_word(control, source, i, low, high, S: tl.constexpr):
    """Return word ``i`` of the header of ``source`` (a rank, or a block of them; 0 from W on), limited to [low, high].

    The limits make any word of a peer safe to use.
    """
    words = (own_block(control, S) + S.OFFSET_COUNTS).to(I64) + source * S.COUNT_WORDS + i
    return tl.minimum(tl.maximum(value_at(words, source < S.WORLD_SIZE), low), high)


@triton.jit
def columns_of(control, cached, source, S: tl.constexpr):
    """Return of ``source``: messages, sending CTAs (0: messages come in any order), and the most messages of one of
    these."""
    return (
        header_word(control, source, 1, 0, S.MAX_TOKENS, S),
        header_word(control, source, 3, 0, S.MAX_SENDERS, S),
        header_word(control, source, 4, 0, S.MAX_TOKENS, S),
    )


@triton.jit
def _malformed(control, num_local, S: tl.constexpr):
    """Return [ranks]: which sources sent a header or rows that are out of range."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[:, None]
    c = tl.arange(0, S.COUNT_WORDS_POW2)[None, :]
    words = (own_block(control, S) + S.OFFSET_COUNTS).to(I64) + r * S.COUNT_WORDS + c
    value = value_at(words, (r < S.WORLD_SIZE) & (c < num_local + _HEADER))
    most = tl.where(c == 0, 1, tl.where(c == 3, S.MAX_SENDERS, tl.where(c < 5, S.MAX_TOKENS, 0x7FFFFFFF)))
    most = tl.where(c < _HEADER, most, S.MAX_TOKENS * S.TOPK)
    return tl.max(((value < 0) | (value > most)).to(tl.int32), 1) != 0


@triton.jit
def rows_told(control, numbers, S: tl.constexpr):
    """Return how many rows each source sends to each local expert, by its counts [ranks, local experts]."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[:, None]
    e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)[None, :]
    words = (own_block(control, S) + S.OFFSET_COUNTS).to(I64) + r * S.COUNT_WORDS + _HEADER + e
    rows = value_at(words, (r < S.WORLD_SIZE) & (e < numbers.num_local_experts))
    return tl.minimum(tl.maximum(rows, 0), S.MAX_TOKENS * S.TOPK)


@triton.jit
def write_counted_offsets(ctx, outputs, received, numbers, shared, S: tl.constexpr):
    """Write offsets and totals by the counts that came, as CTA 0, and note sources whose counts are out of range."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    note_malformed(ctx.control, r, _malformed(ctx.control, numbers.num_local_experts, S))
    rows = rows_told(ctx.control, numbers, S)
    messages = header_word(ctx.control, r, 1, 0, S.MAX_TOKENS, S)
    tokens = header_word(ctx.control, r, 2, 0, S.MAX_TOKENS, S)
    write_row_offsets(ctx, outputs, received, rows, messages, tokens, numbers, shared, S)


@triton.jit
def group_starts(sizes, shared, capacity, S: tl.constexpr):
    """Return the starts and rows of the routed groups and the rows of the shared group, each group rounded up to
    S.ROW_ALIGNMENT rows; with S.MASKED each of ``capacity`` rows."""
    if S.MASKED:
        return tl.arange(0, sizes.shape[0]) * capacity, tl.zeros(sizes.shape, tl.int32) + capacity, 0 * shared
    aligned = tl.cdiv(sizes, S.ROW_ALIGNMENT) * S.ROW_ALIGNMENT
    shared_rows = tl.cdiv(shared, S.ROW_ALIGNMENT) * S.ROW_ALIGNMENT
    return tl.cumsum(aligned, 0) - aligned + shared_rows, aligned, shared_rows


@triton.jit
def tile_bases(starts, aligned, shared_rows, capacity, S: tl.constexpr):
    """Return the first 128-row block of each routed group in the 128x4 scale layout, and the blocks of the shared
    group."""
    if S.MASKED:
        return starts // 128, shared_rows
    rows = tl.minimum(starts + aligned, capacity) - tl.minimum(starts, capacity)
    blocks = tl.cdiv(rows, 128)
    shared_blocks = tl.cdiv(tl.minimum(shared_rows, capacity), 128)
    return tl.cumsum(blocks, 0) - blocks + shared_blocks, shared_blocks


@triton.jit
def write_counts(outputs, rows, numbers, S: tl.constexpr):
    """Write ``rows`` [ranks, local experts] of every source. Where nothing travels this rank is the only source, and
    those of the others are zero."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[:, None]
    e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)[None, :]
    mask = (r < S.WORLD_SIZE) & (e < numbers.num_local_experts)
    to = outputs.counts + e * numbers.counts_stride + r
    if S.ALLREDUCE:
        for source in range(numbers.counts_stride):
            tl.store(to + source, tl.where(source == numbers.rank, rows, 0), mask=mask)
    else:
        tl.store(to, rows, mask=mask)


@triton.jit
def write_nothing(outputs, received, numbers, S: tl.constexpr):
    """Write empty outputs after a failed, refused or mismatched dispatch."""
    g = tl.arange(0, S.NUM_GROUPS_POW2)
    if not S.RANK_LAYOUT:
        tl.store(outputs.expert_ids + g, g, mask=g < numbers.num_groups)
    tl.store(outputs.row_offsets + g, tl.zeros([S.NUM_GROUPS_POW2], tl.int32), mask=g <= numbers.num_groups)
    if S.SCALE_LAYOUT == 2 and not S.MASKED:
        tl.store(outputs.scales_offsets + g, tl.zeros([S.NUM_GROUPS_POW2], tl.int32), mask=g < numbers.num_groups)
    tl.store(outputs.num_recv_tokens, 0)
    tl.store(outputs.overflow, 0)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    tl.store(received + r * 2, tl.zeros([S.WORLD_SIZE_POW2], tl.int32), mask=r < S.WORLD_SIZE)
    tl.store(received + r * 2 + 1, tl.zeros([S.WORLD_SIZE_POW2], tl.int32), mask=r < S.WORLD_SIZE)
    tl.store(received + S.WORLD_SIZE * 2, 1)
    write_counts(outputs, tl.zeros([S.WORLD_SIZE_POW2, S.MAX_LOCAL_EXPERTS_POW2], tl.int32), numbers, S)


@triton.jit
def write_row_offsets(ctx, outputs, received, rows, messages, tokens, numbers, shared, S: tl.constexpr):
    """Write offsets, totals, and what combine needs to know of this call, its number included, as CTA 0.

    ``rows`` [ranks, local experts]: rows of every source; ``messages``, ``tokens`` [ranks]: its messages and tokens.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)
    tl.store(outputs.row_offsets, 0)
    if S.RANK_LAYOUT:
        ends = tl.cumsum(messages, 0)
        total = tl.sum(messages, 0)
        kept = tl.minimum(total, numbers.capacity)
        if S.IN_PLACE:
            ends = (r + 1) * numbers.capacity
            kept = tl.sum(tl.minimum(messages, numbers.capacity), 0)
            tl.store(outputs.row_offsets + 1 + r, ends, mask=r < S.WORLD_SIZE)
        elif S.ALLREDUCE:
            g = tl.arange(0, S.NUM_GROUPS_POW2)
            tl.store(
                outputs.row_offsets + g,
                tl.where(g > numbers.rank, tl.minimum(total, numbers.capacity), 0),
                mask=g <= numbers.num_groups,
            )
        else:
            tl.store(outputs.row_offsets + 1 + r, tl.minimum(ends, numbers.capacity), mask=r < S.WORLD_SIZE)
        lost = total - kept
    else:
        g = tl.arange(0, S.NUM_GROUPS_POW2)
        tl.store(outputs.expert_ids + g, g, mask=g < numbers.num_groups)
        sizes = tl.sum(rows, 0)
        starts, aligned, shared_rows = group_starts(sizes, shared, numbers.capacity, S)
        ends = outputs.row_offsets + 1 + e
        if S.FUSED_SHARED_EXPERT:
            tl.store(outputs.row_offsets + 1, tl.minimum(shared_rows, numbers.capacity))
            ends += 1
        limit = starts + aligned
        room = aligned
        if not S.MASKED:
            limit = tl.minimum(limit, numbers.capacity)
            room = tl.maximum(numbers.capacity - starts, 0)
        tl.store(ends, limit, mask=e < numbers.num_local_experts)
        kept = tl.sum(tl.minimum(room, sizes), 0)
        lost = tl.sum(sizes, 0) - kept + shared - tl.minimum(shared, numbers.capacity)
        if S.SCALE_LAYOUT == 2 and not S.MASKED:
            bases, _ = tile_bases(starts, aligned, shared_rows, numbers.capacity, S)
            to = outputs.scales_offsets + e
            if S.FUSED_SHARED_EXPERT:
                tl.store(outputs.scales_offsets, 0)
                to += 1
            tl.store(to, bases - tl.minimum(starts, numbers.capacity) // 128, mask=e < numbers.num_local_experts)
    tl.store(outputs.num_recv_tokens, kept)
    tl.store(outputs.overflow, lost)
    if lost > 0:
        tl.atomic_add(ctx.control + _OVERFLOW, lost.to(tl.int64), sem="relaxed", scope="gpu")
    write_counts(outputs, rows, numbers, S)
    tl.store(received + r * 2, messages, mask=r < S.WORLD_SIZE)
    tl.store(received + r * 2 + 1, tokens, mask=r < S.WORLD_SIZE)
    tl.store(received + S.WORLD_SIZE * 2, 0)
    tl.store(received + S.WORLD_SIZE * 2 + 1, (ctx.call & 0x7FFFFFFF).to(tl.int32))
