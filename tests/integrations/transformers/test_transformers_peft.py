"""LoRA of PEFT on experts of two ranks: each rank's adapters train as those of the same experts do on one process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from moelink.integrations.transformers import parallelize
from moelink.nn import all_reduce_gradients, clip_grad_norm_
from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_models import MAX_TOKENS, NUM_EXPERTS, build, tokens

RANKS, RANK_OF_ADAPTERS = 2, 3
MAX_NORM = 1e-3
"""Less than the norm of the gradient, so all of it is scaled."""
CONFIG: dict[str, Any] = {
    "r": RANK_OF_ADAPTERS, "lora_alpha": 6, "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip


def with_adapters(model: Any, experts: range) -> Any:
    """``model``, which has ``experts``, with adapters whose values depend on the experts alone."""
    with warnings.catch_warnings():  # peft reads an attribute of models that transformers has renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted = get_peft_model(model, LoraConfig(**CONFIG))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in sorted(trained(adapted).items()):
            shape = list(value.shape)
            if ".experts." in name:
                shape["lora_B" in name] = NUM_EXPERTS * RANK_OF_ADAPTERS
            whole = torch.randn(shape, generator=generator) / 8
            value.copy_(of_experts(name, whole, experts) if ".experts." in name else whole)
    return adapted


def of_experts(name: str, whole: Tensor, experts: range) -> Tensor:
    """The part of an adapter of all experts. PEFT has A as (experts, r, in) and B as (out, r, experts), flattened."""
    held = slice(experts.start, experts.stop)
    if "lora_A" in name:
        whole = whole.unflatten(0, (NUM_EXPERTS, RANK_OF_ADAPTERS))[held]
        return whole.flatten(0, 1)
    part: Tensor = whole.unflatten(1, (RANK_OF_ADAPTERS, NUM_EXPERTS))[..., held].flatten(1)
    return part


def trained(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def step(rank: int, world_size: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The loss of this rank's sequences, the summed and clipped gradients, and their norm before."""
    model, batch = build("mixtral"), tokens()[rank::world_size]
    with parallelize(model, max_tokens_per_rank=MAX_TOKENS, device="cpu") as parallel:
        first = parallel.ep.config.num_local_experts * rank
        adapted = with_adapters(parallel.model, range(first, first + parallel.ep.config.num_local_experts))
        loss = adapted(input_ids=batch, labels=batch).loss * len(batch)
        loss.backward()
        all_reduce_gradients(adapted)
        norm = clip_grad_norm_(adapted, MAX_NORM)
        found = {name: value.grad.clone() for name, value in trained(adapted).items() if value.grad is not None}
        return loss.detach(), found, norm


def test_adapters_on_experts_train_as_on_one_process() -> None:
    adapted = with_adapters(build("mixtral"), range(NUM_EXPERTS))
    losses = []
    for rank in range(RANKS):
        batch = tokens()[rank::RANKS]
        losses.append(adapted(input_ids=batch, labels=batch).loss * len(batch))
    torch.stack(losses).sum().backward()
    gradients = {name: value.grad for name, value in trained(adapted).items() if value.grad is not None}
    assert set(gradients) == set(trained(adapted))
    want_norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    for rank, (loss, found, norm) in enumerate(run_ranks(step, RANKS)):
        assert torch.allclose(loss, losses[rank].detach(), rtol=1e-5)
        assert torch.allclose(norm, want_norm, rtol=1e-4)
        assert set(found) == set(gradients)
        share = NUM_EXPERTS // RANKS
        for name, got in found.items():
            want = gradients[name] * (MAX_NORM / want_norm)
            if ".experts." in name:
                want = of_experts(name, want, range(share * rank, share * (rank + 1)))
            assert torch.allclose(got, want, rtol=1e-3, atol=1e-9), name
            assert got.abs().max() > 0, name
