"""Combine, home role: ``wait_for_all_arrivals``, ``reduce_and_copy_to_output``, ``copy_shared_expert_outputs``.

Programs share the tokens, and when there are few of these the blocks of columns. For its token a program waits for
exactly the rows of it: ``combine_flag`` of rank r and the token's message slot there (``slot_of``, noted by dispatch's
sender) must have reached the call. The waits are acquires, so the rows are seen. Program 0 waits for the
``combine_head`` of every rank, whether or not that sends rows; it has tokens only where all programs are needed.

Once all programs are done the call is counted as received; the next launch tells every rank so, which may then
overwrite ``rows`` (``kernels.sync.credit``): the next call cannot overtake this one. A rank that refused a call counts
it at once; as without sums other ranks may store the same rows in the next call, its peers, before they finish, wait
for what they themselves sent to it.

Sums: accumulator +0 in fp32 (fp64 for fp64); sums of ranks ascending, or weighted rows in slot order; then the shared
expert's row, ``shared=``, and the epilogue's tensor, in that order; one rounding.

In allreduce mode nothing travels: rows are read where they are, and no signal is involved.

Example: W = 3, token 5 went to ranks 0 and 2 (``slot_of[5] = [5, -1, 0]``): wait for flag (0, 5) and flag (2, 0), then
out = round(row(0, 5) + row(2, 5)).
"""

import triton
import triton.language as tl

from moelink.kernels.combine.finish import copy_shared_expert_outputs, finish
from moelink.kernels.combine.send import dispatch_of, is_refused, weighted_sum
from moelink.kernels.dispatch.route import experts_at, owner_of
from moelink.kernels.numeric import only
from moelink.kernels.sync.credit import count_drained
from moelink.kernels.sync.internode import near_only
from moelink.kernels.sync.quiesce import swallow_rows, wait_for_choices
from moelink.kernels.sync.signals import (
    I64,
    U8,
    calls_made,
    is_poisoned,
    note_refusal,
    odd_one_out,
    own_block,
    settle,
    wait_all,
)
from moelink.kernels.sync.small_calls import clear_rows, follows_refusal, has_no_flags, is_small, note_refused
from moelink.kernels.sync.small_rows import stand_in, sum_rows
from moelink.memory.protocol import CODE_ABORT, CODE_OPTIONS, CODE_ROUTING, COMBINE_RECEIVED, PHASE_COMBINE

_PHASE = tl.constexpr(PHASE_COMBINE)
_ROLE = tl.constexpr(COMBINE_RECEIVED)
_REFUSED = tl.constexpr(CODE_ABORT)
_FLAGS = tl.constexpr(128)
_OPTIONS = tl.constexpr(CODE_OPTIONS)
_ROUTING = tl.constexpr(CODE_ROUTING)


@triton.jit
def wait_until_sent(table, record, control, received, home, me, call, limit, S: tl.constexpr):
    """Wait until all rows that this rank sends to ``home`` in this call are there. Returns 1; 0 or -1 after an error.

    The senders are lower programs of this launch or of an earlier one, and wait only until peers begin this call.
    """
    mine = own_block(control, S)
    flags = (tl.load(table + home) + S.O_FLAG).to(I64) + me * S.T * S.PARTS
    count = tl.load(received + home * 2) * S.PARTS
    if S.SMALL > 0:  # small rows need no wait: nobody but this rank stores there, and home clears them
        count = tl.where(is_small(control, tl.load(received + home * 2 + 1), call, S), 0, count)
    i = tl.arange(0, _FLAGS)
    ok = tl.full([], 1, tl.int32)
    for c0 in range(0, count, _FLAGS):
        if ok > 0:
            ok, _, got = wait_all(flags + c0 + i, c0 + i < count, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK)
            settle(ok, table, record, control, me, me, _PHASE, call, call, got, S)
    return ok


@triton.jit
def end_other_waits(
    table, record, control, slot_of, refused, other, num_tokens, me, call, limit, S: tl.constexpr
):  # fmt: skip
    """Program 0 of a small call that ranks ``refused`` [WP], or make with ``other`` options [WP], with sums or without:
    what the programs of this role wait for may never come, so it is stored here. Returns as a wait does.

    Where sums are awaited rows of ``other`` come with flags, which are waited for here: in the next call other ranks
    may store those rows. Where rows are awaited the others send sums, and raise no flag.
    """
    r = tl.arange(0, S.WP)
    mine = own_block(control, S)
    ok = tl.full([], 1, tl.int32)
    if S.SUMS:
        for token in range(num_tokens):
            if ok > 0:
                slots = tl.load(slot_of + token * S.W + r, mask=other, other=-1)
                ok = wait_for_all_arrivals(table, record, control, slots, 0, 1, me, call, limit, S)
        stand_in(mine, refused | other, slot_of, num_tokens, S)
    else:
        i = tl.arange(0, _FLAGS)
        for rank in range(S.W):
            sends_sums = tl.max((other & (r == rank)).to(tl.int32), 0) > 0
            for c0 in range(0, S.T * S.PARTS, _FLAGS):
                flags = (mine + S.O_FLAG).to(I64) + rank * S.T * S.PARTS + c0 + i
                tl.store(flags, call + i * 0, mask=only(sends_sums, c0 + i < S.T * S.PARTS))
    tl.debug_barrier()
    return ok


@triton.jit
def wait_for_heads(
    table, record, control, received, slot_of, num_tokens, me, call, limit, S: tl.constexpr
):  # fmt: skip
    """Program 0: every rank is in this call. Notes who refused it, and waits until own rows have arrived there."""
    r = tl.arange(0, S.WP)
    mask = r < S.W
    mine = own_block(control, S)
    ok, peer, got = wait_all((mine + S.O_HEAD).to(I64) + r, mask, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK)
    settle(ok, table, record, control, me, peer, _PHASE, call, call, got, S)
    if ok > 0:
        status = tl.load((mine + S.O_STATUS).to(I64) + r, mask=mask, other=0)
        above = (status >> 32).to(tl.int32)  # the dispatch's number; across nodes messages, for ``swallow_rows``
        status = status & 0xFFFFFFFF
        refused = tl.where((status & 1) != 0, r, S.W)
        peer = tl.min(refused, 0)
        odd = odd_one_out(status // 2, mask, S.OPTIONS, S.W)
        lost = odd * 0 - 1
        if S.NODE == S.W:
            lost = odd_one_out(above, mask, dispatch_of(received, S), S.W)
        if (peer < S.W) | (odd >= 0) | (lost >= 0):
            note_refused(control, call)
        if peer < S.W:
            note_refusal(record, me, peer, _PHASE, call, _REFUSED)
            if S.NODE == S.W:  # across nodes who refused waits for itself (``kernels.sync.quiesce``)
                for home in range(peer, S.W):
                    if (ok > 0) & (tl.sum((refused == home).to(tl.int32), 0) > 0):
                        ok = wait_until_sent(table, record, control, received, home, me, call, limit, S)
        elif odd >= 0:
            note_refusal(record, me, odd, _PHASE, call, _OPTIONS)
        elif lost >= 0:
            note_refusal(record, me, lost, _PHASE, call, _ROUTING)
        if S.SMALL > 0:
            if follows_refusal(control, call):
                clear_rows(mine, S)
            other = mask & (refused == S.W) & (status // 2 != S.OPTIONS)
            if (ok > 0) & ((peer < S.W) | (odd >= 0)) & has_no_flags(control, num_tokens, call, S):
                ok = end_other_waits(
                    table, record, control, slot_of, refused < S.W, other, num_tokens, me, call, limit, S
                )  # fmt: skip
        if S.NODE < S.W:
            if (ok > 0) & ((peer < S.W) | (odd >= 0)):
                ok = swallow_rows(table, record, control, me, call, limit, S)
    return ok


@triton.jit
def wait_for_all_arrivals(table, record, control, slots, part, parts, me, call, limit, S: tl.constexpr):
    """Wait for a token's rows: ``slots`` [WP] is its message slot at each rank, -1 for none. Of rows in PARTS, for
    ``part`` alone if home, too, sums in so many ``parts``; if it sums whole rows, for all of them."""
    r = tl.arange(0, S.WP)
    mine = own_block(control, S)
    poison = (mine + S.O_POISON).to(I64)
    flags = (mine + S.O_FLAG).to(I64) + (r * S.T + tl.minimum(tl.maximum(slots, 0), S.T - 1)) * S.PARTS
    begin = tl.where(parts == S.PARTS, part, 0)
    ok, peer, got = wait_all(flags + begin, slots >= 0, call, poison, limit, S.CLOCK)
    if parts != S.PARTS:
        for other in range(1, S.PARTS):
            if ok > 0:
                ok, peer, got = wait_all(flags + other, slots >= 0, call, poison, limit, S.CLOCK)
    settle(ok, table, record, control, me, peer, _PHASE, call, call, got, S)
    return ok


@triton.jit
def far_slots(mine, ids, slots, token, me, first, num_local, S: tl.constexpr):
    """Of a token's top-k slots [KP]: the rank of another node that owns the expert, or -1; the number of the message
    there among all of them; and 1 where its row comes. ``slots`` [WP]: the message's slot at each rank."""
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    owner = owner_of(experts_at(ids, token * S.K + k, k < S.K, S), first, num_local, S)
    slot = tl.max(tl.where(owner[:, None] == r[None, :], slots[None, :], -1), 1)
    far = (slot >= 0) & (near_only(owner >= 0, owner, me, S) == 0)
    message = tl.where(far, owner * S.T + slot, 0)
    comes = tl.load((mine + S.O_FAR_KEPT).to(U8) + message * S.KB + k, mask=far, other=0)
    return tl.where(far, owner, -1), message, comes != 0


@triton.jit
def wait_for_far_rows(
    table, record, control, ids, slots, token, me, first, num_local, call, limit, S: tl.constexpr
):  # fmt: skip
    """Without sums every row from another node has a flag of its own; the messages' flags have been waited for."""
    mine = tl.load(table + me)
    k = tl.arange(0, S.KP)
    owner, message, comes = far_slots(mine, ids, slots, token, me, first, num_local, S)
    flags = (mine + S.O_ROW_FLAG).to(I64) + message * S.K + k
    ok, lane, got = wait_all(flags, comes, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK)
    peer = tl.max(tl.where(k == lane, owner, -1), 0)
    settle(ok, table, record, control, me, peer, _PHASE, call, call, got, S)
    return ok


@triton.jit
def reduce_and_copy_to_output(
    table, y, row_weights, home_weights, ids, slots, rows_of_message, out, shared, epilogue, epilogue_tensors, me,
    first, num_local, y_rows, token, part, parts, shared_begin, shared_end, slot_begin, S: tl.constexpr,
):  # fmt: skip
    """The result of one token, all of whose rows have arrived: every ``parts``-th block of columns from ``part``."""
    r = tl.arange(0, S.WP)
    k = tl.arange(0, S.KP)
    mine = tl.load(table + me)
    slot = tl.max(tl.where(r == 0, slots, -1), 0)
    rows = rows_of_message + tl.maximum(slot, 0).to(tl.int64) * S.SLOTS
    here = k < 0
    if not S.SUMS:
        expert = experts_at(ids, token * S.K + k, k < S.K, S)
        owner = owner_of(expert, first, num_local, S)
        here = tl.sum(((owner[:, None] == r[None, :]) & (slots >= 0)[None, :]).to(tl.int32), 1) > 0
        if not S.ALLREDUCE:
            here = here & (tl.load((mine + S.O_KEPT).to(U8) + token * S.K + k, mask=here, other=0) != 0)
        if S.NODE < S.W:
            far, _, comes = far_slots(mine, ids, slots, token, me, first, num_local, S)
            here = tl.where(far >= 0, comes, here)
    for c0 in range(part * S.BLOCK, S.H, parts * S.BLOCK):
        c = c0 + tl.arange(0, S.BLOCK)
        total = tl.zeros([S.BLOCK], S.ACC)
        if S.SUMS:
            if S.ALLREDUCE:
                if slot >= 0:
                    total = weighted_sum(y, y_rows, row_weights, home_weights + token * S.K, rows, c, S)
            else:
                for rank in tl.static_range(S.W):
                    sent = tl.max(tl.where(r == rank, slots, -1), 0) >= 0
                    address = mine + S.O_ROWS + tl.cast(rank * S.T + token, tl.int64) * S.ROW
                    source = tl.multiple_of(address.to(S.DTYPE_P), 16)
                    row = tl.load(source + c, mask=only(sent, c < S.H), other=0.0, eviction_policy="evict_first")
                    total += row.to(S.ACC)
        else:
            for j in range(slot_begin, tl.minimum(slot_begin + S.COPIES, S.K)):
                kept = tl.sum(tl.where(k == j, here.to(tl.int32), 0), 0) > 0
                if S.ALLREDUCE:
                    row = tl.load(rows + j, mask=kept, other=-1)
                    kept = (row >= 0) & (row < y_rows)
                    part_j = tl.load(y + row.to(tl.int64) * S.H + c, mask=only(kept, c < S.H), other=0.0)
                else:
                    address = mine + S.O_ROWS + tl.cast(token * S.COPIES + j - slot_begin, tl.int64) * S.ROW
                    source = tl.multiple_of(address.to(S.DTYPE_P), 16)
                    mask = only(kept, c < S.H)
                    part_j = tl.load(source + c, mask=mask, other=0.0, eviction_policy="evict_first")
                if S.REDUCE:
                    product = part_j.to(S.ACC)
                    if S.HOME_WEIGHTS:
                        product = product * tl.load(home_weights + token * S.K + j, mask=kept, other=0.0)
                    total += product
                else:
                    tl.store(out + (tl.cast(token, tl.int64) * S.K + j) * S.H + c, part_j, mask=c < S.H)
        if S.REDUCE:
            if S.SHARED:
                total = copy_shared_expert_outputs(total, y, y_rows, token, c, shared_begin, shared_end, S)
            finish(total, out, shared, epilogue, epilogue_tensors, token, c, S)


@triton.jit
def wait_and_reduce(
    table, record, control, y, row_weights, home_weights, ids, slots, rows_of_message, out, shared, epilogue,
    epilogue_tensors, me, first, num_local, y_rows, token, part, parts, shared_begin, shared_end, slot_begin, call,
    limit, S: tl.constexpr,
):  # fmt: skip
    """Wait for a token's rows and store its result, as :func:`gather_token`."""
    ok = tl.full([], 1, tl.int32)
    if not S.ALLREDUCE:
        ok = wait_for_all_arrivals(table, record, control, slots, part, parts, me, call, limit, S)
    if S.NODE < S.W and not S.SUMS:
        if ok > 0:
            ok = wait_for_far_rows(table, record, control, ids, slots, token, me, first, num_local, call, limit, S)
    if ok > 0:
        reduce_and_copy_to_output(
            table, y, row_weights, home_weights, ids, slots, rows_of_message, out, shared, epilogue, epilogue_tensors,
            me, first, num_local, y_rows, token, part, parts, shared_begin, shared_end, slot_begin, S,
        )  # fmt: skip
    return ok


@triton.jit
def sum_small_rows(
    table, record, control, y, slots, out, shared, epilogue, epilogue_tensors, me, y_rows, token, part, parts,
    shared_begin, shared_end, call, limit, S: tl.constexpr,
):  # fmt: skip
    """The same where rows come without flags, and are waited for while they are summed."""
    mine = own_block(control, S)
    ok = tl.full([], 1, tl.int32)
    for c0 in range(part * S.BLOCK, S.H, parts * S.BLOCK):
        if ok > 0:
            ok, peer, total = sum_rows(mine, slots, token, c0, limit, S)
            settle(ok, table, record, control, me, peer, _PHASE, call, call, call - 1, S)
            if ok > 0:
                c = c0 + tl.arange(0, S.BLOCK)
                if S.SHARED:
                    total = copy_shared_expert_outputs(total, y, y_rows, token, c, shared_begin, shared_end, S)
                finish(total, out, shared, epilogue, epilogue_tensors, token, c, S)
    return ok


@triton.jit
def gather_token(
    table, record, control, y, row_weights, home_weights, ids, slots, rows_of_message, out, shared, epilogue,
    epilogue_tensors, me, first, num_local, num_tokens, y_rows, token, part, parts, shared_begin, shared_end,
    slot_begin, call, limit, S: tl.constexpr,
):  # fmt: skip
    """A token's result, in the form that a call of ``num_tokens`` has: every ``parts``-th block of columns from
    ``part``. Returns as a wait does."""
    ok = tl.full([], 1, tl.int32)
    small = is_small(control, num_tokens, call, S)
    if S.SUMS and S.SMALL > 0:
        if small:
            ok = sum_small_rows(
                table, record, control, y, slots, out, shared, epilogue, epilogue_tensors, me, y_rows, token, part,
                parts, shared_begin, shared_end, call, limit, S,
            )  # fmt: skip
    if small == 0:
        ok = wait_and_reduce(
            table, record, control, y, row_weights, home_weights, ids, slots, rows_of_message, out, shared, epilogue,
            epilogue_tensors, me, first, num_local, y_rows, token, part, parts, shared_begin, shared_end, slot_begin,
            call, limit, S,
        )  # fmt: skip
    return ok


@triton.jit
def gather_home(
    program, num_programs, table, record, control, y, row_weights, home_weights, ids, slot_of, rows_of_message,
    received, out, shared, epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, shared_begin,
    shared_end, slot_begin, status, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the home role."""
    call = calls_made(control, _ROLE) + 1
    r = tl.arange(0, S.WP)
    mask = r < S.W
    brought = tl.load(received + 2 * S.W) == 0
    if not S.ALLREDUCE:  # where no call is counted, either
        brought = brought & (is_refused(control, call, slot_begin) == 0)
    ok = 1 - is_poisoned(record, control, S)
    if not S.ALLREDUCE:
        if (ok > 0) & brought & (program == 0) & (status == 0):
            ok = wait_for_heads(table, record, control, received, slot_of, num_tokens, me, call, limit, S)
        if (program == 0) & (status != 0):
            note_refused(control, call)
        if S.NODE < S.W:
            if (ok > 0) & brought & (program == 0) & (status != 0):
                ok = swallow_rows(table, record, control, me, call, limit, S)
    if S.NODE < S.W and not S.SUMS and not S.BY_ROW:
        choices = mask
        if (ok > 0) & brought & (status == 0):
            ok, choices = wait_for_choices(table, record, control, me, call, limit, S)
    blocks = (S.H + S.BLOCK - 1) // S.BLOCK
    parts = tl.where(num_tokens * blocks <= num_programs, blocks, 1)
    items = num_tokens * parts
    # Where there are programs to spare the first one, which looked at heads, sums nothing.
    spare = (num_programs > items).to(tl.int32)
    for i in range(tl.where(program < spare, items, program - spare), items, tl.maximum(num_programs - spare, 1)):
        if ok > 0:
            token = i // parts
            slots = tl.load(slot_of + token * S.W + r, mask=mask, other=-1)
            slots = tl.where(brought, slots, -1)
            if S.NODE < S.W and not S.SUMS and not S.BY_ROW:
                slots = tl.where(choices, slots, -1)
            ok = gather_token(
                table, record, control, y, row_weights, home_weights, ids, slots, rows_of_message, out, shared,
                epilogue, epilogue_tensors, me, first, num_local, num_tokens, y_rows, token, i % parts, parts,
                shared_begin, shared_end, slot_begin, call, limit, S,
            )  # fmt: skip
    if not S.ALLREDUCE:
        if (ok > 0) & brought:
            sem: tl.constexpr = "release" if S.SMALL > 0 else "relaxed"  # zeros were stored
            count_drained(table, control, me, _PHASE, call, program, num_programs, S, sem)
