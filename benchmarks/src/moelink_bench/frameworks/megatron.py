"""Megatron-core's alltoall dispatcher and moelink's, in Megatron's MoE layer: router, dispatch, experts, combine."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from moelink_bench.frameworks.dispatchers import Case, Layer, trained


def make_layer(case: Case, rank: int, ranks: int) -> Layer:
    """Return Megatron's layer over its own dispatcher and over moelink. Collective.

    Raises:
        UnsupportedError: Megatron-core is not installed, or not a release that moelink supports.
    """
    from moelink.integrations.megatron.spec import with_moelink  # refuses other releases

    # isort: split

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moelink.integrations.megatron import Settings

    if not hasattr(moe_utils, "te_general_gemm"):  # which the router asks for by name, and gets with TransformerEngine
        moe_utils.te_general_gemm = None
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    if case.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=case.hidden_size, num_attention_heads=8, num_moe_experts=case.num_experts,
        moe_router_topk=case.topk, expert_model_parallel_size=ranks, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_router_dtype="fp32",
        use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True, activation_func=functional.silu,
        ffn_hidden_size=case.intermediate_size, moe_ffn_hidden_size=case.intermediate_size, moe_grouped_gemm=False,
        bias_activation_fusion=False, bf16=True, params_dtype=torch.bfloat16,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=case.num_experts, moe_grouped_gemm=False).submodules.mlp
    settings = Settings(max_tokens_per_rank=max(case.tokens), device=case.device, capacity=case.capacity, timeout=120.0)
    layers: dict[str, Any] = {}
    for name, chosen in (("Megatron alltoall", spec), ("moelink", with_moelink(spec, settings))):
        torch.manual_seed(1)
        layer = build_module(chosen, config)
        layer.set_layer_number(0)
        layers[name] = layer.to(case.device, torch.bfloat16)
    layers["moelink"].load_state_dict(layers["Megatron alltoall"].state_dict())
    generator = torch.Generator().manual_seed(10 + rank)
    shape = (max(case.tokens), 1, case.hidden_size)  # sequence, batch, hidden
    x, heard = (torch.randn(shape, generator=generator).to(case.device, torch.bfloat16) for _ in range(2))
    contenders = [
        trained(name, lambda x, layer=layer: layer(x)[0], {"x": x}, heard, layer, layer.token_dispatcher)
        for name, layer in layers.items()
    ]
    return Layer(contenders, "experts are Megatron's SequentialMLP, without TransformerEngine, in both", _close)


def _close() -> None:
    """Close moelink's communicators and Megatron's groups. Collective."""
    from megatron.core import parallel_state

    from moelink.integrations.megatron import close as close_all

    close_all()
    parallel_state.destroy_model_parallel()
