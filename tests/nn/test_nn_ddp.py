"""DistributedDataParallel around layers: experts stay those of their rank, and gradients are means over the ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import moelink
from moelink.nn import MoE, mark_experts
from moelink.testing import run_ranks
from tests.nn.plain_moe import SIZES, Model, close, full_state, joined, loss_of, plain_gradients, plain_model, tokens


class Checkpointed(torch.nn.Module):
    """Recomputes the model in the backward, outside of the forward of what wraps it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.model, x, use_reentrant=False)
        return out


class Scaled(torch.nn.Module):
    """A weight that is computed from a parameter, as quantisation-aware training does."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 2

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


def train(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    with moelink.init(**SIZES) as ep:
        model: torch.nn.Module = Model(ep)
        if kind == "parametrised":
            parametrize.register_parametrization(model.moe.experts, "down_proj", Scaled())
        if kind == "recomputed":
            model = Checkpointed(model)
        if kind == "compiled":
            model.compile(backend="aot_eager")
        ddp = DistributedDataParallel(mark_experts(model))
        x = tokens(rank).requires_grad_()
        out = ddp(x)
        loss_of(out).backward()
        counted = [module.stats().tokens_per_expert for module in model.modules() if isinstance(module, MoE)]
        return {
            "out": out.detach(), "x": x.grad, "counted": sum(counted[0]),
            "grads": {name.removeprefix("model."): p.grad for name, p in model.named_parameters()},
            "state": {name.removeprefix("model."): value for name, value in model.state_dict().items()},
        }  # fmt: skip


@pytest.mark.parametrize(("kind", "ranks"), [("recomputed", 3), ("plain", 2), ("parametrised", 2), ("compiled", 2)])
def test_training_in_ddp_has_the_gradients_of_one_process(kind: str, ranks: int) -> None:
    results, state = run_ranks(train, ranks, kind), full_state()
    factor = {name: 2.0 if kind == "parametrised" and name.endswith("down_proj") else 1.0 for name in state}
    grads, of_batches = plain_gradients(state, [tokens(rank) for rank in range(ranks)])
    for name, value in state.items():
        inner = name.replace("experts.down_proj", "experts.parametrizations.down_proj.original")
        key = inner if factor[name] != 1 else name
        close(joined(name, [result["state"][key] for result in results]), value / factor[name], f"weights {key}")
        got = joined(name, [result["grads"][key] for result in results])
        close(got, grads[name] * factor[name] / ranks, f"gradient of {key}")
    for rank, result in enumerate(results):
        close(result["out"], plain_model(state, tokens(rank)), f"output on rank {rank}")
        close(result["x"], of_batches[rank], f"gradient of tokens of rank {rank}")
        assert result["counted"] % (2 * len(tokens(rank))) == 0, "each rank counts its own tokens"


def wrap(rank: int, world_size: int) -> dict[str, Any]:
    """Wrap what can be wrapped as it is, and what must be refused."""
    said: dict[str, Any] = {}

    def refused(name: str, model: Any, call: Any) -> None:
        try:
            call(model)
        except moelink.UnsupportedError as error:
            said[name] = str(error)

    def run(model: torch.nn.Module) -> Tensor:
        out: Tensor = DistributedDataParallel(model)(x)
        return out

    with moelink.init(**SIZES) as ep:
        model, x = Model(ep), tokens(rank)
        layer = copy.deepcopy(model.moe)
        layer._ddp_params_and_buffers_to_ignore = ["router.weight"]
        said["own names"] = layer._ddp_params_and_buffers_to_ignore
        layer._ddp_params_and_buffers_to_ignore = []
        with torch.no_grad():
            said["layer"] = torch.equal(run(layer), model.moe(x))
        refused("not marked", Model(ep), run)
        refused("marked inside", torch.nn.Sequential(mark_experts(Model(ep))), run)
        halves = [torch.distributed.new_group([0]), torch.distributed.new_group([1])]
        half = halves[rank]
        refused("other ranks", mark_experts(Model(ep)), lambda m: DistributedDataParallel(m, process_group=half)(x))
    with moelink.init(**SIZES, fused_shared_expert=True) as ep:
        refused("fused", Model(ep), mark_experts)
        refused("fused layer", Model(ep).moe, DistributedDataParallel)
    with moelink.init(**SIZES, mode="allreduce") as ep:
        refused("replicated", Model(ep).moe, run)
    return said


def test_what_ddp_would_get_wrong_is_refused_by_name() -> None:
    for said in run_ranks(wrap, 2):
        assert said.pop("layer"), "a layer that is wrapped by itself keeps its experts"
        assert said.pop("own names")[:2] == ["router.weight", "experts.gate_up_proj"]
        for name in ("not marked", "marked inside"):
            assert "moe.experts.gate_up_proj and 4 more" in said[name]
            assert said.pop(name).endswith("call moelink.nn.mark_experts on it right before it is wrapped")
        assert "expected the 2 ranks of the communicator, got 1 ranks" in said.pop("other ranks")
        assert "fused shared expert" in said.pop("fused")
        assert "fused shared expert" in said.pop("fused layer")
        assert "got mode='allreduce'" in said.pop("replicated")
        assert not said


def test_a_model_without_layers_of_moelink_is_refused() -> None:
    with pytest.raises(moelink.ArgumentError, match=r"^model: expected a module with layers of moelink.*got Linear"):
        mark_experts(torch.nn.Linear(2, 2))
