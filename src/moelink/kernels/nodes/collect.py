"""Collect rows on their way home: the role between expert and home of a two-level combine (``kernels.nodes.levels``).

The ranks of a node store their rows of a token of another node in the block of the home rank's peer on their node, at
the token, among the ``rows`` of place (home's node, own place on this node), and publish that place's flag of their
message. The peer, as *collector*, knows from dispatch, in which it forwarded the token, which ranks these are and in
which slots. It waits for exactly their flags, sums the rows, and puts the sum at home: ``node_rows``, with
``node_flag[token]``. It goes on token by token, while later rows arrive. The home role waits for the flags of the ranks
of its own node, and for one row of each other node that its token went to.

Sums, in fp32 (fp64 for fp64): a rank's row is the sum of its experts' rows, rounded to the row's dtype. A collector
starts at +0, adds the rows of its node's ranks in ascending order and rounds *once* to the row's dtype: that crosses
the network. Home starts at +0 and takes the nodes in ascending order: of another node it adds the row, of its own the
rows of the ranks, in ascending order, one by one and not rounded in between. With a combine format
(``kernels.combine.row_format``) rows of ranks and of nodes are encoded instead of rounded, and a row that crosses has
been encoded twice. ``moelink.reference`` sums alike.

Ranks that refuse, and ranks that combine another dispatch. A rank that refuses knows of no rows. As a rank of experts
it also raises its flags in the blocks of its node, for collectors. As a collector it puts all flags of all home ranks,
without rows. A head tells a peer how many rows of its node come (``quiesce.beside_status``). A home rank that reads
nothing waits until that number of rows has arrived (``quiesce.quiesce_combine``). Where ranks of one node combine
different dispatches, a collector would wait for flags that nobody raises. So CTA 0 of the collectors waits for the
heads of its node first, and raises all flags of a mismatched rank in its own block (:func:`meet_node`). These sums are
never used, because every rank sees the same heads and refuses the call.

Why the next call cannot overtake: a rank stores for call n + 1 when all ranks have granted credit for call n. Home
grants it after its rows have arrived; a collector's rank grants it after all collectors have counted the call, so their
rows are read (``levels.after_relaying``). A collector itself waits for credits, as the rank that refuses waits for no
row; then its staged rows of the call before have been carried. Rows for a collector that refuses, and rows of
mismatched, may arrive after the credit. That is no harm: in each place only one rank stores, one call after the other.

Example: 4 ranks, S.NODE_SIZE 2, token 5 of rank 0 went to ranks 2 and 3 and to itself. Rank 3 stores its row in rank
2's block, and rank 2 its own. Rank 2 puts round(row 2 + row 3) at rank 0, which stores round(own row + that row).
"""

import triton
import triton.language as tl

from moelink.kernels.combine.send import send_tokens_back
from moelink.kernels.nodes.internode import is_intra_node, put, tell
from moelink.kernels.nodes.level_rows import sum_node
from moelink.kernels.nodes.levels import is_masked, lanes_of, number_there, peer_of, relaying_context
from moelink.kernels.sync.credit import poll_once, wait_for_credits
from moelink.kernels.sync.quiesce import other_dispatches
from moelink.kernels.sync.signals import (
    I64,
    count_arrival,
    fence,
    own_block,
    publish,
    report_failure,
    wait_all,
)
from moelink.memory.protocol import COMBINE_BYTES, COMBINE_COLLECTED, PHASE_COMBINE

_PHASE = tl.constexpr(PHASE_COMBINE)
_ROLE = tl.constexpr(COMBINE_COLLECTED)
_BYTES = tl.constexpr(COMBINE_BYTES)
_FLAGS = tl.constexpr(128)


@triton.jit
def meet_node(ctx, received, S: tl.constexpr):
    """Wait, as CTA 0 of the collectors, for the heads of this node, and raise the flags of ranks that combine another
    dispatch than this one. Returns OK, TIMED_OUT or POISONED."""
    mine = own_block(ctx.control, S)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    i = tl.arange(0, _FLAGS)
    near = (r < S.WORLD_SIZE) & is_intra_node(r, ctx.me, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    ok, peer, got = wait_all((mine + S.OFFSET_COMBINE_HEAD).to(I64) + r, near, ctx.call, poison, ctx.limit, S.CLOCK)
    report_failure(ok, ctx, peer, _PHASE, ctx.call, got, S)
    if ok > 0:
        heads = tl.load((mine + S.OFFSET_COMBINE_STATUS).to(I64) + r, mask=near, other=0)
        mismatched = near & ((heads & 1) == 0) & other_dispatches(heads, received, S)
        for rank in range(S.WORLD_SIZE):
            is_mismatched = tl.max((mismatched & (r % S.NODE_SIZE == rank % S.NODE_SIZE)).to(tl.int32), 0) > 0
            home = rank // S.NODE_SIZE * S.NODE_SIZE + ctx.me % S.NODE_SIZE
            if is_mismatched & (is_intra_node(rank, ctx.me, S) == 0) & (is_masked(ctx.control, home, S) == 0):
                for c0 in range(0, S.MAX_TOKENS, _FLAGS):
                    flags = (mine + S.OFFSET_COMBINE_FLAG).to(I64) + rank * S.MAX_TOKENS + c0 + i
                    publish(flags, c0 + i < S.MAX_TOKENS, ctx.call + i * 0)
    return ok


@triton.jit
def collect_for(ctx, number, lane, lanes, notes, S: tl.constexpr):
    """Put the sums of every ``lanes``-th token of the peer on node ``number``, from the ``lane``-th.

    Returns OK, TIMED_OUT or POISONED.
    """
    mine = own_block(ctx.control, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    home = peer_of(number, ctx.me, S)
    node = home // S.NODE_SIZE
    first = ctx.me // S.NODE_SIZE * S.NODE_SIZE
    j = tl.arange(0, S.NODE_SIZE_POW2)
    noted = notes.message_token + (S.WORLD_SIZE + number * S.NODE_SIZE + j) * S.MAX_TOKENS
    tokens = tl.minimum(tl.maximum(tl.load(notes.received + 2 * home + 1), 0), S.MAX_TOKENS)
    moved = tl.full([], 0, tl.int64)
    ok = tl.full([], 1, tl.int32)
    for token in range(lane, tokens, lanes):
        if ok > 0:
            slots = tl.load(noted + token, mask=j < S.NODE_SIZE, other=-1)
            if tl.max(slots, 0) >= 0:
                words = (node * S.NODE_SIZE + j) * S.MAX_TOKENS + tl.minimum(tl.maximum(slots, 0), S.MAX_TOKENS - 1)
                flags = (mine + S.OFFSET_COMBINE_FLAG).to(I64) + words
                ok, late, got = wait_all(flags, slots >= 0, ctx.call, poison, ctx.limit, S.CLOCK)
                report_failure(ok, ctx, first + late, _PHASE, ctx.call, got, S)
                if ok > 0:
                    staged = mine + S.OFFSET_STAGED_ROWS
                    staged += tl.cast(number * S.MAX_TOKENS + token, tl.int64) * S.ROW_BYTES
                    sum_node(mine, staged, slots, node, token, S)
                    fence(ctx.control)
                    at = tl.cast(number_there(home, ctx.me, S) * S.MAX_TOKENS + token, tl.int64)
                    to, word = mine + S.OFFSET_NODE_ROWS + at * S.ROW_BYTES, mine + S.OFFSET_NODE_FLAG + at * 8
                    put(ctx.table, to, staged, S.ROW_BYTES, word, ctx.call, home, S)
                    moved += S.ROW_BYTES
    if moved > 0:
        tl.atomic_add(ctx.control + _BYTES, moved, sem="relaxed", scope="gpu")
    return ok


@triton.jit
def put_all_flags(ctx, S: tl.constexpr):
    """Put the flags of all tokens of all peers, without rows, as a rank that refuses the call."""
    mine = own_block(ctx.control, S)
    fence(ctx.control)
    for number in range(S.NODES - 1):
        peer = peer_of(number, ctx.me, S)
        flags = mine + S.OFFSET_NODE_FLAG + tl.cast(number_there(peer, ctx.me, S) * S.MAX_TOKENS, tl.int64) * 8
        for token in range(S.MAX_TOKENS):
            tell(ctx.table, mine, flags + token * 8, ctx.call, peer, S)


@triton.jit
def collect(program, num_programs, peers, notes, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the collector role. ``notes.received`` says whether the dispatch brought anything."""
    ctx = relaying_context(peers, _ROLE, numbers)
    credits = poll_once(peers.control, _PHASE, ctx.call, S)
    others: tl.constexpr = S.NODES - 1
    if tl.load(notes.received + 2 * S.WORLD_SIZE) == 0:
        ok = wait_for_credits(credits, ctx, _PHASE, S)
        if ok > 0:
            if numbers.status != 0:
                if program == 0:
                    put_all_flags(ctx, S)
            else:
                if program == 0:
                    ok = meet_node(ctx, notes.received, S)
                for number in range(program % others, others, num_programs):
                    if ok > 0:
                        lanes = lanes_of(number, num_programs, S)
                        ok = collect_for(ctx, number, program // others, lanes, notes, S)
        if ok > 0:
            count_arrival(peers.control, _ROLE, program, num_programs, "release")


@triton.jit
def send_and_collect(program, num_programs, peers, inputs, notes, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the expert role, or as one of the last S.COLLECTORS that of the collector."""
    senders = num_programs - S.COLLECTORS
    if program < senders:
        send_tokens_back(program, senders, peers, inputs, notes, numbers, S)
    else:
        collect(program - senders, S.COLLECTORS, peers, notes, numbers, S)
