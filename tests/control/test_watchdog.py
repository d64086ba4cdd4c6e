"""The watchdog of what knows no time limit: threads that are left behind, processes that are ended, streams."""

from __future__ import annotations

import contextvars
import re
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import moelink
from moelink.memory.nodes import watchdog
from moelink.memory.nodes.watchdog import wait_for_device, within
from moelink.testing import run_ranks
from moelink.transports.symmetric.dispatch import Dispatch
from moelink.transports.symmetric.rank import Rank
from tests.nodes.network_ranks import locked_start

NAMED = {"rank": 3, "node": 1}


def test_what_ends_in_time_returns_and_raises_as_it_is() -> None:
    seen = contextvars.ContextVar("seen", default=0)
    seen.set(5)
    assert within(20.0, "a start", lambda: seen.get() + 1, **NAMED) == 6

    def fail() -> None:
        raise RuntimeError("no network card")

    with pytest.raises(RuntimeError, match="^no network card$"):
        within(20.0, "a start", fail, **NAMED)


def test_what_blocks_for_ever_is_left_behind() -> None:
    over, threads = threading.Event(), threading.active_count()
    with pytest.raises(moelink.NetworkTimeoutError) as told:
        within(0.2, "a start", over.wait, **NAMED)
    assert str(told.value).startswith(
        "rank 3 of node 1: a start did not end: expected its end within 0.2 s, got none; start the job again"
    )
    assert (told.value.rank, told.value.node, told.value.what, told.value.seconds) == (3, 1, "a start", 0.2)
    over.set()
    while threading.active_count() > threads:
        time.sleep(0.01)


@pytest.mark.parametrize("handles", [False, True], ids=["as Python is", "with faulthandler"])
def test_what_blocks_with_the_interpreters_lock_ends_the_process(handles: bool, tmp_path: Path) -> None:
    """Before that a watchdog is called off in time, and its process lives."""
    errors = tmp_path / "errors"
    begin = time.monotonic()
    assert run_ranks(locked_start, 1, str(errors), handles, timeout=100, mortal=[0]) == [None]
    assert time.monotonic() - begin < 90
    told = errors.read_text()
    assert told.startswith("it lives\n")
    assert "moelink.NetworkTimeoutError: rank 3 of node 1: a start did not end: expected its end within 0.2 s" in told
    assert ("locked_start" in told) == handles, "where it was"


def test_a_watchdog_that_is_killed_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **how: started.append(start(*args, **how)) or started[0])

    def kill() -> str:
        started[0].kill()
        started[0].wait()
        return "started"

    assert within(20.0, "a start", kill, **NAMED) == "started"


def test_a_device_is_waited_for_until_a_failure_is_known_and_a_while_longer() -> None:
    left = [5]

    def query() -> bool:
        left[0] -= 1
        return left[0] < 0

    assert wait_for_device(query, lambda: False, 0.0)
    begin = time.monotonic()
    assert not wait_for_device(lambda: False, lambda: time.monotonic() > begin + 0.1, 0.1)
    assert time.monotonic() - begin >= 0.2


def test_a_stream_that_never_ends_is_given_up_once_a_peer_has_reported_a_failure() -> None:
    """A put waits in NVSHMEM's queue, and no kernel of this rank can write its error record."""
    reported = moelink.UndeliveredError(rank=0, peer=2, phase="combine", call=4, expected=4, node=1)
    rank = SimpleNamespace(
        _streams=lambda: [SimpleNamespace(query=lambda: False)], config=SimpleNamespace(timeout=0.1),
        workspace=SimpleNamespace(inter_node_ranks=2), poisoned=False, errors=SimpleNamespace(reported=reported),
    )  # fmt: skip
    rank._has_failed = lambda: Rank._has_failed(rank)  # type: ignore[arg-type]
    with pytest.raises(moelink.UndeliveredError, match="what rank 2 of node 1 sent in combine"):
        Rank.synchronize(rank)  # type: ignore[arg-type]
    rank.poisoned = True  # its own record says why
    Rank.synchronize(rank)  # type: ignore[arg-type]


def test_counts_that_never_come_are_not_waited_for() -> None:
    """Exact sizes between nodes: the wait is given up, and the host must not read what a hung kernel would write."""
    reported = moelink.UndeliveredError(rank=0, peer=2, phase="dispatch", call=4, expected=4, node=1)
    rank = SimpleNamespace(
        config=SimpleNamespace(node_size=2, world_size=4), synchronize=lambda: None, poisoned=True,
        error=lambda: reported,
    )  # fmt: skip
    output = SimpleNamespace(rows_in_place=None)
    call = SimpleNamespace(rank=rank, output=output, request=SimpleNamespace(host_counts=True))
    with pytest.raises(moelink.UndeliveredError, match="what rank 2 of node 1 sent in dispatch"):
        Dispatch.result(call)  # type: ignore[arg-type]


def test_the_process_imports_nothing_of_the_package() -> None:
    source = Path(watchdog.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^(from|import) moelink", source, re.MULTILINE)
