"""What is asked: a layer, the numbers of ranks, and how many of them share a node."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moelink.config import EPConfig, TransportName
from moelink.errors import ConfigError

_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One MoE layer and what a call carries.

    Attributes:
        num_experts, topk, hidden_size: sizes of the layer.
        tokens: tokens of every rank in every call, also ``max_tokens_per_rank``.
        dispatch_format: registered name; rows come home in bf16.
        capacity: rows of a dispatch output, or None for the worst case.
        transport: whose messages are counted, "symmetric" or "collective" (they differ by padding).
    """

    num_experts: int
    topk: int
    hidden_size: int
    tokens: int
    dispatch_format: str = "fp8_block128"
    capacity: int | None = None
    transport: TransportName = "symmetric"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError("tokens", "at least 1", self.tokens)
        if self.transport not in ("symmetric", "collective"):
            raise ConfigError("transport", "'symmetric' or 'collective'", self.transport)
        self.ep_config(1)
        if self.topk > self.num_experts:
            raise ConfigError("topk", f"at most num_experts = {self.num_experts}", self.topk)

    def ep_config(self, world_size: int, rank: int = 0, *, ranks_per_node: int | None = None) -> EPConfig:
        """The configuration that sizes follow from. Rank 0 owns as many experts as any rank. ``ranks_per_node``: on
        several nodes, each of so many ranks."""
        return EPConfig(
            num_experts=self.num_experts, topk=self.topk, hidden_size=self.hidden_size,
            max_tokens_per_rank=self.tokens, dispatch_format=self.dispatch_format, capacity=self.capacity,
            transport=self.transport, world_size=world_size, rank=rank, ranks_per_node=ranks_per_node,
        )  # fmt: skip


def parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks, ascending: ``"8"``, ``"8,24"``, ``"8..64"`` (doubling: 8, 16, 32, 64) or a mixture.

    Raises:
        ConfigError: not such a text, 0 ranks, or a range whose doubling misses its end.
    """
    counts: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError("ranks", "numbers and doubling ranges, such as 8, 8..2048 or 2,4,8..64", text)
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            raise ConfigError("ranks", "at least 1 rank, and ranges that ascend", part)
        count = first
        while count < last:
            counts.add(count)
            count *= 2
        if count != last:
            raise ConfigError(
                "ranks", f"a range that doubling reaches, such as {first}..{count // 2} or {first}..{count}", part
            )
        counts.add(count)
    return tuple(sorted(counts))


def nodes_of(ranks: int, ranks_per_node: int) -> int:
    """Nodes that ``ranks`` fill: 1 for a part of a node, else only whole nodes.

    Raises:
        ConfigError: the last node would be filled in part, so that no two nodes' links are used alike.
    """
    if ranks_per_node < 1:
        raise ConfigError("ranks_per_node", "at least 1", ranks_per_node)
    if ranks > ranks_per_node and ranks % ranks_per_node:
        raise ConfigError("ranks", f"a multiple of ranks_per_node = {ranks_per_node}, or fewer than that", ranks)
    return max(1, ranks // ranks_per_node)
