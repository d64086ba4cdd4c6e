"""A drain leaves every expert on ranks that stay, by the fewest moves, while the layer computes the same bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import moelink
from moelink.errors import ArgumentError, ConfigMismatchError
from moelink.nn import Balancer, MoE, Placement
from moelink.nn.placement import drain_ranks
from moelink.testing import run_ranks
from tests.nn.drain_schedules import run
from tests.tiers import seeds


@seeds(6, 200)
def test_ranks_that_are_drained_compute_the_same_bits_in_between(seeds: Any) -> None:
    seen = Counter(run(seed)[1] for seed in seeds)
    assert sum(seen.values()) == len(seeds)
    assert sum(count for steps, count in seen.items() if steps > 1) > len(seeds) // 8, seen


def test_a_replica_gives_way_where_the_load_is_least() -> None:
    placement = Placement((0, 1, 0, 2, 1, 2, 3, 4))  # ranks of two places; the last one alone has 3 and 4
    loads = [8.0, 2.0, 1.0, 9.0, 1.0]
    new = drain_ranks(placement, loads, leaving=[3], world_size=4)
    assert new.experts[6:] == placement.experts[6:]
    assert set(new.experts[:6]) == set(range(5))
    staying = [new.rank_load(loads, 4)[rank] for rank in range(3)]
    assert max(staying) <= 13  # 3 and 4 are not together with half of expert 0


WORDS = "ranks: expected some, and not all, of the ranks in [0, 2), got "
BAD = {
    (): WORDS + "[]",
    (0, 1): WORDS + "[0, 1]",
    (2,): WORDS + "[2]",
    ("0",): WORDS + "['0']",
    (1,): "ranks: expected ranks whose absence leaves places for all 4 experts",
}


def test_bad_ranks_are_refused_on_every_rank() -> None:
    for said in run_ranks(_refused, 2):
        for words, got in zip(BAD.values(), said, strict=True):
            assert got.startswith(words)


def _refused(rank: int, world_size: int) -> list[str]:
    sizes = {"num_experts": 6, "topk": 1, "hidden_size": 8, "max_tokens_per_rank": 2}
    said = []
    with moelink.init(**sizes, device="cpu") as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=8, placement=Placement.identity(4, 6))
        balancer = Balancer(layer)
        for leaving in BAD:
            with pytest.raises(ArgumentError) as caught:
                balancer.drain(leaving)
            said.append(str(caught.value))
        with pytest.raises(ConfigMismatchError, match=r"a drain of ranks \[0\] on rank 0; a drain of ranks \[1\]"):
            balancer.drain([rank])
        assert balancer.steps_left == 0
        layer(torch.ones(1, 8, dtype=torch.bfloat16))  # nothing has changed
    return said
