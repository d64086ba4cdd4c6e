"""Reduce the rows that came home: the home role of combine, on the rank that owns the token.

Its steps for a token are ``wait_for_all_arrivals`` and ``reduce_and_copy_to_output``. ``kernels.combine.phases``
launches them separately, for all tokens.

CTAs share the tokens, and with few tokens also the blocks of columns. For its token a CTA waits for exactly that
token's rows: ``combine_flag`` of rank r, in the token's message slot there (``slot_of``, noted by dispatch's sender),
must have reached the call. The waits are acquires, so the rows are visible. CTA 0 waits for the ``combine_head`` of
every rank, whether or not that rank sends rows. CTA 0 gets tokens only where all CTAs are needed.

Once all CTAs are done the call is counted as received. The next launch then grants credit to every rank, which may
overwrite ``rows`` (``kernels.sync.credit``). So the next call cannot overtake this one. A rank that refused a call
counts it at once. Without sums other ranks may store the same rows in the next call; therefore the peers of a rank that
refused wait, before they finish, for the rows that they themselves sent to it.

Sums: the accumulator starts at +0, in fp32 (fp64 for fp64). It adds the sums of the ranks in ascending order, or
weighted rows in slot order; then the shared expert's row, ``shared=`` and the epilogue's tensor, in that order. It is
rounded once.

In allreduce mode nothing travels: rows are read where they are, and no signal is used.

Example: W = 3, token 5 went to ranks 0 and 2 (``slot_of[5] = [5, -1, 0]``): wait for flag (0, 5) and flag (2, 0), then
out = round(row(0, 5) + row(2, 5)).
"""

import triton
import triton.language as tl

from moelink.kernels.combine.finish import finish, shared_expert_output
from moelink.kernels.combine.own_rows import find_own_rows, others_slots, own_sum
from moelink.kernels.combine.row_format import load_columns, row_columns
from moelink.kernels.combine.send import is_refused, weighted_sum
from moelink.kernels.dispatch.route import experts_at, owner_of
from moelink.kernels.nodes.collect import sum_of_levels, wait_for_levels
from moelink.kernels.nodes.internode import between_nodes_or, intra_node_only
from moelink.kernels.nodes.levels import after_relaying
from moelink.kernels.numeric import only, round_to
from moelink.kernels.records import Piece
from moelink.kernels.sync.credit import count_read
from moelink.kernels.sync.dependent_launch import allow_next_launch
from moelink.kernels.sync.lamport_slots import (
    clear_rows,
    follows_refusal,
    has_no_flags,
    is_small,
    note_refused,
    stand_in,
    sum_rows,
)
from moelink.kernels.sync.quiesce import (
    end_waits_for_mismatched,
    odd_dispatch,
    other_dispatches,
    quiesce_combine,
    wait_for_choices,
    wait_until_sent,
)
from moelink.kernels.sync.signals import (
    I64,
    U8,
    context_of,
    is_poisoned,
    note_refusal,
    odd_one_out,
    own_block,
    report_failure,
    wait_all,
)
from moelink.memory.protocol import (
    CODE_ABORT,
    CODE_OPTIONS,
    CODE_ROUTING,
    COMBINE_COLLECTED,
    COMBINE_RECEIVED,
    OPTIONS_BY_ROW,
    PHASE_COMBINE,
)
from moelink.tracing.device.stamps import (
    ARRIVED,
    COUNTS_SEEN,
    LAST_MESSAGE,
    LAST_STORED,
    MESSAGE_SEEN,
    ROW_STORED,
    TOLD,
    WAITED,
    arrivals,
    stamp,
    stamp_awaited,
    stamp_both,
    stamp_first,
)
from moelink.tuning import MANY_TOKENS

_PHASE = tl.constexpr(PHASE_COMBINE)
_ROLE = tl.constexpr(COMBINE_RECEIVED)
_COLLECTED = tl.constexpr(COMBINE_COLLECTED)
_MANY_TOKENS = tl.constexpr(MANY_TOKENS)
_REFUSED = tl.constexpr(CODE_ABORT)
_FLAGS = tl.constexpr(128)
_OPTIONS = tl.constexpr(CODE_OPTIONS)
_BY_ROW = tl.constexpr(OPTIONS_BY_ROW)
_ROUTING = tl.constexpr(CODE_ROUTING)


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
        status = status & 7
        refused = tl.where((status & 1) != 0, r, S.WORLD_SIZE)
        peer = tl.min(refused, 0)
        odd = odd_one_out(status // 2, mask, S.OPTIONS, S.WORLD_SIZE)
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
def kept_of_all(here, mine, ids, slots, token, me, numbers, S: tl.constexpr):
    """Return ``here`` [slots], which of a token's rows have come from this node, with those of other nodes."""
    owner, _, comes = inter_node_slots(mine, ids, slots, token, me, numbers.first_expert, numbers.num_local_experts, S)
    return tl.where(owner >= 0, comes, here)


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
def reduce_and_copy_to_output(ctx, inputs, slots, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Store a ``piece`` of the result of a token whose rows have all arrived."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    mine = tl.load(ctx.table + ctx.me)
    slot = tl.max(tl.where(r == 0, slots, -1), 0)
    rows = notes.rows_of_message + tl.maximum(slot, 0).to(tl.int64) * S.SLOTS_PER_MESSAGE
    here = k < 0
    if not S.SENDS_SUMS:
        expert = experts_at(inputs.topk_ids, token * S.TOPK + k, k < S.TOPK, S)
        owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
        here = tl.sum(((owner[:, None] == r[None, :]) & (slots >= 0)[None, :]).to(tl.int32), 1) > 0
        if not S.ALLREDUCE:
            here = here & (tl.load((mine + S.OFFSET_COMBINE_KEPT).to(U8) + token * S.TOPK + k, mask=here, other=0) != 0)
        here = between_nodes_or(here, kept_of_all, (here, mine, inputs.topk_ids, slots, token, ctx.me, numbers), S)
    for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, piece.parts * S.BLOCK_SIZE):
        c = c0 + tl.arange(0, S.BLOCK_SIZE)
        total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
        if S.SENDS_SUMS:
            if S.ALLREDUCE:
                if slot >= 0:
                    total = weighted_sum(
                        inputs.y, numbers.y_rows, inputs.row_weights, inputs.home_weights + token * S.TOPK, rows, c, S
                    )
            elif S.TWO_LEVEL:
                total = sum_of_levels(ctx, slots, token, c0, S)
            else:
                for rank in tl.static_range(S.WORLD_SIZE):
                    sent = tl.max(tl.where(r == rank, slots, -1), 0) >= 0
                    place = tl.cast(rank * S.MAX_TOKENS + token, tl.int64)
                    source = tl.multiple_of((mine + S.OFFSET_ROWS + place * S.ROW_BYTES).to(S.ROW_POINTER), 16)
                    total += row_columns(source, c0, sent, S)
        else:
            for j in range(numbers.slot_begin, tl.minimum(numbers.slot_begin + S.ROWS_PER_TOKEN, S.TOPK)):
                kept = tl.sum(tl.where(k == j, here.to(tl.int32), 0), 0) > 0
                if S.ALLREDUCE:
                    row = tl.load(rows + j, mask=kept, other=-1)
                    kept = (row >= 0) & (row < numbers.y_rows)
                    part_j = tl.load(
                        inputs.y + row.to(tl.int64) * S.HIDDEN_SIZE + c, mask=only(kept, c < S.HIDDEN_SIZE), other=0.0
                    )
                else:
                    place = tl.cast(token * S.ROWS_PER_TOKEN + j - numbers.slot_begin, tl.int64)
                    source = tl.multiple_of((mine + S.OFFSET_ROWS + place * S.ROW_BYTES).to(S.ROW_POINTER), 16)
                    if S.DECODE_FN is not None:
                        part_j = load_columns(source, c0, kept, S)
                    else:
                        mask = only(kept, c < S.HIDDEN_SIZE)
                        part_j = tl.load(source + c, mask=mask, other=0.0, eviction_policy="evict_first")
                if S.REDUCES:
                    product = part_j.to(S.SUM_DTYPE)
                    if S.HAS_HOME_WEIGHTS:
                        product = product * tl.load(inputs.home_weights + token * S.TOPK + j, mask=kept, other=0.0)
                    total += product
                else:
                    if S.DECODE_FN is not None:
                        part_j = round_to(part_j, S.OUT_DTYPE, S.NATIVE_CASTS)
                    tl.store(
                        outputs.out + (tl.cast(token, tl.int64) * S.TOPK + j) * S.HIDDEN_SIZE + c,
                        part_j,
                        mask=c < S.HIDDEN_SIZE,
                    )
        if S.REDUCES:
            if S.FUSED_SHARED_EXPERT:
                total += shared_expert_output(inputs.y, numbers, token, c, S).to(S.SUM_DTYPE)
            finish(total, outputs, inputs, token, c, S)


@triton.jit
def wait_and_reduce(ctx, inputs, slots, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows and store its result, as :func:`gather_token` does. Rows come with flags."""
    ok = tl.full([], 1, tl.int32)
    if S.TWO_LEVEL:
        ok = wait_for_levels(ctx, slots, token, S)
    elif not S.ALLREDUCE:
        ok = wait_for_all_arrivals(ctx, slots, piece.part, piece.parts, S)
    if not S.SENDS_SUMS:
        if ok > 0:
            ok = between_nodes_or(ok, wait_for_inter_node_rows, (ctx, inputs.topk_ids, slots, token, numbers), S)
    if piece.is_last:
        allow_next_launch(S)
    if ok > 0:
        reduce_and_copy_to_output(ctx, inputs, slots, notes, outputs, numbers, token, piece, S)
        stamp_both(ctx, ROW_STORED, LAST_STORED, S)
    return ok


@triton.jit
def sum_rows_without_flags(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows while summing them, and store its result. Rows come without flags, in Lamport slots.

    An own row that stays is read before the wait, which hides it.
    """
    mine = own_block(ctx.control, S)
    ok = tl.full([], 1, tl.int32)
    if S.OWN_ROWS_STAY:
        slots = others_slots(slots, ctx.me, S)
    step = piece.parts * S.BLOCK_SIZE
    for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, step):
        if ok > 0:
            came = arrivals(ctx, ARRIVED, tl.arange(0, S.WORLD_SIZE_POW2), S)
            c = c0 + tl.arange(0, S.BLOCK_SIZE)
            if S.OWN_ROWS_STAY:
                beside = own_sum(inputs, notes, numbers.y_rows, own, c, S)
            ok, peer, total = sum_rows(mine, ctx.me, slots, token, c0, ctx.limit, came, S)
            if piece.is_last & (c0 + step >= S.HIDDEN_SIZE):
                allow_next_launch(S)
            if S.OWN_ROWS_STAY:
                total += beside.to(S.SUM_DTYPE)
            stamp_awaited(ctx, MESSAGE_SEEN, LAST_MESSAGE, slots, S)
            report_failure(ok, ctx, peer, _PHASE, ctx.call, ctx.call - 1, S)
            if ok > 0:
                if S.FUSED_SHARED_EXPERT:
                    total += shared_expert_output(inputs.y, numbers, token, c, S).to(S.SUM_DTYPE)
                finish(total, outputs, inputs, token, c, S)
                stamp_both(ctx, ROW_STORED, LAST_STORED, S)
    return ok


@triton.jit
def gather_beside_own_rows(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Do as :func:`wait_and_reduce` where own rows stay (``kernels.combine.own_rows``)."""
    mine = own_block(ctx.control, S)
    slots = others_slots(slots, ctx.me, S)
    place = tl.cast((1 - ctx.me) * S.MAX_TOKENS + token, tl.int64)
    source = tl.multiple_of((mine + S.OFFSET_ROWS + place * S.ROW_BYTES).to(S.ROW_POINTER), 16)
    ok = wait_for_all_arrivals(ctx, slots, piece.part, piece.parts, S)
    if piece.is_last:
        allow_next_launch(S)
    if ok > 0:
        for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, piece.parts * S.BLOCK_SIZE):
            c = c0 + tl.arange(0, S.BLOCK_SIZE)
            beside = own_sum(inputs, notes, numbers.y_rows, own, c, S)
            total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE) + row_columns(source, c0, tl.max(slots, 0) >= 0, S)
            total += beside.to(S.SUM_DTYPE)
            if S.FUSED_SHARED_EXPERT:
                total += shared_expert_output(inputs.y, numbers, token, c, S).to(S.SUM_DTYPE)
            finish(total, outputs, inputs, token, c, S)
        stamp_both(ctx, ROW_STORED, LAST_STORED, S)
    return ok


@triton.jit
def gather_token(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S: tl.constexpr):
    """Wait for a token's rows and store a ``piece`` of its result. ``own`` names its own rows, where these stay.

    The number of tokens in the call decides whether rows come with flags. Returns OK, TIMED_OUT or POISONED.
    """
    ok = tl.full([], 1, tl.int32)
    small = is_small(ctx.control, numbers.num_tokens, ctx.call, S)
    if S.SENDS_SUMS and S.LAMPORT_TOKENS > 0:
        if small:
            ok = sum_rows_without_flags(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S)
    if small == 0:
        if S.OWN_ROWS_STAY:
            ok = gather_beside_own_rows(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S)
        else:
            ok = wait_and_reduce(ctx, inputs, slots, notes, outputs, numbers, token, piece, S)
    return ok


@triton.jit
def parts_of_token(num_tokens, num_programs, S: tl.constexpr):
    """Return into how many parts of its columns a token is divided: all blocks if the CTAs suffice, else 1.

    It is also all blocks with up to MANY_TOKENS tokens whose rows come without flags: each part has its own wait, so
    only one part of the last row is left to do when it arrives. More tokens are read faster as a whole.
    """
    blocks = (S.HIDDEN_SIZE + S.BLOCK_SIZE - 1) // S.BLOCK_SIZE
    divided = num_tokens * blocks <= num_programs
    if S.LAMPORT_TOKENS > 0:
        divided = divided | (num_tokens <= _MANY_TOKENS)
    return tl.where(divided, blocks, 1)


@triton.jit
def load_slots(notes, token, exists, S: tl.constexpr):
    """Load the message slots [ranks] of ``token``. They are undefined if it does not exist, and past the last rank."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    return tl.load(notes.slot_of + token * S.WORLD_SIZE + r, mask=only(exists, r < S.WORLD_SIZE))


@triton.jit
def awaited_slots(notes, token, brought, choices, S: tl.constexpr):
    """Return a token's message slots [ranks] at the ranks whose rows come, -1 for others. ``choices``: of
    :func:`wait_for_choices`."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    slots = tl.load(notes.slot_of + token * S.WORLD_SIZE + r, mask=r < S.WORLD_SIZE, other=-1)
    return tl.where(choices, tl.where(brought, slots, -1), -1)


@triton.jit
def gather_home(program, num_programs, peers, inputs, outputs, notes, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the home role."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    call = ctx.call
    brought = tl.load(notes.received + 2 * S.WORLD_SIZE) == 0
    if not S.ALLREDUCE:  # in allreduce mode no call is counted
        brought = brought & (is_refused(peers.control, call, numbers.slot_begin) == 0)
    ok = 1 - is_poisoned(peers.record, peers.control, S)
    if not S.ALLREDUCE:
        if (ok > 0) & brought & (program == 0) & (numbers.status == 0):
            ok = wait_for_heads(ctx, notes, numbers.num_tokens, S)
        if (program == 0) & (numbers.status != 0):
            note_refused(peers.control, call)
        ok = quiesce_combine(ok, (ok > 0) & brought & (program == 0) & (numbers.status != 0), ctx, S)
    ok, choices = wait_for_choices(ok, (ok > 0) & brought & (numbers.status == 0), ctx, S)
    parts = parts_of_token(numbers.num_tokens, num_programs, S)
    items = numbers.num_tokens * parts
    # Where there are CTAs to spare, the first one sums nothing, because it waits for the heads.
    spare = (num_programs > items).to(tl.int32)
    step = tl.maximum(num_programs - spare, 1)
    first = tl.where(program < spare, items, program - spare)
    own = tl.full([], -1, tl.int32)
    if S.OWN_ROWS_STAY:
        # Prefetch the numbers of own rows two parts ahead, and one: they take two loads, one after the other. If
        # dispatch brought no rows, or was not complete, its notes name no row.
        noted = tl.where(brought & (ok > 0), items, 0)
        near = load_slots(notes, first // parts, first < noted, S)
        far = load_slots(notes, (first + step) // parts, first + step < noted, S)
        next_own = find_own_rows(notes, near, ctx.me, first < noted, S)
    for i in range(first, items, step):
        token = i // parts
        if S.OWN_ROWS_STAY:
            own = next_own
            slots = tl.where(brought, near, -1)
            next_own = find_own_rows(notes, far, ctx.me, i + step < noted, S)
            near = far
            far = load_slots(notes, (i + 2 * step) // parts, i + 2 * step < noted, S)
        if ok > 0:
            if not S.OWN_ROWS_STAY:
                slots = awaited_slots(notes, token, brought, choices, S)
            piece = Piece(i % parts, parts, (i + step >= items) & (not S.TWO_LEVEL))
            ok = gather_token(ctx, inputs, slots, own, notes, outputs, numbers, token, piece, S)
    if S.TWO_LEVEL:
        if brought:
            ok = after_relaying(ok, program, ctx, _COLLECTED, _PHASE, S)
    if not S.ALLREDUCE:
        if (ok > 0) & brought:
            sem: tl.constexpr = "release" if S.LAMPORT_TOKENS > 0 else "relaxed"  # a release after zeros were stored
            count_read(ctx, _PHASE, program, num_programs, S, sem)
            stamp(ctx, TOLD, S)
