"""Random schedules of a fault while calls of two lanes are under way: all lanes end together, and name the right rank.

40 of the symmetric transport's kernels and 200 of the collective transport's wire, the first of each in the quick tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moelink
from moelink.kernels.launch import device
from moelink.lifetime import end_outside_calls
from tests.control.fault_schedules import WORLD, FaultScheduler, Oracle
from tests.control.lane_schedules import LANES, PLACES, SETUP, Group, check_collective, run_collective, run_kernels
from tests.control.test_fault_schedules import clocks
from tests.support.protocol_runs import Small
from tests.support.simulated_groups import KINDS, Fault
from tests.tiers import seeds

__all__ = ["clocks"]

TURNS = [
    [Small(SETUP, kind, seed=10 * turn + lane, tokens=tokens) for lane, (kind, tokens) in enumerate(lanes)]
    for turn, lanes in enumerate((
        (("uniform", (2, 1, 1)), ("skewed", (1, 0, 2))), (("skewed", (3, 2, 1)), ("uniform", (1, 3, 3))),
        (("uniform", (0, 2, 3)), ("uniform", (3, 3, 0))),
    ))
]  # fmt: skip
FEW = [Small(SETUP, "uniform", seed=5, tokens=(1, 1, 1)), Small(SETUP, "skewed", seed=6, tokens=(1, 1, 1))]


@pytest.mark.parametrize("seeds", [range(1), *(range(first, first + 8) for first in range(0, 40, 8))], ids=str)
def test_kernels_of_two_lanes_stopped_anywhere(seeds: range, clocks: list[FaultScheduler]) -> None:
    oracle, seen = Oracle(), Counter()
    limit = device.clock_ticks(60.0, torch.device("cpu"))
    for seed in seeds:
        outcome = run_kernels(seed, FEW, clocks, limit=limit)
        survivors = [rank for rank in range(WORLD) if rank != outcome.victim]
        errors = {rank: outcome.said[rank].error for rank in survivors}
        calls = [said.check(oracle, rank) for rank, said in enumerate(outcome.said)]
        if not any(errors.values()):
            assert calls == [2 * LANES] * WORLD, f"seed {seed}: calls are missing, and nobody was told"
            continue
        seen["hit"] += 1
        seen["completed"] += sum(calls)
        for rank, error in errors.items():
            assert error is not None, f"seed {seed}: rank {rank} goes on"
            assert error.peer == outcome.victim, f"seed {seed}: rank {rank} names {error.peer}"
            assert isinstance(error, moelink.PeerLostError) == outcome.dies, f"seed {seed}: {error}"
            said = outcome.said[rank]
            # With few programs left the clock may pass a limit once more before one of them looks at it.
            assert said.longest <= 2 * (limit + 1), f"seed {seed}: rank {rank} has waited for {said.longest} of {limit}"
            assert said.after == 0, f"seed {seed}: rank {rank} has waited after the error"
        if not outcome.dies:
            error = outcome.said[outcome.victim].error
            assert error is not None and error.peer == outcome.victim, f"seed {seed}: it learns that it was stopped"  # noqa: PT018
    print(seen)
    assert seen["hit"] > len(seeds) // 2, seen


@pytest.mark.quick("milliseconds; what no schedule of kernels comes to")
def test_who_is_not_known_is_named_by_no_rank_in_any_lane(clocks: list[FaultScheduler]) -> None:
    scheduler = FaultScheduler(1, victim=0, when=-1, limit=device.clock_ticks(60.0, torch.device("cpu")), dies=False)
    clocks[:] = [scheduler]
    group, peers = Group(scheduler), {}
    cause = moelink.PeerTimeoutError(rank=0, peer=-1, phase="init", call=0, expected=0, got=None)

    def main(rank: int) -> Callable[[], None]:
        def run() -> None:
            ep, d = group.communicator(rank), FEW[0].data(rank)
            if rank == 0:
                peers[rank] = end_outside_calls(ep, cause).peer
                return
            with pytest.raises(moelink.PeerTimeoutError) as told:
                ep.lane(1).dispatch(d.x, d.topk_ids)
            peers[rank] = told.value.peer

        return run

    with torch.no_grad():
        scheduler.run([main(rank) for rank in range(WORLD)])
    assert peers == dict.fromkeys(range(WORLD), -1)


@pytest.mark.quick("all ranks were in the call when one asked, and it named the first")
def test_a_late_rank_that_has_come_is_taken_for_no_other() -> None:
    ranks, said = run_collective(114, Fault.draw(114, WORLD, PLACES), TURNS)
    assert check_collective(ranks, said, len(TURNS), Oracle()) == "ended"
    assert {each.error.peer for each in said if each.error is not None} == {-1}


@seeds(8, 200)
def test_calls_of_two_lanes_over_a_wire_of_which_a_rank_is_hit(seeds: Any) -> None:
    oracle, seen = Oracle(), Counter()
    for seed in seeds:
        ranks, said = run_collective(seed, Fault.draw(seed, WORLD, PLACES), TURNS)
        seen[check_collective(ranks, said, len(TURNS), oracle), ranks.fault.kind] += 1
        seen["hit"] += ranks.hit
    print(seen)
    assert seen["hit"] > 3 * len(seeds) // 4, seen
    assert all(seen["ended", kind] for kind in KINDS if kind in ("killed", "stopped")), seen
