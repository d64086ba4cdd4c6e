"""One rank of SGLang's expert parallelism on the CPU: moelink's dispatcher with SGLang's hook, formats and classes."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 2, 128, 24


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, router weights and ids."""
    generator = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(TOKENS - 3 * rank, HIDDEN, generator=generator).bfloat16()
    chosen, ids = torch.randn(len(x), EXPERTS, generator=generator).softmax(-1).topk(TOPK)
    return x, chosen, ids.int()


def weights() -> Tensor:
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16() / 8


def truth(x: Tensor, chosen: Tensor, ids: Tensor) -> Tensor:
    made = torch.einsum("td,tkde->tke", x.float(), weights()[ids.long()].float())
    return (made.bfloat16().float() * chosen[..., None]).sum(1)


def compute(out: Any, first: int) -> Tensor:
    """The experts, by the ends of their rows alone, as SGLang's products read them; then the router weights."""
    rows = out.hidden_states.float()
    if out.hidden_states_scale is not None:
        rows = (rows.view(len(rows), -1, 128) * out.hidden_states_scale[..., None]).flatten(1).bfloat16().float()
    y, start, real = torch.full((len(rows), HIDDEN), torch.nan), 0, weights().float()
    for expert, end in enumerate(out.psum_num_recv_tokens_per_expert.tolist()):
        y[start:end] = rows[start:end] @ real[first + expert]
        start = -(-end // out.expert_alignment) * out.expert_alignment
    return (y.bfloat16().float() * out.topk_weights[:, None]).bfloat16()


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """Results of all formats and both phases, and what was refused."""
    warnings.simplefilter("ignore")  # SGLang warns of all that it lacks without a GPU
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.base import RoutewiseLayout
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.plugins.hook_registry import HookRegistry

    from moelink.errors import MoelinkError
    from moelink.integrations.settings import Settings
    from moelink.integrations.sglang import close, dispatcher, plugin, register

    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    assert not register({})
    assert plugin.TARGET not in HookRegistry._hooks, "nobody asked"
    assert register({"MOELINK_SGLANG": "1"})
    assert register({"MOELINK_SGLANG": "1"})
    assert len(HookRegistry._hooks[plugin.TARGET]) == 1
    HookRegistry.apply_hooks()

    # What a server would have set up.
    state = {"backend": MoeA2ABackend.DEEPEP_V2, "extend": True}
    dispatcher.get_moe_a2a_backend = lambda: state["backend"]
    dispatcher.get_is_extend_in_batch = lambda: state["extend"]
    dispatcher.get_parallel = lambda: SimpleNamespace(tp_group=SimpleNamespace(device_group=group))
    elastic = SimpleNamespace(elastic_ep_backend=None, enable_elastic_expert_backup=False)
    dispatcher.get_exec = lambda: SimpleNamespace(moe=elastic)
    dispatcher.envs = SimpleNamespace(
        SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=SimpleNamespace(get=lambda: TOKENS)
    )
    config = MoeRunnerConfig(
        num_experts=EXPERTS, num_local_experts=EXPERTS // world_size, hidden_size=HIDDEN, top_k=TOPK,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    plain = layer.UnquantizedFusedMoEMethod.__new__(layer.UnquantizedFusedMoEMethod)
    quantised = layer.Fp8MoEMethod.__new__(layer.Fp8MoEMethod)
    quantised.use_mxfp8 = False

    x, chosen, ids = batch(rank)
    routed = SimpleNamespace(topk_ids=ids, topk_weights=chosen)
    results = {"class": type(layer.create_moe_dispatcher(config, plain)).__name__}
    for name, method in (("bf16", plain), ("fp8_block128", quantised)):
        made = layer.create_moe_dispatcher(config, method)
        assert made.ep is layer.create_moe_dispatcher(config, method).ep, "layers share a communicator"
        real = x
        if name == "fp8_block128":
            seen = made.ep.config.format.quantize(x)
            real = made.ep.config.format.dequantize(seen.payload, seen.scales).bfloat16()
        for extend in (True, False):
            state["extend"] = extend
            out = made.dispatch(hidden_states=x, topk_output=routed)
            y = made.combine(combine_input=DeepEPv2CombineInput(compute(out, rank * EXPERTS // world_size), None))
            results[name, extend] = (y, truth(real, chosen, ids))
            results["facts", name, extend] = {
                "format": out.format.value, "expanded": out.is_expanded, "masked": out.use_masked_gemm,
                "alignment": out.expert_alignment, "most": out.masked_max_m, "total": out.total_expanded,
                "rows": len(out.hidden_states), "scale": None if out.hidden_states_scale is None
                else tuple(out.hidden_states_scale.shape), "ends": out.psum_num_recv_tokens_per_expert.dtype,
            }  # fmt: skip
    said: dict[str, str] = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except MoelinkError as error:
            said[name] = str(error)

    refused("combine first", lambda: made.combine(combine_input=DeepEPv2CombineInput(x, None)))
    made.dispatch(hidden_states=x, topk_output=routed)
    refused("dispatch twice", lambda: made.dispatch(hidden_states=x, topk_output=routed))
    refused("unweighted", lambda: made.combine(combine_input=DeepEPv2CombineInput(x, chosen, RoutewiseLayout.EXPANDED)))
    refused("too many", lambda: made.dispatch(hidden_states=torch.zeros(TOKENS + 1, HIDDEN), topk_output=routed))
    quantised.use_mxfp8 = True
    refused("mxfp8", lambda: layer.create_moe_dispatcher(config, quantised))
    state["backend"] = MoeA2ABackend.DEEPEP
    refused("backend", lambda: layer.create_moe_dispatcher(config, plain))
    state["backend"] = MoeA2ABackend.DEEPEP_V2
    elastic.elastic_ep_backend = "nixl"
    refused("elastic", lambda: layer.create_moe_dispatcher(config, plain))
    elastic.elastic_ep_backend = None
    refused("settings", lambda: dispatcher.make(config, plain, Settings(timeout=30.0 + rank)))
    results["said"] = said
    close()
    torch.distributed.destroy_process_group()
    return results
