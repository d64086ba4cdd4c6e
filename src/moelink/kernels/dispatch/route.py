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
def sums_before(counts, SCAN: tl.constexpr):
    """For each row of ``counts`` [N, M] the sum of the rows before it. With SCAN by a scan, which is faster; but for
    some layouts that it chooses for so few rows Triton 3.6 has none.

    Example: [[1, 0], [1, 1], [0, 1]]: [[0, 0], [1, 0], [2, 1]].
    """
    if SCAN:
        return tl.cumsum(counts, 0) - counts
    else:
        i = tl.arange(0, counts.shape[0])
        sums = counts * 0
        for j in tl.static_range(counts.shape[0] - 1):
            row = tl.sum(tl.where((i == j)[:, None], counts, 0), 0)
            sums += tl.where((i > j)[:, None], row[None, :], 0)
        return sums


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _many_ranks_of(owner, t, end, me, shared_begin, shared_end, S: tl.constexpr):
    """:func:`ranks_of` for many tokens: a bit for each rank, as long as an integer has so many, which takes the same
    time for two ranks and for eight."""
    if S.W <= 32:
        bits = tl.reduce(tl.where(owner >= 0, 1 << owner, 0), 1, _either)
        if S.SHARED:
            own = (t >= shared_begin) & (t < tl.minimum(shared_end, end))
            bits |= own.to(tl.int32) << me
        return (bits[:, None] >> tl.arange(0, S.WP)[None, :]) & 1
    else:
        return ranks_of(owner, t, end, me, shared_begin, shared_end, S)


@triton.jit
def count_pairs(expert, owner, N: tl.constexpr, S: tl.constexpr):
    """Pairs per expert [EP] among N slots: ``expert`` and ``owner`` of any shape; an owner of -1 counts nowhere.

    Without a mask: Triton 3.6 reorders what is reshaped for a histogram, and not the mask with it.
    """
    bins = tl.reshape(tl.where(owner >= 0, expert, 0), (N,))
    nowhere = tl.sum(tl.reshape((owner < 0).to(tl.int32), (N,)), 0)
    return tl.histogram(bins, S.EP) - tl.where(tl.arange(0, S.EP) == 0, nowhere, 0)


@triton.jit
def _ids_at(ids, t, end, S: tl.constexpr):
    """Ids [N, KP] of tokens ``t`` [N] as they are, int64; -1 from ``end`` on."""
    k = tl.arange(0, S.KP)
    mask = (t < end)[:, None] & (k < S.K)[None, :]
    return tl.load(ids + t[:, None] * S.K + k[None, :], mask=mask, other=-1).to(tl.int64)


@triton.jit
def tally(ids, begin, end, me, first, num_local, shared_begin, shared_end, TB: tl.constexpr, S: tl.constexpr):
    """What tokens [begin, end) need: pairs per expert [EP], messages per rank [WP], and ids outside [-1, E). ``TB``
    tokens are counted at a time.

    Example: E = 4 on 2 ranks, ids [[0, 3], [1, 0]]: pairs [2, 1, 0, 1, 0...], messages [2, 1].
    """
    t = tl.arange(0, TB)
    pairs = tl.zeros([S.EP], tl.int32)
    messages = tl.zeros([TB, S.WP], tl.int32)
    invalid = tl.zeros([TB], tl.int32)
    raw = _ids_at(ids, begin + t, end, S)
    for t0 in range(begin, end, TB):
        following = _ids_at(ids, t0 + TB + t, end, S)
        expert = tl.where((raw >= 0) & (raw < S.E), raw, -1).to(tl.int32)
        owner = owner_of(expert, first, num_local, S)
        pairs += count_pairs(expert, owner, TB * S.KP, S)
        messages += ranks_of(owner, t0 + t, end, me, shared_begin, shared_end, S)
        invalid += tl.sum(((raw < -1) | (raw >= S.E)).to(tl.int32), 1)
        raw = following
    return pairs, tl.sum(messages, 0), tl.sum(invalid, 0)


@triton.jit
def tally_all(ids, end, me, first, num_local, shared_begin, shared_end, TB: tl.constexpr, S: tl.constexpr):
    """:func:`tally` of all the tokens [0, end), for programs that count others' tokens: ids are taken in one row, as
    rearranging them takes longer than counting, but in the loop of a sender its own tally's form is faster.

    Example: E = 4 on 2 ranks, ids [[0, 3], [1, 0]]: pairs [2, 1, 0, 1, 0...], messages [2, 1].
    """
    i = tl.arange(0, TB * S.KP)
    t = tl.arange(0, TB)
    pairs = tl.zeros([S.EP], tl.int32)
    nowhere = tl.zeros([TB * S.KP], tl.int32)
    invalid = tl.zeros([TB * S.KP], tl.int32)
    messages = tl.zeros([TB, S.WP], tl.int32)
    for t0 in range(0, end, TB):
        token, k = t0 + i // S.KP, i % S.KP
        raw = tl.load(ids + token * S.K + k, mask=(token < end) & (k < S.K), other=-1).to(tl.int64)
        expert = tl.where((raw >= 0) & (raw < S.E), raw, -1).to(tl.int32)
        owner = owner_of(expert, first, num_local, S)
        pairs += tl.histogram(tl.where(owner >= 0, expert, 0), S.EP)
        nowhere += (owner < 0).to(tl.int32)
        invalid += ((raw < -1) | (raw >= S.E)).to(tl.int32)
        goes = _many_ranks_of(tl.reshape(owner, (TB, S.KP)), t0 + t, end, me, shared_begin, shared_end, S)
        messages += goes
    # A histogram has no mask (see count_pairs): what is nowhere was counted as expert 0.
    pairs -= tl.where(tl.arange(0, S.EP) == 0, tl.sum(nowhere, 0), 0)
    return pairs, tl.sum(messages, 0), tl.sum(invalid, 0)


@triton.jit
def count_before(ids, token, expert, me, first, num_local, shared_begin, shared_end, S: tl.constexpr):
    """What is before each slot of ``token``, whose ids are ``expert`` [KP]: earlier pairs (token, then slot) of the
    same expert [KP], and messages of earlier tokens to each rank [WP].

    Example: E = 4 on 2 ranks, ids [[0, 3], [1, 0]], token 1: pairs [0, 1], messages [1, 1].
    """
    N: tl.constexpr = S.TC
    t = tl.arange(0, N)
    k = tl.arange(0, S.KP)
    same = tl.zeros([N * S.KP, S.KP], tl.int32)
    messages = tl.zeros([N, S.WP], tl.int32)
    for t0 in range(0, token, N):
        raw = _ids_at(ids, t0 + t, token, S)
        other = tl.where((raw >= 0) & (raw < S.E), raw, -1).to(tl.int32)
        same += (tl.reshape(other, (N * S.KP,))[:, None] == expert[None, :]).to(tl.int32)
        owner = owner_of(other, first, num_local, S)
        messages += _many_ranks_of(owner, t0 + t, token, me, shared_begin, shared_end, S)
    twice = (expert[None, :] == expert[:, None]) & (k[None, :] < k[:, None])
    before = tl.sum(same, 0) + tl.sum(twice.to(tl.int32), 1)
    return tl.where(expert >= 0, before, 0), tl.sum(messages, 0)


@triton.jit
def routes_of(ids, token, k, end, me, first, num_local, shared_begin, shared_end, S: tl.constexpr):
    """Of tokens ``token`` [BATCH], those below ``end``: experts and their owners [BATCH, KP], and to which ranks they
    go [BATCH, WP]. ``k`` [KP]: slots."""
    inside = (token < end)[:, None] & (k < S.K)[None, :]
    expert = experts_at(ids, token[:, None] * S.K + k[None, :], inside, S)
    owner = owner_of(expert, first, num_local, S)
    return expert, owner, ranks_of(owner, token, end, me, shared_begin, shared_end, S)


@triton.jit
def positions_of(pairs, expert, owner, i, S: tl.constexpr):
    """Positions [BATCH, KP] of a batch's pairs, which are numbered ``i`` [BATCH x KP], with ``pairs`` [EP] of each
    expert before it; 0 for pairs that are none."""
    flat = tl.reshape(tl.where(owner >= 0, expert, -1), (S.BATCH * S.KP,))
    earlier = (flat[None, :] == flat[:, None]) & (i[None, :] < i[:, None])
    position = tl.gather(pairs, tl.maximum(flat, 0), 0) + tl.sum(earlier.to(tl.int32), 1)
    return tl.reshape(tl.where(flat >= 0, position, 0), (S.BATCH, S.KP))
