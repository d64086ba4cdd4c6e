"""MoE layers on GPUs: CUDA graphs of the whole layer, and that it never waits for the device. Run by hand: ``-m gpu``.

With one device everything runs on one rank; with more, on one rank and on a rank per device.
"""

from __future__ import annotations

import pytest
import torch

import moe_gpu_ranks
from moe_layers import Case
from moelink.testing import run_ranks

DEVICES = min(8, torch.cuda.device_count())
WORLDS = sorted({1, max(DEVICES, 1)})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", moe_gpu_ranks.CAPTURED, ids=lambda case: case.id)
def test_a_captured_layer_replays_with_other_tokens(case: Case, world: int) -> None:
    moe_gpu_ranks.judge_replays(run_ranks(moe_gpu_ranks.replay, world, case, timeout=300))


@pytest.mark.parametrize("world", WORLDS)
def test_a_layer_never_synchronises(world: int) -> None:
    """Forward and backward, with torch told to raise when the host waits for the device."""
    assert all(run_ranks(moe_gpu_ranks.without_synchronising, world, timeout=300))
