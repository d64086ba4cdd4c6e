"""Dispatch, sender role: a message's place at each rank, what is small in it, and how it gets to other nodes.

What is large in it, the row, is in ``kernels.dispatch.payload``.

Example: token 5 goes to ranks 0 and 2 of 3, in slots 4 and 0 there: its places are the addresses of message (me, 4) of
rank 0, 0, and of message (me, 0) of rank 2; local ids there are [1, -1] and [-1, 0] if its experts are theirs.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.route import first_of
from moelink.kernels.sync.internode import direct_or_staged, is_near, put, staged_at
from moelink.kernels.sync.signals import I32, I64, fence


@triton.jit
def places_of(base, own, slot, me, mine, S: tl.constexpr):
    """Addresses [N, WP] of the messages in ``slot`` [N, WP] of the ranks whose blocks are at ``base`` [WP]; 0 unless
    ``own``."""
    r = tl.arange(0, S.WP)[None, :]
    places = base[None, :] + S.O_MESSAGES + (me * S.T + slot).to(tl.int64) * S.MESSAGE
    places = direct_or_staged(places, mine, r, me, S.O_STAGED_MESSAGES, S.T, slot, S.MESSAGE, S)
    return tl.where(own, places, 0)


@triton.jit
def flags_of(base, slot, me, S: tl.constexpr):
    """Words [N, WP] that say that those messages are stored."""
    return (base + S.O_MESSAGE_FLAG).to(I64)[None, :] + (me * S.T + slot)


@triton.jit
def load_weights(weights, token, num_tokens, S: tl.constexpr):
    """Router weights [N, KP] of tokens ``token`` [N], anything behind the last; zeros where they do not travel."""
    k = tl.arange(0, S.KP)
    if S.WEIGHTS:
        inside = (token < num_tokens)[:, None] & (k < S.K)[None, :]
        return tl.load(weights + token[:, None] * S.K + k[None, :], mask=inside)
    else:
        return tl.zeros([token.shape[0], S.KP], tl.float32)


@triton.jit
def store_headers(ids_of, position, owner, token, places, w, first, N: tl.constexpr, S: tl.constexpr):
    """What is small in a message: token, local ids, positions and weights, of a block of tokens at once.

    ``ids_of``, ``position``, ``owner``, ``w``: [N, KP]; ``token`` [N]; ``places`` [N, WP] addresses, 0 for none.
    CACHED: no positions, and local ids only where they are an output (layout "rank"), as receivers know the rows.
    """
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    goes = places != 0
    tl.store((places + S.M_TOKEN).to(I32), tl.broadcast_to(token[:, None], (N, S.WP)), mask=goes)
    named = goes[:, :, None] & (k < S.K)[None, None, :]
    shape: tl.constexpr = (N, S.WP, S.KP)
    if S.RANK_LAYOUT or not S.CACHED:
        local = tl.where(
            owner[:, None, :] == r[None, :, None], ids_of[:, None, :] - first_of(r, first, S)[None, :, None], -1
        )
        tl.store((places + S.M_IDS).to(I32)[:, :, None] + k[None, None, :], local, mask=named)
    if not S.CACHED:
        tl.store(
            (places + S.M_POSITIONS).to(I32)[:, :, None] + k[None, None, :],
            tl.broadcast_to(position[:, None, :], shape), mask=named,
        )  # fmt: skip
    if S.WEIGHTS:
        to = (places + S.M_WEIGHTS).to(S.WEIGHT_P)
        tl.store(to[:, :, None] + k[None, None, :], tl.broadcast_to(w[:, None, :], shape), mask=named)


@triton.jit
def put_messages(table, control, mine, me, own, slot, call, N: tl.constexpr, S: tl.constexpr):
    """Put messages at the ranks of other nodes: of each of N tokens, at those where ``own`` [N, WP], in ``slot``
    [N, WP]."""
    fence(control)
    t = tl.arange(0, N)[:, None]
    r = tl.arange(0, S.WP)[None, :]
    for i in range(N * S.W):
        d = i % S.W
        one = (t == i // S.W) & (r == d)
        goes = tl.max(tl.max((one & own).to(tl.int32), 1), 0)
        if (goes > 0) & (is_near(d, me, S) == 0):
            place = tl.max(tl.max(tl.where(one, slot, 0), 1), 0)
            there = tl.cast(me * S.T + place, tl.int64)
            put(
                table, mine + S.O_MESSAGES + there * S.MESSAGE,
                staged_at(mine, d, me, S.O_STAGED_MESSAGES, S.T, place, S.MESSAGE, S), S.MESSAGE,
                mine + S.O_MESSAGE_FLAG + there * 8, call, d, S,
            )  # fmt: skip
