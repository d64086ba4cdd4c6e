"""Routed experts of torchtitan, with moelink swapped in by torchtitan's own override mechanism.

    torchrun --nproc-per-node 2 examples/torchtitan_layer.py

The ranks run one forward and backward with torchtitan's AllToAll dispatcher and one with moelink, and compare them. A
training job needs nothing of this: name the override on the command line (docs/torchtitan.md).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config

from moelink.integrations.torchtitan import close

EXPERTS, TOPK, DIM, INNER, TOKENS = 8, 2, 64, 32, 24
MOELINK = ("moelink.integrations.torchtitan.overrides.routed_experts", {"num_max_tokens_per_rank": TOKENS})


def step(imports: list, rank: int, ranks: int) -> list[torch.Tensor]:
    """Output, and gradients of tokens, scores and this rank's experts."""
    init = {"weight": torch.nn.init.zeros_, "w1_EFD": torch.nn.init.zeros_}
    experts = make_routed_experts_config(
        dim=DIM, hidden_dim=INNER, num_experts=EXPERTS, top_k=TOPK, param_init=init, comm_backend="standard"
    )
    router = make_router_config(dim=DIM, num_experts=EXPERTS, gate_param_init=init, top_k=TOPK)
    moe = make_moe_config(num_experts=EXPERTS, router=router, routed_experts=experts)
    apply_overrides(OverrideConfig(imports=imports), moe)
    moe.routed_experts.inner_experts.num_experts = EXPERTS // ranks
    layer = moe.routed_experts.build()
    layer.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))

    torch.manual_seed(rank)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
    scores, ids = torch.randn(1, TOKENS, EXPERTS).softmax(-1).topk(TOPK)
    scores.requires_grad_()
    out = layer(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    out.float().sum().backward()
    return [out.detach(), x.grad, scores.grad, *(parameter.grad for parameter in layer.parameters())]


def main() -> None:
    dist.init_process_group("gloo")
    set_spmd_backend("partial_dtensor")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    theirs, ours = step([], rank, ranks), step([MOELINK], rank, ranks)
    names = ("output", "tokens", "scores", "w1", "w2", "w3")
    for name, a, b in zip(names, theirs, ours, strict=True):
        difference = torch.tensor(((a.float() - b.float()).abs().max() / a.float().abs().max()).item())
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{name:7} largest difference from AllToAll: {difference:.5f} of the largest element")
    if rank == 0:
        print(f"sums are rounded at other places; a step of bfloat16 is {torch.finfo(torch.bfloat16).eps:.5f}")
    close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
