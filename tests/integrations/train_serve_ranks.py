"""One layer's experts in the conversations of training and of serving, on ranks: the same weights, tokens and routes.

A rank has a part of the world's tokens, in calls of a given size. vLLM's and SGLang's own experts need a GPU; moelink's
product of one row stands in for them, after the arguments and the steps of their adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

import moelink
from moelink.integrations import settings as common
from moelink.integrations.sglang import settings as sglang
from moelink.integrations.vllm import settings as vllm
from moelink.nn import grouped_experts
from moelink.nn.block_quantized import BLOCK
from moelink.ops import dequantize
from moelink.routing import ExpertMap

EXPERTS, TOPK, HIDDEN, INNER, TOKENS = 8, 3, 128, 48, 40
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T, H] bf16, ids and weights [T, K]."""
    generator = torch.Generator().manual_seed(0)
    weights, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(-1).topk(TOPK)
    return torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16(), ids, weights


def parameters() -> tuple[Tensor, Tensor]:
    """Weights of all experts, [E, 2 I, H] and [E, H, I] bf16."""
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    return gate_up.bfloat16(), (torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5).bfloat16()


def trained(dtype: str, fixed: bool) -> tuple[moelink.Communicator, Layer]:
    """The experts of a parallelised Mixtral. (transformers takes seconds to load, and the others need none.)"""
    from transformers import MixtralConfig, MixtralForCausalLM

    from moelink.integrations.transformers import parallelize
    from moelink.integrations.transformers.experts import ParallelExperts

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 16}
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS,
                           num_experts_per_tok=TOPK, **sizes)  # fmt: skip
    model = MixtralForCausalLM(config).bfloat16()
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for name, weight in zip(("gate_up_proj", "down_proj"), parameters(), strict=True):
            getattr(experts, name).copy_(weight)
    parallel = parallelize(model, max_tokens_per_rank=TOKENS, dispatch_format=dtype, batch_invariant=fixed)
    module = next(each for each in parallel.model.modules() if isinstance(each, ParallelExperts))
    return parallel.ep, module


def served_by_vllm(dtype: str, fixed: bool) -> tuple[moelink.Communicator, Layer]:
    """The calls of vLLM's prepare and finalize: rows with the id of an expert each, or of several."""
    config = SimpleNamespace(
        num_experts=EXPERTS, experts_per_token=TOPK, hidden_dim=HIDDEN, max_num_tokens=TOKENS, in_dtype=torch.bfloat16
    )
    quantization = (
        vllm.Quantization(torch.float8_e4m3fn, (128, 128)) if dtype == "fp8_block128" else vllm.Quantization()
    )
    ep = moelink.init(**vllm.init_arguments(
        vllm.rows_of(torch.bfloat16, quantization), settings=common.Settings(batch_invariant=fixed), config=config,
        device=torch.device("cpu"), microbatches=1,
    ))  # fmt: skip

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        recv = ep.dispatch(x, ids, weights)
        scales, row_ids, row_weights = recv.scales, recv.topk_ids, recv.topk_weights
        if fixed:
            scales, row_ids, row_weights = vllm.rows_by_expert(recv, ep.config)
        assert row_ids is not None
        assert row_weights is not None
        rows = recv.tokens
        if scales is not None:
            assert scales.shape == (len(rows), HIDDEN // BLOCK)
            rows = (rows.float() * scales.repeat_interleave(BLOCK, 1)).bfloat16()
        y = torch.zeros(len(rows), HIDDEN)
        for slot in range(row_ids.shape[1]):
            for row in (row_ids[:, slot] >= 0).nonzero().flatten().tolist():
                y[row] += alone(rows[row : row + 1], int(row_ids[row, slot])).float()[0] * row_weights[row, slot]
        return ep.combine(y.bfloat16(), recv)

    return ep, call


def alone(row: Tensor, expert: int) -> Tensor:
    """The output of ``expert`` for one row."""
    weights = [weight[expert : expert + 1] for weight in parameters()]
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    return grouped_experts(row, offsets, *weights, activation=torch.nn.functional.silu, batch_invariant=True)


def served_by_sglang(dtype: str, fixed: bool) -> tuple[moelink.Communicator, Layer]:
    """The calls of SGLang's dispatcher: groups of 128 rows, which experts weigh unless home does."""
    ep = moelink.init(**sglang.init_arguments(
        settings=common.Settings(batch_invariant=fixed), num_experts=EXPERTS, topk=TOPK, hidden_size=HIDDEN,
        max_tokens=TOKENS, dispatch_format=dtype, device=torch.device("cpu"),
    ))  # fmt: skip
    first = ExpertMap(EXPERTS, ep.config.world_size).first(ep.config.rank)
    mine = [weight[first : first + ep.config.num_local_experts] for weight in parameters()]

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        recv = ep.dispatch(x, ids, weights)
        y = grouped_experts(dequantize(ep, recv), recv.row_offsets, *mine, activation=torch.nn.functional.silu,
                            batch_invariant=True)  # fmt: skip
        assert recv.weights is not None
        factors = torch.ones_like(recv.weights) if fixed else recv.weights
        return ep.combine((y.float() * factors[:, None]).bfloat16(), recv, weigh=fixed)

    return ep, call


LAYERS = {"transformers": trained, "vllm": served_by_vllm, "sglang": served_by_sglang}


@torch.no_grad()
def run(rank: int, world_size: int, cases: list[tuple[str, str, int]], fixed: bool) -> list[Tensor]:
    """Entry point of a rank: results of its tokens, by case: (name, format, tokens a call)."""
    share, results = -(-TOKENS // world_size), []
    mine = [each[rank * share : (rank + 1) * share] for each in data()]
    for name, dtype, size in cases:
        ep, layer = LAYERS[name](dtype, fixed)
        with ep:
            calls = [layer(*(each[start : start + size] for each in mine)) for start in range(0, share, size)]
        results.append(torch.cat(calls))
    return results
