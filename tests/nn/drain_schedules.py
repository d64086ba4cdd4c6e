"""Ranks in virtual time from which a drain takes all experts while they compute; and the one rank that has all."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

import moelink
from moelink.nn import Balancer, MoE, Placement
from moelink.nn.load import BalancedLayer
from moelink.testing import assert_bitwise_equal
from tests.support.simulated_groups import Fault, Rank, Ranks

HIDDEN, INNER, TOKENS, SEED = 16, 8, 6, 3
NEVER = Fault("killed", 0, 10**6, 0.0)


@dataclass(frozen=True)
class Case:
    """A drawn schedule.

    Attributes:
        world, leaving: ranks, and those that are drained.
        placement: at first.
        load: of physical experts, as if counted.
        moves: experts that a step may move to a rank.
        fields: of the communicator.
    """

    world: int
    leaving: tuple[int, ...]
    placement: tuple[int, ...]
    load: tuple[int, ...]
    moves: int
    fields: dict[str, Any] = field(repr=False)

    @classmethod
    def draw(cls, seed: int) -> Case:
        """Draw the case of ``seed``: 2 to 4 ranks, of which some leave room for all experts to the others."""
        choice = random.Random(f"drain {seed}")
        world = choice.randint(2, 4)
        leaving = tuple(sorted(choice.sample(range(world), choice.randint(1, world - 1))))
        physical = choice.randint(2 * world, 5 * world)
        counts = [physical // world + (rank < physical % world) for rank in range(world)]
        room = sum(counts[rank] for rank in range(world) if rank not in leaving)
        experts = max(2, room - choice.randint(0, 1))
        order = [
            *choice.sample(range(experts), experts),
            *(choice.randrange(experts) for _ in range(physical - experts)),
        ]
        if choice.random() < 0.3:
            choice.shuffle(order)
        # Else the leaving ranks have experts that nobody else has, as many as there are.
        turn = sorted(range(world), key=lambda rank: rank not in leaving)
        blocks = {rank: [order.pop(0) for _ in range(counts[rank])] for rank in turn}
        placement = [expert for rank in range(world) for expert in blocks[rank]]
        fields = {
            "num_experts": physical, "topk": min(2, experts), "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS,
            "dispatch_format": "fp32", "combine_dtype": torch.float32, "batch_invariant": True,
        }  # fmt: skip
        load = tuple(choice.randint(0, 20) for _ in range(physical))
        return cls(world, leaving, tuple(placement), load, choice.choice((1, 1, 2)), fields)

    @property
    def held(self) -> list[range]:
        """The places of each rank."""
        bounds = [0]
        for rank in range(self.world):
            bounds.append(bounds[-1] + len(self.placement) // self.world + (rank < len(self.placement) % self.world))
        return [range(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def tokens(rank: int, turn: int) -> torch.Tensor:
    """The tokens of a rank in one forward pass."""
    return torch.randn(1 + (rank + turn) % TOKENS, HIDDEN, generator=torch.Generator().manual_seed(99 * turn + rank))


def run(seed: int) -> tuple[Case, int]:
    """Drain under traffic, and compare each output with that of one rank that has all experts. Returns the steps."""
    case = Case.draw(seed)
    whole = case.fields | {"num_experts": max(case.placement) + 1}
    steps: list[int] = []
    with moelink.init(**whole, device="cpu") as alone, torch.no_grad():
        expected = MoE(alone, intermediate_size=INNER, seed=SEED)
        ranks = Ranks(seed, NEVER, case.world)

        def main(process: Rank) -> None:
            with torch.no_grad():
                steps.append(_drain(case, ranks, process.rank, expected))

        ranks.run(main)
    assert len(set(steps)) == 1
    return case, steps[0]


def _drain(case: Case, ranks: Ranks, rank: int, expected: MoE) -> int:
    layer = MoE(
        ranks.communicator(**case.fields), intermediate_size=INNER, seed=SEED, placement=Placement(case.placement)
    )
    assert layer.load is not None
    layer.load.total.copy_(torch.tensor(case.load))
    size = sum(getattr(layer.experts, name)[0].nbytes for name in layer.experts.stacked)
    balancer = Balancer(layer, max_bytes=case.moves * size, group=ranks.group.members[rank])  # type: ignore[arg-type]
    (report,) = balancer.drain(case.leaving)
    before, turn = _experts(layer), 0
    while balancer.steps_left:
        balancer.step()
        after = _experts(layer)
        for places in case.held:  # an item of a step is one place or a ring, and a drain has no rings
            assert sum(before[place] != after[place] for place in places) <= case.moves
        assert set(after) == set(case.placement)
        x = tokens(rank, turn)
        assert_bitwise_equal(layer(x), expected(x), f"rank {rank}, turn {turn}")
        before, turn = after, turn + 1
    stays = [place for r in range(case.world) if r not in case.leaving for place in case.held[r]]
    assert {before[place] for place in stays} == set(case.placement)
    lonely = set(case.placement) - {case.placement[place] for place in stays}
    assert report.moves == len(lonely)
    return turn


def _experts(layer: BalancedLayer) -> tuple[int, ...]:
    assert layer.placement is not None
    return layer.placement.placement.experts
