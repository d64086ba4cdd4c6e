"""Combine: sums of a small call go home as words that are their own signal (``kernels.small_calls``).

Expert rank r stores row (r, token) of ``tagged_rows`` at home; home waits for every word of the ranks that its token
went to. Home had ``num_tokens`` tokens, which dispatch told the expert's rank, and :func:`is_tagged` says which form
the call has; without sums it always has the other one.

Example: a bf16 row of 6 columns in a call of 2 tokens is 3 words, which hold columns 0 and 1, 2 and 3, 4 and 5.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only
from moelink.kernels.signals import I64, agree, clock, patience
from moelink.kernels.small_calls import is_small, words_at
from moelink.kernels.tagged import tagged, words_of


@triton.jit
def is_tagged(num_tokens, call, S: tl.constexpr):
    """Whether this call, of a spec with or without sums, has them go as tagged words to a home of so many tokens."""
    if S.SUMS:
        return is_small(num_tokens, call, S)
    else:
        return num_tokens < 0


@triton.jit
def columns_of(words, S: tl.constexpr):
    """The columns that ``words`` hold, in ACC."""
    bits = (words & 0xFFFFFFFF).to(tl.uint32)
    if S.DTYPE.primitive_bitwidth == 16:
        low = (bits & 0xFFFF).to(tl.uint16)
        high = (bits >> 16).to(tl.uint16)
        halves = tl.reshape(tl.join(low, high), (2 * words.shape[0],))
        return halves.to(S.DTYPE, bitcast=True).to(S.ACC)
    else:
        return bits.to(S.DTYPE, bitcast=True).to(S.ACC)


@triton.jit
def word_numbers(first, S: tl.constexpr):
    """Numbers of the words that hold columns [first, first + BLOCK) of a row."""
    each: tl.constexpr = 32 // S.DTYPE.primitive_bitwidth
    return first // each + tl.arange(0, S.BLOCK // each)


@triton.jit
def store_words(row, words, first, valid, call, S: tl.constexpr):
    """Columns ``row`` [BLOCK] of a row from column ``first`` to the row whose words are at ``words``."""
    n = word_numbers(first, S)
    tl.store(words + n, words_of(row, call), mask=only(valid, n < S.H * S.DTYPE.primitive_bitwidth // 32))


@triton.jit
def sum_words(mine, slots, token, first, call, limit, S: tl.constexpr):
    """Sum of columns [first, first + BLOCK) of a token's rows, ranks ascending, in ACC; waits until all are there.

    ``slots`` [WP]: the token's message slot at each rank, -1 where it did not go. Returns (arrived, rank that is
    missing, sum): arrived as in ``signals.wait_all``. All ranks' words are loaded before any is looked at, and summed
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
            words = tl.load(words_at(mine, rank, token, S) + n, mask=sent, other=0, volatile=True)
            missing = tl.where(sent & ((words >> 32) != (call & 0x7FFFFFFF)), rank + 1, missing)
            total += columns_of(words, S)
        state = tl.where(agree(1 - tl.minimum(tl.max(missing, 0), 1)) > 0, 1, 2)
        look += 1
        if (state == 2) & (look % looks == 0):
            state = patience(poison, start, limit, S.CLOCK)
    return state, tl.maximum(tl.max(missing, 0) - 1, 0), total


@triton.jit
def stand_in(mine, absent, num_tokens, call, S: tl.constexpr):
    """Store zeros of this call in place of the ranks ``absent`` [WP], whose rows will not come: nobody waits for them
    in vain. For the program that learns of it."""
    r = tl.arange(0, S.WP)
    i = tl.arange(0, S.BLOCK)
    for rank in range(S.W):
        if tl.sum((absent & (r == rank)).to(tl.int32), 0) > 0:
            words = words_at(mine, rank, 0, S)
            for c0 in range(0, num_tokens * S.TW, S.BLOCK):
                tl.store(words + c0 + i, tagged(call, i * 0), mask=c0 + i < num_tokens * S.TW)
