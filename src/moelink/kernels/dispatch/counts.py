"""Tell every rank how many messages and rows come: the counting CTA of dispatch's sender role.

Where CTAs count alone (one token per CTA, or at most S.MAX_TOKENS_ALONE tokens in the call) the counting CTA counts all
tokens itself. It is then the first CTA, because receivers can unpack nothing before they have its counts. With more
tokens it is the last CTA. It sums the block counts of the others (``kernels.dispatch.route``), sends ``firsts`` (the
first message slot of each CTA), and after a fence the counts.

Counts travel as LL words (``kernels.sync.ll_words``): a header with the status, the totals and the options, then the
rows per local expert. In layout "rank" receivers unpack by the header alone. So on one node (not S.SENDERS_COUNT_PAIRS)
the counting CTA sends the header as soon as messages are counted, and only then counts the pairs of all tokens itself.
Between nodes header and words travel in one put, so there it counts all before.

Example: 4 experts on 2 ranks, rank 0's ids [[0, 3], [1, 0], [-1, 2]]. Rank 0 is told 2 messages and rows [2, 1], rank 1
2 messages and rows [1, 1].
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.route import (
    count_tokens,
    first_of,
    note_invalid,
    owner_of,
    send_firsts,
    sum_block_counts,
)
from moelink.kernels.nodes.internode import between_nodes, own_word_at
from moelink.kernels.nodes.levels import in_two_levels, stores_at
from moelink.kernels.nodes.put_messages import put_counts
from moelink.kernels.nodes.relay import send_marks
from moelink.kernels.numeric import only
from moelink.kernels.sync.credit import wait_for_credits
from moelink.kernels.sync.ll_words import ll_word
from moelink.kernels.sync.signals import fence, own_block
from moelink.memory.protocol import COUNT_HEADER, DISPATCH_BYTES, PHASE_DISPATCH
from moelink.tracing.device.stamps import COUNTED, LAST_PUBLISHED, PUBLISHED, stamp_after, stamp_both

_HEADER = tl.constexpr(COUNT_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_BYTES = tl.constexpr(DISPATCH_BYTES)


@triton.jit
def counts_at(base, mine, rank, me, word, S: tl.constexpr):
    """Return where to store word ``word`` of this rank's counts for ``rank``, whose block is at ``base``."""
    return own_word_at(base, mine, rank, me, S.OFFSET_COUNTS, S.OFFSET_STAGED_COUNTS, S.COUNT_WORDS, word, S)


@triton.jit
def store_expert_counts(ctx, mine, first, num_local, pairs, S: tl.constexpr):
    """Store ``pairs`` [experts] at the ranks that own the experts. An expert without rows gets a zero."""
    e = tl.arange(0, S.NUM_EXPERTS_POW2)
    owner = owner_of(tl.where(e < S.NUM_EXPERTS, e, -1), first, num_local, S)
    known = owner >= 0
    to = tl.load(ctx.table + tl.where(known, owner, 0), mask=known, other=0)
    local = e - first_of(owner, first, S)
    words = counts_at(to, mine, tl.where(known, owner, ctx.me), ctx.me, _HEADER, S) + local
    tl.atomic_xchg(words, ll_word(ctx.call, pairs), mask=known, sem="relaxed", scope="sys")


@triton.jit
def count_every_token(ctx, ids, numbers, S: tl.constexpr):
    """Count the pairs [experts] and messages [ranks] of all own tokens, and note ids that name no expert.

    A call that failed before this notes none.
    """
    tokens = numbers.num_tokens
    few = tokens <= S.COUNT_BLOCK
    if few:
        pairs, messages, invalid = count_tokens(ids, 0, tokens, ctx.me, numbers, S.COUNT_BLOCK, True, S)
    else:
        pairs, messages, invalid = count_tokens(ids, 0, tokens, ctx.me, numbers, S.COUNT_BLOCK_ALL, True, S)
    note_invalid(ctx, invalid)
    return pairs, messages


@triton.jit
def send_counts(ctx, ids, sent, numbers, alone, movers, credits, S: tl.constexpr):
    """Tell every rank how many messages and rows come, as the counting CTA.

    Also note in ``sent`` the counts that later dispatches over this routing need (``kernels.dispatch.send_cached``).
    ``alone``: the other CTAs count for themselves. ``movers``: how many of them there are. Returns OK, TIMED_OUT or
    POISONED.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = r < S.WORLD_SIZE
    mine = own_block(ctx.control, S)
    ok = tl.full([], 1, tl.int32)
    if alone:
        if S.SENDERS_COUNT_PAIRS:
            pairs, messages = count_every_token(ctx, ids, numbers, S)
        else:
            pairs, messages, _ = count_tokens(
                ids, 0, numbers.num_tokens, ctx.me, numbers, S.COUNT_BLOCK_ALONE, False, S
            )
    else:
        ok, pairs, messages = sum_block_counts(ctx, mine, movers, S)
    stamp_after(ctx, COUNTED, messages, S)
    if ok > 0:
        ok = wait_for_credits(credits, ctx, _PHASE, S)
    if ok > 0:
        most = tl.full([S.WORLD_SIZE_POW2], 1, tl.int32)
        programs = tl.zeros([S.WORLD_SIZE_POW2], tl.int32)
        if not alone:
            programs += movers
            most = send_firsts(ctx.table, mine, ctx.me, movers, S)
        away = tl.sum(tl.where(stores_at(ctx.control, r, ctx.me, S), messages, 0), 0).to(tl.int64)
        tl.atomic_add(ctx.control + _BYTES, away * S.MESSAGE_BYTES, sem="relaxed", scope="gpu")
        # A reader of the counts must also see ``firsts``. Without ``firsts`` no wait is needed.
        if not alone:
            fence(ctx.control)
        base = tl.load(ctx.table + r, mask=mask, other=0)
        row = counts_at(base, mine, r, ctx.me, 0, S)
        h = tl.arange(0, _HEADER)[None, :]
        head = tl.where(h == 1, messages[:, None], 0) + tl.where(h == 3, programs[:, None], 0)
        head += tl.where(h == 4, most[:, None], 0)
        head += (
            tl.where(h == 0, numbers.status, 0)
            + tl.where(h == 2, numbers.num_tokens, 0)
            + tl.where(h == 5, S.OPTIONS, 0)
        )
        tl.atomic_xchg(
            row[:, None] + h, ll_word(ctx.call, head), mask=mask[:, None] & (h >= 0), sem="relaxed", scope="sys"
        )
        if S.SENDERS_COUNT_PAIRS:
            store_expert_counts(ctx, mine, numbers.first_expert, numbers.num_local_experts, pairs, S)
        else:
            every, _ = count_every_token(ctx, ids, numbers, S)
            store_expert_counts(ctx, mine, numbers.first_expert, numbers.num_local_experts, every, S)
        stamp_both(ctx, PUBLISHED, LAST_PUBLISHED, S)
        between_nodes(put_counts, (ctx, mine, alone, movers), S)
        in_two_levels(send_marks, (ctx, mine, ids, numbers), S)
        tl.store(sent + r, messages, mask=only(numbers.status == 0, mask))
        tl.store(sent + S.WORLD_SIZE, (ctx.call & 0x7FFFFFFF).to(tl.int32), mask=numbers.status == 0)
    return ok
