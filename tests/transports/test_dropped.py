"""Outputs of calls beside masked ranks: counts of dropped pairs, shares of router weights, and rescaled sums."""

from __future__ import annotations

import pytest
import torch

import moelink
from moelink.config import EPConfig
from moelink.control.membership import check_admitted, check_masked
from moelink.nn.placement import Placement, PlacementMap
from moelink.routing import ExpertMap, mark_absent

IDS = torch.tensor([[0, 3], [1, 2], [-1, 3], [-1, -1]])
WEIGHTS = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.5, 1.0], [0.5, 0.5]])


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_an_output_counts_pairs_of_absent_experts(transport: str) -> None:
    sizes = {"num_experts": 4, "topk": 2, "hidden_size": 8, "max_tokens_per_rank": 4}
    with moelink.init(**sizes, transport=transport) as ep:
        x = torch.ones(4, 8, dtype=torch.bfloat16)
        recv = ep.dispatch(x, IDS, WEIGHTS)
        assert (int(recv.masked), recv.weight_share().tolist()) == (0, [1, 1, 1, 1])
        mark_absent(ep.absent_experts, ExpertMap(4, 2), [1])  # as if of two ranks the second were masked
        assert (int(recv.masked), recv.weight_share().tolist()) == (3, [0.75, 0.5, 0, 1])
        assert ep.absent_experts.tolist() == [False, False, True, True]
        out = torch.tensor([[3.0] * 8, [2.0] * 8, [7.0] * 8, [0.0] * 8], dtype=torch.bfloat16)
        assert recv.rescale(out)[:, 0].tolist() == [4.0, 4.0, 7.0, 0.0]
        assert recv.rescale(out).dtype == torch.bfloat16
        unweighted = ep.dispatch(x, IDS)
        assert unweighted.weight_share().tolist() == [0.5, 0.5, 0, 1]
        with pytest.raises(moelink.ArgumentError, match="other ranks in this communicator, which has one"):
            ep.mask([0])


def test_only_one_process_with_all_ranks_cannot_lose_one() -> None:
    with pytest.raises(moelink.ConfigError, match="on_failure: expected 'raise' with init_devices"):
        moelink.init_devices(
            ["cpu"] * 2, num_experts=2, topk=1, hidden_size=8, max_tokens_per_rank=1, on_failure="mask"
        )
    with pytest.raises(moelink.ConfigError, match="on_failure: expected one of 'raise', 'mask', got 'ignore'"):
        moelink.init(num_experts=2, topk=1, hidden_size=8, max_tokens_per_rank=1, on_failure="ignore")


def test_what_may_be_masked_and_admitted() -> None:
    config = EPConfig(num_experts=6, topk=1, hidden_size=8, max_tokens_per_rank=1, world_size=3, rank=1)
    assert check_masked([2, 0], config, (), None) == (0, 2)
    assert check_masked([2], config, (0,), (1, 1, 0, 1, 1, 0)) == (2,)
    with pytest.raises(moelink.ArgumentError, match=r"the last copies of experts \[2\]"):
        check_masked([2], config, (0,), (1, 1, 0, 1, 1, 2))
    with pytest.raises(moelink.ArgumentError, match=r"expected some of \[2\]"):
        check_masked([0], config, (0,), None)
    assert check_admitted([2, 0], config, (0, 2)) == (0, 2)
    with pytest.raises(moelink.ArgumentError, match=r"expected some of \[0\], the ranks that are masked, got \[2\]"):
        check_admitted([2], config, (0,))


def test_replicas_that_are_there_are_chosen() -> None:
    """Expert 1 is in places 1 and 3, expert 2 in place 2 alone."""
    chosen = PlacementMap(Placement((0, 1, 2, 1)))
    table = chosen.table.data_ptr()
    ids = torch.tensor([[1, 0], [1, 2], [1, -1]])
    assert chosen(ids).tolist() == [[1, 0], [3, 2], [1, -1]]
    chosen.leave_out(torch.tensor([False, False, True, True]))
    assert chosen(ids).tolist() == [[1, 0], [1, 2], [1, -1]]
    assert chosen.table.data_ptr() == table
    chosen.leave_out(torch.zeros(4, dtype=torch.bool))
    assert chosen(ids).tolist() == [[1, 0], [3, 2], [1, -1]]
    with pytest.raises(moelink.ArgumentError, match="absent: expected one entry for each of 4, got 3"):
        chosen.leave_out(torch.zeros(3, dtype=torch.bool))
