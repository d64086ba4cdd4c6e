"""The time model, from bytes to microseconds, and its constants.

    time = floor + per_peer x peers + hop (on several nodes)          the time of a call that moves nothing
         + forward (on several nodes, with one copy per node)
         + max(NVLink bytes / NVLink rate, network bytes / network rate)
         + memory bytes / memory rate + quantised bytes / quantising rate

Where each part comes from:

* A phase ends with its slowest rank, the rank with the busiest link: bytes are those of
  :mod:`~moelink.tools.plan.traffic`, already the largest over ranks and directions.
* NVLink and network are different hardware and work at the same time, so the slower one counts and not their sum (for
  one copy per node this supposes that forwarding runs while later tokens arrive). Neither is shared: ``network rate``
  is that of the part of a node's adapters that falls to one rank.
* Before the first row arrives and after the last one there is work that no amount of bytes hides: launch, counting,
  exchange of counts, signals. ``floor`` is that for one rank, and each of the W - 1 peers costs ``per_peer``: also with
  one copy per node every rank exchanges counts with every other. The time of forwarding is ``forward``; it has not
  been measured, and defaults to the assumption of ``two_level="auto"`` (:data:`moelink.levels.ASSUMED`).
* Links and memory are not overlapped: a rank places rows when they have arrived. That makes the prediction linear in
  the reciprocals of all rates, on which :mod:`~moelink.tools.plan.fit` relies; where kernels do overlap them, the
  fitted rates come out higher than the hardware's.
* In formats with scales a sender brings each row into the format once, however many ranks it goes to. That takes
  instructions, not bytes, so it has a rate of its own: of the bytes that rows had before, bf16.

It knows nothing of contention inside the network, of skew between ranks, or of kernels other than those it was fitted
to.

**Constants** each have a source: a measured file, or an assumption of the caller.

A constants file is JSON, written by ``moelink plan fit`` from results of ``moelink bench``
(:mod:`~moelink.tools.plan.constants_file` has the fields of all such files)::

    {"schema_version": 1, "kind": "moelink plan constants", "machine": "...", "fitted_to": [...],
     "contender": "moelink symmetric", "method": "graph", "ranks": [...], "tokens": [...], "formats": [...],
     "largest_error": ..., "phases": {"dispatch": {...}, "combine": {...}}}

A phase holds the fields of :class:`PhaseConstants`; null where the results could not tell. The package may hold one
such file, ``constants.json`` beside this module; without that file, only given constants have a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moelink.levels import ASSUMED
from moelink.tools.documents import RANKS, TEXT, Maybe
from moelink.tools.plan.constants_file import RATE, US, ConstantsFile, check_fields, runs_text
from moelink.tools.plan.traffic import PHASES, Copies, LinkBytes
from moelink.transports.base import Phase

FIELD_FORMS = {
    "floor_us": Maybe(US), "per_peer_us": US, "nvlink_gb_per_s": Maybe(RATE), "network_gb_per_s": Maybe(RATE),
    "memory_gb_per_s": Maybe(RATE), "hop_us": US, "quantising_gb_per_s": Maybe(RATE),
}  # fmt: skip
FIELDS = tuple(FIELD_FORMS)
FILE = ConstantsFile(
    kind="moelink plan constants", command="moelink plan fit", packaged="constants.json",
    form={"contender": TEXT, "method": TEXT, "ranks": [RANKS], "phases": dict.fromkeys(PHASES, FIELD_FORMS)},
)  # fmt: skip


@dataclass(frozen=True)
class PhaseConstants:
    """Of dispatch or of combine; None where unknown.

    Attributes:
        floor_us: microseconds of a call that moves nothing.
        per_peer_us: microseconds more for each rank that signals are exchanged with.
        nvlink_gb_per_s, network_gb_per_s: 10**9 bytes a second that one rank's link carries in one direction.
        memory_gb_per_s: that a rank reads and writes in its own memory; None leaves this part out of the model.
        quantising_gb_per_s: of rows in bf16, that a sender brings into a format with scales; None leaves it out.
        hop_us: microseconds more when ranks are on several nodes.
    """

    floor_us: float | None = None
    per_peer_us: float = 0.0
    nvlink_gb_per_s: float | None = None
    network_gb_per_s: float | None = None
    memory_gb_per_s: float | None = None
    hop_us: float = 0.0
    quantising_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, FIELD_FORMS)


@dataclass(frozen=True)
class Constants:
    """All constants and their provenance.

    Attributes:
        phases: constants by phase.
        sources: by field of :class:`PhaseConstants`, "fitted: ..." or "assumed: ..."; absent without a value.
        ranks: numbers of ranks that measured values were fitted to; empty without any.
        description: of the measured machine, in a line, or "".
        forward_us: microseconds more per phase of a message or row that is forwarded: assumed, as ``forward_source``
            says.
    """

    phases: Mapping[Phase, PhaseConstants] = field(default_factory=lambda: dict.fromkeys(PHASES, PhaseConstants()))
    sources: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    description: str = ""
    forward_us: float = ASSUMED.forward_us
    forward_source: str = "assumed: moelink.levels"

    def __post_init__(self) -> None:
        check_fields(self, {"forward_us": US})

    def assume(self, given: Mapping[str, tuple[float | None, str]]) -> Constants:
        """Replace fields in both phases. ``given``: field to (value or None, option's name).

        A given ``floor_us`` is the whole latency of a call, so that a measured ``per_peer_us`` no longer comes on top.
        """
        values = {name: value for name, (value, _) in given.items() if value is not None}
        sources = {name: f"assumed: {option} {value:g}" for name, (value, option) in given.items() if value is not None}
        merged = {**self.sources, **sources}
        if "floor_us" in values and "per_peer_us" not in values:
            values["per_peer_us"] = 0.0
            merged.pop("per_peer_us", None)
        phases = {phase: dataclasses.replace(self.phases[phase], **values) for phase in PHASES}
        return dataclasses.replace(self, phases=phases, sources=merged)

    def forwarding(self, us: float, option: str) -> Constants:
        """Replace ``forward_us``; ``option``: the option that gave it."""
        return dataclasses.replace(self, forward_us=us, forward_source=f"assumed: {option} {us:g}")

    def for_combine_format(self) -> Constants:
        """Let rows on their way home be quantised as fast as those of dispatch, if no rate was measured for them."""
        known, combine = self.phases["dispatch"].quantising_gb_per_s, self.phases["combine"]
        if combine.quantising_gb_per_s is not None or known is None:
            return self
        phases = {**self.phases, "combine": dataclasses.replace(combine, quantising_gb_per_s=known)}
        source = f"{self.sources['quantising_gb_per_s']}; assumed to be that of combine too"
        return dataclasses.replace(self, phases=phases, sources={**self.sources, "quantising_gb_per_s": source})

    @property
    def are_measured(self) -> bool:
        """Every constant that has a source was fitted to measured times, and there is one."""
        return bool(self.sources) and not any("assumed" in source for source in self.sources.values())


def read_constants(document: object, name: str) -> Constants:
    """Read constants from a file's content; messages and sources call the file ``name``.

    Raises:
        ConfigError: it is no constants file of this version, or a value is not acceptable.
    """
    content = FILE.checked(document, name)
    phases = {phase: PhaseConstants(**{f: content["phases"][phase][f] for f in FIELDS}) for phase in PHASES}
    # A fit to one node has a hop of 0 us for lack of data.
    known = [f for f in FIELDS if any(getattr(phases[phase], f) for phase in PHASES)]
    what = f"{content['machine']}, {content['contender']} by {content['method']}"
    description = f"{what}, fitted to {runs_text(content)}"
    return Constants(phases, {f: f"fitted: {name}" for f in known}, tuple(content["ranks"]), description)


def load_constants(path: Path) -> Constants:
    """Read a constants file.

    Raises:
        ConfigError: it cannot be read, or :func:`read_constants` refuses it.
    """
    return read_constants(*FILE.load(path))


def packaged_constants() -> Constants:
    """Return the measured constants that come with the package; none when it holds no file of them."""
    found = FILE.load_packaged()
    return Constants() if found is None else read_constants(*found)


Link = Literal["NVLink", "network"]
Part = Literal["latency", "NVLink", "network", "memory", "quantising", "nothing"]


@dataclass(frozen=True)
class Shape:
    """Where ranks are: their number, and that of nodes."""

    ranks: int
    nodes: int

    @property
    def peers(self) -> int:
        """The ranks that one rank exchanges counts and signals with."""
        return self.ranks - 1


@dataclass(frozen=True)
class Time:
    """The predicted time of one phase, microseconds.

    Attributes:
        latency_us, nvlink_us, network_us, memory_us, quantising_us: the parts; of NVLink and network the larger one
            counts.
        total_us: their combination; None when a constant is missing.
        busiest_link: the link that takes longest, or None when nothing travels or rates are missing.
        limit: the largest part of the total.
        missing: constants without which there is no total.
    """

    latency_us: float | None
    nvlink_us: float | None
    network_us: float | None
    memory_us: float
    quantising_us: float
    total_us: float | None
    busiest_link: Link | None
    limit: Part | None
    missing: tuple[str, ...] = ()


def microseconds(nbytes: float, gb_per_s: float | None) -> float | None:
    """Time of ``nbytes`` at a rate: 1e6 bytes at 100 GB/s take 10 us; no bytes take 0; None without a rate."""
    if nbytes == 0:
        return 0.0
    return None if gb_per_s is None else nbytes / gb_per_s / 1e3


def predict(
    links: LinkBytes, constants: PhaseConstants, shape: Shape, copies: Copies, forward_us: float = ASSUMED.forward_us
) -> Time:
    """Predict the time of one phase.

    Example: floor 10 us, 400 GB/s of NVLink and 50 of network, 4e6 and 1e6 bytes: 10 + max(10, 20) = 30 us, limited by
    the network.
    """
    nvlink = microseconds(links.nvlink, constants.nvlink_gb_per_s)
    network = microseconds(links.network, constants.network_gb_per_s)
    memory = 0.0 if constants.memory_gb_per_s is None else links.memory / constants.memory_gb_per_s / 1e3
    rate = constants.quantising_gb_per_s
    quantising = 0.0 if rate is None else links.quantised / rate / 1e3
    latency = None
    if constants.floor_us is not None:
        hop = constants.hop_us if shape.nodes > 1 else 0.0
        latency = constants.floor_us + constants.per_peer_us * shape.peers + hop
        latency += forward_us if copies == "node" and shape.nodes > 1 else 0.0
    values = {"floor_us": latency, "nvlink_gb_per_s": nvlink, "network_gb_per_s": network}
    missing = tuple(name for name, value in values.items() if value is None)
    if nvlink is None or network is None:
        return Time(latency, nvlink, network, memory, quantising, None, None, None, missing)
    busiest: Link | None = None if nvlink == network == 0 else "NVLink" if nvlink >= network else "network"
    if latency is None:
        return Time(latency, nvlink, network, memory, quantising, None, busiest, None, missing)
    parts: dict[Part, float] = {
        "latency": latency, "NVLink": nvlink, "network": network, "memory": memory, "quantising": quantising
    }  # fmt: skip
    limit = max(parts, key=parts.__getitem__)
    total = latency + max(nvlink, network) + memory + quantising
    return Time(latency, nvlink, network, memory, quantising, total, busiest, limit if total else "nothing")
