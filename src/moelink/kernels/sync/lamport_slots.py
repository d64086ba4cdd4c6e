"""Send and read sums in Lamport slots: rows that are their own signal, so that they need no flags.

A row with a flag costs a fence between the two: the sender waits until the row has arrived before it may publish the
flag, which takes a round trip between two GPUs. With few tokens that is most of a call, with 512 an eighth. So the home
rank polls the row itself. A slot holds zeros where nothing has arrived. The data is never zero: its bits travel
inverted, and no element has all bits set, because :func:`bits_of` replaces a NaN with all bits set by another NaN. Each
element is stored in one piece, and no order between two elements matters. Combine's sums travel in this way. A
dispatch's payload cannot, because it may have any bits. Nor do sums in a combine format: the scales of mxfp8 have all
bits set for a NaN, and codes and scales of one block would have to be polled as words of two kinds.

Who writes and who waits: the expert's rank r stores row (r, token) of ``lamport_slots`` at the home rank, inverted; no
other peer stores there. The home rank waits until no part of the rows of its token is zero, sums them and stores zeros.
Home had ``num_tokens`` tokens, which dispatch told the expert's rank, and :func:`is_small` decides from it which form
the call has. How many are few, ``Workspace.lamport_tokens`` says: with layout "rank" of two ranks, thousands. There own
rows stay (``kernels.combine.own_rows``), so a home rank has slots for the rows of the other rank alone
(``Workspace.lamport_ranks``).

Why the next call cannot overtake, and no row is taken for one of another call: a rank stores only after home has
granted credit for the call before (``kernels.sync.credit``), and home grants it after the launch that stored the zeros.
Senders and receivers agree on the rows, because both follow from one dispatch. So a row that has arrived belongs to
this call. Where ranks combine different dispatches, all of them learn it from the heads, and go on as after a refusal
(``quiesce.end_waits_for_mismatched``).

Why a refused call breaks nothing: a rank that refuses reads none of what comes, and where ranks differ in whether they
sum, rows come that no rank awaits. All ranks learn of such a call, and each notes it (:func:`note_refused`). The call
after it has the other form, with flags, on all ranks, so no rank stores in Lamport slots then. Once every rank has
begun that call, all rows of the refused call have arrived, and home clears them (:func:`clear_rows`). Notes are in two
words, for odd and even calls, so that the note of one call does not disturb CTAs that still ask about the call before.
If that call is also refused, the rank that refuses it clears nothing. As long as refusals follow each other, calls have
flags, and slots stay unused; the first call that the rank makes after them still follows a refusal, and clears.

Example: up to 4 tokens, rows of 32 bytes: row 1 of rank 2 begins 32 * (2 * 4 + 1) bytes into the region. Where only
one rank has slots, its row 1 begins after 32 bytes, whatever rank it is. Call 5 is refused: word 0 says 6, so call 6
has flags; word 1 still says what call 5 itself was.

Example: bf16 columns 1.0, 2.0 (bits 0x3f80, 0x4000) travel as 0xc07f, 0xbfff, which home loads as the word 0xbfffc07f.
A NaN is 0x7fff and travels as 0x8000; 0xffff would travel as zero, so it is made 0x7fff.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only, round_to
from moelink.kernels.sync.signals import I32, I64, OK, UNFINISHED, block_uniform, check_timeout, clock, looks_of
from moelink.memory.protocol import COMBINE_WITH_FLAGS
from moelink.tracing.device.stamps import note_late, note_whole

_WITH_FLAGS = tl.constexpr(COMBINE_WITH_FLAGS)


@triton.jit
def follows_refusal(control, call):
    """Return whether a rank refused the call before ``call``, or was mismatched in it.

    Both words are read, so that neither load waits for the call number. They name calls of different parity.
    """
    return (tl.load(control + _WITH_FLAGS) == call) | (tl.load(control + _WITH_FLAGS + 1) == call)


@triton.jit
def note_refused(control, call):
    """Note that a rank refused call ``call``, or was mismatched in it."""
    tl.store(control + _WITH_FLAGS + (call + 1) % 2, call + 1)


@triton.jit
def has_no_flags(control, num_tokens, call, S: tl.constexpr):
    """Return whether sums, if a rank sends any, go without flags to a home rank of ``num_tokens`` tokens in call
    ``call``."""
    return (num_tokens <= S.LAMPORT_TOKENS) & (num_tokens > 0) & (follows_refusal(control, call) == 0)


@triton.jit
def is_small(control, num_tokens, call, S: tl.constexpr):
    """Return whether this rank's rows go, and come, without flags: :func:`has_no_flags`, if it sends sums."""
    if S.SENDS_SUMS:
        return has_no_flags(control, num_tokens, call, S)
    else:
        return num_tokens < 0


@triton.jit
def row_at(block, rank, number, S: tl.constexpr):
    """Return the address of row (``rank``, ``number``) in the block at address ``block``. Where only one rank has slots
    there, ``rank`` is that one."""
    if S.LAMPORT_RANKS == 1:
        slot = tl.cast(number, tl.int64)
    else:
        slot = tl.cast(rank * S.LAMPORT_TOKENS + number, tl.int64)
    return block + S.OFFSET_LAMPORT_SLOTS + slot * S.ROW_BYTES


@triton.jit
def place_of_sum(home, address, token, valid, small, me, S: tl.constexpr):
    """Return where rank ``me`` stores the sum of ``token`` in the block at address ``home``, -1 if its bits are to be
    inverted, else 0, and whether it is ``valid`` there: ``address``, or in a ``small`` call its Lamport slot."""
    flip = tl.full([], 0, tl.int32)
    if S.LAMPORT_TOKENS > 0:
        tl.static_assert(S.LAMPORT_RANKS == S.WORLD_SIZE - S.OWN_ROWS_STAY)  # each row that is sent has a slot
        flip -= small.to(tl.int32)
        valid = valid & ((small == 0) | (token < S.LAMPORT_TOKENS))
        address = tl.where(small, row_at(home, me, token, S), address)
    return address, flip, valid


@triton.jit
def store_sum(to, c, total, valid, flip, S: tl.constexpr):
    """Round ``total``, columns ``c`` of a sum, and store it in the row at ``to``, if ``valid``. ``flip``: of
    :func:`place_of_sum`."""
    row = round_to(total, S.ROW_DTYPE, S.NATIVE_CASTS)
    mask = only(valid, c < S.HIDDEN_SIZE)
    if S.LAMPORT_TOKENS > 0:
        bits = bits_of(row, flip, S)
        tl.store(to.to(tl.pointer_type(bits.dtype)) + c, bits, mask=mask)
    else:
        tl.store(to + c, row, mask=mask)


@triton.jit
def clear_rows(mine, S: tl.constexpr):
    """Store zeros in all Lamport slots of this rank."""
    i = tl.arange(0, S.BLOCK_SIZE)
    words = tl.multiple_of(row_at(mine, 0, 0, S).to(I32), 16)
    count = S.LAMPORT_RANKS * S.LAMPORT_TOKENS * (S.ROW_BYTES // 4)
    for c0 in range(0, count, S.BLOCK_SIZE):
        tl.store(words + c0 + i, tl.zeros([S.BLOCK_SIZE], tl.int32), mask=c0 + i < count)


@triton.jit
def bits_of(row, flip, S: tl.constexpr):
    """Return the bits of ``row``, of S.ROW_DTYPE, as integers of their size; inverted if ``flip`` is -1, unchanged if
    0.

    A NaN with all bits set becomes the NaN that arithmetic makes.
    """
    if S.ROW_DTYPE.primitive_bitwidth == 16:
        bits = row.to(tl.int16, bitcast=True)
        if S.ROW_DTYPE != tl.bfloat16:  # rounding to bf16 makes every NaN 0x7fff
            bits = tl.where(bits == -1, 0x7FFF, bits)
        return bits ^ flip.to(tl.int16)
    else:
        bits = row.to(tl.int32, bitcast=True)
        return tl.where(bits == -1, 0x7FFFFFFF, bits) ^ flip.to(tl.int32)


@triton.jit
def columns_of(words, S: tl.constexpr):
    """Return the columns that ``words`` [N] hold, inverted, in S.SUM_DTYPE."""
    bits = (words ^ -1).to(tl.uint32, bitcast=True)
    if S.ROW_DTYPE.primitive_bitwidth == 16:
        low = (bits & 0xFFFF).to(tl.uint16)
        high = (bits >> 16).to(tl.uint16)
        halves = tl.reshape(tl.join(low, high), (2 * words.shape[0],))
        return halves.to(S.ROW_DTYPE, bitcast=True).to(S.SUM_DTYPE)
    else:
        return bits.to(S.ROW_DTYPE, bitcast=True).to(S.SUM_DTYPE)


@triton.jit
def is_missing(words, S: tl.constexpr):
    """Return where an element of ``words`` has not arrived."""
    if S.ROW_DTYPE.primitive_bitwidth == 16:
        return ((words & 0xFFFF) == 0) | ((words & -65536) == 0)
    else:
        return words == 0


@triton.jit
def word_numbers(first, S: tl.constexpr):
    """Return the numbers of the words that hold columns [first, first + S.BLOCK_SIZE) of a row."""
    each: tl.constexpr = 32 // S.ROW_DTYPE.primitive_bitwidth
    return first // each + tl.arange(0, S.BLOCK_SIZE // each)


@triton.jit
def words_at(mine, rank, token, S: tl.constexpr):
    """Return the addresses of the words of row (``rank``, ``token``) of this rank."""
    return tl.multiple_of(row_at(mine, rank, token, S).to(I32), 16)


@triton.jit
def sender_at(i, me, S: tl.constexpr):
    """Return the ``i``-th rank whose rows may come to rank ``me``: rank i, or where own rows stay the i-th after it."""
    if S.OWN_ROWS_STAY:
        return (me + 1 + i) % S.WORLD_SIZE
    else:
        return i


@triton.jit
def leave_zeros(mine, me, slots, token, n, mask, S: tl.constexpr):
    """Clear words ``n`` of a token's rows, under ``mask``, which have been read, for a later call."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    for i in tl.static_range(S.WORLD_SIZE - S.OWN_ROWS_STAY):
        rank = sender_at(i, me, S)
        sent = only(tl.max(tl.where(r == rank, slots, -1), 0) >= 0, mask)
        tl.store(words_at(mine, rank, token, S) + n, tl.zeros(n.shape, tl.int32), mask=sent)


@triton.jit
def sum_rows(mine, me, slots, token, first, limit, arrivals, S: tl.constexpr):
    """Wait until columns [first, first + S.BLOCK_SIZE) of a token's rows have arrived, sum them in S.SUM_DTYPE, ranks
    ascending, and store zeros.

    ``slots`` [ranks]: the token's message slot at each rank, -1 where it did not go. Returns (arrived, rank that is
    missing, sum), with arrived as in ``signals.wait_all``. All ranks' rows are loaded before any is checked, and they
    are summed meanwhile: the sum is valid if no row was missing. ``arrivals`` [ranks]: where to stamp that a rank's row
    has come (``tracing.device.stamps``).
    """
    tl.static_assert(S.LAMPORT_RANKS == S.WORLD_SIZE - S.OWN_ROWS_STAY)  # each row that comes has a slot of its own
    looks: tl.constexpr = looks_of(S.CLOCK)
    poison = (mine + S.OFFSET_POISON).to(I64)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    n = word_numbers(first, S)
    inside = n < S.HIDDEN_SIZE * S.ROW_DTYPE.primitive_bitwidth // 32
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
    missing = tl.zeros(n.shape, tl.int32)
    start = clock(S.CLOCK)
    look = tl.full([], 0, tl.int32)
    state = look + UNFINISHED
    while state == UNFINISHED:
        total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
        missing = tl.zeros(n.shape, tl.int32)
        late = tl.zeros(n.shape, tl.int64)
        for i in tl.static_range(S.WORLD_SIZE - S.OWN_ROWS_STAY):
            rank = sender_at(i, me, S)
            sent = only(tl.max(tl.where(r == rank, slots, -1), 0) >= 0, inside)
            words = tl.load(words_at(mine, rank, token, S) + n, mask=sent, other=-1, volatile=True)
            missing = tl.where(is_missing(words, S), rank + 1, missing)
            late = note_late(late, is_missing(words, S), rank, S)
            total += columns_of(words, S)
        note_whole(arrivals, slots >= 0, late, S)
        state = tl.where(block_uniform(1 - tl.minimum(tl.max(missing, 0), 1)) > 0, OK, UNFINISHED)
        look += 1
        if (state == UNFINISHED) & (look % looks == 0):
            state = check_timeout(poison, start, limit, S.CLOCK)
    leave_zeros(mine, me, slots, token, n, only(state == OK, inside), S)
    return state, tl.maximum(tl.max(missing, 0) - 1, 0), total


@triton.jit
def stand_in(mine, absent, slot_of, num_tokens, S: tl.constexpr):
    """Store sums of zero in place of the ranks ``absent`` [ranks], whose rows will not come, so that every wait ends.

    The CTA that learns of their absence calls it. It stores only what will be read, and so cleared: the rows of tokens
    that went to these ranks.
    """
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    i = tl.arange(0, S.BLOCK_SIZE)
    count: tl.constexpr = S.HIDDEN_SIZE * S.ROW_DTYPE.primitive_bitwidth // 32
    for token in range(num_tokens):
        slots = tl.load(slot_of + token * S.WORLD_SIZE + r, mask=absent & (r < S.WORLD_SIZE), other=-1)
        for rank in range(S.WORLD_SIZE):
            if tl.max(tl.where(r == rank, slots, -1), 0) >= 0:
                words = words_at(mine, rank, token, S)
                for c0 in range(0, count, S.BLOCK_SIZE):
                    tl.store(words + c0 + i, i * 0 - 1, mask=c0 + i < count)
