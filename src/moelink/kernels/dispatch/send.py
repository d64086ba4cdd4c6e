"""Dispatch, sender role: what each program of the sending half does.

One program counts (``kernels.dispatch.counts``), the others move rows. None of them waits for anything of this call
from another rank: they wait only until every destination has *drained the previous call* (``kernels.sync.credit``),
after which its staging may be overwritten, and for lower programs. That is why any sequence of calls is safe with one
buffer.

Tokens are cut in one of two ways. Few of them: one token a program (``kernels.dispatch.send``), or several programs
a token, each of which serves every ``split``-th rank. Many: ``tokens_per_program`` consecutive tokens each
(``kernels.dispatch.send``). Where each counts what is before its tokens the counting program is the first one;
where they share what they counted it is the last one, as a program waits for lower ones only.

Who writes what, at destination d, in row ``me`` of each region:

* a row program, for every token that goes to d: the message in the token's slot, then ``message_flag[slot] = call``,
  a few tokens at a time.
* the counting program: if counts were shared ``firsts`` and a fence; then ``counts``, words that are their own signal
  (``kernels.sync.ll_words``): status, totals, rows per local expert of d.

``message_flag`` is a release after the stores it speaks for (``signals.publish``). All programs together
count the call as sent; a later call of this rank starts after it in stream order.

A dispatch over an earlier one's routing counts nothing: ``kernels.dispatch.send_cached``.

Order without a sort: a message's slot at d is the number of earlier tokens of this rank with any id on d, and a pair's
*position* the number of earlier pairs (token, then slot) of this rank with the same expert.

Example: 4 experts on 2 ranks, topk 2, rank 0's ids [[0, 3], [1, 0], [-1, 2]]. Destination 0 gets tokens 0, 1 in slots
0, 1 with local ids [0, -1], [1, 0] and positions [0, 0], [0, 1] (token 1's expert 0 is the second pair of expert 0);
destination 1 gets tokens 0, 2 in slots 0, 1 with local ids [-1, 1], [-1, 0]. Counts: [2, 1] for rank 0, [1, 1] for
rank 1.

Dispatch, sender role, few tokens: a program sends one token, or serves some of its ranks.

What is before its token a program counts by itself, and only what it needs: the pairs of the token's own experts, and
the messages to each rank. All that can be read early is read first, and the look at what peers have drained is begun
there, too: with one token the time of a dispatch is a chain of latencies, and this is most of it.

Example: 4 experts on 2 ranks, ids [[0, 3], [1, 0], [-1, 2]]. Before token 1 there are a message to each rank, no pair
of expert 1 and one of expert 0: it has slot 1 at rank 0 and positions [0, 1].

Dispatch, sender role, many tokens: a program sends ``tokens_per_program`` consecutive ones.

A program needs the number of its first message to each rank, and of its first pair for each expert. Of up to
S.MAX_TOKENS_ALONE tokens it counts all that are before its own; of more, that would take longer than to share what
programs count (``kernels.dispatch.route``) and to wait for the sums of the lower ones. Rows travel one by one,
each read while the one before is stored; BATCH messages are published at a time, as the release waits until all stores
before it have arrived.

Example: the second program's two tokens have ids [[0, 3], [1, 0]], 4 experts on 2 ranks, and the first program has sent
[1, 2] messages and [1, 0, 0, 2] pairs: slots are [1, 2] and [2, -], positions [1, 2] and [0, 2].
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.counts import send_counts
from moelink.kernels.dispatch.message import (
    flags_of,
    load_piece,
    load_weights,
    places_of,
    put_messages,
    store_headers,
    store_piece,
)
from moelink.kernels.dispatch.route import (
    count_all,
    count_before,
    count_own_block,
    count_pairs,
    experts_at,
    owner_of,
    positions_of,
    ranks_of,
    routes_of,
    sum_block_counts,
    sums_before,
)
from moelink.kernels.dispatch.send_cached import send_cached
from moelink.kernels.records import CallContext
from moelink.kernels.sync.credit import grant_credits, poll_once, wait_for_credits
from moelink.kernels.sync.internode import intra_node_only
from moelink.kernels.sync.signals import calls_made, count_arrival, own_block, publish
from moelink.memory.protocol import DISPATCH_SENT, PHASE_DISPATCH

_PHASE = tl.constexpr(PHASE_DISPATCH)


@triton.jit
def send_one(ctx, inputs, slot_of, numbers, program, drained, S: tl.constexpr):
    """Row program ``program``: send token ``program // split`` to every ``split``-th rank from ``program % split``."""
    t = program // numbers.split
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    mine = own_block(ctx.control, S)
    base = tl.load(ctx.table + r, mask=r < S.WORLD_SIZE, other=0)
    token = t + tl.arange(0, 1)
    row = load_piece(inputs.x, t, 0, numbers.num_tokens, S)
    following = row
    if S.PIECES_PER_ROW > 1:
        following = load_piece(inputs.x, t, 1, numbers.num_tokens, S)
    w = load_weights(inputs.topk_weights, token, numbers.num_tokens, S)
    expert = experts_at(inputs.topk_ids, t * S.TOPK + k, k < S.TOPK, S)
    owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
    position, sent = count_before(inputs.topk_ids, t, expert, ctx.me, numbers, S)

    goes = ranks_of(owner[None, :], token, numbers.num_tokens, ctx.me, numbers.shared_begin, numbers.shared_end, S)
    slot = sent[None, :]
    served = ((r < S.WORLD_SIZE) & (r % numbers.split == program % numbers.split))[None, :]
    own = (goes > 0) & served
    tl.store(slot_of + token[:, None] * S.WORLD_SIZE + r[None, :], tl.where(goes > 0, slot, -1), mask=served)
    ok = wait_for_credits(drained, ctx, _PHASE, S)
    if ok > 0:
        places = places_of(base, own, slot, ctx.me, mine, S)
        store_headers(expert[None, :], position[None, :], owner[None, :], token, places, w, numbers.first_expert, 1, S)
        to = tl.sum(places, 0)
        for piece in tl.static_range(S.PIECES_PER_ROW):
            behind = following
            if piece + 2 < S.PIECES_PER_ROW:
                behind = load_piece(inputs.x, t, piece + 2, numbers.num_tokens, S)
            store_piece(row, piece, inputs.scales, t, to, inputs.input_scale, S)
            row = following
            following = behind
        flags = flags_of(base, slot, ctx.me, S)
        publish(
            flags, intra_node_only(own, r[None, :], ctx.me, S), tl.zeros([1, S.WORLD_SIZE_POW2], tl.int64) + ctx.call
        )
        if S.NODE_SIZE < S.WORLD_SIZE:
            put_messages(ctx, mine, own, slot, 1, S)
    return ok


@triton.jit
def share_block_counts(ctx, mine, ids, begin, end, numbers, program, S: tl.constexpr):
    """Tell what tokens [begin, end) of ``program`` need, and wait for what those of the lower programs do."""
    count_own_block(ctx, mine, ids, begin, end, numbers, program, S)
    return sum_block_counts(ctx, mine, program, S)


@triton.jit
def send_run(ctx, inputs, slot_of, numbers, program, drained, S: tl.constexpr):
    """Row program ``program``: send its tokens."""
    begin = program * numbers.tokens_per_program
    end = tl.minimum(begin + numbers.tokens_per_program, numbers.num_tokens)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    i = tl.arange(0, S.TOKENS_PER_BATCH * S.TOPK_POW2)
    mask = r < S.WORLD_SIZE
    mine = own_block(ctx.control, S)
    base = tl.load(ctx.table + r, mask=mask, other=0)
    row = load_piece(inputs.x, begin, 0, end, S)
    if S.MAX_TOKENS_ALONE > 0:
        if numbers.num_tokens <= S.MAX_TOKENS_ALONE:
            ok = tl.full([], 1, tl.int32)
            pairs, sent, _ = count_all(inputs.topk_ids, begin, ctx.me, numbers, S.COUNT_BLOCK_ALL, S)
        else:
            ok, pairs, sent = share_block_counts(ctx, mine, inputs.topk_ids, begin, end, numbers, program, S)
    else:
        ok, pairs, sent = share_block_counts(ctx, mine, inputs.topk_ids, begin, end, numbers, program, S)
    if ok > 0:
        ok = wait_for_credits(drained, ctx, _PHASE, S)
    if ok > 0:
        for t0 in range(begin, end, S.TOKENS_PER_BATCH):
            token = t0 + tl.arange(0, S.TOKENS_PER_BATCH)
            expert, owner, goes = routes_of(inputs.topk_ids, token, k, end, ctx.me, numbers, S)
            slot = sent[None, :] + sums_before(goes, S.MAX_TOKENS_ALONE == 0)
            position = positions_of(pairs, expert, owner, i, S)

            own = (goes > 0) & mask[None, :]
            noted = (token < end)[:, None] & mask[None, :]
            tl.store(slot_of + token[:, None] * S.WORLD_SIZE + r[None, :], tl.where(goes > 0, slot, -1), mask=noted)
            places = places_of(base, own, slot, ctx.me, mine, S)
            w = load_weights(inputs.topk_weights, token, numbers.num_tokens, S)
            store_headers(expert, position, owner, token, places, w, numbers.first_expert, S.TOKENS_PER_BATCH, S)
            for t in range(t0, tl.minimum(t0 + S.TOKENS_PER_BATCH, end)):
                to = tl.sum(tl.where((token == t)[:, None], places, 0), 0)
                for piece in tl.static_range(S.PIECES_PER_ROW):
                    following = load_piece(
                        inputs.x, t + (piece + 1) // S.PIECES_PER_ROW, (piece + 1) % S.PIECES_PER_ROW, end, S
                    )
                    store_piece(row, piece, inputs.scales, t, to, inputs.input_scale, S)
                    row = following
            flags = flags_of(base, slot, ctx.me, S)
            publish(
                flags,
                intra_node_only(own, r[None, :], ctx.me, S),
                tl.zeros([S.TOKENS_PER_BATCH, S.WORLD_SIZE_POW2], tl.int64) + ctx.call,
            )
            if S.NODE_SIZE < S.WORLD_SIZE:
                put_messages(ctx, mine, own, slot, S.TOKENS_PER_BATCH, S)
            if t0 + S.TOKENS_PER_BATCH < end:
                sent += tl.sum(goes, 0)
                pairs += count_pairs(expert, owner, S.TOKENS_PER_BATCH * S.TOPK_POW2, S)
    return ok


_ROLE = tl.constexpr(DISPATCH_SENT)


@triton.jit
def send(program, num_programs, peers, inputs, notes, cached, numbers, S: tl.constexpr):
    """Program ``program`` of the sender role."""
    if S.CACHED_ROUTING:
        send_cached(peers, inputs, notes, cached, numbers, program, num_programs, S)
    else:
        send_counted(peers, inputs, notes, numbers, program, num_programs, S)


@triton.jit
def send_counted(peers, inputs, notes, numbers, program, num_programs, S: tl.constexpr):
    call = calls_made(peers.control, _ROLE) + 1
    ctx = CallContext(peers.table, peers.record, peers.control, numbers.me, numbers.limit, call)
    drained = poll_once(peers.control, _PHASE, call, S)
    few = numbers.tokens_per_program <= 1
    # Each program counts for itself; then the counting program is the first one, as it waits for nobody.
    alone = few | (numbers.num_tokens <= S.MAX_TOKENS_ALONE)
    counting = tl.where(alone, 0, num_programs - 1)
    if program == 0:
        grant_credits(peers.table, peers.control, numbers.me, S)
    if program == counting:
        ok = send_counts(ctx, inputs.topk_ids, notes.sent, numbers, alone, num_programs - 1, drained, S)
    elif few:
        ok = send_one(ctx, inputs, notes.slot_of, numbers, program - 1, drained, S)
    else:
        ok = send_run(ctx, inputs, notes.slot_of, numbers, program - alone.to(tl.int32), drained, S)
    if ok > 0:
        count_arrival(peers.control, _ROLE, program, num_programs, "relaxed")
