"""Small calls: those whose rows are their own signal (``kernels.sync.small_rows``); which these are, and where rows
lie.

A row that travels with a flag costs a fence between the two: the sender waits until the row has arrived before it may
say so, a round trip between two GPUs. With few tokens that is most of a call, of 512 an eighth. So home looks at the
row itself. It holds zeros where nothing has come, and what comes is never zero: bits travel inverted, and no element
has all bits set, as a NaN like that becomes another one (``small_rows.bits_of``). Each element is stored in one piece,
and no order between any two matters. Combine's sums travel so; a dispatch's payload may have any bits.

Who writes: rank r stores row (r, number) at home, and no other peer ever does; home stores zeros there once it has read
it. Why the next call cannot overtake, or be mistaken: a rank stores only once home has drained the call before
(``kernels.sync.credit``), which home tells after the launch that stored the zeros. What is sent is what is awaited, as
both follow from one dispatch; that it is the same one on all ranks is checked. So a row that has come is of this call.

Why a refused call breaks nothing: a rank that refuses reads none of what comes, and where ranks differ in whether they
sum, rows come that nobody awaits. Every rank notes such a call, as all of them learn of it (:func:`note_refused`). The
call after has the other form on all ranks, with flags, so nobody stores such rows then; and once every rank has begun
it all rows of the refused call have arrived, so they are cleared (:func:`clear_rows`). Notes are in two words, for odd
and even calls, so that what one call notes does not disturb those who still ask about it.

Example: up to 4 tokens, rows of 32 bytes: row 1 of rank 2 begins 32 * (2 * 4 + 1) bytes into the region. Call 5 is
refused: word 0 says 6, so call 6 has flags; word 1 still says what call 5 itself was.
"""

import triton
import triton.language as tl

from moelink.kernels.sync.signals import I32
from moelink.memory.protocol import COMBINE_WITH_FLAGS

_WITH_FLAGS = tl.constexpr(COMBINE_WITH_FLAGS)


@triton.jit
def follows_refusal(control, call):
    """Whether the call before ``call`` was refused by a rank, or made otherwise. Both words are read, as neither load
    waits for the call's number then; they name calls of different parity."""
    return (tl.load(control + _WITH_FLAGS) == call) | (tl.load(control + _WITH_FLAGS + 1) == call)


@triton.jit
def note_refused(control, call):
    """A rank refused call ``call``, or made it otherwise than others."""
    tl.store(control + _WITH_FLAGS + (call + 1) % 2, call + 1)


@triton.jit
def has_no_flags(control, num_tokens, call, S: tl.constexpr):
    """Whether sums, if a rank sends any, go home without flags to a rank of so many tokens in call ``call``."""
    return (num_tokens <= S.SMALL) & (num_tokens > 0) & (follows_refusal(control, call) == 0)


@triton.jit
def is_small(control, num_tokens, call, S: tl.constexpr):
    """Whether this rank's rows go, and come, without flags: :func:`has_no_flags`, if it sends sums."""
    if S.SUMS:
        return has_no_flags(control, num_tokens, call, S)
    else:
        return num_tokens < 0


@triton.jit
def row_at(block, rank, number, S: tl.constexpr):
    """Address of row (``rank``, ``number``) in the block at address ``block``."""
    return block + S.O_SMALL + tl.cast(rank * S.SMALL + number, tl.int64) * S.ROW


@triton.jit
def clear_rows(mine, S: tl.constexpr):
    """All rows of this rank are zeros again."""
    i = tl.arange(0, S.BLOCK)
    words = tl.multiple_of(row_at(mine, 0, 0, S).to(I32), 16)
    count = S.W * S.SMALL * (S.ROW // 4)
    for c0 in range(0, count, S.BLOCK):
        tl.store(words + c0 + i, tl.zeros([S.BLOCK], tl.int32), mask=c0 + i < count)
