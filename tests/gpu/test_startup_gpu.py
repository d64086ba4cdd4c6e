"""How long the first call takes, and that later ones compile nothing. Run by hand: ``-m gpu``."""

import time
from typing import Any

import pytest
import torch

import moelink
from moelink.kernels.launch.row_launch import row_launcher
from moelink.nn import MoE
from moelink.testing import run_ranks
from tests.gpu import gpu_ranks
from tests.gpu.gpu_compile import warmup_kernels

WORLD = min(8, torch.cuda.device_count())
FIELDS = {
    "num_experts": 256, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": 512, "dispatch_format": "fp8_block128",
    "capacity": 512 * 8 * 2, "transport": "symmetric",
}  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD < 1, reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


def start_up(rank: int, world_size: int) -> dict[str, float]:
    """Seconds of ``warmup()`` and of the first pair, and kernels known after warmup and after calls of many sizes."""
    device = gpu_ranks.prepare(rank)
    with moelink.init(**FIELDS, device=device) as ep:
        compiled = ep._session.transport.ranks[0].launcher._loaded
        start = time.monotonic()
        ep.warmup()
        warm = time.monotonic()
        known = len(compiled)

        def pair(tokens: int, *, weighted: bool, split: bool) -> None:
            x, ids, weights = gpu_ranks.inputs(rank, seed=tokens, tokens=tokens, hidden=7168, experts=256, topk=8)
            given = weights if weighted else None
            recv = ep.dispatch_async(x, ids, given).wait() if split else ep.dispatch(x, ids, given)
            y = torch.zeros(len(recv.tokens), 7168, dtype=torch.bfloat16, device=device)
            _ = ep.combine_async(y, recv).wait() if split else ep.combine(y, recv)

        pair(512, weighted=True, split=False)
        torch.cuda.synchronize()
        first = time.monotonic()
        for tokens in (0, 1, 16, 17, 300, 512):
            for weighted in (True, False):
                for split in (True, False):
                    pair(max(0, tokens - rank), weighted=weighted, split=split)
        ep.check()
        return {"warmup": warm - start, "first": first - warm, "known": known, "later": len(compiled)}


def layer_starts(rank: int, world_size: int, training: bool) -> dict[str, Any]:
    """Kernels of one rank after a layer's warmup, and after its calls."""
    device = gpu_ranks.prepare(rank)
    options = {"dispatch_format": "bf16"} if training else {}
    with moelink.init(**{**FIELDS, "hidden_size": 2048, **options}, device=device) as ep:
        layer = MoE(ep, intermediate_size=256, experts_backend="dequantize" if training else "auto")
        transports = [ep._session.transport.ranks[0].launcher._loaded]
        made = layer.warmup(max_tokens=[4], training=training).kernels
        transports += [s.transport.ranks[0].launcher._loaded for s in ep._context.gradients._opened]
        known = [len(each) for each in (*transports, row_launcher()._prepared)]
        for tokens, bound in ((4, 4), (512, None), (100, None)):
            x = torch.randn(tokens, 2048, device=device).bfloat16().requires_grad_(training)
            with torch.set_grad_enabled(training):
                out = layer(x, max_tokens=bound)
            if training:
                out.backward(torch.ones_like(out))
        ep.check()
        later = [len(each) for each in (*transports, row_launcher()._prepared)]
        return {"made": len(made), "known": known, "later": later}


@pytest.mark.parametrize("training", [False, True])
def test_calls_of_a_layer_compile_nothing_after_its_warmup(training: bool) -> None:
    for rank, found in enumerate(run_ranks(layer_starts, max(1, WORLD), training, timeout=400)):
        assert found["later"] == found["known"], (rank, found)
        assert found["made"] > 4, (rank, found)


@pytest.mark.alone("takes the time")
@pytest.mark.kernels(of=lambda: warmup_kernels(FIELDS, WORLD))
def test_a_start_with_a_warm_cache_takes_less_than_ten_seconds():
    for rank, found in enumerate(run_ranks(start_up, max(1, WORLD), timeout=250)):
        assert found["warmup"] + found["first"] < 10, (rank, found)


@pytest.mark.kernels(of=lambda: warmup_kernels(FIELDS, WORLD))
def test_calls_of_any_size_compile_nothing_after_warmup():
    for rank, found in enumerate(run_ranks(start_up, max(1, WORLD), timeout=250)):
        assert found["later"] == found["known"] > 0, (rank, found)
