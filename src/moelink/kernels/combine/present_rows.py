"""Sum the rows of a message that are there, and no others: what combine does within an SM limit.

A message fills some of its token's top-k slots; on two ranks half of them, on eight one or two. Where all SMs work,
memory is the bound, and a slot without a row costs only instructions. Few SMs are bound by instructions and by the
latencies of a CTA's one message after the other. So here (S.PRESENT_ROWS)

* a CTA takes only the slots that have a row, one after the other, and all columns of it at once, while the rows behind
  it are on their way to shared memory. An absent slot would add +0 to a sum that began at +0, which changes no bit;
* a sender loads the row numbers of its next message beside the rows of this one, and raises the flags of
  S.MESSAGES_PER_RELEASE messages by one release (``signals.publish``), because a release waits until all stores before
  it have arrived. A CTA that waits for one of these flags waits a little longer, for the same stores as before;
* a home CTA waits for the flags of S.MESSAGES_PER_RELEASE tokens at a time.

Example: row numbers [4, -1, 9, -2] are the rows 4 and 9, whose numbers among those that are there are [0, -1, 1, -1].
"""

import triton
import triton.language as tl

from moelink.kernels.combine.arrivals import present_slots
from moelink.kernels.combine.finish import finish
from moelink.kernels.combine.row_format import row_columns
from moelink.kernels.numeric import only, round_to
from moelink.kernels.records import Present
from moelink.kernels.sync.signals import I32, I64, own_block, publish, report_failure, wait_all
from moelink.memory.protocol import PHASE_COMBINE
from moelink.tracing.device.stamps import (
    FIRST_STORE,
    IDS_READ,
    LAST_MESSAGE,
    LAST_PUBLISHED,
    LAST_STORED,
    MESSAGE_SEEN,
    PUBLISHED,
    ROW_STORED,
    stamp_after,
    stamp_both,
    stamp_first,
)

_PHASE = tl.constexpr(PHASE_COMBINE)


@triton.jit
def present_of(rows, y_rows):
    """Return of row numbers ``rows`` [slots] which are there, below ``y_rows``: their number among these [slots], -1
    for the others, and how many there are."""
    there = (rows >= 0) & (rows < y_rows)
    before = tl.cumsum(there.to(tl.int32), 0) - 1
    return tl.where(there, before, -1), tl.sum(there.to(tl.int32), 0)


@triton.jit
def nth_row(rows, nth, n):
    """Return row number ``n`` of those that are there, -1 where there are no more."""
    return tl.max(tl.where(nth == n, rows, -1), 0)


@triton.jit
def load_row_numbers(rows_of_message, message, there, S: tl.constexpr):
    """Load the row numbers [slots] of the message numbered ``message``; -1 past the last slot, and if it is not
    ``there``."""
    k = tl.arange(0, S.TOPK_POW2)
    source = rows_of_message + tl.cast(message, tl.int64) * S.SLOTS_PER_MESSAGE + k
    return tl.load(source, mask=only(there, k < S.SLOTS_PER_MESSAGE), other=-1)


@triton.jit
def load_weights(row_weights, present, S: tl.constexpr):
    """Load the weights [slots] of rows that are ``present``; undefined without row weights. Home weights never meet
    sums that travel."""
    if S.HAS_ROW_WEIGHTS:
        return tl.load(row_weights + present.rows, mask=present.nth >= 0, other=0.0)
    else:
        return present.nth


@triton.jit
def load_columns(y, row, c0, S: tl.constexpr):
    """Load columns [c0, c0 + S.BLOCK_SIZE) of row ``row`` of ``y`` in S.SUM_DTYPE; zeros past its end.

    Two columns of bf16 are loaded as a word and taken apart by an instruction each, if a row has whole words.
    """
    if S.ROW_DTYPE == tl.bfloat16 and S.HIDDEN_SIZE % 2 == 0:
        w = c0 // 2 + tl.arange(0, S.BLOCK_SIZE // 2)
        source = y.to(I32, bitcast=True) + row.to(tl.int64) * (S.HIDDEN_SIZE // 2)
        words = tl.load(source + w, mask=w < S.HIDDEN_SIZE // 2, other=0)
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(even, odd), (S.BLOCK_SIZE,))
    else:
        c = c0 + tl.arange(0, S.BLOCK_SIZE)
        return tl.load(y + row.to(tl.int64) * S.HIDDEN_SIZE + c, mask=c < S.HIDDEN_SIZE, other=0.0).to(S.SUM_DTYPE)


@triton.jit
def sum_present(y, row_weights, present, c0, S: tl.constexpr):
    """Sum columns [c0, c0 + S.BLOCK_SIZE) of the ``present`` rows of ``y``, in slot order, in S.SUM_DTYPE. Rows that
    follow are copied to shared memory meanwhile."""
    weights = load_weights(row_weights, present, S)
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
    for n in tl.range(0, present.count, num_stages=S.ROWS_AHEAD):
        row = nth_row(present.rows, present.nth, n)
        part = load_columns(y, row, c0, S)
        if S.HAS_ROW_WEIGHTS:
            part = part * tl.sum(tl.where(present.nth == n, weights, 0.0), 0)
        total += part
    return total


@triton.jit
def send_present_rows(ctx, inputs, notes, home, lane, lanes, numbers, S: tl.constexpr):
    """Send the sums of every ``lanes``-th message of rank ``home``, from the ``lane``-th, and publish their flags,
    S.MESSAGES_PER_RELEASE at a time. Returns how many rows travelled."""
    block = tl.load(ctx.table + home)
    flags = (block + S.OFFSET_COMBINE_FLAG).to(I64) + ctx.me * S.MAX_TOKENS
    count = tl.load(notes.received + home * 2)
    c = tl.arange(0, S.BLOCK_SIZE)
    b = tl.arange(0, S.MESSAGES_PER_RELEASE)
    moved = tl.full([], 0, tl.int32)
    token = tl.load(notes.message_token + home * S.MAX_TOKENS + lane, mask=lane < count, other=-1)
    rows = load_row_numbers(notes.rows_of_message, home * S.MAX_TOKENS + lane, lane < count, S)
    for first in range(lane, count, lanes * S.MESSAGES_PER_RELEASE):
        for slot in range(first, tl.minimum(first + lanes * S.MESSAGES_PER_RELEASE, count), lanes):
            behind = slot + lanes
            message = home * S.MAX_TOKENS + behind
            next_token = tl.load(notes.message_token + message, mask=behind < count, other=-1)
            next_rows = load_row_numbers(notes.rows_of_message, message, behind < count, S)
            stamp_after(ctx, IDS_READ, token + b * 0, S)
            valid = (token >= 0) & (token < S.MAX_TOKENS)
            nth, there = present_of(rows, numbers.y_rows)
            address = block + S.OFFSET_ROWS + tl.cast(ctx.me * S.MAX_TOKENS + token, tl.int64) * S.ROW_BYTES
            to = tl.multiple_of(address.to(S.ROW_POINTER), 16)
            for c0 in tl.static_range(0, S.HIDDEN_SIZE, S.BLOCK_SIZE):
                total = sum_present(inputs.y, inputs.row_weights, Present(rows, nth, there), c0, S)
                rounded = round_to(total, S.ROW_DTYPE, S.NATIVE_CASTS)
                tl.store(to + c0 + c, rounded, mask=only(valid, c0 + c < S.HIDDEN_SIZE))
            stamp_first(ctx, FIRST_STORE, S)
            moved += valid.to(tl.int32)
            token = next_token
            rows = next_rows
        slots = first + b * lanes
        publish(flags + slots, slots < count, tl.zeros([S.MESSAGES_PER_RELEASE], tl.int64) + ctx.call)
        stamp_both(ctx, PUBLISHED, LAST_PUBLISHED, S)
    return moved


@triton.jit
def slots_of_tokens(ctx, slot_of, tokens, num_tokens, brought, choices, S: tl.constexpr):
    """Return the message slots [N, ranks] of ``tokens`` [N] at the ranks whose rows come, -1 for others and past the
    last token; ``arrivals.awaited_slots`` of several tokens."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = only(brought, (tokens < num_tokens)[:, None] & (r < S.WORLD_SIZE)[None, :])
    slots = tl.load(slot_of + tokens[:, None] * S.WORLD_SIZE + r[None, :], mask=mask, other=-1)
    return present_slots(ctx, tl.where(choices[None, :], slots, -1), S)


@triton.jit
def own_row_numbers(notes, slots, j, me, S: tl.constexpr):
    """Load the row numbers [slots] of the own row of token ``j`` of ``slots`` [N, ranks]; -1 where it has none."""
    mine = (tl.arange(0, slots.shape[0]) == j)[:, None] & (tl.arange(0, S.WORLD_SIZE_POW2) == me)[None, :]
    slot = tl.max(tl.max(tl.where(mine, slots, -1), 1), 0)
    return load_row_numbers(notes.rows_of_message, me * S.MAX_TOKENS + slot, slot >= 0, S)


@triton.jit
def gather_present_rows(ctx, inputs, outputs, notes, numbers, brought, choices, share, S: tl.constexpr):
    """Store the results of a ``share`` of the tokens of two ranks whose own rows stay: every ``share.lanes``-th.

    Waits for the other rank's rows of S.MESSAGES_PER_RELEASE tokens at a time. Returns OK, TIMED_OUT or POISONED.
    """
    ok = tl.full([], 1, tl.int32)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    b = tl.arange(0, S.MESSAGES_PER_RELEASE)
    c = tl.arange(0, S.BLOCK_SIZE)
    mine = own_block(ctx.control, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    other = (ctx.me + 1) % S.WORLD_SIZE
    arrived = (mine + S.OFFSET_COMBINE_FLAG).to(I64) + other * S.MAX_TOKENS
    step = share.lanes * S.MESSAGES_PER_RELEASE
    tokens = share.lane + b * share.lanes
    slots = slots_of_tokens(ctx, notes.slot_of, tokens, numbers.num_tokens, brought, choices, S)
    for first in range(share.lane, numbers.num_tokens, step):
        following = slots_of_tokens(ctx, notes.slot_of, tokens + step, numbers.num_tokens, brought, choices, S)
        awaited = tl.max(tl.where((r == other)[None, :], slots, -1), 1)
        if ok > 0:
            place = arrived + tl.minimum(tl.maximum(awaited, 0), S.MAX_TOKENS - 1)
            ok, _, got = wait_all(place, awaited >= 0, ctx.call, poison, ctx.limit, S.CLOCK)
            stamp_both(ctx, MESSAGE_SEEN, LAST_MESSAGE, S)
            report_failure(ok, ctx, other, _PHASE, ctx.call, got, S)
        if ok > 0:
            rows = own_row_numbers(notes, slots, 0, ctx.me, S)
            for j in range(0, tl.minimum(tl.cdiv(numbers.num_tokens - first, share.lanes), S.MESSAGES_PER_RELEASE)):
                next_rows = own_row_numbers(notes, slots, j + 1, ctx.me, S)
                token = first + j * share.lanes
                comes = tl.max(tl.where(b == j, awaited, -1), 0) >= 0
                nth, there = present_of(rows, numbers.y_rows)
                row = mine + S.OFFSET_ROWS + tl.cast(other * S.MAX_TOKENS + token, tl.int64) * S.ROW_BYTES
                for c0 in tl.static_range(0, S.HIDDEN_SIZE, S.BLOCK_SIZE):
                    own = sum_present(inputs.y, inputs.row_weights, Present(rows, nth, there), c0, S)
                    own = round_to(own, S.ROW_DTYPE, S.NATIVE_CASTS).to(S.SUM_DTYPE)
                    total = 0.0 + row_columns(tl.multiple_of(row.to(S.ROW_POINTER), 16), c0, comes, S) + own
                    finish(total, outputs, inputs, token, c0 + c, numbers, S)
                stamp_both(ctx, ROW_STORED, LAST_STORED, S)
                rows = next_rows
        slots = following
        tokens += step
    return ok
