"""Send past a masked relay, with two levels (``kernels.nodes.levels``).

If the peer of a home rank on another node is masked, no rank of that node forwards the home rank's relays or collects
rows for it. The other ranks of that node may take part. So the home rank and each of them exchange as with one level:

=========  ============================================================================================================
dispatch   the home rank puts its staged copy of a token as a message at each rank that the token goes to, and after it
           the message's flag. The ids of this message count over all ranks and are below -1, so that the receiver tells
           them from local ones (:func:`own_ids`)
combine    the expert's rank puts its row at home, and after it the flag of the message. The home rank does the
           collector's work: it stores the sum of such a node's rows at the place of the collector's row, rounded or
           encoded alike. So the bits of sums do not depend on who is masked
=========  ============================================================================================================

Marks and relays name no masked ranks, so forwarders store nothing for them and collectors await no rows of them.

Why these puts meet nothing else. Slots of messages are the home rank's own in any form. Rows arrive at home in the
parts of ``rows`` and ``combine_flag`` for rows that the home rank would collect for the *masked* peer. That peer has no
tokens, so no rank of the home rank's node stores a row there. Ranks that refuse a call or combine another dispatch
raise no flags there (``put_rows.raise_flags_at_stop``, ``collect.meet_node``). Rows are staged outside the block. A
rank stores there again when the home rank has granted credit for the call, and it grants credit when the rows have
arrived, in a refused call as many as heads say (``quiesce.quiesce_combine``).

Only the simulated network goes on without ranks, so kernels for NVSHMEM contain nothing of this.

Example: 4 ranks, 8 experts, S.NODE_SIZE 2, rank 2 is masked. Token 5 of rank 0 names expert 6 and has slot 1 at rank 3.
Rank 0 puts it in slot 1 of rank 0 in rank 3's ``messages``, with id -8, which is local id 0 there and -1 elsewhere.
Rank 3 puts its row at row (3, 5) of rank 0's ``rows`` and raises flag (3, 1). A token of rank 1 crosses to rank 3 as a
relay.
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
    return -expert + _FIRST_ID


@triton.jit
def own_ids(ids, numbers, S: tl.constexpr):
    """Return the local ids of messages, from ids that are local or those of :func:`ids_for_all`."""
    if S.TWO_LEVEL and S.NETWORK == "ring":
        local = -ids + _FIRST_ID - numbers.first_expert
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
    """Return where to store the row of ``token`` for rank ``home``: at ``address``, or where it is staged if no rank
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
    """Put the row at ``source`` at rank ``home``, at ``token``, and the flag of message ``slot``, if no rank collects
    it. Unless ``valid``, put the flag alone."""
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
    """Put all flags of this rank, which refuses the call, at rank ``home``, if no rank collects rows for it."""
    for slot in range(S.MAX_TOKENS):
        put_row_past(ctx, slot * 0, home, 0, slot, False, S)
