"""What a routing means for ranks and nodes: who is hit how often."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moelink.routing import ExpertMap
from moelink.tools.plan.routing import Floats, Routing


@dataclass(frozen=True, eq=False)
class Statistics:
    """Expectations of one token under a routing.

    Attributes:
        rank_hits: [ranks] probability that the token has an expert on each rank.
        node_hits: [nodes] the same for nodes.
        rank_slots: [ranks] expected number of its top-k slots on each rank.
    """

    rank_hits: Floats
    node_hits: Floats
    rank_slots: Floats

    @classmethod
    def of(cls, routing: Routing, *, num_experts: int, ranks: int, nodes: int) -> Statistics:
        """``ranks`` in rank order on ``nodes`` of equal size; experts are owned as everywhere in moelink."""
        experts = ExpertMap(num_experts, ranks)
        bounds = np.array([experts.first(rank) for rank in range(ranks + 1)])
        return cls(routing.hits(bounds), routing.hits(bounds[:: ranks // nodes]), routing.slots(bounds))

    @property
    def ranks_per_token(self) -> float:
        """Expected number of distinct ranks, a token's own included when it is hit."""
        return float(self.rank_hits.sum())

    @property
    def nodes_per_token(self) -> float:
        """Expected number of distinct nodes."""
        return float(self.node_hits.sum())
