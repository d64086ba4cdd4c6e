"""Ranks of a run: the device, group and clock of each, and how their programs are started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moelink.control.group import is_launched
from moelink.errors import ConfigError
from moelink.testing import RankFailedError, RankHungError, run_ranks
from moelink.tools.common import Progress, followed
from moelink_bench.presets import RunPlan
from moelink_bench.timing import Clock, make_clock

CALL_TIMEOUT = 60.0
"""Seconds after which a call gives up on a peer."""
ELSEWHERE = "runs in processes of its own: start the bench without a launcher"
"""Why peers take no part in a run of a launcher."""


Note = Callable[[dict[str, Any]], object]
"""Takes the document of a run that goes on, for the case that it does not end."""
Program = Callable[..., list[Any]]
"""Called as ``program(rank, world_size, plan, progress)``; returns the reports of all ranks, on each."""


@contextmanager
def joined(rank: int, kind: str, *, flush_bytes: int, timeout: float = 600.0) -> Iterator[Clock]:
    """Set this rank's device ("cuda", "cpu"), make the default group and a clock, and destroy the group at the end."""
    device = torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield make_clock(device, flush_bytes=flush_bytes)
    finally:
        dist.destroy_process_group()


def teller(rank: int, path: str) -> Callable[[str], None]:
    """Return a function that appends a line to the file ``path`` on rank 0, and does nothing if ``path`` is ""."""

    def say(message: str) -> None:
        if rank == 0 and path:
            with Path(path).open("a") as stream:
                stream.write(f"{message}\n")

    return say


def reports_of(program: Program, plan: RunPlan, progress: Progress) -> tuple[list[Any] | None, str]:
    """Run ``program`` on all ranks; return the reports, and why peers cannot run in processes of their own, or "".

    Reports are None on all ranks but 0 when a launcher (torchrun) started this process. Without one, ranks are
    processes of this call.

    Raises:
        ConfigError: the launcher started another number of ranks.
        RankFailedError, RankHungError: a rank broke or did not end in time.
    """
    if is_launched():
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ranks != plan.ranks:
            raise ConfigError("ranks", f"the launcher's WORLD_SIZE {ranks}", plan.ranks)
        reports = program(rank, ranks, plan)
        return (None if rank else reports), ELSEWHERE
    progress(f"starting {plan.ranks} ranks")
    with followed(progress) as path:
        found: Sequence[list[Any]] = run_ranks(program, plan.ranks, plan, path, timeout=plan.timeout)
    return found[0], ""


def run_apart(program: Program, plan: RunPlan) -> tuple[list[list[Any]], str]:
    """Run a peer's ``program`` in processes of its own; return what each rank returned, or why there is nothing."""
    try:
        return run_ranks(program, plan.ranks, plan, timeout=plan.timeout), ""
    except (RankFailedError, RankHungError) as error:
        return [], last_line(str(error))


def last_line(text: str) -> str:
    """Return the last line of ``text`` that is not empty: the error of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
