"""What ranks of tests/test_bench_frameworks.py do: the benchmark of frameworks, on CPUs over gloo."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")


def measured(rank: int, world_size: int, framework: str) -> dict[str, Any]:
    """The fields of a result."""
    if framework == "megatron":
        import megatron_cpu  # noqa: F401 - for its effect, before anything of Megatron is imported
    else:
        torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes CUDA where it finds no accelerator
    from moelink.tools.bench.frameworks.__main__ import measure
    from moelink.tools.bench.frameworks.steps import Case

    dist.init_process_group("gloo")
    case = Case(tokens=24, hidden_size=64, intermediate_size=32, num_experts=8, topk=2, device="cpu", room=None)
    fields = measure(framework, case, samples=1, calls=1)
    dist.destroy_process_group()
    return fields
