"""Choose the experts of each token from its logits, and their weights: an operator with its gradient.

Legend: ``T`` tokens, ``E`` experts, ``K`` topk. On CUDA one kernel computes it (:mod:`moelink.rows.choose_kernel`),
elsewhere, and for fp64, the twin in torch. With logits ``x`` and bias ``b``::

    s = 1 / (1 + exp(-x))  or  exp(x - max x) / sum exp(x - max x)    scores
    c = s + b                                                      are compared; x itself if neither a bias nor a sum of
                                                                   two scores takes part: it has the order of s
    ids = the K experts of the largest c, in the best groups
    w = s[ids], divided by their sum if renormalised, times the scaling factor

Renormalised scores of a softmax are the softmax of the K logits, and are computed as such.

Guarantees, in fp32:

* Kernel and twin agree **bit for bit**, interpreted and compiled, on CPU and CUDA, and the bits of a token do not
  depend on other tokens. (Which NaN a NaN is, is unspecified.) Every operation is rounded once, none is fused; the
  exponential is that of :mod:`moelink.rows.activation`, but zero below -80. Sums are of multiples of 2**-40, as
  integers, so they have no order. Scores that are to be renormalised are first divided by the largest of them.
* The relative error of a weight is at most 16 * 2**-24, and for a softmax 2 * d * 2**-24 more, where d is the largest
  distance of a logit from the largest one; if all its scores are above 2**-115.
* Of equal numbers the lower id comes first. NaN is larger than any other number; -0 equals 0. A group that is not
  chosen lends no expert, also where all others have -inf.
* A token with NaN among its logits, or for softmax +inf, or -inf alone, has NaN for weights: all of them if they are
  renormalised or of a softmax, else those of the NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.rows import eager
from moelink.rows.activation import exp
from moelink.rows.choice import LEAST, STEPS, Choice


def choose(logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return ids [T, K] int32, best first, and weights [T, K], of ``logits`` [T, E] fp32 or fp64 and ``bias`` [E] of
    the same dtype. Weights are differentiable in ``logits``.

    >>> logits, choice = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).log(), Choice(2, "softmax", True, 1, 1, "max", 10.0)
    >>> ids, weights = choose(logits, None, choice)
    >>> ids.tolist(), weights.round(decimals=3).tolist()
    ([[1, 2]], [[6.0, 4.0]])
    """
    operator = torch.ops.moelink.choose_experts
    return eager.run(operator, _choose, _Choose, logits, bias, *choice)  # type: ignore[no-any-return]


def twin(logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """The same with torch's operators, without gradients."""
    highest = total = None
    compared = logits
    if choice.compares_scores(bias is not None) or (choice.scoring == "softmax" and not choice.renormalize):
        scores, highest, total = _scores(logits, choice.scoring)
        compared = scores if choice.compares_scores(bias is not None) else logits
    if bias is not None:
        compared = compared + bias
    order = _order(compared)
    if choice.is_limited:
        barred = _barred(compared, choice).gather(1, order)
        order = order.gather(1, barred.byte().sort(dim=-1, stable=True).indices)
    ids = order[:, : choice.topk]
    chosen = logits.gather(1, ids)
    if choice.scoring == "sigmoid":
        weights = _sigmoid(chosen)
        if choice.renormalize:
            weights = weights / weights.amax(-1, keepdim=True).clamp(min=LEAST)
    elif choice.renormalize:
        distance = chosen - _finite(chosen.amax(-1, keepdim=True))
        weights = _power(distance if highest is None else distance - (highest - highest))
    else:
        assert highest is not None
        assert total is not None
        weights = _power(chosen - highest) / total
    if choice.renormalize:
        weights = weights / _sum(weights)
    return ids.int(), weights * choice.scaling_factor


def _order(values: Tensor) -> Tensor:
    """Indices of the ``values`` of each row, the largest first, of equal ones the lowest first."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def _barred(compared: Tensor, choice: Choice) -> Tensor:
    """Whether each expert [T, E] is in a group that is not chosen."""
    grouped = compared.unflatten(1, (choice.num_groups, -1))
    values = grouped.topk(2, dim=-1).values.sum(-1) if choice.group_score == "top2" else grouped.amax(-1)
    best = _order(values)[:, : choice.topk_groups]
    barred = torch.ones_like(values, dtype=torch.bool).scatter(1, best, False)
    return barred[:, :, None].expand_as(grouped).flatten(1)


def _scores(logits: Tensor, scoring: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores [T, E], and of a softmax the largest logit, NaN if it is not finite, and the sum of powers [T, 1]."""
    if scoring == "sigmoid":
        return _sigmoid(logits), None, None
    highest = _finite(logits.amax(-1, keepdim=True))
    powers = _power(logits - highest)
    total = _sum(powers)
    return powers / total, highest, total


def _finite(values: Tensor) -> Tensor:
    """``values``, with NaN for infinite ones."""
    return values + (values - values)


def _sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid() if x.dtype == torch.float64 else 1.0 / (exp(-x) + 1.0)


def _power(x: Tensor) -> Tensor:
    """e**x of x <= 0."""
    return x.exp() if x.dtype == torch.float64 else torch.where(x < -80.0, 0.0, exp(x))


def _sum(values: Tensor) -> Tensor:
    """The sum of each row [T, n] of numbers in [0, 1] as [T, 1]: at least one step, the same in any order."""
    if values.dtype == torch.float64:
        return values.sum(-1, keepdim=True).clamp(min=LEAST)
    steps = (values.nan_to_num(0.0) * STEPS).to(torch.int64)
    return steps.sum(-1, keepdim=True).clamp(min=1).to(torch.float32) * (1 / STEPS)


def _choose(
    logits: Tensor, bias: Tensor | None, topk: int, scoring: str, renormalize: bool, num_groups: int, topk_groups: int,
    group_score: str, scaling_factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    choice = topk, scoring, renormalize, num_groups, topk_groups, group_score, scaling_factor
    if not eager.takes_kernels(logits) or logits.dtype == torch.float64:
        return twin(logits, bias, Choice(*choice))
    if not logits.shape[0]:
        return _choose_fake(logits, bias, topk)
    given = (logits.contiguous(),) if bias is None else (logits.contiguous(), bias.contiguous())
    return eager.repeated(given, by_kernel, *choice)  # type: ignore[return-value]


def by_kernel(logits: Tensor, *given: Any) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    """Launch the kernel: a function on rows (:func:`moelink.rows.eager.repeated`). ``given``: the bias, if there is
    one, and the fields of a :class:`Choice`."""
    from moelink.rows.choose_kernel import launch

    bias, choice = given[: -len(Choice._fields)], Choice(*given[-len(Choice._fields) :])
    ids, weights = _choose_fake(logits, None, choice.topk)
    launch(logits, bias[0] if bias else None, ids, weights, choice)
    return (ids, weights), ()


def _choose_fake(logits: Tensor, bias: Tensor | None, topk: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], topk
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, *choice = inputs
    ctx.choice = Choice(*choice)
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(logits, output[0])


def _backward(ctx: Any, _: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
    (logits, ids), choice = ctx.saved_tensors, ctx.choice
    given = grad, logits, ids
    if eager.is_unseen(given) and eager.takes_kernels(logits) and logits.dtype == torch.float32 and logits.shape[0]:
        tensors = tuple([tensor.contiguous() for tensor in given])
        made = eager.repeated(tensors, _gradient_by_kernel, *choice)[0]
    else:
        made = gradient(grad, logits, ids, choice)
    return made, *[None] * (1 + len(choice))


def _gradient_by_kernel(grad: Tensor, logits: Tensor, ids: Tensor, *choice: Any) -> tuple[tuple[Tensor], tuple[()]]:
    from moelink.rows.choose_kernel import launch_gradient

    out = torch.empty_like(logits)
    launch_gradient(grad, logits, ids, out, Choice(*choice))
    return (out,), ()


_Choose = eager.function_of(_choose, _save, _backward)
_operator = torch.library.custom_op("moelink::choose_experts", _choose, mutates_args=())
_operator.register_fake(_choose_fake)
_operator.register_autograd(_backward, setup_context=_save)


def gradient(grad: Tensor, logits: Tensor, ids: Tensor, choice: Choice) -> Tensor:
    """The gradient of logits [T, E] for ``grad`` [T, K], that of weights. Of a softmax that is not renormalised every
    logit has one, else the chosen ones. The kernel has other roundings."""
    where, into, d = ids.long(), torch.zeros_like(logits), grad * choice.scaling_factor
    if choice.scoring == "softmax" and not choice.renormalize:
        scores = logits.softmax(-1)
        d = d * scores.gather(1, where)
        return into.scatter_(1, where, d) - scores * d.sum(-1, keepdim=True)
    chosen = logits.gather(1, where)
    if choice.scoring == "softmax":
        shares = chosen.softmax(-1)
        return into.scatter_(1, where, shares * (d - (shares * d).sum(-1, keepdim=True)))
    scores = chosen.sigmoid()
    if choice.renormalize:
        total = scores.sum(-1, keepdim=True).clamp(min=LEAST)
        d = (d - (d * scores / total).sum(-1, keepdim=True)) / total
    return into.scatter_(1, where, d * scores * (1 - scores))
