"""SGLang's standard dispatcher, which gathers and scatters, and moelink's, with the same product between them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.integrations.settings import Settings, device_of
from moelink_bench.frameworks.dispatchers import Case, Layer
from moelink_bench.frameworks.engines import Inputs, products, weighed_experts
from moelink_bench.workload import Batch

DECODE = 128
"""Tokens of a rank up to which a batch counts as decode."""

ALIGNMENT = 8
"""Rows of an expert are padded to a multiple of it for moelink; torch's product needs none, SGLang's own want 128."""

NOTE = (
    "SGLang's StandardDispatcher with the all-gather and reduce-scatter that it does for data-parallel attention, told "
    "to do so for bf16 rows; experts are a product by group of torch in both, as SGLang's own need its compiled parts; "
    "moelink's dispatcher is made for the tokens of each batch, and pads the rows of an expert to a multiple of 8"
)


def make_layer(case: Case, rank: int, ranks: int) -> Layer:
    """Return SGLang's layer over its own dispatcher and over moelink. Collective.

    Args:
        case: sizes.
        rank, ranks: of the default process group; every rank is a data-parallel one of SGLang.

    Raises:
        UnsupportedError: SGLang is not installed, or not a release that moelink supports.
    """
    from moelink.integrations.sglang.dispatcher import MoelinkDispatcher  # refuses other releases

    # isort: split

    from sglang.srt.distributed.parallel_state import init_model_parallel_group
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher import standard
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_parallel

    inputs, device = Inputs(case, rank, ranks), device_of(case.device)
    group = init_model_parallel_group(
        [list(range(ranks))], device.index or 0, "nccl" if case.device == "cuda" else "gloo",
        use_pynccl=case.device == "cuda", use_custom_allreduce=False, use_mscclpp=False,
        use_torch_symm_mem_allreduce=False, group_name="tp",
    )  # fmt: skip
    opened = contextlib.ExitStack()
    opened.callback(_close)
    opened.enter_context(get_parallel().override(tp_group=group, moe_ep_size=ranks, moe_ep_rank=rank))
    dp_attention._DpGatheredBufferWrapper.set_metadata(case.hidden_size, torch.bfloat16, device)
    standard.should_use_flashinfer_cutlass_moe_fp4_allgather = lambda: True
    standard.get_moe_runner_backend = lambda: None  # the server's; no runner here
    local = case.num_experts // ranks
    theirs = standard.StandardDispatcher(
        MoeRunnerConfig(
            num_experts=case.num_experts, num_local_experts=local, hidden_size=case.hidden_size, top_k=case.topk,
            params_dtype=torch.bfloat16, num_fused_shared_experts=0,
        )
    )  # fmt: skip
    ours = {
        tokens: MoelinkDispatcher(
            group.device_group, Settings(timeout=120.0), num_experts=case.num_experts, num_local_experts=local,
            topk=case.topk, hidden_size=case.hidden_size, max_tokens=tokens, dispatch_format="bf16", device=device,
            alignment=ALIGNMENT,
        )
        for tokens in case.tokens
    }  # fmt: skip

    def routed(batch: Batch) -> Any:
        return StandardTopKOutput(batch.topk_weights, batch.topk_ids, None)

    def gathered(batch: Batch, computes: bool) -> Tensor:
        received = theirs.dispatch(batch.x, routed(batch))
        y, topk = received.hidden_states, received.topk_output
        if computes:
            y = weighed_experts(y, inputs.own, topk.topk_ids, topk.topk_weights)
        out: Tensor = theirs.combine(standard.StandardCombineInput(y))
        return out

    def linked(batch: Batch, computes: bool) -> Tensor:
        used = ours[len(batch.x)]
        received = used.dispatch(batch.x, routed(batch))
        y = received.hidden_states
        if computes:
            ends = received.psum_num_recv_tokens_per_expert
            ends = (ends + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT  # with the padding, in which rows hold anything
            y = products(y, inputs.own, ends.int()) * received.topk_weights[:, None].to(y.dtype)
        out: Tensor = used.combine(DeepEPv2CombineInput(y, None))
        return out

    def step(tokens: int) -> contextlib.AbstractContextManager[object]:
        dp_attention.set_dp_buffer_len(ranks * tokens, tokens, False, [tokens] * ranks)
        dp_attention.set_is_extend_in_batch(tokens > DECODE)
        return contextlib.nullcontext()

    def check() -> None:
        for used in ours.values():
            used.ep.check()

    contenders = [inputs.contender("SGLang StandardDispatcher", gathered), inputs.contender("moelink", linked, check)]
    return Layer(contenders, NOTE, opened.close, step, inputs.expected, captured=True)


def _close() -> None:
    """Close moelink's communicators. Collective."""
    from moelink.integrations.sglang import close as close_all

    close_all()
    dist.barrier()
