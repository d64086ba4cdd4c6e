"""Weights and inputs, functions of a seed, and the truth: the layer in fp32, expert by expert.

An expert's weights are a function of (seed, expert), so that every rank can draw any expert's. The truth of a rank's
tokens needs no communication: the rank draws the experts one by one and applies each to its tokens. It shares no code
with the contenders but the choice of experts and the roundings to fp8.

Legend: ``T`` tokens, ``H`` hidden_size, ``E`` num_experts, ``I`` intermediate_size, ``G`` experts of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.formats import get_format
from moelink.nn.block_quantized import dequantize_weight, quantize_weight
from moelink.nn.router import Router, Routing
from moelink.routing import ExpertMap
from moelink_bench.layer.plan import LayerCase, Shape
from moelink_bench.presets import Distribution, Settings


@dataclass(frozen=True)
class Weights:
    """The experts of one rank, bf16: ``gate_up`` [G, 2 * I, H] with gate before up, ``down`` [G, H, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class LayerInput:
    """The input of one rank for one call: ``x`` [T, H] bf16, and the router of the layer, the same for all calls and
    ranks."""

    x: Tensor
    router: Router


def fill_expert(gate_up: Tensor, down: Tensor, *, seed: int, expert: int) -> None:
    """Draw one expert into ``gate_up`` [2 * I, H] and ``down`` [H, I]: normal, of variance 1 / fan-in."""
    generator = torch.Generator(gate_up.device).manual_seed(seed * 1_000_003 + expert)
    for weight in (gate_up, down):
        weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)


def make_weights(shape: Shape, *, seed: int, rank: int, world_size: int, device: torch.device) -> Weights:
    """Draw the experts that ``rank`` owns."""
    experts = ExpertMap(shape.num_experts, world_size)
    weights = empty_weights(shape, experts.num_local(rank), device)
    for group in range(experts.num_local(rank)):
        fill_expert(weights.gate_up[group], weights.down[group], seed=seed, expert=experts.first(rank) + group)
    return weights


def empty_weights(shape: Shape, groups: int, device: torch.device) -> Weights:
    """Return weights of so many experts that are not drawn yet."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return Weights(
        torch.empty(groups, 2 * inner, hidden, dtype=torch.bfloat16, device=device),
        torch.empty(groups, hidden, inner, dtype=torch.bfloat16, device=device),
    )


def make_router(shape: Shape, *, seed: int, device: torch.device, distribution: Distribution = "uniform") -> Router:
    """Draw the router's weight, bf16, so that logits of a token have variance 1.

    ``distribution``: "uniform", or "zipf". The latter lowers the logit of each expert by the logarithm of its place in
    a drawn order, by way of the first element of every token, which is 1.
    """
    router = Router(
        shape.hidden_size, shape.num_experts, topk=shape.topk, config=shape.router, device=device, dtype=torch.bfloat16
    ).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(3 * seed + 2)
    router.weight.normal_(0, shape.hidden_size**-0.5, generator=generator)
    places = torch.randperm(shape.num_experts, generator=generator, device=device) + 1
    router.weight[:, 0] = -places.log() if distribution == "zipf" else 0
    return router


def make_input(shape: Shape, tokens: int, router: Router, *, seed: int) -> LayerInput:
    """Draw one input, on the device of ``router``."""
    device = router.weight.device
    generator = torch.Generator(device).manual_seed(2 * seed + 1)
    x = torch.randn(tokens, shape.hidden_size, generator=generator, dtype=torch.bfloat16, device=device)
    x[:, 0] = 1
    return LayerInput(x, router)


def make_inputs(case: LayerCase, settings: Settings, *, rank: int, device: torch.device) -> tuple[LayerInput, ...]:
    """Draw this rank's inputs, one per call of a sample."""
    seeds = [(settings.seed * 1009 + copy) * 1013 + rank for copy in range(case.calls(settings))]
    router = make_router(case.shape, seed=settings.seed, device=device, distribution=case.distribution)
    return tuple(make_input(case.shape, case.tokens, router, seed=seed) for seed in seeds)


def choose(given: LayerInput) -> Routing:
    """Choose experts of the tokens: the first part of every contender."""
    return given.router(given.x)  # type: ignore[no-any-return]


def truth(given: LayerInput, shape: Shape, *, fmt: str, seed: int, fp8_experts: bool = False) -> Tensor:
    """Compute the layer's output [T, H] fp32 of tokens that were rounded to ``fmt`` on the way to their experts.

    ``fp8_experts``: weights, and what goes into the second product, are rounded to fp8 as well.
    """
    codec = get_format(fmt)
    quantized = codec.quantize(given.x)
    x = codec.dequantize(quantized.payload, quantized.scales).float()
    routing = choose(given)
    out = torch.zeros_like(x)
    one = empty_weights(shape, 1, x.device)
    gate_up, down = one.gate_up[0], one.down[0]
    for expert in range(shape.num_experts):
        chosen = routing.topk_ids == expert
        tokens = chosen.any(1).nonzero()[:, 0]
        if not len(tokens):
            continue
        fill_expert(gate_up, down, seed=seed, expert=expert)
        used = [dequantize_weight(quantize_weight(w)) if fp8_experts else w.float() for w in (gate_up, down)]
        gate, up = (x[tokens] @ used[0].T).chunk(2, dim=1)
        inner = gate * gate.sigmoid() * up
        if fp8_experts:
            again = codec.quantize(inner)
            inner = codec.dequantize(again.payload, again.scales).float()
        weight = (routing.topk_weights * chosen).sum(1)[tokens]
        out[tokens] += inner @ used[1].T * weight[:, None]
    return out


def worst_error(got: Tensor, want: Tensor) -> float:
    """Return the largest distance of a token's output from the truth, relative to the length of the truth.

    Example: tokens [3, 4] and [0, 2] where [3, 5] and [0, 2] are right: 1 / sqrt(34).
    """
    distance = torch.linalg.vector_norm(got.float() - want, dim=1)
    return float((distance / torch.linalg.vector_norm(want, dim=1)).max())
