"""Measure the processor seconds of tests, those of the processes that they start included, and add them up by folder.

Seconds on a clock depend on what else a machine does. Processor seconds depend on how fast its processor is, and a
little on what shares its caches, so they are divided by the *pace*: how long a fixed piece of work takes meanwhile,
compared with the machine that the budgets were written on.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

_PROCESSES = Path("/proc")
_WORK, _PAGES, _CALLS = 30_000, 512, 40
_WORK_SECONDS = 0.0027
"""Processor seconds of :func:`_work` on the machine of the budgets."""
_SHORT = 0.03
"""A test of fewer seconds has started no process: forking one takes longer."""


class Clock:
    """Says how many processor seconds have passed since it was last asked."""

    def __init__(self) -> None:
        self._own, self._all, self._wall = _own_seconds(), _all_seconds(), time.monotonic()

    def lap(self) -> float:
        """Return the processor seconds since the last lap, of this process and of those that it has started."""
        wall = time.monotonic()
        own, before = _own_seconds(), self._all
        short, self._wall = wall - self._wall < _SHORT, wall
        self._all = before + own - self._own if short else _all_seconds()
        self._own = own
        return max(self._all - before, 0.0)


def _own_seconds() -> float:
    return sum(os.times()[:2])


def _all_seconds() -> float:
    """Processor seconds of this process, of the children that it has waited for, and of all that live below it."""
    total, waiting = sum(os.times()[:4]), [os.getpid()]
    children: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for name in os.listdir(_PROCESSES) if _PROCESSES.is_dir() else ():
        if name.isdigit():
            try:
                words = (_PROCESSES / name / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            ticks = sum(map(int, words[11:15]))  # its own, and those of the children that it has waited for
            children[int(words[1])].append((int(name), ticks / os.sysconf("SC_CLK_TCK")))
    while waiting:
        for child, seconds in children[waiting.pop()]:
            total += seconds
            waiting.append(child)
    return total


def pace() -> float:
    """Return how many times as long as on the machine of the budgets a fixed piece of work takes now."""
    began = time.process_time()
    _work()
    return (time.process_time() - began) / _WORK_SECONDS


def _work() -> None:
    """Do the three things that tests spend most on: Python, new pages of memory (as each fork has) and system calls.

    Two kinds of processors differed by 1.4 in the first, and not at all in the seconds of the tests.
    """
    total, names = 0, {}
    for i in range(_WORK):
        total += i ^ (total & 7)
        names[i & 63] = total
    with mmap.mmap(-1, _PAGES * mmap.PAGESIZE) as pages:
        for at in range(0, len(pages), mmap.PAGESIZE):
            pages[at] = 1
    for _ in range(_CALLS):
        Path(__file__).read_bytes()


class Costs:
    """Seconds of tests by node id, as the process that reports them learns of them."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._paces: list[float] = []

    def note(self, nodeid: str, properties: Iterable[tuple[str, object]]) -> None:
        """Take ``processor_seconds`` and ``pace`` from the properties of a report."""
        for name, value in properties:
            if name == "processor_seconds":
                self._seconds[nodeid] = float(str(value))
            elif name == "pace":
                self._paces.append(float(str(value)))

    @property
    def pace(self) -> float:
        """The median of the paces; 1 without any."""
        return statistics.median(self._paces) if self._paces else 1.0

    def by_folder(self, folder_of: Callable[[str], str]) -> dict[str, float]:
        """Return processor seconds by folder at the pace of the budgets. ``folder_of``: the folder of a node id."""
        sums: dict[str, float] = defaultdict(float)
        for nodeid, seconds in self._seconds.items():
            sums[folder_of(nodeid)] += seconds / self.pace
        return dict(sums)

    def slowest(self, count: int) -> list[tuple[float, str]]:
        """Return the ``count`` tests that took most processor seconds, and these seconds, as they were measured."""
        return sorted(((seconds, nodeid) for nodeid, seconds in self._seconds.items()), reverse=True)[:count]
