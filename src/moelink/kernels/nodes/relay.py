"""Send relays to other nodes: a step of the sender role of a two-level dispatch (``kernels.nodes.levels``).

A row is stored once in this rank's staging region for relays, at its token's number, whatever nodes it goes to. It is
encoded once, and stored from registers together with the messages to ranks of this node: the relay's place stands in
one column of ``places`` (``levels.column_of``). Behind the message a relay has the token's expert ids and its slots at
all ranks, by which the forwarder knows where the message goes. Its own ids are those of ``kernels.nodes.past``, or over
NVSHMEM undefined.

Then one put for each node that the token goes to carries the relay to the slot of the *token* at the peer there. So no
relay has to be counted. Which tokens come is told by *marks*, a byte for each token, one put for each node: the CTA
that tells the counts tells them, too. It reads all ids once more for that, or ``slot_of`` over cached routing.

A peer that a token does not go to gets no relay of it. Staged relays and marks may be overwritten once all ranks have
granted credit for the call before: a peer grants it after it has seen the signals of all relays that the marks name.

Example: 6 ranks, S.NODE_SIZE 2, rank 2, three tokens that go to ranks (3), (3, 4, 5) and (0, 4). Marks for node 2 are
[0, 1, 1], for node 0 [0, 0, 1]. Token 2 is staged once and put at ranks 4 and 0.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.route import experts_at, owner_of
from moelink.kernels.nodes.internode import direct_or_staged, is_intra_node, put
from moelink.kernels.nodes.levels import is_masked, number_there, peer_of
from moelink.kernels.nodes.past import ids_for_all, put_messages_past
from moelink.kernels.sync.signals import I32, U8, fence
from moelink.memory.protocol import DISPATCH_BYTES, MARKS_HEADER

_HEADER = tl.constexpr(MARKS_HEADER)
_BYTES = tl.constexpr(DISPATCH_BYTES)


@triton.jit
def _leaves(own, me, S: tl.constexpr):
    """Return which of ``own`` [N, ranks] are of other nodes."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    return own & (is_intra_node(r, me, S) == 0)


@triton.jit
def staged_relay(mine, token, S: tl.constexpr):
    """Return the address of token ``token``'s relay in the staging region."""
    return mine + S.OFFSET_STAGED_RELAYS + token.to(tl.int64) * S.RELAY_BYTES


@triton.jit
def with_relays(places, own, token, me, mine, S: tl.constexpr):
    """Return ``places`` [N, ranks] of the messages of tokens ``token`` [N], where ``own``: of ranks of this node as
    they are, and the relay's in one column where a token goes to other nodes; 0 elsewhere."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    leaves = tl.max(_leaves(own, me, S).to(tl.int32), 1)[:, None]
    column = (r == (me + S.NODE_SIZE) % S.WORLD_SIZE) & (leaves > 0)
    near = own & is_intra_node(r, me, S)
    return tl.where(near, places, tl.where(column, staged_relay(mine, token, S)[:, None], 0))


@triton.jit
def staged_or_relayed(places, own, slot, token, me, mine, S: tl.constexpr):
    """Return ``places`` [N, ranks] of the messages of tokens ``token`` [N], 0 unless ``own``; for ranks of other nodes
    where they are staged, or with two levels the relay's."""
    if S.TWO_LEVEL:
        return with_relays(places, own, token, me, mine, S)
    else:
        r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
        places = direct_or_staged(places, mine, r, me, S.OFFSET_STAGED_MESSAGES, S.MAX_TOKENS, slot, S.MESSAGE_BYTES, S)
        return tl.where(own, places, 0)


@triton.jit
def store_relay_headers(ctx, mine, batch, S: tl.constexpr):
    """Store what relays of a ``batch`` have behind the message: message slots, and the experts if ids
    travel."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    k = tl.arange(0, S.TOPK_POW2)[None, :]
    leaves = tl.max(_leaves(batch.own, ctx.me, S).to(tl.int32), 1)[:, None] > 0
    at = staged_relay(mine, batch.token, S)
    slots = (at + S.RELAY_SLOTS).to(I32)[:, None] + r
    there = batch.own & (is_masked(ctx.control, r, S) == 0)
    tl.store(slots, tl.where(there, batch.slot, -1), mask=leaves & (r < S.WORLD_SIZE))
    if S.TELLS_IDS:
        named = leaves & (k < S.TOPK)
        tl.store((at + S.RELAY_EXPERTS).to(I32)[:, None] + k, batch.expert, mask=named)
        if S.NETWORK == "ring":
            tl.store((at + S.MESSAGE_IDS).to(I32)[:, None] + k, ids_for_all(batch.expert), mask=named)


@triton.jit
def put_relay(ctx, mine, t, peer, S: tl.constexpr):
    """Put the relay of token ``t`` at ``peer``."""
    at = tl.cast(number_there(peer, ctx.me, S) * S.MAX_TOKENS + t, tl.int64)
    to, word = mine + S.OFFSET_RELAYS + at * S.RELAY_BYTES, mine + S.OFFSET_RELAY_FLAG + at * 8
    put(ctx.table, to, staged_relay(mine, t, S), S.RELAY_BYTES, word, ctx.call, peer, S)


@triton.jit
def put_relays(ctx, mine, own, slot, token, S: tl.constexpr):
    """Put the relays of tokens ``token`` [N], stored already, at the peers on all nodes of ``own`` [N, ranks]; past a
    masked peer the messages, in ``slot`` [N, ranks]."""
    fence(ctx.control)
    i = tl.arange(0, token.shape[0])
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    own = own & (is_masked(ctx.control, r, S) == 0)
    for step in range(token.shape[0] * (S.NODES - 1)):
        peer = peer_of(step % (S.NODES - 1), ctx.me, S)
        here = i == step // (S.NODES - 1)
        there = own & here[:, None] & (r // S.NODE_SIZE == peer // S.NODE_SIZE)
        if tl.max(tl.max(there.to(tl.int32), 1), 0) > 0:
            t = tl.sum(tl.where(here, token, 0), 0)
            if S.NETWORK == "ring":
                if is_masked(ctx.control, peer, S):
                    put_messages_past(ctx, mine, staged_relay(mine, t, S), there, slot, peer, S)
                else:
                    put_relay(ctx, mine, t, peer, S)
            else:
                put_relay(ctx, mine, t, peer, S)


@triton.jit
def _staged_marks(mine, number, S: tl.constexpr):
    return mine + S.OFFSET_STAGED_MARKS + tl.cast(number, tl.int64) * S.MARKS_BYTES


@triton.jit
def _store_marks(mine, number, token, goes, num_tokens, S: tl.constexpr):
    """Store the marks ``goes`` [N] of tokens ``token`` [N] for node ``number``. Returns how many there are."""
    marks = (_staged_marks(mine, number, S) + _HEADER).to(U8)
    there = goes & (token < num_tokens)
    tl.store(marks + token, there.to(tl.uint8), mask=token < num_tokens)
    return tl.sum(there.to(tl.int32), 0)


@triton.jit
def _put_marks(ctx, mine, num_tokens, relays, S: tl.constexpr):
    """Put the marks, stored already, at every peer; and count the bytes of ``relays`` relays."""
    for number in range(S.NODES - 1):
        tl.store(_staged_marks(mine, number, S).to(I32), num_tokens)
    fence(ctx.control)
    for number in range(S.NODES - 1):
        peer = peer_of(number, ctx.me, S)
        at = tl.cast(number_there(peer, ctx.me, S), tl.int64)
        to, word = mine + S.OFFSET_MARKS + at * S.MARKS_BYTES, mine + S.OFFSET_MARKS_FLAG + at * 8
        put(ctx.table, to, _staged_marks(mine, number, S), num_tokens + _HEADER, word, ctx.call, peer, S)
    tl.atomic_add(ctx.control + _BYTES, relays.to(tl.int64) * S.RELAY_BYTES, sem="relaxed", scope="gpu")


@triton.jit
def send_marks(ctx, mine, ids, numbers, S: tl.constexpr):
    """Tell every peer which tokens come, by the expert ids of all tokens."""
    i = tl.arange(0, S.MARKED_AT_ONCE)
    k = tl.arange(0, S.TOPK_POW2)[None, :]
    relays = tl.full([], 0, tl.int32)
    for t0 in range(0, numbers.num_tokens, S.MARKED_AT_ONCE):
        token = t0 + i
        inside = (token < numbers.num_tokens)[:, None] & (k < S.TOPK)
        expert = experts_at(ids, token[:, None] * S.TOPK + k, inside, S)
        owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
        there = (owner >= 0) & (is_masked(ctx.control, owner, S) == 0)
        for number in range(S.NODES - 1):
            peer = peer_of(number, ctx.me, S)
            relayed = there & (is_masked(ctx.control, peer, S) == 0)
            goes = tl.max((relayed & (owner // S.NODE_SIZE == peer // S.NODE_SIZE)).to(tl.int32), 1) > 0
            relays += _store_marks(mine, number, token, goes, numbers.num_tokens, S)
    _put_marks(ctx, mine, numbers.num_tokens, relays, S)


@triton.jit
def send_noted_marks(ctx, mine, slot_of, num_tokens, S: tl.constexpr):
    """Tell every peer which tokens come, by the slots that an earlier call noted."""
    i = tl.arange(0, S.MARKED_AT_ONCE)
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    relays = tl.full([], 0, tl.int32)
    for t0 in range(0, num_tokens, S.MARKED_AT_ONCE):
        token = t0 + i
        mask = (token < num_tokens)[:, None] & (r < S.WORLD_SIZE)
        slot = tl.load(slot_of + token[:, None] * S.WORLD_SIZE + r, mask=mask, other=-1)
        there = (slot >= 0) & (slot < S.MAX_TOKENS) & (is_masked(ctx.control, r, S) == 0)
        for number in range(S.NODES - 1):
            peer = peer_of(number, ctx.me, S)
            relayed = there & (is_masked(ctx.control, peer, S) == 0)
            goes = tl.max((relayed & (r // S.NODE_SIZE == peer // S.NODE_SIZE)).to(tl.int32), 1) > 0
            relays += _store_marks(mine, number, token, goes, num_tokens, S)
    _put_marks(ctx, mine, num_tokens, relays, S)
