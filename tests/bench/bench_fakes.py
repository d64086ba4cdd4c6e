"""A contender that only notes how it is called, and a CUDA device that is not there, with a clock for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from moelink_bench.contenders import Calls


class NotingContender(Calls):
    """Notes the order of calls."""

    name, note, kernel_prefix = "noting", "nothing", "ep_"

    def __init__(self, *, capturable: bool = True, alternates: bool = False) -> None:
        self.capturable, self.alternates = capturable, alternates
        self.calls: list[tuple[str, int]] = []

    def dispatch(self, copy: int) -> int:
        self.calls.append(("dispatch", copy))
        return copy

    def combine(self, copy: int, handle: int) -> int:
        assert copy == handle
        self.calls.append(("combine", copy))
        return copy

    def check(self) -> str:
        return ""

    def close(self) -> None:
        return None


class FakeDevice:
    """Graphs of work whose time is known.

    Attributes:
        now: microseconds since the start.
        log: what the host did: "align", "replay", "wait".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 0.0, []
        self.busy = False
        self.capturing: FakeGraph | None = None
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(self, **options))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)

    @contextmanager
    def capture(self, graph: FakeGraph, *, capture_error_mode: str) -> Iterator[None]:
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None

    def synchronize(self, device: torch.device) -> None:
        self.log.append("wait")
        self.busy = False


class FakeGraph:
    """Nodes that take the number of the replay."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.replays = device, 0
        self.nodes: list[Callable[[int], None]] = []

    def replay(self) -> None:
        self.device.log.append("replay")
        self.device.busy = True
        self.replays += 1
        for node in self.nodes:
            node(self.replays)


class FakeEvent:
    """Can be recorded in a capture only, and read only when the device has nothing left to do."""

    def __init__(self, device: FakeDevice, *, enable_timing: bool, external: bool) -> None:
        assert enable_timing
        assert external
        self.device, self.time = device, float("nan")

    def record(self, stream: object) -> None:
        def stamp(_: int) -> None:
            self.time = self.device.now

        self.device.capturing.nodes.append(stamp)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds."""
        assert not self.device.busy
        return (end.time - self.time) / 1e3


class TakingContender(NotingContender):
    """In a graph's replay number n, dispatch of copy c takes c + 1 + 10 n us, combine 2 (c + 1) + 100 n us."""

    def __init__(self, device: FakeDevice, **options: bool) -> None:
        super().__init__(**options)
        self._device = device

    def dispatch(self, copy: int) -> int:
        self._takes(copy + 1, 10)
        return super().dispatch(copy)

    def combine(self, copy: int, handle: int) -> int:
        self._takes(2 * (copy + 1), 100)
        return super().combine(copy, handle)

    def _takes(self, base: int, each: int) -> None:
        def run(replay: int) -> None:
            self._device.now += base + each * replay

        if self._device.capturing is not None:
            self._device.capturing.nodes.append(run)


class FakeClock:
    """Every step takes 3 us; aligning takes 7 us of the device's time, which are nobody's."""

    device = torch.device("cuda", 0)

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def align(self) -> None:
        self._device.log.append("align")
        self._device.now += 7

    def measure(self, action: object, *, samples: int, warmup: int) -> list[float]:
        return [sum(steps) for steps in self.measure_steps([action], samples=samples, warmup=warmup)]

    def measure_steps(self, steps: list, *, samples: int, warmup: int) -> list[list[float]]:
        for step in steps:
            step()
        return [[3.0] * len(steps) for _ in range(samples)]
