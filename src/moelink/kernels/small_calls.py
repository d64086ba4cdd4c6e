"""Small calls: those whose rows travel as words that are their own signal (``kernels.tagged``), and where these lie.

A row that travels with a flag costs a fence between the two: the sender waits until the row has arrived before it may
say so, a round trip between two GPUs. With few tokens that is most of a call. So a call whose rows are few bytes sends
each 4 bytes of a row in a word of 8 that also holds the call: whoever finds the call in a word has what was stored with
it. Twice the bytes, and no order between any two words matters. Combine's sums do (``kernels.tagged_rows``); a
dispatch's messages were tried so, and took longer than with flags (docs/performance.md).

Who writes: rank r stores row (r, number) of a region at a peer, and no other peer ever does. So a word of an earlier
call, even one that was refused, is there before that of a later one. Why the next call cannot overtake: a rank stores
only once the peer has drained the call before (``kernels.drained``). How both sides know which form a call has: both
know how many tokens it has, and :func:`is_small` says whether it may be this one.

A word may be left alone for any number of calls, and holds 31 bits of the call. So every 2**30th call has the other
form at all ranks, and clears what is older (:func:`clear_old_words`): no word ever seems to be of a call that it is not
of.

Example: up to 4 tokens, rows of 32 words: row 1 of rank 2 begins 8 * 32 * (2 * 4 + 1) bytes into the region.
"""

import triton
import triton.language as tl

from moelink.kernels.signals import I64

_OLD = tl.constexpr(2**30 - 1)


@triton.jit
def is_small(num_tokens, call, S: tl.constexpr):
    """Whether rows that may travel as tagged words, those of a rank with so many tokens, do in call ``call``."""
    return (num_tokens <= S.TAGGED) & (num_tokens > 0) & ((call & _OLD) != 0)


@triton.jit
def clear_old_words(mine, call, program, num_programs, S: tl.constexpr):
    """Every 2**30th call: the programs of the receiving role set all words to zero, which no call has.

    Nobody stores words of this call. One of the call before may still arrive if that was refused; it is not old.
    """
    if (call & _OLD) == 0:
        i = tl.arange(0, S.BLOCK)
        words = words_at(mine, 0, 0, S)
        count = S.W * S.TAGGED * S.TW
        for c0 in range(program * S.BLOCK, count, num_programs * S.BLOCK):
            tl.store(words + c0 + i, tl.zeros([S.BLOCK], tl.int64), mask=c0 + i < count)


@triton.jit
def words_at(block, rank, number, S: tl.constexpr):
    """Address of the words of row (``rank``, ``number``) in the block at address ``block``."""
    row = block + S.O_TAGGED + tl.cast(rank * S.TAGGED + number, tl.int64) * (S.TW * 8)
    return tl.multiple_of(row.to(I64), 16)
