"""Experts are placed by load and moved between ranks; the layer computes the same before, meanwhile and after."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import moelink
from moelink.errors import ArgumentError, ConfigError, StateError, UnsupportedError
from moelink.nn import Balancer, MoE, Placement, merge_state_dicts, place_experts
from moelink.nn.balance import order_moves
from moelink.nn.placement import PlacementMap
from moelink.routing import ExpertMap
from moelink.testing import assert_bitwise_equal, run_ranks
from tests.nn import balance_ranks
from tests.nn.balance_ranks import EXPERTS, PHYSICAL, SIZES, model_of, whole

START = (0, 1, 2, 3, 4, 5, 4, 5)
ROUNDING = {"atol": 0.01, "rtol": 0.02}
"""Rows of one rank are summed before they travel, so sums are rounded elsewhere when experts are elsewhere."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.integers(0, 8), st.integers(1, 5), st.randoms())
def test_a_placement_holds_every_expert_and_evens_the_load(
    load: list[int], extra: int, ranks: int, random: Any
) -> None:
    physical = max(len(load) + extra, ranks)
    placement = place_experts(load, num_physical=physical, world_size=ranks)
    assert set(placement.experts) == set(range(len(load)))
    assert sum(placement.rank_load(load, ranks)) == pytest.approx(sum(load))
    mixed = list(placement.experts)
    random.shuffle(mixed)
    again = place_experts(load, num_physical=physical, world_size=ranks, current=Placement(tuple(mixed)))
    assert Counter(again.experts) == Counter(placement.experts)
    assert again.imbalance(load, ranks) == pytest.approx(placement.imbalance(load, ranks))


def test_what_is_placed_well_stays() -> None:
    load = [9, 7, 5, 3, 2, 1]
    placement = place_experts(load, num_physical=8, world_size=4)
    owned = ExpertMap(8, 4)
    ranks = [placement.experts[owned.first(r) : owned.first(r + 1)] for r in (2, 0, 3, 1)]
    moved = Placement(tuple(expert for rank in ranks for expert in reversed(rank)))
    assert place_experts(load, num_physical=8, world_size=4, current=moved) == moved


def test_replicas_go_to_the_busiest_and_to_other_ranks() -> None:
    placement = place_experts([100, 1, 1, 1, 1, 40], num_physical=9, world_size=3)
    assert len(placement.replicas[0]) == 3
    assert [place // 3 for place in placement.replicas[0]] == [0, 1, 2]
    assert placement.imbalance([100, 1, 1, 1, 1, 40], 3) < 1.2
    assert Placement.identity(6).imbalance([100, 1, 1, 1, 1, 40], 3) > 2


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Placement((0, 2)), r"placement: .*experts \[1\] nowhere"),
        (lambda: Placement(()), "placement: .*each expert from 0 on"),
        (lambda: place_experts([1, -1], num_physical=2, world_size=1), "load: expected finite numbers"),
        (lambda: place_experts([], num_physical=2, world_size=1), "load: expected a number for each"),
        (lambda: place_experts([1, 2, 3], num_physical=2, world_size=1), "num_physical: expected at least the 3"),
        (
            lambda: place_experts([1, 2], num_physical=2, world_size=1, current=Placement((0, 1, 1))),
            "current: expected 2 experts in 2",
        ),
        (lambda: PlacementMap(Placement((0, 1))).set(Placement((0, 1, 1))), "placement: expected 2 experts in 2"),
    ],
)
def test_bad_placements_are_refused(call: Any, words: str) -> None:
    with pytest.raises((ArgumentError, ConfigError), match=words):
        call()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.data())
def test_moves_lose_no_expert_and_read_what_is_there(experts: int, data: Any) -> None:
    some = st.lists(st.integers(0, experts - 1), min_size=0, max_size=5)
    old = data.draw(st.permutations([*range(experts), *data.draw(some)]))
    more = data.draw(st.lists(st.integers(0, experts - 1), min_size=len(old) - experts, max_size=len(old) - experts))
    new = data.draw(st.permutations([*range(experts), *more]))
    now = list(old)
    for places in order_moves(old, new):
        before = set(now)
        for place in places:
            assert new[place] in before
            now[place] = new[place]
        assert set(now) == set(range(experts))
    assert now == list(new)


def test_ids_are_divided_among_replicas() -> None:
    placement = Placement((0, 1, 0, 2, 0))
    ids = torch.tensor([[0, 1], [0, 2], [0, -1], [0, 0]], dtype=torch.int32)
    assert PlacementMap(placement)(ids).tolist() == [[0, 1], [2, 3], [4, -1], [0, 0]]
    assert PlacementMap(placement, rank=1)(ids)[:, 0].tolist() == [2, 4, 0, 2]
    assert PlacementMap(placement)(ids).dtype == torch.int32


CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "three in small steps": (3, {"transport": "collective"}, 1),
    "allreduce": (2, {"mode": "allreduce"}, 1 << 30),
    "fused shared expert": (2, {"fused_shared_expert": True, "transport": "collective"}, 1 << 30),
    "fp8": (2, {"dispatch_format": "fp8_block128", "experts_backend": "torch", "transport": "collective"}, 1 << 30),
}


@pytest.mark.quick("each has weights or ids of its own")
@pytest.mark.parametrize("ranks, options, max_bytes", CASES.values(), ids=CASES)
def test_a_layer_computes_the_same_while_its_experts_move(ranks: int, options: dict[str, Any], max_bytes: int) -> None:
    results = run_ranks(balance_ranks.balanced, ranks, START, dict(options), max_bytes)
    first = results[0]
    size = first["report"][0].nbytes // max(1, first["report"][0].moves)
    for result in results:
        assert result["report"] == first["report"]
        assert result["placements"] == first["placements"]
        assert result["steps"] >= (4 if max_bytes < size else 1)
        expected = result["outputs"][0]
        for got in result["outputs"][2:]:
            if "mode" in options:
                continue  # a rank's part of the sum is another with other experts; the sum is below
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs, **ROUNDING)
    if "mode" in options:
        sums = [[sum(r["outputs"][n][k].float() for r in results) for k in range(2)] for n in (0, -1)]
        for mine, theirs in zip(sums[0], sums[1], strict=True):
            torch.testing.assert_close(mine, theirs, **ROUNDING)
    for layer in first["report"]:
        assert layer.after < layer.before
        assert layer.moves > 0
    assert first["placements"][0] != START


def test_what_was_moved_is_what_was_there() -> None:
    """Weights of the full model are those of one rank; a part loads into another placement."""
    model, outputs = whole()
    results = run_ranks(balance_ranks.balanced, 2, START, {"transport": "collective"}, 1 << 30)
    torch.testing.assert_close(results[0]["outputs"][0][0], outputs[0], **ROUNDING)
    with moelink.init(**SIZES, device="cpu") as ep:
        holder = model_of(ep, None, "dequantize")
        for name, layer in holder.items():
            layer.experts.placement = Placement(results[0]["placements"]["ab".index(name)])
        full = merge_state_dicts(holder, [result["state"] for result in results])
    state = model.state_dict()
    assert full.keys() == state.keys()
    for name, value in state.items():
        assert_bitwise_equal(full[name], value, name)
    again = run_ranks(balance_ranks.reloaded, 2, (5, 4, 3, 2, 1, 0, 0, 2), dict(state))
    torch.testing.assert_close(again[0][0], outputs[1], **ROUNDING)


def test_ranks_that_differ_are_named() -> None:
    for said in run_ranks(balance_ranks.disagreeing, 2):
        settings, plans = said
        assert "balancer: expected the same value on every rank, got 'max_bytes 1000, 2 layers" in settings
        assert "; max_bytes 1001, 2 layers" in settings
        assert plans.startswith("balancer: expected the same value on every rank, got 'a plan of load ")
        assert plans.endswith(" on rank 1'")


def test_what_cannot_be_balanced_is_refused() -> None:
    sizes = {**SIZES, "num_experts": PHYSICAL}
    placement = Placement.identity(EXPERTS, PHYSICAL)
    with moelink.init(**sizes, device="cpu") as ep:
        with pytest.raises(ConfigError, match="placement: expected 8 physical experts, got 6"):
            MoE(ep, intermediate_size=32, placement=Placement.identity(6))
        with pytest.raises(ConfigError, match="placement: expected at least topk = 2 experts, got 1"):
            MoE(ep, intermediate_size=32, placement=Placement.identity(1, 8))
        layer = MoE(ep, intermediate_size=32, placement=placement)
        with pytest.raises(UnsupportedError, match="placement: expected a call without gradients"):
            layer(torch.ones(2, SIZES["hidden_size"], dtype=torch.bfloat16))
        with pytest.raises(ArgumentError, match="model: expected MoE layers with placement="):
            Balancer(MoE(ep, intermediate_size=32))
        with pytest.raises(ArgumentError, match="model: expected MoE layers with placement="):
            Balancer(MoE(ep, intermediate_size=32, placement=placement, load_steps=0))
        with pytest.raises(ArgumentError, match="max_bytes: expected a positive number"):
            Balancer(layer, max_bytes=0)
        balancer = Balancer(layer)
        with pytest.raises(StateError, match="step: expected a plan with steps left"):
            balancer.step()
        (report,) = balancer.run()
        assert (report.before, report.after, report.moves) == (1.0, 1.0, 0), "one rank is even"
