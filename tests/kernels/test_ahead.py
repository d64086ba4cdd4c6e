"""Kernels that are compiled before their first launch: by threads, each process its share first."""

import sys
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from moelink.transports import ahead
from moelink.transports.ahead import Place
from tests.support.processes import run_compiled


def test_kernels_are_compiled_by_threads_and_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = run_compiled("tests.kernels.ahead_aot")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2


def test_ranks_of_a_machine_begin_at_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [Place(rank, 3).first(6) for rank in range(3)] == [0, 2, 4]
    jobs, ran = ahead._Jobs(), []
    for number in range(6):
        jobs.submit(lambda number=number: ran.append(number))  # type: ignore[misc]

    class Inline(Executor):
        def submit(self, job: Any, *given: Any) -> Any:  # type: ignore[override]
            job(*given)

    jobs.start(Inline(), Place(2, 3).first(6))
    assert ran == [4, 5, 0, 1, 2, 3]
    monkeypatch.setattr("moelink.transports.ahead.os.sched_getaffinity", lambda _: range(64))
    assert [Place(0, ranks).threads for ranks in (1, 8, 100)] == [16, 8, 1]


class Terminal:
    def __init__(self, terminal: bool) -> None:
        self.said, self.terminal = "", terminal

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        """Show it, at once."""

    def write(self, text: str) -> None:
        self.said += text


@pytest.mark.parametrize(
    ("terminal", "rank", "quiet"), [(True, 0, 0.0), (True, 1, 0.0), (False, 0, 0.0), (True, 0, 9.0)]
)
def test_progress_is_one_line_on_a_terminal(
    terminal: bool, rank: int, quiet: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, and of the first rank of a machine alone."""
    screen, future = Terminal(terminal), Future()  # type: ignore[var-annotated]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(ahead, "QUIET", quiet)
    monkeypatch.setattr(ahead, "wait", lambda left, timeout: future.set_result(None))
    ahead._watch([future], time.monotonic() - 2.0, shows=rank == 0 and screen.isatty())
    shown = terminal and rank == 0 and not quiet
    assert screen.said.count("\n") == shown
    assert (
        screen.said.startswith("\rmoelink: 0 of 1 kernels compiled, 2 s\rmoelink: 1 kernels compiled in 2 s") == shown
    )
