"""The layer without moelink: transformers', one made of torch and an all-to-all, one over FlashInfer's all-to-all.

Legend: ``T`` tokens, ``K`` topk, ``H`` hidden_size, ``W`` ranks, ``G`` experts of a rank.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moelink.routing import ExpertMap
from moelink_bench.exchange import Exchange, count_ids, starts
from moelink_bench.layer.contenders import (
    LayerContender,
    Part,
    Routed,
    Rows,
    Setting,
    expert_parts,
    require,
    routing_part,
)
from moelink_bench.layer.data import LayerInput, choose
from moelink_bench.peers import flashinfer_refusal, open_flashinfer

TRANSFORMERS = "transformers grouped_mm"
EXCHANGE = "sort + all-to-all"
FLASHINFER_LAYER = "FlashInfer one-sided"


class TransformersLayer(LayerContender):
    """The experts of Hugging Face transformers with its implementation "grouped_mm", its own function."""

    name = TRANSFORMERS
    note = "transformers' own function, products and activation included; its weights are bf16, as models pass them"

    def __init__(self, at: Setting) -> None:
        """Find the function. Raises UnsupportedError where it cannot run."""
        require(at.plan.ranks == 1, "runs on one rank only")
        require(importlib.util.find_spec("transformers") is not None, "transformers is not installed")
        module = importlib.import_module("transformers.integrations.moe")
        self._shape = at.shape
        self._experts = _experts(module, at)

    def layer(self, given: LayerInput) -> Tensor:
        """See :class:`~moelink_bench.layer.contenders.LayerContender`."""
        routing = choose(given, self._shape)
        out: Tensor = self._experts(given.x, routing.topk_ids, routing.topk_weights.to(given.x.dtype))
        return out

    def parts(self) -> tuple[Part, ...]:
        """None: it is one function."""
        return ()


def _experts(module: Any, at: Setting) -> torch.nn.Module:
    """The module that transformers makes of a class with stacked weights."""

    @module.use_experts_implementation  # type: ignore[untyped-decorator]
    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = config.num_experts
            self.act_fn = functional.silu
            self.gate_up_proj = torch.nn.Parameter(at.weights.gate_up, requires_grad=False)
            self.down_proj = torch.nn.Parameter(at.weights.down, requires_grad=False)

        def forward(self, *args: Any) -> Tensor:
            raise AssertionError("transformers calls the implementation that the configuration names")

    return Experts(SimpleNamespace(num_experts=at.shape.num_experts, _experts_implementation="grouped_mm"))  # type: ignore[no-any-return]


class ExchangeLayer(LayerContender):
    """Sort by expert, all-to-all of a copy per expert, the products, all-to-all back, sum: torch alone."""

    name = EXCHANGE

    def __init__(self, at: Setting) -> None:
        """Remember the sizes."""
        self._shape, self._weights = at.shape, at.weights
        self._exchange = Exchange(
            num_experts=at.shape.num_experts, topk=at.shape.topk, rank=at.rank, world_size=at.plan.ranks
        )
        self.capturable = at.plan.ranks == 1 and at.device.type == "cuda"
        backend = "NCCL" if at.device.type == "cuda" else "gloo"
        waits = f"{backend}; the host waits for the counts"
        self.note = "nothing to exchange on one rank" if at.plan.ranks == 1 else waits

    def parts(self) -> tuple[Part, ...]:
        """See :class:`~moelink_bench.layer.contenders.LayerContender`."""
        return (
            routing_part(self._shape),
            Part("dispatch", self._dispatch),
            *expert_parts(self._weights),
            Part("combine", lambda at: self._exchange.combine(at.rows, at.home)),
        )

    def _dispatch(self, at: Routed) -> Rows:
        return Rows(*self._exchange.dispatch(at.x, at.routing.topk_ids, at.routing.topk_weights))


class FlashInferLayer(LayerContender):
    """FlashInfer's one-sided all-to-all, with the products over all rows that could have come.

    Its rows stay where they arrive, by source rank. So that nothing waits for the host, the permutation by expert and
    the sum of a token's experts cover [W * T, K] slots, of which those for experts of this rank count.
    """

    name = FLASHINFER_LAYER
    note = "one all-to-all sized for the most tokens; the permutation and the sum before combine are torch's"

    def __init__(self, at: Setting) -> None:
        """Set up FlashInfer. Collective. Raises UnsupportedError where it is not installed."""
        require(at.plan.device == "cuda", "runs on CUDA devices only")
        require(not flashinfer_refusal(), flashinfer_refusal())
        self._moe = open_flashinfer(
            rank=at.rank, world_size=at.plan.ranks, max_tokens=at.max_tokens, topk=at.shape.topk,
            num_experts=at.shape.num_experts, hidden_size=at.shape.hidden_size,
        )  # fmt: skip
        self._shape, self._weights = at.shape, at.weights
        experts = ExpertMap(at.shape.num_experts, at.plan.ranks)
        self._first, self._local = experts.first(at.rank), experts.num_local(at.rank)

    def parts(self) -> tuple[Part, ...]:
        """See :class:`~moelink_bench.layer.contenders.LayerContender`."""
        return (
            routing_part(self._shape),
            Part("dispatch", self._dispatch),
            Part("convert", self._permute),
            *expert_parts(self._weights),
            Part("combine", self._combine),
        )

    def _dispatch(self, at: Routed) -> list[Tensor]:
        ids = at.routing.topk_ids
        arrived: list[Tensor] = self._moe.dispatch(
            ids, [at.x, ids, at.routing.topk_weights], len(at.x), invalid_token_expert_id=-1, expert_id_payload_index=1
        )
        return arrived

    def _permute(self, arrived: list[Tensor]) -> Rows:
        x, ids, weights = arrived
        local = ids.flatten() - self._first
        mine = (local >= 0) & (local < self._local)
        groups, order = local.where(mine, self._local).sort(stable=True)
        offsets = starts(count_ids(groups, self._local + 1)[: self._local])
        rows = x.reshape(-1, x.shape[-1])[order // self._shape.topk]
        return Rows(rows, offsets, (x.shape, order, mine, weights.flatten()))

    def _combine(self, at: Rows) -> Tensor:
        (ranks, tokens, hidden), order, mine, weights = at.home
        ready = self._moe.get_combine_payload_tensor_in_workspace(tokens, hidden, torch.bfloat16)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device=order.device)
        # Rows behind the last group are undefined, and so may be their products with a weight of zero.
        rows = at.rows[slots].masked_fill_(~mine[:, None], 0)
        rows.mul_(weights.masked_fill(~mine, 0).to(rows.dtype)[:, None])
        ready.view(ranks * tokens, hidden).copy_(rows.view(ranks * tokens, -1, hidden).sum(1))
        out: Tensor = self._moe.combine(ready.view(ranks, tokens, hidden), tokens, payload_in_workspace=True)
        return out
