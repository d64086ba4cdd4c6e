"""Dispatch, sender role, few tokens: a program sends one token, or serves some of its ranks.

What is before its token a program counts by itself, and only what it needs: the pairs of the token's own experts, and
the messages to each rank. All that can be read early is read first, and the look at what peers have drained is begun
there, too: with one token the time of a dispatch is a chain of latencies, and this is most of it.

Example: 4 experts on 2 ranks, ids [[0, 3], [1, 0], [-1, 2]]. Before token 1 there are a message to each rank, no pair
of expert 1 and one of expert 0: it has slot 1 at rank 0 and positions [0, 1].
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.message import flags_of, load_weights, places_of, put_messages, store_headers
from moelink.kernels.dispatch.payload import load_piece, store_piece
from moelink.kernels.dispatch.route import count_before, experts_at, owner_of, ranks_of
from moelink.kernels.sync.credit import wait_until_drained
from moelink.kernels.sync.internode import near_only
from moelink.kernels.sync.signals import own_block, publish
from moelink.memory.protocol import PHASE_DISPATCH

_PHASE = tl.constexpr(PHASE_DISPATCH)


@triton.jit
def send_one(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens, split,
    shared_begin, shared_end, program, drained, call, limit, S: tl.constexpr,
):  # fmt: skip
    """Row program ``program``: send token ``program // split`` to every ``split``-th rank from ``program % split``."""
    t = program // split
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    mine = own_block(control, S)
    base = tl.load(table + r, mask=r < S.W, other=0)
    token = t + tl.arange(0, 1)
    row = load_piece(x, t, 0, num_tokens, S)
    following = row
    if S.PIECES > 1:
        following = load_piece(x, t, 1, num_tokens, S)
    w = load_weights(weights, token, num_tokens, S)
    expert = experts_at(ids, t * S.K + k, k < S.K, S)
    owner = owner_of(expert, first, num_local, S)
    position, sent = count_before(ids, t, expert, me, first, num_local, shared_begin, shared_end, S)

    goes = ranks_of(owner[None, :], token, num_tokens, me, shared_begin, shared_end, S)
    slot = sent[None, :]
    served = ((r < S.W) & (r % split == program % split))[None, :]
    own = (goes > 0) & served
    tl.store(slot_of + token[:, None] * S.W + r[None, :], tl.where(goes > 0, slot, -1), mask=served)
    ok = wait_until_drained(drained, table, record, control, me, _PHASE, call, limit, S)
    if ok > 0:
        places = places_of(base, own, slot, me, mine, S)
        store_headers(expert[None, :], position[None, :], owner[None, :], token, places, w, first, 1, S)
        to = tl.sum(places, 0)
        for piece in tl.static_range(S.PIECES):
            behind = following
            if piece + 2 < S.PIECES:
                behind = load_piece(x, t, piece + 2, num_tokens, S)
            store_piece(row, piece, scales, t, to, input_scale, S)
            row = following
            following = behind
        flags = flags_of(base, slot, me, S)
        publish(flags, near_only(own, r[None, :], me, S), tl.zeros([1, S.WP], tl.int64) + call)
        if S.NODE < S.W:
            put_messages(table, control, mine, me, own, slot, call, 1, S)
    return ok
