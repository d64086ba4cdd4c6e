"""Clock, probe servers and store, injected into a recovery.

:mod:`moelink.control.recovery` reaches all of it through :class:`Surroundings`, so that the same code runs between
processes and, in the tests, in virtual time over a simulated network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World, meet
from moelink.control.probe import read_proposal
from moelink.control.stores import bounded, reach, serve

T = TypeVar("T")


class Surroundings(Protocol):
    """One rank's view of the world. ``rank`` is its number in the old communicator."""

    rank: int

    def now(self) -> float:
        """Return the time in seconds."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``seconds`` seconds, while this rank goes on."""

    def show(self, proposal: bytes) -> None:
        """Publish ``proposal`` at this rank's own probe server."""

    def shown(self) -> bytes:
        """Return what :meth:`show` published last."""

    def read(self, ranks: Sequence[int]) -> dict[int, bytes | int]:
        """Read what ``ranks`` publish, by rank: bytes, NO_ANSWER or GONE."""

    def serve(self, timeout: float) -> tuple[Any, int]:
        """Open a store; return it and its port."""

    def reach(self, host: int, port: int, deadline: float, timeout: float) -> Any:
        """Connect to the store that rank ``host`` serves. Raises RuntimeError."""

    def bounded(self, call: Callable[[], T], deadline: float) -> T:
        """Return what ``call`` returns, or raise BoundedError at ``deadline``."""

    def meet(self, store: Any, rank: int, world_size: int, timeout: float, deadline: float) -> World:
        """Meet the ranks that share ``store``. Raises PeerTimeoutError."""


class ProcessSurroundings:
    """The world around a process: the clock of the machine, sockets, torch's stores."""

    def __init__(self, detector: FailureDetector) -> None:
        """``detector`` is that of the old communicator."""
        self.rank = detector.rank
        self._detector = detector

    def now(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` in a thread that does not keep the process alive."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    def show(self, proposal: bytes) -> None:
        """Publish ``proposal`` at this rank's own probe server."""
        self._detector.probe_server.proposal = proposal

    def shown(self) -> bytes:
        """Return the data that this rank's probe server publishes."""
        return self._detector.probe_server.proposal

    def read(self, ranks: Sequence[int]) -> dict[int, bytes | int]:
        """Ask the probe servers of ``ranks``, all at once. Takes at most about half a second."""
        if not ranks:
            return {}
        addresses = [self._detector.addresses[rank] for rank in ranks]
        with ThreadPoolExecutor(max_workers=min(64, len(ranks))) as pool:
            return dict(zip(ranks, pool.map(read_proposal, addresses), strict=True))

    def serve(self, timeout: float) -> tuple[Any, int]:
        """Open a store on the interface of this rank's probe server."""
        store = serve(self._detector.addresses[self.rank].host, timeout)
        return store, store.port

    def reach(self, host: int, port: int, deadline: float, timeout: float) -> Any:
        """Connect to the store that rank ``host`` serves."""
        return bounded(lambda: reach(self._detector.addresses[host].host, port, deadline, timeout), deadline)

    def bounded(self, call: Callable[[], T], deadline: float) -> T:
        """Return what ``call`` returns; it runs in a thread that can be left behind."""
        return bounded(call, deadline)

    def meet(self, store: Any, rank: int, world_size: int, timeout: float, deadline: float) -> World:
        """Meet as at ``init``. The lowest rank hosts the store."""
        return meet(store, rank, world_size, timeout, deadline=deadline, host_rank=0)
