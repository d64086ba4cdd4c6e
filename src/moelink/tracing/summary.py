"""Summarise a trace: median and worst of each moment over all CTAs, ranks and calls, and the slowest peers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from moelink.tracing.device.layout import ROLES, WAITED, Moment, Role
from moelink.tracing.records import CtaRecord


@dataclass(frozen=True)
class MomentSummary:
    """One moment of one role. Times are in the trace's unit.

    Attributes:
        phase, role, moment: their names.
        count: CTAs that stamped it, over all ranks and calls.
        at_median, at_worst: time since the first CTA of the call began on that rank.
        took_median, took_worst: time since the moment before it in the same CTA; 0 for the first one.
        worst_rank, worst_cta, worst_call: the place of ``took_worst``.
        slowest_peer: if this moment awaits peers, the one that came last in most calls of all ranks; else None.
        slowest_share: the part of these calls in which it did.
    """

    phase: str
    role: str
    moment: str
    count: int
    at_median: float
    at_worst: int
    took_median: float
    took_worst: int
    worst_rank: int
    worst_cta: int
    worst_call: int
    slowest_peer: int | None = None
    slowest_share: float = 0.0


@dataclass(frozen=True)
class Summary:
    """A trace in figures.

    Attributes:
        unit: "ns" or "steps".
        moments: by phase, role and moment, in the order of the protocol.
        skew: of each phase, the median over its calls of the time between the first and the last rank's begin.
        clock_error: most error between the times of two ranks.
        clock_step: the smallest difference between two stamps, below which times are not exact.
    """

    unit: str
    moments: tuple[MomentSummary, ...]
    skew: dict[str, float]
    clock_error: int
    clock_step: int

    def __str__(self) -> str:
        if not self.moments:
            return "no call was traced"
        scale, unit, digits = (1000.0, "us", 2) if self.unit == "ns" else (1.0, self.unit, 0)

        def show(value: float) -> str:
            return f"{value / scale:.{digits}f}"

        head = ("phase", "role", "moment", "CTAs", "at", "at worst", "took", "took worst", "where", "slowest peer")
        lines: list[Sequence[str]] = [head]
        for each in self.moments:
            where = f"rank {each.worst_rank} CTA {each.worst_cta} call {each.worst_call}"
            peer = "" if each.slowest_peer is None else f"rank {each.slowest_peer} ({each.slowest_share:.0%})"
            lines.append((
                each.phase, each.role, each.moment, str(each.count), show(each.at_median), show(each.at_worst),
                show(each.took_median), show(each.took_worst), where, peer,
            ))  # fmt: skip
        right = {3, 4, 5, 6, 7}
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = [
            "  ".join(
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        skews = ", ".join(f"{phase} within {show(skew)}" for phase, skew in self.skew.items())
        text += [
            f"times in {unit}, medians and worst over CTAs, ranks and calls; ranks begin {skews}",
            f"clocks of two ranks agree within {show(self.clock_error)} {unit}; stamps differ by at least "
            f"{show(self.clock_step)} {unit}",
        ]
        return "\n".join(text)


def summarise(records: Sequence[CtaRecord], *, unit: str, clock_error: int) -> Summary:
    """Summarise ``records`` of all ranks."""
    begins: dict[tuple[str, int, int], int] = {}
    for record in records:
        key = (record.role.phase, record.call, record.rank)
        begins[key] = min(begins.get(key, record.begin), record.begin)
    moments = [
        found
        for role in ROLES
        for moment in role.moments
        if (found := _of_moment([r for r in records if r.role is role], role, moment, begins)) is not None
    ]
    return Summary(unit, tuple(moments), _skew(begins), clock_error, _step(records))


def _of_moment(
    records: Sequence[CtaRecord], role: Role, moment: Moment, begins: dict[tuple[str, int, int], int]
) -> MomentSummary | None:
    found = [record for record in records if moment.name in record.times]
    if not found:
        return None
    at = [record.times[moment.name] - begins[role.phase, record.call, record.rank] for record in found]
    took = [_took(record, moment.name) for record in found]
    worst = found[took.index(max(took))]
    votes = Counter(
        peer for awaited in role.per_peer if awaited.name == moment.awaits for peer in _last(found, awaited)
    )
    peer, count = votes.most_common(1)[0] if votes else (None, 0)
    return MomentSummary(
        role.phase, role.name, moment.name, len(found), median(at), max(at), median(took), max(took),
        worst.rank, worst.cta, worst.call, peer, count / max(1, votes.total()),
    )  # fmt: skip


def _took(record: CtaRecord, name: str) -> int:
    """Return the time between the stamp before ``name`` in this CTA and ``name``."""
    here = record.times[name]
    # Stamps of one time are in the order of the protocol, and each follows the one before.
    names = sorted(record.times, key=record.times.__getitem__)
    place = names.index(name)
    return here - record.times[names[place - 1]] if place else 0


def _last(records: Iterable[CtaRecord], awaited: Moment) -> Iterator[int]:
    """Yield the peer that came last in each call of each rank, if peers differ.

    All CTAs of a role await the same counts, heads and credits, so the first CTA that saw them counts. Each CTA has
    messages or rows of its own, so of these the last one counts.
    """
    choose = min if awaited.number == WAITED else max
    seen: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for record in records:
        of_call = seen[record.rank, record.call]
        for peer, time in enumerate(record.peers[awaited.name]):
            if time is not None:
                of_call[peer] = choose(of_call.get(peer, time), time)
    for of_call in seen.values():
        if len(of_call) > 1 and len(set(of_call.values())) > 1:
            yield max(of_call, key=of_call.__getitem__)


def _skew(begins: dict[tuple[str, int, int], int]) -> dict[str, float]:
    calls: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (phase, call, _), begin in begins.items():
        calls[phase, call].append(begin)
    phases = dict.fromkeys(role.phase for role in ROLES)
    spreads = {phase: [max(b) - min(b) for (p, _), b in calls.items() if p == phase] for phase in phases}
    return {phase: median(spread) for phase, spread in spreads.items() if spread}


def _step(records: Iterable[CtaRecord]) -> int:
    """Return the smallest difference between two different stamps of one rank, 0 without any."""
    times: dict[int, set[int]] = defaultdict(set)
    for record in records:
        times[record.rank].update(record.times.values())
    ordered = [sorted(each) for each in times.values()]
    return min((b - a for each in ordered for a, b in zip(each, each[1:], strict=False)), default=0)
