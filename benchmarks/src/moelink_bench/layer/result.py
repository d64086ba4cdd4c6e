"""Figures, verdicts and the JSON document of the layer's benchmark, made of all ranks' samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moelink.tools.results import LAYER_BENCHMARK
from moelink_bench.document import head, to_document
from moelink_bench.layer.contenders import PARTS
from moelink_bench.layer.plan import LayerPlan
from moelink_bench.report import figure_of, overall
from moelink_bench.timing import Figure

Method = Literal["graph", "eager"]
METHODS: tuple[Method, ...] = ("graph", "eager")

METHOD = (
    "A sample is `calls` calls, each of its own input and routing; before it more bytes than the second-level cache "
    "holds are written and all ranks are aligned. A figure is the median (20th, 80th percentile) over samples of the "
    "slowest rank, microseconds per call. graph: events around one replay of a CUDA graph of the calls. eager: events "
    "around as many calls made one by one (wall-clock time on CPUs). parts: by events between the steps of the layer "
    "inside one replay of such a graph, or between calls made one by one, as `parts_by` says; an event takes time too, "
    "so parts add up to more than the whole. error: the largest distance of a token's output from the layer in fp32, "
    "relative to the length of that output. All calls of moelink use communicators that are sized for the most tokens "
    "of the shape"
)
RULE = (
    "faster: a lower median than every contender that is not moelink, by the same method: CUDA graph replay where both "
    "have it, else eager calls. faster_everywhere counts the contender of the same precision, moelink bf16"
)
JUDGED = "moelink bf16"


@dataclass(frozen=True)
class LayerSamples:
    """One rank's samples of one contender, microseconds per call; empty where a method was not used.

    Attributes:
        graph, eager: of whole calls.
        parts: of each part, by name.
        parts_by: the method of the parts, or "".
        note: why a method was not used, or "".
    """

    graph: tuple[float, ...] = ()
    eager: tuple[float, ...] = ()
    parts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    parts_by: str = ""
    note: str = ""


@dataclass(frozen=True)
class LayerRankRow:
    """One contender on one case, as one rank saw it.

    Attributes:
        case: index into the plan's cases.
        note: what a reader must know to compare it.
        reason: why there are no samples, or "".
        error: of its output, or None.
    """

    case: int
    contender: str
    note: str = ""
    reason: str = ""
    error: float | None = None
    samples: LayerSamples = LayerSamples()


@dataclass(frozen=True)
class LayerReport:
    """Everything one rank measured; ``gate`` is what is wrong with an output of moelink, or ""."""

    device: str
    gate: str = ""
    rows: tuple[LayerRankRow, ...] = ()

    @classmethod
    def decode(cls, said: dict[str, Any]) -> LayerReport:
        """The report that a rank sent as the values of its fields (``dataclasses.asdict``)."""
        rows = []
        for row in said["rows"]:
            samples = dict(row["samples"])
            samples |= {method: tuple(samples[method]) for method in METHODS}
            samples["parts"] = {part: tuple(times) for part, times in samples["parts"].items()}
            rows.append(LayerRankRow(**{**row, "samples": LayerSamples(**samples)}))
        return cls(said["device"], said["gate"], tuple(rows))


@dataclass(frozen=True)
class LayerRow:
    """One contender on one case; ``reason`` says why there are no figures.

    Attributes:
        error: the largest of any rank.
        graph, eager: figures of whole calls.
        parts, parts_by: figures of parts, in order.
    """

    case: int
    contender: str
    note: str
    reason: str
    error: float | None
    graph: Figure | None
    eager: Figure | None
    parts: dict[str, Figure]
    parts_by: str

    def median(self, method: Method) -> float | None:
        """Return the median by a method in microseconds, or None."""
        figure: Figure | None = getattr(self, method)
        return None if figure is None else figure.median


def merged(by_rank: Sequence[LayerRankRow]) -> LayerRow:
    """Merge what all ranks saw of one contender on one case."""
    first = by_rank[0]
    errors = [row.error for row in by_rank if row.error is not None]
    names = [name for name in PARTS if all(name in row.samples.parts for row in by_rank)]
    figures = {name: figure_of([row.samples.parts[name] for row in by_rank]) for name in names}
    note = "; ".join(text for text in (first.note, first.samples.note) if text)
    return LayerRow(
        first.case, first.contender, note, first.reason, max(errors, default=None),
        figure_of([row.samples.graph for row in by_rank]), figure_of([row.samples.eager for row in by_rank]),
        {name: figure for name, figure in figures.items() if figure is not None}, first.samples.parts_by,
    )  # fmt: skip


@dataclass(frozen=True)
class LayerDuel:
    """One of moelink's contenders against another library's; medians in microseconds."""

    contender: str
    method: Method
    ours: float
    theirs: float


@dataclass(frozen=True)
class LayerVerdict:
    """Of one of moelink's contenders on one case; ``faster`` in all duels, None without any."""

    case: int
    contender: str
    duels: tuple[LayerDuel, ...]
    faster: bool | None
    text: str


def judge_layer(labels: Sequence[str], rows: Sequence[LayerRow]) -> list[LayerVerdict]:
    """Judge each of moelink's rows that have figures. ``labels``: of the cases."""
    return [
        _verdict(labels[ours.case], ours, [row for row in rows if row.case == ours.case])
        for ours in rows
        if ours.contender.startswith("moelink") and not ours.reason
    ]


def _verdict(label: str, ours: LayerRow, rows: Sequence[LayerRow]) -> LayerVerdict:
    duels = []
    for row in rows:
        if row.contender.startswith("moelink") or row.reason:
            continue
        for method in METHODS:
            mine, theirs = ours.median(method), row.median(method)
            if mine is not None and theirs is not None:
                duels.append(LayerDuel(row.contender, method, mine, theirs))
                break
    faster = all(duel.ours < duel.theirs for duel in duels) if duels else None
    said = {True: "faster", False: "NOT faster", None: "alone"}[faster]
    words = [f"{duel.theirs / duel.ours:.2f} times as fast as {duel.contender}, {duel.method}" for duel in duels]
    text = f"{label}, {ours.contender}: {said}" + (f" ({'; '.join(words)})" if words else "")
    return LayerVerdict(ours.case, ours.contender, tuple(duels), faster, text)


def layer_document(
    plan: LayerPlan, reports: Sequence[LayerReport], *, commit: str | None, command: str
) -> dict[str, Any]:
    """Return the JSON document of a run from all ranks' reports: without figures when the gate failed."""
    gate = next((report.gate for report in reports if report.gate), "")
    document: dict[str, Any] = {
        **head(LAYER_BENCHMARK, command=command, commit=commit),
        "preset": plan.preset,
        "device": plan.device,
        "devices": [report.device for report in reports],
        "ranks": plan.ranks,
        "settings": to_document(plan.settings),
        "gate": {"passed": not gate, "fault": gate},
    }
    if gate:
        return document
    rows = [merged(column) for column in zip(*(report.rows for report in reports), strict=True)]
    rows.sort(key=lambda row: row.case)
    labels = [case.label for case in plan.cases]
    verdicts = judge_layer(labels, rows)
    judged = [verdict for verdict in verdicts if verdict.contender == JUDGED]
    most = plan.shapes()
    cases = [
        {
            "label": case.label, "case": case.name, "tokens": case.tokens, "max_tokens": most[case.shape],
            "calls": case.calls(plan.settings), "shape": to_document(case.shape),
        }
        for case in plan.cases
    ]  # fmt: skip
    return {
        **document,
        "method": METHOD,
        "parts": list(PARTS),
        "cases": cases,
        "rows": to_document(rows),
        "rule": RULE,
        "verdicts": to_document(verdicts),
        "faster_everywhere": overall([verdict.faster for verdict in judged]),
        "not_faster": [verdict.text for verdict in judged if verdict.faster is False],
    }
