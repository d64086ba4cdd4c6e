"""Receive tokens over the routing of an earlier dispatch (cached routing): the receiver role beside
``kernels.dispatch.send_cached``.

It is the role of ``kernels.dispatch.receive`` (:func:`receive_by`) with other steps, for what the earlier call computed
is still there. CTAs wait only for the headers. These must name the call that made the routing, the same call on every
rank; CTA 0 compares them with what that call received (``received``). That call computed where rows go: its ``counts``
give the offsets, ``rows_of_message`` the row of each pair. Of a message only the token is checked, which must be the
same. If that call brought nothing, no rank makes this call.

Example: the earlier call noted that the message in slot 0 of rank 1, of token 5, goes to row 2. In this call the
message in that slot goes there too, if it is of token 5.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.receive import receive_by, tells_options
from moelink.kernels.dispatch.row_offsets import (
    header_word,
    report_missing,
    wait_for_counts_signals,
    write_row_offsets,
)
from moelink.kernels.dispatch.row_table import renew_table
from moelink.kernels.dispatch.unpack import place_is_known, row_of_slot
from moelink.kernels.numeric import lesser, only
from moelink.kernels.records import CachedRouting, Destination, Placed, ReceiverSteps, RowSource
from moelink.kernels.sync.ll_words import value_at, wait_ll_words
from moelink.kernels.sync.signals import (
    I64,
    context_of,
    first_mismatched,
    is_poisoned,
    note_malformed,
    note_refusal,
    own_block,
)
from moelink.memory.protocol import (
    CODE_OPTIONS,
    CODE_ROUTING,
    COUNT_HEADER,
    DISPATCH_RECEIVED,
    PHASE_DISPATCH,
    ROW_ABSENT,
)
from moelink.tracing.device.stamps import WAITED, arrivals

_HEADER = tl.constexpr(COUNT_HEADER)
_ROLE = tl.constexpr(DISPATCH_RECEIVED)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_OPTIONS = tl.constexpr(CODE_OPTIONS)
_ROUTING = tl.constexpr(CODE_ROUTING)
_ABSENT = tl.constexpr(ROW_ABSENT)


@triton.jit
def _sum_noted(cached, numbers, S: tl.constexpr):
    """Sum the rows of all sources in the earlier call, for each local expert [S.POLL_WIDTH]."""
    step: tl.constexpr = lesser(S.WORLD_SIZE_POW2, 8)
    e = tl.arange(0, S.POLL_WIDTH)
    sizes = tl.zeros([S.POLL_WIDTH], tl.int32)
    for s0 in range(0, S.WORLD_SIZE, step):
        for j in tl.static_range(step):
            s = s0 + j
            rows = tl.load(
                cached.counts + e * numbers.counts_stride + s,
                mask=only(s < S.WORLD_SIZE, e < numbers.num_local_experts),
                other=0,
            )
            sizes += tl.minimum(tl.maximum(rows, 0), S.MAX_TOKENS * S.TOPK)
    return sizes


@triton.jit
def wait_for_headers(ctx, cached, source, numbers, S: tl.constexpr):
    """Wait for the headers of every source, and sum what the earlier call counted.

    Returns arrived (OK, TIMED_OUT or POISONED), and per local expert [S.POLL_WIDTH] the rows of all sources, zeros,
    and the rows of all sources.
    """
    before, missing_before = wait_for_counts_signals(ctx, S)
    sizes = _sum_noted(cached, numbers, S)
    mine = own_block(ctx.control, S)
    r = tl.arange(0, S.WORLD_SIZE_POW2)[:, None]
    c = tl.arange(0, _HEADER)[None, :]
    words = (mine + S.OFFSET_COUNTS).to(I64) + r * S.COUNT_WORDS + c
    mask = only(before > 0, (r < S.WORLD_SIZE) & (c < _HEADER))
    came = arrivals(ctx, WAITED, tl.arange(0, S.WORLD_SIZE_POW2), S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    arrived, missing = wait_ll_words(words, mask, ctx.call, poison, ctx.limit, S.CLOCK, came, S.TRACE)
    arrived = report_missing(before, missing_before, arrived, missing, ctx, S)
    return arrived, sizes, tl.zeros([S.POLL_WIDTH], tl.int32), sizes


@triton.jit
def columns_noted(control, cached, source, S: tl.constexpr):
    """Return the same as ``row_offsets.columns_of``, for messages that come in any order, and at most as many as the
    earlier call received."""
    count = header_word(control, source, 1, 0, S.MAX_TOKENS, S)
    return tl.minimum(count, tl.load(cached.received + source * 2)), 0, 0


@triton.jit
def compare_origins(ctx, refused, options, S: tl.constexpr):
    """Return [ranks] which ranks refused this call, chose other options or use a routing of another call than this
    rank; and the number of that call [ranks]."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = tells_options(options, S)
    wrong = mask & ((refused != 0) | (options != S.OPTIONS))
    origin = header_word(ctx.control, r, 6, 0, 0x7FFFFFFF, S)
    return wrong | (mask & (origin != tl.sum(tl.where(r == ctx.me, origin, 0), 0))), origin


@triton.jit
def blame_mismatched(ctx, options, origin, S: tl.constexpr):
    """Note the first rank that chose other ``options`` [ranks] than most, or uses a routing of another call than
    most."""
    mask = tells_options(options, S)
    odd = first_mismatched(options, mask)
    if odd < S.WORLD_SIZE:
        note_refusal(ctx, odd, _PHASE, _OPTIONS)
    else:
        note_refusal(ctx, first_mismatched(origin, mask), _PHASE, _ROUTING)


@triton.jit
def _differing(control, received, S: tl.constexpr):
    """Return [ranks]: which sources sent another header than in the earlier call (``received``)."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[:, None]
    c = tl.arange(0, _HEADER)[None, :]
    words = (own_block(control, S) + S.OFFSET_COUNTS).to(I64) + r * S.COUNT_WORDS + c
    value = value_at(words, (r < S.WORLD_SIZE) & (c < 5))
    expected = tl.load(received + r * 2 + c - 1, mask=(r < S.WORLD_SIZE) & (c > 0) & (c < 3), other=0)
    return tl.max((value != expected).to(tl.int32), 1) != 0


@triton.jit
def write_noted_offsets(ok, program, ctx, outputs, received, cached, numbers, shared, S: tl.constexpr):
    """Write the earlier call's offsets and totals, as CTA 0, and note sources whose header differs. Returns ``ok``."""
    if program == 0:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        mask = r < S.WORLD_SIZE
        e = tl.arange(0, S.MAX_LOCAL_EXPERTS_POW2)[None, :]
        note_malformed(ctx.control, r, _differing(ctx.control, cached.received, S))
        rows = tl.load(
            cached.counts + e * numbers.counts_stride + r[:, None],
            mask=(r[:, None] < S.WORLD_SIZE) & (e < numbers.num_local_experts),
            other=0,
        )
        rows = tl.minimum(tl.maximum(rows, 0), S.MAX_TOKENS * S.TOPK)
        messages = tl.load(cached.received + r * 2, mask=mask, other=0)
        tokens = tl.load(cached.received + r * 2 + 1, mask=mask, other=0)
        write_row_offsets(ctx, outputs, received, rows, messages, tokens, numbers, shared, S)
        if S.ROW_TABLE:
            renew_table(ctx, S)
    return ok


@triton.jit
def groups_of(control, source, groups, S: tl.constexpr):
    """Return where the groups are, in which noted rows must lie. No row is computed from ``base``."""
    return Destination(groups.starts, source.rows, groups.starts, groups.bases)


@triton.jit
def _noted_rows(places, mask, sizes, starts, bases, capacity, S: tl.constexpr):
    """Load the rows noted at ``places`` [N, rows].

    Returns the rows, which of them are within ``capacity``, and for scales in tiles or by group how far each is into
    its group and the group's first block. The group is the last one that starts at or before the row. Where the earlier
    call noted nothing (a peer sent malformed data) a row can be any number; it is kept only inside ``capacity`` and
    inside the group.

    Example: groups of 3 and 1 rows that start at 0 and 4: row 4 is number 0 of group 1. With S.MASKED and capacity 4
    row 3 is none, as group 0 has 3 rows.
    """
    row = tl.load(places, mask=mask, other=_ABSENT)
    keep = (row >= 0) & (row < capacity)
    inner = row
    block = row
    if S.MASKED:
        group = tl.minimum(tl.maximum(row, 0) // tl.maximum(capacity, 1), sizes.shape[0] - 1)
        inner = row - group * capacity
        group = tl.reshape(group, (places.shape[0] * S.ROWS_PER_MESSAGE_POW2,))
        block = tl.reshape(tl.gather(bases, group, 0), row.shape)
        keep = (row >= 0) & (inner < capacity) & (inner < tl.reshape(tl.gather(sizes, group, 0), row.shape))
    elif S.SCALE_LAYOUT == 2:
        group = tl.sum((starts[None, None, :] <= row[:, :, None]).to(tl.int32), 2) - 1
        group = tl.reshape(tl.maximum(group, 0), (places.shape[0] * S.ROWS_PER_MESSAGE_POW2,))
        inner = row - tl.reshape(tl.gather(starts, group, 0), row.shape)
        block = tl.reshape(tl.gather(bases, group, 0), row.shape)
        keep = keep & (inner >= 0) & (inner < tl.reshape(tl.gather(sizes, group, 0), row.shape))
    return Placed(row, keep, inner, block)


@triton.jit
def place_by_record(ctx, came, header, place, notes, numbers, S: tl.constexpr):
    """Return where the rows of messages go as ``unpack.place_by_counts`` does, by what the earlier call noted. Note
    nothing."""
    strange = header.token != tl.load(notes.message_token + came.at, mask=came.valid, other=0)
    if S.RANK_LAYOUT:
        start = tl.load(notes.rows_of_message + came.at, mask=came.valid & (strange == 0), other=_ABSENT)
        fits = (start >= 0) & (start < numbers.capacity)
        if S.IN_PLACE:
            slot = came.at - came.source * S.MAX_TOKENS
            fits = (start == row_of_slot(came.source, slot, numbers, S)) & (slot < numbers.capacity)
        return start, fits, strange
    else:
        q = tl.arange(0, S.ROWS_PER_MESSAGE_POW2)
        note_malformed(ctx.control, came.source, came.valid & strange)
        valid = came.valid & (strange == 0)
        rows = notes.rows_of_message + came.at.to(tl.int64)[:, None] * S.TOPK + q[None, :]
        mask = valid[:, None] & (q < S.TOPK)[None, :]
        return _noted_rows(rows, mask, place.sizes, place.starts, place.bases, numbers.capacity, S), valid


@triton.jit
def receive_cached(program, num_programs, peers, outputs, notes, cached, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the receiver role over ``cached`` routing. ``notes`` are those of the call that made
    it."""
    ctx = context_of(peers, _ROLE, program, numbers, S)
    column = numbers.rank if S.ALLREDUCE else 0  # of this rank, the only source
    noted = CachedRouting(cached.received, cached.counts + column)
    ok = -is_poisoned(peers.record, peers.control, S)
    ok = tl.where(tl.load(cached.received + 2 * S.WORLD_SIZE) != 0, -1, ok)
    receive_by(
        ReceiverSteps(
            wait_for_headers, columns_noted, compare_origins, blame_mismatched, write_noted_offsets, groups_of,
            RowSource(place_is_known, place_by_record),
        ),
        ok, ctx, program, num_programs, outputs, notes, noted, numbers, S,
    )  # fmt: skip
