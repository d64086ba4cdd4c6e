"""Ranks as threads in virtual time: one thread runs at a time, and gives way where it sleeps or uses a store.

Every rank runs the real code. Time passes only when all sleep, so that a timeout of seconds costs nothing. What a
process can meet is simulated: it dies, or is stopped for a while, and so is the store that it hosts.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moelink.control.stores import BoundedError

T = TypeVar("T")

LIMIT = 400.0
"""Seconds after which a schedule counts as hanging."""
_STOPPED_SECONDS = 0.1
"""How often a stopped thread, and who waits for one, looks whether it goes on."""


class DeadError(BaseException):
    """The process of this rank is gone."""


class _Thread(threading.local):
    """What a simulated thread knows of itself."""

    process: Process | None = None
    turn: threading.Semaphore
    deadlines: list[float]


_THREAD = _Thread()


def here() -> Process:
    """Return the process of the thread that calls."""
    assert _THREAD.process is not None, "expected a simulated thread"
    return _THREAD.process


class Clock:
    """Virtual time. Threads run one at a time, in the order in which they wake."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.now, self._limit = 0.0, limit
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._back = threading.Semaphore(0)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call ``action`` at ``when``."""
        heapq.heappush(self._queue, (when, next(self._count), action))

    def start(self, process: Process, main: Callable[[], None]) -> None:
        """Run ``main`` in a thread of ``process``."""
        turn = threading.Semaphore(0)

        def run() -> None:
            _THREAD.process, _THREAD.turn, _THREAD.deadlines = process, turn, []
            turn.acquire()
            try:
                main()
            finally:
                self._back.release()

        threading.Thread(target=run, daemon=True).start()
        self.at(self.now, lambda: self._resume(turn))

    def sleep(self, seconds: float) -> None:
        """Let others run, and time pass, in a thread that :meth:`start` made."""
        turn = _THREAD.turn
        self.at(self.now + seconds, lambda: self._resume(turn))
        self._back.release()
        turn.acquire()

    def _resume(self, turn: threading.Semaphore) -> None:
        turn.release()
        self._back.acquire()

    def run(self) -> bool:
        """Run until nothing is left to do: True; False if that takes longer than the limit."""
        while self._queue and self.now < self._limit:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return not self._queue


@dataclass
class Life:
    """When a process dies, and when it is stopped and for how long."""

    dies: float = math.inf
    stops: float = math.inf
    stopped_for: float = 0.0

    def is_dead(self, now: float) -> bool:
        """Whether it has died."""
        return now >= self.dies

    def is_stopped(self, now: float) -> bool:
        """Whether it lives and is stopped."""
        return self.stops <= now < min(self.stops + self.stopped_for, self.dies)


class Process:
    """The process of one rank, as its threads use it.

    Attributes:
        rank: its number.
        clock: of all ranks.
        life: its own.
        choice: what draws how long things take.
    """

    def __init__(self, clock: Clock, rank: int, life: Life, choice: random.Random) -> None:
        self.clock, self.rank, self.life, self.choice = clock, rank, life, choice

    @property
    def is_dead(self) -> bool:
        """Whether it has died by now."""
        return self.life.is_dead(self.clock.now)

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped now."""
        return self.life.is_stopped(self.clock.now)

    def start(self, main: Callable[[], None]) -> None:
        """Run ``main`` in a thread of this process, which ends when that dies."""

        def run() -> None:
            with suppress(DeadError):
                main()

        self.clock.start(self, run)

    def now(self) -> float:
        """Return the time."""
        return self.clock.now

    def sleep(self, seconds: float) -> None:
        """Sleep in a thread of this process, which may be stopped or die meanwhile.

        Raises:
            BoundedError: in :meth:`bounded`, at its deadline.
        """
        end, deadlines = self.now() + seconds, _THREAD.deadlines
        if deadlines and end > deadlines[-1]:
            self._pass(max(deadlines[-1] - self.now(), 0.0))
            raise BoundedError
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        while self.is_stopped:
            self.clock.sleep(_STOPPED_SECONDS)
        self.woken()

    def woken(self) -> None:
        """What happens to a thread that goes on. Raises DeadError if the process has died."""
        if self.is_dead:
            raise DeadError

    def bounded(self, call: Callable[[], T], deadline: float) -> T:
        """As :func:`moelink.control.stores.bounded`."""
        _THREAD.deadlines.append(deadline)
        try:
            return call()
        finally:
            _THREAD.deadlines.pop()

    def reaches(self, host: Process) -> bool:
        """Whether the network carries anything between the two."""
        return True

    def ask(self, host: Process | None) -> None:
        """Wait for an answer of a store of ``host``: without end if that is stopped or cut off. None: it always lives.

        Raises:
            RuntimeError: the host is dead.
        """
        self.sleep(self.choice.uniform(0, 0.003))
        while host is not None and (host.is_stopped or not self.reaches(host)):
            self.sleep(2 * _STOPPED_SECONDS)
        if host is not None and host.is_dead:
            raise RuntimeError("connection reset")


@dataclass
class Store:
    """A store in the process ``host``. None: in that of a launcher."""

    host: Process | None
    values: dict[str, bytes] = field(default_factory=dict)


class StoreClient:
    """What the process ``user`` sees of a store, under a prefix."""

    def __init__(self, prefix: str, user: Process, store: Store) -> None:
        self.prefix, self.store, self._user = prefix, store, user

    def set(self, key: str, value: str | bytes) -> None:
        """As of torch's stores."""
        self._user.ask(self.store.host)
        self.store.values[f"{self.prefix}/{key}"] = _bytes(value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As of torch's stores, where nobody replaces a value by another one."""
        self._user.ask(self.store.host)
        if not expected:
            return self.store.values.setdefault(f"{self.prefix}/{key}", _bytes(desired))
        return self.store.values.get(f"{self.prefix}/{key}", _bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        """As of torch's stores."""
        self._user.ask(self.store.host)
        return all(f"{self.prefix}/{key}" in self.store.values for key in keys)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def prefixed(prefix: str, bound: tuple[Process, Store]) -> Any:
    """Stand for torch's PrefixStore of what a process has reached."""
    return StoreClient(prefix, *bound)
