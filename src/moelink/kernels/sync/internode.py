"""Ranks of other nodes: bytes that a network carries there, and a signal behind them.

Inside a node a rank stores to its peers directly (``kernels.sync.signals``). Across nodes it writes what it has to say
in a *staged* region of its own block first, and then asks the network to put it in the peer's block:

==========  ==========================================================================================================
put         ``nbytes`` bytes from ``source`` in this block to the peer's ``to``, and *after them* ``value`` in the
            peer's word ``word``. ``to`` and ``word`` are addresses in this rank's own block, of the places that they
            have in the peer's: blocks are laid out alike.
staging     before a put, ``signals.fence``: the network reads what every thread of the program has stored
==========  ==========================================================================================================

This is all that is asked of a network: *a put's signal comes after its own data*. Nothing is assumed about two puts,
be they to one peer, of one program, or to one word, as they may take different connections. So what has to be seen
together travels in one put or has a signal of its own, and whoever reads waits for each of them.

Why a word never goes backwards, although puts of two calls may overtake one another: a rank puts for call n + 1 at a
peer only after that peer has said that it drained call n, and it says so only after it has seen every signal of call n
that this rank put there. That holds in a call that a rank refused, too: it waits for what it will not read
(``kernels.sync.quiesce``). For the same reason staged bytes are at rest once they may be written again.

``NET`` says who carries: "nvshmem", NVSHMEM's ``putmem_signal_nbi`` by all threads of a program; or "ring", work
entries for a courier on the host (``memory.courier``), which is how a CPU tests all this. Between nodes is W > NODE.

Example: 6 ranks, NODE 2, rank 2: near are 2 and 3; far are 4, 5, 0, 1, numbered 0 to 3 in its staged regions.
"""

import triton
import triton.language as tl
from triton.language import core

from moelink.kernels.numeric import only
from moelink.memory.protocol import RING_ENTRY_WORDS, RING_HEADER_WORDS

I64 = tl.constexpr(tl.pointer_type(tl.int64))
_ENTRY = tl.constexpr(RING_ENTRY_WORDS)
_HEADER = tl.constexpr(RING_HEADER_WORDS)
# NVSHMEM_SIGNAL_SET of nvshmemx_signal_op_t: the word becomes the value. NVSHMEM's device code adds it for most others.
_SIGNAL_SET = tl.constexpr(9)


@triton.jit
def is_intra_node(rank, me, S: tl.constexpr):
    """True for ranks of this rank's own node."""
    return rank // S.NODE_SIZE == me // S.NODE_SIZE


@triton.jit
def intra_node_only(mask, rank, me, S: tl.constexpr):
    """``mask`` without the ranks of other nodes."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        return only(is_intra_node(rank, me, S), mask)
    else:
        return mask


@triton.jit
def inter_node_number(rank, me, S: tl.constexpr):
    """The number, from 0, of a rank of another node among those; something in range for the ranks of this one."""
    return ((rank - me // S.NODE_SIZE * S.NODE_SIZE - S.NODE_SIZE + S.WORLD_SIZE) % S.WORLD_SIZE) % (
        S.WORLD_SIZE - S.NODE_SIZE
    )


@triton.jit
def staged_at(mine, rank, me, offset, items, item, stride, S: tl.constexpr):
    """Address of item ``item`` of those for ``rank``, of another node, in the staged region at ``offset`` of the own
    block ``mine``, which has ``items`` of ``stride`` bytes for each such rank."""
    return mine + offset + tl.cast(inter_node_number(rank, me, S) * items + item, tl.int64) * stride


@triton.jit
def direct_or_staged(direct, mine, rank, me, offset, items, item, stride, S: tl.constexpr):
    """Where to store what goes to ``rank``: at the address ``direct`` in its block if it is near, else where
    :func:`staged_at` says."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        at = staged_at(mine, rank, me, offset, items, item, stride, S)
        return tl.where(is_intra_node(rank, me, S), direct, at)
    else:
        return direct


@core.extern
def _putmem_signal(to, source, nbytes, word, value, operation, peer, _semantic=None):
    """NVSHMEM's device function of the same name, called by all threads of the program."""
    i64, i32 = core.dtype("int64"), core.dtype("int32")
    arguments = [to, source, nbytes, word, value, operation, peer]
    types = (i64, i64, i64, i64, i64, i32, i32)
    return core.extern_elementwise(
        "", "", arguments, {types: ("nvshmemx_putmem_signal_nbi_block", i32)}, is_pure=False, _semantic=_semantic
    )


@triton.jit
def put(table, to, source, nbytes, word, value, peer, S: tl.constexpr):
    """Ask for ``nbytes`` (at least 1) bytes at ``source`` to be put at rank ``peer``'s ``to``, then ``value`` in its
    ``word``. Returns before that has happened."""
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
        # Relaxed, because the entry must not make stores visible that the caller forgot to order before it.
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
    """Put ``value`` in rank ``peer``'s ``word``, with a word beside it that nobody reads."""
    put(table, mine + S.OFFSET_IDLE, mine + S.OFFSET_IDLE, 8, word, value, peer, S)


@triton.jit
def tell_inter_node(table, me, offset, value, S: tl.constexpr):
    """Put ``value`` in word ``me`` of the region at ``offset`` of every rank of another node."""
    if S.NODE_SIZE < S.WORLD_SIZE:
        mine = tl.load(table + me)
        for d in range(S.WORLD_SIZE):
            if is_intra_node(d, me, S) == 0:
                tell(table, mine, mine + offset + tl.cast(me, tl.int64) * 8, value, d, S)
