"""On a GPU: a launch with an SM limit runs on as many SMs, and does everything once."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from moelink.kernels.launch.grid import grid, sm_count
from moelink.memory.protocol import SM_LIMIT_WORDS
from tests.kernels.turn_kernels import Budget, note

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("budget, programs", [(1, 3), (8, 23), (24, 71), (24, 24), (64, 192), (131, 393)])
def test_a_launch_keeps_to_its_sms(budget, programs):
    device = torch.device("cuda", 0)
    words = torch.zeros(SM_LIMIT_WORDS, dtype=torch.int32, device=device)
    places = torch.full((programs,), -1, dtype=torch.int32, device=device)
    times = torch.zeros(programs, dtype=torch.int32, device=device)
    count = grid(programs, budget, resident=3, available=sm_count(device))
    spec = Budget(tl.constexpr(budget), tl.constexpr("ptx"))
    for launch in range(1, 50):
        note[(count,)](words, times, places, programs, S=spec, num_warps=8)
        assert times.tolist() == [launch] * programs
        assert len(set(places.tolist())) <= budget
        assert words.count_nonzero().item() == 0
