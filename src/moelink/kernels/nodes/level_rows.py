"""Wait for the rows of a two-level combine at home, and sum them (``kernels.nodes.collect``)."""

import triton
import triton.language as tl

from moelink.kernels.combine.row_format import row_columns, store_columns
from moelink.kernels.nodes.internode import is_intra_node
from moelink.kernels.nodes.levels import is_masked, is_peer, lacks_relay, node_number, peer_of
from moelink.kernels.numeric import round_to
from moelink.kernels.sync.signals import I64, own_block, report_failure, wait_all
from moelink.memory.protocol import PHASE_COMBINE

_PHASE = tl.constexpr(PHASE_COMBINE)


@triton.jit
def _nodes_of(slots, S: tl.constexpr):
    """Return [ranks] whether a token with message ``slots`` [ranks] went to any rank of each rank's node."""
    node = tl.arange(0, S.WORLD_SIZE_POW2) // S.NODE_SIZE
    went = tl.zeros([S.WORLD_SIZE_POW2], tl.int32)
    for n in tl.static_range(S.NODES):
        there = tl.max(tl.where(node == n, slots, -1), 0) >= 0
        went = tl.where(node == n, went + there.to(tl.int32), went)
    return went > 0


@triton.jit
def sum_node(mine, to, slots, node, token, S: tl.constexpr):
    """Store at ``to`` the sum of the rows of ``token`` that lie in the parts of ``rows`` for the ranks of ``node``,
    where ``slots`` [node ranks] are not -1."""
    j = tl.arange(0, S.NODE_SIZE_POW2)
    to = tl.multiple_of(to.to(S.ROW_POINTER), 16)
    for c0 in tl.static_range(0, S.HIDDEN_SIZE, S.BLOCK_SIZE):
        c = c0 + tl.arange(0, S.BLOCK_SIZE)
        total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
        for rank in tl.static_range(S.NODE_SIZE):
            sent = tl.max(tl.where(j == rank, slots, -1), 0) >= 0
            place = tl.cast((node * S.NODE_SIZE + rank) * S.MAX_TOKENS + token, tl.int64)
            source = tl.multiple_of((mine + S.OFFSET_ROWS + place * S.ROW_BYTES).to(S.ROW_POINTER), 16)
            total += row_columns(source, c0, sent, S)
        if S.ENCODE_FN is not None:
            store_columns(to, c0, total, place >= 0, S)
        else:
            tl.store(to + c, round_to(total, S.ROW_DTYPE, S.NATIVE_CASTS), mask=c < S.HIDDEN_SIZE)


@triton.jit
def _sum_past(ctx, slots, token, S: tl.constexpr):
    """Store the sums of the nodes whose collector is masked, as it would put them (``kernels.nodes.past``)."""
    mine = own_block(ctx.control, S)
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    j = tl.arange(0, S.NODE_SIZE_POW2)
    for number in range(S.NODES - 1):
        peer = peer_of(number, ctx.me, S)
        if is_masked(ctx.control, peer, S):
            node = peer // S.NODE_SIZE
            rank = tl.where(j < S.NODE_SIZE, node * S.NODE_SIZE + j, -1)
            at = tl.cast(number * S.MAX_TOKENS + token, tl.int64)
            there = tl.max(tl.where(r == rank[:, None], slots[None, :], -1), 1)
            sum_node(mine, mine + S.OFFSET_NODE_ROWS + at * S.ROW_BYTES, there, node, token, S)
    tl.debug_barrier()


@triton.jit
def wait_for_levels(ctx, slots, token, S: tl.constexpr):
    """Wait as the home role for a token's rows, of the ranks of this node and of other nodes, or past a masked relay of
    their ranks. ``slots`` [ranks]: its message slot at each rank, -1 for none. Returns OK, TIMED_OUT or POISONED."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mine = own_block(ctx.control, S)
    direct = is_intra_node(r, ctx.me, S) | lacks_relay(ctx.control, ctx.me, r, S)
    here = mine + S.OFFSET_COMBINE_FLAG + (r * S.MAX_TOKENS + tl.minimum(tl.maximum(slots, 0), S.MAX_TOKENS - 1)) * 8
    number = tl.minimum(node_number(r // S.NODE_SIZE, ctx.me, S), S.NODES - 2)
    there = mine + S.OFFSET_NODE_FLAG + (number * S.MAX_TOKENS + token) * 8
    awaited = tl.where(direct, slots >= 0, is_peer(r, ctx.me, S) & _nodes_of(slots, S))
    words, poison = tl.where(direct, here, there).to(I64), (mine + S.OFFSET_POISON).to(I64)
    ok, peer, got = wait_all(words, awaited & (r < S.WORLD_SIZE), ctx.call, poison, ctx.limit, S.CLOCK)
    report_failure(ok, ctx, peer, _PHASE, ctx.call, got, S)
    if S.NETWORK == "ring":
        if ok > 0:
            _sum_past(ctx, slots, token, S)
    return ok


@triton.jit
def sum_of_levels(ctx, slots, token, c0, S: tl.constexpr):
    """Sum columns [c0, c0 + S.BLOCK_SIZE) of a token's rows, which have all arrived: nodes in ascending order, of this
    node its ranks."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mine = own_block(ctx.control, S)
    own_node = ctx.me // S.NODE_SIZE
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
    for i in tl.static_range(S.NODES - 1 + S.NODE_SIZE):
        near = (i >= own_node) & (i < own_node + S.NODE_SIZE)
        node = tl.where(near, own_node, tl.where(i < own_node, i, i - S.NODE_SIZE + 1))
        rank = own_node * S.NODE_SIZE + i - own_node
        matching = tl.where(near, r == rank, r // S.NODE_SIZE == node)
        sent = tl.max(tl.where(matching, slots, -1), 0) >= 0
        number = node_number(node, ctx.me, S)
        offset = tl.where(near, S.OFFSET_ROWS, S.OFFSET_NODE_ROWS)
        at = tl.cast(tl.where(near, rank, number) * S.MAX_TOKENS + token, tl.int64)
        source = tl.multiple_of((mine + offset + at * S.ROW_BYTES).to(S.ROW_POINTER), 16)
        total += row_columns(source, c0, sent, S)
    return total
