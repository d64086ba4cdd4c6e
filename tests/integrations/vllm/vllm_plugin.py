"""A plugin of pytest for vLLM's own tests of DeepEP v2, on two GPUs: moelink takes the place of DeepEP.

``make upstream-vllm`` runs them with it. The ranks of a test are processes of their own, which import this module, too.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

of_servers = ModuleType("tests.utils")  # vLLM's wants what its servers need; of it, these tests use one decorator
of_servers.multi_gpu_test = lambda *, num_gpus: pytest.mark.skipif(
    torch.cuda.device_count() < num_gpus, reason=f"needs {num_gpus} GPUs"
)
sys.modules["tests.utils"] = of_servers

import vllm.utils.import_utils as packages

from moelink.integrations.settings import Settings
from moelink.integrations.vllm import close
from moelink.integrations.vllm.prepare_finalize import MoelinkPrepareAndFinalize
from tests.kernels.moe import parallel_utils
from tests.kernels.moe import utils as _  # noqa: F401 - all of vLLM that they use is imported without DeepEP

launch = parallel_utils.parallel_launch


class WithSizesOfTheTest(MoelinkPrepareAndFinalize):
    """Takes the sizes from what the test tells DeepEP, as its layers' configurations are dummies."""

    def __init__(self, group: Any, sizes: parallel_utils.DeepEPV2Args) -> None:
        super().__init__(group, Settings())
        self.sizes = sizes

    def post_init_setup(self, fused_experts: Any) -> None:
        dummy = fused_experts.moe_config
        fused_experts.moe_config = dataclasses.replace(
            dummy,
            num_experts=self.sizes.num_experts,
            num_logical_experts=self.sizes.num_experts,
            num_local_experts=self.sizes.num_local_experts,
            max_num_tokens=self.sizes.max_tokens_per_rank,
        )
        super().post_init_setup(fused_experts)
        fused_experts.moe_config = dummy


def make(pg: Any, pgi: Any, dp_size: int, v2_args: Any, use_cudagraph: bool = False) -> MoelinkPrepareAndFinalize:
    """Return moelink's dispatcher, where the test asks for DeepEP's. ``use_cudagraph``: moelink's always allows one."""
    return WithSizesOfTheTest(pg, v2_args)


def on_a_rank(worker: Callable[..., None], *args: Any) -> None:
    worker(*args)
    close()


def launch_over_moelink(world_size: int, worker: Callable[..., None], *args: Any) -> None:
    """Start the ranks of a test. A rank unpickles ``on_a_rank`` first, and with it imports this module."""
    launch(world_size, functools.partial(on_a_rank, worker), *args)


parallel_utils.make_deepep_v2_a2a, parallel_utils.parallel_launch = make, launch_over_moelink
without = packages.has_deep_ep_v2
packages.has_deep_ep_v2 = lambda: True
import tests.kernels.moe.test_deepep_v2_moe  # noqa: F401 - imports the two names, and its tests are not skipped

packages.has_deep_ep_v2 = without


@pytest.fixture
def workspace_init() -> None:
    """vLLM's memory for intermediate results; ranks make their own."""
