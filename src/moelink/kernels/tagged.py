"""Words that are their own signal: a value in the low half, the call it belongs to in the high half.

A word is stored and read in one piece, so whoever reads the awaited call in it reads the value that was stored with it:
no release has to wait until earlier stores have arrived, and no second word has to be waited for. That saves a round
trip where few words are sent. A sender overwrites a word only after the receiver has drained the call before, so a
receiver never sees a later call than the one it waits for; of the call number 31 bits are enough, because each word is
written in every call.

Example: value 5 of call 3 is 3 * 2**32 + 5.
"""

import triton
import triton.language as tl

from moelink.kernels.signals import clock, patience


@triton.jit
def tagged(call, value):
    """Words [N] of call ``call`` that hold ``value`` [N] (int32, not negative)."""
    return ((tl.cast(call, tl.int64) & 0x7FFFFFFF) << 32) | value.to(tl.int64)


@triton.jit
def _missing(words, mask, call):
    """Per row of ``words`` [R, N]: how many under ``mask`` are not of ``call``."""
    return tl.sum((mask & ((words >> 32) != (call & 0x7FFFFFFF))).to(tl.int32), 1)


@triton.jit
def wait_tagged(head, head_mask, body, body_mask, call, poison, limit, CLOCK: tl.constexpr):
    """Wait until all words of two blocks of int64 pointers, [R, N] and [R, M], belong to ``call``.

    Returns (arrived, row, values of head, values of body), int32: arrived as in ``signals.wait_all``; row is the first
    one that misses words. Most of the time passes with looks at the head alone: many programs look at the same words,
    and every look costs those who store there.
    """
    looks: tl.constexpr = 16 if CLOCK == "ptx" else 1
    start = clock(CLOCK)
    look = tl.full([], 0, tl.int32)
    state = look + 2
    first = tl.zeros(head.shape, tl.int64)
    second = tl.zeros(body.shape, tl.int64)
    missing = tl.zeros([head.shape[0]], tl.int32)
    while state == 2:
        first = tl.atomic_add(head, 0, mask=head_mask, sem="acquire", scope="sys")
        missing = _missing(first, head_mask, call)
        if tl.max(missing, 0) == 0:
            second = tl.atomic_add(body, 0, mask=body_mask, sem="acquire", scope="sys")
            missing = _missing(second, body_mask, call)
            state = tl.where(tl.max(missing, 0) == 0, 1, 2)
        look += 1
        if (state == 2) & (look % looks == 0):
            state = patience(poison, start, limit, CLOCK)
    tl.debug_barrier()
    rows = tl.arange(0, missing.shape[0])
    row = tl.min(tl.where(missing > 0, rows, missing.shape[0]), 0)
    first = tl.where(head_mask, (first & 0xFFFFFFFF).to(tl.int32), 0)
    second = tl.where(body_mask, (second & 0xFFFFFFFF).to(tl.int32), 0)
    return state, row, first, second
