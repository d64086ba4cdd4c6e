"""The protocol with a masked rank under seeded schedules: the words in its place end every wait, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moelink
from moelink import reference
from moelink.memory.absence import fill_in_for
from moelink.memory.workspace import Workspace
from moelink.reference.dispatch import expert_owners
from moelink.testing import assert_bitwise_equal, rank_data
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink_testing import Scheduler
from tests.support.cases import Setup
from tests.support.protocol_runs import transports
from tests.tiers import seeds

WORLD, MASKED = 3, 1
SIZES = (("max_tokens_per_rank", 4), ("hidden_size", 8))
FORMS = {
    "sums": SIZES,
    "every_row": (*SIZES, ("pre_reduce", False)),
    "rank": (*SIZES, ("layout", "rank")),
    "planned": SIZES,
}
"""With four ranks a planner waits for counts, and the others for headers."""


class Ranks:
    """The ranks but one of a communicator, in blocks that know of it."""

    def __init__(self, form: str) -> None:
        self.world = WORLD + (form == "planned")
        self.setup = Setup("bf16", FORMS[form], num_experts=5, topk=2)
        self.transports = transports(self.setup, self.world)
        self.config = self.setup.config(self.world, 0)
        self.present = [rank for rank in range(self.world) if rank != MASKED]
        absent = torch.tensor([owner == MASKED for owner in expert_owners(self.config)])
        for rank in self.present:
            block = self.transports[rank].ranks[0].memory.local
            block.zero_()
            fill_in_for([MASKED], block, workspace=Workspace(self.config))
        # The block of the masked rank is memory that nobody reads.
        self.absent = absent
        self.load(seed=5)

    def load(self, seed: int) -> None:
        """Take other tokens, of which other ranks have the experts."""
        every = [
            rank_data(seed=seed, rank=r, num_tokens=4 - r, hidden_size=8, num_experts=5, topk=2)
            for r in range(self.world)
        ]
        ids = [torch.where(self.absent[d.topk_ids.long()], -1, d.topk_ids) for d in every]
        given = [(d.x, i, d.topk_weights) for d, i in zip(every, ids, strict=True)]
        given[MASKED] = tuple(part[:0] for part in given[MASKED])
        self.every, (self.xs, self.ids, self.weights) = every, zip(*given, strict=True)

    def dispatch(self, rank: int, **options: Any) -> Any:
        d = self.every[rank]
        weights = d.topk_weights if self.config.pre_reduce else None
        return (
            self.transports[rank].dispatch([DispatchRequest(d.x, d.topk_ids, weights, **options)], fused=True).wait()[0]
        )

    def combine(self, rank: int, recv: Any, **options: Any) -> torch.Tensor:
        weights = None if self.config.pre_reduce else self.every[rank].topk_weights
        request = CombineRequest(recv.tokens * (1 + rank), recv, weights, **options)
        return self.transports[rank].combine([request], fused=True).wait()[0]

    def expected(self) -> list[torch.Tensor]:
        travel = self.config.pre_reduce
        rows = reference.reference_dispatch(self.config, self.xs, self.ids, self.weights if travel else None)
        ys = [each.tokens * (1 + rank) for rank, each in enumerate(rows)]
        return reference.reference_combine(self.config, ys, rows, self.ids, None if travel else self.weights)

    def run(self, seed: int, main: Callable[[int], Any]) -> dict[int, Any]:
        """Run ``main`` of each rank that is present under the schedule of ``seed``; results by rank."""
        parts = [lambda rank=rank: main(rank) for rank in self.present]
        return dict(zip(self.present, Scheduler(seed).run(parts), strict=True))


@seeds(1, 8, why="each form waits for other words of the masked rank")
@pytest.mark.parametrize("form", FORMS)
def test_calls_go_on_without_a_masked_rank(form: str, seeds: range) -> None:
    """Three pairs, of which the second is over the routing of the first, and one of other tokens: sums of what is left,
    and nobody waits."""
    for seed in seeds:
        ranks = Ranks(form)

        def main(rank: int, ranks: Ranks = ranks) -> list[torch.Tensor]:
            first = ranks.dispatch(rank)
            sums = [ranks.combine(rank, first)]
            sums.append(ranks.combine(rank, ranks.dispatch(rank, routing=first)))
            return [*sums, ranks.combine(rank, ranks.dispatch(rank))]

        expected = ranks.expected()
        for rank, sums in ranks.run(seed, main).items():
            for number, out in enumerate(sums):
                assert_bitwise_equal(out, expected[rank], f"rank {rank}, pair {number}")
            ranks.transports[rank].check()
        if form == "sums":  # rows that do not belong to sums lie where sums will
            ranks.run(seed, lambda rank, ranks=ranks: ranks.combine(rank, ranks.dispatch(rank), reduce=False))
        ranks.load(seed=6)
        later = ranks.expected()
        for rank, out in ranks.run(seed, lambda rank, ranks=ranks: ranks.combine(rank, ranks.dispatch(rank))).items():
            assert_bitwise_equal(out, later[rank], f"rank {rank}, other tokens")


@seeds(1, 4)
def test_refusals_name_a_rank_that_takes_part(seeds: range) -> None:
    """A refused dispatch, and a refused combine, among ranks of which one is masked; then a pair that works."""
    for seed in seeds:
        ranks = Ranks("sums")

        def main(rank: int, ranks: Ranks = ranks) -> torch.Tensor:
            for phase in ("dispatch", "combine"):
                recv = ranks.dispatch(rank) if phase == "combine" else None
                if rank == 2:
                    ranks.transports[rank].refuse(phase, over=recv)
                    continue
                with pytest.raises(moelink.PeerAbortedError, match=f"rank 2 refused its arguments in {phase}"):
                    ranks.dispatch(rank) if recv is None else ranks.combine(rank, recv)
            return ranks.combine(rank, ranks.dispatch(rank))

        expected = ranks.expected()
        for rank, out in ranks.run(seed, main).items():
            assert_bitwise_equal(out, expected[rank], f"rank {rank}")


@seeds(1, 4)
def test_a_mismatch_names_a_rank_that_takes_part(seeds: range) -> None:
    """Rank 3 of 4 combines another dispatch than ranks 0 and 2. The masked rank has no vote."""
    for seed in seeds:
        ranks = Ranks("planned")

        def main(rank: int, ranks: Ranks = ranks) -> str:
            first, second = ranks.dispatch(rank), ranks.dispatch(rank)
            with pytest.raises(moelink.ProtocolError) as caught:
                ranks.combine(rank, first if rank == 3 else second)
            ranks.combine(rank, ranks.dispatch(rank))
            return str(caught.value)

        for rank, words in ranks.run(seed, main).items():
            assert words.startswith(f"rank {rank}: rank 3 calls combine"), words
