"""Send tokens: the sender role of dispatch.

One CTA counts (``kernels.dispatch.counts``), the others store rows. A CTA waits for CTAs with lower numbers, and until
every destination has granted *credit for the previous call* (``kernels.sync.credit``); then it may overwrite that
call's messages. It waits for nothing else of this call from another rank. This is why any sequence of calls is safe
with one buffer. A dispatch over cached routing counts nothing: ``kernels.dispatch.send_cached``.

How CTAs share the tokens (``kernels.launch.grid``):

* Few tokens (:func:`send_one`): a CTA sends one token, or several CTAs share a token and each serves every ``split``-th
  rank. Each CTA counts, of the tokens before its own, only the pairs of its token's experts and the messages to each
  rank. With one token, the time of a dispatch is a chain of latencies, and this is most of it. So a CTA first reads all
  that can be read early, and at the same time polls the credits once.
* Many tokens (:func:`send_run`): a CTA sends ``tokens_per_program`` consecutive ones. It needs the number of its first
  message to each rank and of its first pair for each expert. Up to S.MAX_TOKENS_ALONE tokens in the call it counts all
  that precede its own. Beyond that it is faster to share block counts (``kernels.dispatch.route``) and to wait for
  those of the lower CTAs. Rows travel one by one; the CTA reads each while it stores the one before. It publishes
  S.TOKENS_PER_BATCH messages at a time, because a release waits until all stores before it have arrived.

The counting CTA is the first one if each CTA counts alone. If CTAs share block counts it is the last one, because a CTA
waits for lower ones only.

Stores at destination d, in row ``me`` of each region:

* A row CTA writes, for every token that goes to d, the message in the token's slot, then ``message_flag[slot] = call``,
  a few tokens at a time. The flag is a release after the stores that it announces (``signals.publish``).
* The counting CTA writes, where block counts were shared, ``firsts``, then a fence; then ``counts`` as LL words
  (``kernels.sync.ll_words``): status, totals, rows per local expert of d.

The order of messages needs no sort. A message's slot at d is the number of earlier tokens of this rank with any id on
d. A pair's *position* is the number of earlier pairs (token, then slot) of this rank with the same expert. In layout
"rank" a row's place is its slot. So on one node no positions travel, and only the counting CTA counts pairs.

A row goes out piece by piece (``kernels.dispatch.pieces``): the CTA loads piece i + 1 before it stores piece i.

The headers of a batch are stored before its rows. The release of the flags comes after header and row.

Example: 4 experts on 2 ranks, topk 2, rank 0's ids [[0, 3], [1, 0], [-1, 2]]. Destination 0 gets tokens 0, 1 in slots
0, 1 with local ids [0, -1], [1, 0] and positions [0, 0], [0, 1] (token 1's expert 0 is the second pair of expert 0);
destination 1 gets tokens 0, 2 in slots 0, 1 with local ids [-1, 1], [-1, 0]. Counts: [2, 1] for rank 0, [1, 1] for rank
1.

Example of few tokens: the same ids. Before token 1, one message went to each rank; expert 0 has one pair, expert 1
none: token 1 has slot 1 at rank 0 and positions [0, 1].

Example of many tokens: the second CTA's two tokens have ids [[0, 3], [1, 0]], 4 experts on 2 ranks, and the first CTA
has sent [1, 2] messages and [1, 0, 0, 2] pairs: slots are [1, 2] and [2, -], positions [1, 2] and [0, 2].

Example of places: token 5 goes to ranks 0 and 2 of 3, in slots 4 and 0 there. Its places are the addresses of message
(me, 4) of rank 0, 0 for rank 1, and the address of message (me, 0) of rank 2; local ids there are [1, -1] and [-1, 0]
if its experts are theirs.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.counts import send_counts
from moelink.kernels.dispatch.pieces import load_piece, ready_scales, store_piece, store_ready_scales
from moelink.kernels.dispatch.route import (
    count_before,
    count_own_block,
    count_pairs,
    count_tokens,
    experts_at,
    first_of,
    owner_of,
    positions_of,
    ranks_of,
    routes_of,
    sum_block_counts,
    sums_before,
)
from moelink.kernels.nodes.internode import intra_node_only
from moelink.kernels.nodes.levels import column_of, in_one_level, in_two_levels
from moelink.kernels.nodes.put_messages import put_messages
from moelink.kernels.nodes.relay import put_relays, staged_or_relayed, store_relay_headers
from moelink.kernels.records import Batch, Run
from moelink.kernels.sync.credit import grant_credits, poll_once, wait_for_credits
from moelink.kernels.sync.signals import I32, I64, context_of, count_arrival, own_block, publish
from moelink.memory.protocol import DISPATCH_SENT, PHASE_DISPATCH
from moelink.tracing.device.stamps import (
    COUNTED,
    FIRST_STORE,
    IDS_READ,
    LAST_PUBLISHED,
    PUBLISHED,
    TOLD,
    stamp,
    stamp_after,
    stamp_both,
    stamp_first,
)


@triton.jit
def message_addresses(base, own, slot, token, me, mine, S: tl.constexpr):
    """Return the addresses [N, ranks] of the messages of tokens ``token`` [N] in ``slot`` [N, ranks], in the blocks at
    ``base`` [ranks]; 0 unless ``own``."""
    places = base[None, :] + S.OFFSET_MESSAGES + (me * S.MAX_TOKENS + slot).to(tl.int64) * S.MESSAGE_BYTES
    return staged_or_relayed(places, own, slot, token, me, mine, S)


@triton.jit
def flags_of(base, slot, me, S: tl.constexpr):
    """Return the addresses [N, ranks] of those messages' flags."""
    return (base + S.OFFSET_MESSAGE_FLAG).to(I64)[None, :] + (me * S.MAX_TOKENS + slot)


@triton.jit
def load_weights(weights, token, num_tokens, S: tl.constexpr):
    """Load router weights [N, slots] of tokens ``token`` [N]; zeros where none travel. Values past the last token are
    undefined."""
    k = tl.arange(0, S.TOPK_POW2)
    if S.HAS_WEIGHTS:
        inside = (token < num_tokens)[:, None] & (k < S.TOPK)[None, :]
        return tl.load(weights + token[:, None] * S.TOPK + k[None, :], mask=inside)
    else:
        return tl.zeros([token.shape[0], S.TOPK_POW2], tl.float32)


@triton.jit
def store_headers(batch, places, w, first, S: tl.constexpr):
    """Store the headers of the messages of a ``batch``: tokens, local ids, positions and weights ``w`` [N, slots], if
    these travel. ``places``: [N, ranks] addresses, 0 for none."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    shape: tl.constexpr = (batch.token.shape[0], S.WORLD_SIZE_POW2, S.TOPK_POW2)
    goes = places != 0
    tl.store((places + S.MESSAGE_TOKEN).to(I32), tl.broadcast_to(batch.token[:, None], places.shape), mask=goes)
    named = goes[:, :, None] & (k < S.TOPK)[None, None, :]
    if S.TELLS_IDS:
        local = batch.expert[:, None, :] - first_of(r, first, S)[None, :, None]
        local = tl.where(batch.owner[:, None, :] == r[None, :, None], local, -1)
        tl.store((places + S.MESSAGE_IDS).to(I32)[:, :, None] + k[None, None, :], local, mask=named)
    if S.TELLS_POSITIONS:
        position = tl.broadcast_to(batch.position[:, None, :], shape)
        tl.store((places + S.MESSAGE_POSITIONS).to(I32)[:, :, None] + k[None, None, :], position, mask=named)
    if S.HAS_WEIGHTS:
        to = (places + S.MESSAGE_WEIGHTS).to(S.WEIGHT_POINTER)
        tl.store(to[:, :, None] + k[None, None, :], tl.broadcast_to(w[:, None, :], shape), mask=named)


@triton.jit
def publish_messages(ctx, base, mine, batch, S: tl.constexpr):
    """Publish the flags of the messages of a ``batch``, stored already. The blocks of the ranks are at ``base``
    [ranks]. For ranks of other nodes put the messages, then their flags."""
    flags = flags_of(base, batch.slot, ctx.me, S)
    mask = intra_node_only(batch.own, tl.arange(0, S.WORLD_SIZE_POW2)[None, :], ctx.me, S)
    publish(flags, mask, tl.zeros(batch.slot.shape, tl.int64) + ctx.call)
    stamp_both(ctx, PUBLISHED, LAST_PUBLISHED, S)
    in_one_level(put_messages, (ctx, mine, batch.own, batch.slot), S)
    in_two_levels(put_relays, (ctx, mine, batch.own, batch.slot, batch.token), S)


@triton.jit
def next_token(t, end, behind, STRIDED: tl.constexpr):
    """Return the token after ``t`` of a CTA, whose batch ends before ``end``: the next one, or with STRIDED batches
    ``behind``, the first of the next batch."""
    if STRIDED:
        return tl.where(t + 1 < end, t + 1, behind)
    else:
        return t + 1


@triton.jit
def send_batch(ctx, inputs, batch, row, run, base, numbers, STRIDED: tl.constexpr, S: tl.constexpr):
    """Store the messages of a ``batch``, headers first, and publish them.

    ``row`` is the first piece of the first token's row. Each piece is loaded before the one before it is stored, so the
    function returns the first piece of the CTA's next token. ``run``: which tokens the CTA has.
    """
    pieces: tl.constexpr = S.PIECES_PER_ROW
    mine = own_block(ctx.control, S)
    places = message_addresses(base, batch.own, batch.slot, batch.token, ctx.me, mine, S)
    w = load_weights(inputs.topk_weights, batch.token, numbers.num_tokens, S)
    store_headers(batch, places, w, numbers.first_expert, S)
    in_two_levels(store_relay_headers, (ctx, mine, batch), S)
    stamp_first(ctx, FIRST_STORE, S)
    for t in range(run.begin, run.end):
        to = tl.sum(tl.where((batch.token == t)[:, None], places, 0), 0)
        scales = ready_scales(inputs.scales, t, S)
        for piece in tl.static_range(pieces):
            token = next_token(t, run.end, run.behind, STRIDED) if piece + 1 == pieces else t
            following = load_piece(inputs.x, token, (piece + 1) % pieces, run.last, S)
            store_piece(row, piece, to, ctx.me, inputs.input_scale, S)
            row = following
        store_ready_scales(scales, to, ctx.me, S)
    publish_messages(ctx, base, mine, batch, S)
    return row


_PHASE = tl.constexpr(PHASE_DISPATCH)


@triton.jit
def send_one(ctx, inputs, slot_of, numbers, program, credits, S: tl.constexpr):
    """Send token ``program // split`` to every ``split``-th rank from ``program % split``, as row CTA ``program``."""
    t = program // numbers.split
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    mine = own_block(ctx.control, S)
    base = tl.load(ctx.table + r, mask=r < S.WORLD_SIZE, other=0)
    token = t + tl.arange(0, 1)
    row = load_piece(inputs.x, t, 0, numbers.num_tokens, S)
    following = row
    pieces: tl.constexpr = S.PIECES_PER_ROW
    if pieces > 1:
        following = load_piece(inputs.x, t, 1, numbers.num_tokens, S)
    scales = ready_scales(inputs.scales, t, S)
    w = load_weights(inputs.topk_weights, token, numbers.num_tokens, S)
    expert = experts_at(inputs.topk_ids, t * S.TOPK + k, k < S.TOPK, S)
    stamp_after(ctx, IDS_READ, expert, S)
    owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
    earlier = expert
    if S.SENDERS_COUNT_PAIRS:
        earlier, sent = count_before(inputs.topk_ids, t, expert, ctx.me, numbers, S)
    else:
        _, sent, _ = count_tokens(inputs.topk_ids, 0, t, ctx.me, numbers, S.COUNT_BLOCK_ALONE, False, S)
    stamp_after(ctx, COUNTED, sent, S)

    goes = ranks_of(owner[None, :], token, numbers.num_tokens, ctx.me, numbers, S)
    slot = sent[None, :]
    served = ((r < S.WORLD_SIZE) & (column_of(r, ctx.me, S) % numbers.split == program % numbers.split))[None, :]
    own = (goes > 0) & served
    tl.store(slot_of + token[:, None] * S.WORLD_SIZE + r[None, :], tl.where(goes > 0, slot, -1), mask=served)
    ok = wait_for_credits(credits, ctx, _PHASE, S)
    if ok > 0:
        places = message_addresses(base, own, slot, token, ctx.me, mine, S)
        batch = Batch(token, expert[None, :], owner[None, :], earlier[None, :], own, slot)
        store_headers(batch, places, w, numbers.first_expert, S)
        in_two_levels(store_relay_headers, (ctx, mine, batch), S)
        stamp_first(ctx, FIRST_STORE, S)
        to = tl.sum(places, 0)
        for piece in tl.static_range(pieces):
            behind = following
            if piece + 2 < pieces:
                behind = load_piece(inputs.x, t, piece + 2, numbers.num_tokens, S)
            store_piece(row, piece, to, ctx.me, inputs.input_scale, S)
            row = following
            following = behind
        store_ready_scales(scales, to, ctx.me, S)
        publish_messages(ctx, base, mine, batch, S)
    return ok


@triton.jit
def share_block_counts(ctx, mine, ids, begin, end, numbers, program, S: tl.constexpr):
    """Publish the block counts of tokens [begin, end) of CTA ``program``, and sum those of the lower CTAs."""
    count_own_block(ctx, mine, ids, begin, end, numbers, program, S)
    stamp_first(ctx, IDS_READ, S)
    return sum_block_counts(ctx, mine, program, S)


@triton.jit
def send_run(ctx, inputs, slot_of, numbers, program, credits, S: tl.constexpr):
    """Send ``tokens_per_program`` consecutive tokens, as row CTA ``program``."""
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
            pairs, sent, _ = count_tokens(
                inputs.topk_ids, 0, begin, ctx.me, numbers, S.COUNT_BLOCK_ALONE, S.SENDERS_COUNT_PAIRS, S
            )
        else:
            ok, pairs, sent = share_block_counts(ctx, mine, inputs.topk_ids, begin, end, numbers, program, S)
    else:
        ok, pairs, sent = share_block_counts(ctx, mine, inputs.topk_ids, begin, end, numbers, program, S)
    stamp_after(ctx, COUNTED, sent, S)
    if ok > 0:
        ok = wait_for_credits(credits, ctx, _PHASE, S)
    if ok > 0:
        for t0 in range(begin, end, S.TOKENS_PER_BATCH):
            token = t0 + tl.arange(0, S.TOKENS_PER_BATCH)
            expert, owner, goes = routes_of(inputs.topk_ids, token, k, end, ctx.me, numbers, S)
            slot = sent[None, :] + sums_before(goes, S.MAX_TOKENS_ALONE == 0)
            position = expert
            if S.SENDERS_COUNT_PAIRS:
                position = positions_of(pairs, expert, owner, i, S)

            own = (goes > 0) & mask[None, :]
            noted = (token < end)[:, None] & mask[None, :]
            tl.store(slot_of + token[:, None] * S.WORLD_SIZE + r[None, :], tl.where(goes > 0, slot, -1), mask=noted)
            run = Run(t0, tl.minimum(t0 + S.TOKENS_PER_BATCH, end), end, end)
            batch = Batch(token, expert, owner, position, own, slot)
            row = send_batch(ctx, inputs, batch, row, run, base, numbers, False, S)
            more = t0 + S.TOKENS_PER_BATCH < end
            if more:
                sent += tl.sum(goes, 0)
                if S.SENDERS_COUNT_PAIRS:
                    pairs += count_pairs(expert, owner, S.TOKENS_PER_BATCH * S.TOPK_POW2, S)
    return ok


_ROLE = tl.constexpr(DISPATCH_SENT)


@triton.jit
def send(program, num_programs, peers, inputs, notes, cached, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the sender role, which counts what it sends. ``cached`` is not read."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    call = ctx.call
    credits = poll_once(peers.control, _PHASE, call, S)
    few = numbers.tokens_per_program <= 1
    # Where each CTA counts alone, the counting CTA is the first one, because it waits for nobody.
    alone = few | (numbers.num_tokens <= S.MAX_TOKENS_ALONE)
    counting = tl.where(alone, 0, num_programs - 1)
    if program == 0:
        grant_credits(peers.table, peers.control, numbers.me, S)
    if program == counting:
        ok = send_counts(ctx, inputs.topk_ids, notes.sent, numbers, alone, num_programs - 1, credits, S)
    elif few:
        ok = send_one(ctx, inputs, notes.slot_of, numbers, program - 1, credits, S)
    else:
        ok = send_run(ctx, inputs, notes.slot_of, numbers, program - alone.to(tl.int32), credits, S)
    if ok > 0:
        count_arrival(peers.control, _ROLE, program, num_programs, "relaxed")
        stamp(ctx, TOLD, S)
