"""Routing on the device: who owns an expert, and what the tokens before a given one need.

The device twin of :class:`moelink.routing.ExpertMap`; one table there, one here, compared by a test.

Example: 7 experts on 3 ranks (PER 2, EXTRA 1). Ids 0, 3, 6, -1, 9 belong to ranks 0, 1, 2, -1, -1.
"""

import triton
import triton.language as tl


@triton.jit
def owner_of(expert, first, num_local, S: tl.constexpr):
    """Rank that owns each expert id, -1 for -1. In allreduce mode: 0 for this rank's experts, -1 for all others."""
    if S.ALLREDUCE:
        mine = (expert >= first) & (expert < first + num_local)
        return tl.where(mine, 0, -1)
    else:
        boundary = S.EXTRA * (S.PER + 1)
        low = expert // (S.PER + 1)
        high = S.EXTRA + (expert - boundary) // (S.PER if S.PER > 0 else 1)
        rank = tl.where(expert < boundary, low, high)
        return tl.where(expert >= 0, rank, -1)


@triton.jit
def first_of(rank, first, S: tl.constexpr):
    """First expert of each rank. In allreduce mode: of this one."""
    if S.ALLREDUCE:
        return rank * 0 + first
    else:
        return rank * S.PER + tl.minimum(rank, S.EXTRA)


@triton.jit
def experts_at(ids, offsets, mask, S: tl.constexpr):
    """Expert ids (int32 or int64 in memory) as int32: -1 where masked or outside [0, E)."""
    raw = tl.load(ids + offsets, mask=mask, other=-1).to(tl.int64)
    return tl.where((raw >= 0) & (raw < S.E), raw, -1).to(tl.int32)


@triton.jit
def ranks_of(owner, t, end, me, shared_begin, shared_end, S: tl.constexpr):
    """Ranks [N, WP] that tokens ``t`` [N] with these ``owner`` [N, KP] go to, as 0 or 1; ``t`` < ``end`` only.

    Example: owners [[0, 1], [0, 0], [-1, -1]] of two ranks: [[1, 1], [1, 0], [0, 0]].
    """
    r = tl.arange(0, S.WP)
    present = tl.max((owner[:, :, None] == r[None, None, :]).to(tl.int32), 1)
    if S.SHARED:
        own = (t >= shared_begin) & (t < tl.minimum(shared_end, end))
        present = tl.maximum(present, (own[:, None] & (r[None, :] == me)).to(tl.int32))
    return present


@triton.jit
def count_pairs(expert, owner, N: tl.constexpr, S: tl.constexpr):
    """Pairs per expert [EP] among N slots: ``expert`` and ``owner`` of any shape; an owner of -1 counts nowhere.

    Without a mask: Triton 3.6 reorders what is reshaped for a histogram, and not the mask with it.
    """
    bins = tl.reshape(tl.where(owner >= 0, expert, 0), (N,))
    nowhere = tl.sum(tl.reshape((owner < 0).to(tl.int32), (N,)), 0)
    return tl.histogram(bins, S.EP) - tl.where(tl.arange(0, S.EP) == 0, nowhere, 0)


@triton.jit
def tally(ids, begin, end, me, first, num_local, shared_begin, shared_end, S: tl.constexpr):
    """What tokens [begin, end) need: pairs per expert [EP], messages per rank [WP], and ids outside [-1, E).

    Example: E = 4 on 2 ranks, ids [[0, 3], [1, 0]]: pairs [2, 1, 0, 1, 0...], messages [2, 1].
    """
    t = tl.arange(0, S.TB)
    k = tl.arange(0, S.KP)
    pairs = tl.zeros([S.EP], tl.int32)
    messages = tl.zeros([S.TB, S.WP], tl.int32)
    invalid = tl.zeros([S.TB], tl.int32)
    for t0 in range(begin, end, S.TB):
        mask = (t0 + t < end)[:, None] & (k < S.K)[None, :]
        raw = tl.load(ids + (t0 + t)[:, None] * S.K + k[None, :], mask=mask, other=-1).to(tl.int64)
        expert = tl.where((raw >= 0) & (raw < S.E), raw, -1).to(tl.int32)
        owner = owner_of(expert, first, num_local, S)
        pairs += count_pairs(expert, owner, S.TB * S.KP, S)
        messages += ranks_of(owner, t0 + t, end, me, shared_begin, shared_end, S)
        invalid += tl.sum(((raw < -1) | (raw >= S.E)).to(tl.int32), 1)
    return pairs, tl.sum(messages, 0), tl.sum(invalid, 0)
