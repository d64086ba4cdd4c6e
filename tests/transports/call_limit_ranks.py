"""Ranks whose calls have SM limits of their own, which differ from rank to rank."""

from __future__ import annotations

from typing import Any

import torch

import moelink
from moelink.testing import RankData, assert_bitwise_equal, rank_data

FIELDS: dict[str, Any] = {
    "num_experts": 5, "topk": 2, "hidden_size": 32, "max_tokens_per_rank": 3, "transport": "symmetric", "timeout": 60.0,
}  # fmt: skip
ROWS = ("tokens", "src_info", "weights")


def on_gpus(world_size: int, more: dict[str, Any]) -> dict[str, Any]:
    """Sizes that are worth a GPU."""
    return {**FIELDS, "num_experts": 8 * world_size, "hidden_size": 512, "max_tokens_per_rank": 600, **more}


def limits_on_gpu(rank: int) -> tuple[int, ...]:
    """Of the calls of a rank. Those of even and of odd ranks differ, which takes as many kernels for many ranks as for
    two."""
    return 8 + 8 * (rank % 2), 24 - 8 * (rank % 2), 1 + rank % 2


def same(recv: moelink.DispatchOutput, want: moelink.DispatchOutput) -> None:
    """Compare two outputs bit for bit, but for rows past the last."""
    rows = int(want.row_offsets[-1])
    assert_bitwise_equal(recv.row_offsets, want.row_offsets, "row_offsets")
    for name in ROWS:
        assert_bitwise_equal(
            getattr(recv, name)[:rows].view(torch.uint8), getattr(want, name)[:rows].view(torch.uint8), name
        )


def same_rows(rank: int, world_size: int, more: dict[str, Any]) -> bool:
    """Calls with limits, in every form, equal those without. On GPUs also in a graph."""
    fields = {**FIELDS, **more}
    device = torch.device(fields.pop("device", f"cuda:{rank}"))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    with moelink.init(**fields, device=device) as ep:
        config = ep.config
        limits = limits_on_gpu(rank) if on_gpu else (1 + rank, 2)
        ep.warmup(num_sms=limits)
        for tokens in {config.max_tokens_per_rank, 3}:
            d = rank_data(
                seed=tokens, rank=rank, num_tokens=tokens, hidden_size=config.hidden_size, topk=config.topk,
                num_experts=config.num_experts, holes=0.1,
            )  # fmt: skip
            check(ep, RankData(d.x.to(device), d.topk_ids.to(device), d.topk_weights.to(device)), limits, on_gpu)
    return True


def check(ep: moelink.Communicator, d: RankData, limits: tuple[int, ...], on_gpu: bool) -> None:
    """Compare calls of one batch."""
    want = ep.dispatch(d.x, d.topk_ids, d.topk_weights)
    y = torch.randn(len(want.tokens), ep.config.hidden_size, generator=torch.Generator().manual_seed(1))
    y = y.to(ep.device, ep.config.combine_dtype)
    out = ep.combine(y, want)
    for num_sms in limits:
        recv = ep.dispatch(d.x, d.topk_ids, d.topk_weights, num_sms=num_sms)
        same(recv, want)
        assert_bitwise_equal(ep.combine(y, recv, num_sms=num_sms), out, f"out with {num_sms}")
        recv = ep.dispatch_async(d.x, d.topk_ids, d.topk_weights, num_sms=num_sms).wait()
        same(recv, want)
        assert_bitwise_equal(ep.combine_async(y, recv, num_sms=num_sms).wait(), out, f"split out with {num_sms}")
        same(ep.dispatch(d.x, None, d.topk_weights, routing=want, num_sms=num_sms), want)
        bound = ep.bind(d.x, d.topk_ids, d.topk_weights, num_sms=num_sms)
        same(bound(), want)
        assert_bitwise_equal(bound.combine(y, num_sms=num_sms)(), out, f"bound out with {num_sms}")
        if on_gpu:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = ep.dispatch(d.x, d.topk_ids, d.topk_weights, num_sms=num_sms)
                total = ep.combine(y, captured, num_sms=num_sms)
            graph.replay()
            torch.cuda.synchronize()
            same(captured, want)
            assert_bitwise_equal(total, out, f"captured out with {num_sms}")
    ep.check()
