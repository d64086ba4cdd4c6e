"""Assign work to the CTAs of a launch; with an SM limit, also decide which CTAs work at all.

Without a limit CTA i does the work of number i. With one (S.NUM_SMS SMs, ``init(num_sms=)``) the device would still
spread the CTAs over all SMs that have room, and a kernel that is meant to run beside them would find none of these SMs
empty. So a launch has as many CTAs as the whole device holds (``grid.grid``). The first CTA to reach an SM asks whether
the launch uses this SM: it uses the first S.NUM_SMS SMs that ask. CTAs there take numbers in the order in which they
come. CTAs elsewhere end at once, as long as enough CTAs are left to take all numbers; a CTA that arrives after the last
number has been assigned also ends. The working CTAs are on SMs that had free resources, even if another kernel runs.

Why every wait ends: numbers are taken in ascending order, so a CTA that has one knows that all lower ones have begun,
which is what the hardware promises for CTA ids. Why no number is left over: of G CTAs all take a number except those
that are let go, and no more than G - ``programs`` are let go.

The words of a launch, in region ``sm_limit``: numbers taken; SMs that asked; CTAs let go; CTAs that know what they do;
one word for each SM. The last CTA to know clears them for the next launch of that kind, which follows in stream order.
Kinds that may run at the same time have words of their own.

On few SMs (S.NUMBERS_IN_TURN) a CTA that has done its work takes the next number, until none is left; only then it
knows that it does no more. So both roles have all CTAs that the SMs hold: senders first, then receivers. Every wait
ends for the same reason: if a CTA works on a number, all lower ones have begun. No number is left over as long as one
CTA is not let go; as many stay as SMs may be used. A CTA may wait for another rank until its last number, so it allows
the next launch at its end alone (``kernels.sync.dependent_launch``).

Example: S.NUM_SMS = 2, 4 SMs that hold 3 CTAs each, 6 numbers: 12 CTAs are launched. Those of SMs 3 and 0 are the first
to ask, so their 6 CTAs take a number each and the other 6 are let go. If another kernel leaves room for one CTA on each
SM, and SMs 1 and 2 come last, 3 and 0 take numbers 0 and 1, then CTAs of 1 and 2 go, and so on: after six have gone all
that still come take numbers.

Example in turn: the same with 9 numbers. The 6 CTAs of SMs 3 and 0 take numbers 0 to 5, and the first three of them to
end take 6, 7 and 8.
"""

import triton
import triton.language as tl

from moelink.kernels.sync.signals import I32, own_block
from moelink.memory.protocol import MAX_SMS, SM_LIMIT_WORDS

_MOST = tl.constexpr(MAX_SMS)
_WORDS = tl.constexpr(SM_LIMIT_WORDS)
_ASKED, _LET_GO, _KNOWING = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_STATES = tl.constexpr(SM_LIMIT_WORDS - MAX_SMS)
_ASKING, _USED, _NOT_USED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def sm_id(SMID: tl.constexpr):
    """Return the number of the SM that runs this CTA. SMID: "ptx", or (interpreted) a Python function."""
    if SMID == "ptx":
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.full([], SMID(), tl.int32)


@triton.jit
def is_used(words, S: tl.constexpr):
    """Return 1 where this CTA's SM is one of the first S.NUM_SMS that had a CTA of this launch."""
    none = tl.full([], 0, tl.int32)
    state = words + _STATES + sm_id(S.SM_ID) % _MOST
    seen = tl.atomic_cas(state, none, none + _ASKING, sem="relaxed", scope="gpu")
    if seen == 0:
        seen = tl.where(tl.atomic_add(words + _ASKED, 1, sem="relaxed", scope="gpu") < S.NUM_SMS, _USED, _NOT_USED)
        tl.atomic_xchg(state, seen, sem="relaxed", scope="gpu")
    while seen == _ASKING:
        seen = tl.atomic_add(state, 0, sem="relaxed", scope="gpu")
    return (seen == _USED).to(tl.int32)


@triton.jit
def take_number(words, programs, S: tl.constexpr):
    """Take the number whose work this CTA does, of [0, ``programs``); a number outside means that it does nothing."""
    launched = tl.num_programs(0)
    number = tl.full([], 0, tl.int32) + programs
    stays = is_used(words, S)
    if stays == 0:
        gone = tl.atomic_add(words + _LET_GO, 1, sem="relaxed", scope="gpu")
        stays = (gone >= launched - least_that_stay(programs, S)).to(tl.int32)
    if stays > 0:
        number = next_number(words)
    if not S.NUMBERS_IN_TURN:
        leave(words)
    return number


@triton.jit
def least_that_stay(programs, S: tl.constexpr):
    """Return how many CTAs are not let go, at least."""
    if S.NUMBERS_IN_TURN:
        return tl.minimum(programs, S.NUM_SMS)
    else:
        return programs


@triton.jit
def next_number(words):
    """Take the next number."""
    return tl.atomic_add(words, 1, sem="relaxed", scope="gpu")


@triton.jit
def leave(words):
    """Say that this CTA takes no more numbers. The last one to say so clears the ``words`` of the launch."""
    if tl.atomic_add(words + _KNOWING, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        for i0 in tl.static_range(0, _WORDS, 128):
            i = i0 + tl.arange(0, 128)
            tl.store(words + i, tl.zeros([128], tl.int32), mask=i < _WORDS)


@triton.jit
def words_of(control, kind, S: tl.constexpr):
    """Return the words of this rank for a launch of ``kind``, [0, SM_LIMIT_KINDS)."""
    return (own_block(control, S) + S.OFFSET_SM_LIMIT).to(I32) + kind * _WORDS


@triton.jit
def run_numbers(work, arguments, words, programs, S: tl.constexpr):
    """Do what this CTA has to do of ``work(number, *arguments, S)``, within an SM limit."""
    number = take_number(words, programs, S)
    if S.NUMBERS_IN_TURN:
        while number < programs:
            work(number, *arguments, S)
            number = next_number(words)
        leave(words)
    else:
        if number < programs:
            work(number, *arguments, S)
