"""What ranks of test_torchtitan.py do. They need torchtitan, and run on CPUs over gloo."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed as dist

warnings.simplefilter("ignore")  # torchtitan and torch warn of what CPUs lack, as they are imported and as they run
torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes CUDA where it finds no accelerator

from spmd_types.checker import typecheck as spmd_typecheck
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig, derive, override
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.qwen3 import model_registry

from moelink.errors import MoelinkError
from moelink.integrations.torchtitan import COMMUNICATORS, close, set_padding_mask
from moelink.integrations.torchtitan.overrides import dispatcher as dispatcher_override
from moelink.nn import AuxLosses

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


@override(target=FlexAttention.Config, description="attention with a backward on CPUs")
def plain_attention(cfg):
    return derive(cfg, ScaledDotProductAttention.Config)


LAYERS, INNER, SEQ_LEN, BATCH = 2, 64, 16, 2
"""Of the model's 8 layers and of its experts' 768 intermediate elements; and of each rank's text."""


def trained(
    rank: int,
    world_size: int,
    imports: list,
    backend: str | None = "standard",
    spmd_backend: str = "partial_dtensor",
    checkpointing: bool = False,
    compiler: str | None = None,
    steps: int = 10,
    balance: float | None = None,
    padded: bool = False,
):
    """Losses of ``steps`` steps of qwen3's debugmodel_moe as torchtitan parallelises it, who dispatched, the auxiliary
    losses of layers, and the biases of experts. With ``balance`` these are updated by that much in each step, and a
    token has one expert. ``padded``: the end of each text is padding."""
    dist.init_process_group("gloo")
    set_spmd_backend(spmd_backend)
    torch.manual_seed(0)
    spec = model_registry("debugmodel_moe", moe_comm_backend=backend)
    spec.model.layers = spec.model.layers[:LAYERS]
    for layer in spec.model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = INNER
        if balance is not None:
            layer.moe.load_balance_coeff = balance
            layer.moe.router.top_k = layer.moe.routed_experts.token_dispatcher.top_k = 1
    training = TrainingConfig(
        local_batch_size=BATCH, seq_len=SEQ_LEN, mixed_precision_param="bfloat16",
        mixed_precision_reduce="float32",
    )  # fmt: skip
    parallelism = ParallelismConfig(
        expert_parallel_degree=world_size, data_parallel_shard_degree=world_size, spmd_backend=spmd_backend
    )
    checkpoint = SelectiveAC.Config() if checkpointing else None
    spec.model.update_from_config(config=SimpleNamespace(training=training, parallelism=parallelism))
    root = Root.Config(model_spec=spec, activation_checkpoint=checkpoint)
    replaced = apply_overrides(OverrideConfig(imports=[*imports, f"{__name__}.plain_attention"]), root)
    dims = ParallelDims.from_config(parallelism, world_size)
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiler is not None, backend=compiler or "inductor"),
        ac_config=root.activation_checkpoint,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if balance is not None:
        register_moe_load_balancing_hook(optimizer, [model], dims)
    losses = []
    if padded:
        set_padding_mask(model, (torch.arange(SEQ_LEN) >= SEQ_LEN - 3 - rank).expand(BATCH, -1))
    for _ in range(steps):
        generator = torch.Generator().manual_seed(rank)  # the same text at every step, so that it can be learned
        text = torch.randint(2048, (BATCH, SEQ_LEN + 1), generator=generator)
        with get_spmd_context(parallel_dims=dims)():
            logits = model(text[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    traffic = [ep.traffic() for eps in COMMUNICATORS._open.values() for ep in eps.values()]
    terms = [module.values.clone() for module in model.modules() if isinstance(module, AuxLosses)]
    biases = [layer.moe.expert_bias_E for layer in model.layers.values()]
    biases = [bias.to_local() if isinstance(bias, DTensor) else bias for bias in biases]
    end()
    return losses, replaced, traffic, terms, biases


def quantised_and_padded(rank: int, world_size: int):
    """Dtype of the rows, counts of the experts, rows in all: with rows in fp8 and groups of 16."""
    begin()
    used = dispatcher_override(
        AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=2), hidden_dim=128, num_max_tokens_per_rank=TOKENS,
        dispatch_format="fp8_block128", expert_alignment=16,
    ).build()  # fmt: skip
    used.wire_meshes(ep_mesh=mesh(world_size))
    x = torch.randn(TOKENS, 128).bfloat16().requires_grad_()
    scores, ids = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(2)
    rows, counts, metadata = used.dispatch(x, scores, ids, torch.bincount(ids.view(-1), minlength=EXPERTS))
    out = used.combine(rows, metadata, x)
    out.sum().backward()
    assert ((out.float() - x.float() * scores.sum(1, keepdim=True)).abs() <= 0.1 * x.float().abs().max()).all()
    assert x.grad is not None
    end()
    return rows.dtype, counts.tolist(), rows.shape[0]


def other_arguments(rank: int, world_size: int) -> str:
    """What a rank is told when its override had another dispatch format than that of rank 0."""
    begin()
    try:
        ours(2, world_size, dispatch_format="bf16" if rank == 0 else "fp32")
    except MoelinkError as error:
        said = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return said


def said_by(fn) -> str:
    try:
        fn()
    except MoelinkError as error:
        return str(error)
    return "nothing"


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What is said of calls and settings that are not supported, by what they are."""
    begin()
    used = ours(2, world_size)
    x, scores = torch.randn(3, HIDDEN), torch.rand(3, 2)
    ids, counts = torch.tensor([[0, 1]] * 3), torch.tensor([3, 3] + [0] * 6)
    said = {"dtype": said_by(lambda: used.dispatch(x, scores, ids, counts))}
    set_spmd_backend("spmd_types")
    with spmd_typecheck(local=False):
        said["typechecking"] = said_by(lambda: used.dispatch(x.bfloat16(), scores, ids, counts))
    set_spmd_backend("full_dtensor")
    said["full_dtensor"] = said_by(lambda: ours(2, world_size))
    said["bound"] = said_by(
        lambda: dispatcher_override(AllToAllTokenDispatcher.Config(num_experts=8, top_k=2), hidden_dim=8)
    )
    end()
    return said


def without_a_mesh(rank: int, world_size: int) -> bool:
    """Whether a layer without an expert mesh is torchtitan's own, bit for bit."""
    set_spmd_backend("default")
    made = []
    for kind in ("theirs", "ours"):
        cfg = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=2)
        if kind == "ours":
            cfg = dispatcher_override(cfg, hidden_dim=HIDDEN, num_max_tokens_per_rank=TOKENS)
        used = cfg.build()
        used.wire_meshes(ep_mesh=None)
        made.append(one_layer(used, 0, 1, 2, torch.bfloat16))
    return all(torch.equal(made[0][name], made[1][name]) for name in made[0])
