"""Lanes: calls of one phase in flight side by side, which end together and are closed and recovered together."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moelink
from moelink.testing import run_ranks
from tests.gpu.gpu_compile import FUSED, HALVES, kernels_of
from tests.support.fault_ranks import FIELDS
from tests.transports import lane_ranks

TRANSPORTS = ("collective", "symmetric")
WORLD = min(8, torch.cuda.device_count())


@pytest.mark.parametrize("wire", ["symmetric", "collective"])
def test_two_batches_overlap(wire: str) -> None:
    assert min(run_ranks(lane_ranks.two_batches, 2, wire)) > 0


@pytest.mark.parametrize("wire", TRANSPORTS)
def test_a_failure_in_one_lane_ends_both(wire: str) -> None:
    assert run_ranks(lane_ranks.absent_from_a_lane, 3, wire) == [1, 1, 1]


@pytest.mark.parametrize("wire", TRANSPORTS)
def test_all_lanes_recover(wire: str) -> None:
    assert run_ranks(lane_ranks.recovered, 3, wire, mortal={0}) == [None, 2, 2]


def test_ranks_that_ask_for_other_numbers_of_lanes_are_named() -> None:
    for told in run_ranks(lane_ranks.other_numbers_of_lanes, 2):
        assert "lanes: expected the same value on every rank" in told


@pytest.mark.parametrize("wire", TRANSPORTS)
def test_each_lane_has_gradients_of_its_own(wire: str) -> None:
    assert run_ranks(lane_ranks.gradients_of_lanes, 2, wire) == [True, True]


def test_one_rank_has_lanes_too() -> None:
    with moelink.init(**FIELDS, lanes=3) as ep:
        d = lane_ranks.data(0)
        want = lane_ranks.in_turn(ep, d)
        for got in lane_ranks.overlapped([ep.lane(i) for i in range(3)], [d] * 3, [2, 0, 1]):
            lane_ranks.same(got, want)


def test_what_lanes_cost_is_reported() -> None:
    one = moelink.EPConfig(**FIELDS, world_size=4)
    single, double = one.memory_report(), dataclasses.replace(one, lanes=2).memory_report()
    assert (single.lanes, double.lanes) == (1, 2)
    assert double.block == single.block
    assert double.symmetric_total == 2 * single.symmetric_total
    assert double.total == 2 * single.total
    assert "lanes" not in str(single)
    assert str(double).endswith("The totals are of 2 lanes.")
    with pytest.raises(moelink.ConfigError, match="lanes: expected an integer >= 1"):
        dataclasses.replace(one, lanes=0)


@pytest.mark.gpu
@pytest.mark.skipif(WORLD < 1, reason="needs a CUDA device")
def test_lanes_share_the_sms_of_a_device() -> None:
    device = torch.device("cuda", 0)
    available = torch.cuda.get_device_properties(device).multi_processor_count
    for num_sms in (None, available // 2 + 1):
        with pytest.raises(moelink.ConfigError, match=f"num_sms: expected at most {available // 2}"):
            moelink.init(**FIELDS, device=device, transport="symmetric", lanes=2, num_sms=num_sms)
    with moelink.init(**FIELDS, device=device, transport="symmetric", lanes=2, num_sms=available // 2) as ep:
        d = lane_ranks.placed(lane_ranks.data(0), device)
        want = lane_ranks.in_turn(ep, d)
        for got in lane_ranks.overlapped([ep, ep.lane(1)], [d, d], [1, 0]):
            lane_ranks.same(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(WORLD < 2, reason="needs two CUDA devices")
@pytest.mark.kernels(of=lambda more: kernels_of(lane_ranks.graph_fields(WORLD, more), WORLD, [*FUSED, *HALVES]))
@pytest.mark.parametrize("more", [{"num_sms": 24}, {"num_sms": 24, "dispatch_format": "bf16", "pre_reduce": False}])
def test_a_graph_holds_two_batches_that_overlap(more: dict) -> None:
    assert run_ranks(lane_ranks.graph_of_two_lanes, WORLD, more, timeout=300) == [True] * WORLD
