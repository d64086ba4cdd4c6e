"""What ranks of tests/test_torchtitan.py do. They need torchtitan, and run on CPUs over gloo."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes CUDA where it finds no accelerator

from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.qwen3 import model_registry

import moelink
from moelink.errors import MoelinkError
from moelink.integrations.torchtitan import COMMUNICATORS, close
from moelink.integrations.torchtitan.dispatcher import MoelinkSelectiveAC
from moelink.integrations.torchtitan.overrides import dispatcher as dispatcher_override

OVERRIDES = "moelink.integrations.torchtitan.overrides"
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 8, 64, 32, 24


def begin(backend: str = "default") -> None:
    dist.init_process_group("gloo")
    set_spmd_backend(backend)


def end() -> None:
    close()
    dist.destroy_process_group()


class Root(Configurable):
    """What overrides are applied to: a tree that has a model, as torchtitan's trainer has."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: object = None
        activation_checkpoint: object = None


def all_to_all(topk: int, world_size: int) -> AllToAllTokenDispatcher:
    made = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=topk).build()
    made.wire_meshes(ep_mesh=mesh(world_size))
    return made


def ours(topk: int, world_size: int, **given):
    given = {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": TOKENS, **given}
    made = dispatcher_override(AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=topk), **given).build()
    made.wire_meshes(ep_mesh=mesh(world_size))
    return made


def mesh(world_size: int):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",))


def one_layer(used, rank: int, world_size: int, topk: int, dtype: torch.dtype, tokens: int = TOKENS, run=None):
    """Dispatch, torchtitan's experts, combine, backward: everything that came of it, by name."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(EXPERTS, *shape, generator=generator) / 8
        for shape in ((INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN))
    ]
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    scores, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(topk)
    scores = scores.detach().requires_grad_()
    counts = torch.bincount(ids.view(-1), minlength=EXPERTS)
    mine = EXPERTS // world_size
    experts = GroupedExperts(GroupedExperts.Config(dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=mine))
    for parameter, weight in zip((experts.w1_EFD, experts.w2_EDF, experts.w3_EFD), weights, strict=True):
        parameter.data = weight[rank * mine : (rank + 1) * mine].clone()
    heard = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)

    def layer(x, scores):
        rows, received, metadata = used.dispatch(x, scores, ids, counts)
        return used.combine(experts(rows, received), metadata, x), received, rows

    out, received, rows = (layer if run is None else run(layer))(x, scores)
    (out * heard).sum().backward()
    return {
        "counts": received,
        "rows": rows.detach()[: int(received.sum())],
        "out": out.detach(),
        "x.grad": x.grad,
        "scores.grad": scores.grad,
        "w1.grad": experts.w1_EFD.grad,
        "w2.grad": experts.w2_EDF.grad,
        "w3.grad": experts.w3_EFD.grad,
    }


def compared(rank: int, world_size: int, topk: int, dtype: torch.dtype, compiled: bool = False):
    """(what AllToAll made, what moelink made), by name."""
    begin()
    run = (lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager")) if compiled else None
    name = str(dtype).removeprefix("torch.")
    theirs = one_layer(all_to_all(topk, world_size), rank, world_size, topk, dtype)
    made = one_layer(ours(topk, world_size, dtype=name), rank, world_size, topk, dtype, run=run)
    end()
    return theirs, made
