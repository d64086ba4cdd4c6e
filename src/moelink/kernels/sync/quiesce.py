"""Waiting for what ranks of other nodes have put here, also where nobody will read it.

Before this rank says that it drained a call, every signal that a rank of another node puts here in that call must have
arrived (``kernels.sync.internode`` says why). In an ordinary call it waits for them anyway. It does so here in one that
any rank refused or for which ranks chose different options, as then it reads nothing, or more comes than it asked for.

Example: W = 4, NODE = 2, rank 0 refuses a dispatch. Counts say that rank 2 sends 3 messages and rank 3 none: it waits
for the flags of slots 0, 1, 2 of rank 2, and then answers with "drained".
"""

import triton
import triton.language as tl

from moelink.kernels.sync.internode import near_only
from moelink.kernels.sync.signals import I64, U8, settle, wait_all
from moelink.memory.protocol import OPTIONS_BY_ROW, PHASE_COMBINE, PHASE_DISPATCH

_DISPATCH = tl.constexpr(PHASE_DISPATCH)
_COMBINE = tl.constexpr(PHASE_COMBINE)
_BY_ROW = tl.constexpr(OPTIONS_BY_ROW)
_AT_ONCE = tl.constexpr(64)


@triton.jit
def wait_for_far(mine, offset, mask, me, call, limit, S: tl.constexpr):
    """Wait for the words, one a rank in the region at ``offset``, of those ranks under ``mask`` that are of other
    nodes. Returns (arrived, the rank furthest behind, its word)."""
    r = tl.arange(0, S.WP)
    far = mask & (r < S.W) & (near_only(r < S.W, r, me, S) == 0)
    return wait_all((mine + offset).to(I64) + r, far, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK)


@triton.jit
def _wait_for_flags(table, record, control, me, offset, counts, phase, call, limit, S: tl.constexpr):
    """Wait for the first ``counts`` [WP] flags of each rank, in the [W, T] region at ``offset``."""
    mine = tl.load(table + me)
    r = tl.arange(0, S.WP)
    i = tl.arange(0, _AT_ONCE)
    ok = tl.full([], 1, tl.int32)
    for source in range(S.W):
        count = tl.sum(tl.where(r == source, counts, 0), 0)
        for t0 in range(0, count, _AT_ONCE):
            if ok > 0:
                flags = (mine + offset).to(I64) + source * S.T + t0 + i
                poison = (mine + S.O_POISON).to(I64)
                ok, _, got = wait_all(flags, t0 + i < count, call, poison, limit, S.CLOCK)
                settle(ok, table, record, control, me, source, phase, call, call, got, S)
    return ok


@triton.jit
def swallow_messages(table, record, control, me, messages, programs, call, limit, S: tl.constexpr):
    """All that other nodes send in this dispatch, by the ``messages``, ``programs`` [WP] of their counts, is here.
    Returns 1, or 0 or -1 after an error."""
    mine = tl.load(table + me)
    ok, source, got = wait_for_far(mine, S.O_FIRSTS_FLAG, programs > 0, me, call, limit, S)
    settle(ok, table, record, control, me, source, _DISPATCH, call, call, got, S)
    if ok > 0:
        r = tl.arange(0, S.WP)
        messages = tl.where(near_only(r < S.W, r, me, S), 0, messages)
        ok = _wait_for_flags(table, record, control, me, S.O_MESSAGE_FLAG, messages, _DISPATCH, call, limit, S)
    return ok


@triton.jit
def swallow_rows(table, record, control, me, call, limit, S: tl.constexpr):
    """All that is sent back in this combine, by what the heads tell, is here: sums, or rows, which from other nodes
    have a flag of their own each. Returns 1, or 0 or -1 after an error.

    This node's ranks count, too: without sums another rank may store the same rows in the next call.
    """
    mine = tl.load(table + me)
    r = tl.arange(0, S.WP)
    mask = r < S.W
    ok, source, got = wait_all((mine + S.O_HEAD).to(I64) + r, mask, call, (mine + S.O_POISON).to(I64), limit, S.CLOCK)
    settle(ok, table, record, control, me, source, _COMBINE, call, call, got, S)
    if ok > 0:
        status = tl.load((mine + S.O_STATUS).to(I64) + r, mask=mask, other=0)
        messages = tl.minimum(tl.maximum(status >> 32, 0), S.T).to(tl.int32)
        ok = _wait_for_flags(table, record, control, me, S.O_FLAG, messages, _COMBINE, call, limit, S)
        q = tl.arange(0, S.KP)
        far = near_only(mask, r, me, S) == 0
        by_row = tl.where(far & ((status & 0xFFFFFFFF) == 2 * _BY_ROW), messages, 0)
        for source in range(S.W):
            for slot in range(0, tl.sum(tl.where(r == source, by_row, 0), 0)):
                if ok > 0:
                    message = source * S.T + slot
                    kept = tl.load((mine + S.O_FAR_KEPT).to(U8) + message * S.KB + q, mask=q < S.K, other=0)
                    flags = (mine + S.O_ROW_FLAG).to(I64) + message * S.K + q
                    poison = (mine + S.O_POISON).to(I64)
                    ok, _, got = wait_all(flags, kept != 0, call, poison, limit, S.CLOCK)
                    settle(ok, table, record, control, me, source, _COMBINE, call, call, got, S)
    return ok


@triton.jit
def wait_for_choices(table, record, control, me, call, limit, S: tl.constexpr):
    """Wait for what ranks of other nodes chose. Returns (1, or 0 or -1 after an error; [WP] true but for those of them
    whose rows do not come, as they send sums or refused the call)."""
    mine = tl.load(table + me)
    r = tl.arange(0, S.WP)
    ok, source, got = wait_for_far(mine, S.O_HEAD, r < S.W, me, call, limit, S)
    settle(ok, table, record, control, me, source, _COMBINE, call, call, got, S)
    status = tl.load((mine + S.O_STATUS).to(I64) + r, mask=r < S.W, other=0)
    return ok, near_only(r < S.W, r, me, S) | ((status & 0xFFFFFFFF) == 2 * _BY_ROW)
