"""Gradients over ranks: of what every rank has, of experts that several communicators hold, and their norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parametrize

import moelink
from moelink.nn import (
    all_reduce_gradients,
    clip_grad_norm_,
    fully_shard,
    local_state_dict,
    merge_state_dicts,
    update_router_bias,
)
from moelink.testing import run_ranks
from tests.nn.plain_moe import SIZES, Model, close, full_state, joined, loss_of, plain_gradients, plain_model, tokens

MOST = 0.25
"""The norm to which gradients are clipped; they have more."""


class Doubled(torch.nn.Module):
    """A weight that is computed from a parameter of another name."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 2

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


def by_name(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def with_replicas(rank: int, world_size: int) -> dict[str, Any]:
    """Two communicators of two ranks each, over both of which the loss is summed."""
    dist.init_process_group("gloo")
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    with moelink.init(**SIZES, group=groups[rank // 2]) as ep:
        model = Model(ep)
        loss_of(model(tokens(rank))).backward()
        before = by_name(model)
        with pytest.raises(moelink.ArgumentError, match=r"replicas: expected the 2 of 4 ranks .* got None"):
            all_reduce_gradients(model)
        assert all(torch.equal(before[name], grad) for name, grad in by_name(model).items()), (
            "a refusal changes nothing"
        )
        all_reduce_gradients(model, replicas=groups[2 + rank % 2])
        summed = by_name(model)
        norm = clip_grad_norm_(model, MOST)
        return {
            "summed": summed,
            "norm": norm,
            "clipped": by_name(model),
            "largest": clip_grad_norm_(model, 1e9, math.inf),
        }


def test_experts_that_two_communicators_hold_get_the_gradients_of_both() -> None:
    results, state = run_ranks(with_replicas, 4), full_state()
    want, _ = plain_gradients(state, [tokens(rank) for rank in range(4)])
    norm = torch.cat([grad.flatten() for grad in want.values()]).norm()
    largest = max(grad.abs().max() for grad in want.values()) * MOST / (norm + 1e-6)
    for ranks in (results[:2], results[2:]):
        for name, grad in want.items():
            close(joined(name, [result["summed"][name] for result in ranks]), grad, name)
            clipped = joined(name, [result["clipped"][name] for result in ranks])
            close(clipped, grad * MOST / (norm + 1e-6), f"{name}, clipped")
        for result in ranks:
            close(result["norm"], norm, "the norm counts each parameter once")
            close(result["largest"], largest, "the largest gradient")


def computed(rank: int, world_size: int) -> dict[str, Any]:
    """Experts with a parametrisation, whose parameter has another name and place."""
    with moelink.init(**SIZES) as ep:
        model = Model(ep)
        parametrize.register_parametrization(model.moe.experts, "down_proj", Doubled())
        loss_of(model(tokens(rank))).backward()
        all_reduce_gradients(model)
        grads = by_name(model)
        model.first.weight.grad[0, 0] = math.nan
        for _ in range(2):  # every rank raises, so none waits for another
            with pytest.raises(RuntimeError, match="error_if_nonfinite: expected a finite norm"):
                clip_grad_norm_(model, MOST, error_if_nonfinite=True)
        return grads


def test_what_experts_are_computed_from_belongs_to_their_rank() -> None:
    results, state = run_ranks(computed, 2), full_state()
    want, _ = plain_gradients(state, [tokens(rank) for rank in range(2)])
    for name, grad in want.items():
        key = name.replace("experts.down_proj", "experts.parametrizations.down_proj.original")
        close(joined(name, [result[key] for result in results]), grad * (2 if key != name else 1), key)


def sharded(rank: int, world_size: int) -> dict[str, Any]:
    """FSDP2 over what every rank has, the first layer by itself."""
    with moelink.init(**SIZES) as ep:
        mesh = dist.init_device_mesh("cpu", (world_size,))
        model = Model(ep)
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with torch.no_grad():
            model.last.weight.mul_(1.0)  # a DTensor
        out = model(tokens(rank))
        loss_of(out).backward()
        whole = {name: getattr(grad, "full_tensor", lambda g=grad: g)() for name, grad in by_name(model).items()}
        assert type(model.last.weight.grad) is not type(model.moe.experts.down_proj.grad)
        norm = clip_grad_norm_(model, MOST)
        refused = pytest.raises(moelink.UnsupportedError, match="expected experts without a shared one for fully_shard")
        with moelink.init(**SIZES, fused_shared_expert=True) as fused, refused:
            fully_shard(Model(fused), mesh=mesh)
        return {"out": out.detach(), "grads": whole, "norm": norm}


def test_fully_shard_leaves_experts_to_their_rank_and_sums_gradients() -> None:
    results, state = run_ranks(sharded, 2), full_state()
    want, _ = plain_gradients(state, [tokens(rank) for rank in range(2)])
    norm = torch.cat([grad.flatten() for grad in want.values()]).norm()
    for name, grad in want.items():
        close(joined(name, [result["grads"][name] for result in results]), grad, name)
    for rank, result in enumerate(results):
        close(result["out"], plain_model(state, tokens(rank)), "output")
        close(result["norm"], norm, "norm")


def test_a_list_of_layers_is_no_model() -> None:
    calls: list[Callable[[Any], object]] = [
        all_reduce_gradients, partial(clip_grad_norm_, max_norm=1.0), partial(update_router_bias, rate=0.1),
        partial(local_state_dict, full={}), partial(merge_state_dicts, parts=[{}]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(moelink.ArgumentError, match=r"^model: expected a torch.nn.Module .*, got a list"):
            call([torch.nn.Linear(1, 1)])


def of_a_fused_shared_expert(rank: int, world_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    with moelink.init(**SIZES, fused_shared_expert=True) as ep:
        model = Model(ep)
        loss_of(model(tokens(rank))).backward()
        with pytest.raises(moelink.ArgumentError, match=r"^model: expected a torch.nn.Module .*, got a list"):
            all_reduce_gradients([model])  # type: ignore[arg-type]
        all_reduce_gradients(model)
        return clip_grad_norm_(model, MOST), by_name(model)


def test_a_fused_shared_expert_counts_once() -> None:
    """The norm is that of one rank with all experts, which has the tokens of both."""
    norms = [norm for norm, _ in run_ranks(of_a_fused_shared_expert, 2)]
    with moelink.init(**SIZES | {"max_tokens_per_rank": 16}, transport="collective", fused_shared_expert=True) as ep:
        model = Model(ep)
        loss_of(model(torch.cat([tokens(0), tokens(1)]))).backward()
        want = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    for norm in norms:
        close(norm, want, "norm")
