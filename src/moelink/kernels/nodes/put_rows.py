"""Put rows and heads of combine at ranks of other nodes: steps of the expert role that do nothing on one node."""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import is_intra_node, put, staged_at
from moelink.kernels.nodes.levels import is_masked, place_at_stop
from moelink.kernels.numeric import only
from moelink.kernels.sync.signals import I64, U8, fence, own_block, publish


@triton.jit
def put_row(ctx, mine, source, place, word, peer, valid, S: tl.constexpr):
    """Put the row at ``source`` at row ``place`` of ``rows``, then ``call`` in ``word``, if rank ``peer`` is of another
    node and the row ``valid``."""
    if (is_intra_node(peer, ctx.me, S) == 0) & valid:
        fence(ctx.control)
        to = mine + S.OFFSET_ROWS + tl.cast(place, tl.int64) * S.ROW_BYTES
        put(ctx.table, to, source, S.ROW_BYTES, word, ctx.call, peer, S)


@triton.jit
def _put_kept(ctx, mine, kept, peer, slot, S: tl.constexpr):
    """Do as :func:`put_kept` for a valid message and a rank of another node."""
    q = tl.arange(0, S.TOPK_POW2)
    at = tl.cast(ctx.me * S.MAX_TOKENS + slot, tl.int64)
    source = staged_at(mine, peer, ctx.me, S.OFFSET_STAGED_KEPT, S.MAX_TOKENS, slot, S.KEPT_BYTES, S)
    tl.store(source.to(U8) + q, kept.to(tl.uint8), mask=q < S.TOPK)
    fence(ctx.control)
    put(
        ctx.table,
        mine + S.OFFSET_INTER_NODE_KEPT + at * S.KEPT_BYTES,
        source,
        S.KEPT_BYTES,
        mine + S.OFFSET_COMBINE_FLAG + at * 8,
        ctx.call,
        peer,
        S,
    )


@triton.jit
def put_kept(ctx, mine, kept, peer, slot, valid, S: tl.constexpr):
    """Put which slots' rows of a message come, ``kept`` [slots], then its flag, if rank ``peer`` is of another node and
    the message ``valid``."""
    if (is_intra_node(peer, ctx.me, S) == 0) & valid:
        _put_kept(ctx, mine, kept, peer, slot, S)


@triton.jit
def put_none_kept(ctx, peer, S: tl.constexpr):
    """Put that no rows come, and all flags, if rank ``peer`` is of another node."""
    if is_intra_node(peer, ctx.me, S) == 0:
        mine = own_block(ctx.control, S)
        none = tl.zeros([S.TOPK_POW2], tl.int32)
        for slot in range(S.MAX_TOKENS):
            _put_kept(ctx, mine, none, peer, slot, S)


@triton.jit
def put_heads(ctx, S: tl.constexpr):
    """Put ``combine_status``, stored already, and then its head at the ranks of other nodes."""
    mine = own_block(ctx.control, S)
    at = tl.cast(ctx.me, tl.int64) * 8
    fence(ctx.control)
    for d in range(S.WORLD_SIZE):
        if is_intra_node(d, ctx.me, S) == 0:
            source = staged_at(mine, d, ctx.me, S.OFFSET_STAGED_STATUS, 1, 0, 8, S)
            to = mine + S.OFFSET_COMBINE_STATUS + at
            put(ctx.table, to, source, 8, mine + S.OFFSET_COMBINE_HEAD + at, ctx.call, d, S)


@triton.jit
def raise_flags_at_stop(ctx, rank, i, S: tl.constexpr):
    """Raise flags ``i`` of this rank at ``rank`` of this node, as the collector for ranks of all other nodes."""
    block = tl.load(ctx.table + rank)
    near = is_intra_node(rank, ctx.me, S) != 0
    for node in range(S.NODES):
        home = node * S.NODE_SIZE + rank % S.NODE_SIZE
        flags = (block + S.OFFSET_COMBINE_FLAG).to(I64) + place_at_stop(home, ctx.me, S) * S.MAX_TOKENS + i
        publish(flags, only(near & (is_masked(ctx.control, home, S) == 0), i < S.MAX_TOKENS), ctx.call + i * 0)
