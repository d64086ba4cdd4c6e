"""Combine, expert role: ``send_tokens_back``.

Each program takes chunks of the messages that dispatch brought: (home rank d, chunk c of that rank's messages), chunks
ascending, home ranks starting with the own one. For every message of a chunk it stores, in row ``me`` of ``rows`` at d,
at the message's *token*, the sum of the rows that the message filled here (or, without pre-reduction, each of them at
(token, slot)). Then it publishes ``combine_flag[c] = call`` at d: a release after the rows it speaks for.

Before its first store a program waits until every home rank has drained the previous call; nothing else is waited for.
Program 0 also stores ``combine_status`` and publishes ``combine_head = call`` everywhere, so that a rank hears of a
refusal even when no rows were due to it. A refusing rank sends no rows but raises all flags.

Sums: accumulator +0, slots ascending, product rounded before it is added (no fused multiply-add), one rounding to the
row's dtype. A slot of another rank, a row dropped for ``capacity`` and a row number out of range contribute nothing.

Example: topk 3, a message with rows [4, -1, 9] and weights w[4] = .5, w[9] = 2: the row sent is .5 y[4] + 2 y[9].
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import round_to
from moelink.kernels.send import wait_until_drained
from moelink.kernels.signals import I64, arrive, is_poisoned, publish
from moelink.protocol import COMBINE_BYTES, COMBINE_SENT, DONE, PHASE_COMBINE, ROW_ABSENT

_PHASE = tl.constexpr(PHASE_COMBINE)
_ROLE = tl.constexpr(COMBINE_SENT)
_DONE = tl.constexpr(DONE)
_ABSENT = tl.constexpr(ROW_ABSENT)
_BYTES = tl.constexpr(COMBINE_BYTES)


@triton.jit
def chunk_of(num_tokens, S: tl.constexpr):
    """Messages of a chunk for a home rank with ``num_tokens`` tokens: sender and home compute the same.

    Example: C = 4 flags: 3 tokens give chunks of 1, 9 tokens of 3.
    """
    return tl.maximum(tl.cdiv(num_tokens, S.C), 1)


@triton.jit
def weighted_sum(y, y_rows, row_weights, home_weights, rows, c, S: tl.constexpr):
    """Sum over slots of the rows that ``rows`` (a pointer to SLOTS row numbers) names, at columns ``c``, in ACC.

    Weights are those of the rows, or (``home_weights``: a pointer to SLOTS of them) of the token's slots.
    """
    total = tl.zeros([S.BLOCK], S.ACC)
    for k in tl.static_range(S.SLOTS):
        row = tl.load(rows + k)
        keep = (row >= 0) & (row < y_rows)
        part = tl.load(y + row.to(tl.int64) * S.H + c, mask=keep & (c < S.H), other=0.0).to(S.ACC)
        if S.ROW_WEIGHTS:
            part = part * tl.load(row_weights + row, mask=keep, other=0.0)
        elif S.HOME_WEIGHTS:
            part = part * tl.load(home_weights + k, mask=keep, other=0.0)
        total += part
    return total


@triton.jit
def send_message_back(home, y, y_rows, row_weights, rows, token, me, slot_begin, S: tl.constexpr):
    """The rows of one message to the block at address ``home``."""
    for c0 in tl.static_range(0, S.H, S.BLOCK):
        c = c0 + tl.arange(0, S.BLOCK)
        if S.SUMS:
            total = weighted_sum(y, y_rows, row_weights, row_weights, rows, c, S)
            address = home + S.O_ROWS + tl.cast(me * S.T + token, tl.int64) * S.ROW
            tl.store(tl.multiple_of(address.to(S.DTYPE_P), 16) + c, round_to(total, S.DTYPE, S.NATIVE), mask=c < S.H)
        else:
            for k in range(slot_begin, tl.minimum(slot_begin + S.COPIES, S.K)):
                row = tl.load(rows + k)
                keep = (row >= 0) & (row < y_rows)
                part = tl.load(y + row.to(tl.int64) * S.H + c, mask=keep & (c < S.H), other=0.0)
                address = home + S.O_ROWS + tl.cast(token * S.COPIES + k - slot_begin, tl.int64) * S.ROW
                to = tl.multiple_of(address.to(S.DTYPE_P), 16)
                tl.store(to + c, part, mask=(c < S.H) & (row != _ABSENT))


@triton.jit
def raise_all_flags(table, me, call, S: tl.constexpr):
    """A refusing rank: nobody waits for its rows."""
    i = tl.arange(0, S.BLOCK)
    for d in range(S.W):
        home = tl.load(table + d)
        for c0 in range(0, S.C, S.BLOCK):
            flags = (home + S.O_FLAG).to(I64) + me * S.C + c0 + i
            publish(flags, c0 + i < S.C, tl.zeros([S.BLOCK], tl.int64) + call)


@triton.jit
def send_tokens_back(
    table, record, control, y, row_weights, rows_of_message, message_token, received, me, y_rows, slot_begin, status,
    program, num_programs, limit, S: tl.constexpr,
):  # fmt: skip
    """Program ``program`` of the expert role. ``received`` says whether the dispatch brought anything at all."""
    call = tl.load(control + _ROLE) + 1
    r = tl.arange(0, S.WP)
    mask = r < S.W
    if (is_poisoned(table, record, control, me, S) == 0) & (tl.load(received + 2 * S.W) == 0):
        ok = wait_until_drained(table, record, control, me, _PHASE, call, S.O_DRAINED, limit, S)
        if ok > 0:
            if program == 0:
                base = tl.load(table + r, mask=mask, other=0)
                word = tl.zeros([S.WP], tl.int64) + (status + 2 * S.OPTIONS)
                tl.store((base + S.O_STATUS).to(I64) + me, word, mask=mask)
                publish((base + S.O_HEAD).to(I64) + me, mask, tl.zeros([S.WP], tl.int64) + call)
                if status != 0:
                    raise_all_flags(table, me, call, S)
            if status == 0:
                messages = tl.load(received + r * 2, mask=mask, other=0)
                tokens = tl.load(received + r * 2 + 1, mask=mask, other=0)
                chunk = chunk_of(tokens, S)
                steps = tl.max(tl.cdiv(messages, chunk), 0)
                for i in range(program, steps * S.W, num_programs):
                    home = (i + me) % S.W
                    here = r == home
                    n = tl.sum(tl.where(here, messages, 0), 0)
                    size = tl.sum(tl.where(here, chunk, 0), 0)
                    c = i // S.W
                    if c * size < n:
                        block = tl.load(table + home)
                        moved = tl.full([], 0, tl.int64)
                        for slot in range(c * size, tl.minimum((c + 1) * size, n)):
                            at = home * S.T + slot
                            token = tl.load(message_token + at)
                            if (token >= 0) & (token < S.T):
                                rows = rows_of_message + at.to(tl.int64) * S.SLOTS
                                send_message_back(block, y, y_rows, row_weights, rows, token, me, slot_begin, S)
                                if S.SUMS:
                                    moved += 1
                                else:
                                    k = tl.arange(0, S.KP)
                                    some = (k >= slot_begin) & (k < slot_begin + S.COPIES) & (k < S.K)
                                    moved += tl.sum(
                                        (tl.load(rows + k, mask=some, other=_ABSENT) != _ABSENT).to(tl.int64), 0
                                    )
                        if home != me:
                            tl.atomic_add(control + _BYTES, moved * S.ROW, sem="relaxed", scope="gpu")
                        flags = (block + S.O_FLAG).to(I64) + me * S.C + c + r * 0
                        publish(flags, r == 0, tl.zeros([S.WP], tl.int64) + call)
            if arrive(control + _DONE + _ROLE, num_programs) > 0:
                tl.atomic_xchg(control + _ROLE, call, sem="relaxed", scope="sys")
