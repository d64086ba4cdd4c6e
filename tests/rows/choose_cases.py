"""Forms of routers, logits of all kinds, and a loop over tokens that chooses their experts one thing after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moelink.rows.choice import Choice

SIZES = (
    (12, 3, ((1, 1), (4, 2), (3, 2))),
    (8, 2, ((1, 1),)),
    (60, 4, ((1, 1), (5, 2))),
    (160, 6, ((8, 3), (1, 1))),
    (256, 8, ((8, 4),)),
    (384, 8, ((1, 1), (6, 2))),
    (5, 5, ((1, 1),)),
)
"""Experts, topk, and (groups, of which so many are chosen)."""


class Form(NamedTuple):
    """A way to choose of so many experts."""

    experts: int
    has_bias: bool
    choice: Choice

    def __str__(self) -> str:
        c = self.choice
        words = (self.experts, c.topk, c.scoring, *["sum"] * c.renormalize, *["bias"] * self.has_bias)
        groups = (c.num_groups, c.topk_groups, c.group_score) if c.is_limited else ()
        return "-".join(map(str, words + groups))


def forms(sizes: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...] = SIZES) -> Iterator[Form]:
    """All forms of these sizes."""
    for experts, topk, groups in sizes:
        for (num, chosen), scoring, renormalize, has_bias in itertools.product(
            groups, ("softmax", "sigmoid"), (True, False), (False, True)
        ):
            for score in ("max", "top2") if num > 1 else ("max",):
                yield Form(experts, has_bias, Choice(topk, scoring, renormalize, num, chosen, score, 2.5))


LOGITS = ("normal", "equal", "odd")


def drawn(form: Form, logits: str, tokens: int = 19) -> tuple[Tensor, Tensor | None]:
    """Logits of a kind, and the bias if there is one: "equal" has few values, also in scores; "odd" has NaN, inf, -inf,
    -0 and numbers far out."""
    generator = torch.Generator().manual_seed(form.experts)
    experts, topk = form.experts, form.choice.topk
    bias = torch.randn(experts, generator=generator) if form.has_bias else None
    x = 4 * torch.randn(tokens, experts, generator=generator)
    if logits == "equal":
        x = torch.randint(-1, 2, (tokens, experts), generator=generator) * 30.0
        bias = None if bias is None else bias.round()
    if logits == "odd":
        for token, value in enumerate((math.nan, math.inf, -math.inf, -0.0, 1e38, -1e38)):
            places = torch.rand(2, experts, generator=generator).argsort(-1)[:, : min(topk + 1, experts)]
            x[token] = x[token].sign() * 0.0 if value == 0 else x[token]
            x[token, places[0]], x[token + 6, places[1, :1]] = value, value
        for token, value in enumerate((math.nan, math.inf, -math.inf, -90.0, 90.0), 12):
            x[token] = value
        x[17:] *= 1e30
        if bias is not None:
            bias[0] = -math.inf
    return x, bias


def choose_one(logits: list[float], bias: list[float], choice: Choice) -> tuple[list[int], list[float]]:
    """Experts and weights of one token, in fp64."""
    if choice.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    else:
        powers = [math.exp(value - max(logits)) for value in logits]
        scores = [power / math.fsum(powers) for power in powers]
    compared = [score + shift for score, shift in zip(scores, bias, strict=True)]
    size = len(logits) // choice.num_groups
    groups = [sorted(compared[first : first + size], reverse=True) for first in range(0, len(logits), size)]
    values = [group[0] + (group[1] if choice.group_score == "top2" else 0) for group in groups]
    allowed = sorted(range(len(groups)), key=lambda group: -values[group])[: choice.topk_groups]
    candidates = [expert for expert in range(len(logits)) if expert // size in allowed]
    ids = sorted(candidates, key=lambda expert: -compared[expert])[: choice.topk]
    weights = [scores[expert] for expert in ids]
    total = math.fsum(weights) if choice.renormalize else 1.0
    return ids, [weight / total * choice.scaling_factor for weight in weights]
