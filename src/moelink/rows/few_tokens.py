"""The route of few tokens: their logits and the choice of experts, whose two launches a replay makes together.

The host spends more time on an eager call than the device on few tokens. So where nothing records or watches
operators, :mod:`moelink.rows.wide_product` and :mod:`moelink.rows.choose` are one function on rows here, which makes
the same launches and so has the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelink.rows import choose, eager, wide_product
from moelink.rows.choice import Choice


def are_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether :func:`route_few` takes tokens ``x`` [T, H], a router's ``weight`` [E, H] and its ``bias`` [E]:
    kernels compute both parts, and nothing else than these must see the call."""
    # First, as a tracer that sees a comparison of sizes makes a program for each of its results.
    if not eager.takes_kernels(x) or not eager.is_unseen((x, weight, bias)):
        return False
    if not x.dtype == weight.dtype == torch.bfloat16 or (bias is not None and bias.dtype != torch.float32):
        return False
    records = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not records and wide_product.has_few_logits(x.shape[0], weight)


def route_few(x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, ...]:
    """Return logits [T, E] fp32, ids [T, K] int32, best first, and weights [T, K] fp32, where :func:`are_few`."""
    given = (x.contiguous(), weight.contiguous(), *(() if bias is None else (bias.contiguous(),)))
    return eager.repeated(given, _by_kernels, *choice)


def _by_kernels(x: Tensor, weight: Tensor, *given: Any) -> tuple[tuple[Tensor, ...], tuple[()]]:
    (logits,), _ = wide_product.by_kernel(x, weight)
    chosen, _ = choose.by_kernel(logits, *given)
    return (logits, *chosen), ()
