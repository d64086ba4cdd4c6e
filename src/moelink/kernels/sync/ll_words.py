"""Store and await LL words: a value in the low half and its call number in the high half, so that no signal is needed.

A word is stored and read in one piece, so a reader that finds the awaited call in it also has the value that was stored
with it. No release has to wait until earlier stores have arrived, the reader waits for no second word, and a plain load
that no cache answers is enough. That saves a round trip where few words are sent.

A sender overwrites a word only after the receiver has granted credit for the call before. So a receiver never sees a
later call than the one it waits for. 31 bits of the call number are enough where each word is written in every call, as
counts are.

Example: value 5 of call 3 is 3 * 2**32 + 5.
"""

import triton
import triton.language as tl

from moelink.kernels.sync.signals import OK, UNFINISHED, block_uniform, check_timeout, clock, looks_of
from moelink.memory.protocol import MASKED_CALL
from moelink.tracing.device.stamps import note_reached

_MASKED = tl.constexpr(MASKED_CALL)


@triton.jit
def ll_word(call, value):
    """Return words [N] of call ``call`` that hold the 32 bits of ``value`` [N]."""
    return ((tl.cast(call, tl.int64) & 0x7FFFFFFF) << 32) | (value.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def value_at(words, mask):
    """Load the values of LL words, int32; 0 where masked. The words must be known to belong to the call."""
    return (tl.load(words, mask=mask, other=0, volatile=True) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def wait_ll_words_above(
    words,
    mask,
    number,
    SHIFT: tl.constexpr,
    poison,
    limit,
    CLOCK: tl.constexpr,
    arrivals=0,
    TRACE: tl.constexpr = False,
):
    """Poll words (a block [R, N] of int64 pointers) until all under ``mask`` have ``number`` above their lower SHIFT
    bits. With SHIFT 32 words of masked ranks are not awaited (``memory.absence``).

    Returns (arrived, words, missing): arrived as in ``signals.wait_all``; words and missing [R, N] of the last look.
    """
    looks: tl.constexpr = looks_of(CLOCK)
    start = clock(CLOCK)
    look = tl.full([], 0, tl.int32)
    state = look + UNFINISHED
    word = tl.zeros(mask.shape, tl.int64)
    missing = tl.zeros(mask.shape, tl.int32)
    while state == UNFINISHED:
        word = tl.load(words, mask=mask, other=0, volatile=True)
        if SHIFT == 32:
            missing = (mask & ((word >> 32) != number) & ((word >> 32) != _MASKED)).to(tl.int32)
        else:
            missing = (mask & ((word >> SHIFT) != number)).to(tl.int32)
        note_reached(arrivals, tl.max(missing, 1) == 0, CLOCK, TRACE)
        here = tl.max(tl.reshape(missing, (mask.shape[0] * mask.shape[1],)), 0) == 0
        state = tl.where(block_uniform(here.to(tl.int32)) > 0, OK, UNFINISHED)
        look += 1
        if (state == UNFINISHED) & (look % looks == 0):
            state = check_timeout(poison, start, limit, CLOCK)
    tl.debug_barrier()
    return state, word, missing


@triton.jit
def wait_ll_words(words, mask, call, poison, limit, CLOCK: tl.constexpr, arrivals=0, TRACE: tl.constexpr = False):
    """Wait until all words under ``mask`` (a block [R, N] of int64 pointers) belong to ``call``.

    Returns (arrived, row): arrived as in ``signals.wait_all``; row is the first one that misses words, if any does.
    Many CTAs poll the same words, so they poll with loads, which do not hold up a peer that stores there. Callers load
    the values again in the form in which they need them, because rearranging a block takes longer. ``arrivals`` [R]:
    where to stamp that a row has come (``tracing.device.stamps``).
    """
    state, _, missing = wait_ll_words_above(words, mask, call & 0x7FFFFFFF, 32, poison, limit, CLOCK, arrivals, TRACE)
    row = tl.full([], 0, tl.int32)
    if state != OK:
        rows = tl.arange(0, missing.shape[0])
        row = tl.min(tl.where(tl.max(missing, 1) > 0, rows, missing.shape[0]), 0)
    return state, row
