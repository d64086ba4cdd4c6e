"""Functions for ranks of tests/bench/test_bench_frameworks.py: the benchmark of frameworks, on CPUs over gloo."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.vllm.vllm_ranks import gather_rows, scatter_sums

warnings.simplefilter("ignore")


SIZES = (1, 24)
"""Tokens of a rank."""


def compared(rank: int, world_size: int, case: Any) -> dict[str, float]:
    """The differences of a contender that is right, and of one that makes half as much again."""
    from moelink_bench.frameworks.dispatchers import Layer, compare
    from moelink_bench.frameworks.engines import Inputs

    dist.init_process_group("gloo")
    inputs = Inputs(case, rank, world_size)

    def times(by: float) -> Any:
        return lambda batch, computes: by * inputs.expected(len(batch.x))["out"]

    contenders = [inputs.contender(name, times(by)) for name, by in (("right", 1.0), ("off", 1.5))]
    found = compare(Layer(contenders, "", lambda: None, expected=inputs.expected), case)
    dist.destroy_process_group()
    return found


def measured_engine(rank: int, world_size: int, framework: str) -> dict[str, Any]:
    """The fields of an engine's result."""
    if framework == "vllm":
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms.current_platform = CpuPlatform()
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather_rows, scatter_sums
    else:
        from sglang.srt.distributed.parallel_state import GroupCoordinator
        from sglang.srt.layers.moe.token_dispatcher import standard

        standard.get_device = lambda: "cpu"
        GroupCoordinator.all_gatherv = lambda self, given, sizes: gather_rows(self, given, 0, sizes)
        GroupCoordinator.reduce_scatterv = lambda self, given, output, sizes: output.copy_(
            scatter_sums(self, given, 0, sizes)
        )
    from moelink_bench.frameworks.__main__ import measure
    from moelink_bench.frameworks.dispatchers import Amount, Case
    from moelink_bench.timing import Turns, WallClock

    dist.init_process_group("gloo")
    case = Case(tokens=SIZES, hidden_size=128, intermediate_size=32, num_experts=8, topk=2, device="cpu")
    fields = measure(framework, case, WallClock(), Amount(1, Turns(turns=3)))
    dist.destroy_process_group()
    return fields


def measured(rank: int, world_size: int, framework: str) -> dict[str, Any]:
    """The fields of a result."""
    if framework == "megatron":
        from tests.integrations.megatron import megatron_cpu

        del megatron_cpu.moe_utils.te_general_gemm  # the benchmark provides it by itself, as on a GPU
    else:
        torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes CUDA where it finds no accelerator
    from moelink_bench.frameworks.__main__ import measure
    from moelink_bench.frameworks.dispatchers import Amount, Case
    from moelink_bench.timing import Turns, WallClock

    dist.init_process_group("gloo")
    case = Case(tokens=(24,), hidden_size=64, intermediate_size=32, num_experts=8, topk=2, device="cpu", room=None)
    fields = measure(framework, case, WallClock(), Amount(1, Turns(turns=1, dropped=1)))
    dist.destroy_process_group()
    return fields
