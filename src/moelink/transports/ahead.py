"""Compile kernels before their first launch, several at a time.

A launcher compiles a kernel when it first launches it, one after the other: a layer's first call would take minutes.
:func:`prepare` makes the launches of *steps* twice, with launchers that launch nothing. The first time they only ask
Triton for their kernels, which threads compile (``triton.AsyncCompileMode``). The second time they find them compiled,
and load them. Threads suffice: of 4 to 15 seconds of a kernel of dispatch or combine its tracing alone, 1 to 2, holds
the interpreter's lock.

Nothing is communicated. But ranks of one machine have one cache on disk, so each begins at another place of the list,
and finds there what the others have compiled when it comes to it.

Example: two kernels, of which another rank has compiled the second one, are two of :attr:`Prepared.kernels`, and one
compile.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

_log = logging.getLogger("moelink")

MOST_THREADS = 16
"""More wait for the interpreter's lock."""
QUIET = 1.0
"""Seconds without a progress line."""


class Step(Protocol):
    """Makes launches with launchers that are preparing."""

    def __call__(self, *, load: bool) -> None:
        """With ``load`` kernels are compiled, if they are not, and loaded; without it they are only asked for."""


@dataclass(frozen=True)
class Prepared:
    """Kernels that were prepared.

    Attributes:
        kernels: the name of each that this process had not compiled or loaded before, once for each of its forms.
        seconds: how long that took.
    """

    kernels: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a process compiles.

    Attributes:
        rank, ranks: its number among the processes of its machine that compile the same, and how many these are.
    """

    rank: int = 0
    ranks: int = 1

    @property
    def threads(self) -> int:
        """Threads of this process: its share of the processors."""
        return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // self.ranks))

    def first(self, jobs: int) -> int:
        """The job to begin with: of 6 jobs on 3 ranks 0, 2 and 4."""
        return self.rank * jobs // self.ranks


@dataclass
class _Jobs(Executor):
    """Keeps what is submitted, until it is started in an order of our own."""

    kept: list[tuple[Callable[[], Any], Future[Any]]] = field(default_factory=list)

    def submit(self, job: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        """Keep a job."""
        future: Future[Any] = Future()
        self.kept.append((job, future))
        return future

    def start(self, pool: Executor, first: int) -> None:
        """Let ``pool`` run all jobs, from that number on."""
        for job, future in [*self.kept[first:], *self.kept[:first]]:
            pool.submit(_settle, job, future)


def _settle(job: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 - the caller of result() raises it
        future.set_exception(error)


def prepare(steps: Sequence[Step], place: Place) -> Prepared:
    """Compile and load what ``steps`` launch.

    A line on stderr shows the progress after the first second, if stderr is a terminal, on the first rank of a machine.

    Raises: what Triton says of a kernel that cannot be compiled.
    """
    import triton  # here, as platforms without it have nothing to compile

    begin, jobs = time.monotonic(), _Jobs()
    # A kernel that cannot be compiled is compiled again below, where the error is raised.
    with ThreadPoolExecutor(place.threads) as pool, triton.AsyncCompileMode(jobs, ignore_errors=True):
        for step in steps:
            step(load=False)
        jobs.start(pool, place.first(len(jobs.kept)))
        _watch([future for _, future in jobs.kept], begin, shows=place.rank == 0 and sys.stderr.isatty())
    for step in steps:
        step(load=True)
    names = tuple(future.result().name for _, future in jobs.kept if future.exception() is None)
    prepared = Prepared(names, time.monotonic() - begin)
    if names:
        _log.info("%d kernels compiled and loaded in %.1f s", len(names), prepared.seconds)
    return prepared


def _watch(futures: Sequence[Future[Any]], begin: float, *, shows: bool) -> None:
    """Wait for ``futures``, and show how many are left."""
    shown = False
    while left := [future for future in futures if not future.done()]:
        seconds = time.monotonic() - begin
        if shows and seconds > QUIET:
            shown = True
            done = len(futures) - len(left)
            sys.stderr.write(f"\rmoelink: {done} of {len(futures)} kernels compiled, {seconds:.0f} s")
            sys.stderr.flush()
        wait(left, timeout=0.5)
    if shown:
        sys.stderr.write(f"\rmoelink: {len(futures)} kernels compiled in {time.monotonic() - begin:.0f} s\n")
