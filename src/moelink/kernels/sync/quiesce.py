"""Wait until every inter-node put of this call has arrived, read or not.

Before this rank grants credit for a call, every signal that a rank of another node puts here in that call must have
arrived (``kernels.nodes.internode`` says why). In an ordinary call this rank waits for these signals anyway. In a call
that a rank refused, or that ranks make with different options or over different dispatches, it waits here, because then
it reads nothing, or more comes than it asked for.

On one node a rank that refuses waits for nobody, because each peer stores for one call after the other. Instead the
ranks that sent it rows in a combine wait until these have arrived (:func:`wait_until_sent`). Combine's heads say how
many messages to wait for, and which dispatch's rows go home (:func:`odd_dispatch`). A rank that sends home rows of
another dispatch than this rank awaits, a mismatched rank, fills other slots. So this rank waits for the rows that do
come, and ends its own waits for those that do not (:func:`end_waits_for_mismatched`).

Example: W = 4, S.NODE_SIZE = 2, rank 0 refuses a dispatch. Counts say that rank 2 sends 3 messages and rank 3 none:
rank 0 waits for the flags of slots 0, 1, 2 of rank 2, and then grants credit.

Example: ranks 0 and 1 combine dispatch 5, rank 2 dispatch 6, of which 2 messages came from rank 0. Rank 0 waits for the
flags of slots 0 and 1 of rank 2, and then raises all flags of rank 2 in its own block.
"""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import intra_node_only, is_intra_node
from moelink.kernels.nodes.levels import forwarder_of, in_one_level, is_peer, lacks_relay, node_number, peer_of
from moelink.kernels.numeric import only
from moelink.kernels.sync.lamport_slots import has_no_flags, is_small, stand_in
from moelink.kernels.sync.signals import (
    I64,
    OK,
    U8,
    UNFINISHED,
    check_timeout,
    clock,
    first_mismatched,
    odd_one_out,
    own_block,
    publish,
    report_failure,
    wait_all,
)
from moelink.memory.protocol import OPTIONS_BY_ROW, PHASE_COMBINE, PHASE_DISPATCH

_DISPATCH = tl.constexpr(PHASE_DISPATCH)
_COMBINE = tl.constexpr(PHASE_COMBINE)
_BY_ROW = tl.constexpr(OPTIONS_BY_ROW)
_AT_ONCE = tl.constexpr(64)
_SENT_AT_ONCE = tl.constexpr(128)


@triton.jit
def awaits_counts(status, S: tl.constexpr):
    """Return whether this rank waits for counts: if it takes part, and between nodes even if it refuses."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        return status >= 0
    else:
        return status == 0


@triton.jit
def wait_for_inter_node(mine, offset, mask, ctx, S: tl.constexpr):
    """Wait for the words of the ranks under ``mask`` that are of other nodes, one a rank in the region at ``offset``.

    Returns (arrived, the rank furthest behind, its word); on one node (1, 0, 0).
    """
    if S.NODE_SIZE < S.WORLD_SIZE:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        far = mask & (r < S.WORLD_SIZE) & (intra_node_only(r < S.WORLD_SIZE, r, ctx.me, S) == 0)
        poison = (mine + S.OFFSET_POISON).to(I64)
        return wait_all((mine + offset).to(I64) + r, far, ctx.call, poison, ctx.limit, S.CLOCK)
    else:
        return tl.full([], 1, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)


@triton.jit
def first_failure(before, missing_before, arrived, missing, S: tl.constexpr):
    """Return (arrived, rank that is missing) of a wait, or where it came after one for other nodes, ``before`` and
    ``missing_before``, which failed, of that one."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        missing = tl.where(before > 0, missing, missing_before)
        arrived = tl.minimum(arrived, before)
    return arrived, missing


@triton.jit
def _wait_for_flags(ctx, offset, counts, phase, parts: tl.constexpr, S: tl.constexpr):
    """Wait for the first ``counts`` [ranks] flags of each rank, in the [W, T * parts] region at ``offset``."""
    mine = tl.load(ctx.table + ctx.me)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    i = tl.arange(0, _AT_ONCE)
    ok = tl.full([], 1, tl.int32)
    for source in range(S.WORLD_SIZE):
        count = tl.sum(tl.where(r == source, counts, 0), 0)
        for t0 in range(0, count, _AT_ONCE):
            if ok > 0:
                flags = (mine + offset).to(I64) + source * S.MAX_TOKENS * parts + t0 + i
                poison = (mine + S.OFFSET_POISON).to(I64)
                ok, _, got = wait_all(flags, t0 + i < count, ctx.call, poison, ctx.limit, S.CLOCK)
                late = source
                if phase == _DISPATCH:
                    late = forwarder_of(ctx.control, source, ctx.me, S)
                report_failure(ok, ctx, late, phase, ctx.call, got, S)
    return ok


@triton.jit
def quiesce_dispatch(ctx, messages, programs, S: tl.constexpr):
    """Wait for all that other nodes send in this dispatch, by ``messages`` and ``programs`` [ranks] of their counts.

    Returns OK, TIMED_OUT or POISONED.
    """
    mine = tl.load(ctx.table + ctx.me)
    ok, source, got = wait_for_inter_node(mine, S.OFFSET_FIRSTS_FLAG, programs > 0, ctx, S)
    report_failure(ok, ctx, source, _DISPATCH, ctx.call, got, S)
    if ok > 0:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        messages = tl.where(intra_node_only(r < S.WORLD_SIZE, r, ctx.me, S), 0, messages)
        ok = _wait_for_flags(ctx, S.OFFSET_MESSAGE_FLAG, messages, _DISPATCH, 1, S)
    return ok


@triton.jit
def beside_status(received, control, me, call, status, S: tl.constexpr):
    """Return what ``combine_status`` says to each rank [ranks] besides the refusal and the options, which are below 8.

    The upper half is the number of the dispatch whose rows go home, for :func:`odd_dispatch`. Of the lower half bit 3
    says whether the rows go without flags, and the bits above it are how many messages' rows go there (of a rank that
    refuses: flags that it raises), for :func:`end_waits_for_mismatched` and :func:`quiesce_combine`. With two levels a
    peer on another node is told how many rows of this node come, and ranks of other nodes those that go past a masked
    relay.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = r < S.WORLD_SIZE
    if S.TWO_LEVEL:
        # To a peer, how many rows of this node come; to other ranks of other nodes none, but past a masked relay.
        peer = is_peer(r, me, S)
        word = tl.where(peer, 2 * (S.WORLD_SIZE + 1) + node_number(r // S.NODE_SIZE, me, S), 2 * r)
        rows_come = peer | is_intra_node(r, me, S) | lacks_relay(control, r, me, S)
        messages = tl.load(received + word, mask=only(status == 0, mask), other=0)
        messages = tl.where(rows_come, tl.where(status == 0, messages, S.MAX_TOKENS), 0)
    else:
        messages = tl.load(received + 2 * r, mask=mask, other=0)
        messages = tl.where(status == 0, messages, S.MAX_TOKENS)
    small = is_small(control, tl.load(received + 2 * r + 1, mask=mask, other=0), call, S)
    upper = tl.zeros([S.WORLD_SIZE_POW2], tl.int64) + _dispatch_of(received, S)
    return (upper << 32) + messages.to(tl.int64) * 16 + small.to(tl.int64) * 8


@triton.jit
def _messages_of(heads, S: tl.constexpr):
    """Return how many messages' rows come by ``heads``, words of combine_status [ranks]. It need not be true."""
    return tl.minimum((heads & 0xFFFFFFFF) >> 4, S.MAX_TOKENS).to(tl.int32)


@triton.jit
def other_dispatches(heads, received, S: tl.constexpr):
    """Return which of ``heads``, words of combine_status [ranks], name another dispatch than ``received`` does. Those
    of masked ranks, below 0, name none."""
    return (heads >= 0) & ((heads >> 32).to(tl.int32) != _dispatch_of(received, S))


@triton.jit
def odd_dispatch(heads, received, S: tl.constexpr):
    """Return the rank to blame if ``heads`` name other dispatches than the one that ``received`` is of, or -1."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = (r < S.WORLD_SIZE) & (heads >= 0)
    beside = (heads >> 32).to(tl.int32)
    odd = odd_one_out(beside, mask, _dispatch_of(received, S))
    if odd >= 0:  # of three dispatches or more, all ranks name the same one
        odd = first_mismatched(beside, mask)
    return odd


@triton.jit
def _forget_kept(mine, mismatched, S: tl.constexpr):
    """Let no rows of ``mismatched`` [ranks] be awaited that have flags of their own, as those of other nodes have."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    i = tl.arange(0, _AT_ONCE)
    count: tl.constexpr = S.MAX_TOKENS * S.KEPT_BYTES
    for source in range(S.WORLD_SIZE):
        is_mismatched = tl.max((mismatched & (r == source)).to(tl.int32), 0)
        kept = (mine + S.OFFSET_INTER_NODE_KEPT).to(U8) + source * count
        for c0 in range(0, tl.where(is_mismatched > 0, count, 0), _AT_ONCE):
            tl.store(kept + c0 + i, (i * 0).to(tl.uint8), mask=c0 + i < count)


@triton.jit
def _raise_node_flags(ctx, mine, mismatched, S: tl.constexpr):
    """Raise the flags of the rows of all nodes whose collector for this rank is one of ``mismatched`` [ranks]."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    i = tl.arange(0, _AT_ONCE)
    for number in range(S.NODES - 1):
        is_mismatched = tl.max((mismatched & (r == peer_of(number, ctx.me, S))).to(tl.int32), 0)
        flags = (mine + S.OFFSET_NODE_FLAG).to(I64) + number * S.MAX_TOKENS
        for c0 in range(0, tl.where(is_mismatched > 0, S.MAX_TOKENS, 0), _AT_ONCE):
            publish(flags + c0 + i, c0 + i < S.MAX_TOKENS, ctx.call + i * 0)


@triton.jit
def _wait_for_node_rows(ctx, mine, heads, S: tl.constexpr):
    """Wait until as many rows of other nodes have arrived as the ``heads`` [ranks] of their collectors say, of any
    tokens. Returns OK, TIMED_OUT or POISONED."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    i = tl.arange(0, _AT_ONCE)
    poison = (mine + S.OFFSET_POISON).to(I64)
    ok = tl.full([], 1, tl.int32)
    for number in range(S.NODES - 1):
        if ok > 0:
            peer = peer_of(number, ctx.me, S)
            awaited = tl.sum(tl.where(r == peer, _messages_of(heads, S), 0), 0)
            start = clock(S.CLOCK)
            state = ok + 1  # UNFINISHED
            while state == UNFINISHED:
                arrived = tl.zeros([_AT_ONCE], tl.int32)
                for c0 in range(0, S.MAX_TOKENS, _AT_ONCE):
                    flags = (mine + S.OFFSET_NODE_FLAG).to(I64) + number * S.MAX_TOKENS + c0 + i
                    got = tl.atomic_add(flags, 0, mask=c0 + i < S.MAX_TOKENS, sem="acquire", scope="sys")
                    arrived += ((got >= ctx.call) & (c0 + i < S.MAX_TOKENS)).to(tl.int32)
                state = tl.where(tl.sum(arrived, 0) >= awaited, OK, UNFINISHED)
                if state == UNFINISHED:
                    state = check_timeout(poison, start, ctx.limit, S.CLOCK)
            tl.debug_barrier()
            ok = state
            report_failure(ok, ctx, peer, _COMBINE, ctx.call, ctx.call - 1, S)
    return ok


@triton.jit
def end_waits_for_mismatched(ctx, mismatched, heads, slot_of, num_tokens, S: tl.constexpr):
    """Release the home CTAs that wait for rows of ``mismatched`` [ranks]: ranks that send rows of another dispatch
    home. ``heads`` [ranks]: their words of combine_status.

    First all rows that mismatched ranks send with flags must have arrived, because in the next call other ranks may
    store the same rows; between nodes :func:`quiesce_combine` has waited for all of them. Then CTA 0 raises all flags
    of the mismatched ranks in this rank's own block, and stands in for rows without flags. Their own rows without
    flags may arrive later, and are cleared as after a refusal. Returns OK, TIMED_OUT or POISONED.
    """
    mine = own_block(ctx.control, S)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    i = tl.arange(0, _AT_ONCE)
    if S.TWO_LEVEL:  # whose rows come through a collector; :func:`quiesce_combine` has waited for those
        _raise_node_flags(ctx, mine, mismatched, S)
        mismatched = mismatched & (is_intra_node(r, ctx.me, S) | lacks_relay(ctx.control, ctx.me, r, S))
    messages = tl.where(mismatched & ((heads & 8) == 0), _messages_of(heads, S), 0)
    ok = _wait_for_flags(ctx, S.OFFSET_COMBINE_FLAG, messages * S.PARTS_PER_ROW, _COMBINE, S.PARTS_PER_ROW, S)
    if ok > 0:
        in_one_level(_forget_kept, (mine, mismatched), S)
    count: tl.constexpr = S.MAX_TOKENS * S.PARTS_PER_ROW
    for source in range(S.WORLD_SIZE):
        is_mismatched = tl.max((mismatched & (r == source)).to(tl.int32), 0)
        flags = (mine + S.OFFSET_COMBINE_FLAG).to(I64) + source * count
        for c0 in range(0, tl.where(is_mismatched > 0, count, 0), _AT_ONCE):
            publish(flags + c0 + i, only(ok > 0, c0 + i < count), ctx.call + i * 0)
    if S.SENDS_SUMS and S.LAMPORT_TOKENS > 0:
        if (ok > 0) & has_no_flags(ctx.control, num_tokens, ctx.call, S):
            stand_in(mine, mismatched, slot_of, num_tokens, S)
    tl.debug_barrier()
    return ok


@triton.jit
def _dispatch_of(received, S: tl.constexpr):
    """Return the number of the dispatch whose ``received`` this is, 31 bits of it."""
    return tl.load(received + 2 * S.WORLD_SIZE + 1)


@triton.jit
def _wait_until_at(ctx, received, home, S: tl.constexpr):
    """Wait until all rows that this rank sends to ``home`` in this combine have arrived there."""
    mine = own_block(ctx.control, S)
    flags = (tl.load(ctx.table + home) + S.OFFSET_COMBINE_FLAG).to(I64) + ctx.me * S.MAX_TOKENS * S.PARTS_PER_ROW
    count = tl.load(received + home * 2) * S.PARTS_PER_ROW
    if S.LAMPORT_TOKENS > 0:  # Lamport slots need no wait: only this rank stores there, and home clears them
        count = tl.where(is_small(ctx.control, tl.load(received + home * 2 + 1), ctx.call, S), 0, count)
    i = tl.arange(0, _SENT_AT_ONCE)
    ok = tl.full([], 1, tl.int32)
    for c0 in range(0, count, _SENT_AT_ONCE):
        if ok > 0:
            ok, _, got = wait_all(
                flags + c0 + i, c0 + i < count, ctx.call, (mine + S.OFFSET_POISON).to(I64), ctx.limit, S.CLOCK
            )
            report_failure(ok, ctx, ctx.me, _COMBINE, ctx.call, got, S)
    return ok


@triton.jit
def wait_until_sent(ok, ctx, received, refused, first, S: tl.constexpr):
    """Wait until this rank's own rows have arrived at the ranks that refused a combine; between nodes do nothing.

    ``refused`` [ranks]: the numbers of these ranks, S.WORLD_SIZE in place of others; ``first``: the lowest. Returns OK,
    TIMED_OUT or POISONED. The senders are lower CTAs of this launch or CTAs of an earlier one, and wait only until
    peers begin this call.
    """
    if S.NODE_SIZE == S.WORLD_SIZE:
        for home in range(first, S.WORLD_SIZE):
            if (ok > 0) & (tl.sum((refused == home).to(tl.int32), 0) > 0):
                ok = _wait_until_at(ctx, received, home, S)
    return ok


@triton.jit
def quiesce_combine(ok, needed, ctx, S: tl.constexpr):
    """Wait between nodes, if ``needed``, for all that is sent back in this combine.

    Returns OK, TIMED_OUT or POISONED; without a wait ``ok``.
    """
    if S.NODE_SIZE < S.WORLD_SIZE:
        if needed:
            ok = _wait_for_what_heads_say(ctx, S)
    return ok


@triton.jit
def _wait_for_what_heads_say(ctx, S: tl.constexpr):
    """Wait for all that is sent back in this combine, by what the heads say.

    That is sums, or rows; each row from another node has its own flag. This rank also waits for the ranks of its own
    node, because without sums another rank may store the same rows in the next call. Returns OK, TIMED_OUT or POISONED.
    """
    mine = tl.load(ctx.table + ctx.me)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = r < S.WORLD_SIZE
    ok, source, got = wait_all(
        (mine + S.OFFSET_COMBINE_HEAD).to(I64) + r, mask, ctx.call, (mine + S.OFFSET_POISON).to(I64), ctx.limit, S.CLOCK
    )
    report_failure(ok, ctx, source, _COMBINE, ctx.call, got, S)
    if ok > 0:
        status = tl.load((mine + S.OFFSET_COMBINE_STATUS).to(I64) + r, mask=mask, other=0)
        status = tl.maximum(status, 0)  # below 0 are those of masked ranks, of which no rows come
        messages = _messages_of(status, S)
        if S.TWO_LEVEL:
            messages = tl.where(is_intra_node(r, ctx.me, S) | lacks_relay(ctx.control, ctx.me, r, S), messages, 0)
        ok = _wait_for_flags(ctx, S.OFFSET_COMBINE_FLAG, messages, _COMBINE, 1, S)
        if S.TWO_LEVEL:
            if ok > 0:
                ok = _wait_for_node_rows(ctx, mine, status, S)
        else:
            ok = _wait_for_single_rows(ok, ctx, mine, status, messages, S)
    return ok


@triton.jit
def _wait_for_single_rows(ok, ctx, mine, status, messages, S: tl.constexpr):
    """Wait for the rows with flags of their own, of those ranks of other nodes that send rows and not sums."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    mask = r < S.WORLD_SIZE
    q = tl.arange(0, S.TOPK_POW2)
    far = intra_node_only(mask, r, ctx.me, S) == 0
    by_row = tl.where(far & ((status & 7) == 2 * _BY_ROW), messages, 0)
    for source in range(S.WORLD_SIZE):
        for slot in range(0, tl.sum(tl.where(r == source, by_row, 0), 0)):
            if ok > 0:
                message = source * S.MAX_TOKENS + slot
                kept = tl.load(
                    (mine + S.OFFSET_INTER_NODE_KEPT).to(U8) + message * S.KEPT_BYTES + q, mask=q < S.TOPK, other=0
                )
                flags = (mine + S.OFFSET_ROW_FLAG).to(I64) + message * S.TOPK + q
                poison = (mine + S.OFFSET_POISON).to(I64)
                ok, _, got = wait_all(flags, kept != 0, ctx.call, poison, ctx.limit, S.CLOCK)
                report_failure(ok, ctx, source, _COMBINE, ctx.call, got, S)
    return ok


@triton.jit
def _wait_for_choices(ctx, S: tl.constexpr):
    """Wait for what the ranks of other nodes chose, and return it as :func:`wait_for_choices` does."""
    mine = tl.load(ctx.table + ctx.me)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    ok, source, got = wait_for_inter_node(mine, S.OFFSET_COMBINE_HEAD, r < S.WORLD_SIZE, ctx, S)
    report_failure(ok, ctx, source, _COMBINE, ctx.call, got, S)
    status = tl.load((mine + S.OFFSET_COMBINE_STATUS).to(I64) + r, mask=r < S.WORLD_SIZE, other=0)
    return ok, intra_node_only(r < S.WORLD_SIZE, r, ctx.me, S) | ((status & 7) == 2 * _BY_ROW)


@triton.jit
def wait_for_choices(ok, needed, ctx, S: tl.constexpr):
    """Wait between nodes, if ``needed``, for what the ranks of other nodes chose, where rows come that are staged by
    message.

    Returns (OK, TIMED_OUT or POISONED, or ``ok``; [ranks] whether a rank's rows come). False stands for those
    ranks of other nodes that send sums or refused the call.
    """
    choices = tl.full([S.WORLD_SIZE_POW2], 1, tl.int1)
    if S.NODE_SIZE < S.WORLD_SIZE and not S.SENDS_SUMS and not S.STAGED_BY_ROW:
        choices = tl.arange(0, S.WORLD_SIZE_POW2) < S.WORLD_SIZE
        if needed:
            ok, choices = _wait_for_choices(ctx, S)
    return ok, choices
