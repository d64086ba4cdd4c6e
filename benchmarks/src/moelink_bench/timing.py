"""Clocks, CUDA graphs and figures: how long calls take, aligned over ranks and with a cold cache.

A CUDA sample is, in one stream and without the host waiting in between: a write larger than the second-level cache, an
all-reduce of one element (no rank goes on before all have come), an event, the calls, an event. The host runs ahead of
the device, so that a replayed graph is already queued when its turn comes.

A figure is made of the slowest rank of each sample: its median, its percentiles, and the skew between ranks.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from moelink.control.values import gather_values
from moelink.errors import MoelinkError

T = TypeVar("T")
K = TypeVar("K")


def host_barrier() -> None:
    """Make the hosts of all ranks wait for one another (with a CPU tensor, so that no device takes part)."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


everyone = gather_values
"""Of every rank, by rank."""


def attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of ``action``; None and the first reason on every rank when it failed on any. Collective."""
    result, reason = None, ""
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever a contender raises becomes the reason of its row
        reason = str(error) if isinstance(error, MoelinkError) else f"{type(error).__name__}: {error}".rstrip(": ")
    first = next((said for said in everyone(reason) if said), "")
    return (None, first.splitlines()[0][:300]) if first else (result, "")


def first_fault(fault: str) -> str:
    """Return the first rank's ``fault`` that is not "", with its rank, or "". Collective."""
    return next((f"rank {rank}: {said}" for rank, said in enumerate(everyone(fault)) if said), "")


@dataclass(frozen=True)
class Figure:
    """Microseconds per call of the slowest rank.

    Attributes:
        median, p20, p80: over the samples.
        skew: median over the samples of (slowest rank - fastest rank).
        samples: how many there were.
    """

    median: float
    p20: float
    p80: float
    skew: float
    samples: int


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> Figure:
    """Return the figure of ``by_rank[rank][sample]``, microseconds. Sample i is the same event on all ranks.

    Example: ranks [10, 20, 30] and [12, 18, 60]: the slowest took 12, 20 and 60, so the median is 20, the 20th and 80th
    percentiles (interpolated) are 15.2 and 44, and the skew, the median of 2, 2 and 30, is 2.

    Raises:
        ValueError: there is no sample, or ranks have different numbers of them.
    """
    lengths = {len(samples) for samples in by_rank}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"every rank needs the same number of samples, at least one, got {sorted(lengths)}")
    columns = list(zip(*by_rank, strict=True))
    slowest = [max(column) for column in columns]
    low, middle, high = (float(value) for value in np.percentile(slowest, (20, 50, 80)))
    skew = statistics.median(max(column) - min(column) for column in columns)
    return Figure(median=middle, p20=low, p80=high, skew=float(skew), samples=len(slowest))


Action = Callable[[], object]


class Clock(ABC):
    """Measures actions on one rank; all ranks must measure the same ones in the same order."""

    device: torch.device

    @abstractmethod
    def align(self) -> None:
        """Make what follows start at the same time on all ranks."""

    @abstractmethod
    def measure_steps(self, steps: Sequence[Action], *, samples: int, warmup: int) -> list[list[float]]:
        """Return for each of ``samples`` the microseconds of each of ``steps``, which run one after the other.

        ``warmup`` more samples come first.
        """

    def measure(self, action: Action, *, samples: int, warmup: int) -> list[float]:
        """Return the microseconds of each of ``samples`` runs of ``action``, after ``warmup`` more."""
        return [sum(steps) for steps in self.measure_steps([action], samples=samples, warmup=warmup)]


class WallClock(Clock):
    """The host's time, for CPUs. Ranks start each sample together."""

    now: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def align(self) -> None:
        host_barrier()

    def measure_steps(self, steps: Sequence[Action], *, samples: int, warmup: int) -> list[list[float]]:
        measured = []
        for _ in range(warmup + samples):
            self.align()
            times = [self.now()]
            for step in steps:
                step()
                times.append(self.now())
            measured.append([1e6 * (end - start) for start, end in pairwise(times)])
        return measured[warmup:]


class ProcessorClock(WallClock):
    """Processor time of this process: what calls cost the host. A CUDA device is idle when a sample starts."""

    now = staticmethod(time.process_time)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def align(self) -> None:
        """See :class:`Clock`. Of one rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class CudaClock(Clock):
    """Events on the current stream of ``device``.

    ``flush_bytes`` are written before each sample; the default process group, if there is one, needs a backend for
    ``device``.
    """

    def __init__(self, device: torch.device, *, flush_bytes: int) -> None:
        self.device = device
        self._flush = torch.empty(max(1, flush_bytes), dtype=torch.uint8, device=device)
        self._token = torch.zeros(1, device=device)

    def align(self) -> None:
        """See :class:`Clock`. Queued on the device; the host does not wait."""
        self._flush.zero_()
        if dist.is_initialized():
            dist.all_reduce(self._token)

    def measure_steps(self, steps: Sequence[Action], *, samples: int, warmup: int) -> list[list[float]]:
        torch.cuda.synchronize(self.device)
        host_barrier()
        recorded = []
        for _ in range(warmup + samples):
            self.align()
            events = [self._record()]
            for step in steps:
                step()
                events.append(self._record())
            recorded.append(events)
        torch.cuda.synchronize(self.device)
        return [[1e3 * start.elapsed_time(end) for start, end in pairwise(events)] for events in recorded[warmup:]]

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def make_clock(device: torch.device, *, flush_bytes: int) -> Clock:
    """Return the clock for ``device``, on CUDA :class:`CudaClock` with ``flush_bytes``, else the host's."""
    return CudaClock(device, flush_bytes=flush_bytes) if device.type == "cuda" else WallClock()


def repeated(call: Action, times: int) -> Action:
    """Return an action that makes ``call`` so many times."""

    def repeat() -> None:
        for _ in range(times):
            call()

    return repeat


@dataclass(frozen=True, kw_only=True)
class Turns:
    """How often actions take turns: ``turns`` times ``samples`` each, after ``warmup`` more in each turn, and after
    ``dropped`` whole turns."""

    turns: int
    samples: int = 1
    warmup: int = 0
    dropped: int = 0


def in_turns(
    actions: Mapping[K, Action],
    clock: Clock,
    how: Turns,
    around: Callable[[K], AbstractContextManager[Any]] | None = None,
) -> dict[K, list[float]]:
    """Return the microseconds of each action's samples. They take turns, so that a clock that falls meets all of them.

    ``around``: the context of each action's turn, by its name.
    """
    taken: dict[K, list[float]] = {name: [] for name in actions}
    for turn in range(how.dropped + how.turns):
        for name, action in actions.items():
            with around(name) if around else nullcontext():
                found = clock.measure(action, samples=how.samples, warmup=how.warmup)
            if turn >= how.dropped:
                taken[name] += found
    return taken


@dataclass(frozen=True)
class Captured:
    """A CUDA graph, and what the captured calls returned: their memory belongs to the graph.

    Attributes:
        marks: events before the first call and after every one, where the graph has them; every replay records the same
            events again.
    """

    graph: Any
    results: list[Any] = field(default_factory=list)
    marks: Sequence[Any] = ()

    def replay(self) -> None:
        """Queue the captured calls."""
        self.graph.replay()

    def times(self) -> list[float]:
        """Return the microseconds between marks in the last replay, which must be over."""
        return [1e3 * start.elapsed_time(end) for start, end in pairwise(self.marks)]


def capture(calls: Sequence[Callable[[], Any]], device: torch.device) -> Captured:
    """Capture ``calls`` into one graph; each must have run before, so that nothing is compiled or made in the capture.

    Only what this thread does is checked: threads of communication libraries go on querying their events.

    Raises:
        RuntimeError: one of the calls does what cannot be captured.
    """
    torch.cuda.synchronize(device)
    host_barrier()
    stream = torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = [call() for call in calls]
    finally:
        torch.cuda.set_stream(stream)  # a capture that fails may leave its own stream behind
    return Captured(graph, results)


@dataclass(frozen=True)
class KernelTimes:
    """Device time of kernels in one profiled run.

    Attributes:
        microseconds: per call where every call launched equally many kernels, else one entry: the mean.
        names: the kernels that were counted.
    """

    microseconds: list[float]
    names: tuple[str, ...]


def kernel_times(action: Action, *, calls: int, prefix: str, clock: Clock) -> KernelTimes | None:
    """Return device time of the kernels of ``action``, which makes ``calls`` calls; None when none are seen.

    Args:
        prefix: only kernels whose names start with it count ("" for all but memory copies and fills; ranks are then
            aligned by their hosts alone, as aligning devices takes kernels too).
    """
    # torch 2.11 warns of what happens after a first cycle unless events accumulate; there is one cycle here.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        host_barrier()  # starting a profiler takes longer on some ranks than on others
        if prefix:
            clock.align()
        action()
        torch.cuda.synchronize(clock.device)
    spans = [
        (float(event.time_range.start), float(event.time_range.elapsed_us()), str(event.name))
        for event in profile.events() or []
        if event.device_type == DeviceType.CUDA and _is_kernel(event, prefix)
    ]
    return kernel_times_of(sorted(spans), calls=calls)


def _is_kernel(event: Any, prefix: str) -> bool:
    """Return whether an event is a kernel: marked ranges, copies and fills appear on the device too."""
    name = str(event.name)
    if prefix:
        return name.startswith(prefix)
    others = ("Mem", "Context Sync", "Event Sync", "Stream ", "nccl:", "ProfilerStep")
    return not getattr(event, "is_user_annotation", False) and not name.startswith(others)


def short_name(name: str) -> str:
    """Shorten a kernel's name: drop its result type, template arguments and parameters, which take a page.

    Example: "void at::native::fill<int, 4>(long, F)" is "at::native::fill".
    """
    return name.removeprefix("void ").split("<")[0].split("(")[0]


def kernel_times_of(spans: Sequence[tuple[float, float, str]], *, calls: int) -> KernelTimes | None:
    """Sum (start, microseconds, name), in order of start, to times per call.

    Example: 4 kernels of 1, 2, 3, 4 us in 2 calls: the calls took 3 and 7.
    """
    if not spans:
        return None
    names = tuple(dict.fromkeys(short_name(name) for _, _, name in spans))
    times = [time for _, time, _ in spans]
    if len(times) % calls:
        return KernelTimes([sum(times) / calls], names)
    each = len(times) // calls
    return KernelTimes([sum(times[i * each : (i + 1) * each]) for i in range(calls)], names)


def capture_marked(steps: Sequence[Callable[[], Any]], device: torch.device) -> Captured:
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
    return replace(captured, marks=marks)


def measure_marked(marked: Captured, *, samples: int, warmup: int, clock: Clock) -> list[list[float]]:
    """Return for each sample the microseconds of each step in one replay, after ``warmup`` more samples.

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
            marked.replay()
        torch.cuda.synchronize(clock.device)
        measured.append(marked.times())
    return measured[warmup:]
