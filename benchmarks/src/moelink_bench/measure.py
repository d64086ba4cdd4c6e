"""Measure one contender on one rank: every phase, by every method that it allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from moelink_bench.contenders import Contender
from moelink_bench.presets import Settings
from moelink_bench.timing import (
    Action,
    Captured,
    Clock,
    attempt,
    capture,
    capture_marked,
    everyone,
    kernel_times,
    measure_marked,
)

Phase = Literal["dispatch", "combine", "both"]
PHASES: tuple[Phase, ...] = ("dispatch", "combine", "both")

ALTERNATES = "alone only between events, as its calls must alternate"

T = TypeVar("T")


@dataclass(frozen=True)
class PhaseSamples:
    """One rank's samples of one phase, microseconds per call; empty where a method was not used.

    Attributes:
        graph: replays of a CUDA graph of many calls.
        pairs: replays of a CUDA graph of many dispatches, each followed by its combine: this phase's part, by events
            inside the graph. Of phases alone.
        eager: calls made one by one (events on CUDA, wall-clock time on CPUs).
        kernel: device time of the kernels of each call.
        kernels: names of those kernels.
        note: why a method was not used, or "".
    """

    graph: tuple[float, ...] = ()
    pairs: tuple[float, ...] = ()
    eager: tuple[float, ...] = ()
    kernel: tuple[float, ...] = ()
    kernels: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """What one rank measured of one contender.

    Attributes:
        phases: by phase.
        graph: that of phase "both", or None without one.
    """

    phases: Mapping[Phase, PhaseSamples]
    graph: Captured | None = None


def measure_contender(
    contender: Contender, *, copies: int, settings: Settings, clock: Clock, warm: bool = False
) -> Measured:
    """Measure all phases. Collective: all ranks measure the same contender.

    Combine alone is measured on handles of earlier dispatches of the same inputs. Where calls must alternate no phase
    is repeated alone: its samples are parts of alternating calls. A method that fails on the way raises.
    ``warm``: every input has been dispatched and combined before.
    """

    def both(copy: int) -> Any:
        return contender.combine(copy, contender.dispatch(copy))

    if not warm:
        for copy in range(copies):
            both(copy)
    calls: dict[Phase, Callable[[int], Any]] = {"both": both}
    if not contender.alternates:
        handles = [contender.dispatch(copy) for copy in range(copies)]
        calls = {
            "dispatch": contender.dispatch,
            "combine": lambda copy: contender.combine(copy, handles[copy]),
            "both": both,
        }
    amount, samples = _amount(contender, settings)
    steps = _pair_steps(contender, copies, amount)
    phases: dict[Phase, PhaseSamples] = {}
    if contender.alternates:
        times = clock.measure_steps(steps, samples=samples, warmup=min(1, settings.warmup))
        phases |= {phase: PhaseSamples(eager=part, note=ALTERNATES) for phase, part in _parts(times).items()}
    graph = None
    for phase, call in calls.items():
        phases[phase], graph = _measure_phase(contender, call, copies, settings, clock)
    marked, reason = None, phases["both"].note
    # A capture that failed may have left calls that must alternate out of turn: they are not made again.
    if graph is not None or not contender.alternates:
        marked, reason = _capture(contender, clock, lambda: capture_marked(steps, clock.device))
    times = [] if marked is None else measure_marked(marked, samples=samples, warmup=settings.warmup, clock=clock)
    for phase, part in _parts(times).items():
        phases[phase] = replace(phases[phase], pairs=part, note=_with_reason(phases[phase].note, reason))
    return Measured({phase: phases[phase] for phase in PHASES}, graph)


def _measure_phase(
    contender: Contender, call: Callable[[int], Any], copies: int, settings: Settings, clock: Clock
) -> tuple[PhaseSamples, Captured | None]:
    """Measure calls that are repeated, and return their graph."""
    calls, samples = _amount(contender, settings)

    def eager() -> None:
        for index in range(calls):
            call(index % copies)

    by_eager = _per_call(clock.measure(eager, samples=samples, warmup=min(1, settings.warmup)), calls)
    repeated = [lambda i=index: call(i % copies) for index in range(calls)]  # type: ignore[misc]
    captured, note = _capture(contender, clock, lambda: capture(repeated, clock.device))
    by_graph: tuple[float, ...] = ()
    # Calls that must alternate are not made after a capture that failed, as in measure_contender.
    actions: list[Action] = [] if contender.alternates else [eager]
    if captured is not None:
        by_graph = _per_call(clock.measure(captured.replay, samples=samples, warmup=settings.warmup), calls)
        actions = [captured.replay, *actions]
    kernel, kernels = _kernels(contender, actions, calls, clock)
    return PhaseSamples(graph=by_graph, eager=by_eager, kernel=kernel, kernels=kernels, note=note), captured


def _capture(contender: Contender, clock: Clock, capturing: Callable[[], T]) -> tuple[T | None, str]:
    """Return what ``capturing`` returns, or None on all ranks and why."""
    if clock.device.type != "cuda":
        return None, "no CUDA graphs on a CPU"
    if not contender.capturable:
        return None, "not in a CUDA graph: its calls synchronise with the host"
    captured, reason = attempt(capturing)
    return captured, f"the capture failed: {reason}" if reason else ""


def _pair_steps(contender: Contender, copies: int, calls: int) -> list[Callable[[], Any]]:
    """Return ``calls`` dispatches, each followed by its combine."""
    handles: list[Any] = [None] * copies

    def dispatch(copy: int) -> Any:
        handles[copy] = contender.dispatch(copy)
        return handles[copy]

    steps: list[Callable[[], Any]] = []
    for index in range(calls):
        copy = index % copies
        steps += [lambda c=copy: dispatch(c), lambda c=copy: contender.combine(c, handles[c])]  # type: ignore[misc]
    return steps


def _parts(times: Sequence[Sequence[float]]) -> dict[Phase, tuple[float, ...]]:
    """Return samples of each phase alone, per call, from the times of all steps of :func:`_pair_steps`."""
    return {
        phase: tuple(sum(sample[first::2]) / len(sample[first::2]) for sample in times)
        for first, phase in enumerate(PHASES[:2])
    }


def _with_reason(note: str, reason: str) -> str:
    """Return ``note`` of a phase and why it has no pairs, unless ``note`` gives that reason already."""
    if not reason or reason == note:
        return note
    return "; ".join(text for text in (note, f"no pairs: {reason}") if text)


def _amount(contender: Contender, settings: Settings) -> tuple[int, int]:
    """Return the calls per sample, and the number of samples."""
    if contender.capturable:
        return settings.calls, settings.samples
    return settings.host_calls, settings.host_samples


def _per_call(samples: list[float], calls: int) -> tuple[float, ...]:
    return tuple(sample / calls for sample in samples)


def _kernels(
    contender: Contender, actions: list[Action], calls: int, clock: Clock
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Return device time per call and the kernels' names; nothing on CPUs or where the profiler sees no kernel.

    The first of ``actions`` counts in which every rank's profiler sees kernels: not all see those inside graphs.
    """
    if clock.device.type != "cuda":
        return (), ()
    for action in actions:
        found = kernel_times(action, calls=calls, prefix=contender.kernel_prefix, clock=clock)
        if all(everyone(found is not None)) and found is not None:
            return tuple(found.microseconds), found.names
    return (), ()
