"""Verdicts: is moelink's symmetric transport faster than everybody else in the run, and as fast as the wire allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moelink.tools.bench.contenders import SYMMETRIC
from moelink.tools.bench.measure import PHASES, Phase
from moelink.tools.bench.report import METHODS, CaseResult, Method, Row

WIRE_TOKENS = 4096
"""From this many tokens on the wire is the limit."""

WIRE_SHARE, WIRE_SLACK_US = 1.05, 10.0

RULE = (
    f"faster: a lower median than every other contender of the case, by the same method (CUDA graph replay where both "
    f"have it, else pairs inside a graph, else eager calls). At the wire, from {WIRE_TOKENS} tokens on: a median of at "
    f"most {WIRE_SHARE} x the busiest link's bytes / the ceiling of the same run + {WIRE_SLACK_US:.0f} us"
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


@dataclass(frozen=True)
class Verdict:
    """Of one case and phase.

    Attributes:
        case: its index.
        duels: with everybody else who could be measured.
        faster: in all of them; None without any.
        wire_us, allowed_us: time of the busiest link at the ceiling, and with what is allowed on top; None where the
            wire is not judged.
        within_wire: the median by the first of ``METHODS`` that was used is at most ``allowed_us``, or None.
        text: all that in a line.
    """

    case: int
    phase: Phase
    duels: tuple[Duel, ...]
    faster: bool | None
    wire_us: float | None
    allowed_us: float | None
    within_wire: bool | None
    text: str


def judge(cases: Sequence[CaseResult], rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """A verdict for each case and phase in which moelink's symmetric transport was measured."""
    verdicts = []
    for case in cases:
        of_case = {row.contender: row for row in rows if row.case == case.index and not row.reason}
        ours = of_case.pop(SYMMETRIC, None)
        if ours is not None:
            verdicts += [judge_phase(case, phase, ours, of_case) for phase in PHASES if phase in ours.phases]
    return tuple(verdicts)


def judge_phase(case: CaseResult, phase: Phase, ours: Row, others: Mapping[str, Row]) -> Verdict:
    """The verdict of one case and phase."""
    duels = []
    for name, row in others.items():
        method = next(
            (m for m in METHODS if ours.median(phase, m) is not None and row.median(phase, m) is not None), None
        )
        if method is not None:
            mine, theirs = ours.median(phase, method), row.median(phase, method)
            assert mine is not None
            assert theirs is not None
            duels.append(Duel(name, method, mine, theirs))
    faster = all(duel.faster for duel in duels) if duels else None
    words = [f"{duel.theirs / duel.ours:.2f} times as fast as {duel.contender}, {duel.method}" for duel in duels]
    wire_us = allowed = within = None
    best = ours.best(phase)
    if phase != "both" and case.case.tokens >= WIRE_TOKENS and case.case.num_sms is None and best is not None:
        wire_us = case.wire_us(phase)
        if wire_us is not None:
            allowed = WIRE_SHARE * wire_us + WIRE_SLACK_US
            within = best.median <= allowed
            words.append(f"{best.median:.1f} us of {allowed:.1f} us allowed by the wire")
    verdict = {True: "faster", False: "NOT faster", None: "alone"}[faster]
    if within is not None:
        verdict += ", at the wire" if within else ", NOT at the wire"
    text = f"{case.case.label}, {phase}: {verdict}" + (f" ({'; '.join(words)})" if words else "")
    return Verdict(case.index, phase, tuple(duels), faster, wire_us, allowed, within, text)


def overall(flags: Sequence[bool | None]) -> bool | None:
    """All of those that are not None; None when there is none."""
    known = [flag for flag in flags if flag is not None]
    return all(known) if known else None
