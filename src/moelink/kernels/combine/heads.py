"""Tell and check that all ranks make the same combine: heads.

CTA 0 of the expert role stores ``combine_status`` and publishes ``combine_head = call`` at every rank, so that a rank
learns of a refusal even when no rows were due to it. CTA 0 of the home role waits for every rank's head. Heads say
whether a rank refused the call, how its rows travel, how many come, and of which dispatch (``quiesce.beside_status``).
docs/protocol.md has the proofs: C2, *Refused calls*, *Mismatched calls*.

A rank that refuses the call sends no rows but raises all its flags. Where a combine takes several passes over the
slots, a refused combine ends with the first pass, because the rank that refuses makes only one call.
"""

import triton
import triton.language as tl

from moelink.kernels.combine.arrivals import wait_for_all_arrivals
from moelink.kernels.nodes.internode import between_nodes, intra_node_only, own_word_at
from moelink.kernels.nodes.levels import in_one_level, in_two_levels
from moelink.kernels.nodes.past import raise_flags_past
from moelink.kernels.nodes.put_rows import put_heads, put_none_kept, raise_flags_at_stop
from moelink.kernels.numeric import only
from moelink.kernels.sync.lamport_slots import clear_rows, follows_refusal, has_no_flags, note_refused, stand_in
from moelink.kernels.sync.quiesce import (
    beside_status,
    end_waits_for_mismatched,
    odd_dispatch,
    other_dispatches,
    quiesce_combine,
    wait_for_choices,
    wait_until_sent,
)
from moelink.kernels.sync.signals import (
    I64,
    is_poisoned,
    note_refusal,
    odd_one_out,
    own_block,
    publish,
    report_failure,
    wait_all,
)
from moelink.memory.protocol import CODE_ABORT, CODE_OPTIONS, CODE_ROUTING, OPTIONS_BY_ROW, PHASE_COMBINE
from moelink.tracing.device.stamps import COUNTS_SEEN, WAITED, arrivals, stamp_first

_PHASE = tl.constexpr(PHASE_COMBINE)
_REFUSED = tl.constexpr(CODE_ABORT)
_FLAGS = tl.constexpr(128)
_OPTIONS = tl.constexpr(CODE_OPTIONS)
_BY_ROW = tl.constexpr(OPTIONS_BY_ROW)
_ROUTING = tl.constexpr(CODE_ROUTING)


@triton.jit
def is_refused(control, call, slot_begin):
    """Return 1 in a later pass over the slots of a combine whose first pass a rank refused. No rank makes such a
    call."""
    return ((slot_begin > 0) & follows_refusal(control, call)).to(tl.int32)


@triton.jit
def raise_all_flags(ctx, S: tl.constexpr):
    """Raise all flags of this rank, which refuses the call, so that no rank waits for its rows."""
    i = tl.arange(0, S.BLOCK_SIZE)
    for d in range(S.WORLD_SIZE):
        home = tl.load(ctx.table + d)
        for c0 in range(0, S.MAX_TOKENS * S.PARTS_PER_ROW, S.BLOCK_SIZE):
            flags = (home + S.OFFSET_COMBINE_FLAG).to(I64) + ctx.me * S.MAX_TOKENS * S.PARTS_PER_ROW + c0 + i
            publish(
                flags,
                intra_node_only(c0 + i < S.MAX_TOKENS * S.PARTS_PER_ROW, d, ctx.me, S),
                tl.zeros([S.BLOCK_SIZE], tl.int64) + ctx.call,
            )
            in_two_levels(raise_flags_at_stop, (ctx, d, c0 + i), S)
        in_one_level(put_none_kept, (ctx, d), S)
        in_two_levels(raise_flags_past, (ctx, d), S)


@triton.jit
def tell_heads(ctx, received, status, S: tl.constexpr):
    """Tell every rank, as CTA 0 of the expert role, what this rank sends home. ``status``: whether it refuses the
    call."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = r < S.WORLD_SIZE
    base = tl.load(ctx.table + r, mask=mask, other=0)
    word = tl.zeros([S.WORLD_SIZE_POW2], tl.int64) + (status + 2 * S.OPTIONS)
    word += beside_status(received, ctx.control, ctx.me, ctx.call, status, S)
    mine = tl.load(ctx.table + ctx.me)
    to = own_word_at(base, mine, r, ctx.me, S.OFFSET_COMBINE_STATUS, S.OFFSET_STAGED_STATUS, 1, 0, S)
    tl.store(to, word, mask=mask)
    intra_node = intra_node_only(mask, r, ctx.me, S)
    heads = (base + S.OFFSET_COMBINE_HEAD).to(I64) + ctx.me
    publish(heads, intra_node, tl.zeros([S.WORLD_SIZE_POW2], tl.int64) + ctx.call)
    between_nodes(put_heads, (ctx,), S)
    if status != 0:
        raise_all_flags(ctx, S)


@triton.jit
def sends_otherwise(options, S: tl.constexpr):
    """Return which of ``options`` [ranks] bring rows where this rank awaits sums, or sums where it awaits rows."""
    if S.SENDS_SUMS:
        return options == _BY_ROW
    else:
        return options != _BY_ROW


@triton.jit
def end_other_waits(ctx, slot_of, refused, other, num_tokens, S: tl.constexpr):
    """Store what the other CTAs of the home role wait for where it may never come, as CTA 0 of a small call.

    That is a call that ranks ``refused`` [ranks], or make with ``other`` options [ranks], with sums or without. Where
    this rank awaits sums, rows of ``other`` come with flags; this function waits for them, because in the next call
    other ranks may store those rows. Where this rank awaits rows, the others send sums and raise no flag. Returns OK,
    TIMED_OUT or POISONED.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mine = own_block(ctx.control, S)
    ok = tl.full([], 1, tl.int32)
    if S.SENDS_SUMS:
        for token in range(num_tokens):
            if ok > 0:
                slots = tl.load(slot_of + token * S.WORLD_SIZE + r, mask=other, other=-1)
                ok = wait_for_all_arrivals(ctx, slots, 0, 1, S)
        stand_in(mine, refused | other, slot_of, num_tokens, S)
    else:
        i = tl.arange(0, _FLAGS)
        for rank in range(S.WORLD_SIZE):
            sends_sums = tl.max((other & (r == rank)).to(tl.int32), 0) > 0
            for c0 in range(0, S.MAX_TOKENS * S.PARTS_PER_ROW, _FLAGS):
                flags = (mine + S.OFFSET_COMBINE_FLAG).to(I64) + rank * S.MAX_TOKENS * S.PARTS_PER_ROW + c0 + i
                tl.store(flags, ctx.call + i * 0, mask=only(sends_sums, c0 + i < S.MAX_TOKENS * S.PARTS_PER_ROW))
    tl.debug_barrier()
    return ok


@triton.jit
def wait_for_heads(ctx, notes, num_tokens, S: tl.constexpr):
    """Wait until every rank is in this call, as CTA 0.

    Note a rank that refused the call or made a different one. Then wait until this rank's own rows have arrived at the
    ranks that refused. Returns OK, TIMED_OUT or POISONED.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = r < S.WORLD_SIZE
    mine = own_block(ctx.control, S)
    words = (mine + S.OFFSET_COMBINE_HEAD).to(I64) + r
    came = arrivals(ctx, WAITED, r, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    ok, peer, got = wait_all(words, mask, ctx.call, poison, ctx.limit, S.CLOCK, came, S.TRACE)
    stamp_first(ctx, COUNTS_SEEN, S)
    report_failure(ok, ctx, peer, _PHASE, ctx.call, got, S)
    if ok > 0:
        status = tl.load((mine + S.OFFSET_COMBINE_STATUS).to(I64) + r, mask=mask, other=0)
        heads = status
        mask = mask & (heads >= 0)  # those of masked ranks are below 0
        status = status & 7
        refused = tl.where(mask & ((status & 1) != 0), r, S.WORLD_SIZE)
        peer = tl.min(refused, 0)
        odd = odd_one_out(status // 2, mask, S.OPTIONS)
        lost = odd_dispatch(heads, notes.received, S)
        mismatched = mask & (refused == S.WORLD_SIZE) & other_dispatches(heads, notes.received, S)
        if (peer < S.WORLD_SIZE) | (odd >= 0) | (lost >= 0):
            note_refused(ctx.control, ctx.call)
        if peer < S.WORLD_SIZE:
            note_refusal(ctx, peer, _PHASE, _REFUSED)
            ok = wait_until_sent(ok, ctx, notes.received, refused, peer, S)
        elif odd >= 0:
            note_refusal(ctx, odd, _PHASE, _OPTIONS)
        elif lost >= 0:
            note_refusal(ctx, lost, _PHASE, _ROUTING)
        if S.LAMPORT_TOKENS > 0:
            if follows_refusal(ctx.control, ctx.call):
                clear_rows(mine, S)
            other = mask & (refused == S.WORLD_SIZE) & (mismatched == 0) & sends_otherwise(status // 2, S)
            if (ok > 0) & ((peer < S.WORLD_SIZE) | (odd >= 0)) & has_no_flags(ctx.control, num_tokens, ctx.call, S):
                ok = end_other_waits(ctx, notes.slot_of, refused < S.WORLD_SIZE, other, num_tokens, S)
        ok = quiesce_combine(ok, (ok > 0) & ((peer < S.WORLD_SIZE) | (odd >= 0) | (lost >= 0)), ctx, S)
        if (ok > 0) & (lost >= 0):
            ok = end_waits_for_mismatched(ctx, mismatched, heads, notes.slot_of, num_tokens, S)
    return ok


@triton.jit
def meet_ranks(ctx, program, notes, numbers, S: tl.constexpr):
    """Check, as CTA ``program`` of the home role, that all ranks make this call, as far as this CTA has to.

    In allreduce mode there is nothing to check. Returns OK, TIMED_OUT or POISONED; whether the dispatch brought rows
    and no rank refused an earlier pass; and [ranks] whether a rank's rows come.
    """
    brought = tl.load(notes.received + 2 * S.WORLD_SIZE) == 0
    first = program == 0
    if not S.ALLREDUCE:
        brought = brought & (is_refused(ctx.control, ctx.call, numbers.slot_begin) == 0)
    ok = 1 - is_poisoned(ctx.record, ctx.control, S)
    if not S.ALLREDUCE:
        if (ok > 0) & brought & first & (numbers.status == 0):
            ok = wait_for_heads(ctx, notes, numbers.num_tokens, S)
        if first & (numbers.status != 0):
            note_refused(ctx.control, ctx.call)
        ok = quiesce_combine(ok, (ok > 0) & brought & first & (numbers.status != 0), ctx, S)
    ok, choices = wait_for_choices(ok, (ok > 0) & brought & (numbers.status == 0), ctx, S)
    return ok, brought, choices
