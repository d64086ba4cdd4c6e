"""Ranks whose experts outlive a rank that is killed; and the layers on one rank, which have all of them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moelink
from moelink.nn import Balancer, MoE, Placement, refresh_host_copies, restore_experts
from tests.support.fault_ranks import EXPIRY, die
from tests.support.patience import ROOMY, gather, hurry, is_gone, join, until

EXPERTS, HIDDEN, INNER, TOKENS = 5, 128, 128, 6
SIZES = {"num_experts": EXPERTS, "topk": 2, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dispatch_format": "fp32", "combine_dtype": torch.float32},
    "fused shared expert": {"fused_shared_expert": True},
    "quantised": {"dispatch_format": "fp8_block128", "experts_backend": "torch"},
    "mxfp4": {"dispatch_format": "fp8_block128", "experts_backend": "mxfp4"},
}


def model_of(ep: moelink.Communicator, kind: str, seed: int = 1, **options: Any) -> torch.nn.ModuleDict:
    """Two layers over one communicator."""
    new = {"intermediate_size": INNER, "experts_backend": KINDS[kind].get("experts_backend", "dequantize"), **options}
    return torch.nn.ModuleDict({"a": MoE(ep, seed=seed, **new), "b": MoE(ep, seed=seed + 1, **new)})


def sizes_of(kind: str, **more: Any) -> dict[str, Any]:
    """Arguments of init; the bits of a token do not depend on the ranks of its experts."""
    sizes = {**SIZES, **KINDS[kind], "pre_reduce": False, **more}
    sizes.pop("experts_backend", None)
    return sizes


def tokens(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()


@torch.no_grad()
def whole(kind: str) -> list[torch.Tensor]:
    """The bytes of the weights of all experts, and of the shared one, on one rank."""
    with moelink.init(**sizes_of(kind), device="cpu") as ep:
        return [t.view(torch.uint8) for t in _weights(model_of(ep, kind))]


def _weights(model: torch.nn.ModuleDict) -> list[torch.Tensor]:
    return [t.clone() for layer in model.values() for t in layer.experts.weights]


@torch.no_grad()
def survive(rank: int, world_size: int, kind: str, transport: str, folder: str, victims: tuple[int, ...]) -> Any:
    """The ranks ``victims`` are killed, one after the other; the others recover, restore and go on."""
    ep = join(**sizes_of(kind, transport=transport), device="cpu")
    model, alive = model_of(ep, kind, host_copies=1), list(range(world_size))
    before = [layer(tokens(rank)) for layer in model.values()]
    said: list[Any] = []
    for victim in victims:
        kept = refresh_host_copies(model, max_bytes=200_000)
        assert f"host_copies=1 of {kept // 2} bytes here" in repr(model["a"])
        gather(folder, f"before {victim}", rank, alive)
        if rank == victim:
            die()
        until(lambda: is_gone(ep, alive.index(victim)))  # noqa: B023
        hurry(ep, EXPIRY[transport])
        with pytest.raises(moelink.PeerLostError):
            model["a"](tokens(rank))
        ep = ep.recover([number for number, old in enumerate(alive) if old != victim])
        alive.remove(victim)
        report = restore_experts(model, ep, max_bytes=200_000)
        after = [layer(tokens(rank)) for layer in model.values()]
        said.append((report, [torch.equal(a, b) for a, b in zip(after, before, strict=True)]))
    return said, alive.index(rank), [t.view(torch.uint8) for t in _weights(model)]


@torch.no_grad()
def replicas_alone(rank: int, world_size: int, folder: str) -> Any:
    """Without host copies: of three ranks that drain the last one, it dies; then the next one, whose expert is lost."""
    ep = join(**sizes_of("bf16", num_experts=8), device="cpu")
    model = model_of(ep, "bf16", placement=Placement((0, 1, 2, 0, 1, 3, 3, 4)))
    before = [layer(tokens(rank)) for layer in model.values()]
    balancer = Balancer(model)
    balancer.drain([2])
    while balancer.steps_left:
        balancer.step()
    gather(folder, "drained", rank, range(3))
    if rank == 2:
        die()
    until(lambda: is_gone(ep, 2))
    ep = ep.recover([0, 1])
    reports = restore_experts(model, ep)
    right = [torch.equal(layer(tokens(rank)), old) for layer, old in zip(model.values(), before, strict=True)]
    Balancer(model).run()  # over the survivors' own connections
    right += [torch.equal(layer(tokens(rank)), old) for layer, old in zip(model.values(), before, strict=True)]
    placed, weights, old = model["a"].experts.placement.experts, _weights(model), ep
    gather(folder, "balanced", rank, range(2))
    if rank == 1:
        die()
    until(lambda: is_gone(ep, 1))  # noqa: B023
    ep = ep.recover([0])
    with pytest.raises(moelink.StateError) as told:
        restore_experts(model, ep)
    assert model["a"].ep is old
    assert all(torch.equal(a, b) for a, b in zip(_weights(model), weights, strict=True))
    partly = restore_experts(model, ep, allow_missing=True)
    nan = [int(t.float().isnan().flatten(1).all(1).sum()) for t in model["a"].experts.weights]
    return reports, right, placed, str(told.value), partly, nan


@torch.no_grad()
def admitted(rank: int, world_size: int) -> Any:
    """Rank 1 is a new process, whose experts hold nothing: it gets them from host copies and replicas, in place."""
    options = {"placement": Placement((0, 1, 2, 3, 4, 0)), "host_copies": 1}
    with moelink.init(**sizes_of("bf16", num_experts=6), device="cpu") as ep:
        model = model_of(ep, "bf16", **options)
        refresh_host_copies(model)
        weights = _weights(model)
        before = [layer(tokens(rank)) for layer in model.values()]
        if rank == 1:
            router = model.state_dict()
            model = model_of(ep, "bf16", 7, **{**options, "placement": Placement((4, 3, 2, 1, 0, 0))})
            model.load_state_dict({k: v for k, v in router.items() if "router" in k}, strict=False)
        addresses = [t.data_ptr() for layer in model.values() for t in layer.experts.weights]
        report = restore_experts(model, ep, empty=rank == 1)
        assert addresses == [t.data_ptr() for layer in model.values() for t in layer.experts.weights]
        assert all(torch.equal(a, b) for a, b in zip(_weights(model), weights, strict=True))
        assert all(torch.equal(layer(tokens(rank)), old) for layer, old in zip(model.values(), before, strict=True))
        assert model["a"].placement.placement.experts == (0, 1, 2, 3, 4, 0)
        return report


@torch.no_grad()
def masked_and_admitted(process: int, processes: int, port: int, transport: str) -> Any:
    """Of 3 ranks rank 1 dies and is masked; process 3 takes its place and gets its experts from host copies."""
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    sizes = {**sizes_of("bf16"), "transport": transport, "timeout": ROOMY, "device": "cpu"}
    if process == 3:
        until(lambda: store.check(["masked"]))
        ep, rank = moelink.join(store, 1, 3, **sizes), 1
        model = model_of(ep, "bf16", 7, host_copies=1)
    else:
        dist.init_process_group("gloo", store=dist.PrefixStore("init", store), rank=process, world_size=3)
        ep, rank = moelink.init(**sizes), process
        model = model_of(ep, "bf16", host_copies=1)
        refresh_host_copies(model)
        before = [layer(tokens(rank)) for layer in model.values()]
        if rank == 1:
            store.set("gone", "1")
            die()
        until(lambda: store.check(["gone"]))
        ep.mask([1])
        lacking = [layer(tokens(rank)) for layer in model.values()]
        assert not all(torch.equal(now, old) for now, old in zip(lacking, before, strict=True))
        with pytest.raises(moelink.StateError, match=r"present, got ranks \[1\] masked; admit them"):
            refresh_host_copies(model)
        store.set("masked", "1")
        ep.admit([1], store)
    if rank != 0:  # what a server would load from its checkpoint
        model.load_state_dict(torch.load(io.BytesIO(store.get("router"))), strict=False)
    else:
        written = io.BytesIO()
        torch.save({name: value for name, value in model.state_dict().items() if "router" in name}, written)
        store.set("router", written.getvalue())
    reports = restore_experts(model, ep, empty=process == 3)
    after = [layer(tokens(rank)) for layer in model.values()]
    right = process == 3 or all(torch.equal(now, old) for now, old in zip(after, before, strict=True))
    weights = _weights(model)
    ep.close()
    return reports, right, weights


def trained(rank: int, world_size: int, folder: str) -> Any:
    """Gradients after a death: complete of this rank's experts, and the router's summed over the survivors' group."""
    ep = join(**sizes_of("fp32"), device="cpu")
    layer = MoE(ep, intermediate_size=INNER, seed=1, host_copies=1)
    refresh_host_copies(layer)
    gather(folder, "ready", rank, range(3))
    if rank == 0:
        die()
    until(lambda: is_gone(ep, 0))
    ep = ep.recover([1, 2])
    restore_experts(layer, ep)
    gradients(layer, tokens(rank))
    moelink.nn.all_reduce_gradients(layer, group=ep.group)
    return layer.experts.first, layer.experts.down_proj.grad, layer.router.weight.grad


def gradients(layer: MoE, x: torch.Tensor) -> None:
    layer(x.float()).square().sum().backward()
