"""One contender on one rank: every phase, by every method that it allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moelink.bench.contenders import Contender
from moelink.bench.presets import Settings
from moelink.bench.timing import Action, Captured, Clock, capture, kernel_times
from moelink.bench.together import attempt, everyone

Phase = Literal["dispatch", "combine", "both"]
PHASES: tuple[Phase, ...] = ("dispatch", "combine", "both")


@dataclass(frozen=True)
class PhaseSamples:
    """One rank's samples of one phase, microseconds per call; empty where a method was not used.

    Attributes:
        graph: replays of a CUDA graph of many calls.
        eager: calls made one by one (events on CUDA, wall-clock time on CPUs).
        kernel: device time of the kernels of each call.
        kernels: names of those kernels.
        note: why a method was not used, or "".
    """

    graph: tuple[float, ...] = ()
    eager: tuple[float, ...] = ()
    kernel: tuple[float, ...] = ()
    kernels: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """What one rank measured of one contender.

    Attributes:
        phases: by phase.
        pairs: the graph of dispatches, each followed by its combine, or None without one.
    """

    phases: Mapping[Phase, PhaseSamples]
    pairs: Captured | None = None


def measure_contender(
    contender: Contender, *, copies: int, settings: Settings, clock: Clock, warm: bool = False
) -> Measured:
    """Measure all phases. Collective: all ranks measure the same contender.

    Combine is measured on handles of earlier dispatches of the same inputs. A method that fails on the way raises.
    ``warm``: every input has been dispatched and combined before.
    """
    if contender.alternates:
        return _alternating(contender, copies, settings, clock)
    handles = [contender.dispatch(copy) for copy in range(copies)]
    if not warm:
        for copy, handle in enumerate(handles):
            contender.combine(copy, handle)
    calls: dict[Phase, Callable[[int], Any]] = {
        "dispatch": contender.dispatch,
        "combine": lambda copy: contender.combine(copy, handles[copy]),
        "both": lambda copy: contender.combine(copy, contender.dispatch(copy)),
    }
    phases: dict[Phase, PhaseSamples] = {}
    captured = None
    for phase, call in calls.items():
        phases[phase], captured = _measure_phase(contender, call, copies, settings, clock)
    return Measured(phases, captured)


def _measure_phase(
    contender: Contender, call: Callable[[int], Any], copies: int, settings: Settings, clock: Clock
) -> tuple[PhaseSamples, Captured | None]:
    calls, samples = _amount(contender, settings)

    def eager() -> None:
        for index in range(calls):
            call(index % copies)

    by_eager = _per_call(clock.measure(eager, samples=samples, warmup=min(1, settings.warmup)), calls)
    captured, note = _capture(contender, [lambda i=index: call(i % copies) for index in range(calls)], clock)  # type: ignore[misc]
    if captured is None:
        return PhaseSamples((), by_eager, *_kernels(contender, [eager], calls, clock), note), None
    by_graph = _per_call(clock.measure(captured.replay, samples=samples, warmup=settings.warmup), calls)
    return PhaseSamples(by_graph, by_eager, *_kernels(contender, [captured.replay, eager], calls, clock)), captured


def _capture(contender: Contender, calls: list[Callable[[], Any]], clock: Clock) -> tuple[Captured | None, str]:
    """A graph of ``calls``, or None on all ranks and why."""
    if clock.device.type != "cuda":
        return None, "no CUDA graphs on a CPU"
    if not contender.capturable:
        return None, "not in a CUDA graph: its calls synchronise with the host"
    captured, reason = attempt(lambda: capture(calls, clock.device))
    return captured, f"the capture failed: {reason}" if reason else ""


def _alternating(contender: Contender, copies: int, settings: Settings, clock: Clock) -> Measured:
    """Phases in turn: events between eager calls separate them; a graph holds pairs only."""
    calls, samples = _amount(contender, settings)
    handles: list[Any] = [None] * copies

    def dispatch(copy: int) -> None:
        handles[copy] = contender.dispatch(copy)

    def pair(copy: int) -> Any:
        return contender.combine(copy, contender.dispatch(copy))

    for copy in range(copies):
        pair(copy)
    steps: list[Action] = []
    for index in range(calls):
        copy = index % copies
        steps += [lambda c=copy: dispatch(c), lambda c=copy: contender.combine(c, handles[c])]  # type: ignore[misc]
    times = clock.measure_steps(steps, samples=samples, warmup=min(1, settings.warmup))
    note = "alone only between events, as its calls must alternate"
    phases: dict[Phase, PhaseSamples] = {
        "dispatch": PhaseSamples(eager=tuple(sum(sample[::2]) / calls for sample in times), note=note),
        "combine": PhaseSamples(eager=tuple(sum(sample[1::2]) / calls for sample in times), note=note),
    }
    eager = tuple(sum(sample) / calls for sample in times)
    captured, reason = _capture(contender, [lambda i=index: pair(i % copies) for index in range(calls)], clock)  # type: ignore[misc]
    if captured is None:
        phases["both"] = PhaseSamples(eager=eager, note=reason)
        return Measured(phases)
    by_graph = _per_call(clock.measure(captured.replay, samples=samples, warmup=settings.warmup), calls)
    phases["both"] = PhaseSamples(by_graph, eager, *_kernels(contender, [captured.replay], calls, clock))
    return Measured(phases, captured)


def _amount(contender: Contender, settings: Settings) -> tuple[int, int]:
    """Calls per sample, and samples."""
    if contender.capturable:
        return settings.calls, settings.samples
    return settings.host_calls, settings.host_samples


def _per_call(samples: list[float], calls: int) -> tuple[float, ...]:
    return tuple(sample / calls for sample in samples)


def _kernels(
    contender: Contender, actions: list[Action], calls: int, clock: Clock
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Device time per call, and the kernels' names; nothing on CPUs or where the profiler sees no kernel.

    The first of ``actions`` counts in which every rank's profiler sees kernels: not all see those inside graphs.
    """
    if clock.device.type != "cuda":
        return (), ()
    for action in actions:
        found = kernel_times(action, calls=calls, prefix=contender.kernel_prefix, clock=clock)
        if all(everyone(found is not None)) and found is not None:
            return tuple(found.microseconds), found.names
    return (), ()
