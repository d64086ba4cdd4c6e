"""From bytes to microseconds.

    time = floor + per_peer x peers + hop (on several nodes)          what a call costs that moves nothing
         + max(NVLink bytes / NVLink rate, network bytes / network rate)
         + memory bytes / memory rate + quantised bytes / quantising rate

Where each part comes from:

* A phase is finished when its slowest rank is, and that is the one with the busiest link: bytes are those of
  :mod:`~moelink.tools.plan.traffic`, already the largest over ranks and directions.
* NVLink and network are different hardware and work at the same time, so the slower one counts and not their sum (for
  one copy per node this supposes that forwarding runs while later tokens arrive). Neither is shared: ``network rate``
  is that of the part of a node's adapters that falls to one rank.
* Before the first row arrives and after the last one there is work that no amount of bytes hides: launch, counting,
  exchange of counts, signals. ``floor`` is that for one rank, and each peer that signals are exchanged with costs
  ``per_peer``: W - 1 ranks, or with one copy per node P - 1 of the node and N - 1 beyond.
* Links and memory are not overlapped: a rank places rows when they have arrived. That makes the prediction linear in
  the reciprocals of all rates, on which :mod:`~moelink.tools.plan.fit` relies; where kernels do overlap them, the
  fitted rates come out higher than the hardware's.
* In formats with scales a sender brings each row into the format once, however many ranks it goes to. That takes
  instructions, not bytes, so it has a rate of its own: of the bytes that rows had before, bf16.

It knows nothing of contention inside the network, of skew between ranks, or of kernels other than those it was fitted
to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moelink.tools.plan.constants import PhaseConstants
from moelink.tools.plan.traffic import Copies, LinkBytes

Link = Literal["NVLink", "network"]
Part = Literal["latency", "NVLink", "network", "memory", "quantising", "nothing"]


@dataclass(frozen=True)
class Shape:
    """Where ranks are: their number, and that of nodes."""

    ranks: int
    nodes: int

    def peers(self, copies: Copies) -> int:
        """Ranks that one rank exchanges signals with. 16 ranks on 2 nodes: 15, or 7 + 1 with one copy per node."""
        if copies == "rank":
            return self.ranks - 1
        return self.ranks // self.nodes - 1 + self.nodes - 1


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


def predict(links: LinkBytes, constants: PhaseConstants, shape: Shape, copies: Copies) -> Time:
    """The time of one phase.

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
        latency = constants.floor_us + constants.per_peer_us * shape.peers(copies) + hop
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
