"""What a result of ``moelink bench`` says about others: three comparisons, of which two count, and published figures.

* **like for like**: a pair by FlashInfer's contract against FlashInfer: rows come in the dispatch format, stay by rank
  where they arrive, and one row for each token and rank goes home. It is made against FlashInfer's shortest call, which
  leaves ids in rows that no token fills as they were, and shown besides against the call that engines make, which marks
  them, as moelink does
* **whole operation**: a pair with layout "expert" against whatever ends in rows by expert and in summed rows at home,
  FlashInfer with a permutation and a sum among them
* **phase**: dispatch and combine alone, stated but not counted; so is **by rank**: a pair by rank in which moelink
  quantises or copies rows, against FlashInfer, which does neither
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moelink_bench.peers import FLASHINFER, FLASHINFER_MARKED
from moelink_bench.peers_whole import FLASHINFER_WHOLE
from moelink_bench.report import CaseResult, Kind, Row, Verdict

HEAD = "µs, moelink : FlashInfer (times as fast)"
AS_ENGINES = "as engines call it"
COLUMNS = (
    "like for like", AS_ENGINES, "whole operation", "pair, by rank", "dispatch, by rank", "combine, by rank",
    "dispatch, by expert", "combine, by expert",
)  # fmt: skip
"""Of the table of comparisons with FlashInfer: the first one, and all that there may be."""

NEEDED: dict[Kind, str] = {"like for like": FLASHINFER, "whole operation": FLASHINFER_WHOLE}
"""The contender without which a comparison of this kind has not been made."""


@dataclass(frozen=True)
class Comparison:
    """One of the two that count, over all cases of a run.

    Attributes:
        kind: which.
        against: the contender that it cannot do without.
        won: cases in which moelink was faster than everybody.
        cases: cases in which ``against`` was measured too.
        lost: labels of cases in which somebody was faster.
        missing: labels of cases in which ``against`` has no figures.
        reasons: why.
        passed: nothing was lost and nothing is missing; None where nothing was lost, but something is missing.
    """

    kind: Kind
    against: str
    won: int
    cases: int
    lost: tuple[str, ...]
    missing: tuple[str, ...]
    reasons: tuple[str, ...]
    passed: bool | None


def comparisons_of(
    cases: Sequence[CaseResult], rows: Sequence[Row], verdicts: Sequence[Verdict]
) -> tuple[Comparison, ...]:
    """Return both comparisons that count."""
    return tuple(_comparison(kind, against, cases, rows, verdicts) for kind, against in NEEDED.items())


def _comparison(
    kind: Kind, against: str, cases: Sequence[CaseResult], rows: Sequence[Row], verdicts: Sequence[Verdict]
) -> Comparison:
    labels = {case.index: case.case.label for case in cases}
    counted = [verdict for verdict in verdicts if verdict.kind == kind and verdict.counts]
    lost = tuple(labels[verdict.case] for verdict in counted if verdict.faster is False)
    met = {verdict.case for verdict in counted if any(duel.contender == against for duel in verdict.duels)}
    missing = tuple(labels[verdict.case] for verdict in counted if verdict.case not in met)
    said = {row.case: row.reason for row in rows if row.contender == against and row.reason}
    reasons = [said.get(verdict.case, "it was left out") for verdict in counted if verdict.case not in met]
    if not counted:
        reasons = ["moelink symmetric ran no case of this kind"]
    won = sum(verdict.faster is True for verdict in counted if verdict.case in met)
    result = False if lost else None if reasons else True
    return Comparison(kind, against, won, len(met), lost, missing, tuple(dict.fromkeys(reasons)), result)


def passed(comparisons: Sequence[Comparison]) -> bool | None:
    """Return whether the comparisons that count were all won; None where none was lost and one was not made."""
    results = {one.passed for one in comparisons}
    return False if False in results else None if None in results else True


def summary(comparison: dict[str, Any]) -> str:
    """Return a comparison of a document as a line.

    Example: ``"like for like: faster in 4 of 5 cases against FlashInfer one-sided, not faster with 512 tokens, bf16"``.
    """
    text = f"{comparison['kind']}: faster in {comparison['won']} of {comparison['cases']} cases against "
    parts = [text + comparison["against"]]
    if comparison["lost"]:
        parts.append(f"not faster with {'; '.join(comparison['lost'])}")
    if comparison["reasons"]:
        parts.append(f"not made in {len(comparison['missing'])} cases ({'; '.join(comparison['reasons'])})")
    return ", ".join(parts)


def merged(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparisons that count of several documents as those of one run of all their cases."""
    found = []
    for kind in NEEDED:
        same = [one for each in documents for one in each["speed_gate"]["comparisons"] if one["kind"] == kind]
        whole = {name: sum(one[name] for one in same) for name in ("won", "cases")}
        whole |= {name: sum((one[name] for one in same), start=[]) for name in ("lost", "missing", "reasons")}
        found.append({"kind": kind, "against": NEEDED[kind], **whole, "reasons": list(dict.fromkeys(whole["reasons"]))})
    return found


def gate_line(document: dict[str, Any]) -> str:
    """Return what the speed gate of a document says, in a few words."""
    return {
        True: "speed gate: passed, moelink is faster in both comparisons that count, at every size",
        False: "speed gate: NOT passed",
        None: "speed gate: not judged, a comparison that counts was not made",
    }[document["speed_gate"]["passed"]]


@dataclass(frozen=True)
class Line:
    """One comparison of one case with FlashInfer.

    Attributes:
        case: index of the case.
        contender: who was compared.
        kind: which comparison.
        phase: "dispatch", "combine" or "both".
        ours, theirs: medians in microseconds.
    """

    case: int
    contender: str
    kind: Kind
    phase: str
    ours: float
    theirs: float

    @property
    def text(self) -> str:
        """``"27.3 : 29.9 (1.10)"``: ours, theirs, how many times as fast ours is."""
        return f"{_us(self.ours)} : {_us(self.theirs)} ({self.theirs / self.ours:.2f})"


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the comparisons with FlashInfer of a document, in the order of its cases; with the call that engines make
    those that are like for like.

    Documents from before there were comparisons have none.
    """
    return [
        Line(verdict["case"], duel["contender"], verdict["kind"], verdict["phase"], duel["ours"], duel["theirs"])
        for verdict in document["verdicts"]
        for duel in verdict["duels"]
        if "kind" in verdict
        and (
            duel["contender"] in NEEDED.values()
            or (duel["contender"] == FLASHINFER_MARKED and verdict["kind"] == "like for like")
        )
    ]


def table_of(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return heads and lines: for each size, those of :data:`COLUMNS` that have a figure.

    The comparisons that count share a line, where their cases differ in what is compared only. Another form by rank has
    a line of its own, with its label. Cells are those of :attr:`Line.text`. Rows by rank are against FlashInfer alone,
    the whole operation against FlashInfer with a permutation and a sum.
    """
    by_label: dict[str, dict[str, str]] = {}
    cases, lines = document["cases"], lines_of(document)
    taken: dict[tuple[str, str], int] = {}
    for line in lines:
        if line.kind in NEEDED:
            taken.setdefault((_short(cases[line.case]), line.kind), line.case)
    for line in lines:
        entry = cases[line.case]
        label = _short(entry) if line.case in taken.values() else entry["label"]
        by_label.setdefault(label, {})[_column(line, entry["case"].get("layout", "expert"))] = line.text
    used = [column for column in COLUMNS if any(column in cells for cells in by_label.values())]
    return [HEAD, *used], [[label, *(cells.get(name, "–") for name in used)] for label, cells in by_label.items()]


def _short(entry: dict[str, Any]) -> str:
    """The label of a document's case without what differs between the comparisons."""
    label: str = entry["label"]
    return label.partition(", by ")[0]


def _column(line: Line, layout: str) -> str:
    """The column of :data:`COLUMNS` that a line belongs to."""
    if line.contender == FLASHINFER_MARKED:
        return AS_ENGINES
    if line.kind in NEEDED:
        return line.kind
    return f"{'pair' if line.phase == 'both' else line.phase}, by {layout}"
