"""Comparisons of a result of ``moelink bench`` with other libraries, and shares of the speed under SM limits.

There are three comparisons with others, of which two count:

* **like for like**: a pair by FlashInfer's contract against FlashInfer: rows come in the dispatch format, stay by rank
  where they arrive, and one row for each token and rank goes home. It is made against FlashInfer's shortest call, which
  leaves ids in rows that no token fills as they were, and shown besides against the call that engines make, which marks
  them, as moelink does
* **whole operation**: a pair with layout "expert" against whatever ends in rows by expert and in summed rows at home,
  FlashInfer with a permutation and a sum among them
* **phase**: dispatch and combine alone, stated but not counted; so is **by rank**: a pair by rank in which moelink
  quantises or copies rows, against FlashInfer, which does neither

Published figures are of libraries that do not run here, as their source states them. They come from other machines,
with other numbers of ranks and other ways to measure, so they take part in no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moelink.tools.results import METHODS, SYMMETRIC
from moelink_bench.measure import PHASES
from moelink_bench.peers import FLASHINFER, FLASHINFER_MARKED, FLASHINFER_WHOLE
from moelink_bench.presets import Case
from moelink_bench.report import CaseResult, Kind, Row, Verdict, microseconds

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
        cases: cases in which ``against`` was measured.
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
    """Return the verdict of a document's speed gate, in a few words."""
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
        return f"{microseconds(self.ours)} : {microseconds(self.theirs)} ({self.theirs / self.ours:.2f})"


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


# --- shares of the full speed -----------------------------------------------------------------------------------------


TARGETS = {24: 0.6, 64: 0.9}
"""SM limit to the least share of the full speed, of a pair."""
TARGET_TOKENS, TARGET_RANKS = 4096, 4
"""Tokens per rank of the targets, and the fewest ranks that they are set for."""

SHARE_RULE = (
    "share of the full speed: median of the same case without an SM limit / median with it, by the same method. "
    f"Targets, for {TARGET_TOKENS} tokens per rank on {TARGET_RANKS} GPUs or more: "
    + ", ".join(f"{share:.0%} of the pair's speed with {sms} SMs" for sms, share in TARGETS.items())
)


def shares_of(cases: Sequence[CaseResult], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the shares of all cases with an SM limit whose case without one was measured too.

    Each has its case (the index, tokens, format and limit), the share of every phase, 1 for no loss and None without a
    figure, the target of a pair or None, and whether that is met, None without a target or a figure.
    """
    ours = {row.case: row for row in rows if row.contender == SYMMETRIC and not row.reason}
    whole = {case.case: case.index for case in cases if case.case.num_sms is None}
    shares = []
    for result in cases:
        case, full = result.case, whole.get(replace(result.case, num_sms=None))
        if case.num_sms is None or full is None or full not in ours or result.index not in ours:
            continue
        by_phase = {phase: _share(ours[result.index], ours[full], phase) for phase in PHASES}
        target, both = target_of(case), by_phase["both"]
        shares.append({
            "case": result.index, "tokens": case.tokens, "format": case.format, "num_sms": case.num_sms, **by_phase,
            "target": target, "met": None if target is None or both is None else both >= target,
        })  # fmt: skip
    return shares


def target_of(case: Case) -> float | None:
    """Return the least share for ``case``, or None where none is set."""
    return TARGETS.get(case.num_sms or 0) if case.tokens == TARGET_TOKENS else None


def _share(limited: Row, free: Row, phase: Any) -> float | None:
    """The share by the first method that both have."""
    for method in METHODS:
        with_limit, without = limited.median(phase, method), free.median(phase, method)
        if with_limit and without:
            return without / with_limit
    return None


def share_lines(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return heads and lines of the table of a document's shares; no line where it has none."""
    heads = ["case", "dispatch", "combine", "both", "target of both"]
    lines = []
    for share in document.get("sm_shares", ()):
        words = [f"{share['tokens']} tokens, {share['format']}, {share['num_sms']} SMs"]
        words += ["–" if share[phase] is None else f"{share[phase]:.0%}" for phase in PHASES]
        if share["target"] is None:
            words.append("")
        else:
            met = {True: "met", False: "NOT met", None: "not measured"}[share["met"]]
            few = "" if document["ranks"] >= TARGET_RANKS else f", which is set for {TARGET_RANKS} GPUs or more"
            words.append(f"{share['target']:.0%}: {met}{few}")
        lines.append(words)
    return heads, lines


# --- published figures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """One figure.

    Attributes:
        system: the library.
        hardware: its machine.
        ranks: how many.
        tokens: tokens per rank.
        dispatch, combine: as stated, with their unit.
        conditions: differences from a case of ``moelink bench`` with the same tokens.
        source: where it stands.
    """

    system: str
    hardware: str
    ranks: int
    tokens: int
    dispatch: str
    combine: str
    conditions: str
    source: str


_H20 = (
    "384 experts, top-8, hidden size 7168, fp8 dispatch, bf16 combine; profiler times of the dispatch and the combine "
    "kernel on the slowest rank, without launches; results were not checked in that run"
)
_H20_SOURCE = (
    "github.com/openinfer-project/openinfer, docs/benchmarks/deepep-v2-vs-pplx-moe-backend.md, commit 5f5aef9, "
    "DeepEP 723716f"
)
_README = "github.com/deepseek-ai/DeepEP, README.md, commit 0297fc8"
_README_CONDITIONS = (
    "hidden size 7168, top-8, fp8 dispatch, bf16 combine; logical bandwidth, which counts what stays on a rank"
)

DEEPEP_V2: tuple[Published, ...] = (
    *(
        Published("DeepEP V2", "8 × H20-3e", 8, tokens, f"{dispatch:.1f} µs", f"{combine:.1f} µs", _H20, _H20_SOURCE)
        for tokens, dispatch, combine in (
            (1, 14.621, 10.025), (8, 14.749, 10.467), (32, 17.272, 16.684), (128, 32.042, 42.672),
            (256, 50.735, 71.921),
        )
    ),
    *(
        Published(
            "DeepEP V2", f"8 × SM100 over NVLink, {sms} SMs", 8, 8192, f"{dispatch} GB/s", f"{combine} GB/s",
            _README_CONDITIONS, _README,
        )
        for sms, dispatch, combine in ((64, 726, 740), (24, 643, 675))
    ),
)  # fmt: skip
"""Its own README has no time of 8 Hopper GPUs; the times are another project's measurement of it."""


def beside(cases: Sequence[Case]) -> tuple[Published, ...]:
    """Return published figures for the sizes of ``cases``: fp8_block128, hidden size 7168, top-8, uniform routing."""
    tokens = {
        case.tokens
        for case in cases
        if (case.hidden_size, case.topk, case.format, case.distribution) == (7168, 8, "fp8_block128", "uniform")
        and case.num_sms is None
    }
    return tuple(one for one in DEEPEP_V2 if one.tokens in tokens)


def published_lines(published: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences about the ``published`` figures of a document, one for each source.

    Example: ``"As published, not measured here: DeepEP V2 on 8 × H20-3e, dispatch / combine of 1 token 14.6 µs /
    10.0 µs (conditions; source)"``.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for one in published:
        tokens = f"{one['tokens']} token{'s' * (one['tokens'] != 1)}"
        key = (one["system"], one["hardware"], one["conditions"], one["source"])
        groups.setdefault(key, []).append(f"{tokens} {one['dispatch']} / {one['combine']}")
    return [
        f"As published, not measured here: {system} on {hardware}, dispatch / combine of {'; '.join(figures)} "
        f"({conditions}; {source})"
        for (system, hardware, conditions, source), figures in groups.items()
    ]
