"""Ranks that make every kind of call with ``zero_copy``, next to the same call of layout "rank" that copies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import moelink
from moelink.testing import assert_bitwise_equal, rank_data
from tests.support.fault_ranks import FIELDS, data

BY_ROW = ("tokens", "scales", "src_info", "topk_ids", "topk_weights")


def present(recv: moelink.DispatchOutput, field: Tensor) -> Tensor:
    """The rows of a field that hold a token, one source after the other."""
    return field[torch.arange(field.shape[1])[None, :] < recv.num_recv_per_rank[:, None]]


def same(got: moelink.DispatchOutput, want: moelink.DispatchOutput) -> None:
    """Compare an output whose rows stay where they arrived with one that was copied."""
    for name in ("num_recv_per_rank", "num_recv_per_expert", "num_recv_tokens", "overflow"):
        assert_bitwise_equal(getattr(got, name), getattr(want, name), name)
    rows = int(want.row_offsets[-1])
    for name in BY_ROW:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if b is not None:
            assert_bitwise_equal(present(got, a), b[:rows], name)
    assert int((got.topk_ids >= 0).any(2).sum()) == rows
    # Both indices name the same rows, in the same order.
    (pairs, offsets), (pairs_of_copy, offsets_of_copy) = got.rows_by_expert(), want.rows_by_expert()
    assert_bitwise_equal(offsets, offsets_of_copy, "offsets")
    total, topk = int(offsets[-1]), got.topk_ids.shape[-1]
    rows_in_place, rows_of_copy = pairs[:total] // topk, pairs_of_copy[:total] // topk
    assert_bitwise_equal(pairs[:total] % topk, pairs_of_copy[:total] % topk, "slots")
    size = got.tokens.shape[1]
    taken = got.tokens[rows_in_place // size, rows_in_place % size]
    assert_bitwise_equal(taken, want.tokens[rows_of_copy.long()], "by expert")


def doubled(recv: moelink.DispatchOutput) -> Tensor:
    """What the experts make of the rows. What they make of the others is NaN."""
    y = torch.full(recv.tokens.shape, torch.nan, dtype=torch.bfloat16)
    if y.dim() == 2:
        return y.copy_(recv.tokens * 2)
    used = torch.arange(y.shape[1])[None, :] < recv.num_recv_per_rank[:, None]
    y[used] = (recv.tokens[used] * 2).bfloat16()
    return y


def calls(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Dispatches and combines in every form. Returns the rows received."""
    fields = {**FIELDS, "layout": "rank", **options, "lanes": 2, "timeout": 60}
    limit: dict[str, Any] = {"num_sms": 1} if options["transport"] == "symmetric" else {}
    copying = {**fields, "transport": "collective"}
    with moelink.init(**copying) as plain, moelink.init(**fields, zero_copy=True) as ep:
        d, home = data(rank, seed=1, tokens=3 - rank % 2), data(rank + 5, tokens=3 - rank % 2).x
        given = d.x, d.topk_ids, d.topk_weights
        want = plain.dispatch(*given)
        first = ep.dispatch(*given)
        assert first.tokens.shape == (world_size, 3, 16)
        same(first, want)
        same(ep.dispatch(*given), want)  # of a known kind
        same(ep.dispatch_async(*given).wait(), want)
        same(ep.lane(1).dispatch(*given, **limit), want)
        small = ep.dispatch(d.x[:2], d.topk_ids[:2], d.topk_weights[:2], max_tokens=2)
        assert small.tokens.shape == (world_size, 2, 16)
        same(small, plain.dispatch(d.x[:2], d.topk_ids[:2], d.topk_weights[:2]))
        exact, list_of = ep.dispatch(*given, host_counts=True), plain.dispatch(*given, host_counts=True)
        assert exact.host_counts == list_of.host_counts
        same(exact, want)
        again = ep.dispatch(d.x * 3, None, d.topk_weights, routing=exact)
        same(again, plain.dispatch(d.x * 3, None, d.topk_weights, routing=want))
        nothing = ep.dispatch(d.x[:0], d.topk_ids[:0], d.topk_weights[:0])
        same(nothing, plain.dispatch(d.x[:0], d.topk_ids[:0], d.topk_weights[:0]))
        assert ep.combine(doubled(nothing), nothing).shape == (0, 16)
        recv = ep.dispatch(*given)
        y, z = doubled(recv), doubled(want)
        forms: list[dict[str, Any]] = [{}, {}, {"shared": home, "weigh": False}]
        for form in forms:
            assert_bitwise_equal(ep.combine(y, recv, **form, **limit), plain.combine(z, want, **form), str(form))
            limit = {}  # for the second one, which the quick lane learns from, and all others
        assert_bitwise_equal(ep.combine_async(y, recv).wait(), plain.combine(z, want), "combine_async")
        for name in ("tokens", "scales"):
            with pytest.raises(moelink.ExpiredRowsError, match=f"recv.{name}: expected rows to be read before"):
                getattr(recv, name)
        _bound(ep, given, want, plain)
        _two_lanes(ep, given, want)
        return int(want.row_offsets[-1])


def _bound(ep: moelink.Communicator, given: Any, want: moelink.DispatchOutput, plain: moelink.Communicator) -> None:
    """Rows of a bound dispatch live from each of its calls to the next call."""
    dispatch = ep.bind(*given)
    y, out = doubled(want), plain.combine(doubled(want), want)
    combine = None
    for _ in range(2):
        recv = dispatch()
        same(recv, want)
        y = doubled(recv)
        combine = combine or dispatch.combine(y)
        assert_bitwise_equal(combine(), out, "bound")
        with pytest.raises(moelink.ExpiredRowsError):
            recv.tokens  # noqa: B018 - to look at it is what is refused
    dispatch()
    ep.dispatch(*given)
    with pytest.raises(moelink.ExpiredRowsError, match="recv: expected the rows of the lane's latest dispatch"):
        combine()  # type: ignore[misc]
    dispatch()
    assert_bitwise_equal(combine(), out, "after a refusal")  # type: ignore[misc]


def _two_lanes(ep: moelink.Communicator, given: Any, want: moelink.DispatchOutput) -> None:
    """A second lane is the second buffer: its calls do not end the rows of the first."""
    one, two = ep.dispatch(*given), ep.lane(1).dispatch(*given)
    out = ep.lane(1).combine(doubled(two), two)
    same(one, want)
    assert_bitwise_equal(ep.combine(doubled(one), one), out, "lanes")


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


def spoiled_on_gpu(rank: int, world_size: int, tokens: int, last: str) -> bool:
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
