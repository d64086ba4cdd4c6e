"""Plan every number of ranks, in one document: the source of the table, the JSON and the picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moelink.arith import ceil_div
from moelink.config import EPConfig
from moelink.nn.placement import Placement, place_experts
from moelink.tools.plan.experts import WEIGHT_BYTES, ExpertTime, Load, MachineExperts, slowest
from moelink.tools.plan.model import Constants, Shape, Time, predict
from moelink.tools.plan.routing import Routing, Statistics
from moelink.tools.plan.traffic import COPIES, PHASES, Copies, Layer, LinkBytes, Units, link_bytes, nodes_of
from moelink.transports.base import Phase

SCHEMA_VERSION = 1

BUILT: Mapping[Copies, str] = {"rank": "one level", "node": "two_level=True, which has not run over a network yet"}


def schemes_of(layer: Layer) -> tuple[Copies, ...]:
    """Return the copies that the layer's transport can send: the collective one has one level."""
    return COPIES if layer.transport == "symmetric" else ("rank",)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, as ``EPConfig.memory_report`` computes them.

    Attributes:
        block: the symmetric transport's block.
        staging: the memory that the collective transport keeps between calls.
        outputs: tensors that one dispatch and one combine return (the worst case, or ``capacity`` rows).
        block_of_levels: the symmetric transport's block with ``two_level=True``; None if that is impossible.
    """

    block: int
    staging: int
    outputs: int
    block_of_levels: int | None = None

    @classmethod
    def of(cls, config: EPConfig, levels: EPConfig | None = None) -> Memory:
        """Compute the bytes of this configuration's rank. ``levels``: the same with two levels."""
        report = config.memory_report()
        block = None if levels is None else levels.memory_report().block
        return cls(report.block, report.wire_send + report.wire_recv, report.outputs, block)

    @property
    def symmetric(self) -> int:
        """With the symmetric transport."""
        return self.block + self.outputs

    @property
    def two_levels(self) -> int | None:
        """With the symmetric transport in two levels; None if that is impossible."""
        return None if self.block_of_levels is None else self.block_of_levels + self.outputs

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
class LayerTime:
    """The experts of the rank whose take longest, and with them the layer.

    Attributes:
        rows: of that rank, over all its experts.
        experts: time of its products and activation; None without constants of the format.
    """

    rows: float
    experts: ExpertTime | None

    def total_us(self, phases: Mapping[Phase, PhasePlan]) -> float | None:
        """Dispatch, experts and combine, one after the other; routing is left out. None where a time is missing."""
        times = [phase.time.total_us for phase in phases.values()]
        known = [time for time in times if time is not None]
        return None if self.experts is None or len(known) < len(times) else self.experts.total_us + sum(known)


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
        schemes: by copies ("rank", and "node" with the symmetric transport) and phase.
        auto: the choice of ``two_level="auto"``, at any routing and constants of the plan; "rank" on one node.
        layer: the experts' time; None where the layer has no ``intermediate_size``.
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
    auto: Copies
    layer: LayerTime | None
    extrapolated: bool


@dataclass(frozen=True)
class Plan:
    """The answer."""

    layer: Layer
    ranks_per_node: int
    routing: str
    redundant: int
    constants: Constants
    experts: MachineExperts
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


def chosen_copies(config: EPConfig) -> Copies:
    """Return the choice of ``two_level="auto"`` for this configuration: it estimates uniform routing."""
    return "node" if dataclasses.replace(config, two_level="auto").two_level else "rank"


def layer_time(layer: Layer, ranks: int, routing: Routing, experts: MachineExperts) -> LayerTime | None:
    """Return the time of the slowest rank's experts; None where the layer does not say how large they are.

    Without constants of the format, the rank is the one with most rows.
    """
    if layer.intermediate_size is None:
        return None
    loads = Load.of_ranks(routing, num_experts=layer.num_experts, ranks=ranks, tokens=layer.tokens)
    constants = experts.formats.get(layer.expert_format)
    if constants is None:
        return LayerTime(max(float(load.rows.sum()) for load in loads), None)
    load, time = slowest(
        loads, constants, hidden_size=layer.hidden_size, intermediate_size=layer.intermediate_size,
        weight_bytes=WEIGHT_BYTES[layer.expert_format],
    )  # fmt: skip
    return LayerTime(float(load.rows.sum()), time)


def plan_size(
    ranks: int, *, layer: Layer, ranks_per_node: int, routing: Routing, constants: Constants, experts: MachineExperts,
    redundant: int,
) -> SizePlan:  # fmt: skip
    """Plan one number of ranks; the other arguments and the errors are those of :func:`make_plan`."""
    nodes = nodes_of(ranks, ranks_per_node)
    config = layer.ep_config(ranks, ranks_per_node=ranks_per_node if nodes > 1 else None)
    several = layer.transport == "symmetric" and nodes > 1 and ranks_per_node > 1
    levels = dataclasses.replace(config, two_level=True) if several else None
    statistics = Statistics.of(routing, num_experts=layer.num_experts, ranks=ranks, nodes=nodes)
    units, shape = Units.of(layer, config), Shape(ranks, nodes)
    schemes: dict[Copies, dict[Phase, PhasePlan]] = {}
    for copies in schemes_of(layer):
        schemes[copies] = {}
        for phase in PHASES:
            links = link_bytes(phase, copies, units, statistics, layer.tokens)
            time = predict(links, constants.phases[phase], shape, copies, constants.forward_us)
            schemes[copies][phase] = PhasePlan(links, time)
    fitted = constants.ranks
    return SizePlan(
        ranks=ranks, nodes=nodes, experts=ceil_div(layer.num_experts, ranks),
        idle_ranks=max(0, ranks - layer.num_experts), statistics=statistics, memory=Memory.of(config, levels),
        imbalance=imbalances(routing, layer.num_experts, ranks, redundant), schemes=schemes,
        auto=chosen_copies(config), layer=layer_time(layer, ranks, routing, experts),
        extrapolated=bool(fitted) and not min(fitted) <= ranks <= max(fitted),
    )  # fmt: skip


def make_plan(
    layer: Layer,
    ranks: Sequence[int],
    *,
    ranks_per_node: int,
    routing: Routing,
    constants: Constants | None = None,
    experts: MachineExperts | None = None,
    redundant: int = 0,
) -> Plan:
    """Plan every number of ranks. Without ``constants`` there are bytes and memory, and no time.

    ``experts``: constants of the experts' products. ``redundant``: physical experts beyond the layer's, for
    :attr:`SizePlan.imbalance`. Bytes and times are without them.

    Raises:
        ConfigError: a number of ranks that neither fits into a node nor fills whole nodes.
    """
    chosen, machine = constants or Constants(), experts or MachineExperts()
    if layer.combine_format is not None:
        chosen = chosen.for_combine_format()
    for count in ranks:
        nodes_of(count, ranks_per_node)
    sizes = tuple(
        plan_size(
            count, layer=layer, ranks_per_node=ranks_per_node, routing=routing, constants=chosen, experts=machine,
            redundant=redundant,
        )
        for count in ranks
    )  # fmt: skip
    return Plan(layer, ranks_per_node, routing.name, redundant, chosen, machine, sizes)


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
            "forward_us": plan.constants.forward_us,
            "forward_source": plan.constants.forward_source,
        },
        "experts": {
            "constants": {fmt: dataclasses.asdict(found) for fmt, found in plan.experts.formats.items()},
            "source": plan.experts.source,
            "description": plan.experts.description,
        },
        "copies": {copies: BUILT[copies] for copies in schemes_of(plan.layer)},
        "sizes": [_size_document(size) for size in plan.sizes],
    }


def _size_document(size: SizePlan) -> dict[str, Any]:
    held = size.memory
    totals = {"symmetric": held.symmetric, "two_levels": held.two_levels, "collective": held.collective}
    return {
        "ranks": size.ranks,
        "nodes": size.nodes,
        "experts_per_rank": size.experts,
        "idle_ranks": size.idle_ranks,
        "ranks_per_token": size.statistics.ranks_per_token,
        "nodes_per_token": size.statistics.nodes_per_token,
        "imbalance": size.imbalance[0],
        "imbalance_placed": size.imbalance[1],
        "memory": {**dataclasses.asdict(held), **totals},
        "schemes": {
            copies: {phase: dataclasses.asdict(entry) for phase, entry in phases.items()}
            for copies, phases in size.schemes.items()
        },
        "auto": size.auto,
        "layer": None if size.layer is None else _layer_document(size.layer, size.schemes),
        "extrapolated": size.extrapolated,
    }


def _layer_document(layer: LayerTime, schemes: Mapping[Copies, Mapping[Phase, PhasePlan]]) -> dict[str, Any]:
    time = layer.experts
    parts = None if time is None else {**dataclasses.asdict(time), "total_us": time.total_us, "limit": time.limit}
    totals = {copies: layer.total_us(phases) for copies, phases in schemes.items()}
    return {"rows": layer.rows, "experts": parts, "total_us": totals}
