"""Layers, and the expected bytes of one call by link, on the busiest rank.

Legend: ``T`` tokens of every rank, ``W`` ranks on ``N`` nodes of ``P``; ``h[r]`` and ``H[n]`` probabilities that a
token hits a rank or node (:mod:`~moelink.tools.plan.routing`), ``k[r]`` its slots there.

**One copy per (token, rank)**, one level: a token travels from its rank straight to every other rank it hits, and one
row comes home from each.

**One copy per (token, node)**, ``two_level=True``: a token crosses the network once per node it hits, to the rank there
that has its sender's place on the node; that one forwards it over NVLink to the ranks that the token hits. On the way
home the rows of a node are summed there, and one crosses the network. A message that is to be forwarded is longer, by
the facts for the forwarding rank (``Workspace.relay``).

How many copies that is over each link, :func:`moelink.levels.crossing` says. Of all ranks the largest expectation
counts; the expectation of the largest is higher by how much counts fluctuate, which tests/plan/test_plan_traffic.py
measures: some 4 % for 8 ranks with 128 tokens of top-8, less with more tokens.

**Memory**: other reads and writes of a rank in its own memory. Dispatch reads T activations in bf16 and all
messages that reached it, and writes T W k[d] rows; combine reads as many expert outputs and T x (sum of h) rows that
came home, and writes T results. Forwarding reads T (N - 1) H[n] messages more, in each phase.

**Quantising**: a sender of dispatch brings T rows into a format with scales; with a ``combine_format`` an expert's rank
does so with T W h[d] rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from moelink.config import EPConfig
from moelink.errors import ConfigError
from moelink.levels import crossing
from moelink.memory.workspace import Workspace
from moelink.names import TransportName
from moelink.tools.plan.experts import EXPERT_FORMATS
from moelink.tools.plan.routing import Statistics
from moelink.transports.base import Phase

_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One MoE layer and the rows of a call.

    Attributes:
        num_experts, topk, hidden_size: sizes of the layer.
        tokens: tokens of every rank in every call, also ``max_tokens_per_rank``.
        dispatch_format: registered name.
        combine_format: format in which rows come home, or None for bf16.
        capacity: rows of a dispatch output, or None for the worst case.
        transport: whose messages are counted, "symmetric" or "collective" (they differ by padding).
        intermediate_size: columns of gate and of up, or None to leave the experts' time out.
        expert_format: of the experts' weights and products, "bf16" or "fp8_block128".
    """

    num_experts: int
    topk: int
    hidden_size: int
    tokens: int
    dispatch_format: str = "fp8_block128"
    combine_format: str | None = None
    capacity: int | None = None
    transport: TransportName = "symmetric"
    intermediate_size: int | None = None
    expert_format: str = "bf16"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError("tokens", "at least 1", self.tokens)
        if self.transport not in ("symmetric", "collective"):
            raise ConfigError("transport", "'symmetric' or 'collective'", self.transport)
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise ConfigError("intermediate_size", "at least 1", self.intermediate_size)
        if self.expert_format not in EXPERT_FORMATS:
            raise ConfigError("expert_format", f"one of {', '.join(EXPERT_FORMATS)}", self.expert_format)
        self.ep_config(1)
        if self.topk > self.num_experts:
            raise ConfigError("topk", f"at most num_experts = {self.num_experts}", self.topk)

    def ep_config(self, world_size: int, rank: int = 0, *, ranks_per_node: int | None = None) -> EPConfig:
        """The configuration that sizes follow from. Rank 0 owns as many experts as any rank. ``ranks_per_node``: on
        several nodes, each of so many ranks."""
        return EPConfig(
            num_experts=self.num_experts, topk=self.topk, hidden_size=self.hidden_size,
            max_tokens_per_rank=self.tokens, dispatch_format=self.dispatch_format,
            combine_format=self.combine_format, capacity=self.capacity,
            transport=self.transport, world_size=world_size, rank=rank, ranks_per_node=ranks_per_node,
        )  # fmt: skip


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse numbers of ranks: ``"8"``, ``"8,24"``, ``"8..64"`` (doubling: 8, 16, 32, 64) or a mixture; ascending.

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
    """Return the nodes that ``ranks`` fill: 1 for a part of a node, else only whole nodes.

    Raises:
        ConfigError: the last node would be filled in part, so that no two nodes' links are used alike.
    """
    if ranks_per_node < 1:
        raise ConfigError("ranks_per_node", "at least 1", ranks_per_node)
    if ranks > ranks_per_node and ranks % ranks_per_node:
        raise ConfigError("ranks", f"a multiple of ranks_per_node = {ranks_per_node}, or fewer than that", ranks)
    return max(1, ranks // ranks_per_node)


Copies = Literal["rank", "node"]
COPIES: tuple[Copies, ...] = get_args(Copies)
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class LinkBytes:
    """Expected bytes of one phase of one call.

    Attributes:
        nvlink, network: over the busier direction of the busiest rank's link.
        memory: read and written in its own memory by the rank that does so most.
        total_nvlink, total_network: sent by all ranks together.
        quantised: of rows, before a sender brings them into a format with scales.
    """

    nvlink: float
    network: float
    memory: float
    total_nvlink: float
    total_network: float
    quantised: float = 0.0


@dataclass(frozen=True)
class Units:
    """Bytes that travel and bytes that stay.

    Attributes:
        message, home: one dispatched message; one row on its way home, with its ids and weights.
        activation, row, output: a token before dispatch (bf16), a dispatched row, an expert's output for it.
        quantised: a token before dispatch if the format has scales, else 0.
        relay: a message that another rank forwards; as ``message`` for the collective transport, which has no such.
        quantised_home: a row before it travels home if there is a format for it, else 0.
    """

    message: int
    home: int
    activation: int
    row: int
    output: int
    quantised: int
    relay: int
    quantised_home: int

    @classmethod
    def of(cls, layer: Layer, config: EPConfig) -> Units:
        """Compute the units as the layer's transport moves them."""
        if layer.transport == "symmetric":
            workspace = Workspace(config)
            message, home, relay = workspace.message_bytes, workspace.row_bytes, workspace.relay_bytes
        else:
            message, home = config.dispatch_message.nbytes, config.home_message_bytes
            relay = message
        row = config.format.bytes_per_token(config.hidden_size)
        activation = 2 * config.hidden_size
        quantised = 0 if config.format.scale_dtype is None else activation
        back = 0 if config.combine_format is None else activation
        return cls(message, home, activation, row, config.result_row_bytes, quantised, relay, back)


def link_bytes(phase: Phase, copies: Copies, units: Units, statistics: Statistics, tokens: int) -> LinkBytes:
    """Return the expected bytes of ``tokens`` tokens per rank.

    Example: 2 ranks of one node, each hit by every token, 10 tokens, messages of 100 bytes: 1000 bytes over each link
    and direction, 2000 in total.
    """
    hits, node_hits = statistics.rank_hits, statistics.node_hits
    ranks, nodes = len(hits), len(node_hits)
    load = crossing(hits.tolist(), node_hits.tolist(), two_level=copies == "node")
    near = units.message if phase == "dispatch" else units.home
    far = units.relay if phase == "dispatch" and copies == "node" else near
    received = ranks * statistics.rank_slots
    if phase == "dispatch":
        memory = units.activation + ranks * hits * units.message + received * units.row
        quantised = float(units.quantised)
    else:
        memory = received * units.output + hits.sum() * units.home + units.output
        quantised = units.quantised_home * ranks * float(hits.max())
    if copies == "node":
        memory = memory + (nodes - 1) * node_hits.repeat(ranks // nodes) * far
    return LinkBytes(
        nvlink=tokens * near * load.nvlink,
        network=tokens * far * load.network,
        memory=tokens * float(memory.max()),
        total_nvlink=tokens * near * load.total_nvlink,
        total_network=tokens * far * load.total_network,
        quantised=tokens * quantised,
    )
