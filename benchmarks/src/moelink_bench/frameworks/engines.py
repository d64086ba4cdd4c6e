"""A layer of an inference engine: its inputs and weights, and its experts.

The layer's experts are products by group in bf16, the same code between both dispatchers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from moelink.errors import ArgumentError
from moelink_bench.frameworks.dispatchers import Case, Dispatcher, Parts
from moelink_bench.layer.data import Weights, choose, make_input, make_router, make_weights, truth
from moelink_bench.layer.plan import Shape
from moelink_bench.workload import Batch

SIZES = (1, 32, 128, 1024, 4096)
"""Tokens of a rank: decode, and prefill."""

SEED = 1
"""Of the weights."""

LAYER, EXCHANGE = "layer", "dispatch and combine"
"""The timed passes. The experts of the second compute nothing."""


def products(rows: Tensor, weights: Weights, ends: Tensor) -> Tensor:
    """Return the experts' outputs of ``rows``, [rows, hidden], which lie grouped by expert; ``ends`` of the groups.

    Rows past the last end are not computed, and hold anything.
    """
    gate, value = torch._grouped_mm(rows, weights.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
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
    experts, (rows, topk) = len(weights.gate_up), ids.shape
    slots = torch.where((ids >= 0) & (ids < experts), ids, experts).view(-1)
    expert, order = slots.sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=x.device, dtype=expert.dtype), right=True)
    made = products(x[order // topk], weights, ends.int()).masked_fill_((expert == experts)[:, None], 0)
    by_slot = torch.empty_like(made)
    by_slot[order] = made
    return torch.bmm(chosen.to(x.dtype)[:, None], by_slot.view(rows, topk, -1))[:, 0]


class Inputs:
    """Batches of a rank by their tokens, and the weights of its experts: those of :mod:`moelink_bench.layer.data`.

    Attributes:
        batches: of each size; ids are drawn evenly, and the weights of a token sum to 1.
        own: weights of this rank's experts.
    """

    def __init__(self, case: Case, rank: int, ranks: int) -> None:
        """Draw them. Raises ArgumentError where ranks would have different numbers of experts."""
        if case.num_experts % ranks:
            raise ArgumentError("experts", f"a multiple of {ranks}, the number of ranks", case.num_experts)
        device = torch.device(case.device)
        self._shape = Shape(
            model="", hidden_size=case.hidden_size, num_experts=case.num_experts, topk=case.topk,
            intermediate_size=case.intermediate_size,
        )  # fmt: skip
        self.own = make_weights(self._shape, seed=SEED, rank=rank, world_size=ranks, device=device)
        router = make_router(self._shape, seed=SEED, device=device)
        self._given = {
            tokens: make_input(self._shape, tokens, router, seed=100 * tokens + rank) for tokens in case.tokens
        }
        self.batches = {}
        for tokens, given in self._given.items():
            chosen = choose(given)
            self.batches[tokens] = Batch(given.x, chosen.topk_ids.int(), chosen.topk_weights)

    def expected(self, tokens: int) -> Parts:
        """Return the output of the layer for a batch, in fp32."""
        return {"out": truth(self._given[tokens], self._shape, fmt="bf16", seed=SEED)}

    def contender(
        self, name: str, run: Callable[[Batch, bool], Tensor], checked: Callable[[], None] = lambda: None
    ) -> Dispatcher:
        """Return the contender of a dispatcher.

        Args:
            name: whose it is.
            run: returns the output of the layer for a batch. If its second argument is False, the experts compute
                nothing, and the output is undefined.
            checked: of :class:`~moelink_bench.frameworks.dispatchers.Dispatcher`.
        """
        passes = {
            LAYER: lambda tokens: run(self.batches[tokens], True),
            EXCHANGE: lambda tokens: run(self.batches[tokens], False),
        }
        return Dispatcher(name, passes, lambda tokens: {"out": run(self.batches[tokens], True).float()}, checked)
