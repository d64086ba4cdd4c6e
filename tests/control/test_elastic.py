"""Ranks are masked and admitted while the others go on, in processes that die, stop and come back."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from moelink.testing import run_ranks
from tests.control import elastic_schedules
from tests.control.elastic_schedules import Schedule
from tests.tiers import seeds


def play(seed: int, transport: str) -> list[list[str] | None]:
    """Run the schedule of ``seed``; return what each process lived through."""
    schedule = Schedule(seed, transport)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(
        elastic_schedules.run, schedule.processes, seed, transport, store.port, mortal=schedule.mortal, timeout=150
    )


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@seeds(2, 250, "processes that die and come back are the point of it")
def test_every_schedule_ends_with_the_sums_of_the_experts_present(transport: str, seeds: range) -> None:
    for seed in seeds:
        schedule = Schedule(seed, transport)
        lived = play(seed, transport)
        for process, told in enumerate(lived):
            assert (told is None) == (process in schedule.mortal), (seed, schedule.events, lived)
