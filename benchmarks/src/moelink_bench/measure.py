"""Measure one contender on one rank: its repeated calls and the parts of its chain, by every method that it allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from moelink_bench.contenders import Call, Contender
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

PHASES = ("dispatch", "combine", "both")
"""The phases of a dispatch with its combine."""

ALTERNATES = "alone only between events, as its calls must alternate"
FAILED = "the capture failed: "

T = TypeVar("T")


@dataclass(frozen=True)
class PhaseSamples:
    """One rank's samples of one phase, microseconds per call; empty where a method was not used.

    Attributes:
        graph: replays of a CUDA graph of many calls.
        pairs: replays of a CUDA graph of many chains, such as dispatches each followed by its combine: this phase's
            part, by events inside the graph. Of parts alone.
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
    """The measurements of one contender on one rank.

    Attributes:
        phases: by name, parts of the chain first.
        fault: the fault of the whole in a graph, or "".
    """

    phases: Mapping[str, PhaseSamples]
    fault: str = ""


def measure_contender(
    contender: Contender, *, copies: int, settings: Settings, clock: Clock, warm: bool = False,
    eager_samples: int | None = None, judge: Callable[[Captured], str] = lambda _: "",
) -> Measured:  # fmt: skip
    """Measure all phases. Collective: all ranks measure the same contender.

    Parts of the chain that cannot be repeated alone are measured as parts of repeated chains. A method that fails on
    the way raises. ``warm``: the chain of every input has run before. Calls made one by one have ``eager_samples``, or
    as many as graphs. ``judge`` returns the fault of the graph of the whole, or "". It is released before chains
    are captured, whose memory it would add to.
    """
    calls, samples = settings.host_calls, settings.host_samples
    if contender.capturable:
        calls, samples = settings.calls, settings.samples
    settings = replace(settings, samples=samples, host_samples=eager_samples or samples)
    for copy in range(0 if warm else copies):
        for _, call in contender.chain(copy):
            call()
    repeats = [contender.repeats(copy) for copy in range(copies)]
    chains = [contender.chain(copy) for copy in range(copies)]  # what one holds, its next turn replaces
    names = [name for name, _ in chains[0]]
    steps = [call for index in range(calls) for _, call in chains[index % copies]]
    phases: dict[str, PhaseSamples] = {}
    if contender.alternates:
        times = clock.measure_steps(steps, samples=settings.host_samples, warmup=min(1, settings.warmup))
        phases |= {name: PhaseSamples(eager=part, note=ALTERNATES) for name, part in by_part(names, times).items()}
    graph = None
    for name in repeats[0]:
        made = [repeats[index % copies][name] for index in range(calls)]
        phases[name], graph = _measure_repeated(contender, made, settings, clock)
    fault, captured = "" if graph is None else judge(graph), graph is not None
    del graph
    marked, reason = None, phases[name].note
    # A capture that failed may have left calls that must alternate out of turn: they are not made again.
    if names and (captured or not contender.alternates):
        marked, reason = _capture(contender, clock, lambda: capture_marked(steps, clock.device))
    if marked is not None:
        times = measure_marked(marked, samples=samples, warmup=settings.warmup, clock=clock)
        phases |= {name: replace(phases[name], pairs=part) for name, part in by_part(names, times).items()}
    for part in names:
        phases[part] = replace(phases[part], note=_with_reason(phases[part].note, reason))
    return Measured({name: phases[name] for name in (*names, *(each for each in phases if each not in names))}, fault)


def by_part(names: Sequence[str], samples: Sequence[Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Return the microseconds per call of each part from those of every step of every sample.

    Example: parts a and b and one sample of two calls, [1, 5, 3, 7]: a took 2, b took 6.
    """
    width = len(names)
    return {
        name: tuple(sum(sample[first::width]) / len(sample[first::width]) for sample in samples)
        for first, name in enumerate(names)
    }


def _measure_repeated(
    contender: Contender, made: Sequence[Call], settings: Settings, clock: Clock
) -> tuple[PhaseSamples, Captured | None]:
    """Measure calls that can be repeated, one by one by ``settings.host_samples``, and return their graph."""

    def eager() -> None:
        for call in made:
            call()

    by_eager = clock.measure(eager, samples=settings.host_samples, warmup=min(1, settings.warmup))
    captured, note = _capture(contender, clock, lambda: capture(made, clock.device))
    by_graph: list[float] = []
    # Calls that must alternate are not made after a capture that failed, as in measure_contender.
    actions: list[Action] = [] if contender.alternates else [eager]
    if captured is not None:
        by_graph = clock.measure(captured.replay, samples=settings.samples, warmup=settings.warmup)
        actions = [captured.replay, *actions]
    kernel, kernels = _kernels(contender.kernel_prefix, actions, len(made), clock)
    graph, each = (tuple(sample / len(made) for sample in taken) for taken in (by_graph, by_eager))
    return PhaseSamples(graph=graph, eager=each, kernel=kernel, kernels=kernels, note=note), captured


def _capture(contender: Contender, clock: Clock, capturing: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of ``capturing``, or None on all ranks and the reason."""
    if clock.device.type != "cuda":
        return None, "no CUDA graphs on a CPU"
    if not contender.capturable:
        return None, "not in a CUDA graph: its calls synchronise with the host"
    captured, reason = attempt(capturing)
    return captured, f"{FAILED}{reason}" if reason else ""


def _with_reason(note: str, reason: str) -> str:
    """Return ``note`` of a phase and why it has no pairs, unless ``note`` gives that reason already."""
    if not reason or reason == note:
        return note
    return "; ".join(text for text in (note, f"no pairs: {reason}") if text)


def _kernels(
    prefix: str | None, actions: list[Action], calls: int, clock: Clock
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Return device time per call and the kernels' names; nothing on CPUs or where the profiler sees no kernel.

    The first of ``actions`` counts in which every rank's profiler sees kernels: not all see those inside graphs.
    """
    for action in actions if prefix is not None and clock.device.type == "cuda" else ():
        found = kernel_times(action, calls=calls, prefix=prefix or "", clock=clock)
        if all(everyone(found is not None)) and found is not None:
            return tuple(found.microseconds), found.names
    return (), ()
