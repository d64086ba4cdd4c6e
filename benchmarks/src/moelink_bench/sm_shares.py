"""How much of the full speed is left with an SM limit: what the preset ``sms`` is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moelink.tools.results import METHODS, SYMMETRIC
from moelink_bench.measure import PHASES
from moelink_bench.presets import Case
from moelink_bench.report import CaseResult, Row

TARGETS = {24: 0.6, 64: 0.9}
"""SM limit to the least share of the full speed, of a pair."""
TARGET_TOKENS, TARGET_RANKS = 4096, 4
"""Tokens per rank of the targets, and the fewest ranks that they are set for."""

SHARE_RULE = (
    "share of the full speed: median of the same case without an SM limit / median with it, by the same method. "
    f"Targets, for {TARGET_TOKENS} tokens per rank on {TARGET_RANKS} GPUs or more: "
    + ", ".join(f"{share:.0%} of the pair's speed with {sms} SMs" for sms, share in TARGETS.items())
)


@dataclass(frozen=True)
class SmShare:
    """moelink symmetric with one SM limit on one case.

    Attributes:
        case: index of the case with the limit.
        tokens, format: of the case.
        num_sms: the limit.
        dispatch, combine, both: share of the full speed, 1 for no loss, or None without a figure.
        target: least share of ``both``, or None where none is set.
        met: the target is met, or None without a target or a figure.
    """

    case: int
    tokens: int
    format: str
    num_sms: int
    dispatch: float | None
    combine: float | None
    both: float | None
    target: float | None
    met: bool | None


def shares_of(cases: Sequence[CaseResult], rows: Sequence[Row]) -> tuple[SmShare, ...]:
    """Return the shares of all cases with an SM limit whose case without one was measured too."""
    ours = {row.case: row for row in rows if row.contender == SYMMETRIC and not row.reason}
    whole = {case.case: case.index for case in cases if case.case.num_sms is None}
    shares = []
    for case in cases:
        full = whole.get(replace(case.case, num_sms=None))
        if case.case.num_sms is None or full is None or full not in ours or case.index not in ours:
            continue
        limited, free = ours[case.index], ours[full]
        by_phase = {phase: _share(limited, free, phase) for phase in PHASES}
        target = target_of(case.case)
        both = by_phase["both"]
        met = None if target is None or both is None else both >= target
        shares.append(
            SmShare(
                case.index, case.case.tokens, case.case.format, case.case.num_sms, **by_phase, target=target, met=met
            )
        )
    return tuple(shares)


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
