"""Counters in device memory by which the programs of a launch take tiles, one after the other.

If program p of P computed tiles p, p + P, ..., programs with short tiles would get ahead of their neighbours, and load
again what these load. So program p computes tile p, and then takes the next tile that nobody has: it adds 1 to word 0
of the launch's counter, finds t there, and the tile is P + t. A program that finds no such tile, or has no tile p, adds
1 to word 1. The program that finds P - 1 there sets both words to zero, for the next launch.

Why a launch leaves zeros: each of its programs adds 1 to word 1, once, and takes nothing afterwards. Its last take has
returned by then, as the number that it returned ended the program's loop. So all adds to both words have been made when
a program finds P - 1, and its zeros stay. That an atomic operation has been made when its number returns is how GPUs
work; PTX does not promise it of relaxed ones. All of these are such operations, the zeros as well (exchanges): stores
would race with the adds of other programs, which no acquire or release orders before them. Programs need not see the
same number of tiles. If ``row_offsets`` change under a product, its output is wrong and it may wait for ever, but if it
ends, the next product finds zeros.

Why no two launches use a counter at once: eager launches on one stream share one, and use it behind their wait for the
launch before them (:mod:`moelink.kernels.sync.dependent_launch`). That wait lasts until all programs of that launch
have ended, also the one that writes zeros, and shows what they wrote. A program without a tile also waits, before it
adds to word 1. A stream is known by its handle, as workspaces of torch's matrix products are; so a stream of another
library may be destroyed once its launches have ended. A graph may run beside anything but itself, so each captured call
has a counter that no other call gets; of one capture there must be one executable graph. Its 16 bytes stay taken when
the graph is gone. If a process captures so often that none are left, the graph zeroes one itself at each replay, until
an eager call has more of them made.

Example: 2 programs, 5 tiles. Program 0 ends tile 0 and takes 0, which is tile 2. Program 1 ends tile 1 and takes 1,
which is tile 3. Program 0 ends tile 2 and takes 2, which is tile 4. Program 1 takes 3: there is no tile 5, so it adds 1
to word 1, where it finds 0. Program 0 takes 4, for which there is no tile, finds 1 in word 1, and sets both words to
zero.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from triton.runtime import driver

from moelink.memory.driver import beside_captures

AT_ONCE = 1 << 15
"""Counters that are made at a time, 512 KiB. They last as long as the process."""
FEW = AT_ONCE // 4
"""An eager call has more of them made if fewer are left."""
WORDS = 4
"""Of a counter, two of which count: kernels expect addresses that are multiples of 16."""


class TileCounters:
    """The counters of a process."""

    def __init__(self) -> None:
        self._of_streams: dict[tuple[int, int], Tensor] = {}
        self._blocks: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._left: defaultdict[int, int] = defaultdict(int)
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> Tensor:
        """Return a counter for a call on the current stream of ``device``: WORDS words, int32, which are zero between
        launches."""
        index = device.index
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.of(device)
        if torch.cuda.is_current_stream_capturing():
            with self._lock:
                counter = self._take(index)
            return torch.zeros(WORDS, dtype=torch.int32, device=device) if counter is None else counter
        key = index, driver.active.get_current_stream(index)
        counter = self._of_streams.get(key)
        if counter is None or self._left[index] < FEW:
            with self._lock:
                if self._left[index] < FEW:
                    self._make(device)
                if key not in self._of_streams:
                    self._of_streams[key] = self._take(index)  # type: ignore[assignment]
            counter = self._of_streams[key]
        return counter

    def _take(self, index: int) -> Tensor | None:
        """Return a counter that no call has, or None."""
        if not self._left[index]:
            return None
        self._left[index] -= 1
        return self._blocks[index][-1][self._left[index]]

    def _make(self, device: torch.device) -> None:
        with ThreadPoolExecutor(1) as executor:
            self._blocks[device.index].append(executor.submit(_zeros, device).result())
        self._left[device.index] = AT_ONCE


def _zeros(device: torch.device) -> Tensor:
    """Return a block of counters. A thread of its own makes it, because the caller may allocate from a pool of memory
    that is given back before the process ends."""
    with beside_captures(), torch.cuda.device(device.index):
        stream, made = torch.cuda.Stream(device), torch.cuda.Event()
        with torch.cuda.stream(stream):
            block = torch.zeros(AT_ONCE, WORDS, dtype=torch.int32, device=device)
            made.record(stream)
        made.synchronize()
    return block
