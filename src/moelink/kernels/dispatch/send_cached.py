"""Send tokens over the routing of an earlier dispatch (cached routing): nothing is counted, and no positions travel.

The results of the earlier call are still there: ``slot_of`` says where a token's messages go, ``sent`` how many there
are, and receivers know the rows of each. Local ids travel only where they are an output (layout "rank"). So CTA 0 tells
every rank at once what comes, and the other CTAs wait for no CTA of this rank. They take batches of S.TOKENS_PER_BATCH
tokens in turn. Slots ascend with the tokens, so messages are stored about in the order of their slots, and receivers
take them one by one, as with few tokens (``programs`` = 0 in the header). With few tokens a CTA sends one token, or
serves every ``split``-th rank of one.

The header has the words of ``kernels.dispatch.counts``, and also the number of the call that made the routing. If ranks
use routings of different calls, all ranks see it and refuse the call alike (``kernels.dispatch.receive_cached``). The
options differ from those of a call that counts, so ranks also refuse a mix of the two. After the header go the words
for rows per expert, empty: a rank that counts waits for them before it can look at the options.

Credits are as in ``kernels.dispatch.send``. An earlier launch wrote ``slot_of`` and ``sent`` in stream order, and
nothing writes them again. Slots out of range (the earlier call failed half way) are left out. If the dispatch that made
the routing brought nothing, no rank makes this call: every rank that has a handle of that dispatch sees it in its
``received``. Ids out of range are counted once, in the call that read them; rows that do not fit are dropped and
counted again.

Example: 4 experts on 2 ranks, rank 0's ids [[0, 3], [1, 0], [-1, 2]], call 7: ``slot_of`` [[0, 0], [1, -1], [-1, 1]],
``sent`` [2, 2, 7]. Call 9 over it tells both ranks "2 messages, of call 7". Two CTAs with S.TOKENS_PER_BATCH 1 send
tokens 0 and 2, and token 1.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.counts import counts_at, store_expert_counts
from moelink.kernels.dispatch.pieces import load_piece
from moelink.kernels.dispatch.route import experts_at, owner_of
from moelink.kernels.dispatch.send import send_batch
from moelink.kernels.nodes.internode import between_nodes
from moelink.kernels.nodes.levels import column_of, in_two_levels, stores_at
from moelink.kernels.nodes.put_messages import put_counts
from moelink.kernels.nodes.relay import send_noted_marks
from moelink.kernels.records import Batch, Run
from moelink.kernels.sync.credit import grant_credits, poll_once, wait_for_credits
from moelink.kernels.sync.ll_words import ll_word
from moelink.kernels.sync.signals import context_of, count_arrival, own_block
from moelink.memory.protocol import COUNT_HEADER, DISPATCH_BYTES, DISPATCH_SENT, PHASE_DISPATCH
from moelink.tracing.device.stamps import (
    LAST_PUBLISHED,
    PUBLISHED,
    TOLD,
    stamp,
    stamp_both,
)

_HEADER = tl.constexpr(COUNT_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_SENT)
_BYTES = tl.constexpr(DISPATCH_BYTES)


@triton.jit
def send_heads(ctx, sent, numbers, credits, S: tl.constexpr):
    """Tell every rank how many messages come, and of which call's routing, as CTA 0."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = r < S.WORLD_SIZE
    mine = own_block(ctx.control, S)
    messages = tl.minimum(tl.maximum(tl.load(sent + r, mask=mask, other=0), 0), S.MAX_TOKENS)
    origin = tl.load(sent + S.WORLD_SIZE)
    base = tl.load(ctx.table + r, mask=mask, other=0)
    ok = wait_for_credits(credits, ctx, _PHASE, S)
    if ok > 0:
        row = counts_at(base, mine, r, ctx.me, 0, S)
        h = tl.arange(0, _HEADER)[None, :]
        head = tl.where(h == 1, messages[:, None], 0) + tl.where(h == 2, numbers.num_tokens, 0)
        head += tl.where(h == 5, S.OPTIONS, 0) + tl.where(h == 6, origin, 0)
        tl.atomic_xchg(
            row[:, None] + h, ll_word(ctx.call, head), mask=mask[:, None] & (h >= 0), sem="relaxed", scope="sys"
        )
        store_expert_counts(
            ctx, mine, numbers.first_expert, numbers.num_local_experts, tl.zeros([S.NUM_EXPERTS_POW2], tl.int32), S
        )
        stamp_both(ctx, PUBLISHED, LAST_PUBLISHED, S)
        between_nodes(put_counts, (ctx, mine, True, 0), S)
        away = tl.sum(tl.where(stores_at(ctx.control, r, ctx.me, S), messages, 0), 0).to(tl.int64)
        tl.atomic_add(ctx.control + _BYTES, away * S.MESSAGE_BYTES, sem="relaxed", scope="gpu")
    return ok


@triton.jit
def _slots_at(slot_of, token, served, num_tokens, S: tl.constexpr):
    """Return the slots [N, ranks] of tokens ``token`` [N] at the ranks ``served`` [ranks]; -1 for none."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = (token < num_tokens)[:, None] & served[None, :]
    return tl.load(slot_of + token[:, None] * S.WORLD_SIZE + r[None, :], mask=mask, other=-1)


@triton.jit
def _send_batches(ctx, inputs, slot_of, numbers, lane, lanes, part, credits, N: tl.constexpr, S: tl.constexpr):
    """Send batches ``lane``, ``lane + lanes``, ... of N tokens to every ``split``-th rank from ``part``."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    served = (r < S.WORLD_SIZE) & (column_of(r, ctx.me, S) % numbers.split == part)
    base = tl.load(ctx.table + r, mask=r < S.WORLD_SIZE, other=0)
    begin = lane * N
    row = load_piece(inputs.x, begin, 0, numbers.num_tokens, S)
    slot = _slots_at(slot_of, begin + tl.arange(0, N), served, numbers.num_tokens, S)
    ok = wait_for_credits(credits, ctx, _PHASE, S)
    if ok > 0:
        for t0 in range(begin, numbers.num_tokens, lanes * N):
            token = t0 + tl.arange(0, N)
            behind = t0 + lanes * N
            following_slot = _slots_at(slot_of, behind + tl.arange(0, N), served, numbers.num_tokens, S)
            own = (slot >= 0) & (slot < S.MAX_TOKENS)
            expert = slot
            owner = slot
            if S.TELLS_IDS:
                inside = (token < numbers.num_tokens)[:, None] & (k < S.TOPK)[None, :]
                expert = experts_at(inputs.topk_ids, token[:, None] * S.TOPK + k[None, :], inside, S)
                owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
            batch = Batch(token, expert, owner, expert, own, slot)
            run = Run(t0, tl.minimum(t0 + N, numbers.num_tokens), behind, numbers.num_tokens)
            row = send_batch(ctx, inputs, batch, row, run, base, numbers, True, S)
            slot = following_slot
    return ok


@triton.jit
def send_cached(program, num_programs, peers, inputs, notes, cached, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the sender role over cached routing. ``cached.received`` is that of the call that made the
    routing."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    call = ctx.call
    credits = poll_once(peers.control, _PHASE, call, S)
    nothing = tl.load(cached.received + 2 * S.WORLD_SIZE)
    if nothing == 0:
        lane = (program - 1) // numbers.split
        lanes = (num_programs - 1) // numbers.split
        part = (program - 1) % numbers.split
        batches = (numbers.tokens_per_program > 1) & (S.TOKENS_PER_BATCH > 1)
        if program == 0:
            grant_credits(peers.table, peers.control, numbers.me, S)
            ok = send_heads(ctx, notes.sent, numbers, credits, S)
            if ok > 0:
                arguments = (ctx, own_block(peers.control, S), notes.slot_of, numbers.num_tokens)
                in_two_levels(send_noted_marks, arguments, S)
        elif batches:
            ok = _send_batches(ctx, inputs, notes.slot_of, numbers, lane, lanes, part, credits, S.TOKENS_PER_BATCH, S)
        else:
            ok = _send_batches(ctx, inputs, notes.slot_of, numbers, lane, lanes, part, credits, 1, S)
        if ok > 0:
            count_arrival(peers.control, _ROLE, program, num_programs, "relaxed")
            stamp(ctx, TOLD, S)
