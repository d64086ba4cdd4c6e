"""A Mixture-of-Experts layer of Megatron-core, with moelink named in its layer spec.

    torchrun --nproc-per-node 2 examples/megatron_layer.py

The ranks run one forward and backward with Megatron's allgather dispatcher and one with moelink, and compare them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from moelink.integrations.megatron import Settings, close
from moelink.integrations.megatron.spec import with_moelink

EXPERTS, HIDDEN, SEQUENCE, BATCH = 8, 64, 6, 4

if not torch.cuda.is_available():  # Megatron asks for CUDA in a few places, and for Transformer Engine in its router
    moe_utils.te_general_gemm = None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self


def step(spec: ModuleSpec, config: TransformerConfig, rank: int) -> list[torch.Tensor]:
    """Output, and gradients of tokens and of the router."""
    torch.manual_seed(0)
    layer = build_module(spec, config)
    torch.manual_seed(rank)
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    out, _ = layer(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, layer.router.weight.grad]


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=2,
        expert_model_parallel_size=ranks, moe_token_dispatcher_type="allgather", moe_router_dtype="fp32",
        moe_router_load_balancing_type="none", use_cpu_initialization=True, add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, moe_ffn_hidden_size=32, bias_activation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    theirs = step(spec, config, rank)
    ours = step(with_moelink(spec, Settings(max_tokens_per_rank=SEQUENCE * BATCH)), config, rank)
    for name, a, b in zip(("output", "tokens", "router"), theirs, ours, strict=True):
        difference = (a - b).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{name:7} largest difference from allgather: {difference:.7f}")
    close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
