"""Figures and verdicts, made of all ranks' samples.

A verdict says whether moelink's symmetric transport is faster than every other contender of the run, and whether it is
as fast as the wire allows. Every number that is shown is in the document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moelink.tools.results import COLLECTIVE, METHODS, SYMMETRIC, Method
from moelink_bench.ceiling import Ceiling, CeilingSamples
from moelink_bench.measure import PHASES, PhaseSamples
from moelink_bench.presets import Case, Plan
from moelink_bench.timing import Figure, slowest_rank
from moelink_bench.workload import WireBytes, combine_row_bytes, dispatch_message_bytes, wire_bytes


def microseconds(value: float) -> str:
    """Write a time with as many digits as it is worth: ``12.3``, ``1234``."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


@dataclass(frozen=True)
class RankRow:
    """One contender on one case, as one rank saw it.

    Attributes:
        case: its index in the plan.
        note: of the contender.
        reason: why there are no samples, or "".
        phases: samples by name.
        error: of its output, where that is measured.
    """

    case: int
    contender: str
    note: str = ""
    reason: str = ""
    phases: Mapping[str, PhaseSamples] = field(default_factory=dict)
    error: float | None = None


@dataclass(frozen=True)
class RankReport:
    """Everything one rank measured.

    Attributes:
        device: its device's name.
        gate: the fault, or ""; there are rows if and only if it is "".
        ceiling: its samples of the ceiling.
        gates: one line per case that passed.
        messages: per case, per rotated input, messages to each rank.
        capacities: per case, rows of outputs.
        rows: its measurements, the baseline first in each case.
    """

    device: str
    gate: str = ""
    ceiling: CeilingSamples = CeilingSamples(0, ())
    gates: tuple[str, ...] = ()
    messages: tuple[tuple[tuple[int, ...], ...], ...] = ()
    capacities: tuple[int, ...] = ()
    rows: tuple[RankRow, ...] = ()

    @classmethod
    def decode(cls, said: dict[str, Any]) -> RankReport:
        """The report that a rank sent as the values of its fields (``dataclasses.asdict``)."""
        fields = {name: _tuples(value) for name, value in said.items()}
        rows = [
            RankRow(**{**row, "phases": {name: PhaseSamples(**_tuples(each)) for name, each in row["phases"].items()}})
            for row in said["rows"]
        ]
        return cls(**{**fields, "ceiling": CeilingSamples(**_tuples(said["ceiling"])), "rows": tuple(rows)})


def _tuples(value: Any) -> Any:
    """``value`` with tuples for the lists that JSON makes of them."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


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

    def wire_us(self, phase: str) -> float | None:
        """Return the microseconds that the busiest link needs at the ceiling; None without a ceiling."""
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
    """One contender on one case; ``reason`` says why there are no figures, ``error`` is the largest of any rank."""

    case: int
    contender: str
    note: str
    reason: str
    phases: Mapping[str, PhaseResult]
    error: float | None = None

    def figure(self, phase: str, method: Method) -> Figure | None:
        """Return the figure of a phase by a method, or None."""
        result = self.phases.get(phase)
        return None if result is None else getattr(result, method)

    def median(self, phase: str, method: Method) -> float | None:
        """Return that figure's median in microseconds, or None."""
        figure = self.figure(phase, method)
        return None if figure is None else figure.median

    def best(self, phase: str) -> Figure | None:
        """Return the figure by the first of :data:`METHODS` that was used, or None."""
        return next((figure for method in METHODS if (figure := self.figure(phase, method))), None)


def figure_of(by_rank: Sequence[Sequence[float]]) -> Figure | None:
    """Return the figure of all ranks' samples; None where a rank has none.

    Ranks with different numbers of samples (a profiler saw kernels that it could not count per call) are reduced to
    their means.
    """
    if not all(by_rank):
        return None
    if len({len(samples) for samples in by_rank}) > 1:
        by_rank = [[sum(samples) / len(samples)] for samples in by_rank]
    return slowest_rank(by_rank)


def phase_result(by_rank: Sequence[PhaseSamples], wire_us: float | None) -> PhaseResult:
    """Return the figures of one phase."""
    graph, pairs, eager, kernel = (
        figure_of([getattr(samples, name) for samples in by_rank]) for name in (*METHODS, "kernel")
    )
    best = graph or pairs or eager
    share = wire_us / best.median if wire_us is not None and best is not None and best.median > 0 else None
    return PhaseResult(graph, pairs, eager, kernel, by_rank[0].kernels, share, by_rank[0].note)


def case_results(plan: Plan, reports: Sequence[RankReport], ceiling: Ceiling) -> tuple[CaseResult, ...]:
    """Compute the bytes on the wire of all cases from the messages that each rank counted."""
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


def merged_row(by_rank: Sequence[RankRow], wire_us: Callable[[str], float | None] = lambda _: None) -> Row:
    """Merge what all ranks saw of one contender into a row; ``wire_us`` of a phase is what its bytes need."""
    first = by_rank[0]
    phases = {
        phase: phase_result([row.phases[phase] for row in by_rank], wire_us(phase))
        for phase in first.phases
        if all(phase in row.phases for row in by_rank)
    }
    errors = [row.error for row in by_rank if row.error is not None]
    return Row(first.case, first.contender, first.note, first.reason, phases, max(errors, default=None))


def rows_of(
    cases: Sequence[CaseResult], reports: Sequence[RankReport], peers: Sequence[Sequence[RankRow]]
) -> list[Row]:
    """Merge the rows of ``reports``, by rank, and of the peers, ``peers[rank]``; in each case baseline, peers, moelink
    symmetric."""
    rows: list[Row] = []
    for case in cases:
        own = [[row for row in report.rows if row.case == case.index] for report in reports]
        others = [[row for row in rank if row.case == case.index] for rank in peers]
        for column in (*zip(*own, strict=True), *zip(*others, strict=True)):
            rows.append(merged_row(column, case.wire_us))
    order = {COLLECTIVE: 0, SYMMETRIC: 2}
    return sorted(rows, key=lambda row: (row.case, order.get(row.contender, 1)))


WIRE_TOKENS = 4096
"""From this many tokens on the wire is the limit."""

WIRE_SHARE, WIRE_SLACK_US = 1.05, 10.0

Kind = Literal["like for like", "whole operation", "by rank", "phase"]
COUNTED: tuple[Kind, ...] = ("like for like", "whole operation")
"""Comparisons that count: a pair by FlashInfer's contract; a pair with layout "expert". The others are information: a
pair with layout "rank" that quantises or copies rows, as FlashInfer does not; a phase alone."""

RULE = (
    "faster: a lower median than every other contender of the case, by the same method (CUDA graph replay where both "
    "have it, else pairs inside a graph, else eager calls). Two comparisons count, of a dispatch with its combine: "
    "like for like (the contract of FlashInfer: quantised rows come in, and stay by rank where they arrive), and the "
    "whole operation (rows by expert, to which FlashInfer adds a permutation and a sum). Rows by rank that moelink "
    "quantises or copies do not count, nor do phases alone, nor cases with an SM limit. At the wire, "
    f"from {WIRE_TOKENS} tokens on: a median of at most {WIRE_SHARE} x the busiest link's bytes / the ceiling of the "
    f"same run + {WIRE_SLACK_US:.0f} us"
)


@dataclass(frozen=True)
class Duel:
    """moelink symmetric against one other contender; medians in microseconds."""

    contender: str
    method: Method
    ours: float
    theirs: float

    @property
    def faster(self) -> bool:
        """moelink is."""
        return self.ours < self.theirs


FASTER = {True: "faster", False: "NOT faster", None: "alone"}
"""Words for what :func:`faster_in` returns."""


def duels_of(ours: Row, others: Mapping[str, Row], phase: str) -> tuple[Duel, ...]:
    """Return the duels of ``ours`` with all ``others`` that have a figure of the phase by the same method."""
    duels = []
    for name, row in others.items():
        for method in METHODS:
            mine, theirs = ours.median(phase, method), row.median(phase, method)
            if mine is not None and theirs is not None:
                duels.append(Duel(name, method, mine, theirs))
                break
    return tuple(duels)


def faster_in(duels: Sequence[Duel]) -> bool | None:
    """Return whether all duels were won; None without any."""
    return all(duel.faster for duel in duels) if duels else None


def said_of(duels: Sequence[Duel]) -> list[str]:
    """Return the words of each duel."""
    return [f"{duel.theirs / duel.ours:.2f} times as fast as {duel.contender}, {duel.method}" for duel in duels]


@dataclass(frozen=True)
class Verdict:
    """Of one case and phase.

    Attributes:
        case: its index.
        kind: which comparison it is.
        counts: it is one of the two that say whether moelink is faster.
        duels: with everybody else who could be measured.
        faster: in all of them; None without any.
        wire_us, allowed_us: time of the busiest link at the ceiling, and with what is allowed on top; None where the
            wire is not judged.
        within_wire: the median by the first of ``METHODS`` that was used is at most ``allowed_us``, or None.
        text: all that in a line.
    """

    case: int
    phase: str
    kind: Kind
    counts: bool
    duels: tuple[Duel, ...]
    faster: bool | None
    wire_us: float | None
    allowed_us: float | None
    within_wire: bool | None
    text: str


def judge(cases: Sequence[CaseResult], rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Judge each case and phase in which moelink's symmetric transport was measured."""
    verdicts = []
    for case in cases:
        of_case = {row.contender: row for row in rows if row.case == case.index and not row.reason}
        ours = of_case.pop(SYMMETRIC, None)
        if ours is not None:
            verdicts += [judge_phase(case, phase, ours, of_case) for phase in PHASES if phase in ours.phases]
    return tuple(verdicts)


def kind_of(case: Case, phase: str) -> Kind:
    """Return which comparison ``phase`` of ``case`` is."""
    if phase != "both":
        return "phase"
    if case.layout == "rank":
        return "like for like" if case.like_for_like else "by rank"
    return "whole operation"


def judge_phase(case: CaseResult, phase: str, ours: Row, others: Mapping[str, Row]) -> Verdict:
    """Judge one case and phase."""
    duels = duels_of(ours, others, phase)
    words = said_of(duels)
    wire_us = allowed = within = None
    best = ours.best(phase)
    if phase != "both" and case.case.tokens >= WIRE_TOKENS and case.case.num_sms is None and best is not None:
        wire_us = case.wire_us(phase)
        if wire_us is not None:
            allowed = WIRE_SHARE * wire_us + WIRE_SLACK_US
            within = best.median <= allowed
            words.append(f"{best.median:.1f} us of {allowed:.1f} us allowed by the wire")
    faster = faster_in(duels)
    verdict = FASTER[faster]
    if within is not None:
        verdict += ", at the wire" if within else ", NOT at the wire"
    kind = kind_of(case.case, phase)
    what = kind if kind in COUNTED else phase
    text = f"{case.case.label}, {what}: {verdict}" + (f" ({'; '.join(words)})" if words else "")
    counts = kind in COUNTED and case.case.num_sms is None
    return Verdict(case.index, phase, kind, counts, duels, faster, wire_us, allowed, within, text)


def overall(flags: Sequence[bool | None]) -> bool | None:
    """Return whether all flags that are not None are true; None when there is none."""
    known = [flag for flag in flags if flag is not None]
    return all(known) if known else None
