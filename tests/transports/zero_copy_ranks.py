"""Ranks on GPUs that call with ``zero_copy``, next to the same calls of layout "rank" that copy."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

import moelink
from moelink.testing import assert_bitwise_equal, rank_data


def gpu_fields(world_size: int, fmt: str, tokens: int) -> dict[str, Any]:
    """What the functions below run, without what makes rows stay."""
    sizes = {"num_experts": 8 * world_size, "topk": 4, "hidden_size": 512, "max_tokens_per_rank": tokens}
    return {**sizes, "dispatch_format": fmt, "layout": "rank", "transport": "symmetric", "timeout": 60.0}


def of_experts(recv: moelink.DispatchOutput) -> Tensor:
    """What experts make of the bits of rows, by kernels that read the rows where they are; NaN where there is none."""
    bits = recv.tokens.view(torch.uint8).to(torch.int32).sum(-1, keepdim=True)
    y = (bits % 97).bfloat16().expand(*recv.tokens.shape[:-1], 512)
    if recv.scales is not None:
        y = y * recv.scales.float().sum(-1, keepdim=True).bfloat16()
    return torch.where((recv.topk_ids >= 0).any(-1, keepdim=True), y, torch.nan).contiguous()


def on_gpu(rank: int, world_size: int, fmt: str, tokens: int) -> bool:
    """On GPUs: eager calls, and replays of a graph with other inputs, return what the copying form does."""
    torch.cuda.set_device(rank)
    device, fields = torch.device("cuda", rank), gpu_fields(world_size, fmt, tokens)
    more = {"num_experts": 8 * world_size, "topk": 4, "hidden_size": 512}
    copying = {**fields, "transport": "collective"}
    with moelink.init(**copying, device=device) as plain, moelink.init(**fields, zero_copy=True, device=device) as ep:

        def batch(seed: int) -> list[Tensor]:
            d = rank_data(seed=seed, rank=rank, num_tokens=tokens, holes=0.2, **more)
            return [each.to(device) for each in (d.x, d.topk_ids, d.topk_weights)]

        def wanted(given: list[Tensor]) -> tuple[moelink.DispatchOutput, Tensor]:
            recv = plain.dispatch(*given)
            return recv, plain.combine(of_experts(recv), recv)

        def called(given: list[Tensor]) -> tuple[moelink.DispatchOutput, Tensor, Tensor]:
            recv = ep.dispatch(*given)
            taken = recv.tokens.clone()
            return recv, taken, ep.combine(of_experts(recv), recv)

        def compare(recv: moelink.DispatchOutput, taken: Tensor, out: Tensor, given: list[Tensor], what: str) -> None:
            want, home = wanted(given)
            used, rows = (recv.topk_ids >= 0).any(2), int(want.row_offsets[-1])
            assert_bitwise_equal(taken.view(torch.uint8)[used], want.tokens[:rows].view(torch.uint8), f"{what} rows")
            assert_bitwise_equal(recv.topk_ids[used], want.topk_ids[:rows], f"{what} ids")
            assert_bitwise_equal(recv.topk_weights[used], want.topk_weights[:rows], f"{what} weights")
            assert_bitwise_equal(recv.num_recv_per_rank, want.num_recv_per_rank, f"{what} counts")
            assert_bitwise_equal(recv.rows_by_expert()[1], want.rows_by_expert()[1], f"{what} offsets")
            assert_bitwise_equal(out, home, f"{what} combine")

        for seed in range(3):  # learnt, then quick
            given = batch(seed)
            compare(*called(given), given, f"eager {seed}")
        held = batch(9)
        pending = ep.dispatch_async(*held)
        recv = pending.wait()
        taken = recv.tokens.clone()
        compare(recv, taken, ep.combine_async(of_experts(recv), recv).wait(), held, "split")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = called(held)
        for step in range(8):
            fresh = batch(20 + step)
            for mine, new in zip(held, fresh, strict=True):
                mine.copy_(new)
            if step % 3 == 1:
                held[1][tokens // 2 :] = -1  # fewer tokens
            graph.replay()
            torch.cuda.synchronize()
            compare(*got, [each.clone() for each in held], f"replay {step}")
        ep.check()
    return True


def overwritten_on_gpu(rank: int, world_size: int, tokens: int, last: str) -> bool:
    """On GPUs, in debug mode: rows are as they came until the next call and NaN after it, in replays, too.

    ``last``: whether the last call is eager or a replay. Only then no peer may already have sent the next rows.
    """
    os.environ["MOELINK_DEBUG"] = "1"
    torch.cuda.set_device(rank)
    device, fields = torch.device("cuda", rank), gpu_fields(world_size, "bf16", tokens)
    d = rank_data(seed=1, rank=rank, num_tokens=tokens, num_experts=8 * world_size, topk=4, hidden_size=512)
    given = [each.to(device) for each in (d.x, d.topk_ids, d.topk_weights)]
    with moelink.init(**fields, zero_copy=True, device=device) as ep:

        def call() -> tuple[Tensor, Tensor, Tensor]:
            recv = ep.dispatch(*given)
            view, taken = recv.tokens, recv.tokens.clone()
            ep.combine(of_experts(recv), recv)
            return taken, (recv.topk_ids >= 0).any(2), view

        want, used, view = call()
        want = want[used]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            taken, _, view = call()
        for step in range(12):
            rows = taken
            if (step % 3 == 0) if step < 11 else last == "eager":
                rows = call()[0]
            else:
                graph.replay()
            torch.cuda.synchronize()
            assert_bitwise_equal(rows[used], want, f"rows of step {step}")
        assert bool(view.isnan().all())
        ep.check()
    return True
