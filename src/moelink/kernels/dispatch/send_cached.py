"""Dispatch, sender role, over the routing of an earlier dispatch: nothing is counted, and no positions travel.

What the earlier call found out is still there: ``slot_of`` says where a token's messages go, ``sent`` how many there
are, and receivers know the rows of each. So program 0 tells every rank at once what comes, and the other programs wait
for nobody of this rank, not even for one another's counts. They take the tokens in turn, BATCH at a time, so that
messages come about in the order of their slots, which ascend with the tokens; receivers take them as with few tokens,
one by one (programs = 0). With few tokens a program sends one, or serves ``split``-th of its ranks, as ever.

The header's words are those of ``kernels.dispatch.counts``, and beside them the number of the call that made the
routing: ranks that use the routings of different calls again all see it, and refuse the call alike
(``kernels.dispatch.receive``). The options are others than those of a call that counts, so a mix of the two is refused,
too. Behind the header, and not waited for, go the words of rows per expert, empty: ranks that do count wait for them
before they can look at the options, and every word bears every call's number (``kernels.sync.ll_words``).

Why no call overtakes another is no different from ``kernels.dispatch.send``: every program waits until every
destination has drained the previous call before its first store there, tells what it drained itself before it waits,
and counts its arrival at the end. ``slot_of`` and ``sent`` were written by an earlier launch in stream order and are
never written again. Slots that are none (the earlier call failed half way) are left out.

Of a routing whose own dispatch brought nothing, because a rank refused it or a wait expired, no call is made, as with a
combine of such rows (``kernels.combine.send``): every rank that has a handle of it sees that in its ``received``, and a
rank that has none, because it refused the call itself, makes none either. Ids out of range count once, in the call that
read them. Rows that do not fit are lost again, and counted again.

Example: 4 experts on 2 ranks, rank 0's ids [[0, 3], [1, 0], [-1, 2]], call 7: ``slot_of`` [[0, 0], [1, -1], [-1, 1]],
``sent`` [2, 2, 7]. Call 9 over it tells both ranks "2 messages, of call 7". Two programs with BATCH 1 send tokens 0 and
2, and token 1.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.counts import counts_at, put_counts, store_expert_counts
from moelink.kernels.dispatch.message import flags_of, load_weights, places_of, put_messages, store_headers
from moelink.kernels.dispatch.payload import load_piece, store_piece
from moelink.kernels.dispatch.route import experts_at, owner_of
from moelink.kernels.sync.credit import glance, tell_drained, wait_until_drained
from moelink.kernels.sync.internode import near_only
from moelink.kernels.sync.ll_words import tagged
from moelink.kernels.sync.signals import calls_made, count_arrival, own_block, publish
from moelink.memory.protocol import COUNT_HEADER, DISPATCH_BYTES, DISPATCH_SENT, PHASE_DISPATCH

_HEADER = tl.constexpr(COUNT_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_SENT)
_BYTES = tl.constexpr(DISPATCH_BYTES)


@triton.jit
def send_heads(
    table, record, control, sent, me, first, num_local, num_tokens, drained, call, limit, S: tl.constexpr
):  # fmt: skip
    """Program 0: tell every rank how many messages come, and of which call's routing."""
    r = tl.arange(0, S.WP)
    mask = r < S.W
    mine = own_block(control, S)
    messages = tl.minimum(tl.maximum(tl.load(sent + r, mask=mask, other=0), 0), S.T)
    origin = tl.load(sent + S.W)
    base = tl.load(table + r, mask=mask, other=0)
    ok = wait_until_drained(drained, table, record, control, me, _PHASE, call, limit, S)
    if ok > 0:
        row = counts_at(base, mine, r, me, 0, S)
        h = tl.arange(0, _HEADER)[None, :]
        head = tl.where(h == 1, messages[:, None], 0) + tl.where(h == 2, num_tokens, 0)
        head += tl.where(h == 5, S.OPTIONS, 0) + tl.where(h == 6, origin, 0)
        tl.atomic_xchg(
            row[:, None] + h, tagged(call, head), mask=mask[:, None] & (h >= 0), sem="relaxed", scope="sys"
        )  # fmt: skip
        store_expert_counts(table, mine, me, first, num_local, tl.zeros([S.EP], tl.int32), call, S)
        if S.NODE < S.W:
            put_counts(table, control, mine, me, True, 0, call, S)
        away = tl.sum(tl.where(r == me, 0, messages), 0).to(tl.int64)
        tl.atomic_add(control + _BYTES, away * S.MESSAGE, sem="relaxed", scope="gpu")
    return ok


@triton.jit
def _slots_at(slot_of, token, served, num_tokens, S: tl.constexpr):
    """Slots [N, WP] of tokens ``token`` [N] at the ranks ``served`` [WP]; -1 for none."""
    r = tl.arange(0, S.WP)
    mask = (token < num_tokens)[:, None] & served[None, :]
    return tl.load(slot_of + token[:, None] * S.W + r[None, :], mask=mask, other=-1)


@triton.jit
def _send_batches(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens, lane,
    lanes, part, split, drained, call, limit, N: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Send batches ``lane``, ``lane + lanes``, ... of N tokens to every ``split``-th rank from ``part``."""
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    served = (r < S.W) & (r % split == part)
    mine = own_block(control, S)
    base = tl.load(table + r, mask=r < S.W, other=0)
    begin = lane * N
    row = load_piece(x, begin, 0, num_tokens, S)
    slot = _slots_at(slot_of, begin + tl.arange(0, N), served, num_tokens, S)
    ok = wait_until_drained(drained, table, record, control, me, _PHASE, call, limit, S)
    if ok > 0:
        for t0 in range(begin, num_tokens, lanes * N):
            token = t0 + tl.arange(0, N)
            behind = t0 + lanes * N
            following_slot = _slots_at(slot_of, behind + tl.arange(0, N), served, num_tokens, S)
            own = (slot >= 0) & (slot < S.T)
            expert = token[:, None] + k[None, :]
            owner = expert
            if S.RANK_LAYOUT:
                inside = (token < num_tokens)[:, None] & (k < S.K)[None, :]
                expert = experts_at(ids, token[:, None] * S.K + k[None, :], inside, S)
                owner = owner_of(expert, first, num_local, S)
            places = places_of(base, own, slot, me, mine, S)
            w = load_weights(weights, token, num_tokens, S)
            store_headers(expert, expert, owner, token, places, w, first, N, S)
            end = tl.minimum(t0 + N, num_tokens)
            for t in range(t0, end):
                to = tl.sum(tl.where((token == t)[:, None], places, 0), 0)
                after = tl.where(t + 1 < end, t + 1, behind)
                for piece in tl.static_range(S.PIECES):
                    next_token = t
                    if piece + 1 == S.PIECES:
                        next_token = after
                    following = load_piece(x, next_token, (piece + 1) % S.PIECES, num_tokens, S)
                    store_piece(row, piece, scales, t, to, input_scale, S)
                    row = following
            flags = flags_of(base, slot, me, S)
            publish(flags, near_only(own, r[None, :], me, S), tl.zeros([N, S.WP], tl.int64) + call)
            if S.NODE < S.W:
                put_messages(table, control, mine, me, own, slot, call, N, S)
            slot = following_slot
    return ok


@triton.jit
def send_again(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, sent, routed, me, first, num_local,
    num_tokens, tokens_per_program, split, program, num_programs, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the sender role. ``routed``: ``received`` of the call whose routing it is."""
    call = calls_made(control, _ROLE) + 1
    drained = glance(control, _PHASE, call, S)
    nothing = tl.load(routed + 2 * S.W)
    if nothing == 0:
        lane = (program - 1) // split
        lanes = (num_programs - 1) // split
        part = (program - 1) % split
        if program == 0:
            tell_drained(table, control, me, S)
            ok = send_heads(
                table, record, control, sent, me, first, num_local, num_tokens, drained, call, limit, S
            )  # fmt: skip
        elif (tokens_per_program > 1) & (S.BATCH > 1):
            ok = _send_batches(
                table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local,
                num_tokens, lane, lanes, part, split, drained, call, limit, S.BATCH, S,
            )  # fmt: skip
        else:
            ok = _send_batches(
                table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local,
                num_tokens, lane, lanes, part, split, drained, call, limit, 1, S,
            )  # fmt: skip
        if ok > 0:
            count_arrival(control, _ROLE, program, num_programs, "relaxed")
