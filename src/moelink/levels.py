"""Estimate the costs of one level and of two levels of a transport between nodes, to choose between them.

With one level a token crosses the network once for each *rank* of another node that it goes to; with two levels once
for each *node*, and a rank there forwards it over NVLink. Fewer bytes cross the network, more cross NVLink, and every
token waits for one more hop. ``EPConfig(two_level="auto")`` takes the form that :func:`prefers_two_levels` finds
faster, and ``moelink plan`` counts by the same :func:`crossing`, for any routing.

Legend: ``W`` ranks on ``N`` nodes of ``P``; ``h[r]`` and ``H[n]`` probabilities that a token goes to a rank, or to a
node; all ranks have as many tokens. From rank s of node n there leave, and at rank d there arrive, copies per token:

====================  =======================================  ==================
link                  out of s                                 into d
====================  =======================================  ==================
one level: NVLink     sum of h[r] over other r on n            (P - 1) h[d]
one level: network    sum of h[r] over all other nodes         (W - P) h[d]
two levels: NVLink    N x sum of h[r] over other r on n        N (P - 1) h[d]
two levels: network   sum of H over other nodes                (N - 1) H[n]
====================  =======================================  ==================

That is of dispatch. In combine every copy brings a row back over the same links, so directions are exchanged. A link
carries both directions at once, so the larger one counts, and of all ranks the largest.

"auto" estimates for uniform routing with ``max_tokens_per_rank`` tokens on every rank. Its rates are **assumptions**,
of a machine with NVLink and one 400 Gb/s adapter a GPU; nothing here was fitted to a network, because none was
available.

Example: 256 experts, top-8, 2 nodes of 8 ranks: a token goes to 3.26 ranks of the other node on average, and to the
node with probability 0.997. So 128 tokens in fp8_block128 of 7168 are 3.15 MB over the network with one level, and 0.98
MB with two, whose messages are a little longer: they carry the ids and slots that the forwarding rank needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb

from moelink.routing import ExpertMap


@dataclass(frozen=True)
class Rates:
    """Of one rank.

    Attributes:
        nvlink_gb_per_s, network_gb_per_s: 10**9 bytes a second that its link carries in one direction.
        forward_us: microseconds that forwarding adds to a phase that moves nothing: a signal that is waited for, a row
            that is read and stored, and a second signal.
    """

    nvlink_gb_per_s: float
    network_gb_per_s: float
    forward_us: float

    def microseconds(self, nvlink: float, network: float) -> float:
        """Return how long the slower link takes for these bytes: both work at the same time.

        >>> Rates(400.0, 50.0, 8.0).microseconds(4e6, 1e6)
        20.0
        """
        return max(nvlink / self.nvlink_gb_per_s, network / self.network_gb_per_s) / 1e3


ASSUMED = Rates(nvlink_gb_per_s=350.0, network_gb_per_s=50.0, forward_us=8.0)
"""The rates that ``two_level="auto"`` assumes of a machine that it has not measured."""


def hit_probability(num_experts: int, topk: int, owned: int) -> float:
    """Return how probable it is that a token names one of ``owned`` experts, of ``topk`` different ones of all.

    >>> hit_probability(4, 2, 1)
    0.5
    """
    return 1.0 - comb(max(0, num_experts - owned), topk) / max(1, comb(num_experts, topk))


@dataclass(frozen=True)
class Crossing:
    """Copies over the links, for each token that every rank has.

    Attributes:
        nvlink, network: over the busier direction of the busiest rank's link.
        total_nvlink, total_network: sent by all ranks together.
    """

    nvlink: float
    network: float
    total_nvlink: float
    total_network: float


def crossing(rank_hits: Sequence[float], node_hits: Sequence[float], *, two_level: bool) -> Crossing:
    """Return the bytes that cross the links, from ``h`` [W] and ``H`` [N].

    Example: 2 ranks of one node, each hit by every token: 1 copy over NVLink, 2 in total, none over the network.
    """
    ranks, nodes = len(rank_hits), len(node_hits)
    per_node, to_ranks, to_nodes = ranks // nodes, sum(rank_hits), sum(node_hits)
    spread = nodes if two_level else 1  # ranks whose tokens one rank stores on its node
    nvlink_out, nvlink_in, network_out, network_in = [], [], [], []
    for node, node_hit in enumerate(node_hits):
        own = rank_hits[node * per_node : (node + 1) * per_node]
        to_own = sum(own)
        for hit in own:
            nvlink_out.append(spread * (to_own - hit))
            nvlink_in.append(spread * (per_node - 1) * hit)
            network_out.append(to_nodes - node_hit if two_level else to_ranks - to_own)
            network_in.append((nodes - 1) * node_hit if two_level else (ranks - per_node) * hit)
    if per_node == 1:  # what is left of rounding is no copy
        nvlink_out = [0.0] * ranks
    if nodes == 1:
        network_out = [0.0] * ranks
    return Crossing(max(*nvlink_out, *nvlink_in), max(*network_out, *network_in), sum(nvlink_out), sum(network_out))


@dataclass(frozen=True)
class Routes:
    """Where the tokens of a layer go.

    Attributes:
        tokens: of each rank.
        rank_hits, node_hits: [W] and [N], how probable it is that a token goes to each rank, and to each node.
    """

    tokens: int
    rank_hits: tuple[float, ...]
    node_hits: tuple[float, ...]

    @classmethod
    def uniform(cls, *, num_experts: int, topk: int, tokens: int, ranks: int, per_node: int) -> Routes:
        """Return the routes of uniform routing."""
        experts = ExpertMap(num_experts, ranks)
        firsts = [experts.first(rank) for rank in range(ranks + 1)]
        by_rank, by_node = (
            tuple(hit_probability(num_experts, min(topk, num_experts), end - begin) for begin, end in pairwise(bounds))
            for bounds in (firsts, firsts[::per_node])
        )
        return cls(tokens, by_rank, by_node)

    def microseconds(self, *, two_level: bool, near: int, far: int, rates: Rates = ASSUMED) -> float:
        """Return the time that the links and forwarding add to a phase, whose copies are of ``near`` bytes over NVLink
        and of ``far`` over the network."""
        load = crossing(self.rank_hits, self.node_hits, two_level=two_level)
        moved = rates.microseconds(self.tokens * load.nvlink * near, self.tokens * load.network * far)
        return moved + (rates.forward_us if two_level else 0.0)


def prefers_two_levels(routes: Routes, *, message: int, relay: int, row: int, rates: Rates = ASSUMED) -> bool:
    """Return whether dispatch and combine together are estimated faster with two levels.

    ``message``, ``relay``, ``row``: bytes of a message, of one on its way through another node, and of a row home.
    """
    one, two = (
        routes.microseconds(two_level=two_level, near=message, far=relay if two_level else message, rates=rates)
        + routes.microseconds(two_level=two_level, near=row, far=row, rates=rates)
        for two_level in (False, True)
    )
    return two < one
