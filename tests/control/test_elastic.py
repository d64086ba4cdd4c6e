"""Ranks are masked and admitted while the others go on, in processes that die, stop and come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from moelink.testing import run_ranks
from tests.control import elastic_ranks, elastic_schedules
from tests.control.elastic_schedules import Schedule
from tests.tiers import seeds


def run(fn: Callable[..., Any], processes: int, *args: Any, **options: Any) -> list[Any]:
    """Run ``fn`` in processes that reach a store of this one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(fn, processes, store.port, *args, **options)


def run_over_devices(fn: Callable[..., Any], processes: int, *args: Any, **options: Any) -> list[Any]:
    """As :func:`run`, with blocks as those of CUDA devices."""
    return run(elastic_ranks.over_devices, processes, fn, *args, **options)


@pytest.mark.timeout(900)
@seeds(2, 420, "processes that die and come back are the point of it", part=11)
def test_every_schedule_ends_with_the_sums_of_the_experts_present(seeds: range) -> None:
    check_schedules("collective", seeds)


@pytest.mark.timeout(900)
@seeds(1, 100, "blocks are replaced on this transport alone", part=11)
def test_every_schedule_of_the_symmetric_transport(seeds: range) -> None:
    check_schedules("symmetric", seeds)


@pytest.mark.full("a minute a schedule; nodes/test_protocol_masked_nodes.py meets the same words and puts, interleaved")
@pytest.mark.timeout(3600)
@seeds(1, 14, part=7)
def test_every_schedule_between_nodes(seeds: range) -> None:
    check_schedules("nodes", seeds, timeout=300)


@pytest.mark.timeout(900)
@seeds(1, 40, "blocks of CUDA devices are mapped anew by other calls", part=10)
def test_every_schedule_over_memory_of_devices(seeds: range) -> None:
    check_schedules("symmetric", seeds, run_over_devices)


def check_schedules(transport: str, seeds: range, run: Callable[..., list[Any]] = run, timeout: float = 150) -> None:
    """Play the schedules of ``seeds``. Each process checks what it gets, and that it gets errors where it must."""
    for seed in seeds:
        schedule = Schedule(seed, transport)
        lived = run(elastic_schedules.run, schedule.processes, seed, transport, mortal=schedule.mortal, timeout=timeout)
        for process, told in enumerate(lived):
            assert (told is None) == (process in schedule.mortal), (seed, schedule.events, lived)


def test_what_cannot_be_masked_or_admitted_is_refused_by_name() -> None:
    assert run(elastic_ranks.bad_input, 4) == [True] * 4


@pytest.mark.parametrize("moment", ["building", "meeting", "before"])
def test_a_rank_that_dies_in_mask_is_named_and_masked_as_well(moment: str) -> None:
    results = run(elastic_ranks.death_in_mask, 4, moment, mortal={0, 3})
    assert results == [None, ("PeerLostError", 0), ("PeerLostError", 0), None]


each_memory = pytest.mark.parametrize("run", [run, run_over_devices])


@pytest.mark.parametrize("run, transport", [(run, "collective"), (run, "symmetric"), (run_over_devices, "symmetric")])
def test_a_newcomer_that_dies_in_admit_is_named_and_nothing_has_changed(run: Any, transport: str) -> None:
    results = run(elastic_ranks.death_in_admit, 5, transport, mortal={3})
    assert results == [("PeerLostError", 1), None, ("PeerLostError", 1), None, None]


@each_memory
def test_bound_calls_go_on_at_the_same_addresses(run: Any) -> None:
    first, _, last = run(elastic_ranks.bound_calls_stay, 3)
    assert first[:2] == last[:2] == [0, 0]
    assert first[2] == first[3]
    assert first[2] + last[2] > 0


def test_a_backward_over_a_forward_of_before_a_mask_is_refused() -> None:
    refused = 2 * ["combine (backward)", "dispatch (backward)"]
    assert run(elastic_ranks.backwards_of_before, 3) == [refused, [], refused]


@pytest.mark.parametrize(
    "run, transport, began",
    [(run, "collective", 2), (run, "symmetric", 2), (run, "symmetric", 1), (run_over_devices, "symmetric", 1)],
)
def test_a_communicator_grows_into_its_spare_ranks(run: Any, transport: str, began: int) -> None:
    results = run(elastic_ranks.grown, 4, transport, began)
    assert results == [list(range(max(began, rank + (rank >= began)), 5)) for rank in range(4)]


def test_spare_ranks_are_the_same_number_on_all_ranks() -> None:
    for mismatch, refused in run_ranks(elastic_ranks.other_spare_ranks, 2):
        assert "world_size" in mismatch
        assert all(words.startswith("spare_ranks: expected an integer >= 0, got ") for words in refused)
