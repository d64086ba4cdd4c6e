"""``init`` where the operating system gives a process little, and ``close``, which gives all of it back."""

from __future__ import annotations

import errno
import gc
import os
import resource
from pathlib import Path

import pytest

import moelink
from moelink.control.process import FILES, FILES_OF_A_MESH, naming_refusals
from moelink.testing import rank_data, run_ranks
from tests.support.fault_ranks import FIELDS, check_round_trip
from tests.support.patience import ROOMY, Mark, be_patient, until

ENOUGH = FILES + 2 * 2 * FILES_OF_A_MESH
"""Files that two ranks without a default group ask for."""


def few_files(rank: int, world_size: int, transport: str, files: int, folder: str) -> tuple[str, str]:
    """Rank 1 may open only so many more files, and then as many as it likes: the error of each ``init``."""
    be_patient()
    told = Mark(folder, "rank 0 has been told")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() - 1 + files, limits[1]))
    said: list[str] = []
    for _ in range(2):
        timeout = 3.0 if files < ENOUGH and not said else ROOMY
        try:
            with moelink.init(**FIELDS, device="cpu", transport=transport, timeout=timeout) as ep:
                check_round_trip(ep, rank)
            said.append("")
        except moelink.MoelinkError as error:
            said.append(f"{type(error).__name__} {getattr(error, 'peer', '')} {error}")
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        told.wait() if rank == 1 else told.set()
    return said[0], said[1]


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("files", [8, *(pytest.param(files, marks=pytest.mark.full("its neighbour is quick"))
                                        for files in (0, 1, 2, 4, ENOUGH - 1))])  # fmt: skip
def test_a_process_that_may_open_few_files_is_refused_and_named(transport: str, files: int, tmp_path: Path) -> None:
    (waits, again), (refused, later) = run_ranks(few_files, 2, transport, files, str(tmp_path))
    assert refused.startswith(f"UnsupportedError  init: expected that this process may open {ENOUGH} more files, got ")
    assert "raise the limit of open files (ulimit -n)" in refused
    assert waits.startswith("PeerTimeoutError 1 "), waits
    assert again == later == "", "with enough of them it works"


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_as_many_files_as_init_asks_for_are_enough(transport: str, tmp_path: Path) -> None:
    assert run_ranks(few_files, 2, transport, ENOUGH + 1, str(tmp_path)) == [("", "")] * 2


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def files_of_cycles(rank: int, world_size: int, transport: str, lanes: int) -> None:
    """Wait until as many files are open after some communicators as after the first, without the garbage collector."""
    gc.collect()
    gc.disable()
    counts = []
    d = rank_data(seed=3, rank=rank, num_tokens=3, hidden_size=16, num_experts=7, topk=2)
    for _ in range(4):
        with moelink.init(**FIELDS, device="cpu", transport=transport, lanes=lanes, timeout=60) as ep:
            x = d.x.clone().requires_grad_()
            recv = ep.dispatch(x, d.topk_ids)
            ep.combine(recv.tokens, recv).sum().backward()
        del ep, recv, x
        counts.append(open_files())
    until(lambda: open_files() <= counts[0])  # threads of gloo's and of the store's close some of theirs later
    gc.enable()


@pytest.mark.parametrize("transport, lanes", [("collective", 1), ("symmetric", 1), ("collective", 2), ("symmetric", 2)])
def test_close_gives_all_files_back(transport: str, lanes: int) -> None:
    """Closes over: a circle of references, in which sockets stay until the garbage collector comes."""
    run_ranks(files_of_cycles, 2, transport, lanes)


def test_what_the_operating_system_refuses_is_named() -> None:
    with (
        pytest.raises(moelink.UnsupportedError, match="got .*Cannot allocate memory; raise the limit that it met"),
        naming_refusals(),
    ):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
