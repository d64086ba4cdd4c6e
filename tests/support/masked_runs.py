"""Ranks of a communicator of which some are masked, under seeded schedules, for the tests of what the others do.

Between nodes, network proxies carry puts in pieces and in any order, and none to masked ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from tests.support.protocol_runs import SpitefulProxy, play, transports

SIZES = (("max_tokens_per_rank", 4), ("hidden_size", 8))


@dataclass(frozen=True)
class Form:
    """Options of ``world`` ranks of which some are masked."""

    options: tuple[tuple[str, Any], ...] = ()
    world: int = 3
    masked: tuple[int, ...] = (1,)


class Ranks:
    """The ranks of a communicator but the masked ones, in blocks that know of them."""

    def __init__(self, form: Form, seed: int) -> None:
        self.world, self.masked = form.world, form.masked
        self.setup = Setup("bf16", (*SIZES, *form.options), num_experts=max(5, self.world), topk=2)
        self.transports = transports(self.setup, self.world, seed=seed, proxies=SpitefulProxy)
        self.config = self.setup.config(self.world, 0)
        self.present = [rank for rank in range(self.world) if rank not in self.masked]
        absent = torch.tensor([owner in self.masked for owner in expert_owners(self.config)])
        for rank in self.present:
            (each,) = self.transports[rank].ranks
            with each.network.without(self.masked):
                each.memory.local.zero_()
            fill_in_for(self.masked, each.memory.local, rank=rank, workspace=Workspace(self.config))
        # The blocks of masked ranks are memory that nobody reads.
        self.absent = absent
        self.load(seed=5)

    def load(self, seed: int) -> None:
        """Take other tokens, of which other ranks have the experts."""
        every = [
            rank_data(
                seed=seed,
                rank=r,
                num_tokens=4 - r % 4,
                hidden_size=self.config.hidden_size,
                num_experts=self.config.num_experts,
                topk=2,
            )
            for r in range(self.world)
        ]
        ids = [torch.where(self.absent[d.topk_ids.long()], -1, d.topk_ids) for d in every]
        given = [(d.x, i, d.topk_weights) for d, i in zip(every, ids, strict=True)]
        for rank in self.masked:
            given[rank] = tuple(part[:0] for part in given[rank])
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
        results: dict[int, Any] = {}
        parts = [lambda rank=rank: results.update({rank: main(rank)}) for rank in self.present]
        play(Scheduler(seed), [self.transports[rank] for rank in self.present], parts)
        return results


def check_calls(form: Form, seed: int) -> None:
    """Make three pairs, of which the second is over the routing of the first, and one of other tokens: sums of what is
    left, and nobody waits."""
    ranks = Ranks(form, seed)

    def main(rank: int) -> list[torch.Tensor]:
        first = ranks.dispatch(rank)
        sums = [ranks.combine(rank, first)]
        sums.append(ranks.combine(rank, ranks.dispatch(rank, routing=first)))
        return [*sums, ranks.combine(rank, ranks.dispatch(rank))]

    expected = ranks.expected()
    for rank, sums in ranks.run(seed, main).items():
        for number, out in enumerate(sums):
            assert_bitwise_equal(out, expected[rank], f"rank {rank}, pair {number}")
        ranks.transports[rank].check()
    if ranks.config.pre_reduce and not ranks.config.two_level:  # rows that do not belong to sums lie where sums will
        ranks.run(seed, lambda rank: ranks.combine(rank, ranks.dispatch(rank), reduce=False))
    ranks.load(seed=6)
    later = ranks.expected()
    for rank, out in ranks.run(seed, lambda rank: ranks.combine(rank, ranks.dispatch(rank))).items():
        assert_bitwise_equal(out, later[rank], f"rank {rank}, other tokens")


def check_refusals(form: Form, odd: int, seed: int) -> None:
    """Rank ``odd`` refuses a dispatch, and a combine; then all make a pair that works."""
    ranks = Ranks(form, seed)

    def main(rank: int) -> torch.Tensor:
        for phase in ("dispatch", "combine"):
            recv = ranks.dispatch(rank) if phase == "combine" else None
            if rank == odd:
                ranks.transports[rank].refuse(phase, over=recv)
                continue
            with pytest.raises(moelink.PeerAbortedError, match=f"rank {odd} refused its arguments in {phase}"):
                ranks.dispatch(rank) if recv is None else ranks.combine(rank, recv)
        return ranks.combine(rank, ranks.dispatch(rank))

    expected = ranks.expected()
    for rank, out in ranks.run(seed, main).items():
        assert_bitwise_equal(out, expected[rank], f"rank {rank}")


def check_mismatch(form: Form, odd: int, seed: int) -> None:
    """Rank ``odd`` of three combines another dispatch than the others. Masked ranks have no vote."""
    ranks = Ranks(form, seed)

    def main(rank: int) -> tuple[str, torch.Tensor]:
        first, second = ranks.dispatch(rank), ranks.dispatch(rank)
        with pytest.raises(moelink.ProtocolError) as caught:
            ranks.combine(rank, first if rank == odd else second)
        return str(caught.value), ranks.combine(rank, ranks.dispatch(rank))

    expected = ranks.expected()
    for rank, (words, out) in ranks.run(seed, main).items():
        assert words.startswith(f"rank {rank}: rank {odd} calls combine"), words
        assert_bitwise_equal(out, expected[rank], f"rank {rank}")
