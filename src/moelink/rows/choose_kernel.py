"""Choose the experts of each token and their weights: ``moelink.rows.choose`` as one kernel.

A step is TOKENS tokens, each of which has a row of P = NUM_GROUPS' * SIZE' places; ' rounds up to a power of two. Place
p is expert ``p // SIZE' * SIZE + p % SIZE'``, so lower places are lower ids. Other places have no expert.
:mod:`moelink.rows.common_kernel` says which steps a program has.

What is compared becomes a *key*: fp32 bits as int32, made to have the order of the numbers, with the largest integer
for NaN. The lowest integer stands for places that cannot be chosen: those without an expert, of groups that are not
chosen, and those that are chosen already. Then each expert is two reductions of integers: the largest key, and the
first place that has it. A group is chosen if fewer than TOPK_GROUPS others are better, which compares all groups at
once.

The arithmetic is that of :mod:`moelink.rows.choose`, bit for bit.

Example: 6 experts in 2 groups, of which 1 is chosen by its best two; 2 experts; sigmoid, not renormalised, times 4.
Logits are 0 except for -inf of expert 2, so scores are 1/2 and 0.

============  =====================================
bias          [0, 0.25, 0.5, 0.5, 0, 0.5]
place         0 1 2 -  3 4 5 -
compared      [0.5, 0.75, 0.5], [1, 0.5, 1]
groups        0.75 + 0.5, 1 + 1: group 1
ids           [3, 5]
weights       [2, 2]
============  =====================================
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from moelink.formats.device import as_float, as_int
from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.launch.device import is_interpreted
from moelink.kernels.numeric import next_power_of_2
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import choice as shared
from moelink.rows import common_kernel as common
from moelink.rows.activation_kernel import exp

STEPS = tl.constexpr(shared.STEPS)
LEAST = tl.constexpr(shared.LEAST)
LOWEST = tl.constexpr(-0x80000000)
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, repr=False, eq=False)
class ChooseConstants(Constants):
    """The launch constants.

    Attributes:
        NUM_EXPERTS, TOPK, NUM_GROUPS, TOPK_GROUPS: as the choice; one group if all are chosen.
        SIZE: experts of a group.
        SOFTMAX: of the logits, else the sigmoid.
        SCORED: scores are compared, else logits.
        SUMMED: the scores of all experts are summed up.
        TOP2: a group's score is the sum of its best two.
        HAS_BIAS, RENORMALIZE, FACTOR: as the choice.
        TOKENS: at a time. DEPENDENT_LAUNCH: as of ``rows.common_kernel``.
    """

    NUM_EXPERTS: int
    TOPK: int
    NUM_GROUPS: int
    TOPK_GROUPS: int
    SIZE: int
    SOFTMAX: bool
    SCORED: bool
    SUMMED: bool
    TOP2: bool
    HAS_BIAS: bool
    RENORMALIZE: bool
    FACTOR: float
    TOKENS: int
    DEPENDENT_LAUNCH: bool = False


@triton.jit
def key_of(x):
    """Return int32 with the order of fp32. 0 -> 0, -0 -> 0, 2**-149 -> 1, -(2**-149) -> -2, NaN -> the largest."""
    bits = as_int(tl.where(x == 0.0, 0.0, x))
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def number_of(key):
    """Return the number that has ``key``."""
    return as_float(key ^ ((key >> 31) & 0x7FFFFFFF))


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``. 0 -> 1/2, NaN -> NaN."""
    return tl.where(x == x, tl.math.div_rn(1.0, exp(-x) + 1.0), x)


@triton.jit
def power(x):
    """e**x of x <= 0, zero below -80. 0 -> 1, NaN -> NaN."""
    return tl.where(x == x, tl.where(x < -80.0, 0.0, exp(x)), x)


@triton.jit
def finite(x):
    """``x``, with NaN for infinite ones."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def sum_of(values):
    """The sum of each row of numbers in [0, 1], at least one step; NaN counts as zero. [1/2, 1/4] -> 3/4."""
    steps = (tl.where(values == values, values, 0.0) * STEPS).to(tl.int64)
    return tl.maximum(tl.sum(steps, 1), 1).to(tl.float32) * (1.0 / STEPS)


@triton.jit
def first_of(keys, key, place, NONE: tl.constexpr, AXIS: tl.constexpr):
    """The first place along an axis that has ``key``."""
    return tl.min(tl.where(keys == key, place, NONE), AXIS)


@triton.jit
def without_barred(key, S: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr):
    """Keys [TOKENS, G * SIZE], with the lowest in groups that are not chosen."""
    grouped = tl.reshape(key, [S.TOKENS, G, SIZE])
    best = tl.max(grouped, 2)
    if S.TOP2:
        place = tl.arange(0, SIZE)[None, None, :]
        first = first_of(grouped, best[:, :, None], place, SIZE, 2)
        second = tl.max(tl.where(place == first[:, :, None], LOWEST, grouped), 2)
        best = key_of(number_of(best) + number_of(second))
    group = tl.arange(0, G)
    best = tl.where(group[None, :] < S.NUM_GROUPS, best, LOWEST)
    this, other = best[:, :, None], best[:, None, :]
    better = (other > this) | ((other == this) & (group[None, None, :] < group[None, :, None]))
    chosen = tl.sum(better.to(tl.int32), 2) < S.TOPK_GROUPS
    return tl.reshape(tl.where(chosen[:, :, None], grouped, LOWEST), [S.TOKENS, G * SIZE])


@triton.jit(do_not_specialize=["tokens", "topk"])
def choose_experts_kernel(logits, bias, ids, weights, tokens, topk, S: tl.constexpr):
    """See the module. ``topk`` is S.TOPK, as a value: a loop of known length would be unrolled, and a launch of few
    tokens fetches every instruction once."""
    follow_previous_launch(S)
    G: tl.constexpr = next_power_of_2(S.NUM_GROUPS)
    SIZE: tl.constexpr = next_power_of_2(S.SIZE)
    place = tl.arange(0, G * SIZE)[None, :]
    slot = tl.arange(0, next_power_of_2(S.TOPK))[None, :]
    expert = place // SIZE * S.SIZE + place % SIZE
    exists = (place % SIZE < S.SIZE) & (expert < S.NUM_EXPERTS)
    for step in range(tl.program_id(0), tl.cdiv(tokens, S.TOKENS), tl.num_programs(0)):
        token = (tl.cast(step, tl.int64) * S.TOKENS + tl.arange(0, S.TOKENS))[:, None]
        here = token < tokens
        logit = tl.load(logits + token * S.NUM_EXPERTS + expert, mask=here & exists, other=-float("inf"))
        compared = logit
        if S.SUMMED:
            highest = finite(number_of(tl.max(tl.where(exists, key_of(logit), LOWEST), 1)))[:, None]
            powers = power(logit - highest)
            total = sum_of(tl.where(exists, powers, 0.0))[:, None]
        if S.SCORED:
            compared = tl.math.div_rn(powers, total) if S.SUMMED else sigmoid(logit)
            if S.HAS_BIAS:
                compared += tl.load(bias + expert, mask=exists, other=0.0)
        key = tl.where(exists, key_of(compared), LOWEST)
        LIMITED: tl.constexpr = S.NUM_GROUPS > 1
        if LIMITED:
            key = without_barred(key, S, G, SIZE)
        chosen = tl.zeros([S.TOKENS, slot.shape[1]], tl.int32)
        for k in range(topk):
            at = first_of(key, tl.max(key, 1)[:, None], place, G * SIZE, 1)[:, None]
            key = tl.where(place == at, LOWEST, key)
            chosen = tl.where(slot == k, at, chosen)
        chosen = chosen // SIZE * S.SIZE + chosen % SIZE
        mine = here & (slot < S.TOPK)
        value = tl.load(logits + token * S.NUM_EXPERTS + chosen, mask=mine, other=-float("inf"))
        if not S.SOFTMAX:
            value = sigmoid(value)
        if S.RENORMALIZE:
            largest = number_of(tl.max(tl.where(mine, key_of(value), LOWEST), 1))[:, None]
            if S.SOFTMAX:
                value -= finite(largest)
                if S.SUMMED:
                    value -= highest - highest
                value = power(value)
            else:
                value = tl.math.div_rn(value, tl.where(largest < LEAST, LEAST, largest))
            value = tl.math.div_rn(value, sum_of(tl.where(mine, value, 0.0))[:, None])
        elif S.SOFTMAX:
            value = tl.math.div_rn(power(value - highest), total)
        to = token * S.TOPK + slot
        tl.store(ids + to, chosen, mask=mine)
        tl.store(weights + to, value * S.FACTOR, mask=mine)


@triton.jit(do_not_specialize=["tokens", "topk"])
def choose_gradient_kernel(grad, logits, ids, out, tokens, topk, S: tl.constexpr):
    """Store the gradient of logits [T, E] for ``grad`` [T, K], that of weights, by the formulas of
    :func:`moelink.rows.choose.gradient`.

    Example: 4 experts, sigmoid, not renormalised, times 4. Of logits 0 and ids [3, 1] with grad [1, 2], scores are 1/2
    and their slopes 1/4, so the gradient is [0, 2, 0, 1].
    """
    follow_previous_launch(S)
    place = tl.arange(0, next_power_of_2(S.NUM_EXPERTS))[None, :]
    slot = tl.arange(0, next_power_of_2(S.TOPK))[None, :]
    for step in range(tl.program_id(0), tl.cdiv(tokens, S.TOKENS), tl.num_programs(0)):
        token = (tl.cast(step, tl.int64) * S.TOKENS + tl.arange(0, S.TOKENS))[:, None]
        stored = (token < tokens) & (place < S.NUM_EXPERTS)
        mine = (token < tokens) & (slot < S.TOPK)
        chosen = tl.load(ids + token * S.TOPK + slot, mask=mine, other=0)
        d = tl.load(grad + token * S.TOPK + slot, mask=mine, other=0.0) * S.FACTOR
        value = tl.load(logits + token * S.NUM_EXPERTS + chosen, mask=mine, other=-float("inf"))
        row = tl.zeros([S.TOKENS, place.shape[1]], tl.float32)
        if not S.SOFTMAX:
            score = sigmoid(value)
            if S.RENORMALIZE:
                total = tl.maximum(tl.sum(tl.where(mine, score, 0.0), 1), LEAST)[:, None]
                d = (d - tl.sum(d * score / total, 1)[:, None]) / total
            d = d * score * (1.0 - score)
        elif S.RENORMALIZE:
            share = power(value - tl.max(value, 1)[:, None])
            share /= tl.sum(share, 1)[:, None]
            d = share * (d - tl.sum(share * d, 1)[:, None])
        else:
            logit = tl.load(logits + token * S.NUM_EXPERTS + place, mask=stored, other=-float("inf"))
            highest = tl.max(logit, 1)[:, None]
            score = power(logit - highest)
            total = tl.sum(score, 1)[:, None]
            d *= power(value - highest) / total
            row -= score / total * tl.sum(d, 1)[:, None]
        for k in range(topk):
            at = tl.sum(tl.where(slot == k, chosen, 0), 1)[:, None]
            row += tl.where(place == at, tl.sum(tl.where(slot == k, d, 0.0), 1)[:, None], 0.0)
        tl.store(out + token * S.NUM_EXPERTS + place, row, mask=stored)


@lru_cache(maxsize=256)
def _constants(choice: shared.Choice, experts: int, has_bias: bool) -> tuple[ChooseConstants, int]:
    """Return the launch constants for logits of ``experts`` experts, and the tokens of a step."""
    groups = choice.num_groups if choice.is_limited else 1
    places = triton.next_power_of_2(groups) * triton.next_power_of_2(experts // groups)
    at_once = max(1, (4096 if is_interpreted() else 128) // places)
    scored, softmax = choice.compares_scores(has_bias), choice.scoring == "softmax"
    return ChooseConstants(
        NUM_EXPERTS=experts, TOPK=choice.topk, NUM_GROUPS=groups, TOPK_GROUPS=choice.topk_groups,
        SIZE=experts // groups, SOFTMAX=softmax, SCORED=scored,
        SUMMED=softmax and (scored or not choice.renormalize), TOP2=choice.group_score == "top2",
        HAS_BIAS=has_bias, RENORMALIZE=choice.renormalize, FACTOR=choice.scaling_factor, TOKENS=at_once,
    ), at_once  # fmt: skip


def launch(
    logits: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor, choice: shared.Choice
) -> None:
    """Fill ``ids`` and ``weights`` [T, K], int32 and fp32, from ``logits`` [T, E] and ``bias`` [E], fp32. All are
    contiguous.

    A program is one warp, whose reductions need no barrier. Up to 128 experts have one load of 16 bytes in each thread,
    of several tokens if they are few.
    """
    tokens, experts = logits.shape
    if not tokens:
        return
    constants, at_once = _constants(choice, experts, bias is not None)
    common.launch(
        choose_experts_kernel, (logits, bias, ids, weights, tokens, choice.topk), constants,
        triton.cdiv(tokens, at_once), absent=logits, per_sm=32, num_warps=1,
    )  # fmt: skip


def launch_gradient(
    grad: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, choice: shared.Choice
) -> None:
    """Fill ``out`` [T, E] from ``grad`` [T, K], ``logits`` [T, E] and ``ids`` [T, K]; fp32, and int32. All are
    contiguous. No bits are promised."""
    tokens, experts = logits.shape
    if not tokens:
        return
    constants, at_once = _constants(choice, experts, False)
    common.launch(
        choose_gradient_kernel, (grad, logits, ids, out, tokens, choice.topk), constants,
        triton.cdiv(tokens, at_once), absent=logits, per_sm=32, num_warps=1,
    )  # fmt: skip
