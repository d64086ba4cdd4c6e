"""Combine: sums of a small call go home as rows that are their own signal (``kernels.sync.small_calls``).

Expert rank r stores row (r, token) of ``small_rows`` at home, inverted; home waits until no part of the rows of its
token is zero, sums them and stores zeros. Home had ``num_tokens`` tokens, which dispatch told the expert's rank, and
``small_calls.is_small`` says which form the call has.

Example: bf16 columns 1.0, 2.0 (bits 0x3f80, 0x4000) travel as 0xc07f, 0xbfff, which home loads as the word 0xbfffc07f.
A NaN is 0x7fff and travels as 0x8000; 0xffff would travel as zero, so it is made 0x7fff.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only
from moelink.kernels.sync.signals import I32, I64, agree, clock, patience
from moelink.kernels.sync.small_calls import row_at


@triton.jit
def bits_of(row, flip, S: tl.constexpr):
    """The bits of ``row``, of DTYPE, as integers of their size; inverted if ``flip`` is -1, as they are if it is 0. A
    NaN with all bits set becomes the one that arithmetic makes."""
    if S.DTYPE.primitive_bitwidth == 16:
        bits = row.to(tl.int16, bitcast=True)
        if S.DTYPE != tl.bfloat16:  # whose rounding makes every NaN 0x7fff
            bits = tl.where(bits == -1, 0x7FFF, bits)
        return bits ^ flip.to(tl.int16)
    else:
        bits = row.to(tl.int32, bitcast=True)
        return tl.where(bits == -1, 0x7FFFFFFF, bits) ^ flip.to(tl.int32)


@triton.jit
def columns_of(words, S: tl.constexpr):
    """The columns that ``words`` [N] hold, inverted, in ACC."""
    bits = (words ^ -1).to(tl.uint32, bitcast=True)
    if S.DTYPE.primitive_bitwidth == 16:
        low = (bits & 0xFFFF).to(tl.uint16)
        high = (bits >> 16).to(tl.uint16)
        halves = tl.reshape(tl.join(low, high), (2 * words.shape[0],))
        return halves.to(S.DTYPE, bitcast=True).to(S.ACC)
    else:
        return bits.to(S.DTYPE, bitcast=True).to(S.ACC)


@triton.jit
def is_missing(words, S: tl.constexpr):
    """Where an element of ``words`` has not come."""
    if S.DTYPE.primitive_bitwidth == 16:
        return ((words & 0xFFFF) == 0) | ((words & -65536) == 0)
    else:
        return words == 0


@triton.jit
def word_numbers(first, S: tl.constexpr):
    """Numbers of the words that hold columns [first, first + BLOCK) of a row."""
    each: tl.constexpr = 32 // S.DTYPE.primitive_bitwidth
    return first // each + tl.arange(0, S.BLOCK // each)


@triton.jit
def words_at(mine, rank, token, S: tl.constexpr):
    """The words of row (``rank``, ``token``) of this rank."""
    return tl.multiple_of(row_at(mine, rank, token, S).to(I32), 16)


@triton.jit
def leave_zeros(mine, slots, token, n, mask, S: tl.constexpr):
    """Words ``n`` of a token's rows have been read, those under ``mask``: clear them for a later call."""
    r = tl.arange(0, S.WP)
    for rank in tl.static_range(S.W):
        sent = only(tl.max(tl.where(r == rank, slots, -1), 0) >= 0, mask)
        tl.store(words_at(mine, rank, token, S) + n, tl.zeros(n.shape, tl.int32), mask=sent)


@triton.jit
def sum_rows(mine, slots, token, first, limit, S: tl.constexpr):
    """Sum of columns [first, first + BLOCK) of a token's rows, ranks ascending, in ACC; waits until all are there, and
    leaves zeros.

    ``slots`` [WP]: the token's message slot at each rank, -1 where it did not go. Returns (arrived, rank that is
    missing, sum): arrived as in ``signals.wait_all``. All ranks' rows are loaded before any is looked at, and summed
    meanwhile: the sum counts if none was missing.
    """
    looks: tl.constexpr = 16 if S.CLOCK == "ptx" else 1
    poison = (mine + S.O_POISON).to(I64)
    r = tl.arange(0, S.WP)
    n = word_numbers(first, S)
    inside = n < S.H * S.DTYPE.primitive_bitwidth // 32
    total = tl.zeros([S.BLOCK], S.ACC)
    missing = tl.zeros(n.shape, tl.int32)
    start = clock(S.CLOCK)
    look = tl.full([], 0, tl.int32)
    state = look + 2
    while state == 2:
        total = tl.zeros([S.BLOCK], S.ACC)
        missing = tl.zeros(n.shape, tl.int32)
        for rank in tl.static_range(S.W):
            sent = only(tl.max(tl.where(r == rank, slots, -1), 0) >= 0, inside)
            words = tl.load(words_at(mine, rank, token, S) + n, mask=sent, other=-1, volatile=True)
            missing = tl.where(is_missing(words, S), rank + 1, missing)
            total += columns_of(words, S)
        state = tl.where(agree(1 - tl.minimum(tl.max(missing, 0), 1)) > 0, 1, 2)
        look += 1
        if (state == 2) & (look % looks == 0):
            state = patience(poison, start, limit, S.CLOCK)
    leave_zeros(mine, slots, token, n, only(state == 1, inside), S)
    return state, tl.maximum(tl.max(missing, 0) - 1, 0), total


@triton.jit
def stand_in(mine, absent, slot_of, num_tokens, S: tl.constexpr):
    """Store sums of zero in place of the ranks ``absent`` [WP], whose rows will not come: nobody waits for them in
    vain. For the program that learns of it. Only what is read, and so cleared: the rows of tokens that went there."""
    r = tl.arange(0, S.WP)
    i = tl.arange(0, S.BLOCK)
    count: tl.constexpr = S.H * S.DTYPE.primitive_bitwidth // 32
    for token in range(num_tokens):
        slots = tl.load(slot_of + token * S.W + r, mask=absent & (r < S.W), other=-1)
        for rank in range(S.W):
            if tl.max(tl.where(r == rank, slots, -1), 0) >= 0:
                words = words_at(mine, rank, token, S)
                for c0 in range(0, count, S.BLOCK):
                    tl.store(words + c0 + i, i * 0 - 1, mask=c0 + i < count)
