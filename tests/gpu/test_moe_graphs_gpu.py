"""MoE layers on GPUs: CUDA graphs of the whole layer, without waits for the device. Run by hand: ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from moelink.testing import run_ranks
from tests.gpu import moe_gpu_ranks
from tests.gpu.moe_gpu_ranks import WORLDS
from tests.nn.moe_layers import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
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
