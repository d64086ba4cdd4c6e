"""The programs of test_torchtitan_losses.py: layers with auxiliary losses and padding beside torchtitan's own layer.

torchtitan's layer gets the tokens of all ranks in one process, padding left out, and the losses are sums over tokens
and experts that are written out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tests.integrations.torchtitan.torchtitan_ranks  # noqa: F401  # isort: skip - first: it sets torchtitan up for CPUs

from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3 import model_registry

import moelink
from moelink.integrations.torchtitan import set_padding_mask
from moelink.integrations.torchtitan.overrides import moe as moe_override
from tests.integrations.torchtitan.torchtitan_ranks import EXPERTS, HIDDEN, INTERMEDIATE, begin, end, said_by

BATCH, LENGTH, TOPK = 3, 5, 2
LOSSES = {"balance": 0.3, "sequence": 0.5, "z": 0.7, "over": "all"}


def layer_config(scoring: str) -> MoE.Config:
    """A small layer of torchtitan's; with sigmoid scores also a bias of experts and a shared expert."""
    made = model_registry("debugmodel_moe", moe_comm_backend="standard").model.layers[0].moe
    made.num_experts = made.router.num_experts = made.router.gate.out_features = EXPERTS
    made.router.gate.in_features = made.routed_experts.inner_experts.dim = HIDDEN
    made.routed_experts.inner_experts.hidden_dim = INTERMEDIATE
    made.routed_experts.inner_experts.num_experts = made.routed_experts.token_dispatcher.num_experts = EXPERTS
    made.router.top_k = made.routed_experts.token_dispatcher.top_k = TOPK
    made.router.score_func, made.load_balance_coeff = scoring, None
    if scoring == "sigmoid":
        made.load_balance_coeff = 1e-3
        made.shared_experts = make_ffn_config(dim=HIDDEN, hidden_dim=INTERMEDIATE, w1_param_init={}, w2w3_param_init={})
    return made


def fill(layer: torch.nn.Module) -> None:
    """The same weights and biases on every rank and in every layer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(layer.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        if layer.expert_bias_E is not None:
            layer.expert_bias_E.copy_(torch.randn(EXPERTS, generator=generator) / 2)


def given(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a mask, and what the loss makes of the output. Rank 1 has a sequence of nothing but padding."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, heard = torch.randn(2, BATCH, LENGTH, HIDDEN, generator=generator)
    padding = torch.rand(BATCH, LENGTH, generator=generator) < 0.3
    padding[rank] |= rank == 1
    return x, padding, heard


def losses_of(gate: Tensor, ranks: list[tuple[Tensor, Tensor]], scoring: str) -> Tensor:
    """The losses of the tokens of all ranks, token by token."""
    balance, sequences, z = 0.0, [], []
    everything: list[tuple[Tensor, list[int]]] = []

    def even(tokens: list[tuple[Tensor, list[int]]]) -> Tensor:
        total = 0.0
        for expert in range(EXPERTS):
            total += sum(expert in chosen for _, chosen in tokens) * sum(scores[expert] for scores, _ in tokens)
        return EXPERTS / (TOPK * len(tokens) ** 2) * total

    for x, padding in ranks:
        for row, is_padding in zip(x, padding, strict=True):
            tokens = []
            for token in row[~is_padding]:
                logits = gate @ token
                scores = logits.softmax(0) if scoring == "softmax" else logits.sigmoid() / logits.sigmoid().sum()
                tokens.append((scores, scores.topk(TOPK).indices.tolist()))
                z.append(torch.logsumexp(logits, 0) ** 2)
            everything += tokens
            sequences += [even(tokens)] if tokens else []
    balance = even(everything)
    return torch.stack([0.3 * balance, 0.5 * sum(sequences) / len(sequences), 0.7 * sum(z) / len(z)])


def expected(world_size: int, scoring: str) -> dict[str, Any]:
    """Return the results of torchtitan's layer for the tokens of all ranks."""
    layer = layer_config(scoring).build()
    fill(layer)
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=None)
    inputs = [given(rank) for rank in range(world_size)]
    xs = [x.clone().requires_grad_() for x, _, _ in inputs]
    tokens = torch.cat([x[~padding] for x, (_, padding, _) in zip(xs, inputs, strict=True)])
    out = layer(tokens[None])[0]
    terms = losses_of(layer.router.gate.weight, [(x, each[1]) for x, each in zip(xs, inputs, strict=True)], scoring)
    heard = torch.cat([heard[~padding] for _, padding, heard in inputs])
    ((out * heard).sum() + terms.sum()).backward()
    outs = out.detach().split([int((~padding).sum()) for _, padding, _ in inputs])
    return {
        "out": outs, "x": [x.grad for x in xs], "terms": terms.detach(), "counts": layer.tokens_per_expert_E,
        "gradients": {name: parameter.grad for name, parameter in layer.named_parameters()},
    }  # fmt: skip


def compared(rank: int, world_size: int, scoring: str, by: str) -> dict[str, Any]:
    """(expected, made) by name. ``by``: who tells the losses' factor, "scale" or "add_aux_losses"."""
    begin()
    want = expected(world_size, scoring)
    losses = {**LOSSES, **({"scale": 0.5} if by == "add_aux_losses" else {})}
    layer = moe_override(
        layer_config(scoring), aux_loss=losses, num_max_tokens_per_rank=BATCH * LENGTH, dtype="float32"
    ).build()
    fill(layer)
    parallelism = ParallelismConfig(
        expert_parallel_degree=world_size, data_parallel_shard_degree=world_size, spmd_backend="partial_dtensor"
    )
    dims = ParallelDims.from_config(parallelism, world_size)
    dims.build_mesh()
    layer.parallelize(dims)
    mine = slice(rank * EXPERTS // world_size, (rank + 1) * EXPERTS // world_size)
    for parameter in layer.routed_experts.inner_experts.parameters():
        parameter.data = parameter.data[mine].clone()
    x, padding, heard = given(rank)
    x[padding] = torch.nan
    x.requires_grad_()
    set_padding_mask(layer, padding)
    sent = []
    dispatcher = layer.routed_experts.token_dispatcher
    if world_size > 1:
        dispatch = dispatcher.ep.dispatch
        dispatcher.ep.dispatch = lambda x, ids, weights: sent.append(ids) or dispatch(x, ids, weights)
    out = layer(x)
    loss = (out * heard).sum()
    terms = layer.aux_losses.values.clone()
    if by == "add_aux_losses":
        loss = moelink.nn.add_aux_losses(loss, layer)
    loss.backward()
    assert out[padding].eq(0).all()
    assert x.grad[padding].eq(0).all()
    assert all((ids.view(BATCH, LENGTH, TOPK)[padding] == -1).all() for ids in sent)
    made = {"out": out[~padding], "x": x.grad, "terms": terms, "counts": layer.tokens_per_expert_E}
    made = {name: tensor.detach().clone() for name, tensor in made.items()}
    for name in ("terms", "counts"):
        dist.all_reduce(made[name])
    pairs = {name: (want[name], made[name]) for name in ("terms", "counts")}
    pairs |= {name: (want[name][rank], made[name]) for name in ("out", "x")}
    for name, parameter in layer.named_parameters():
        gradient, expert = parameter.grad, "inner_experts" in name
        if not expert:
            dist.all_reduce(gradient)
        pairs[name] = (want["gradients"][name][mine] if expert else want["gradients"][name], gradient)
    end()
    return pairs


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """Return the refusals of layers and settings that have no losses or masks, by their names."""
    begin()
    said = {}
    sized = {"num_max_tokens_per_rank": BATCH * LENGTH, "dtype": "float32"}
    for name, losses, degrees in (
        ("tensor", {"z": 0.1}, {"tensor_parallel_degree": world_size}),
        ("context", {"sequence": 0.1}, {"context_parallel_degree": world_size}),
    ):
        layer = moe_override(layer_config("softmax"), aux_loss=losses, **sized).build()
        dims = ParallelDims.from_config(ParallelismConfig(data_parallel_shard_degree=1, **degrees), world_size)
        dims.build_mesh()
        said[name] = said_by(lambda: layer.parallelize(dims))  # noqa: B023
    plain = layer_config("softmax").build()
    said["model"] = said_by(lambda: set_padding_mask(plain, None))
    layer = moe_override(layer_config("softmax"), **sized).build()
    fill(layer)
    set_padding_mask(layer, torch.zeros(1, 2, dtype=torch.bool))
    said["mask"] = said_by(lambda: layer(torch.zeros(1, 3, HIDDEN)))
    end()
    return said
