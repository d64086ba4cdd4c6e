"""Wait for the rows of a token: the waits of combine's home role.

For its token a CTA waits for exactly that token's rows: ``combine_flag`` of rank r, in the token's message slot there
(``slot_of``, noted by dispatch's sender), must have reached the call. The waits are acquires, so the rows are visible
(docs/protocol.md, C3).

Example: W = 3, token 5 went to ranks 0 and 2 (``slot_of[5] = [5, -1, 0]``): wait for flag (0, 5) and flag (2, 0).
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.route import experts_at, owner_of
from moelink.kernels.nodes.internode import between_nodes_or, intra_node_only
from moelink.kernels.nodes.level_rows import wait_for_levels
from moelink.kernels.sync.signals import I64, U8, own_block, report_failure, wait_all
from moelink.memory.protocol import PHASE_COMBINE, SOME_MASKED
from moelink.tracing.device.stamps import ARRIVED, LAST_MESSAGE, MESSAGE_SEEN, arrivals, stamp_awaited

_PHASE = tl.constexpr(PHASE_COMBINE)
_SOME_MASKED = tl.constexpr(SOME_MASKED)


@triton.jit
def wait_for_all_arrivals(ctx, slots, part, parts, S: tl.constexpr):
    """Wait for a token's rows. ``slots`` [ranks]: its message slot at each rank, -1 for none.

    Rows may travel in several parts (S.PARTS_PER_ROW). Where the home role sums in as many ``parts``, wait for ``part``
    alone; where it sums whole rows, wait for all parts.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mine = own_block(ctx.control, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    flags = (mine + S.OFFSET_COMBINE_FLAG).to(I64) + (
        r * S.MAX_TOKENS + tl.minimum(tl.maximum(slots, 0), S.MAX_TOKENS - 1)
    ) * S.PARTS_PER_ROW
    begin = tl.where(parts == S.PARTS_PER_ROW, part, 0)
    came = arrivals(ctx, ARRIVED, r, S)
    ok, peer, got = wait_all(flags + begin, slots >= 0, ctx.call, poison, ctx.limit, S.CLOCK, came, S.TRACE)
    if parts != S.PARTS_PER_ROW:
        for other in range(1, S.PARTS_PER_ROW):
            if ok > 0:
                ok, peer, got = wait_all(flags + other, slots >= 0, ctx.call, poison, ctx.limit, S.CLOCK)
    stamp_awaited(ctx, MESSAGE_SEEN, LAST_MESSAGE, slots, S)
    report_failure(ok, ctx, peer, _PHASE, ctx.call, got, S)
    return ok


@triton.jit
def awaited_slots(ctx, notes, token, brought, choices, S: tl.constexpr):
    """Return a token's message slots [ranks] at the ranks whose rows come, -1 for others. ``choices``: of
    ``quiesce.wait_for_choices``."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    slots = tl.load(notes.slot_of + token * S.WORLD_SIZE + r, mask=r < S.WORLD_SIZE, other=-1)
    return present_slots(ctx, tl.where(choices, tl.where(brought, slots, -1), -1), S)


@triton.jit
def present_slots(ctx, slots, S: tl.constexpr):
    """Return ``slots`` [ranks], but -1 at masked ranks, whose rows nobody writes (``memory.absence``)."""
    if tl.load(ctx.control + _SOME_MASKED) != 0:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        status = (own_block(ctx.control, S) + S.OFFSET_COMBINE_STATUS).to(I64) + r
        slots = tl.where(tl.load(status, mask=r < S.WORLD_SIZE, other=0) < 0, -1, slots)
    return slots


@triton.jit
def inter_node_slots(mine, ids, slots, token, me, first, num_local, S: tl.constexpr):
    """Return which of a token's rows come from other nodes, per top-k slot [slots].

    Returns the rank of another node that owns the expert, or -1; the number of the token's message there, among the
    messages of all ranks; and whether its row comes. ``slots`` [ranks]: the message's slot at each rank.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    owner = owner_of(experts_at(ids, token * S.TOPK + k, k < S.TOPK, S), first, num_local, S)
    slot = tl.max(tl.where(owner[:, None] == r[None, :], slots[None, :], -1), 1)
    inter_node = (slot >= 0) & (intra_node_only(owner >= 0, owner, me, S) == 0)
    message = tl.where(inter_node, owner * S.MAX_TOKENS + slot, 0)
    comes = tl.load((mine + S.OFFSET_INTER_NODE_KEPT).to(U8) + message * S.KEPT_BYTES + k, mask=inter_node, other=0)
    return tl.where(inter_node, owner, -1), message, comes != 0


@triton.jit
def wait_for_inter_node_rows(ctx, ids, slots, token, numbers, S: tl.constexpr):
    """Wait for the rows of other nodes, where no sums travel: each row has its own flag, besides its message's.

    The messages' flags have already been waited for.
    """
    mine = tl.load(ctx.table + ctx.me)
    k = tl.arange(0, S.TOPK_POW2)
    owner, message, comes = inter_node_slots(
        mine, ids, slots, token, ctx.me, numbers.first_expert, numbers.num_local_experts, S
    )
    flags = (mine + S.OFFSET_ROW_FLAG).to(I64) + message * S.TOPK + k
    ok, index, got = wait_all(flags, comes, ctx.call, (mine + S.OFFSET_POISON).to(I64), ctx.limit, S.CLOCK)
    peer = tl.max(tl.where(k == index, owner, -1), 0)
    report_failure(ok, ctx, peer, _PHASE, ctx.call, got, S)
    return ok


@triton.jit
def wait_for_rows(ctx, inputs, slots, token, piece, numbers, S: tl.constexpr):
    """Wait for all rows of a token that ``piece`` needs: of ``slots`` [ranks], and of other nodes. In allreduce mode
    none are awaited. Returns OK, TIMED_OUT or POISONED."""
    ok = tl.full([], 1, tl.int32)
    if S.TWO_LEVEL:
        ok = wait_for_levels(ctx, slots, token, S)
    elif not S.ALLREDUCE:
        ok = wait_for_all_arrivals(ctx, slots, piece.part, piece.parts, S)
    if not S.SENDS_SUMS:
        if ok > 0:
            ok = between_nodes_or(ok, wait_for_inter_node_rows, (ctx, inputs.topk_ids, slots, token, numbers), S)
    return ok


@triton.jit
def find_own_rows(notes, slots, me, S: tl.constexpr):
    """Return where the numbers of a token's own rows are, S.SLOTS_PER_MESSAGE words, and whether it has any. ``slots``
    [ranks]: its message slots."""
    slot = tl.max(tl.where(tl.arange(0, S.WORLD_SIZE_POW2) == me, slots, -1), 0)
    message = me * S.MAX_TOKENS + tl.maximum(slot, 0)
    return notes.rows_of_message + message.to(tl.int64) * S.SLOTS_PER_MESSAGE, slot >= 0
