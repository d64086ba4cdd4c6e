"""What each rank does in the GPU tests of MoE layers. Ranks are processes, one per device.

``kind="cpu"`` runs the same code without graphs (a "replay" is then an eager call), so that it is tried without a
GPU.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.nn import Experts, MoE
from tests.gpu import gpu_ranks
from tests.nn import moe_layers
from tests.nn.moe_layers import Case, dense, rounded

WORLDS = sorted({1, max(1, min(8, torch.cuda.device_count()))})
"""Numbers of ranks: with one device everything runs on one rank; with more, on one rank and on a rank per device."""
MOST, STEPS = 64, 9
HIDDEN, INNER = 512, 256

CAPTURED = [
    Case(
        fmt, torch.bfloat16, shared, router, experts=18, topk=4, inner=INNER, width=HIDDEN,
        options=(("max_tokens_per_rank", MOST),),
    )
    for fmt, shared, router in (
        ("bf16", "overlapped", "deepseek"), ("bf16", "fused", "softmax"), ("bf16", "", "softmax"),
        ("fp8_block128", "overlapped", "softmax"), ("nvfp4", "fused", "deepseek"),
    )
]  # fmt: skip


def train(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """:func:`moe_layers.train` on this rank's device."""
    gpu_ranks.prepare(rank)
    return moe_layers.train(rank, world_size, cases)


def full_state(layer: MoE, case: Case) -> dict[str, torch.Tensor]:
    """The full state_dict of ``layer``, in fp64 on its device, without communication: weights follow the seed."""
    config = moelink.EPConfig(**{**case.fields, "capacity": None})
    everyone = Experts(config, intermediate_size=case.inner, seed=layer.experts.seed, dtype=case.combine_dtype)
    state = layer.state_dict() | {f"experts.{name}": value for name, value in everyone.state_dict().items()}
    return {name: value.to(layer.ep.device, torch.float64) for name, value in state.items()}


def replay(rank: int, world_size: int, case: Case, kind: str = "cuda") -> dict[str, Any]:
    """Capture a layer once, with a capacity; replay it with other tokens and counts, other ones on each rank.

    Rows past the count are NaN. Every replay is compared with an eager call of the same layer and with the layer in one
    process, in fp64.
    """
    device = gpu_ranks.prepare(rank, kind)
    # Every rank's tokens could go to one rank at worst; a capacity of twice the mean holds for this routing (checked).
    capacity = 2 * MOST * case.topk + (MOST if case.shared == "fused" else 0) + 4 * case.experts
    surplus = torch.zeros((), dtype=torch.int64, device=device)
    differs, worst, largest, expected = 0.0, 0.0, 0.0, 0
    with moelink.init(**case.fields, capacity=capacity, device=device, timeout=100.0) as ep, torch.no_grad():
        layer = case.make(ep)
        state = full_state(layer, case)
        x = torch.zeros(MOST, case.hidden, dtype=torch.bfloat16, device=device)
        count = torch.zeros((), dtype=torch.int32, device=device)
        for _ in range(3):
            out = layer(x, num_tokens=count)
        if kind == "cuda":
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(x, num_tokens=count)
        layer.load.reset()
        for step in range(STEPS):
            tokens = (MOST, 0, 1)[step] if step < 3 else (step * 11 + rank * 23) % (MOST + 1)
            generator = torch.Generator().manual_seed(100 * step + rank)
            fresh = torch.randn(MOST, case.hidden, generator=generator).bfloat16().to(device)
            fresh[tokens:] = float("nan")
            x.copy_(fresh)
            count.fill_(tokens)
            if kind == "cuda":
                graph.replay()
            else:
                out = layer(x, num_tokens=count)
            got = out.clone()
            eager = layer(fresh, num_tokens=count)
            expected += 2 * tokens * case.topk
            surplus += (got[tokens:] != 0).sum()
            differs = max(differs, float((got.float() - eager.float()).abs().max()))
            real = fresh[:tokens]
            want = dense(case, real.double(), state, rounded=rounded(case, real))
            if tokens:
                worst = max(worst, float((got[:tokens].double() - want).abs().max()))
                largest = max(largest, float(want.abs().max()))
        ep.check()
        counted = sum(layer.stats().tokens_per_expert)
    return {
        "steps": STEPS, "surplus": int(surplus), "eager": differs, "error": worst,
        "rounding": torch.finfo(torch.bfloat16).eps / 2 * largest, "counted": counted, "expected": expected,
    }  # fmt: skip


def judge_replays(results: list[dict[str, Any]]) -> None:
    """What holds of every rank's :func:`replay`."""
    for rank, done in enumerate(results):
        assert done["steps"] == STEPS
        assert done["surplus"] == 0, f"rank {rank}: rows past the count are not zero"
        # cuBLAS may choose another algorithm while it is captured, so the same bits are not promised.
        assert done["eager"] <= 4 * done["rounding"], f"rank {rank}: a replay and a call differ by {done['eager']}"
        assert done["error"] <= 16 * done["rounding"], f"rank {rank}: off by {done['error']}"
        assert done["counted"] == done["expected"], f"rank {rank}: replays are counted as calls are"


def without_synchronising(rank: int, world_size: int) -> bool:
    """Forward and backward of a layer while torch raises at whatever makes the host wait."""
    device = gpu_ranks.prepare(rank)
    case = CAPTURED[0]
    with moelink.init(**case.fields, device=device, timeout=100.0) as ep:
        layer = case.make(ep)
        x = torch.randn(MOST, case.hidden, device=device).bfloat16().requires_grad_()
        for _ in range(2):
            layer(x).sum().backward()
        with torch.no_grad():
            layer(x)
        torch.cuda.synchronize()
        dist.barrier()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x).sum().backward()
            with torch.no_grad():
                layer(x)
            layer.load.next_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ep.check()
    return True
