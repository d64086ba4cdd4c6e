"""Put messages and counts of dispatch at ranks of other nodes: steps of the sender role that do nothing on one node."""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import is_intra_node, put, staged_at
from moelink.kernels.sync.signals import fence


@triton.jit
def put_messages(ctx, mine, own, slot, S: tl.constexpr):
    """Put the messages of N tokens at the ranks of other nodes, where ``own`` [N, ranks], in ``slot`` [N, ranks]."""
    fence(ctx.control)
    t = tl.arange(0, slot.shape[0])[:, None]
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    for i in range(slot.shape[0] * S.WORLD_SIZE):
        d = i % S.WORLD_SIZE
        one = (t == i // S.WORLD_SIZE) & (r == d)
        goes = tl.max(tl.max((one & own).to(tl.int32), 1), 0)
        if (goes > 0) & (is_intra_node(d, ctx.me, S) == 0):
            place = tl.max(tl.max(tl.where(one, slot, 0), 1), 0)
            there = tl.cast(ctx.me * S.MAX_TOKENS + place, tl.int64)
            put(
                ctx.table,
                mine + S.OFFSET_MESSAGES + there * S.MESSAGE_BYTES,
                staged_at(mine, d, ctx.me, S.OFFSET_STAGED_MESSAGES, S.MAX_TOKENS, place, S.MESSAGE_BYTES, S),
                S.MESSAGE_BYTES,
                mine + S.OFFSET_MESSAGE_FLAG + there * 8,
                ctx.call,
                d,
                S,
            )


@triton.jit
def put_counts(ctx, mine, alone, movers, S: tl.constexpr):
    """Put the counts, and ``firsts`` unless CTAs count ``alone``, at the ranks of other nodes."""
    fence(ctx.control)
    at = tl.cast(ctx.me, tl.int64)
    firsts: tl.constexpr = (S.MAX_SENDERS + 1) * 4
    for d in range(S.WORLD_SIZE):
        if is_intra_node(d, ctx.me, S) == 0:
            if not alone:
                put(
                    ctx.table,
                    mine + S.OFFSET_FIRSTS + at * firsts,
                    staged_at(mine, d, ctx.me, S.OFFSET_STAGED_FIRSTS, 1, 0, firsts, S),
                    (movers + 1) * 4,
                    mine + S.OFFSET_FIRSTS_FLAG + at * 8,
                    ctx.call,
                    d,
                    S,
                )
            put(
                ctx.table,
                mine + S.OFFSET_COUNTS + at * (S.COUNT_WORDS * 8),
                staged_at(mine, d, ctx.me, S.OFFSET_STAGED_COUNTS, 1, 0, S.COUNT_WORDS * 8, S),
                S.COUNT_WORDS * 8,
                mine + S.OFFSET_COUNTS_FLAG + at * 8,
                ctx.call,
                d,
                S,
            )
