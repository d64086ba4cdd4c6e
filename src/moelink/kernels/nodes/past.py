"""Send past a masked relay: steps of two levels (``kernels.nodes.levels``) for pairs of ranks that nobody relays between.

Where the peer of a home rank on another node is masked, nobody there forwards the home rank's relays or collects rows
for it. The other ranks of that node may take part. So the home rank and each of them exchange as with one level:

=========  ============================================================================================================
dispatch   the home rank puts its staged copy of a token, a message, at each rank that the token goes to, and the
           message's flag after it. Of the token's expert ids the message has those over all ranks, below -1 so that
           the receiver tells them from its own (:func:`own_ids`)
combine    the expert's rank puts its row at home, with the flag of its message. Home then does the collector's work: it
           stores the sum of such a node's rows where the collector's row would be, rounded or encoded alike. So sums
           have the same bits whoever is masked
=========  ============================================================================================================

Marks and relays name no masked ranks, so forwarders store nothing there and collectors wait for nothing of them.

Why these puts meet nothing else. The messages' slots at the receiver are the sender's own in any form. Rows arrive at
home in the parts of ``rows`` and ``combine_flag`` that are kept for rows that the home rank collects for the *masked*
peer: that peer has no tokens, so no rank of the home rank's node stores there. Where a rank of that node refuses a call
or combines another dispatch, it raises no flags of these parts (``put_rows.raise_flags_at_stop``,
``collect.meet_node``). Rows are staged in memory of their own outside the block. They may be overwritten when home has
granted credit for the call, and it grants that after they have arrived, as with one level: in a refused call it waits
for as many as the heads say (``quiesce.quiesce_combine``).

Only the simulated network goes on without ranks; for NVSHMEM all of this is compiled away.

Example: 4 ranks, S.NODE_SIZE 2, rank 2 is masked. Token 5 of rank 0 goes to rank 3, in slot 1 there. Rank 0 puts it in
slot 1 of rank 0 in rank 3's ``messages``. If it names expert 6, of 2 experts a rank, its id is -8, and rank 3 reads 0.
Rank 3 puts its row at row (3, 5) of rank 0's ``rows`` and raises flag (3, 1). Token 5 of rank 1 crosses to rank 3, its
peer, as a relay.
"""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import inter_node_number, put, tell
from moelink.kernels.nodes.levels import lacks_relay
from moelink.kernels.sync.signals import I64, fence, own_block
from moelink.memory.protocol import RING_STAGED

_STAGED = tl.constexpr(RING_STAGED)
_FIRST_ID = tl.constexpr(-2)


@triton.jit
def ids_for_all(expert):
    """Return ids ``expert`` over all ranks, -1 for none, as a message has them that goes past a relay."""
    return _FIRST_ID - expert


@triton.jit
def own_ids(ids, numbers, S: tl.constexpr):
    """Return the local ids of messages, from ids that are local or those of :func:`ids_for_all`."""
    if S.TWO_LEVEL and S.NETWORK == "ring":
        local = _FIRST_ID - ids - numbers.first_expert
        here = (local >= 0) & (local < numbers.num_local_experts)
        return tl.where(ids <= _FIRST_ID, tl.where(here, local, -1), ids)
    else:
        return ids


@triton.jit
def put_messages_past(ctx, mine, staged, goes, slot, peer, S: tl.constexpr):
    """Put the message staged at ``staged`` at the ranks of the node of ``peer`` where ``goes`` [1, ranks], in ``slot``
    [1, ranks]."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    for j in range(S.NODE_SIZE):
        rank = peer // S.NODE_SIZE * S.NODE_SIZE + j
        if tl.max(tl.max((goes & (r == rank)).to(tl.int32), 1), 0) > 0:
            place = tl.max(tl.max(tl.where(goes & (r == rank), slot, 0), 1), 0)
            at = tl.cast(ctx.me * S.MAX_TOKENS + place, tl.int64)
            to, word = mine + S.OFFSET_MESSAGES + at * S.MESSAGE_BYTES, mine + S.OFFSET_MESSAGE_FLAG + at * 8
            put(ctx.table, to, staged, S.MESSAGE_BYTES, word, ctx.call, rank, S)


@triton.jit
def staged_past(address, ctx, home, token, S: tl.constexpr):
    """Return where to store the row of ``token`` for rank ``home``: at ``address``, or where it is staged if nobody
    collects it."""
    if S.TWO_LEVEL and S.NETWORK == "ring":
        staging = tl.load(tl.load(ctx.table + S.WORLD_SIZE).to(I64) + _STAGED)
        row = tl.cast(inter_node_number(home, ctx.me, S) * S.MAX_TOKENS + token, tl.int64)
        return tl.where(lacks_relay(ctx.control, home, ctx.me, S), staging + row * S.ROW_BYTES, address)
    else:
        return address


@triton.jit
def _flag_at(mine, me, slot, S: tl.constexpr):
    return mine + S.OFFSET_COMBINE_FLAG + tl.cast(me * S.MAX_TOKENS + slot, tl.int64) * 8


@triton.jit
def put_row_past(ctx, source, home, token, slot, valid, S: tl.constexpr):
    """Put the row at ``source`` at rank ``home``, at ``token``, and the flag of message ``slot``, if nobody collects it;
    the flag alone unless ``valid``."""
    if lacks_relay(ctx.control, home, ctx.me, S):
        mine = own_block(ctx.control, S)
        word = _flag_at(mine, ctx.me, slot, S)
        if valid:
            fence(ctx.control)
            to = mine + S.OFFSET_ROWS + tl.cast(ctx.me * S.MAX_TOKENS + token, tl.int64) * S.ROW_BYTES
            put(ctx.table, to, source, S.ROW_BYTES, word, ctx.call, home, S)
        else:
            tell(ctx.table, mine, word, ctx.call, home, S)


@triton.jit
def raise_flags_past(ctx, home, S: tl.constexpr):
    """Put all flags of this rank, which refuses the call, at rank ``home``, if nobody collects rows for it."""
    for slot in range(S.MAX_TOKENS):
        put_row_past(ctx, slot * 0, home, 0, slot, False, S)
