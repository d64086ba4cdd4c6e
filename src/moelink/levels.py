"""Estimate what one level and two levels of a transport between nodes cost, to choose between them.

With one level a token crosses the network once for each *rank* of another node that it goes to; with two levels once
for each *node*, and a rank there forwards it over NVLink. Fewer bytes cross the network, more cross NVLink, and every
token waits for one more hop. ``EPConfig(two_level="auto")`` takes the form that this estimate finds faster, and
``moelink plan`` shows the same numbers for any routing.

The estimate is of uniform routing with ``max_tokens_per_rank`` tokens on every rank. The rates are **assumptions**, of
a machine with NVLink and one 400 Gb/s adapter a GPU; nothing here was fitted to a network, because none was available.

Example: 256 experts, top-8, 2 nodes of 8 ranks: a token goes to 3.26 ranks of the other node on average, and to the
node with probability 0.996. So 128 tokens of 7552 bytes are 3.2 MB over the network with one level, 0.98 MB with two.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from moelink.arith import ceil_div

NVLINK_GB_PER_S, NETWORK_GB_PER_S = 350.0, 50.0
"""Assumed: what one rank's link carries in one direction."""

FORWARD_US = 8.0
"""Assumed: what forwarding adds to a phase that moves nothing: a signal that is waited for, a row that is read and
stored, and a second signal."""


def hit_probability(num_experts: int, topk: int, owned: int) -> float:
    """Return how probable it is that a token names one of ``owned`` experts, of ``topk`` different ones of all.

    >>> hit_probability(4, 2, 1)
    0.5
    """
    return 1.0 - comb(max(0, num_experts - owned), topk) / max(1, comb(num_experts, topk))


@dataclass(frozen=True)
class Crossing:
    """Bytes that leave one rank in one phase of one call: over NVLink and over the network."""

    nvlink: float
    network: float

    @property
    def microseconds(self) -> float:
        """How long the slower link takes at the assumed rates."""
        return max(self.nvlink / NVLINK_GB_PER_S, self.network / NETWORK_GB_PER_S) / 1e3


@dataclass(frozen=True)
class Routes:
    """Expected traffic between ``ranks`` ranks on nodes of ``per_node``, of which each has ``tokens`` tokens.

    Attributes:
        rank_hit, node_hit: how probable it is that a token goes to one rank, or to one node, that owns most experts.
    """

    ranks: int
    per_node: int
    tokens: int
    rank_hit: float
    node_hit: float

    @classmethod
    def uniform(cls, *, num_experts: int, topk: int, tokens: int, ranks: int, per_node: int) -> Routes:
        """Return the routes of uniform routing."""
        owned, topk = ceil_div(num_experts, ranks), min(topk, num_experts)
        hits = [hit_probability(num_experts, topk, min(count, num_experts)) for count in (owned, owned * per_node)]
        return cls(ranks, per_node, tokens, *hits)

    def one_level(self, nbytes: int) -> Crossing:
        """Return what crosses where a copy of ``nbytes`` goes to each rank."""
        each = self.tokens * self.rank_hit * nbytes
        return Crossing((self.per_node - 1) * each, (self.ranks - self.per_node) * each)

    def two_levels(self, nbytes: int, relayed: int) -> Crossing:
        """Return what crosses where one copy of ``relayed`` bytes goes to each node, and of ``nbytes`` from there."""
        nodes = self.ranks // self.per_node
        near = nodes * (self.per_node - 1) * self.tokens * self.rank_hit * nbytes
        return Crossing(near, (nodes - 1) * self.tokens * self.node_hit * relayed)


def prefers_two_levels(routes: Routes, *, message: int, relay: int, row: int) -> bool:
    """Return whether dispatch and combine together are estimated faster with two levels.

    ``message``, ``relay``, ``row``: bytes of a message, of one on its way through another node, and of a row home.
    """
    one = routes.one_level(message).microseconds + routes.one_level(row).microseconds
    two = routes.two_levels(message, relay).microseconds + routes.two_levels(row, row).microseconds
    return two + 2 * FORWARD_US < one
