"""Ranks whose MoE layers are balanced: what comes out before, between and after the steps."""

from __future__ import annotations

from typing import Any

import torch

import moelink
from moelink.nn import Balancer, MoE, Placement, local_state_dict

EXPERTS, PHYSICAL, HIDDEN, TOKENS = 6, 8, 128, 12
SIZES = {"num_experts": PHYSICAL, "topk": 2, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}


def model_of(ep: moelink.Communicator, placement: Placement | None, backend: str) -> torch.nn.ModuleDict:
    """Two layers over one communicator."""
    new = {"intermediate_size": 128, "experts_backend": backend, "placement": placement}
    return torch.nn.ModuleDict({"a": MoE(ep, seed=1, **new), "b": MoE(ep, seed=2, **new)})


def skewed(layer: MoE) -> None:
    """Make most tokens choose experts 0 and 1."""
    with torch.no_grad():
        more = torch.tensor([0.03, 0.02, 0, 0, 0, 0])  # of the sum of a token's elements, which is about 64
        layer.router.weight.add_(more[:, None].to(layer.router.weight.dtype))


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(TOKENS - rank, HIDDEN, generator=generator)
    return (x + 0.5).bfloat16()


@torch.no_grad()
def balanced(
    rank: int, world_size: int, placed: tuple[int, ...], options: dict[str, Any], max_bytes: int
) -> dict[str, Any]:
    """Run both layers before, between all steps and after."""
    backend = options.pop("experts_backend", "dequantize")
    with moelink.init(**SIZES, **options, device="cpu") as ep:
        model = model_of(ep, Placement(placed), backend)
        for layer in model.values():
            skewed(layer)
        whose = 0 if ep.config.mode == "allreduce" else rank
        outputs = [[layer(tokens(whose, step)) for layer in model.values()] for step in range(2)]
        balancer = Balancer(model, max_bytes=max_bytes)
        report = balancer.plan()
        held = [layer.experts.placement.experts for layer in model.values()]
        steps = 0
        while balancer.steps_left:
            balancer.step()
            steps += 1
            assert all(set(layer.experts.placement.experts) == set(range(EXPERTS)) for layer in model.values())
            outputs.append([layer(tokens(whose, 0)) for layer in model.values()])
        part = {name: value for name, value in model.state_dict().items() if value.dtype == torch.bfloat16}
        return {
            "outputs": outputs, "report": report, "steps": steps, "state": part, "held": held,
            "placements": [layer.experts.placement.experts for layer in model.values()],
            "loads": [layer.stats().tokens_per_rank for layer in model.values()],
        }  # fmt: skip


@torch.no_grad()
def reloaded(rank: int, world_size: int, placed: tuple[int, ...], full: dict[str, torch.Tensor]) -> Any:
    """Load a full state_dict into placed layers, and return the output and the part."""
    with moelink.init(**SIZES, device="cpu") as ep:
        model = model_of(ep, Placement(placed), "dequantize")
        model.load_state_dict(local_state_dict(model, full))
        return model["b"](tokens(rank, 0)), dict(model.state_dict())


@torch.no_grad()
def whole() -> tuple[torch.nn.ModuleDict, list[torch.Tensor]]:
    """One rank, without a placement: its layers, and what they make of rank 0's tokens."""
    with moelink.init(**{**SIZES, "num_experts": EXPERTS}, device="cpu") as ep:
        model = model_of(ep, None, "dequantize")
        for layer in model.values():
            skewed(layer)
        return model, [layer(tokens(0, 0)) for layer in model.values()]


def disagreeing(rank: int, world_size: int) -> list[str]:
    """Rank 1 has another bound; then it has routed other tokens, which in mode "allreduce" are all ranks'."""
    said = []
    with moelink.init(**SIZES, mode="allreduce", device="cpu") as ep:
        model = model_of(ep, Placement.identity(EXPERTS, PHYSICAL), "dequantize")
        with torch.no_grad():
            for layer in model.values():
                layer.load.record(torch.tensor([[0, 1], [4, 5 * rank]]).repeat(9, 1))
        for call in (lambda: Balancer(model, max_bytes=1000 + rank), lambda: Balancer(model).plan()):
            try:
                call()
            except moelink.ConfigMismatchError as error:
                said.append(str(error))
    return said
