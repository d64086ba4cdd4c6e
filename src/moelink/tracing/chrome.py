"""Write a trace as events of Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing read.

A rank is a process, an SM a thread of it: a track. A CTA is a slice of its SM's track, and inside it there is a slice
for each moment, from the moment before it. CTAs that share an SM at the same time would overlap, so they have tracks
beside one another: "SM 12", "SM 12 (2)". A moment of a peer is a mark on the CTA's track.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from moelink.tracing.records import CtaRecord

TRACKS = 64
"""Tracks of an SM; the first track of SM n has the number n * TRACKS."""


def events_of(records: Sequence[CtaRecord], *, unit: str) -> list[dict[str, Any]]:
    """Return the events. Times count from the first stamp of all, in microseconds; a step counts as one."""
    origin = min((record.begin for record in records), default=0)
    scale = 1000.0 if unit == "ns" else 1.0
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({record.rank for record in records})
    ]
    for (rank, sm), of_sm in sorted(_by_sm(records).items()):
        ends: list[int] = []
        for record in of_sm:
            lane = next((i for i, end in enumerate(ends) if end <= record.begin), len(ends))
            if lane == len(ends):
                name = f"SM {sm}" if lane == 0 else f"SM {sm} ({lane + 1})"
                thread = {"pid": rank, "tid": sm * TRACKS + lane}
                events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": name}})
                events.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}})
                ends.append(0)
            ends[lane] = record.end
            events += _of_cta(record, {"pid": rank, "tid": sm * TRACKS + lane}, origin, scale)
    return events


def _by_sm(records: Iterable[CtaRecord]) -> dict[tuple[int, int], list[CtaRecord]]:
    """Return the records of each rank and SM, in the order in which they began."""
    found: dict[tuple[int, int], list[CtaRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: (record.begin, record.end)):
        found[record.rank, record.sm].append(record)
    return found


def _of_cta(record: CtaRecord, track: dict[str, int], origin: int, scale: float) -> Iterator[dict[str, Any]]:
    def at(time: int) -> float:
        return (time - origin) / scale

    args = {"call": record.call, "cta": record.cta}
    whole = {"ph": "X", **track, "cat": record.role.phase}
    yield {**whole, "name": record.name, "ts": at(record.begin), "dur": at(record.end) - at(record.begin), "args": args}
    before = record.begin
    for name, time in sorted(record.times.items(), key=lambda item: item[1]):
        if name != "begun":
            yield {**whole, "name": name, "ts": at(before), "dur": at(time) - at(before), "args": args}
        before = time
    for name, times in record.peers.items():
        for peer, when in enumerate(times):
            if when is not None:
                mark = {"ph": "i", "s": "t", **track, "cat": record.role.phase}
                yield {**mark, "name": f"{name} rank {peer}", "ts": at(when), "args": {"call": record.call}}
