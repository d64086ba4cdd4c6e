"""Dispatch, sender role, many tokens, rows before counts: a program stores its first rows, then learns their numbers.

Where the messages of ``kernels.send_run`` lie in their slots, these lie at their token's number, which needs no
counting; the slot travels in the header. So the first BATCH rows are on their way while the program counts, or waits
for, what is before its own. What a program tells the programs after it comes first of all, as a release waits for all
stores before it. Every rank hears of every token: a flag is twice the call's number, plus 1 if no message comes.

Example: the second program's two tokens 2 and 3 have ids [[0, 3], [1, 0]], 4 experts on 2 ranks, and the first program
has sent [1, 2] messages. Token 2 lies in place 2 of both ranks and says slots [1, 2] there; token 3 lies in place 3 of
rank 0 and says slot 2; rank 1 is told that 3 does not come.
"""

import triton
import triton.language as tl

from moelink.kernels.drained import wait_until_drained
from moelink.kernels.message import flags_for, flags_of, load_weights, places_of, store_headers, store_slots
from moelink.kernels.payload import load_piece, store_piece
from moelink.kernels.routes import count_pairs, positions_of, routes_of, sums_before, tally_all
from moelink.kernels.signals import own_block, publish
from moelink.kernels.tallies import sum_tallies, tell_tally
from moelink.protocol import PHASE_DISPATCH

_PHASE = tl.constexpr(PHASE_DISPATCH)


@triton.jit
def at_tokens(token, S: tl.constexpr):
    """The numbers ``token`` [BATCH] as places at every rank [BATCH, WP]."""
    return tl.broadcast_to(token[:, None], (token.shape[0], S.WP))


@triton.jit
def send_rows(
    row, x, scales, input_scale, ids, base, mine, begin, end, me, first, num_local, shared_begin, shared_end,
    S: tl.constexpr,
):  # fmt: skip
    """Store the rows of up to BATCH tokens from ``begin``, below ``end``, the first of which begins with ``row``.
    Returns what the one after them begins with."""
    token = begin + tl.arange(0, S.BATCH)
    _, _, goes = routes_of(
        ids, token, tl.arange(0, S.KP), end, me, first, num_local, shared_begin, shared_end, S
    )  # fmt: skip
    own = (goes > 0) & (tl.arange(0, S.WP) < S.W)[None, :]
    places = places_of(base, own, at_tokens(token, S), me, mine, S)
    for t in range(begin, tl.minimum(begin + S.BATCH, end)):
        to = tl.sum(tl.where((token == t)[:, None], places, 0), 0)
        for piece in tl.static_range(S.PIECES):
            following = load_piece(x, t + (piece + 1) // S.PIECES, (piece + 1) % S.PIECES, end, S)
            store_piece(row, piece, scales, t, to, input_scale, S)
            row = following
    return row


@triton.jit
def send_early(
    table, record, control, x, scales, input_scale, ids, weights, slot_of, me, first, num_local, num_tokens,
    tokens_per_program, shared_begin, shared_end, program, drained, call, limit, S: tl.constexpr,
):  # fmt: skip
    """Row program ``program``: send its tokens."""
    begin = program * tokens_per_program
    end = tl.minimum(begin + tokens_per_program, num_tokens)
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    i = tl.arange(0, S.BATCH * S.KP)
    mask = r < S.W
    mine = own_block(control, S)
    base = tl.load(table + r, mask=mask, other=0)
    row = load_piece(x, begin, 0, end, S)
    alone = num_tokens <= S.ALONE if S.ALONE > 0 else False
    pairs = tl.zeros([S.EP], tl.int32)
    sent = tl.zeros([S.WP], tl.int32)
    if not alone:
        tell_tally(
            control, mine, ids, begin, end, me, first, num_local, shared_begin, shared_end, program, call, S
        )  # fmt: skip
    ok = wait_until_drained(drained, table, record, control, me, _PHASE, call, limit, S)
    if ok > 0:
        row = send_rows(
            row, x, scales, input_scale, ids, base, mine, begin, end, me, first, num_local, shared_begin, shared_end, S
        )  # fmt: skip
        if alone:
            pairs, sent, _ = tally_all(ids, begin, me, first, num_local, shared_begin, shared_end, S.TC, S)
        else:
            ok, pairs, sent = sum_tallies(table, record, control, mine, me, program, call, limit, S)
    if ok > 0:
        for t0 in range(begin, end, S.BATCH):
            token = t0 + tl.arange(0, S.BATCH)
            expert, owner, goes = routes_of(ids, token, k, end, me, first, num_local, shared_begin, shared_end, S)
            slot = sent[None, :] + sums_before(goes, S.ALONE == 0)
            position = positions_of(pairs, expert, owner, i, S)
            noted = (token < end)[:, None] & mask[None, :]
            tl.store(slot_of + token[:, None] * S.W + r[None, :], tl.where(goes > 0, slot, -1), mask=noted)
            places = places_of(base, (goes > 0) & mask[None, :], at_tokens(token, S), me, mine, S)
            w = load_weights(weights, token, num_tokens, S)
            store_headers(expert, position, owner, token, places, w, first, S.BATCH, S)
            store_slots(slot, places, S)
            publish(flags_of(base, at_tokens(token, S), me, S), noted, flags_for(call, goes, S))
            if t0 + S.BATCH < end:
                sent += tl.sum(goes, 0)
                pairs += count_pairs(expert, owner, S.BATCH * S.KP, S)
                row = send_rows(
                    row, x, scales, input_scale, ids, base, mine, t0 + S.BATCH, end, me, first, num_local, shared_begin,
                    shared_end, S,
                )  # fmt: skip
    return ok
