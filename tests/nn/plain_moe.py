"""A model with a MoE layer, and the same model in plain torch on one process, which judges what ranks return.

Inputs are a function of the rank. Nothing of moelink takes part in :func:`plain_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import moelink
from moelink.nn import MoE

EXPERTS, TOPK, HIDDEN, INNER = 6, 2, 16, 24
SIZES: dict[str, Any] = {
    "num_experts": EXPERTS, "topk": TOPK, "hidden_size": HIDDEN, "max_tokens_per_rank": 8, "dispatch_format": "fp64",
    "combine_dtype": torch.float64, "device": "cpu", "timeout": 60,
}  # fmt: skip


class Model(torch.nn.Module):
    """Two linear layers with a MoE layer between them, all weights from ``seed``."""

    def __init__(self, ep: moelink.Communicator, *, seed: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.last = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64) for _ in range(2))
        self.moe = MoE(ep, intermediate_size=INNER, seed=seed)
        with torch.no_grad():
            for linear in (self.first, self.last):
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator, dtype=torch.float64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.moe(self.first(x)))
        return out


def tokens(rank: int, step: int = 0) -> Tensor:
    """Tokens of ``rank``, of which each rank has another number."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3 + rank % 4, HIDDEN, generator=generator, dtype=torch.float64)


def full_state(*, seed: int = 5) -> dict[str, Tensor]:
    """The weights of :class:`Model`, all experts included."""
    with moelink.init(**SIZES, transport="collective", group=None) as ep:
        return {name: value.clone() for name, value in Model(ep, seed=seed).state_dict().items()}


def plain_model(state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The output of the model with ``state`` for tokens ``x``, expert by expert. Differentiable."""
    x = x @ state["first.weight"].T
    scores = (x @ state["moe.router.weight"].T).softmax(-1)
    weights, ids = scores.topk(TOPK)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (x @ state["moe.experts.gate_up_proj"][expert].T).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ state["moe.experts.down_proj"][expert].T
        out = out + (weights * (ids == expert)).sum(1, keepdim=True) * y
    return out @ state["last.weight"].T


def plain_gradients(state: Mapping[str, Tensor], batches: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of the sum of all batches' losses, by name, and those of each batch."""
    state = {name: value.clone().requires_grad_() for name, value in state.items()}
    batches = [batch.clone().requires_grad_() for batch in batches]
    torch.stack([loss_of(plain_model(state, batch)) for batch in batches]).sum().backward()
    return {name: value.grad for name, value in state.items()}, [batch.grad for batch in batches]  # type: ignore[misc]


def loss_of(out: Tensor) -> Tensor:
    return out.square().sum()


def joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The tensor ``name`` of the whole model from those of all ranks: experts in order, all else the same on each."""
    if ".experts." in name:
        return torch.cat(list(parts))
    for part in parts[1:]:
        assert torch.equal(part, parts[0]), f"{name} differs between ranks"
    return parts[0]


def close(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape, what
    assert (got - want).abs().max() <= 1e-12 * want.abs().max().clamp(min=1), what
