"""Put bytes at ranks of other nodes over a network, with a signal after them.

Inside a node a rank stores to its peers directly (``kernels.sync.signals``). Between nodes it first writes the bytes to
a *staging region* of its own block, and then asks the network to put them in the peer's block:

==========  ==========================================================================================================
put         ``nbytes`` bytes from ``source`` in this block to the peer's ``to``, and *after them* ``value`` in the
            peer's word ``word``. ``to`` and ``word`` are addresses in this rank's own block, of the places that they
            have in the peer's: blocks are laid out alike.
staging     before a put, ``signals.fence``: the network reads what every thread of the CTA has stored
==========  ==========================================================================================================

The network must guarantee one thing: *a put's signal arrives after its own data*. The kernels assume no order between
two puts, whether to one peer, of one CTA or to one word, because they may take different connections. So bytes that
must be seen together travel in one put, or each put has its own signal and the reader waits for every one of them.

Why a word never goes backwards, although puts of two calls may overtake one another: a rank puts for call n + 1 at a
peer only after that peer has granted credit for call n, and the peer grants it only after it has seen every signal of
call n that this rank put there. That also holds in a call that a rank refused: it waits for data that it will not read
(``kernels.sync.quiesce``). For the same reason no put still reads staged bytes when they may be written again.

``S.NETWORK`` names the network: "nvshmem", NVSHMEM's ``putmem_signal_nbi`` by all threads of a CTA; or "ring",
work entries for the simulated network proxy on the host (``memory.nodes.network_proxy``), with which a CPU tests all
this. There are several nodes where S.WORLD_SIZE > S.NODE_SIZE. Only this file and ``kernels.sync.quiesce`` ask whether
there are. Their functions do nothing on one node, or return what is right there: :func:`between_nodes` does what other
files need between nodes only, and :func:`direct_or_staged` says where to store what goes to any rank.

Example: 6 ranks, S.NODE_SIZE 2, rank 2: intra-node ranks are 2 and 3; inter-node ranks are 4, 5, 0, 1, numbered 0 to 3
in its staging regions.
"""

import triton
import triton.language as tl
from triton.language import core

from moelink.kernels.numeric import only
from moelink.memory.protocol import RING_ENTRY_WORDS, RING_HEADER_WORDS

I64 = tl.constexpr(tl.pointer_type(tl.int64))
_ENTRY = tl.constexpr(RING_ENTRY_WORDS)
_HEADER = tl.constexpr(RING_HEADER_WORDS)
# NVSHMEM_SIGNAL_SET of nvshmemx_signal_op_t: the word becomes the value. For most others NVSHMEM's device code adds it.
_SIGNAL_SET = tl.constexpr(9)


@triton.jit
def between_nodes(work, arguments, S: tl.constexpr):
    """Do ``work(*arguments, S)`` with several nodes; on one node do nothing."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        work(*arguments, S)


@triton.jit
def between_nodes_or(otherwise, work, arguments, S: tl.constexpr):
    """Return ``work(*arguments, S)`` with several nodes; on one node return ``otherwise``."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        return work(*arguments, S)
    else:
        return otherwise


@triton.jit
def is_intra_node(rank, me, S: tl.constexpr):
    """Return whether a rank belongs to this rank's own node."""
    return rank // S.NODE_SIZE == me // S.NODE_SIZE


@triton.jit
def intra_node_only(mask, rank, me, S: tl.constexpr):
    """Return ``mask`` without the ranks of other nodes."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        return only(is_intra_node(rank, me, S), mask)
    else:
        return mask


@triton.jit
def inter_node_number(rank, me, S: tl.constexpr):
    """Return the number, from 0, of a rank of another node among those ranks.

    For ranks of this node it is any number in range.
    """
    return ((rank - me // S.NODE_SIZE * S.NODE_SIZE - S.NODE_SIZE + S.WORLD_SIZE) % S.WORLD_SIZE) % (
        S.WORLD_SIZE - S.NODE_SIZE
    )


@triton.jit
def staged_at(mine, rank, me, offset, items, item, stride, S: tl.constexpr):
    """Return the address of item ``item`` for ``rank`` of another node, in the staging region at ``offset`` of the own
    block ``mine``.

    The region has ``items`` of ``stride`` bytes for each such rank.
    """
    return mine + offset + tl.cast(inter_node_number(rank, me, S) * items + item, tl.int64) * stride


@triton.jit
def direct_or_staged(direct, mine, rank, me, offset, items, item, stride, S: tl.constexpr):
    """Return where to store data for ``rank``: ``direct``, an address or pointer in its block, intra-node; else
    :func:`staged_at`."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        at = staged_at(mine, rank, me, offset, items, item, stride, S)
        return tl.where(is_intra_node(rank, me, S), direct.to(tl.int64), at).to(direct.dtype)
    else:
        return direct


@triton.jit
def own_word_at(base, mine, rank, me, offset, staged, words, word, S: tl.constexpr):
    """Return where to store word ``word`` of what this rank tells ``rank``, whose block is at ``base``, in int64 words.

    There it has row ``me`` of the region at ``offset``, of ``words`` words. For a rank of another node they are staged,
    in the region at ``staged``.
    """
    if S.NODE_SIZE < S.WORLD_SIZE:
        row = base + offset + tl.cast(me, tl.int64) * (words * 8)
        return direct_or_staged(row, mine, rank, me, staged, 1, 0, words * 8, S).to(I64) + word
    else:
        return (base + offset).to(I64) + (me * words + word)


@core.extern
def _putmem_signal(to, source, nbytes, word, value, operation, peer, _semantic=None):
    """Call NVSHMEM's device function of the same name, with all threads of the CTA."""
    i64, i32 = core.dtype("int64"), core.dtype("int32")
    arguments = [to, source, nbytes, word, value, operation, peer]
    types = (i64, i64, i64, i64, i64, i32, i32)
    return core.extern_elementwise(
        "", "", arguments, {types: ("nvshmemx_putmem_signal_nbi_block", i32)}, is_pure=False, _semantic=_semantic
    )


@triton.jit
def put(table, to, source, nbytes, word, value, peer, S: tl.constexpr):
    """Put ``nbytes`` (at least 1) bytes from ``source`` at rank ``peer``'s ``to``, then ``value`` in its ``word``.

    Returns before the put is done.
    """
    if S.NETWORK == "nvshmem":
        _putmem_signal(
            to,
            source,
            tl.cast(nbytes, tl.int64),
            word,
            tl.cast(value, tl.int64),
            tl.full([], _SIGNAL_SET, tl.int32),
            tl.cast(peer, tl.int32),
        )
    else:
        # Relaxed: a release would make stores visible that the caller forgot to order before the put, and so hide it.
        ring = tl.load(table + S.WORLD_SIZE).to(I64)
        ticket = tl.atomic_add(ring, 1, sem="relaxed", scope="sys")
        i = tl.arange(0, _ENTRY)
        words = tl.where(i == 0, to, 0) + tl.where(i == 1, source, 0) + tl.where(i == 2, nbytes, 0)
        words += tl.where(i == 3, word, 0) + tl.where(i == 4, value, 0) + tl.where(i == 5, peer, 0)
        entry = ring + _HEADER + ticket % tl.load(ring + 1) * _ENTRY
        tl.atomic_xchg(entry + i, words.to(tl.int64), mask=i < _ENTRY - 1, sem="relaxed", scope="sys")
        tl.atomic_xchg(entry + (_ENTRY - 1), ticket + 1, sem="relaxed", scope="sys")


@triton.jit
def tell(table, mine, word, value, peer, S: tl.constexpr):
    """Put ``value`` in rank ``peer``'s ``word``, with an unused word as the data."""
    put(table, mine + S.OFFSET_IDLE, mine + S.OFFSET_IDLE, 8, word, value, peer, S)


@triton.jit
def tell_inter_node(table, me, offset, value, S: tl.constexpr):
    """Put ``value`` in word ``me`` of the region at ``offset`` of every rank of another node."""
    mine = tl.load(table + me)
    for d in range(S.WORLD_SIZE):
        if is_intra_node(d, me, S) == 0:
            tell(table, mine, mine + offset + tl.cast(me, tl.int64) * 8, value, d, S)
