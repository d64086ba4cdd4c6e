"""Name the problems of an examination, their places, and advice for each."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moelink.tools.doctor.board import FORMS
from moelink.tools.doctor.pairs import Pair, link_of, nominal_gb_per_s
from moelink.tools.documents import Maybe, take

SHARE_OF_NOMINAL = 0.4
SHARE_OF_MEDIAN = 0.25
TIMES_MEDIAN = 10.0
LEAST_FREE = 0.5
MOST_SKEW_SECONDS = 2.0
"""A pair is slow below these shares of the nominal rate of its link, or of the median of pairs of its kind, or above so
many times their latency. A device is busy with less than this share of its memory free. Clocks of machines differ by
more than this only if they are not synchronised."""


@dataclass(frozen=True)
class Problem:
    """A problem.

    Attributes:
        where: "rank 3", "ranks 0 and 3", "format mxfp8".
        what: the expected and the found value.
        advice: a remedy.
    """

    where: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.advice}"


@dataclass(frozen=True)
class Examination:
    """The findings of all ranks. An entry is None if its rank did not answer in time, or in another form than
    :data:`moelink.tools.doctor.board.FORMS`.

    Attributes:
        facts: of :func:`moelink.tools.doctor.facts.facts_of`.
        times: seconds since 1970 on each rank's machine, at about the same moment.
        reached: by rank, the results of its probes: "answers", "refuses" or "is silent" by peer.
        mesh: "ok", or why the process group could not be connected on this rank; empty if it was not tried.
        pairs: the measurements.
        broken: pairs whose measurement failed, with the reason.
        formats: by rank, "ok" or the error by format; empty if formats were not tried.
        odd: by rank, the first step in which its answer was not of the form.
    """

    facts: Sequence[Mapping[str, Any] | None]
    times: Sequence[float | None] = ()
    reached: Sequence[Mapping[int, str] | None] = ()
    mesh: Sequence[str | None] = ()
    pairs: Sequence[Pair] = ()
    broken: Mapping[tuple[int, int], str] | None = None
    formats: Sequence[Mapping[str, str] | None] = ()
    odd: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take entries of the right form only: the diagnosis and all output rely on it."""
        odd = dict(self.odd)
        for step in ("facts", "times", "reached", "mesh", "formats"):
            taken: list[Any] = []
            for rank, each in enumerate(getattr(self, step)):
                try:
                    taken.append(take(each, Maybe(FORMS[step])))
                except ValueError:
                    taken.append(None)
                    odd.setdefault(rank, step)
            object.__setattr__(self, step, tuple(taken))
        object.__setattr__(self, "odd", odd)


def diagnose(found: Examination) -> list[Problem]:
    """Return the problems of an examination, causes before effects."""
    present = {rank: facts for rank, facts in enumerate(found.facts) if facts is not None}
    return [
        *_odd_answers(found.odd),
        *_missing(found.facts, found.odd),
        *_versions(present),
        *_devices(present),
        *_clocks(found.times),
        *_unreachable(found.reached),
        *_mesh(found.mesh),
        *_slow(found, present),
        *_formats(found.formats),
    ]


def _odd_answers(odd: Mapping[int, str]) -> Iterator[Problem]:
    for rank, step in sorted(odd.items()):
        what = f"expected its {step.split()[0]} in the form of this version, got another"
        advice = "install the same versions everywhere, and let only the job's machines reach the port of the store"
        yield Problem(f"rank {rank}", what, advice)


def _missing(facts: Sequence[Mapping[str, Any] | None], odd: Mapping[int, str]) -> Iterator[Problem]:
    for rank, each in enumerate(facts):
        if each is None and rank not in odd:
            yield Problem(f"rank {rank}", "expected its facts, got none in time", "start it, or read its log")


def _odd_ones(values: Mapping[int, Any], words: str, advice: str) -> Iterator[Problem]:
    """Yield a problem for each rank whose value is not the most frequent one (of two as frequent, the first)."""
    most = Counter(values.values()).most_common(1)[0][0] if values else None
    for rank, value in values.items():
        if value != most:
            yield Problem(f"rank {rank}", f"expected {words} {most} as on most ranks, got {value or 'none'}", advice)


def _versions(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Problem]:
    names = dict.fromkeys(name for each in facts.values() for name in each["versions"])
    for name in names:
        values = {rank: each["versions"].get(name) for rank, each in facts.items()}
        yield from _odd_ones(values, name, "install the same versions everywhere")


def _devices(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Problem]:
    devices = {rank: each["device"] for rank, each in facts.items()}
    yield from _odd_ones({rank: each["name"] for rank, each in devices.items()}, "a device", "use equal machines")
    for name, words in (("driver_version", "driver"), ("clocks.max.sm", "highest clock in MHz")):
        values = {rank: device["driver"].get(name) for rank, device in devices.items()}
        yield from _odd_ones(values, words, "set up all machines alike")
    for rank, device in devices.items():
        if device["driver"].get("clocks_event_reasons.hw_slowdown") == "Active":
            clocks = f"{device['driver'].get('clocks.sm')} of {device['driver'].get('clocks.max.sm')} MHz"
            what = f"expected a device at full speed, got one that the hardware slows down ({clocks})"
            yield Problem(f"rank {rank}", what, "check its cooling and power")
        if device["kind"] == "cuda" and device["free"] < LEAST_FREE * device["total"]:
            what = f"expected at least half of the memory free, got {device['free'] / 2**30:.1f} GiB"
            yield Problem(f"rank {rank}", what, "end what else runs on the device (nvidia-smi names it)")


def _clocks(times: Sequence[float | None]) -> Iterator[Problem]:
    known = [each for each in times if each is not None]
    if not known:
        return
    middle = statistics.median_low(known)
    for rank, each in enumerate(times):
        if each is not None and abs(each - middle) > MOST_SKEW_SECONDS:
            what = f"expected the time of most machines, got one that is {each - middle:+.1f} s off"
            yield Problem(f"rank {rank}", what, "synchronise its clock (chrony, ntp), or logs cannot be compared")


def _unreachable(reached: Sequence[Mapping[int, str] | None]) -> Iterator[Problem]:
    failed: defaultdict[int, dict[int, str]] = defaultdict(dict)
    for rank, each in enumerate(reached):
        for peer, word in (each or {}).items():
            if word != "answers":
                failed[peer][rank] = word
    for peer, by_rank in sorted(failed.items()):
        words = ", ".join(dict.fromkeys(by_rank.values()))
        what = f"expected an answer at the address of its probe server, got none from ranks {sorted(by_rank)} ({words})"
        advice = "open the ports between the machines, or set MOELINK_PROBE_HOST to an address that peers reach"
        yield Problem(f"rank {peer}", what, advice)


def _mesh(mesh: Sequence[str | None]) -> Iterator[Problem]:
    for rank, word in enumerate(mesh):
        if word not in ("ok", ""):
            what = f"expected a process group over all ranks, got {word or 'no word in time'}"
            yield Problem(f"rank {rank}", what, "check firewalls, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME")


def _slow(found: Examination, facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Problem]:
    for (first, second), reason in (found.broken or {}).items():
        yield Problem(f"ranks {first} and {second}", f"expected messages to pass, got {reason}", "check their link")
    for pair, what in slow_pairs(found.pairs, facts):
        advice = "check the link between them, and what else uses it"
        times = f" at best, in {pair.samples} measurements" if pair.samples > 1 else ""
        yield Problem(f"ranks {pair.first} and {pair.second}", what + times, advice)


def slow_pairs(
    pairs: Sequence[Pair], facts: Mapping[int, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Pair, str]]:
    """Yield each pair that is slow for its link or among its kind, and the expected value; ``facts`` by rank."""
    by_link: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_link[link_of(facts[pair.first], facts[pair.second])].append(pair)
    for link, alike in by_link.items():
        rate = statistics.median(pair.gb_per_s for pair in alike)
        latency = statistics.median(pair.latency_us for pair in alike)
        for pair in alike:
            nominal = nominal_gb_per_s(link, facts[pair.first]["device"]["name"])
            if nominal is not None and pair.gb_per_s < SHARE_OF_NOMINAL * nominal:
                least = SHARE_OF_NOMINAL * nominal
                yield pair, f"expected more than {least:.0f} GB/s of {link}, got {pair.gb_per_s:.1f}"
            elif pair.gb_per_s < SHARE_OF_MEDIAN * rate:
                yield pair, f"expected about {rate:.2g} GB/s as other pairs over {link}, got {pair.gb_per_s:.2g}"
            elif pair.latency_us > TIMES_MEDIAN * latency:
                yield pair, f"expected about {latency:.0f} us as other pairs over {link}, got {pair.latency_us:.0f}"


def _formats(formats: Sequence[Mapping[str, str] | None]) -> Iterator[Problem]:
    said: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, each in enumerate(formats):
        for name, word in (each or {"all": "no word in time"}).items():
            if word != "ok":
                said[name, word].append(rank)
    for (name, word), ranks in said.items():
        what = f"expected tokens to come home unchanged, got on ranks {ranks}: {word}"
        advice = "report it with the output of `moelink env --full`, if nothing above explains it"
        yield Problem(f"format {name}", what, advice)
