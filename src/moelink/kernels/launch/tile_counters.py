"""Counters in device memory by which the programs of a launch take tiles, one after the other.

If program p of P computed tiles p, p + P, ..., programs with short tiles would get ahead of their neighbours, and load
again what these load. So program p computes tile p, and then takes the next tile that nobody has: it adds 1 to the
launch's counter, finds t there, and the tile is P + t. Each tile that ends takes one number, so a launch of n tiles
takes 0 to n - 1, and the program that takes n - 1 sets the counter to zero again, for the next launch.

Why no two launches use a counter at once: eager launches on one stream share one, and use it behind their wait for the
launch before them (:mod:`moelink.kernels.sync.dependent_launch`). A graph may run beside anything but itself, so each
captured call has a counter that no other call gets. Its 16 bytes stay taken when the graph is gone.

Example: 2 programs, 5 tiles. Program 0 ends tile 0 and takes 0, which is tile 2. Program 1 ends tile 1 and takes 1,
which is tile 3. Program 0 ends tile 2 and takes 2, which is tile 4. Program 1 takes 3: there is no tile 5. Program 0
takes 4, the last number, and sets the counter to zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from triton.runtime import driver

AT_ONCE = 1 << 15
"""Counters that are made at a time, 512 KiB."""
WORDS = 4
"""Of a counter, the first of which counts: kernels expect addresses that are multiples of 16."""


class TileCounters:
    """The counters of a process."""

    def __init__(self) -> None:
        self._of_streams: dict[tuple[int, int], Tensor] = {}
        self._made: dict[int, tuple[Tensor, Iterator[int]]] = {}

    def of(self, device: torch.device) -> Tensor:
        """Return a counter for a call on the current stream of ``device``: WORDS words, int32, which are zero between
        launches.

        A captured call gets one of its own. If none is left, the graph makes it, at each replay.
        """
        index = device.index
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.of(device)
        if torch.cuda.is_current_stream_capturing():
            counter = self._next(index)
            return torch.zeros(WORDS, dtype=torch.int32, device=device) if counter is None else counter
        key = index, driver.active.get_current_stream(index)
        counter = self._of_streams.get(key)
        if counter is None:
            counter = self._next(index)
            if counter is None:
                self._make(device)
                counter = self._next(index)
                assert counter is not None
            self._of_streams[key] = counter
        return counter

    def _next(self, index: int) -> Tensor | None:
        """Return a counter that no call has, or None."""
        if index not in self._made:
            return None
        counters, numbers = self._made[index]
        number = next(numbers)
        return counters[number] if number < len(counters) else None

    def _make(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)  # for whose end nothing else is waited
        with torch.cuda.stream(stream):
            counters = torch.zeros(AT_ONCE, WORDS, dtype=torch.int32, device=device)
        stream.synchronize()
        self._made[device.index] = counters, itertools.count()
