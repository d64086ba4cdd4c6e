"""A layer of an inference engine: its inputs and weights, its experts, and what torch makes of it on one rank.

The layer's experts are products by group in bf16, the same code between both dispatchers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from moelink.errors import ArgumentError
from moelink_bench.frameworks.dispatchers import Case, Contender, Parts

SIZES = (1, 32, 128, 1024, 4096)
"""Tokens of a rank: decode, and prefill."""

LAYER, EXCHANGE = "layer", "dispatch and combine"
"""What is timed. The latter has experts that compute nothing."""


@dataclass(frozen=True)
class Weights:
    """Weights of experts, bf16: gate and up projections [experts, 2 intermediate, hidden], and
    down [experts, hidden, intermediate]."""

    up: Tensor
    down: Tensor

    def of(self, experts: slice) -> Weights:
        """Return those of some experts, in memory of their own."""
        return Weights(self.up[experts].clone(), self.down[experts].clone())


def make_weights(case: Case) -> Weights:
    """Return the weights of all experts, the same on every rank."""
    generator = torch.Generator(case.device).manual_seed(1)

    def made(*shape: int) -> Tensor:
        values = torch.empty(shape, device=case.device, dtype=torch.bfloat16)
        return values.normal_(0, shape[-1] ** -0.5, generator=generator)

    return Weights(
        made(case.num_experts, 2 * case.intermediate_size, case.hidden_size),
        made(case.num_experts, case.hidden_size, case.intermediate_size),
    )


@dataclass(frozen=True)
class Batch:
    """Tokens of a rank: rows [tokens, hidden] bf16, router weights [tokens, topk] fp32, and ids likewise, int32."""

    x: Tensor
    weights: Tensor
    ids: Tensor


def make_batch(case: Case, rank: int, tokens: int) -> Batch:
    """Return the batch of ``rank``: each token's experts are drawn evenly, and their weights sum to 1."""
    generator = torch.Generator().manual_seed(100 * tokens + rank)
    x = torch.randn(tokens, case.hidden_size, generator=generator)
    weights, ids = torch.randn(tokens, case.num_experts, generator=generator).softmax(-1).topk(case.topk)
    weights /= weights.sum(-1, keepdim=True)
    return Batch(x.to(case.device, torch.bfloat16), weights.to(case.device), ids.int().to(case.device))


def products(rows: Tensor, weights: Weights, ends: Tensor) -> Tensor:
    """Return the experts' outputs of ``rows``, [rows, hidden], which lie grouped by expert; ``ends`` of the groups.

    Rows past the last end are not computed, and hold anything.
    """
    gate, value = torch._grouped_mm(rows, weights.up.transpose(1, 2), offs=ends).chunk(2, -1)
    out: Tensor = torch._grouped_mm(silu(gate) * value, weights.down.transpose(1, 2), offs=ends)
    return out


def weighed_experts(x: Tensor, weights: Weights, ids: Tensor, chosen: Tensor) -> Tensor:
    """Return [rows, hidden]: for each row of ``x`` the sum of its experts here, by router weight.

    Shapes do not depend on the routing and the host waits for nothing, so that a CUDA graph can capture it.

    Args:
        x: [rows, hidden].
        weights: of the experts here.
        ids: [rows, topk] integers that count the experts here from 0; all others are left out.
        chosen: [rows, topk], router weights.
    """
    experts, (rows, topk) = len(weights.up), ids.shape
    slots = torch.where((ids >= 0) & (ids < experts), ids, experts).view(-1)
    expert, order = slots.sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=x.device, dtype=expert.dtype), right=True)
    made = products(x[order // topk], weights, ends.int()).masked_fill_((expert == experts)[:, None], 0)
    by_slot = torch.empty_like(made)
    by_slot[order] = made
    return torch.bmm(chosen.to(x.dtype)[:, None], by_slot.view(rows, topk, -1))[:, 0]


def reference(batch: Batch, weights: Weights) -> Tensor:
    """Return the layer of ``batch`` on this rank alone, one expert after the other, summed in fp32."""
    total = torch.zeros_like(batch.x, dtype=torch.float32)
    for expert in batch.ids.unique().tolist():
        row, slot = (batch.ids == expert).nonzero(as_tuple=True)
        gate, value = (batch.x[row] @ weights.up[expert].T).chunk(2, -1)
        made = (silu(gate) * value) @ weights.down[expert].T
        total.index_add_(0, row, made.float() * batch.weights[row, slot, None])
    return total


class Inputs:
    """Batches of a rank by their tokens, and the weights of the case's experts.

    Attributes:
        batches: of each size.
        own: weights of this rank's experts.
    """

    def __init__(self, case: Case, rank: int, ranks: int) -> None:
        """Draw them. Raises ArgumentError where ranks would have different numbers of experts."""
        if case.num_experts % ranks:
            raise ArgumentError("experts", f"a multiple of {ranks}, the number of ranks", case.num_experts)
        self._weights = make_weights(case)
        self.own = self._weights.of(case.own_experts(rank, ranks))
        self.batches = {tokens: make_batch(case, rank, tokens) for tokens in case.tokens}

    def expected(self, tokens: int) -> Parts:
        """Return what the layer makes of a batch by :func:`reference`."""
        return {"out": reference(self.batches[tokens], self._weights)}

    def contender(
        self, name: str, run: Callable[[Batch, bool], Tensor], checked: Callable[[], None] = lambda: None
    ) -> Contender:
        """Return the contender of a dispatcher.

        Args:
            name: whose it is.
            run: returns what the layer makes of a batch; where its second argument is False, the experts compute
                nothing, and what it returns holds anything.
            checked: of :class:`~moelink_bench.frameworks.dispatchers.Contender`.
        """
        passes = {
            LAYER: lambda tokens: run(self.batches[tokens], True),
            EXCHANGE: lambda tokens: run(self.batches[tokens], False),
        }
        return Contender(name, passes, lambda tokens: {"out": run(self.batches[tokens], True).float()}, checked)
