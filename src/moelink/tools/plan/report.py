"""Plan every number of ranks, in one document: what the table, the JSON and the picture show."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moelink.arith import ceil_div
from moelink.config import EPConfig
from moelink.nn.placement import Placement, place_experts
from moelink.tools.plan.model import Constants, Shape, Time, predict
from moelink.tools.plan.routing import Routing, Statistics
from moelink.tools.plan.traffic import COPIES, PHASES, Copies, Layer, LinkBytes, Units, link_bytes, nodes_of
from moelink.transports.base import Phase

SCHEMA_VERSION = 1

BUILT = {
    "rank": "what moelink does",
    "node": "a two-level transport; not built, for comparison",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, as ``EPConfig.memory_report`` computes them.

    Attributes:
        block: the symmetric transport's block.
        staging: what the collective transport keeps between calls.
        outputs: tensors that one dispatch and one combine return (the worst case, or ``capacity`` rows).
    """

    block: int
    staging: int
    outputs: int

    @classmethod
    def of(cls, config: EPConfig) -> Memory:
        """Compute the bytes of this configuration's rank."""
        report = config.memory_report()
        return cls(report.block, report.wire_send + report.wire_recv, report.outputs)

    @property
    def symmetric(self) -> int:
        """With the symmetric transport."""
        return self.block + self.outputs

    @property
    def collective(self) -> int:
        """With the collective transport."""
        return self.staging + self.outputs


@dataclass(frozen=True)
class PhasePlan:
    """Bytes and time of dispatch or combine."""

    links: LinkBytes
    time: Time


@dataclass(frozen=True)
class SizePlan:
    """One number of ranks.

    Attributes:
        ranks, nodes: how many.
        experts: of the rank that owns most.
        idle_ranks: that own no expert.
        statistics: of the routing.
        imbalance: rows of the busiest rank over the mean of all ranks; with experts where their numbers put them, and
            placed by load with the plan's redundant experts (:func:`moelink.nn.place_experts`), None where the
            physical experts are fewer than the ranks.
        memory: of one rank.
        schemes: by copies ("rank", "node") and phase.
        extrapolated: outside the numbers of ranks that measured constants were fitted to.
    """

    ranks: int
    nodes: int
    experts: int
    idle_ranks: int
    statistics: Statistics
    imbalance: tuple[float, float | None]
    memory: Memory
    schemes: Mapping[Copies, Mapping[Phase, PhasePlan]]
    extrapolated: bool


@dataclass(frozen=True)
class Plan:
    """The answer."""

    layer: Layer
    ranks_per_node: int
    routing: str
    redundant: int
    constants: Constants
    sizes: tuple[SizePlan, ...]


def imbalances(routing: Routing, num_experts: int, ranks: int, redundant: int) -> tuple[float, float | None]:
    """Return :attr:`SizePlan.imbalance`.

    Example: 3 experts with loads 4, 1, 1 on 3 ranks: 2.0; a fourth physical expert would leave one rank with two.
    """
    load: list[float] = routing.slots(range(num_experts + 1)).tolist()
    before = Placement.identity(num_experts).imbalance(load, ranks)
    physical = num_experts + redundant
    if physical < ranks:
        return before, None
    return before, place_experts(load, num_physical=physical, world_size=ranks).imbalance(load, ranks)


def plan_size(
    layer: Layer, ranks: int, *, ranks_per_node: int, routing: Routing, constants: Constants, redundant: int = 0
) -> SizePlan:
    """Plan one number of ranks; :func:`make_plan` says what is refused."""
    nodes = nodes_of(ranks, ranks_per_node)
    config = layer.ep_config(ranks, ranks_per_node=ranks_per_node if nodes > 1 else None)
    statistics = Statistics.of(routing, num_experts=layer.num_experts, ranks=ranks, nodes=nodes)
    units, shape = Units.of(layer, config), Shape(ranks, nodes)
    schemes: dict[Copies, dict[Phase, PhasePlan]] = {}
    for copies in COPIES:
        schemes[copies] = {}
        for phase in PHASES:
            links = link_bytes(phase, copies, units, statistics, layer.tokens)
            schemes[copies][phase] = PhasePlan(links, predict(links, constants.phases[phase], shape, copies))
    fitted = constants.ranks
    return SizePlan(
        ranks=ranks, nodes=nodes, experts=ceil_div(layer.num_experts, ranks),
        idle_ranks=max(0, ranks - layer.num_experts), statistics=statistics, memory=Memory.of(config),
        imbalance=imbalances(routing, layer.num_experts, ranks, redundant),
        schemes=schemes, extrapolated=bool(fitted) and not min(fitted) <= ranks <= max(fitted),
    )  # fmt: skip


def make_plan(
    layer: Layer,
    ranks: Sequence[int],
    *,
    ranks_per_node: int,
    routing: Routing,
    constants: Constants | None = None,
    redundant: int = 0,
) -> Plan:
    """Plan every number of ranks. Without ``constants`` there are bytes and memory, and no time.

    ``redundant``: physical experts beyond the layer's, for :attr:`SizePlan.imbalance`. Bytes and times are
    without them.

    Raises:
        ConfigError: a number of ranks that neither fits into a node nor fills whole nodes.
    """
    chosen = constants or Constants()
    for count in ranks:
        nodes_of(count, ranks_per_node)
    sizes = tuple(
        plan_size(layer, count, ranks_per_node=ranks_per_node, routing=routing, constants=chosen, redundant=redundant)
        for count in ranks
    )
    return Plan(layer, ranks_per_node, routing.name, redundant, chosen, sizes)


def to_document(plan: Plan) -> dict[str, Any]:
    """Return the JSON form. Bytes are expectations for one call on the busiest rank; times are microseconds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "report": "moelink plan",
        "layer": dataclasses.asdict(plan.layer),
        "ranks_per_node": plan.ranks_per_node,
        "routing": plan.routing,
        "redundant_experts": plan.redundant,
        "constants": {
            "phases": {phase: dataclasses.asdict(plan.constants.phases[phase]) for phase in PHASES},
            "sources": dict(plan.constants.sources),
            "measured": plan.constants.are_measured,
            "fitted_ranks": list(plan.constants.ranks),
            "description": plan.constants.description,
        },
        "copies": BUILT,
        "sizes": [_size_document(size) for size in plan.sizes],
    }


def _size_document(size: SizePlan) -> dict[str, Any]:
    memory = dataclasses.asdict(size.memory)
    return {
        "ranks": size.ranks,
        "nodes": size.nodes,
        "experts_per_rank": size.experts,
        "idle_ranks": size.idle_ranks,
        "ranks_per_token": size.statistics.ranks_per_token,
        "nodes_per_token": size.statistics.nodes_per_token,
        "imbalance": size.imbalance[0],
        "imbalance_placed": size.imbalance[1],
        "memory": {**memory, "symmetric": size.memory.symmetric, "collective": size.memory.collective},
        "schemes": {
            copies: {phase: dataclasses.asdict(entry) for phase, entry in phases.items()}
            for copies, phases in size.schemes.items()
        },
        "extrapolated": size.extrapolated,
    }
