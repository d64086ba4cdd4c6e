"""Compute where rows go from the counts of all sources, and write the outputs that say so: part of dispatch's receiver
role.

Every CTA sums the very counts that it polled. So between the arrival of the counts and the first row nothing is loaded
from memory a second time.

Over cached routing (S.CACHED_ROUTING) the offsets come from the earlier call: ``noted`` is a column of its counts,
``routed`` its ``received``. The receiver then waits only for the headers, and compares them with what the earlier call
received.

Example: 2 local experts, counts from ranks 0 and 1 [[2, 1], [1, 0]], S.ROW_ALIGNMENT 4: group sizes [3, 1], row_offsets
[0, 4, 8], handle.counts [[2, 1], [1, 0]].
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only
from moelink.kernels.sync.ll_words import value_at, wait_ll_words
from moelink.kernels.sync.quiesce import first_failure, wait_for_inter_node
from moelink.kernels.sync.signals import I64, check_timeout, clock, own_block
from moelink.memory.protocol import COUNT_HEADER, OVERFLOW

_HEADER = tl.constexpr(COUNT_HEADER)
_OVERFLOW = tl.constexpr(OVERFLOW)


@triton.jit
def _look_at_counts(ctx, source, awaited, num_local, S: tl.constexpr):
    """Poll the counts until all sources' words belong to ``call``, if they are ``awaited``, and sum them.

    Returns the same as :func:`wait_for_counts`; if several sources are missing, the first of them. Each of S.POLL_WIDTH
    elements reads a word of the headers, and the count of one local expert from each source, several of them in flight
    at a time.
    """
    looks: tl.constexpr = 16 if S.CLOCK == "ptx" else 1
    step: tl.constexpr = S.WORLD_SIZE_POW2 if S.WORLD_SIZE_POW2 < 8 else 8
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
    start = clock(S.CLOCK)
    look = tl.full([], 0, tl.int32)
    state = look + 2
    while state == 2:
        sizes = tl.zeros([S.POLL_WIDTH], tl.int32)
        before = tl.zeros([S.POLL_WIDTH], tl.int32)
        own = tl.zeros([S.POLL_WIDTH], tl.int32)
        word = tl.load(counts + i // _HEADER * S.COUNT_WORDS + i % _HEADER, mask=heads, other=0, volatile=True)
        late = tl.where(heads & ((word >> 32) != stamp), S.WORLD_SIZE - i // _HEADER, 0)
        for s0 in range(0, S.WORLD_SIZE, step):
            for j in tl.static_range(step):
                s = s0 + j
                mask = only(s < S.WORLD_SIZE, local)
                word = tl.load(counts + s * S.COUNT_WORDS + _HEADER + i, mask=mask, other=0, volatile=True)
                late = tl.maximum(late, tl.where(mask & ((word >> 32) != stamp), S.WORLD_SIZE - s, 0))
                rows = tl.minimum(tl.maximum((word & 0xFFFFFFFF).to(tl.int32), 0), S.MAX_TOKENS * S.TOPK)
                sizes += rows
                before += tl.where(s < source, rows, 0)
                own += tl.where(s == source, rows, 0)
        missing = tl.max(late, 0)
        state = tl.where(missing > 0, 2, 1)
        look += 1
        if (state == 2) & (look % looks == 0):
            state = check_timeout(poison, start, ctx.limit, S.CLOCK)
    tl.debug_barrier()
    return state, tl.where(missing > 0, S.WORLD_SIZE - missing, 0), sizes, before, own


@triton.jit
def _sum_noted(noted, stride, num_local, S: tl.constexpr):
    """Sum a column of an earlier call's counts: rows of all sources for each local expert [S.POLL_WIDTH], over cached
    routing."""
    step: tl.constexpr = S.WORLD_SIZE_POW2 if S.WORLD_SIZE_POW2 < 8 else 8
    e = tl.arange(0, S.POLL_WIDTH)
    sizes = tl.zeros([S.POLL_WIDTH], tl.int32)
    for s0 in range(0, S.WORLD_SIZE, step):
        for j in tl.static_range(step):
            s = s0 + j
            rows = tl.load(noted + e * stride + s, mask=only(s < S.WORLD_SIZE, e < num_local), other=0)
            sizes += tl.minimum(tl.maximum(rows, 0), S.MAX_TOKENS * S.TOPK)
    return sizes


@triton.jit
def wait_for_counts(ctx, noted, stride, source, num_local, S: tl.constexpr):
    """Wait for the counts of every source and sum them; over cached routing wait for the headers and sum what is
    ``noted``.

    Returns (arrived, source that is missing, and per local expert [S.POLL_WIDTH] the rows of all sources, of those
    before ``source``, and of ``source``). Over cached routing the three are: of all, none, of all. A second look at the
    same call does not wait.
    """
    mine = own_block(ctx.control, S)
    # A word that a network carries announces nothing, not even its own bytes: wait for the put's signal.
    arrived_inter_node, missing_inter_node, _ = wait_for_inter_node(
        mine, S.OFFSET_COUNTS_FLAG, tl.arange(0, S.WORLD_SIZE_POW2) >= 0, ctx, S
    )
    if S.CACHED_ROUTING:
        sizes = _sum_noted(noted, stride, num_local, S)
        before = tl.zeros([S.POLL_WIDTH], tl.int32)
        own = sizes
        r = tl.arange(0, S.WORLD_SIZE_POW2)[:, None]
        c = tl.arange(0, _HEADER)[None, :]
        words = (mine + S.OFFSET_COUNTS).to(I64) + r * S.COUNT_WORDS + c
        mask = only(arrived_inter_node > 0, (r < S.WORLD_SIZE) & (c < _HEADER))
        arrived, missing = wait_ll_words(words, mask, ctx.call, (mine + S.OFFSET_POISON).to(I64), ctx.limit, S.CLOCK)
    else:
        arrived, missing, sizes, before, own = _look_at_counts(ctx, source, arrived_inter_node > 0, num_local, S)
    arrived, missing = first_failure(arrived_inter_node, missing_inter_node, arrived, missing, S)
    return arrived, missing, sizes, before, own


@triton.jit
def header_word(control, source, i, low, high, S: tl.constexpr):
    """Return word ``i`` of the header of ``source`` (a rank, or a block of them; 0 from W on), limited to [low, high].

    The limits make the word safe to use, whatever the peer sent.
    """
    words = (own_block(control, S) + S.OFFSET_COUNTS).to(I64) + source * S.COUNT_WORDS + i
    return tl.minimum(tl.maximum(value_at(words, source < S.WORLD_SIZE), low), high)


@triton.jit
def all_rows(control, noted, stride, num_local, S: tl.constexpr):
    """Return rows of every source for each local expert [ranks, local experts], limited to [0, T x K] whatever the
    peers sent."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[:, None]
    e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)[None, :]
    if S.CACHED_ROUTING:
        rows = tl.load(noted + e * stride + r, mask=(r < S.WORLD_SIZE) & (e < num_local), other=0)
    else:
        words = (own_block(control, S) + S.OFFSET_COUNTS).to(I64) + r * S.COUNT_WORDS + _HEADER + e
        rows = value_at(words, (r < S.WORLD_SIZE) & (e < num_local))
    return tl.minimum(tl.maximum(rows, 0), S.MAX_TOKENS * S.TOPK)


@triton.jit
def columns_of(control, routed, source, S: tl.constexpr):
    """Return of ``source``: messages, sending CTAs (0: messages come in any order), and the most messages of one of
    these."""
    count = header_word(control, source, 1, 0, S.MAX_TOKENS, S)
    if S.CACHED_ROUTING:
        count = tl.minimum(count, tl.load(routed + source * 2))
    return (
        count,
        header_word(control, source, 3, 0, S.MAX_SENDERS, S),
        header_word(control, source, 4, 0, S.MAX_TOKENS, S),
    )


@triton.jit
def malformed(control, routed, num_local, S: tl.constexpr):
    """Return [ranks]: which sources sent a header or rows that are out of range."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[:, None]
    c = tl.arange(0, _HEADER if S.CACHED_ROUTING else S.COUNT_WORDS_POW2)[None, :]
    words = (own_block(control, S) + S.OFFSET_COUNTS).to(I64) + r * S.COUNT_WORDS + c
    if S.CACHED_ROUTING:
        value = value_at(words, (r < S.WORLD_SIZE) & (c < 5))
        expected = tl.load(routed + r * 2 + c - 1, mask=(r < S.WORLD_SIZE) & (c > 0) & (c < 3), other=0)
        return tl.max((value != expected).to(tl.int32), 1) != 0
    else:
        value = value_at(words, (r < S.WORLD_SIZE) & (c < _HEADER + num_local))
        most = tl.where(c == 0, 1, tl.where(c == 3, S.MAX_SENDERS, tl.where(c < 5, S.MAX_TOKENS, 0x7FFFFFFF)))
        most = tl.where(c < _HEADER, most, S.MAX_TOKENS * S.TOPK)
        return tl.max(((value < 0) | (value > most)).to(tl.int32), 1) != 0


@triton.jit
def group_starts(sizes, shared, S: tl.constexpr):
    """Return the starts of the routed groups and the rows of the shared group, each group rounded up to S.ROW_ALIGNMENT
    rows."""
    aligned = tl.cdiv(sizes, S.ROW_ALIGNMENT) * S.ROW_ALIGNMENT
    shared_rows = tl.cdiv(shared, S.ROW_ALIGNMENT) * S.ROW_ALIGNMENT
    return tl.cumsum(aligned, 0) - aligned + shared_rows, aligned, shared_rows


@triton.jit
def tile_bases(starts, aligned, shared_rows, capacity, S: tl.constexpr):
    """Return the first 128-row block of each routed group in the 128x4 scale layout, and the blocks of the shared
    group."""
    rows = tl.minimum(starts + aligned, capacity) - tl.minimum(starts, capacity)
    blocks = tl.cdiv(rows, 128)
    shared_blocks = tl.cdiv(tl.minimum(shared_rows, capacity), 128)
    return tl.cumsum(blocks, 0) - blocks + shared_blocks, shared_blocks


@triton.jit
def write_nothing(outputs, received, numbers, S: tl.constexpr):
    """Write the outputs of a dispatch that brought no rows, because the communicator is poisoned or a rank refused the
    call."""
    g = tl.arange(0, S.NUM_GROUPS_POW2)
    if not S.RANK_LAYOUT:
        tl.store(outputs.expert_ids + g, g, mask=g < numbers.num_groups)
    tl.store(outputs.row_offsets + g, tl.zeros([S.NUM_GROUPS_POW2], tl.int32), mask=g <= numbers.num_groups)
    if S.SCALE_LAYOUT == 2:
        tl.store(outputs.scales_offsets + g, tl.zeros([S.NUM_GROUPS_POW2], tl.int32), mask=g < numbers.num_groups)
    tl.store(outputs.num_recv_tokens, 0)
    tl.store(outputs.overflow, 0)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)
    tl.store(received + r * 2, tl.zeros([S.WORLD_SIZE_POW2], tl.int32), mask=r < S.WORLD_SIZE)
    tl.store(received + r * 2 + 1, tl.zeros([S.WORLD_SIZE_POW2], tl.int32), mask=r < S.WORLD_SIZE)
    tl.store(received + S.WORLD_SIZE * 2, 1)
    column = numbers.rank if S.ALLREDUCE else 0
    tl.store(
        outputs.counts + e[None, :] * numbers.counts_stride + column + r[:, None],
        tl.zeros([S.WORLD_SIZE_POW2, S.MAX_LOCAL_EXPERTS_POW2], tl.int32),
        mask=(r < S.WORLD_SIZE)[:, None] & (e < numbers.num_local_experts)[None, :],
    )


@triton.jit
def write_row_offsets(ctx, outputs, received, noted, routed, numbers, shared, S: tl.constexpr):
    """Write offsets, totals, and what combine needs to know of this call, its number included, as CTA 0."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)
    rows = all_rows(ctx.control, noted, numbers.counts_stride, numbers.num_local_experts, S)
    if S.CACHED_ROUTING:
        messages = tl.load(routed + r * 2, mask=r < S.WORLD_SIZE, other=0)
        tokens = tl.load(routed + r * 2 + 1, mask=r < S.WORLD_SIZE, other=0)
    else:
        messages = header_word(ctx.control, r, 1, 0, S.MAX_TOKENS, S)
        tokens = header_word(ctx.control, r, 2, 0, S.MAX_TOKENS, S)
    tl.store(outputs.row_offsets, 0)
    if S.RANK_LAYOUT:
        ends = tl.cumsum(messages, 0)
        total = tl.sum(messages, 0)
        if S.ALLREDUCE:
            g = tl.arange(0, S.NUM_GROUPS_POW2)
            tl.store(
                outputs.row_offsets + g,
                tl.where(g > numbers.rank, tl.minimum(total, numbers.capacity), 0),
                mask=g <= numbers.num_groups,
            )
        else:
            tl.store(outputs.row_offsets + 1 + r, tl.minimum(ends, numbers.capacity), mask=r < S.WORLD_SIZE)
        kept = tl.minimum(total, numbers.capacity)
        lost = total - kept
    else:
        g = tl.arange(0, S.NUM_GROUPS_POW2)
        tl.store(outputs.expert_ids + g, g, mask=g < numbers.num_groups)
        sizes = tl.sum(rows, 0)
        starts, aligned, shared_rows = group_starts(sizes, shared, S)
        ends = outputs.row_offsets + 1 + e
        if S.FUSED_SHARED_EXPERT:
            tl.store(outputs.row_offsets + 1, tl.minimum(shared_rows, numbers.capacity))
            ends += 1
        tl.store(ends, tl.minimum(starts + aligned, numbers.capacity), mask=e < numbers.num_local_experts)
        kept = tl.sum(tl.minimum(tl.maximum(numbers.capacity - starts, 0), sizes), 0)
        lost = tl.sum(sizes, 0) - kept + shared - tl.minimum(shared, numbers.capacity)
        if S.SCALE_LAYOUT == 2:
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
    column = numbers.rank if S.ALLREDUCE else 0
    tl.store(
        outputs.counts + e[None, :] * numbers.counts_stride + column + r[:, None],
        rows,
        mask=(r < S.WORLD_SIZE)[:, None] & (e < numbers.num_local_experts)[None, :],
    )
    tl.store(received + r * 2, messages, mask=r < S.WORLD_SIZE)
    tl.store(received + r * 2 + 1, tokens, mask=r < S.WORLD_SIZE)
    tl.store(received + S.WORLD_SIZE * 2, 0)
    tl.store(received + S.WORLD_SIZE * 2 + 1, (ctx.call & 0x7FFFFFFF).to(tl.int32))
