"""Signal between ranks: publish, wait, report failure. The memory order of every signal is stated here and only here.

A signal is one int64 word in the receiver's block that only ever counts up: it holds the number of the last call for
which the statement behind it became true ("my counts for you are stored", "message 3 is stored", "I have read all you
sent"). Call numbers live in device memory, one per phase and direction, so that a captured graph replays correctly.
They are int64, because a rank may leave a word untouched for longer than 2**31 calls.

=============  ==================================================================================================
publish        all stores of the CTA; ``debug_barrier`` (every thread's stores happen before the signal);
               ``atomic_xchg(release, sys)`` by one thread per destination
fence          ``debug_barrier``; ``atomic_add(own word, 0, acq_rel, sys)``, its result used; ``debug_barrier``: for
               LL words (``kernels.sync.ll_words``), which are their own signal, where they announce other stores too
wait           ``atomic_add(word, 0, acquire, sys)`` until the word reaches the call, its result used (an unused one
               is deleted by the compiler); ``debug_barrier`` (no thread loads before the acquire)
poll once      a volatile load, which no cache answers: for words whose value is all there is to know
               (``kernels.sync.ll_words``, ``kernels.sync.lamport_slots``), or after which there are only stores
               (``kernels.sync.credit``). Every warp may load for itself, at another moment, so a CTA must make the
               result ``block_uniform`` before it acts on it.
               Code that uses the *value* that it polled polls blocks of a word or more for each thread: of a smaller
               block warps hold copies, Triton may load it twice, and only some of these copies are checked
arrive         ``atomic_add(done, 1, acq_rel, gpu)`` of every CTA of a role; the last one acts for all of them:
               what the others did happens before its own signals (a release is cumulative, and these CTAs share
               a device)
count_arrival  ``debug_barrier``; ``atomic_add(role's word, share, relaxed, gpu)``, whose result nobody waits for: a
               call is counted once all its CTAs have added their shares
=============  ==================================================================================================

A clock bounds every wait: ``%globaltimer`` (nanoseconds) on NVIDIA, ``s_memrealtime`` (10 ns) on AMD, a host function
when interpreted. A wait also ends when this rank is poisoned. The first wait that expires on a rank claims the error
record, describes itself there, and writes the same to every peer, which ends their waits.

Example: three peers hold signals 4, 7, 3 and call 4 is awaited: the wait goes on, and if it expires it blames peer 2,
the one furthest behind (``expected 4, got 3``).
"""

import triton
import triton.language as tl

from moelink.kernels.nodes.internode import I64, between_nodes, intra_node_only, is_intra_node, put
from moelink.kernels.records import CallContext, Peers
from moelink.memory.protocol import (
    ABORT_RECORD,
    CALL_SHIFT,
    CLAIM,
    CODE_TIMEOUT,
    FENCE,
    MALFORMED,
    MALFORMED_RANKS,
    MOST_THREADS,
    POISON_WORDS,
)
from moelink.tracing.device.stamps import note_reached, open_record

I32 = tl.constexpr(tl.pointer_type(tl.int32))
U8 = tl.constexpr(tl.pointer_type(tl.uint8))
_CLAIM = tl.constexpr(CLAIM)
_TIMEOUT = tl.constexpr(CODE_TIMEOUT)
_ABORT_RECORD = tl.constexpr(ABORT_RECORD)
_RECORD = tl.constexpr(POISON_WORDS)
_SHIFT = tl.constexpr(CALL_SHIFT)
_CALL = tl.constexpr(1 << CALL_SHIFT)
_FENCE = tl.constexpr(FENCE)
_MALFORMED = tl.constexpr(MALFORMED)
_MALFORMED_RANKS = tl.constexpr(MALFORMED_RANKS)
_THREADS = tl.constexpr(MOST_THREADS)
_FAR = tl.constexpr(2**62)
OK, TIMED_OUT, POISONED = tl.constexpr(1), tl.constexpr(0), tl.constexpr(-1)
"""Results of a wait: all words have come; time ran out; another wait of this communicator has failed, on any rank."""
UNFINISHED = tl.constexpr(2)
"""The state of a wait that goes on."""


@triton.jit
def clock(CLOCK: tl.constexpr):
    """Return ticks since some fixed moment, int64. CLOCK: "ptx", "gcn", or (interpreted) a Python function."""
    if CLOCK == "ptx":
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    elif CLOCK == "gcn":
        return tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.full([], CLOCK(), tl.int64)


@triton.constexpr_function
def looks_of(CLOCK):
    """Return how many times a wait polls between two checks of poison and clock. On an NVIDIA GPU it polls several
    times, because polls follow one another, and a signal is seen only by the next one."""
    return 16 if CLOCK == "ptx" else 1


@triton.jit
def own_block(control, S: tl.constexpr):
    """Return the address of this rank's block from ``control``, which is a part of it, without loading anything."""
    return control.to(tl.int64) - S.OFFSET_CONTROL


@triton.jit
def block_uniform(value):
    """Return the least of the values that the threads of this CTA hold in ``value``, an int32 scalar; all threads get
    it.

    Each thread has its own copy of a scalar. Where warps have loaded a word that a peer changes, one warp may take a
    branch that another does not, and a barrier in the branch would wait for ever. The result of an atomic is
    block-uniform already, because the atomic runs once for all threads.
    """
    return tl.min(tl.zeros([_THREADS], tl.int32) + value, 0)


@triton.jit
def publish(words, mask, value):
    """Store ``value`` in ``words`` (a block of int64 pointers), after all earlier stores of this CTA."""
    tl.debug_barrier()
    tl.atomic_xchg(words, value, mask=mask, sem="release", scope="sys")


@triton.jit
def fence(control):
    """Make all stores of this CTA visible to a reader of its later stores."""
    tl.debug_barrier()
    seen = tl.atomic_add(control + _FENCE, 0, sem="acq_rel", scope="sys")
    tl.store(control + _FENCE, seen, mask=seen != 0)
    tl.debug_barrier()


@triton.jit
def check_timeout(poison, start, limit, CLOCK: tl.constexpr):
    """Return the state of an unfinished wait: POISONED, TIMED_OUT or UNFINISHED."""
    # Each warp reads the clock on its own.
    state = block_uniform(tl.where(clock(CLOCK) - start > limit, TIMED_OUT, UNFINISHED))
    return tl.where(tl.atomic_add(poison, 0, sem="acquire", scope="sys") != 0, POISONED, state)


@triton.jit
def wait_all(words, mask, target, poison, limit, CLOCK: tl.constexpr, arrivals=0, TRACE: tl.constexpr = False):
    """Wait until every word (a block [N] of int64 pointers) under ``mask`` has reached ``target``.

    Returns (arrived, index, got): arrived is OK, TIMED_OUT or POISONED; index and got
    say which word is furthest behind, and its value. ``arrivals``: where to stamp that a word has been seen to reach it
    (``tracing.device.stamps``).
    """
    looks: tl.constexpr = looks_of(CLOCK)
    got = tl.where(mask, tl.atomic_add(words, 0, mask=mask, sem="acquire", scope="sys"), _FAR)
    note_reached(arrivals, mask & (got >= target), CLOCK, TRACE)
    low = tl.min(got, 0)
    state = tl.where(low >= target, OK, UNFINISHED)
    if state == UNFINISHED:
        start = clock(CLOCK)
        look = state
        while state == UNFINISHED:
            got = tl.where(mask, tl.atomic_add(words, 0, mask=mask, sem="acquire", scope="sys"), _FAR)
            note_reached(arrivals, mask & (got >= target), CLOCK, TRACE)
            low = tl.min(got, 0)
            state = tl.where(low >= target, OK, UNFINISHED)
            look += 1
            if (state == UNFINISHED) & (look % looks == 0):
                state = check_timeout(poison, start, limit, CLOCK)
    tl.debug_barrier()
    index = tl.min(tl.where(got == low, tl.arange(0, got.shape[0]), got.shape[0]), 0)
    return state, index, low


@triton.jit
def wait_any(words, mask, target, poison, limit, CLOCK: tl.constexpr):
    """Wait until at least one word (a block [N] of int64 pointers) under ``mask``, which is not empty, has reached
    ``target``.

    Returns (arrived, got): arrived as in :func:`wait_all`; got [N] are the values of the words, -1 where masked.
    """
    looks: tl.constexpr = looks_of(CLOCK)
    got = tl.where(mask, tl.atomic_add(words, 0, mask=mask, sem="acquire", scope="sys"), -1)
    state = tl.where(tl.max(got, 0) >= target, OK, UNFINISHED)
    if state == UNFINISHED:
        start = clock(CLOCK)
        look = state
        while state == UNFINISHED:
            got = tl.where(mask, tl.atomic_add(words, 0, mask=mask, sem="acquire", scope="sys"), -1)
            state = tl.where(tl.max(got, 0) >= target, OK, UNFINISHED)
            look += 1
            if (state == UNFINISHED) & (look % looks == 0):
                state = check_timeout(poison, start, limit, CLOCK)
    tl.debug_barrier()
    return state, got


@triton.jit
def _put(words, mask, rank, peer, phase, call, expected, got):
    """Store an error's description after its code word: words + 1 .. words + 6."""
    tl.store(words + 1, rank, mask=mask)
    tl.store(words + 2, peer, mask=mask)
    tl.store(words + 3, phase, mask=mask)
    tl.store(words + 4, call, mask=mask)
    tl.store(words + 5, expected, mask=mask)
    tl.store(words + 6, got, mask=mask)


@triton.jit
def claim(control):
    """Return 1 to the first CTA of this rank that has an error to describe, else 0."""
    free = tl.full([], 0, tl.int64)
    return (tl.atomic_cas(control + _CLAIM, free, free + 1, sem="acq_rel", scope="sys") == 0).to(tl.int32)


@triton.jit
def _put_description(peers, me, S: tl.constexpr):
    """Put the description that lies in the own ``poisons[me]`` at the ranks of other nodes, then poison them."""
    mine = own_block(peers.control, S)
    copy = mine + S.OFFSET_POISONS + tl.cast(me, tl.int64) * (_RECORD * 8)  # stored before, then never changed
    fence(peers.control)
    for d in range(S.WORLD_SIZE):
        if is_intra_node(d, me, S) == 0:
            put(peers.table, copy, copy, _RECORD * 8, mine + S.OFFSET_POISON, me + 1, d, S)


@triton.jit
def give_up(peers, me, peer, phase, call, expected, got, S: tl.constexpr):
    """Describe an expired wait in ``record`` (host-visible) and at every peer, and poison all ranks, this one included.

    Only the first CTA of this rank that calls it does so. A peer's copy lies in its ``poisons[me]``.
    """
    if claim(peers.control) > 0:
        r = tl.arange(0, S.WORLD_SIZE_POW2)
        mask = intra_node_only(r < S.WORLD_SIZE, r, me, S)
        base = tl.load(peers.table + r, mask=mask, other=0)
        copies = (base + S.OFFSET_POISONS).to(I64) + me * _RECORD
        _put(copies, mask, me, peer, phase, call, expected, got)
        tl.store(copies, tl.full([S.WORLD_SIZE_POW2], _TIMEOUT, tl.int64), mask=mask)
        _put(peers.record, me >= 0, me, peer, phase, call, expected, got)
        tl.debug_barrier()
        tl.atomic_xchg(peers.record, _TIMEOUT, sem="release", scope="sys")
        publish((base + S.OFFSET_POISON).to(I64), mask, tl.zeros([S.WORLD_SIZE_POW2], tl.int64) + me + 1)
        between_nodes(_put_description, (peers, me), S)


@triton.jit
def ep_give_up_kernel(peers, numbers, S: tl.constexpr):
    """Poison all ranks with one CTA, for a host that knows of a failure without a wait (``numbers``).

    It may run beside a launch of the same call that waits: that one's wait ends, as every peer's does.
    """
    n = numbers
    give_up(peers, n.me, n.peer, n.phase, n.call, n.expected, n.got, S)


@triton.jit
def adopt(record, control, poison, poisons, S: tl.constexpr):
    """Copy the description of the peer that poisoned this rank to ``record``, once."""
    if claim(control) > 0:
        writer = tl.atomic_add(poison, 0, sem="acquire", scope="sys") - 1
        writer = tl.minimum(tl.maximum(writer, 0), S.WORLD_SIZE - 1)
        tl.debug_barrier()
        i = tl.arange(0, _RECORD)
        words = tl.load(poisons + writer * _RECORD + i, mask=i < _RECORD, other=0)
        tl.store(record + i, words, mask=i > 0)
        tl.debug_barrier()
        tl.atomic_xchg(record, _TIMEOUT, sem="release", scope="sys")


@triton.jit(noinline=True)  # it follows every wait but hardly ever runs: inlined, it would only add instructions there
def write_error(arrived, peers, me, peer, phase, call, expected, got, S: tl.constexpr):
    """Write the error record after a wait for which time ran out (``arrived`` 0), or during which poison came (-1)."""
    if arrived == 0:
        give_up(peers, me, peer, phase, call, expected, got, S)
    else:
        mine = own_block(peers.control, S)
        adopt(peers.record, peers.control, (mine + S.OFFSET_POISON).to(I64), (mine + S.OFFSET_POISONS).to(I64), S)


@triton.jit
def report_failure(arrived, ctx, peer, phase, expected, got, S: tl.constexpr):
    """Write the error record after a failed wait. Does nothing when ``arrived`` is OK."""
    if arrived <= 0:
        peers = Peers(ctx.table, ctx.record, ctx.control)
        write_error(arrived, peers, ctx.me, peer, phase, ctx.call, expected, got, S)


@triton.jit
def note_refusal(ctx, peer, phase, code):
    """Note in the second part of ``record`` that a peer refused this call, or is mismatched. It poisons no rank."""
    abort = ctx.record + _ABORT_RECORD
    tl.store(abort + 1, ctx.me)
    tl.store(abort + 2, peer)
    tl.store(abort + 3, phase)
    tl.store(abort + 4, ctx.call)
    tl.debug_barrier()
    tl.atomic_xchg(abort, code, sem="release", scope="sys")


@triton.jit
def note_malformed(control, source, bad):
    """Note that rank ``source`` (a scalar, or a block of that shape) sent malformed data where ``bad`` (a block) is
    true."""
    bit = tl.full(bad.shape, 1, tl.int64) << tl.minimum(source, _MALFORMED_RANKS).to(tl.int64)
    tl.atomic_or(control + _MALFORMED + tl.zeros(bad.shape, tl.int32), bit, mask=bad, sem="relaxed", scope="gpu")


@triton.jit
def odd_one_out(values, mask, mine):
    """Return the rank to blame when ``values`` [N] under ``mask`` are not all ``mine``, or -1. Where there are two
    values, every rank finds the same one; of more, :func:`first_mismatched` says the rank.

    Example: values 3, 3, 5 blame rank 2 on all ranks; of 3, 5 (no majority) rank 1, because rank 0 is taken to be
    right.
    """
    r = tl.arange(0, values.shape[0])
    same = mask & (values == mine)
    first_same = tl.min(tl.where(same, r, values.shape[0]), 0)
    first_other = tl.min(tl.where(mask & (values != mine), r, values.shape[0]), 0)
    every = tl.sum(mask.to(tl.int32), 0)
    count = 2 * tl.sum(same.to(tl.int32), 0)
    usual = (count > every) | ((count == every) & (first_same < first_other))
    return tl.where(count == 2 * every, -1, tl.where(usual, first_other, first_same))


@triton.jit
def first_mismatched(values, mask):
    """Return the first rank whose value of ``values`` [N], under ``mask``, is not the most common one, or N.

    Of several values that are equally common, the one of the lowest rank counts. Every rank finds the same one.

    Example: values 3, 3, 5 blame rank 2; 3, 5 blame rank 1; 5, 6, 7, 6 blame rank 0.
    """
    r = tl.arange(0, values.shape[0])
    most, usual = tl.full([], 0, tl.int32), tl.min(values, 0)
    # Rank by rank: for a comparison [N, N] the compiler loads ``values`` once for each of its layouts, in every call.
    for rank in range(tl.max(tl.where(mask, r, -1), 0) + 1):
        value = tl.sum(tl.where(r == rank, values, 0), 0)
        votes = tl.sum((mask & (values == value)).to(tl.int32), 0)
        if (votes > most) & (tl.sum(((r == rank) & mask).to(tl.int32), 0) > 0):
            most, usual = votes, value
    return tl.min(tl.where(mask & (values != usual), r, values.shape[0]), 0)


@triton.jit
def has_poison(control, S: tl.constexpr):
    """Return 1 when a wait of this rank or a peer has expired, as this thread sees it, else 0."""
    return (tl.load((own_block(control, S) + S.OFFSET_POISON).to(I64), volatile=True) != 0).to(tl.int32)


@triton.jit
def is_poisoned(record, control, S: tl.constexpr):
    """Return 1 when an earlier wait here or at a peer expired (the error record is then written), else 0.

    A role calls it once, as it starts.
    """
    poisoned = -block_uniform(-has_poison(control, S))
    if poisoned > 0:
        mine = own_block(control, S)
        adopt(record, control, (mine + S.OFFSET_POISON).to(I64), (mine + S.OFFSET_POISONS).to(I64), S)
    return poisoned


@triton.jit
def arrive(done, num_programs):
    """Return 1 to the last of ``num_programs`` CTAs that call it, else 0. Resets the counter for the next call."""
    tl.debug_barrier()
    last = tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if last:
        tl.atomic_xchg(done, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    return last.to(tl.int32)


@triton.jit
def calls_made(control, role):
    """Return how many calls of ``role`` this rank has made, int64: those that all CTAs have counted."""
    return tl.load(control + role) >> _SHIFT


@triton.jit
def context_of(peers, role, program, numbers, S: tl.constexpr):
    """Return the context of this call of ``role``, the one after those made, in CTA ``program``."""
    call = calls_made(peers.control, role) + 1
    record = open_record(peers, role, program, call, S)
    return CallContext(peers.table, peers.record, peers.control, numbers.me, numbers.limit, call, record)


@triton.jit
def count_arrival(control, role, program, num_programs, sem: tl.constexpr):
    """Count CTA ``program`` of ``num_programs`` as done with a call of ``role``. Together the CTAs count the call.

    Each CTA adds 1, and the first one adds what is missing to ``1 << CALL_SHIFT``. A CTA that reads the word earlier,
    for instance one of this launch that starts late, finds the calls before this one, because what has been added is
    less than a call. Nobody waits for the sum, and the order of a relaxed counter is enough: the next launch reads it
    in stream order, and at the barrier all that this CTA's threads have read is in registers. ``sem``: "release" where
    the count also announces what the threads stored, to a launch that runs beside this one.

    Example: three CTAs add 2**20 - 2, 1 and 1. After two of them the word, shifted, has not changed.
    """
    tl.debug_barrier()
    share = tl.where(program == 0, tl.full([], _CALL, tl.int32) - num_programs + 1, 1)
    tl.atomic_add(control + role, share.to(tl.int64), sem=sem, scope="gpu")
