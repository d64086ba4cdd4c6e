"""One rank of vLLM's modular kernel on the CPU: its groups, its configuration, its own dispatcher or moelink's.

The CUDA wheel of vLLM knows no CPU platform, so :func:`start` chooses it by hand. The experts are torch code; all else,
the kernel, the factory, the plugin, the process groups and the forward context, is vLLM's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from moelink.integrations.vllm.settings import LOCAL_IDS

EXPERTS, TOPK, HIDDEN, WIDTH, TOKENS = 8, 2, 128, 48, 24
DTYPES = {"bf16": torch.bfloat16, "fp8_block128": torch.bfloat16, "fp8_token": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """What a test varies.

    Attributes:
        rows: the format in which the experts want their input: bf16, fp32, fp8_block128 or fp8_token.
        experts: physical experts.
        topk: experts for each token.
        on_input: router weights are applied to the input.
        backend: ``--all2all-backend``.
        local_ids: experts take ids of this rank's experts alone, as vLLM's for CPUs do.
    """

    rows: str = "bf16"
    experts: int = EXPERTS
    topk: int = TOPK
    on_input: bool = False
    backend: str = "allgather_reducescatter"
    local_ids: bool = False


@dataclass(frozen=True)
class Answer:
    """One rank's: by moelink, by vLLM's own dispatcher, by torch on this rank alone; and the rows of the last call."""

    ours: Tensor
    theirs: Tensor | None
    truth: Tensor
    rows: int
    facts: dict[str, Any]


def weights(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    up = torch.randn(case.experts, 2 * WIDTH, HIDDEN, generator=generator) / 8
    down = torch.randn(case.experts, HIDDEN, WIDTH, generator=generator) / 8
    return up.to(DTYPES[case.rows]), down.to(DTYPES[case.rows])


def batch(case: Case, rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, router weights and ids of a rank; a few ids are -1, as vLLM's padding has."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(DTYPES[case.rows])
    scores = torch.randn(tokens, case.experts, generator=generator).softmax(-1)
    chosen, ids = scores.topk(case.topk)
    ids[::7, 0] = -1
    return x, chosen, ids


def compute(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, ids: Tensor, first: int, *, weigh: bool) -> Tensor:
    """Experts ``first`` and on of these rows: weighed, and summed over slots in fp32."""
    total = torch.zeros(len(x), HIDDEN)
    for local in range(len(up)):
        row, slot = (ids == first + local).nonzero(as_tuple=True)
        gate, value = (x[row] @ up[local].T).chunk(2, -1)
        made = ((silu(gate) * value) @ down[local].T).float()
        total.index_add_(0, row, made * chosen[row, slot, None] if weigh else made)
    return total


def gather_rows(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """vLLM's all_gatherv, which its CPU communicator lacks: rows of all ranks, ``sizes`` of each."""
    if isinstance(given, list):
        return [gather_rows(self, tensor, dim, sizes) for tensor in given]
    padded = given.new_zeros(max(sizes), *given.shape[1:])
    padded[: len(given)] = given
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def scatter_sums(self: Any, given: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """vLLM's reduce_scatterv, likewise: this rank's rows of the sum over all ranks."""
    total = given.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()


def start(rank: int, world_size: int) -> Any:
    """Make this process a data-parallel rank of vLLM on the CPU. Returns vLLM's configuration."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather_rows, scatter_sums
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    parallel = ParallelConfig(enable_expert_parallel=True)
    config = VllmConfig()
    config.parallel_config = parallel
    parallel.data_parallel_size, parallel.data_parallel_rank = world_size, rank
    torch.distributed.init_process_group("gloo")
    with set_current_vllm_config(config):
        init_distributed_environment(world_size, rank, backend="gloo", local_rank=rank)
        initialize_model_parallel(backend="gloo")
    return config


def experts_of(case: Case, rank: int, world_size: int) -> Any:
    """vLLM's experts class over :func:`compute`, with the configuration of a layer."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        FusedMoEQuantConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class TorchExperts(mk.FusedMoEExpertsModular):
        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda: True)
        _supports_quant_scheme = _supports_activation = _supports_parallel_config = staticmethod(lambda *a: True)

        def supports_expert_map(self) -> bool:
            return True

        def workspace_shapes(self, rows, n, k, topk, every, local, meta, activation):
            return (0,), (0,), (rows, k)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **named) -> None:
            scale = named["a1q_scale"]
            if scale is not None:  # dequantise, as a kernel does inside
                rows = hidden_states.float().view(len(hidden_states), scale.shape[1], -1)
                hidden_states = (rows * scale[..., None]).view(len(hidden_states), -1).to(w1.dtype)
            if not named["apply_router_weight_on_input"]:
                weigh = True
            else:
                weigh = False
            if case.local_ids:
                assert ((topk_ids >= 0) & (topk_ids < len(w1))).all(), "an index of a kernel without checks"
                ids, first = topk_ids, 0
            else:
                ids = torch.where(named["expert_map"][topk_ids.clamp(min=0).long()] >= 0, topk_ids, -1)
                first = int((named["expert_map"] == 0).nonzero())
            output.copy_(compute(hidden_states, w1, w2, topk_weights, ids, first, weigh=weigh))

    if case.local_ids:
        TorchExperts.__module__ = LOCAL_IDS
    parallel = FusedMoEParallelConfig(
        tp_size=1, tp_rank=0, pcp_size=1, pcp_rank=0, dp_size=world_size, dp_rank=rank, ep_size=world_size,
        ep_rank=rank, sp_size=1, use_ep=world_size > 1, all2all_backend=case.backend, enable_eplb=False,
    )  # fmt: skip
    config = FusedMoEConfig(
        num_experts=case.experts, experts_per_token=case.topk, hidden_dim=HIDDEN, intermediate_size=WIDTH,
        num_local_experts=case.experts // world_size + (rank < case.experts % world_size),
        num_logical_experts=case.experts, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=DTYPES[case.rows],
        max_num_tokens=TOKENS,
    )  # fmt: skip
    quantised = {"quant_dtype": torch.float8_e4m3fn}
    quant = {
        "fp8_block128": {**quantised, "block_shape": [128, 128]},
        "fp8_token": {**quantised, "per_act_token_quant": True},
    }.get(case.rows, {})
    return TorchExperts(config, FusedMoEQuantConfig.make(**quant))


def kernel_of(case: Case, rank: int, world_size: int) -> Any:
    """The kernel, as vLLM's oracles make it: factory, experts, kernel."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize

    experts = experts_of(case, rank, world_size)
    made = maybe_make_prepare_finalize(experts.moe_config, experts.quant_config, allow_new_interface=True)
    return mk.FusedMoEKernel(made, experts)


def expert_map(case: Case, rank: int, world_size: int) -> tuple[Tensor, slice]:
    """vLLM's map of global to local experts, and this rank's part of the weights."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    local, here, *_ = determine_expert_map(world_size, rank, case.experts)
    first = int((here == 0).nonzero())
    return here, slice(first, first + local)


def run(kernel: Any, case: Case, rank: int, world_size: int, sizes: list[int]) -> Tensor:
    """One step of the layer; ``sizes``: the tokens of each rank."""
    from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    up, down = weights(case)
    here, own = expert_map(case, rank, world_size)
    x, chosen, ids = batch(case, rank, sizes[rank])
    met = DPMetadata(torch.tensor(sizes, dtype=torch.int32))
    context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={}, dp_metadata=met)
    with override_forward_context(context), met.sp_local_sizes(1):
        return kernel.apply(
            hidden_states=x, w1=up[own], w2=down[own], topk_weights=chosen, topk_ids=ids, activation=MoEActivation.SILU,
            global_num_experts=case.experts, expert_map=here, apply_router_weight_on_input=case.on_input,
        )  # fmt: skip


def theirs_of(case: Case, rank: int, world_size: int, sizes: list[int]) -> Tensor | None:
    """The layer through vLLM's dispatcher; None where that one needs a GPU, to quantise or to weigh, or global ids."""
    if case.rows not in ("bf16", "fp32") or case.on_input or case.local_ids:
        return None
    kernel = kernel_of(case, rank, world_size)
    assert type(kernel.prepare_finalize).__name__ == "MoEPrepareAndFinalizeNaiveDPEPModular"
    return run(kernel, case, rank, world_size, sizes)


def answer(case: Case, rank: int, world_size: int, sizes: list[int], theirs: Tensor | None) -> Answer:
    """The layer with the plugin on, and on this rank alone."""
    kernel, beside = kernel_of(case, rank, world_size), kernel_of(case, rank, world_size)
    made = kernel.prepare_finalize
    facts = {
        "class": type(made).__name__, "shared": made.ep is beside.prepare_finalize.ep,
        "format": made.ep.config.dispatch_format, "dispatchers": made.num_dispatchers(),
        "reduced": kernel.output_is_reduced(), "overlap": overlaps(made),
    }  # fmt: skip
    seen: list[int | None] = []
    bound = made._bound
    for each in (made, beside.prepare_finalize):
        each._bound = lambda own, each=each: seen.append(type(each)._bound(each, own)) or seen[-1]
    ours = run(kernel, case, rank, world_size, sizes)
    again = run(
        beside, case, rank, world_size, [min(size, 3) for size in sizes]
    )  # decode, through the same communicator
    assert len(again) == min(sizes[rank], 3)
    assert bound(1) is None, "outside of a step nobody knows"
    made.ep.check()
    up, down = weights(case)
    x, chosen, ids = batch(case, rank, sizes[rank])
    if case.on_input:
        x = x * chosen.to(x.dtype)
    if case.rows.startswith("fp8"):  # what the experts see
        quantised = made.ep.config.format.quantize(x)
        x = made.ep.config.format.dequantize(quantised.payload, quantised.scales).to(x.dtype)
    truth = compute(x, up, down, chosen, ids, 0, weigh=not case.on_input)
    return Answer(ours, theirs, truth, made.ep.config.output_rows(max_tokens=seen[-1]), facts | {"bounds": seen})


def overlaps(made: Any) -> list[bool]:
    """Whether vLLM's kernel runs shared experts between the two halves of finalize: without microbatches, with two."""
    return [type(made)(made.group, made.settings, count).supports_async() for count in (made.microbatches, 2)]


def overlapped(rank: int, world_size: int, case: Case, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Two microbatches in flight at a time, by vLLM's numbers of microbatches. Returns results and truths."""
    import threading

    from vllm.distributed import get_ep_group
    from vllm.v1.worker import ubatching

    from moelink.integrations.settings import Settings
    from moelink.integrations.vllm.prepare_finalize import MoelinkPrepareAndFinalize

    experts = experts_of(case, rank, world_size)
    made = MoelinkPrepareAndFinalize(get_ep_group().device_group, Settings(), microbatches=2)
    made.post_init_setup(experts)
    up, down = weights(case)
    here, own = expert_map(case, rank, world_size)
    batches = [batch(case, rank + 10 * number, sizes[rank] - number) for number in range(2)]
    outputs = [torch.full_like(x, torch.nan) for x, _, _ in batches]

    def numbered(number: int, call: Any, *arguments: Any) -> Any:
        ubatching._THREAD_ID_TO_CONTEXT[threading.get_ident()] = number
        try:
            return call(*arguments)
        finally:
            ubatching._THREAD_ID_TO_CONTEXT.clear()

    started = [
        numbered(number, made.prepare_async, x, chosen, ids, case.experts, here, False, experts.quant_config)
        for number, (x, chosen, ids) in enumerate(batches)
    ]
    ending = []
    for number, (hook, receive) in enumerate(started):
        hook()
        rows, _, _, ids, chosen = numbered(number, receive)
        y = compute(rows, up[own], down[own], chosen, ids, own.start, weigh=True).to(rows.dtype)
        reduce = experts.finalize_weight_and_reduce_impl()
        ending.append(numbered(number, made.finalize_async, outputs[number], y, chosen, ids, False, reduce))
    for _, receive in reversed(ending):
        receive()
    truths = [compute(x, up, down, chosen, ids, 0, weigh=True) for x, chosen, ids in batches]
    return list(zip(outputs, truths, strict=True))


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What a layer says on ranks that were given different settings, and of what moelink does not support."""
    from vllm.distributed import get_ep_group

    from moelink.errors import MoelinkError
    from moelink.integrations.settings import Settings
    from moelink.integrations.vllm import prepare_finalize

    group, lora, half = get_ep_group().device_group, experts_of(Case(), rank, world_size), Case(topk=2, on_input=True)
    lora.moe_config.is_lora_enabled = True
    differs = prepare_finalize.MoelinkPrepareAndFinalize(group, Settings(timeout=30.0 + rank))
    calls = {
        "settings": lambda: differs.post_init_setup(experts_of(Case(), rank, world_size)),
        "backend": lambda: kernel_of(Case(backend="passthrough"), rank, world_size),
        "lora": lambda: prepare_finalize.make(lora, Settings()),
        "weights on input": lambda: run(kernel_of(half, rank, world_size), half, rank, world_size, [4] * world_size),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except MoelinkError as error:
            said[name] = str(error)
    return said


@dataclass(frozen=True)
class Everything:
    """One rank's answers to all cases, what it said of what it refused, and what vLLM's log shows of the plugin."""

    answers: list[Answer]
    overlapped: list[tuple[Tensor, Tensor]]
    refused: dict[str, str]
    said: list[str]


def everything(rank: int, world_size: int, cases: list[Case], sizes: list[int]) -> Everything:
    """All of the above in one process, as importing vLLM takes long."""
    from vllm.config import set_current_vllm_config
    from vllm.logger import configure_logging

    from moelink.integrations.vllm import close, register

    config = start(rank, world_size)
    configure_logging(config.logging_config)  # as an engine does when it starts
    shown: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: shown.append(record.getMessage())
    logging.getLogger("vllm").addHandler(listener)
    with set_current_vllm_config(config):
        theirs = [theirs_of(case, rank, world_size, sizes) for case in cases]
        assert not register({}), "nobody asked"
        assert type(kernel_of(cases[0], rank, world_size).prepare_finalize).__name__.startswith("MoEPrepare")
        assert register({"MOELINK_VLLM": "timeout=60"})
        assert register({"MOELINK_VLLM": "1"}), "a second time, as vLLM may do"
        answers = [answer(case, rank, world_size, sizes, made) for case, made in zip(cases, theirs, strict=True)]
        both = overlapped(rank, world_size, cases[0], sizes)
        refused = refusals(rank, world_size)
        close()
    torch.distributed.destroy_process_group()
    return Everything(answers, both, refused, [line for line in shown if "moelink" in line])
