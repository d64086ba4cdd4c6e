"""Dispatch, sender role, many tokens: a program sends ``tokens_per_program`` consecutive ones.

A program needs the number of its first message to each rank, and of its first pair for each expert. Of up to S.ALONE
tokens it counts all that are before its own; of more, that would take longer than to share what programs count
(``kernels.dispatch.block_counts``) and to wait for the sums of the lower ones. Rows travel one by one, each read while
the one before is stored; BATCH messages are published at a time, as the release waits until all stores before it have
arrived.

Example: the second program's two tokens have ids [[0, 3], [1, 0]], 4 experts on 2 ranks, and the first program has sent
[1, 2] messages and [1, 0, 0, 2] pairs: slots are [1, 2] and [2, -], positions [1, 2] and [0, 2].
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.block_counts import sum_tallies, tell_tally
from moelink.kernels.dispatch.message import flags_of, load_weights, places_of, put_messages, store_headers
from moelink.kernels.dispatch.payload import load_piece, store_piece
from moelink.kernels.dispatch.route import count_pairs, positions_of, routes_of, sums_before, tally_all
from moelink.kernels.sync.credit import wait_until_drained
from moelink.kernels.sync.internode import near_only
from moelink.kernels.sync.signals import own_block, publish
from moelink.memory.protocol import PHASE_DISPATCH

_PHASE = tl.constexpr(PHASE_DISPATCH)


@triton.jit
def tally_together(
    table, record, control, mine, ids, begin, end, me, first, num_local, shared_begin, shared_end, program, call, limit,
    S: tl.constexpr,
):  # fmt: skip
    """Tell what tokens [begin, end) of ``program`` need, and wait for what those of the lower programs do."""
    tell_tally(
        control, mine, ids, begin, end, me, first, num_local, shared_begin, shared_end, program, call, S
    )  # fmt: skip
    return sum_tallies(table, record, control, mine, me, program, call, limit, S)


@triton.jit
def send_run(
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
    if S.ALONE > 0:
        if num_tokens <= S.ALONE:
            ok = tl.full([], 1, tl.int32)
            pairs, sent, _ = tally_all(ids, begin, me, first, num_local, shared_begin, shared_end, S.TC, S)
        else:
            ok, pairs, sent = tally_together(
                table, record, control, mine, ids, begin, end, me, first, num_local, shared_begin, shared_end, program,
                call, limit, S,
            )  # fmt: skip
    else:
        ok, pairs, sent = tally_together(
            table, record, control, mine, ids, begin, end, me, first, num_local, shared_begin, shared_end, program,
            call, limit, S,
        )  # fmt: skip
    if ok > 0:
        ok = wait_until_drained(drained, table, record, control, me, _PHASE, call, limit, S)
    if ok > 0:
        for t0 in range(begin, end, S.BATCH):
            token = t0 + tl.arange(0, S.BATCH)
            expert, owner, goes = routes_of(ids, token, k, end, me, first, num_local, shared_begin, shared_end, S)
            slot = sent[None, :] + sums_before(goes, S.ALONE == 0)
            position = positions_of(pairs, expert, owner, i, S)

            own = (goes > 0) & mask[None, :]
            noted = (token < end)[:, None] & mask[None, :]
            tl.store(slot_of + token[:, None] * S.W + r[None, :], tl.where(goes > 0, slot, -1), mask=noted)
            places = places_of(base, own, slot, me, mine, S)
            w = load_weights(weights, token, num_tokens, S)
            store_headers(expert, position, owner, token, places, w, first, S.BATCH, S)
            for t in range(t0, tl.minimum(t0 + S.BATCH, end)):
                to = tl.sum(tl.where((token == t)[:, None], places, 0), 0)
                for piece in tl.static_range(S.PIECES):
                    following = load_piece(x, t + (piece + 1) // S.PIECES, (piece + 1) % S.PIECES, end, S)
                    store_piece(row, piece, scales, t, to, input_scale, S)
                    row = following
            flags = flags_of(base, slot, me, S)
            publish(flags, near_only(own, r[None, :], me, S), tl.zeros([S.BATCH, S.WP], tl.int64) + call)
            if S.NODE < S.W:
                put_messages(table, control, mine, me, own, slot, call, S.BATCH, S)
            if t0 + S.BATCH < end:
                sent += tl.sum(goes, 0)
                pairs += count_pairs(expert, owner, S.BATCH * S.KP, S)
    return ok
