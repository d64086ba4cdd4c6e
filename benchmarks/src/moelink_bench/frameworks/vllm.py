"""vLLM's all-gather and reduce-scatter and moelink's prepare and finalize, in vLLM's modular kernel."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.integrations.settings import Settings, device_of
from moelink_bench.frameworks.dispatchers import Case, Dispatcher, Layer
from moelink_bench.frameworks.engines import Inputs, weighed_experts
from moelink_bench.layer.data import Weights
from moelink_bench.workload import Batch

EXTENSION = "vllm._C_stable_libtorch"
NOTE = "experts are a product by group of torch in both, as vLLM's own need its compiled extensions"
WITHOUT = (
    "; vLLM's compiled extensions are not there: its modules were imported as for a CPU, and its groups, communicator "
    "and kernel run as for CUDA"
)


def make_layer(case: Case, rank: int, ranks: int) -> Layer:
    """Return vLLM's layer over its own dispatcher and over moelink. Collective.

    Args:
        case: sizes.
        rank, ranks: of the default process group; every rank is a data-parallel one of vLLM.

    Raises:
        UnsupportedError: vLLM is not installed, or not a release that moelink supports.
    """
    inputs = Inputs(case, rank, ranks)
    note = NOTE + _choose_platform(case.device)

    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    parallel = ParallelConfig(enable_expert_parallel=True)
    config = VllmConfig()
    config.parallel_config = parallel
    parallel.data_parallel_size, parallel.data_parallel_rank = ranks, rank
    opened = contextlib.ExitStack()
    opened.enter_context(set_current_vllm_config(config))
    opened.callback(_close)
    if case.device == "cuda":
        _suit_older_nccl()
    backend = "nccl" if case.device == "cuda" else "gloo"
    init_distributed_environment(1, 0, backend=backend, local_rank=device_of(case.device).index or 0)
    initialize_model_parallel(backend=backend)
    if case.device == "cuda":
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(device_of(case.device))

    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    from moelink.integrations.vllm.prepare_finalize import make

    _, expert_map, *_ = determine_expert_map(ranks, rank, case.num_experts)
    expert_map = expert_map.to(case.device)

    def kernel(ours: bool, computes: bool) -> Any:
        experts = _experts(case, rank, ranks, computes)
        if ours:
            return mk.FusedMoEKernel(make(experts, Settings(timeout=120.0)), experts)
        theirs = maybe_make_prepare_finalize(experts.moe_config, experts.quant_config, allow_new_interface=True)
        return mk.FusedMoEKernel(theirs, experts)

    def contender(ours: bool) -> Dispatcher:
        kernels = {computes: kernel(ours, computes) for computes in (True, False)}

        def run(batch: Batch, computes: bool) -> Tensor:
            out: Tensor = kernels[computes].apply(
                hidden_states=batch.x, w1=inputs.own.gate_up, w2=inputs.own.down, topk_weights=batch.topk_weights,
                topk_ids=batch.topk_ids, activation=_activation(), global_num_experts=case.num_experts,
                expert_map=expert_map, apply_router_weight_on_input=False,
            )  # fmt: skip
            return out

        def check() -> None:
            for each in kernels.values():
                each.prepare_finalize.ep.check()

        name = "moelink" if ours else f"vLLM {type(kernels[True].prepare_finalize).__name__}"
        return inputs.contender(name, run, check if ours else lambda: None)

    contenders = [contender(False), contender(True)]
    return Layer(contenders, note, opened.close, lambda tokens: _step(tokens, ranks), inputs.expected, captured=True)


def _activation() -> Any:
    """Return vLLM's name of SiLU."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return MoEActivation.SILU


@contextlib.contextmanager
def _step(tokens: int, ranks: int) -> Iterator[None]:
    """A step of vLLM in which every data-parallel rank has ``tokens``."""
    from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context

    met = DPMetadata(torch.full((ranks,), tokens, dtype=torch.int32))
    context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={}, dp_metadata=met)
    with override_forward_context(context), met.sp_local_sizes(1):
        yield


def _choose_platform(device: str) -> str:
    """Choose vLLM's platform before anything reads it; return what to add to the note."""
    if device == "cuda" and find_spec(EXTENSION) is not None:
        return ""  # vLLM finds CUDA by itself
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform()
    vllm.platforms.current_platform = platform
    if device == "cpu":
        return ""
    import vllm.model_executor.layers.fused_moe.modular_kernel
    import vllm.v1.worker.workspace  # noqa: F401 - both while vLLM sees a CPU, for which it imports no extension

    sys.modules[EXTENSION] = types.ModuleType(EXTENSION)  # which the next line imports for its operators' names
    from vllm.platforms.cuda import CudaPlatform

    platform.__class__ = CudaPlatform  # of the one object that all modules have imported by name
    return WITHOUT


def _suit_older_nccl() -> None:
    """Let vLLM load an NCCL that has no sleeping communicators, which no call here needs."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import find_nccl_library

    library = ctypes.CDLL(find_nccl_library())
    NCCLLibrary.exported_functions = [
        known
        for known in NCCLLibrary.exported_functions
        if known.name not in ("ncclCommSuspend", "ncclCommResume") or hasattr(library, known.name)
    ]


def _experts(case: Case, rank: int, ranks: int, computes: bool) -> Any:
    """Return experts of vLLM's modular kernel over :func:`weighed_experts`, or ones that compute nothing."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        FusedMoEQuantConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class NoExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
        """Experts in the standard format that leave their output as they find it."""

        _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda: True)
        _supports_quant_scheme = _supports_activation = _supports_parallel_config = staticmethod(lambda *a: True)

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        def supports_expert_map(self) -> bool:
            return True

        def workspace_shapes(self, rows: int, n: int, k: int, *rest: Any) -> tuple[tuple[int, ...], ...]:
            return (0,), (0,), (rows, k)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(self, **named: Any) -> None:
            """Compute nothing."""

    class TorchExperts(NoExperts):
        """Experts that weigh and sum what torch's product by group makes."""

        def apply(self, **named: Any) -> None:
            ids = named["topk_ids"].long()
            ids = torch.where(ids >= 0, named["expert_map"][ids.clamp(min=0)], -1)
            weights = Weights(named["w1"], named["w2"])
            named["output"].copy_(weighed_experts(named["hidden_states"], weights, ids, named["topk_weights"]))

    parallel = FusedMoEParallelConfig(
        tp_size=1, tp_rank=0, pcp_size=1, pcp_rank=0, dp_size=ranks, dp_rank=rank, ep_size=ranks, ep_rank=rank,
        sp_size=1, use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    config = FusedMoEConfig(
        num_experts=case.num_experts, experts_per_token=case.topk, hidden_dim=case.hidden_size,
        intermediate_size=case.intermediate_size, num_local_experts=case.num_experts // ranks,
        num_logical_experts=case.num_experts, activation=_activation(), device=case.device,
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=torch.bfloat16,
        max_num_tokens=max(case.tokens),
    )  # fmt: skip
    return (TorchExperts if computes else NoExperts)(config, FusedMoEQuantConfig.make())


def _close() -> None:
    """Close moelink's communicators and vLLM's groups. Collective."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    from moelink.integrations.vllm import close as close_all

    close_all()
    dist.barrier()
    destroy_model_parallel()
