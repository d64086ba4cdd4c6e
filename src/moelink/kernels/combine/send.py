"""Combine, expert role: ``send_tokens_back``.

Each program takes messages of one home rank that dispatch brought, in slot order. For a message it stores, in row
``me`` of ``rows`` at home, at the message's *token*, the sum of the rows that the message filled here (or, without
pre-reduction, each of them at (token, slot), and which of them there are in ``combine_kept``). Then it publishes
``combine_flag[slot] = call`` there: a release after the rows it speaks for.

Where tokens are few a message's columns travel in PARTS, each with a flag of its own and, as far as programs suffice,
by a program of its own: one that sums all columns takes the time of several memory latencies.

Sums of a small call go without flags (``kernels.sync.small_calls``).

Before its first store a program waits until every home rank has drained the previous call; nothing else is waited for.
Program 0 stores ``combine_status`` and publishes ``combine_head = call`` everywhere, so that a rank hears of a
refusal even when no rows were due to it; where messages travel in parts it sends no rows, unless it is alone. A
refusing rank sends no rows but raises all flags. Where a combine takes several passes over the slots, one that is
refused ends with the first: who refuses makes one call.

Sums: accumulator +0, slots ascending, product rounded before it is added (no fused multiply-add), one rounding to the
row's dtype. A slot of another rank, a row dropped for ``capacity`` and a row number out of range contribute nothing.

Example: topk 3, a message with rows [4, -1, 9] and weights w[4] = .5, w[9] = 2: the row sent is .5 y[4] + 2 y[9].
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only, round_to
from moelink.kernels.sync.credit import glance, tell_drained, wait_until_drained
from moelink.kernels.sync.internode import direct_or_staged, is_near, near_only, put, staged_at
from moelink.kernels.sync.signals import I64, U8, calls_made, count_arrival, fence, own_block, publish
from moelink.kernels.sync.small_calls import follows_refusal, is_small, row_at
from moelink.kernels.sync.small_rows import bits_of
from moelink.memory.protocol import COMBINE_BYTES, COMBINE_SENT, PHASE_COMBINE, ROW_ABSENT

_PHASE = tl.constexpr(PHASE_COMBINE)
_ROLE = tl.constexpr(COMBINE_SENT)
_ABSENT = tl.constexpr(ROW_ABSENT)
_BYTES = tl.constexpr(COMBINE_BYTES)


@triton.jit
def is_refused(control, call, slot_begin):
    """1 in a later pass over the slots of a combine whose first one a rank refused: then no rank makes this call."""
    return ((slot_begin > 0) & follows_refusal(control, call)).to(tl.int32)


@triton.jit
def weighted_sum(y, y_rows, row_weights, home_weights, rows, c, S: tl.constexpr):
    """Sum over slots of the rows that ``rows`` (a pointer to SLOTS row numbers) names, at columns ``c``, in ACC.

    Weights are those of the rows, or (``home_weights``: a pointer to SLOTS of them) of the token's slots.
    """
    total = tl.zeros([S.BLOCK], S.ACC)
    for k in tl.static_range(S.SLOTS):
        row = tl.load(rows + k)
        keep = (row >= 0) & (row < y_rows)
        source = y + row.to(tl.int64) * S.H
        part = tl.load(source + c, mask=only(keep, c < S.H), other=0.0, eviction_policy=S.ONCE).to(S.ACC)
        if S.ROW_WEIGHTS:
            part = part * tl.load(row_weights + row, mask=keep, other=0.0)
        elif S.HOME_WEIGHTS:
            part = part * tl.load(home_weights + k, mask=keep, other=0.0)
        total += part
    return total


@triton.jit
def put_row(table, control, mine, source, place, word, call, peer, S: tl.constexpr):
    """Put the row at ``source`` at row ``place`` of rank ``peer``'s ``rows``, then ``call`` in its ``word``."""
    fence(control)
    put(table, mine + S.O_ROWS + tl.cast(place, tl.int64) * S.ROW, source, S.ROW, word, call, peer, S)


@triton.jit
def put_kept(table, control, mine, kept, peer, slot, me, call, S: tl.constexpr):
    """Put which slots' rows of a message come, ``kept`` [KP], at rank ``peer``, of another node; then its flag."""
    q = tl.arange(0, S.KP)
    at = tl.cast(me * S.T + slot, tl.int64)
    source = staged_at(mine, peer, me, S.O_STAGED_KEPT, S.T, slot, S.KB, S)
    tl.store(source.to(U8) + q, kept.to(tl.uint8), mask=q < S.K)
    fence(control)
    put(table, mine + S.O_FAR_KEPT + at * S.KB, source, S.KB, mine + S.O_FLAG + at * 8, call, peer, S)


@triton.jit
def send_columns(to, flip, part, valid, y, y_rows, row_weights, rows, S: tl.constexpr):
    """Part ``part`` of the sum of a message's rows, to the row at ``to``, its bits inverted if ``flip`` is -1; nothing
    unless ``valid``."""
    for c0 in tl.static_range(0, S.H, S.PARTS * S.BLOCK):
        c = c0 + part * S.BLOCK + tl.arange(0, S.BLOCK)
        row = round_to(weighted_sum(y, y_rows, row_weights, row_weights, rows, c, S), S.DTYPE, S.NATIVE)
        if S.SMALL > 0:
            bits = bits_of(row, flip, S)
            tl.store(to.to(tl.pointer_type(bits.dtype)) + c, bits, mask=only(valid, c < S.H))
        else:
            tl.store(to + c, row, mask=only(valid, c < S.H))


@triton.jit
def copy_columns(to, part, y, row, S: tl.constexpr):
    """Part ``part`` of row ``row`` to the row at ``to``."""
    for c0 in tl.static_range(0, S.H, S.PARTS * S.BLOCK):
        c = c0 + part * S.BLOCK + tl.arange(0, S.BLOCK)
        column = tl.load(y + row.to(tl.int64) * S.H + c, mask=c < S.H, other=0.0, eviction_policy=S.ONCE)
        tl.store(to + c, column, mask=c < S.H)


@triton.jit
def send_message_back(
    table, control, mine, home, peer, slot, begin, parts, valid, small, y, y_rows, row_weights, rows, token, me,
    slot_begin, call, S: tl.constexpr,
):  # fmt: skip
    """``parts`` parts from ``begin`` of the rows of message ``slot`` to rank ``peer``, whose block is at address
    ``home``; nothing unless ``valid``. Returns how many travel, as counted with part 0.
    """
    moved = (valid & (begin == 0)).to(tl.int32)
    if S.SUMS:
        address = home + S.O_ROWS + tl.cast(me * S.T + token, tl.int64) * S.ROW
        address = direct_or_staged(address, mine, peer, me, S.O_STAGED_ROWS, S.T, slot, S.ROW, S)
        flip = tl.full([], 0, tl.int32)
        if S.SMALL > 0:
            flip -= small.to(tl.int32)
            valid = valid & ((small == 0) | (token < S.SMALL))
            address = tl.where(small, row_at(home, me, token, S), address)
        to = tl.multiple_of(address.to(S.DTYPE_P), 16)
        if S.PARTS == 1:
            send_columns(to, flip, 0, valid, y, y_rows, row_weights, rows, S)
        else:
            for part in range(begin, begin + parts):
                send_columns(to, flip, part, valid, y, y_rows, row_weights, rows, S)
        if S.NODE < S.W:
            if (is_near(peer, me, S) == 0) & valid:
                word = mine + S.O_FLAG + tl.cast(me * S.T + slot, tl.int64) * 8
                put_row(table, control, mine, address, me * S.T + token, word, call, peer, S)
    else:
        q = tl.arange(0, S.KP)
        here = tl.where(valid, tl.load(rows + q, mask=q < S.K, other=_ABSENT), _ABSENT)
        kept = (here >= 0) & (here < y_rows)
        kept_at = (home + S.O_KEPT).to(U8) + token * S.K
        if S.NODE < S.W:
            tl.store(kept_at + q, kept.to(tl.uint8), mask=near_only(here != _ABSENT, peer, me, S))
            if (is_near(peer, me, S) == 0) & valid:
                comes = kept & (q >= slot_begin) & (q < slot_begin + S.COPIES)
                put_kept(table, control, mine, comes, peer, slot, me, call, S)
        else:
            tl.store(kept_at + q, kept.to(tl.uint8), mask=here != _ABSENT)
        moved *= tl.sum((kept & (q >= slot_begin) & (q < slot_begin + S.COPIES)).to(tl.int32), 0)
        for k in range(slot_begin, tl.minimum(slot_begin + S.COPIES, S.K)):
            row = tl.load(rows + k)
            if (row >= 0) & (row < y_rows):
                address = home + S.O_ROWS + tl.cast(token * S.COPIES + k - slot_begin, tl.int64) * S.ROW
                if S.BY_ROW:
                    address = direct_or_staged(address, mine, peer, me, S.O_STAGED_ROWS, 0, row, S.ROW, S)
                else:
                    address = direct_or_staged(address, mine, peer, me, S.O_STAGED_ROWS, S.T, slot, S.ROW, S)
                to = tl.multiple_of(address.to(S.DTYPE_P), 16)
                if S.PARTS == 1:
                    copy_columns(to, 0, y, row, S)
                else:
                    for part in range(begin, begin + parts):
                        copy_columns(to, part, y, row, S)
                if S.NODE < S.W:
                    if is_near(peer, me, S) == 0:
                        word = mine + S.O_ROW_FLAG + tl.cast((me * S.T + slot) * S.K + k, tl.int64) * 8
                        place = token * S.COPIES + k - slot_begin
                        put_row(table, control, mine, address, place, word, call, peer, S)
    return moved


@triton.jit
def dispatch_of(received, S: tl.constexpr):
    """The number of the dispatch whose ``received`` this is, 31 bits of it."""
    return tl.load(received + 2 * S.W + 1)


@triton.jit
def status_at(base, table, rank, me, S: tl.constexpr):
    """Where to store this rank's ``combine_status`` for ``rank``, whose block is at ``base``."""
    if S.NODE < S.W:
        at = base + S.O_STATUS + tl.cast(me, tl.int64) * 8
        return direct_or_staged(at, tl.load(table + me), rank, me, S.O_STAGED_STATUS, 1, 0, 8, S).to(I64)
    else:
        return (base + S.O_STATUS).to(I64) + me


@triton.jit
def put_heads(table, control, me, call, S: tl.constexpr):
    """Put ``combine_status``, which is stored, at the ranks of other nodes, and then its head."""
    mine = own_block(control, S)
    at = tl.cast(me, tl.int64) * 8
    fence(control)
    for d in range(S.W):
        if is_near(d, me, S) == 0:
            source = staged_at(mine, d, me, S.O_STAGED_STATUS, 1, 0, 8, S)
            put(table, mine + S.O_STATUS + at, source, 8, mine + S.O_HEAD + at, call, d, S)


@triton.jit
def raise_all_flags(table, control, me, call, S: tl.constexpr):
    """A refusing rank: nobody waits for its rows."""
    i = tl.arange(0, S.BLOCK)
    for d in range(S.W):
        home = tl.load(table + d)
        for c0 in range(0, S.T * S.PARTS, S.BLOCK):
            flags = (home + S.O_FLAG).to(I64) + me * S.T * S.PARTS + c0 + i
            publish(flags, near_only(c0 + i < S.T * S.PARTS, d, me, S), tl.zeros([S.BLOCK], tl.int64) + call)
        if S.NODE < S.W:
            if is_near(d, me, S) == 0:
                mine = own_block(control, S)
                none = tl.zeros([S.KP], tl.int32)
                for slot in range(S.T):
                    put_kept(table, control, mine, none, d, slot, me, call, S)


@triton.jit
def send_rows_home(
    table, control, y, row_weights, rows_of_message, message_token, received, me, home, lane, lanes, y_rows,
    slot_begin, spread, call, S: tl.constexpr,
):  # fmt: skip
    """Every ``lanes``-th message of rank ``home``, from the ``lane``-th: send its rows, and say so.

    Messages in PARTS: every ``lanes``-th share of one; ``spread``, a divisor of PARTS, programs share a message.
    """
    block = tl.load(table + home)
    mine = own_block(control, S)
    moved = tl.full([], 0, tl.int32)
    p = tl.arange(0, S.PP)
    flags = (block + S.O_FLAG).to(I64) + me * S.T * S.PARTS
    small = is_small(control, tl.load(received + home * 2 + 1), call, S)
    if S.PARTS == 1:
        for slot in range(lane, tl.load(received + home * 2), lanes):
            at = home * S.T + slot
            token = tl.load(message_token + at)
            valid = (token >= 0) & (token < S.T)
            if valid:
                rows = rows_of_message + at.to(tl.int64) * S.SLOTS
                moved += send_message_back(
                    table, control, mine, block, home, slot, 0, 1, valid, small, y, y_rows, row_weights, rows, token,
                    me, slot_begin, call, S,
                )  # fmt: skip
            elif S.NODE < S.W:
                if is_near(home, me, S) == 0:
                    put_kept(table, control, mine, tl.zeros([S.KP], tl.int32), home, slot, me, call, S)
            if small == 0:
                publish(flags + slot + p, near_only(p < 1, home, me, S), tl.zeros([S.PP], tl.int64) + call)
    else:
        parts = S.PARTS // spread
        item = lane
        more = item < S.T * spread
        while more:
            slot = item // spread
            begin = item % spread * parts
            at = home * S.T + slot
            # The number of messages is read beside the message, not before it, and there is no branch for a slot
            # without one: so the loads of row numbers wait for nothing.
            count = tl.load(received + home * 2)
            token = tl.load(message_token + at)
            rows = rows_of_message + at.to(tl.int64) * S.SLOTS
            there = slot < count
            valid = there & (token >= 0) & (token < S.T)
            moved += send_message_back(
                table, control, mine, block, home, slot, begin, parts, valid, small, y, tl.where(valid, y_rows, 0),
                row_weights, rows, tl.where(valid, token, 0), me, slot_begin, call, S,
            )  # fmt: skip
            if small == 0:
                shared = only(there, p < parts)
                publish(flags + (slot * S.PARTS + begin) + p, shared, tl.zeros([S.PP], tl.int64) + call)
            item += lanes
            more = item < count * spread
    if (home != me) & (moved > 0):
        tl.atomic_add(control + _BYTES, moved.to(tl.int64) * S.ROW, sem="relaxed", scope="gpu")


@triton.jit
def send_tokens_back(
    program, num_programs, table, record, control, y, row_weights, rows_of_message, message_token, received, me, y_rows,
    slot_begin, spread, status, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the expert role. ``received`` says whether the dispatch brought anything at all."""
    call = calls_made(control, _ROLE) + 1
    drained = glance(control, _PHASE, call, S)
    r = tl.arange(0, S.WP)
    mask = r < S.W
    failed = tl.load(received + 2 * S.W) | is_refused(control, call, slot_begin)
    if failed == 0:
        if program == 0:
            tell_drained(table, control, me, S)
        ok = wait_until_drained(drained, table, record, control, me, _PHASE, call, limit, S)
        if ok > 0:
            if program == 0:
                base = tl.load(table + r, mask=mask, other=0)
                word = tl.zeros([S.WP], tl.int64) + (status + 2 * S.OPTIONS)
                if S.NODE < S.W:
                    above = tl.where(status == 0, tl.load(received + 2 * r, mask=mask, other=0), S.T)
                else:
                    above = tl.zeros([S.WP], tl.int32) + dispatch_of(received, S)
                word += above.to(tl.int64) << 32
                tl.store(status_at(base, table, r, me, S), word, mask=mask)
                near = near_only(mask, r, me, S)
                publish((base + S.O_HEAD).to(I64) + me, near, tl.zeros([S.WP], tl.int64) + call)
                if S.NODE < S.W:
                    put_heads(table, control, me, call, S)
                if status != 0:
                    raise_all_flags(table, control, me, call, S)
            # Of few tokens all but the first send rows, as what it publishes has to arrive before it goes on.
            apart: tl.constexpr = 1 if S.PARTS > 1 else 0
            others = tl.maximum(num_programs - apart, 1)
            number = program - tl.minimum(num_programs - 1, apart)
            if (status == 0) & (number >= 0):
                # One home rank for each program where they suffice; no two ranks begin with the same one.
                for i in range(number % S.W, S.W, others):
                    send_rows_home(
                        table, control, y, row_weights, rows_of_message, message_token, received, me, (i + me) % S.W,
                        number // S.W, tl.cdiv(tl.maximum(others - i, 1), S.W), y_rows, slot_begin, spread, call, S,
                    )  # fmt: skip
            count_arrival(control, _ROLE, program, num_programs, "relaxed")
