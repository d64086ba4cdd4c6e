"""Ranks with calls in flight in two lanes: results, faults, recovery, and a graph on GPUs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import moelink
import moelink.ops
from moelink.testing import RankData, assert_bitwise_equal, rank_data
from tests.support.fault_ranks import EXPIRY, FIELDS, WIRES, check_round_trip, data, die
from tests.support.patience import HANG, ROOMY, hurry, join, meet

COMPARED = ("row_offsets", "num_recv_tokens", "overflow")
ROWS = ("tokens", "src_info", "weights")


def in_turn(ep: moelink.Communicator, d: Any) -> tuple[moelink.DispatchOutput, Tensor]:
    """One batch, with nothing beside it."""
    recv = ep.dispatch(d.x, d.topk_ids, d.topk_weights)
    return recv, ep.combine(recv.tokens * 2, recv)


def overlapped(
    lanes: list[moelink.Communicator], batches: list[Any], order: list[int]
) -> list[tuple[moelink.DispatchOutput, Tensor]]:
    """Batch i in lane i; all are in flight together, and waited for in ``order``."""
    sent = [lane.dispatch_async(d.x, d.topk_ids, d.topk_weights) for lane, d in zip(lanes, batches, strict=True)]
    received = {i: sent[i].wait() for i in order}
    recvs = [received[i] for i in range(len(lanes))]
    back = [lane.combine_async(recv.tokens * 2, recv) for lane, recv in zip(lanes, recvs, strict=True)]
    sums = {i: back[i].wait() for i in order}
    return [(recv, sums[i]) for i, recv in enumerate(recvs)]


def placed(d: RankData, device: torch.device) -> RankData:
    """``d`` on ``device``."""
    return RankData(x=d.x.to(device), topk_ids=d.topk_ids.to(device), topk_weights=d.topk_weights.to(device))


def same(got: tuple[moelink.DispatchOutput, Tensor], want: tuple[moelink.DispatchOutput, Tensor]) -> None:
    """Compare one batch bit for bit, but for rows past the last."""
    rows = int(want[0].row_offsets[-1])
    for name in COMPARED:
        assert_bitwise_equal(getattr(got[0], name), getattr(want[0], name), name)
    for name in ROWS:
        assert_bitwise_equal(getattr(got[0], name)[:rows], getattr(want[0], name)[:rows], name)
    assert_bitwise_equal(got[1], want[1], "out")


def two_batches(rank: int, world_size: int, wire: str) -> int:
    """Two batches overlap and equal the same batches in turn, whatever order each rank waits in. Return their rows."""
    ep = moelink.init(**FIELDS, **WIRES[wire], lanes=2, timeout=60)
    lanes, rows = [ep.lane(0), ep.lane(1)], 0
    assert lanes[0] is ep
    assert lanes[1] is ep.lane(1)
    assert lanes[1].config.lanes == 1
    for seed, order in enumerate(([1, 0], [0, 1] if rank else [1, 0])):
        batches = [data(rank, seed=2 * seed + i, tokens=3 - (rank + i) % 2) for i in range(2)]
        want = [in_turn(ep, d) for d in batches]
        got = overlapped(lanes, batches, order)
        for mine, theirs in zip(got, want, strict=True):
            same(mine, theirs)
            rows += int(theirs[0].row_offsets[-1])
    ep.check()
    own, further = ep.traffic(), lanes[1].traffic()
    assert 0 < further.dispatch < own.dispatch  # those of ep count both lanes
    for lane, other in (lanes, reversed(lanes)):
        recv = other.dispatch(batches[0].x, batches[0].topk_ids)
        with pytest.raises(moelink.ForeignHandleError, match="of this communicator"):
            lane.combine(recv.tokens, recv)
        other.combine(recv.tokens, recv)
    check_round_trip(lanes[1], rank)
    for of_one in (lanes[1].close, lambda: lanes[1].recover([rank]), lanes[1].__enter__):
        with pytest.raises(moelink.StateError, match="got its lane 1; call (close|recover) on lane 0"):
            of_one()
    for number in (2, -1, True, None):
        with pytest.raises(moelink.ArgumentError, match=r"number: expected a lane in \[0, 2\)"):
            ep.lane(number)  # type: ignore[arg-type]
    ep.close()
    with pytest.raises(moelink.ClosedError):
        lanes[1].dispatch(batches[0].x, batches[0].topk_ids)
    return rows


def absent_from_a_lane(rank: int, world_size: int, wire: str) -> int:
    """Rank 1 never makes the call of lane 1: both lanes of every rank end with the same error. Return whom it names."""
    ep = join(**FIELDS, **WIRES[wire], lanes=2)
    d = data(rank)
    for lane in (ep, ep.lane(1)):
        check_round_trip(lane, rank)
    kept = ep.dispatch(d.x, d.topk_ids)
    meet()
    hurry(ep, EXPIRY[wire])
    if rank == 1:
        meet()
    with pytest.raises(moelink.PeerTimeoutError) as first:
        ep.lane(1).dispatch(d.x, d.topk_ids)
    if rank != 1:
        meet()
    hurry(ep, ROOMY)
    start = time.monotonic()
    for again in (lambda: ep.combine(kept.tokens, kept), lambda: ep.lane(1).dispatch(d.x, d.topk_ids), ep.check):
        with pytest.raises(moelink.PeerTimeoutError) as later:
            again()
        assert str(later.value) == str(first.value)
    assert time.monotonic() - start < HANG
    meet()
    ep.close()
    return first.value.peer


def recovered(rank: int, world_size: int, wire: str) -> int:
    """Rank 0 dies while both lanes are in flight; the survivors go on with as many lanes. Return how many."""
    ep = join(**FIELDS, **WIRES[wire], lanes=2)
    d = data(rank)
    for lane in (ep, ep.lane(1)):
        check_round_trip(lane, rank)
    meet()
    if rank == 0:
        die()
    if wire != "collective":
        hurry(ep, EXPIRY[wire])
    with pytest.raises(moelink.PeerTimeoutError) as told:
        overlapped([ep, ep.lane(1)], [d, d], [1, 0])
    assert told.value.peer == 0
    new = ep.recover([1, 2])
    lanes = [new.lane(i) for i in range(new.config.lanes)]
    for lane in reversed(lanes):
        check_round_trip(lane, rank)
    with pytest.raises(moelink.ClosedError):
        ep.lane(1).dispatch(d.x, d.topk_ids)
    new.close()
    return len(lanes)


def other_numbers_of_lanes(rank: int, world_size: int) -> str:
    """Ranks that ask for different numbers of lanes are told."""
    with pytest.raises(moelink.ConfigMismatchError) as told:
        moelink.init(**FIELDS, lanes=1 + rank, timeout=ROOMY)
    return str(told.value)


def gradients_of_lanes(rank: int, world_size: int, wire: str) -> bool:
    """Each lane has gradients of its own: those of two batches that overlap equal those of the batches in turn."""
    fields = FIELDS | {"hidden_size": 32, "dispatch_format": "mxfp8"} | WIRES[wire]
    with moelink.init(**fields, lanes=2, timeout=60) as ep:
        found = []
        for first, second in ((ep, ep), (ep, ep.lane(1))):
            batches = [data(rank, seed=seed).x.repeat(1, 2).requires_grad_() for seed in (1, 2)]
            ids = [data(rank, seed=seed).topk_ids for seed in (1, 2)]
            outs = []
            for lane, x, routing in zip((first, second), batches, ids, strict=True):
                recv = lane.dispatch(x, routing)
                outs.append(lane.combine(moelink.ops.dequantize(lane, recv), recv))
            torch.stack([out.float().square().sum() for out in outs]).sum().backward()
            found.append([x.grad for x in batches])
        for mine, theirs in zip(*found, strict=True):
            assert_bitwise_equal(mine, theirs, "gradient")
    return True


def graph_fields(world_size: int, more: dict[str, Any]) -> dict[str, Any]:
    """What :func:`graph_of_two_lanes` runs."""
    sizes = {"num_experts": 8 * world_size, "topk": 4, "hidden_size": 512, "max_tokens_per_rank": 64}
    return {**sizes, "transport": "symmetric", "timeout": 60.0, **more}


def graph_of_two_lanes(rank: int, world_size: int, more: dict[str, Any]) -> bool:
    """On GPUs: one graph holds two batches that overlap. Its replays equal the batches in turn."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    with moelink.init(**graph_fields(world_size, more), device=device, lanes=2) as ep:
        ep.warmup()
        lanes = [ep, ep.lane(1)]

        def batch(seed: int) -> RankData:
            d = rank_data(seed=seed, rank=rank, num_tokens=64, hidden_size=512, num_experts=8 * world_size, topk=4)
            return placed(d, device)

        held = [batch(0), batch(1)]
        overlapped(lanes, held, [0, 1])  # compiles what is left
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = overlapped(lanes, held, [1, 0])
        for step in range(8):
            fresh = [batch(2 * step), batch(2 * step + 1)]
            for mine, new in zip(held, fresh, strict=True):
                for name in ("x", "topk_ids", "topk_weights"):
                    getattr(mine, name).copy_(getattr(new, name))
            graph.replay()
            torch.cuda.synchronize()
            want = [in_turn(ep, d) for d in fresh]
            eager = overlapped(lanes, fresh, [0, 1])
            for index in range(2):
                same(got[index], want[index])
                same(eager[index], want[index])
        ep.check()
    return True
