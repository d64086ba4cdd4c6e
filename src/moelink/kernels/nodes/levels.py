"""Route tokens and rows between nodes (two-level transport).

With one level a rank puts what it has for a rank of another node straight there. With two levels (S.TWO_LEVEL) a
*relay* crosses the network once for each node, between ranks of the same place on their nodes, *peers*:

=========  ============================================================================================================
dispatch   the home rank puts one relay at its peer on each node that the token goes to. The peer, as *forwarder*,
           stores the message at the ranks of its node that the token names (``kernels.nodes.forward``)
combine    the ranks of a node store their rows of a token at the home rank's peer on their node. It sums them, as
           *collector*, and puts one row at home (``kernels.nodes.collect``)
=========  ============================================================================================================

Counts, firsts, heads, credits and error records are small. They go to every rank as with one level, and so does all
that stays on a node.

A rank numbers the other nodes from 0, beginning with the one after its own; regions for relays are numbered so.

Why the waits form no circle: every role waits only for roles before it in the order *send, forward, receive* in
dispatch and *send, collect, gather* in combine, on its own rank and on others. Senders wait for none, but for credits
of the call before. In a launch, numbers of CTAs ascend in that order, and CTAs of low numbers begin first. So senders
end on every rank, even if few CTAs have room; then forwarders or collectors do; then the others.

Why no call overtakes another: a rank counts a call as read, and so grants credit for it, only after its own forwarders
or collectors have ended (:func:`after_relaying`), and these read all that came for them. Hence a peer may overwrite a
relay or a row, and its own staged bytes, when it has this rank's credit for the call before. A forwarder stores at a
rank of its node only because of a relay of this call. The home rank put that one after it had the credit of *all*
ranks, this one included. The rank that stores into a slot is the same in every call: for a pair of a source and a
destination always the source's peer on the destination's node.

Blame after an expired wait: a receiver that waits for a message of another node cannot know whether the home
rank did not put the relay or the forwarder did not store it: it blames the forwarder (:func:`forwarder_of`). The
forwarder can know, and blames the home rank; a collector blames the rank of its node whose row is missing, and home the
collector. Forwarders and collectors give up after seven eighths of the limit (:func:`relaying_context`). So a rank that
waits for one of them learns the true cause before its own limit is over. If it began to wait more than an eighth of the
limit before them, it blames them, because they were late.

A masked rank relays nothing (``kernels.nodes.past``).

Example: 6 ranks, S.NODE_SIZE 2. Rank 2 is on node 1; nodes 2 and 0 are its nodes 0 and 1, and its peers there are ranks
4 and 0. A token of rank 2 that names experts of ranks 3, 4 and 5 is stored at rank 3 by rank 2 itself, and put once, at
rank 4, which stores it in its own block and at rank 5. Rows for it: rank 5 stores its row in rank 4's block, as the row
of place (node 1, second rank), rank 3 of the numbers there; rank 4 adds its own and puts the sum at rank 2.
"""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import between_nodes, is_intra_node
from moelink.kernels.records import CallContext
from moelink.kernels.sync.signals import I64, calls_made, own_block, report_failure, wait_all
from moelink.memory.protocol import CALL_SHIFT, SOME_MASKED

_SHIFT = tl.constexpr(CALL_SHIFT)
_SOME_MASKED = tl.constexpr(SOME_MASKED)


@triton.jit
def in_two_levels(work, arguments, S: tl.constexpr):
    """Do ``work(*arguments, S)`` where the transport has two levels."""
    if S.TWO_LEVEL:
        work(*arguments, S)


@triton.jit
def in_one_level(work, arguments, S: tl.constexpr):
    """Do ``work(*arguments, S)`` with several nodes and one level."""
    if not S.TWO_LEVEL:
        between_nodes(work, arguments, S)


@triton.jit
def peer_of(number, me, S: tl.constexpr):
    """Return the rank of this rank's place on its other node ``number``."""
    return (me // S.NODE_SIZE + 1 + number) % S.NODES * S.NODE_SIZE + me % S.NODE_SIZE


@triton.jit
def node_number(node, me, S: tl.constexpr):
    """Return the number of node ``node`` among this rank's other nodes; for its own node S.NODES - 1."""
    return (node - me // S.NODE_SIZE - 1 + S.NODES) % S.NODES


@triton.jit
def number_there(peer, me, S: tl.constexpr):
    """Return the number of this rank's node among the other nodes of rank ``peer``."""
    return node_number(me // S.NODE_SIZE, peer, S)


@triton.jit
def is_peer(rank, me, S: tl.constexpr):
    """Return whether a rank of another node is this rank's peer there."""
    return (rank % S.NODE_SIZE == me % S.NODE_SIZE) & (is_intra_node(rank, me, S) == 0)


@triton.jit
def is_masked(control, rank, S: tl.constexpr):
    """Return whether ``rank``, a number or a block of them, is masked (``memory.absence``). False with one level, which
    need not know, and over NVSHMEM, which cannot go on without a rank."""
    if S.TWO_LEVEL and S.NETWORK == "ring":
        asked = (rank >= 0) & (rank < S.WORLD_SIZE) & (tl.load(control + _SOME_MASKED) + rank * 0 != 0)
        return tl.load((own_block(control, S) + S.OFFSET_COMBINE_STATUS).to(I64) + rank, mask=asked, other=0) < 0
    else:
        return rank * 0 != 0


@triton.jit
def lacks_relay(control, home, other, S: tl.constexpr):
    """Return whether no rank relays between ``home`` and ``other``, ranks of two nodes, because the peer of ``home`` on
    the node of ``other`` is masked. Either may be a block."""
    relay = other // S.NODE_SIZE * S.NODE_SIZE + home % S.NODE_SIZE
    return is_masked(control, relay, S) & (home // S.NODE_SIZE != other // S.NODE_SIZE)


@triton.jit
def stores_at(control, rank, me, S: tl.constexpr):
    """Return whether what this rank sends to ``rank`` is a message of its own: to any other rank, with two levels to
    those of its node and to those that no relay reaches."""
    if S.TWO_LEVEL:
        return (rank != me) & (is_intra_node(rank, me, S) | lacks_relay(control, me, rank, S))
    else:
        return rank != me


@triton.jit
def column_of(rank, me, S: tl.constexpr):
    """Return the column of ``places`` [ranks] in which the place of a message for ``rank`` stands.

    With two levels that is for all ranks of other nodes the column of one of them, in which the relay's place stands.
    """
    if S.TWO_LEVEL:
        return tl.where(is_intra_node(rank, me, S), rank, (me + S.NODE_SIZE) % S.WORLD_SIZE)
    else:
        return rank


@triton.jit
def first_stop(home, me, S: tl.constexpr):
    """Return the rank at which this rank stores its rows for ``home``: ``home``, or its peer on this node."""
    if S.TWO_LEVEL:
        return me // S.NODE_SIZE * S.NODE_SIZE + home % S.NODE_SIZE
    else:
        return home


@triton.jit
def place_at_stop(home, me, S: tl.constexpr):
    """Return which rank's rows these rows are there: this rank's own, or at a collector a number of ``home``'s node."""
    if S.TWO_LEVEL:
        return home // S.NODE_SIZE * S.NODE_SIZE + me % S.NODE_SIZE
    else:
        return me


@triton.jit
def forwarder_of(control, source, me, S: tl.constexpr):
    """Return the rank that stores what rank ``source`` sends here: ``source``, or the forwarder on this rank's node, be
    it this rank: where its forwarder lives, that has given up before."""
    if S.TWO_LEVEL:
        forwarder = me // S.NODE_SIZE * S.NODE_SIZE + source % S.NODE_SIZE
        itself = is_intra_node(source, me, S) | lacks_relay(control, source, me, S)
        return tl.where(itself, source, forwarder)
    else:
        return source


@triton.jit
def relaying_context(peers, role, numbers):
    """Return the context of this call of ``role``: forwarders or collectors, which time out before other roles."""
    call = calls_made(peers.control, role) + 1
    limit = numbers.limit - numbers.limit // 8
    return CallContext(peers.table, peers.record, peers.control, numbers.me, limit, call)


@triton.jit
def lanes_of(number, num_programs, S: tl.constexpr):
    """Return how many of ``num_programs`` forwarding or collecting CTAs share the tokens of other node ``number``.

    The nodes take the CTAs in turn; with more nodes than CTAs, the CTAs take the nodes in turn.
    """
    return tl.cdiv(tl.maximum(num_programs - number, 1), S.NODES - 1)


@triton.jit
def _wait_for_relays(ctx, role, phase, S: tl.constexpr):
    """Wait until all CTAs of this rank's forwarders or collectors have counted this call."""
    one = tl.arange(0, 1)
    poison = (own_block(ctx.control, S) + S.OFFSET_POISON).to(I64)
    ok, _, got = wait_all(ctx.control + role + one, one == 0, ctx.call << _SHIFT, poison, ctx.limit, S.CLOCK)
    report_failure(ok, ctx, ctx.me, phase, ctx.call, got >> _SHIFT, S)
    return ok


@triton.jit
def after_relaying(ok, needed, ctx, role, phase, S: tl.constexpr):
    """Wait, with two levels and if ``needed``, until this rank's forwarders or collectors, ``role``, have ended this
    call.

    They have lower numbers in this launch, or were in an earlier one. Returns OK, TIMED_OUT or POISONED; else
    ``ok``.
    """
    if S.TWO_LEVEL:
        if (ok > 0) & needed:
            ok = _wait_for_relays(ctx, role, phase, S)
    return ok
