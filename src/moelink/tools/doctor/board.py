"""Let ranks tell one another what they found, over a store, in bounded time, whoever is missing.

An examination cannot rely on what it examines. A process group hangs where a port is closed; a store needs one
connection from each rank to its host. Values are JSON.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from moelink.control.stores import peek

_PAUSE_SECONDS = 0.01


class Board:
    """One rank's view of what all ranks have written.

    Args:
        store: shared by the ranks, for this examination alone.
        rank, world_size: this rank, and how many there are.
        deadline: on the monotonic clock, of all waiting together.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, deadline: float) -> None:
        self.rank, self.world_size, self.deadline = rank, world_size, deadline
        self._store = store

    def share(self, step: str, value: Any, seconds: float | None = None) -> list[Any]:
        """Write ``value`` and wait for those of all ranks.

        Args:
            step: name of the exchange; each name is used once.
            value: anything but None that JSON can hold.
            seconds: how long to wait for the others; None until the deadline.

        Returns:
            the values by rank; None for a rank that wrote none in time, or none before the store was gone.
        """
        until = self.deadline if seconds is None else min(self.deadline, time.monotonic() + seconds)
        found: dict[int, Any] = {self.rank: value}
        with suppress(RuntimeError):  # torch's: the store's host is gone
            self.write(step, value)
            while len(found) < self.world_size:
                for rank in set(range(self.world_size)) - set(found):
                    text = peek(self._store, f"{step}/{rank}")
                    if text:
                        found[rank] = json.loads(text)
                if time.monotonic() > until:
                    break
                time.sleep(_PAUSE_SECONDS)
        return [found.get(rank) for rank in range(self.world_size)]

    def write(self, step: str, value: Any) -> None:
        """Write ``value`` and wait for nobody."""
        self._store.set(f"{step}/{self.rank}", json.dumps(value))
