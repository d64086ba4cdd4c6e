"""What communicators take from a device and give back, a process per GPU. Run by hand: ``-m gpu``.

What is free on a device says so, and other processes take from it, too. So these tests run alone.
"""

import pytest
import torch

from moelink.testing import run_ranks
from tests.gpu import fault_ranks_gpu, gpu_ranks
from tests.gpu.fault_ranks_gpu import WITHOUT_FLAGS

WORLD = min(8, torch.cuda.device_count())
VICTIM = 1

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone("compares what is free on a device before and after"),
    pytest.mark.skipif(WORLD < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]


def test_memory_is_bounded():
    for taken, allowed in run_ranks(gpu_ranks.allocated, WORLD, timeout=200):
        assert 0 < taken <= allowed


@pytest.mark.kernels(of=lambda: fault_ranks_gpu.kernels(WORLD, WITHOUT_FLAGS))
def test_the_workspace_of_survivors_takes_the_place_of_the_old_one():
    how = ("killed", "combine", WITHOUT_FLAGS)
    results = run_ranks(fault_ranks_gpu.falls, WORLD, VICTIM, *how, mortal={VICTIM}, timeout=250)
    for rank, result in enumerate(results):
        if rank != VICTIM:
            # torch's allocator keeps some of what outputs needed.
            assert result["grown"] < result["block"] + 2**30
