"""``zero_copy`` on GPUs, a process for each, as many as there are, up to 8. Run by hand: ``-m gpu``."""

import pytest
import torch

from moelink.testing import run_ranks
from tests.gpu.gpu_compile import FUSED, HALVES, kernels_of
from tests.transports import zero_copy_ranks

WORLD = min(8, torch.cuda.device_count())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD < 1, reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


def kernels(fmt, tokens):
    fields = zero_copy_ranks.gpu_fields(WORLD, fmt, tokens)
    return [*kernels_of(fields, WORLD), *kernels_of({**fields, "zero_copy": True}, WORLD, [*FUSED, *HALVES])]


@pytest.mark.kernels(of=kernels)
@pytest.mark.parametrize("tokens", [1, 64, 300, 2048], ids=lambda tokens: f"{tokens} tokens")
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128"])
def test_eager_calls_and_replays_equal_the_copying_form(fmt, tokens):
    assert run_ranks(zero_copy_ranks.on_gpu, WORLD, fmt, tokens, timeout=400) == [True] * WORLD


@pytest.mark.kernels(of=lambda tokens: kernels("bf16", tokens))
@pytest.mark.parametrize("tokens, last", [(64, "eager"), (2048, "replay")])
def test_debug_mode_overwrites_rows_that_have_ended(tokens, last):
    assert run_ranks(zero_copy_ranks.overwritten_on_gpu, WORLD, tokens, last, timeout=400) == [True] * WORLD
