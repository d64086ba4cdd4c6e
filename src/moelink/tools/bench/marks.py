"""A CUDA graph that times its own steps: events are recorded inside it, before the first step and after every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from moelink.tools.bench.timing import Captured, Clock, capture
from moelink.tools.bench.together import host_barrier


@dataclass(frozen=True)
class Marked:
    """A graph of n steps, and the n + 1 events around them. Every replay records the same events again."""

    captured: Captured
    marks: tuple[Any, ...]

    def times(self) -> list[float]:
        """Microseconds of each step in the last replay, which must be over."""
        return [1e3 * start.elapsed_time(end) for start, end in pairwise(self.marks)]


def capture_marked(steps: Sequence[Callable[[], Any]], device: torch.device) -> Marked:
    """Capture ``steps`` into one graph with events between them; each must have run before, as for :func:`capture`.

    Raises:
        TypeError: this torch cannot record timing events in a graph.
        RuntimeError: one of the steps does what cannot be captured.
    """
    marks: list[torch.cuda.Event] = []

    def mark() -> None:
        # Events are made in here and not before, as a torch that cannot make them must not keep a rank from the
        # barrier in capture.
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(torch.cuda.current_stream(device))
        marks.append(event)

    captured = capture([mark, *(call for step in steps for call in (step, mark))], device)
    return Marked(captured, tuple(marks))


def measure_marked(marked: Marked, *, samples: int, warmup: int, clock: Clock) -> list[list[float]]:
    """For each sample the microseconds of each step in one replay, after ``warmup`` samples more.

    The host waits for every sample, to read its events before the next replay records them again. A replay that
    nobody reads is queued first: while it runs, the host gets ahead of the device, so that the replay that counts is
    queued when its ranks have come together.
    """
    torch.cuda.synchronize(clock.device)
    host_barrier()
    measured = []
    for _ in range(warmup + samples):
        for _ in range(2):
            clock.align()
            marked.captured.replay()
        torch.cuda.synchronize(clock.device)
        measured.append(marked.times())
    return measured[warmup:]
