"""Measure every pair of ranks: its connection, link and speed.

Pairs are measured in rounds (the circle method for tournaments): in a round every rank is in one pair at most, so that
no pair waits for another, and pairs compete only for links that a node shares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moelink.control.process import await_release

PINGS = 20
REPEATS = 3
BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Bytes of a message by which bandwidth is measured."""

NVLINK_GB_PER_S = {"H100": 450.0, "H200": 450.0, "H800": 200.0, "A100": 300.0, "A800": 200.0, "B200": 900.0}
"""Nominal rate of a device's NVLink in one direction, by a word of its name."""


@dataclass(frozen=True)
class Pair:
    """The measurement of two ranks, ``first`` below ``second``.

    Attributes:
        latency_us: half of a round trip of 8 bytes, the median of several.
        gb_per_s: 10**9 bytes a second of a large message, the slower one of both directions, each the best of several.
        samples: how often the pair was measured; more than once if it looked slow.
    """

    first: int
    second: int
    latency_us: float
    gb_per_s: float
    samples: int = 1

    def better(self, other: Pair) -> Pair:
        """Return the best of two measurements of one pair: the lower latency, the higher rate."""
        latency, rate = min(self.latency_us, other.latency_us), max(self.gb_per_s, other.gb_per_s)
        return Pair(self.first, self.second, latency, rate, self.samples + other.samples)


class Wire(Protocol):
    """Sends and receives between two ranks. Calls return when the tensor may be used again."""

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send ``tensor`` to ``peer``."""

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Receive into ``tensor`` from ``peer``."""


class GroupWire:
    """A wire over torch's default process group: gloo on CPUs, NCCL on CUDA devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        dist.send(tensor, peer)
        self._end()

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        dist.recv(tensor, peer)
        self._end()

    def _end(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of all ranks in rounds in which no rank comes twice.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = [*range(world_size), *([-1] if world_size % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append(sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def measure(wire: Wire, rank: int, peer: int, device: torch.device) -> Pair:
    """Measure the pair of ``rank`` and ``peer``; both call it at the same time; each returns its own measurement."""
    first = rank < peer
    small = torch.zeros(8, dtype=torch.uint8, device=device)
    large = torch.zeros(BYTES[device.type], dtype=torch.uint8, device=device)
    trips, ways = [], [0.0, 0.0]
    for _ in range(PINGS + 1):
        trips.append(_timed_trip(wire, small, small, peer, first))
    for _ in range(REPEATS):
        for way in range(2):  # the large message goes there, then back; the small one confirms it
            there, back = (large, small) if way == 0 else (small, large)
            seconds = _timed_trip(wire, there, back, peer, first)
            ways[way] = max(ways[way], large.nbytes / seconds / 1e9)
    await_release([small, large])
    return Pair(min(rank, peer), max(rank, peer), 1e6 * statistics.median(trips[1:]) / 2, min(ways))


def _timed_trip(wire: Wire, there: torch.Tensor, back: torch.Tensor, peer: int, first: bool) -> float:
    """Send ``there`` and receive ``back``, or the other way round; seconds of the whole trip."""
    start = time.perf_counter()
    if first:
        wire.send(there, peer)
        wire.receive(back, peer)
    else:
        wire.receive(there, peer)
        wire.send(back, peer)
    return time.perf_counter() - start


def link_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the link of ranks with these facts: "NVLink", "PCIe" or "memory" within a machine, else "network"."""
    if one["host"] != other["host"]:
        return "network"
    if one["device"]["kind"] == "cpu":
        return "memory"
    linked = map(str, one["device"].get("nvlinked", ()))
    return "NVLink" if other["device"]["driver"].get("index") in linked else "PCIe"


def nominal_gb_per_s(link: str, name: str) -> float | None:
    """Return the nominal rate of ``link`` for devices called ``name``, or None if it is not known."""
    if link != "NVLink":
        return None
    return next((rate for word, rate in NVLINK_GB_PER_S.items() if word in name), None)
