"""Combine: rows of a small call as words that are their own signal (``kernels.tagged``).

A row that travels with a flag costs a fence between the two: the sender waits until the row has arrived before it may
say so, a round trip between two GPUs. With few tokens that is most of a call. So a call whose rows are few bytes sends
each 4 bytes of a row in a word of 8 that also holds the call: whoever finds the call in a word has what was stored with
it. Twice the bytes, and no order between any two words matters.

Who writes: expert rank r stores row (r, token) of ``tagged_rows`` at home, and nobody else ever does. So a word of an
earlier call, even one that was refused, is there before that of a later one. Who waits: home, for every word of the
ranks that its token went to. Why the next call cannot overtake: a rank stores only once home has drained the call
before (``kernels.drained``). How both sides know which form a call has: home had ``num_tokens`` tokens, which dispatch
told the expert's rank, and :func:`is_tagged` says it; without sums a call always has the other form.

A word may be left alone for any number of calls, and holds 31 bits of the call. So every 2**30th call has the other
form at all ranks, and clears what is older (:func:`clear_old_words`): no word ever seems to be of a call that it is not
of.

Example: call 5 and bf16 columns 1.0, 2.0 (bits 0x3f80, 0x4000): the word 0x00000005_40003f80.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only
from moelink.kernels.signals import I64, agree, clock, patience
from moelink.kernels.tagged import tagged

_OLD = tl.constexpr(2**30 - 1)


@triton.jit
def is_small(num_tokens, call, S: tl.constexpr):
    """Whether sums, if a rank sends any, go as tagged words to a home of so many tokens in call ``call``."""
    return (num_tokens <= S.TAGGED) & (num_tokens > 0) & ((call & _OLD) != 0)


@triton.jit
def is_tagged(num_tokens, call, S: tl.constexpr):
    """Whether this call, of a spec with or without sums, has them go as tagged words to a home of so many tokens."""
    if S.SUMS:
        return is_small(num_tokens, call, S)
    else:
        return num_tokens < 0


@triton.jit
def clear_old_words(mine, call, program, num_programs, S: tl.constexpr):
    """Every 2**30th call: the programs of the home role set all words to zero, which no call has.

    Nobody stores words of this call. One of the call before may still arrive if that was refused; it is not old.
    """
    if (call & _OLD) == 0:
        i = tl.arange(0, S.BLOCK)
        words = words_at(mine, 0, 0, S)
        count = S.W * S.TAGGED * S.TW
        for c0 in range(program * S.BLOCK, count, num_programs * S.BLOCK):
            tl.store(words + c0 + i, tl.zeros([S.BLOCK], tl.int64), mask=c0 + i < count)


@triton.jit
def words_of(row, call, S: tl.constexpr):
    """Words of columns ``row`` [N], of a dtype of 2 bytes ([N / 2] words) or of 4."""
    if S.DTYPE.primitive_bitwidth == 16:
        pairs = tl.reshape(row.to(tl.int16, bitcast=True), (row.shape[0] // 2, 2))
        low, high = tl.split(pairs)
        return tagged(call, (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16))
    else:
        return tagged(call, row.to(tl.int32, bitcast=True))


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
def words_at(block, rank, token, S: tl.constexpr):
    """Address of the words of row (``rank``, ``token``) in the block at address ``block``."""
    row = block + S.O_TAGGED + tl.cast(rank * S.TAGGED + token, tl.int64) * (S.TW * 8)
    return tl.multiple_of(row.to(I64), 16)


@triton.jit
def word_numbers(first, S: tl.constexpr):
    """Numbers of the words that hold columns [first, first + BLOCK) of a row."""
    each: tl.constexpr = 32 // S.DTYPE.primitive_bitwidth
    return first // each + tl.arange(0, S.BLOCK // each)


@triton.jit
def store_words(row, words, first, valid, call, S: tl.constexpr):
    """Columns ``row`` [BLOCK] of a row from column ``first`` to the row whose words are at ``words``."""
    n = word_numbers(first, S)
    tl.store(words + n, words_of(row, call, S), mask=only(valid, n < S.H * S.DTYPE.primitive_bitwidth // 32))


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
