"""How experts are chosen: what the operator of :mod:`moelink.rows.choose` and its kernel both know."""

from __future__ import annotations

from typing import NamedTuple

STEPS = 2.0**40
"""Steps between 0 and 1, the terms of a sum."""
LEAST = 2.0**-126


class Choice(NamedTuple):
    """How experts are chosen; :class:`moelink.nn.RouterConfig` explains the fields.

    Attributes:
        topk: experts of a token.
        scoring: "softmax" or "sigmoid".
        renormalize, num_groups, topk_groups, group_score, scaling_factor: as there.
    """

    topk: int
    scoring: str
    renormalize: bool
    num_groups: int
    topk_groups: int
    group_score: str
    scaling_factor: float

    @property
    def is_limited(self) -> bool:
        """Whether some groups are not chosen."""
        return self.topk_groups < self.num_groups

    def compares_scores(self, has_bias: bool) -> bool:
        """Whether scores are compared, and not logits."""
        return has_bias or (self.is_limited and self.group_score == "top2")
