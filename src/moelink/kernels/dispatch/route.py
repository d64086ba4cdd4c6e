"""Route tokens on the device: find the owner of an expert, and count the pairs and messages before a token.

The map of experts is the device twin of :class:`moelink.routing.ExpertMap`; a test compares the two.

Example: 7 experts on 3 ranks (S.EXPERTS_PER_RANK 2, S.EXTRA_EXPERTS 1). Ids 0, 3, 6, -1, 9 belong to ranks 0, 1, 2, -1,
-1.

With many tokens the CTAs of one rank share what they count, as *block counts*. CTA p counts its own tokens, stores the
result in row p of ``block_counts`` and publishes ``block_counts_flag[p] = call``. A CTA that needs the sum of the first
n CTAs waits for their flags. CTAs wait only for lower ones, which start earlier and publish before they wait for
anything, so every wait ends, on a GPU as in the interpreter. The next call cannot overtake: the next launch stores its
rows in stream order.

Example: 3 CTAs with messages [2, 1], [0, 3], [1, 1] for two ranks: CTA 2 starts at slots [2, 4], and the firsts sent
are [0, 2, 2, 3] to rank 0 and [0, 1, 4, 5] to rank 1.

In layout "rank" on one node (not S.SENDERS_COUNT_PAIRS) a row goes where its slot says. So a sender needs no positions
of pairs and counts messages alone. Its block counts are then a word for each rank, in which
the number of the call stands above the count, as in an LL word. They need no flag, no release and no acquire, because a
reader learns nothing else from them. A row that no CTA has written for long still names the call that wrote it: the
word has the lower 40 bits of the call number.

Example of messages alone: 2 messages of call 3 are the word 3 * 2**24 + 2.
"""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import direct_or_staged
from moelink.kernels.numeric import greater
from moelink.kernels.sync.ll_words import wait_ll_words_above
from moelink.kernels.sync.signals import (
    I32,
    I64,
    publish,
    report_failure,
    wait_all,
)
from moelink.memory.protocol import INVALID_IDS, PHASE_DISPATCH

_FEW = tl.constexpr(8)
"""Tokens of which a rank is looked for in every slot: at least those of a batch."""


@triton.jit
def owner_of(expert, first, num_local, S: tl.constexpr):
    """Return the rank that owns each expert id, -1 for -1. In allreduce mode: 0 for this rank's experts, else -1."""
    if S.ALLREDUCE:
        mine = (expert >= first) & (expert < first + num_local)
        return tl.where(mine, 0, -1)
    else:
        boundary = S.EXTRA_EXPERTS * (S.EXPERTS_PER_RANK + 1)
        low = expert // (S.EXPERTS_PER_RANK + 1)
        high = S.EXTRA_EXPERTS + (expert - boundary) // greater(S.EXPERTS_PER_RANK, 1)
        rank = tl.where(expert < boundary, low, high)
        return tl.where(expert >= 0, rank, -1)


@triton.jit
def first_of(rank, first, S: tl.constexpr):
    """Return the first expert of each rank; in allreduce mode that of this rank."""
    if S.ALLREDUCE:
        return rank * 0 + first
    else:
        return rank * S.EXPERTS_PER_RANK + tl.minimum(rank, S.EXTRA_EXPERTS)


@triton.jit
def experts_at(ids, offsets, mask, S: tl.constexpr):
    """Load expert ids (int32 or int64 in memory) as int32; -1 where masked or outside [0, E)."""
    raw = tl.load(ids + offsets, mask=mask, other=-1).to(tl.int64)
    return tl.where((raw >= 0) & (raw < S.NUM_EXPERTS), raw, -1).to(tl.int32)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def ranks_of(owner, t, end, me, numbers, S: tl.constexpr):
    """Return the ranks [N, ranks] that tokens ``t`` [N] go to, as 0 or 1, by the ``owner`` [N, slots] of their experts.

    Only tokens ``t`` < ``end`` count. Of many tokens it sets a bit for each rank, which takes the same time for two
    ranks as for eight, as long as the bits fit an integer.

    Example: owners [[0, 1], [0, 0], [-1, -1]] of two ranks: [[1, 1], [1, 0], [0, 0]].
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    if S.WORLD_SIZE <= 32 and owner.shape[0] > _FEW:
        bits = tl.reduce(tl.where(owner >= 0, 1 << owner, 0), 1, _either)
        if S.FUSED_SHARED_EXPERT:
            own = (t >= numbers.shared_begin) & (t < tl.minimum(numbers.shared_end, end))
            bits |= own.to(tl.int32) << me
        return (bits[:, None] >> r[None, :]) & 1
    else:
        present = tl.max((owner[:, :, None] == r[None, None, :]).to(tl.int32), 1)
        if S.FUSED_SHARED_EXPERT:
            own = (t >= numbers.shared_begin) & (t < tl.minimum(numbers.shared_end, end))
            present = tl.maximum(present, (own[:, None] & (r[None, :] == me)).to(tl.int32))
        return present


@triton.jit
def sums_before(counts, SCAN: tl.constexpr):
    """Return for each row of ``counts`` [N, M] the sum of the rows before it.

    With SCAN it uses a scan, which is faster. Triton 3.6 cannot compile the scan for some of the layouts that it
    chooses for very few rows.

    Example: [[1, 0], [1, 1], [0, 1]]: [[0, 0], [1, 0], [2, 1]].
    """
    if SCAN:
        return tl.cumsum(counts, 0) - counts
    else:
        i = tl.arange(0, counts.shape[0])
        sums = counts * 0
        for j in tl.static_range(counts.shape[0] - 1):
            row = tl.sum(tl.where((i == j)[:, None], counts, 0), 0)
            sums += tl.where((i > j)[:, None], row[None, :], 0)
        return sums


@triton.jit
def count_pairs(expert, owner, N: tl.constexpr, S: tl.constexpr):
    """Count the pairs per expert [experts] among N slots, of ``expert`` and ``owner`` of any shape. A pair whose owner
    is -1 is not counted.

    The histogram gets no mask: Triton 3.6 reorders what is reshaped for a histogram, but not the mask with it.
    """
    bins = tl.reshape(tl.where(owner >= 0, expert, 0), (N,))
    nowhere = tl.sum(tl.reshape((owner < 0).to(tl.int32), (N,)), 0)
    return tl.histogram(bins, S.NUM_EXPERTS_POW2) - tl.where(tl.arange(0, S.NUM_EXPERTS_POW2) == 0, nowhere, 0)


@triton.jit
def _ids_at(ids, t, end, S: tl.constexpr):
    """Load ids [N, slots] of tokens ``t`` [N] unchanged, as int64; -1 from ``end`` on."""
    k = tl.arange(0, S.TOPK_POW2)
    mask = (t < end)[:, None] & (k < S.TOPK)[None, :]
    return tl.load(ids + t[:, None] * S.TOPK + k[None, :], mask=mask, other=-1).to(tl.int64)


@triton.jit
def _ids_in_a_row(ids, t0, end, BLOCK: tl.constexpr, S: tl.constexpr):
    """Load the ids of ``BLOCK`` tokens from ``t0`` as :func:`_ids_at` does, in one row: [BLOCK x slots]."""
    i = tl.arange(0, BLOCK * S.TOPK_POW2)
    token, k = t0 + i // S.TOPK_POW2, i % S.TOPK_POW2
    return tl.load(ids + token * S.TOPK + k, mask=(token < end) & (k < S.TOPK), other=-1).to(tl.int64)


@triton.jit
def count_tokens(ids, begin, end, me, numbers, BLOCK: tl.constexpr, PAIRS: tl.constexpr, S: tl.constexpr):
    """Count what tokens [begin, end) need, ``BLOCK`` tokens at a time: pairs per expert [experts], messages per rank
    [ranks], and ids outside [-1, E). Without PAIRS count messages alone; the others are zeros [1].

    For a histogram it takes ids in one row, because rearranging them takes longer than counting.

    Example: E = 4 on 2 ranks, ids [[0, 3], [1, 0]]: pairs [2, 1, 0, 1, 0...], messages [2, 1].
    """
    t = tl.arange(0, BLOCK)
    pairs = tl.zeros([S.NUM_EXPERTS_POW2 if PAIRS else 1], tl.int32)
    nowhere = tl.zeros([BLOCK * S.TOPK_POW2 if PAIRS else 1], tl.int32)
    invalid = nowhere
    messages = tl.zeros([BLOCK, S.WORLD_SIZE_POW2], tl.int32)
    for t0 in range(begin, end, BLOCK):
        raw = _ids_in_a_row(ids, t0, end, BLOCK, S) if PAIRS else _ids_at(ids, t0 + t, end, S)
        expert = tl.where((raw >= 0) & (raw < S.NUM_EXPERTS), raw, -1).to(tl.int32)
        owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
        if PAIRS:
            pairs += tl.histogram(tl.where(owner >= 0, expert, 0), S.NUM_EXPERTS_POW2)
            nowhere += (owner < 0).to(tl.int32)
            invalid += ((raw < -1) | (raw >= S.NUM_EXPERTS)).to(tl.int32)
            owner = tl.reshape(owner, (BLOCK, S.TOPK_POW2))
        messages += ranks_of(owner, t0 + t, end, me, numbers, S)
    # The histogram has no mask (see count_pairs): pairs without an owner were counted as expert 0.
    pairs -= tl.where(tl.arange(0, pairs.shape[0]) == 0, tl.sum(nowhere, 0), 0)
    return pairs, tl.sum(messages, 0), tl.sum(invalid, 0)


@triton.jit
def count_before(ids, token, expert, me, numbers, S: tl.constexpr):
    """Count what precedes each slot of ``token``, whose ids are ``expert`` [slots].

    Returns the earlier pairs (token, then slot) of the same expert [slots], and the messages of earlier tokens to each
    rank [ranks].

    Example: E = 4 on 2 ranks, ids [[0, 3], [1, 0]], token 1: pairs [0, 1], messages [1, 1].
    """
    N: tl.constexpr = S.COUNT_BLOCK_ALL
    t = tl.arange(0, N)
    k = tl.arange(0, S.TOPK_POW2)
    same = tl.zeros([N * S.TOPK_POW2, S.TOPK_POW2], tl.int32)
    messages = tl.zeros([N, S.WORLD_SIZE_POW2], tl.int32)
    for t0 in range(0, token, N):
        raw = _ids_at(ids, t0 + t, token, S)
        other = tl.where((raw >= 0) & (raw < S.NUM_EXPERTS), raw, -1).to(tl.int32)
        same += (tl.reshape(other, (N * S.TOPK_POW2,))[:, None] == expert[None, :]).to(tl.int32)
        owner = owner_of(other, numbers.first_expert, numbers.num_local_experts, S)
        messages += ranks_of(owner, t0 + t, token, me, numbers, S)
    twice = (expert[None, :] == expert[:, None]) & (k[None, :] < k[:, None])
    before = tl.sum(same, 0) + tl.sum(twice.to(tl.int32), 1)
    return tl.where(expert >= 0, before, 0), tl.sum(messages, 0)


@triton.jit
def routes_of(ids, token, k, end, me, numbers, S: tl.constexpr):
    """Return experts [batch, slots], their owners [batch, slots], and the ranks [batch, ranks] that tokens ``token``
    [batch] go to.

    Only tokens below ``end`` count. ``k`` [slots] numbers the slots. A batch has S.TOKENS_PER_BATCH tokens.
    """
    inside = (token < end)[:, None] & (k < S.TOPK)[None, :]
    expert = experts_at(ids, token[:, None] * S.TOPK + k[None, :], inside, S)
    owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
    return expert, owner, ranks_of(owner, token, end, me, numbers, S)


@triton.jit
def positions_of(pairs, expert, owner, i, S: tl.constexpr):
    """Return the positions [batch, slots] of a batch's pairs; 0 where a slot has no expert.

    ``i`` [batch x slots] numbers the pairs. ``pairs`` [experts]: pairs of each expert before the batch.
    """
    flat = tl.reshape(tl.where(owner >= 0, expert, -1), (S.TOKENS_PER_BATCH * S.TOPK_POW2,))
    earlier = (flat[None, :] == flat[:, None]) & (i[None, :] < i[:, None])
    position = tl.gather(pairs, tl.maximum(flat, 0), 0) + tl.sum(earlier.to(tl.int32), 1)
    return tl.reshape(tl.where(flat >= 0, position, 0), (S.TOKENS_PER_BATCH, S.TOPK_POW2))


_PHASE = tl.constexpr(PHASE_DISPATCH)
_INVALID = tl.constexpr(INVALID_IDS)


@triton.jit
def note_invalid(ctx, invalid):
    """Count ``invalid`` ids that name no expert."""
    if invalid > 0:
        tl.atomic_add(ctx.control + _INVALID, invalid.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def publish_block_counts(mine, program, pairs, messages, call, S: tl.constexpr):
    """Publish the block counts of CTA ``program`` for the CTAs after it."""
    row = (mine + S.OFFSET_BLOCK_COUNTS).to(I32) + program * S.BLOCK_COUNT_WORDS
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    tl.store(row + tl.arange(0, S.NUM_EXPERTS_POW2), pairs)
    tl.store(row + S.NUM_EXPERTS_POW2 + r, messages)
    flag = (mine + S.OFFSET_BLOCK_COUNTS_FLAG).to(I64) + program + r * 0
    publish(flag, r == 0, tl.zeros([S.WORLD_SIZE_POW2], tl.int64) + call)


@triton.jit
def message_words(mine, p, r, S: tl.constexpr):
    """Return the addresses of the words for ranks ``r`` in the block counts of CTAs ``p``, where these are messages
    alone."""
    return (mine + S.OFFSET_BLOCK_COUNTS).to(I64) + p * S.BLOCK_COUNT_WORDS + r


@triton.jit
def count_own_block(ctx, mine, ids, begin, end, numbers, program, S: tl.constexpr):
    """Count tokens [begin, end) of CTA ``program`` and publish its block counts."""
    pairs, sent, invalid = count_tokens(ids, begin, end, ctx.me, numbers, S.COUNT_BLOCK, S.SENDERS_COUNT_PAIRS, S)
    if S.SENDERS_COUNT_PAIRS:
        publish_block_counts(mine, program, pairs, sent, ctx.call, S)
        note_invalid(ctx, invalid)
    else:
        words = message_words(mine, program, tl.arange(0, S.WORLD_SIZE_POW2), S)
        tl.atomic_xchg(words, (ctx.call << 24) | sent.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def wait_for_messages(ctx, mine, p, programs, S: tl.constexpr):
    """Wait for the block counts of those CTAs ``p`` [N] that are below ``programs``, where these are messages alone.

    Returns OK, TIMED_OUT or POISONED, and the messages [N, ranks]. It polls with loads, as LL words are polled.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    words = message_words(mine, p[:, None], r, S)
    mask = (p < programs)[:, None] & (r >= 0)
    poison = (mine + S.OFFSET_POISON).to(I64)
    call = (ctx.call << 24) >> 24  # as the shift of a word returns it
    state, word, _ = wait_ll_words_above(words, mask, call, 24, poison, ctx.limit, S.CLOCK)
    report_failure(state, ctx, ctx.me, _PHASE, ctx.call, ctx.call - 1, S)
    return state, (word & 0xFFFFFF).to(tl.int32)


@triton.jit
def sum_messages(ctx, mine, programs, S: tl.constexpr):
    """Do :func:`sum_block_counts` for block counts of messages alone."""
    messages = tl.zeros([S.SENDERS_PER_STEP, S.WORLD_SIZE_POW2], tl.int32)
    ok = tl.full([], 1, tl.int32)
    for p0 in range(0, programs, S.SENDERS_PER_STEP):
        if ok > 0:
            ok, found = wait_for_messages(ctx, mine, p0 + tl.arange(0, S.SENDERS_PER_STEP), programs, S)
            messages += found
    return ok, tl.zeros([1], tl.int32), tl.sum(messages, 0)


@triton.jit
def sum_pairs_and_messages(ctx, mine, programs, S: tl.constexpr):
    """Do :func:`sum_block_counts` for block counts that hold pairs."""
    p = tl.arange(0, S.MAX_SENDERS)
    flags = (mine + S.OFFSET_BLOCK_COUNTS_FLAG).to(I64) + p
    ok, _, got = wait_all(flags, p < programs, ctx.call, (mine + S.OFFSET_POISON).to(I64), ctx.limit, S.CLOCK)
    report_failure(ok, ctx, ctx.me, _PHASE, ctx.call, got, S)
    e = tl.arange(0, S.NUM_EXPERTS_POW2)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    pairs = tl.zeros([S.SENDERS_PER_STEP, S.NUM_EXPERTS_POW2], tl.int32)
    messages = tl.zeros([S.SENDERS_PER_STEP, S.WORLD_SIZE_POW2], tl.int32)
    if ok > 0:
        for p0 in range(0, programs, S.SENDERS_PER_STEP):
            q = p0 + tl.arange(0, S.SENDERS_PER_STEP)
            row = (mine + S.OFFSET_BLOCK_COUNTS).to(I32) + q * S.BLOCK_COUNT_WORDS
            mask = (q < programs)[:, None]
            pairs += tl.load(row[:, None] + e[None, :], mask=mask & (e >= 0)[None, :], other=0)
            messages += tl.load(
                row[:, None] + (S.NUM_EXPERTS_POW2 + r)[None, :], mask=mask & (r >= 0)[None, :], other=0
            )
    return ok, tl.sum(pairs, 0), tl.sum(messages, 0)


@triton.jit
def sum_block_counts(ctx, mine, programs, S: tl.constexpr):
    """Sum the block counts of CTAs [0, ``programs``).

    Returns OK, TIMED_OUT or POISONED; then pairs [experts] and messages [ranks]. Where no pairs are counted they are
    [1], a zero.
    """
    if S.SENDERS_COUNT_PAIRS:
        return sum_pairs_and_messages(ctx, mine, programs, S)
    else:
        return sum_messages(ctx, mine, programs, S)


@triton.jit
def send_firsts(table, mine, me, programs, S: tl.constexpr):
    """Tell every rank where the messages of each CTA begin. Returns per rank the most messages that one CTA sends
    there."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    base = tl.load(table + r, mask=r < S.WORLD_SIZE, other=0)
    to = (base + S.OFFSET_FIRSTS).to(I32) + me * (S.MAX_SENDERS + 1)
    to = direct_or_staged(to, mine, r, me, S.OFFSET_STAGED_FIRSTS, 1, 0, (S.MAX_SENDERS + 1) * 4, S)
    p = tl.arange(0, S.MAX_SENDERS)
    mask = (p < programs)[:, None] & (r < S.WORLD_SIZE)[None, :]
    if S.SENDERS_COUNT_PAIRS:
        row = (mine + S.OFFSET_BLOCK_COUNTS).to(I32) + p * S.BLOCK_COUNT_WORDS + S.NUM_EXPERTS_POW2
        count = tl.load(row[:, None] + r[None, :], mask=mask, other=0)
    else:
        words = tl.load(message_words(mine, p[:, None], r[None, :], S), mask=mask, other=0, volatile=True)
        count = (words & 0xFFFFFF).to(tl.int32)
    tl.store(to[None, :] + p[:, None], tl.cumsum(count, 0) - count, mask=mask)
    tl.store(to + programs, tl.sum(count, 0), mask=r < S.WORLD_SIZE)
    return tl.max(count, 0)
