"""A layer whose experts multiply by a number of their own, so that sums show which of them were there."""

from __future__ import annotations

import random

import torch

import moelink
from moelink.nn import Placement
from moelink.nn.load import BalancedLayer, LoadMeter
from moelink.nn.placement import PlacementMap
from moelink.reference.dispatch import expert_owners
from moelink.testing import assert_bitwise_equal

LOGICAL = 3
"""Experts, of which a communicator has replicas."""
SHARED = 7
"""The number of the shared expert."""


def first_placement(seed: int, num_physical: int) -> Placement:
    """Draw a placement. Copies of an expert are beside each other, so a rank often has all of them."""
    choice = random.Random(f"placement {seed}")
    experts = sorted([*range(LOGICAL), *(choice.randrange(LOGICAL) for _ in range(num_physical - LOGICAL))])
    turn = choice.randrange(num_physical)
    return Placement((*experts[turn:], *experts[:turn]))


class Multiplying(BalancedLayer):
    """The layer of ``ep``. Expert e returns its tokens times 1 + e, in small whole numbers, which no sum rounds."""

    stacked = ("numbers",)

    def __init__(self, ep: moelink.Communicator, placement: Placement) -> None:
        super().__init__()
        config = ep.config
        self.ep, self.num_shared = ep, int(config.fused_shared_expert)
        self.owners = expert_owners(config)
        places = [place for place, rank in enumerate(self.owners) if rank == config.rank]
        self.first = places[0]
        numbers = [*[float(SHARED)] * self.num_shared, *(1.0 + placement.experts[place] for place in places)]
        self.numbers = torch.tensor(numbers).bfloat16()
        self.placement = PlacementMap(placement, rank=config.rank)
        self.load = LoadMeter(config.num_experts, rank=config.rank, world_size=config.world_size)

    def check(self, seed: int, present: tuple[int, ...]) -> None:
        """Call the layer, and compare with sums over the experts that have a copy on a rank of ``present``."""
        assert self.placement is not None
        assert self.load is not None
        config = self.ep.config
        generator = torch.Generator().manual_seed(100 * seed + config.rank)
        tokens = (seed + config.rank) % (config.max_tokens_per_rank + 1)
        x = torch.randint(1, 5, (tokens, config.hidden_size), generator=generator).bfloat16()
        ids = torch.randint(-1, LOGICAL, (tokens, config.topk), generator=generator)
        self.placement.leave_out(self.ep.absent_experts)
        physical = self.placement(ids)
        self.load.record(physical)
        recv = self.ep.dispatch(x, physical)
        y = recv.tokens.clone()
        edges = recv.row_offsets.tolist()
        for number, begin, end in zip(self.numbers, edges[:-1], edges[1:], strict=True):
            y[begin:end] *= number
        out = self.ep.combine(y, recv)
        there = {self.placement.placement.experts[place] for place, rank in enumerate(self.owners) if rank in present}
        factors, lost = torch.full((tokens, 1), float(SHARED * self.num_shared)), 0
        for token, experts in enumerate(ids.tolist()):
            for expert in experts:
                factors[token] += 1 + expert if expert in there else 0
                lost += expert >= 0 and expert not in there
        assert_bitwise_equal(out, (x * factors).bfloat16(), f"sums of experts {there} of ranks {present}")
        assert int(recv.masked) == lost
