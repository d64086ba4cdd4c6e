"""500 random fault schedules: nothing lost or duplicated in completed calls, and the survivors go on.

80 of the symmetric transport's kernels, where every store is a place to stop at; 420 of the collective transport's
steps, where every message between two ranks is one. The quick tier has the first of each.

All fault schedules of the full tier, by what ranks do and what goes wrong:

=================================================  =========  ==========================================
what                                               schedules  where
=================================================  =========  ==========================================
symmetric kernels, a rank stops or dies                   80  here
collective steps, a rank stops                           420  here
two lanes of kernels, a rank stops or dies                40  ``test_lane_schedules.py``
two lanes of the wire; dies, stops, is late, raises      200  ``test_lane_schedules.py``
nodes, the network fails                                 301  ``nodes/test_network_faults.py``
two levels, the network fails                             31  ``nodes/test_network_faults.py``
two levels, a rank stops or dies                          40  ``nodes/test_network_faults.py``
steps of a balancer; dies, stops, is late, raises        300  ``nn/test_balance_schedules.py``
a step of a balancer, an exception at each place         108  ``nn/test_balance_schedules.py``
load and save; dies, stops, is late, raises, slow        160  ``transformers/test_loading_schedules.py``
recoveries, of any of the above                         5000  ``test_recovery_schedules.py``
=================================================  =========  ==========================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moelink
from moelink.control import failure_detector as detector
from moelink.kernels.launch import constants as spec
from moelink.kernels.launch import device
from moelink.kernels.launch.constants import combine_spec
from tests.control import fault_schedules
from tests.control.fault_messages import run_messages
from tests.control.fault_schedules import WORLD, FaultScheduler, Oracle, run_schedule
from tests.support.cases import Setup
from tests.support.protocol_runs import Small
from tests.tiers import seeds

SETUP = Setup("bf16", (("max_tokens_per_rank", 3), ("hidden_size", 8)), num_experts=4, topk=2)
BEFORE = [Small(SETUP, "uniform", seed=1, tokens=(2, 1, 1))]
MORE = [Small(SETUP, "skewed", seed=2, tokens=(1, 3, 2))]
AFTER = [Small(SETUP, "uniform", seed=3, tokens=(1, 1))]
CHUNKS = [range(5), range(5, 10), *(range(first, first + 10) for first in range(10, 80, 10))]


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultScheduler]]:
    """Kernels read the clock of the scheduler in this list. Specs hold the clock, so none is kept from before."""
    running: list[FaultScheduler] = []
    monkeypatch.setattr(device, "host_clock", lambda: running[0].now)
    monkeypatch.setattr(detector, "probe_all", fault_schedules.probe_all)
    kept = (spec.dispatch_spec, combine_spec)
    for specs in kept:
        specs.cache_clear()
    yield running
    for specs in kept:
        specs.cache_clear()


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_kernels_stopped_anywhere(seeds: range, clocks: list[FaultScheduler]) -> None:
    oracle, seen = Oracle(), Counter()
    limit = device.clock_ticks(60.0, torch.device("cpu"))
    for seed in seeds:
        outcome = run_schedule(seed, BEFORE, AFTER, oracle, clocks, limit=limit)
        survivors = [rank for rank in range(WORLD) if rank != outcome.victim]
        seen["completed"] += outcome.calls[0]
        if not outcome.errors:
            assert outcome.calls == [2 * len(BEFORE) * WORLD], f"seed {seed}: calls are missing, and nobody was told"
            continue
        seen["recovered"] += 1
        assert {outcome.errors[rank].peer for rank in survivors} == {outcome.victim}, f"seed {seed}"
        assert outcome.calls[1] == 2 * len(AFTER) * len(survivors), f"seed {seed}: calls after recover are missing"
        late = {rank: outcome.waited[rank] for rank in survivors if outcome.waited[rank] > limit + 1}
        assert not late, f"seed {seed}: they waited longer than the timeout of {limit}: {late}"
        lost = {isinstance(outcome.errors[rank], moelink.PeerLostError) for rank in survivors}
        assert lost == {outcome.dies}, f"seed {seed}: whether the process is gone"
        if not outcome.dies:
            assert outcome.errors[outcome.victim].peer == outcome.victim, f"seed {seed}: it learns that it was stopped"
    assert seen["recovered"] > len(seeds) // 2, seen
    assert seen["completed"] > 0, seen


@seeds(60, 420)
def test_collective_steps_stopped_between_any_two_messages(seeds: Any) -> None:
    oracle, seen = Oracle(), Counter()
    for seed in seeds:
        outcome = run_messages(seed, [*BEFORE, *MORE], AFTER, oracle)
        if outcome.failed:
            seen["recovered"] += 1
            assert outcome.calls[1] == 2 * len(AFTER) * (WORLD - 1), f"seed {seed}: calls after recover are missing"
        else:
            # A rank that stopped in its very last call may have sent all that the others needed of it.
            assert 2 * 2 * WORLD - outcome.calls[0] in (0, 1), f"seed {seed}: calls are missing, and nobody was told"
        seen["completed"] += outcome.calls[0]
    assert seen["recovered"] > len(seeds) // 2, seen
    assert seen["completed"] > len(seeds), seen
