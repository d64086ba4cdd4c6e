"""The result of a run: figures made of all ranks' samples. Every number that is shown is in the document."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moelink.tools.bench.ceiling import Ceiling, ceiling_of
from moelink.tools.bench.measure import PHASES, Phase, PhaseSamples
from moelink.tools.bench.presets import Case, Plan
from moelink.tools.bench.ranks import RankReport, RankRow
from moelink.tools.bench.stats import Figure, slowest_rank
from moelink.tools.bench.wire import WireBytes, combine_row_bytes, dispatch_message_bytes, wire_bytes

Method = Literal["graph", "pairs", "eager"]
METHODS: tuple[Method, ...] = ("graph", "pairs", "eager")
"""The one that says most of the device first."""


@dataclass(frozen=True)
class CaseResult:
    """One case and what follows from its inputs.

    Attributes:
        index: rows and verdicts refer to it.
        case: the configuration.
        copies: inputs that were rotated.
        capacity: rows allocated for each dispatch output (moelink's ``capacity``).
        dispatch, combine: bytes on the wire.
        gb_per_s: the ceiling, or None.
    """

    index: int
    case: Case
    copies: int
    capacity: int
    dispatch: WireBytes
    combine: WireBytes
    gb_per_s: float | None

    def wire_us(self, phase: Phase) -> float | None:
        """Microseconds that the busiest link needs at the ceiling; None without a ceiling."""
        if self.gb_per_s is None:
            return None
        parts = {"dispatch": (self.dispatch,), "combine": (self.combine,), "both": (self.dispatch, self.combine)}[phase]
        return sum(part.microseconds(self.gb_per_s) for part in parts)


@dataclass(frozen=True)
class PhaseResult:
    """Figures of one phase, None where a method was not used.

    Attributes:
        graph: event time over replays of a CUDA graph.
        pairs: the phase's part of such a graph of dispatches, each followed by its combine; of phases alone.
        eager: event time of eager calls (wall-clock time on CPUs).
        kernel: device time of the kernels.
        kernels: their names.
        share_of_ceiling: time that the busiest link needs at the ceiling / median by the first method that was used.
        note: why a method was not used.
    """

    graph: Figure | None
    pairs: Figure | None
    eager: Figure | None
    kernel: Figure | None
    kernels: tuple[str, ...]
    share_of_ceiling: float | None
    note: str


@dataclass(frozen=True)
class Row:
    """One contender on one case; ``reason`` says why there are no figures."""

    case: int
    contender: str
    leaves_out: str
    reason: str
    phases: Mapping[Phase, PhaseResult]

    def figure(self, phase: Phase, method: Method) -> Figure | None:
        """The figure of a phase by a method, if there is one."""
        result = self.phases.get(phase)
        return None if result is None else getattr(result, method)

    def median(self, phase: Phase, method: Method) -> float | None:
        """Its median in microseconds."""
        figure = self.figure(phase, method)
        return None if figure is None else figure.median

    def best(self, phase: Phase) -> Figure | None:
        """The figure by the first of :data:`METHODS` that was used."""
        return next((figure for method in METHODS if (figure := self.figure(phase, method))), None)


def figure_of(by_rank: Sequence[Sequence[float]]) -> Figure | None:
    """The figure of all ranks' samples; None where a rank has none.

    Ranks with different numbers of samples (a profiler saw kernels that it could not count per call) are reduced to
    their means.
    """
    if not all(by_rank):
        return None
    if len({len(samples) for samples in by_rank}) > 1:
        by_rank = [[sum(samples) / len(samples)] for samples in by_rank]
    return slowest_rank(by_rank)


def phase_result(by_rank: Sequence[PhaseSamples], wire_us: float | None) -> PhaseResult:
    """The figures of one phase."""
    graph, pairs, eager, kernel = (
        figure_of([getattr(samples, name) for samples in by_rank]) for name in (*METHODS, "kernel")
    )
    best = graph or pairs or eager
    share = wire_us / best.median if wire_us is not None and best is not None and best.median > 0 else None
    return PhaseResult(graph, pairs, eager, kernel, by_rank[0].kernels, share, by_rank[0].note)


def case_results(plan: Plan, reports: Sequence[RankReport], ceiling: Ceiling) -> tuple[CaseResult, ...]:
    """Bytes on the wire of all cases, from the messages that each rank counted."""
    results = []
    for index, case in enumerate(plan.cases):
        messages = [report.messages[index] for report in reports]
        results.append(
            CaseResult(
                index,
                case,
                len(messages[0]),
                reports[0].capacities[index],
                wire_bytes(messages, dispatch_message_bytes(case, plan.ranks)),
                wire_bytes(messages, combine_row_bytes(case, plan.ranks)),
                ceiling.gb_per_s,
            )  # fmt: skip
        )
    return tuple(results)


def merged_row(by_rank: Sequence[RankRow], case: CaseResult) -> Row:
    """One contender's row from what all ranks saw."""
    first = by_rank[0]
    phases = {
        phase: phase_result([row.phases[phase] for row in by_rank], case.wire_us(phase))
        for phase in PHASES
        if all(phase in row.phases for row in by_rank)
    }
    return Row(first.case, first.contender, first.leaves_out, first.reason, phases)


@dataclass(frozen=True)
class Results:
    """What a run found, before it is judged.

    Attributes:
        gate: what is wrong, or ""; when something is, there are no figures at all.
        gates: a line per case that passed.
        devices: names, by rank.
        ceiling, cases, rows: the figures; rows of a case are in the order baseline, peers, moelink symmetric.
    """

    gate: str
    gates: tuple[str, ...]
    devices: tuple[str, ...]
    ceiling: Ceiling | None = None
    cases: tuple[CaseResult, ...] = ()
    rows: tuple[Row, ...] = ()


def results_of(plan: Plan, reports: Sequence[RankReport], peers: Sequence[Sequence[RankRow]]) -> Results:
    """The results of ``reports``, by rank, and of the peers' rows ``peers[rank]``."""
    devices = tuple(report.device for report in reports)
    gate = next((report.gate for report in reports if report.gate), "")
    if gate:
        return Results(gate, reports[0].gates, devices)
    ceiling = ceiling_of([report.ceiling for report in reports], plan.device)
    cases = case_results(plan, reports, ceiling)
    rows: list[Row] = []
    for case in cases:
        own = [[row for row in report.rows if row.case == case.index] for report in reports]
        others = [[row for row in rank if row.case == case.index] for rank in peers]
        for column in (*zip(*own, strict=True), *zip(*others, strict=True)):
            rows.append(merged_row(column, case))
    order = {"moelink collective": 0, "moelink symmetric": 2}
    rows.sort(key=lambda row: (row.case, order.get(row.contender, 1)))
    return Results("", reports[0].gates, devices, ceiling, cases, tuple(rows))


def to_document(value: object) -> object:
    """``value`` as what JSON can hold: dataclasses, mappings and sequences all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_document(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_document(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_document(entry) for entry in value]
    return value
