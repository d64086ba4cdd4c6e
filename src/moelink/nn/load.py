"""The load of experts and ranks: counted on the device, fetched on demand; reports of several ranks put together.

Calls of :meth:`LoadMeter.next_step` divide time into steps. Counting and advancing are a few small operations on the
device: they synchronise nothing, compile, and may be captured in a CUDA graph, whose replays count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.communicator import Communicator
from moelink.errors import ArgumentError, ConfigError, StateError
from moelink.nn.owned import Ownership
from moelink.nn.parameters import KeepsBuffers
from moelink.nn.placement import Placement, PlacementMap
from moelink.routing import ExpertMap
from moelink.rows import eager

KIND = "expert_load"
SCHEMA_VERSION = 1
"""Of reports, the JSON of :func:`moelink.nn.load_report`."""


@dataclass(frozen=True)
class LoadStats:
    """The load of one rank's tokens, in plain numbers.

    Attributes:
        rank, world_size: the rank whose tokens were counted, and how many ranks there are.
        replicated: every rank has the same tokens (mode "allreduce"), so that counts of ranks must not be added.
        tokens_per_expert: [num_experts], since the layer was made or the meter reset. A token counts once for each
            expert it goes to; a token that names an expert twice, twice. Rows dropped by a capacity are counted.
        steps: the same by step, oldest first, for the last steps that the meter keeps, the current one included.
        first_step: number of the oldest step in ``steps``.
    """

    rank: int
    world_size: int
    replicated: bool
    tokens_per_expert: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    first_step: int

    @property
    def expert_bounds(self) -> tuple[int, ...]:
        """[world_size + 1]: rank r owns experts ``expert_bounds[r]`` to ``expert_bounds[r + 1] - 1``."""
        experts = ExpertMap(len(self.tokens_per_expert), self.world_size)
        return tuple(experts.first(rank) for rank in range(self.world_size + 1))

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """Tokens that went to each rank's experts."""
        bounds, load = self.expert_bounds, self.tokens_per_expert
        return tuple(sum(load[start:end]) for start, end in zip(bounds[:-1], bounds[1:], strict=True))

    @property
    def imbalance(self) -> float:
        """The busiest rank's tokens over the mean of all ranks: 1.0 is even. 1.0 without tokens."""
        load = self.tokens_per_rank
        return max(load) * len(load) / sum(load) if sum(load) else 1.0


def _count(total: Tensor, recent: Tensor, step: Tensor, topk_ids: Tensor) -> None:
    """Count ids in ``total`` and the row of ``step``. An operator, because compiled code asks at run time."""
    if torch._C._current_graph_task_id() != -1:  # as torch.utils.checkpoint asks
        return
    ids = topk_ids.reshape(-1).long()
    routed = (ids >= 0).long()
    ids = ids.clamp(min=0)
    steps, experts = recent.shape
    total.scatter_add_(0, ids, routed)
    recent.view(-1).scatter_add_(0, ids + step % steps * experts, routed)


_operator = torch.library.custom_op("moelink::count_experts", _count, mutates_args=("total", "recent"))
_operator.register_fake(lambda *_: None)


class LoadMeter(KeepsBuffers):
    """Counts the experts that tokens are sent to, on the device.

    Its buffers are not part of a state_dict.

    Args:
        num_experts: experts over all ranks.
        rank, world_size, replicated: as in :class:`LoadStats`.
        steps: how many steps are kept one by one.
        device: of the counters.
    """

    kept = ("total", "recent", "step")
    total: Tensor
    recent: Tensor
    step: Tensor

    def __init__(
        self,
        num_experts: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        replicated: bool = False,
        steps: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError("load_steps", "an integer >= 1, or 0 in a layer that counts nothing", steps)
        self.rank, self.world_size, self.replicated = rank, world_size, replicated
        for name, shape in (("total", (num_experts,)), ("recent", (steps, num_experts)), ("step", ())):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64, device=device), persistent=False)

    @property
    def ownership(self) -> Ownership:
        """The counts are of this rank's tokens."""
        return Ownership(self.rank, self.world_size)

    @torch.no_grad()
    def record(self, topk_ids: Tensor) -> None:
        """Count ``topk_ids`` of any shape; -1 counts for nothing, and neither does a call from within a backward, which
        is the recomputation of activation checkpointing."""
        counters = (self.total, self.recent, self.step)
        eager.run(torch.ops.moelink.count_experts, _count, None, *counters, topk_ids)

    @torch.no_grad()
    def next_step(self) -> None:
        """Begin a new step; the oldest one that is kept makes room."""
        self.step += 1
        self.recent.index_fill_(0, (self.step % self.recent.shape[0]).view(1), 0)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything."""
        for buffer in (self.total, self.recent, self.step):
            buffer.zero_()

    def reset_buffers(self) -> None:
        """Nothing is counted."""
        self.reset()

    def stats(self) -> LoadStats:
        """The numbers so far. Synchronises with the host."""
        step, kept = int(self.step), self.recent.shape[0]
        first = max(0, step - kept + 1)
        rows = self.recent.tolist()
        return LoadStats(
            rank=self.rank, world_size=self.world_size, replicated=self.replicated,
            tokens_per_expert=tuple(self.total.tolist()),
            steps=tuple(tuple(rows[number % kept]) for number in range(first, step + 1)), first_step=first,
        )  # fmt: skip


class BalancedLayer(torch.nn.Module):
    """A layer with experts that counts its load and may place experts anew.

    Attributes:
        ep: the communicator.
        load: counts tokens by the communicator's experts, or None.
        placement: turns the router's ids into the communicator's, or None.
    """

    ep: Communicator
    load: LoadMeter | None
    placement: PlacementMap | None

    @property
    def holder(self) -> Any:
        """The module with this rank's weights, by default the layer: ``stacked`` names tensors with experts as their
        first dimension, after ``num_shared`` others; ``first`` is the id of the first one."""
        return self

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights."""
        return sum(getattr(self.holder, name)[0].nbytes for name in self.holder.stacked)

    def place(self, placement: Placement) -> None:
        """Use ``placement`` from now on, whose weights are in place, and count anew."""
        assert self.placement is not None, "the layer was made with a placement"
        if self.holder is not self:
            self.holder.placement = placement
        self.placement.set(placement)
        if self.load is not None:
            self.load.reset()  # it counts by physical experts, which are others now

    def stats(self) -> LoadStats:
        """Return the load of this rank's tokens. Synchronises with the host; counting does not.

        Raises:
            StateError: the layer counts nothing.
        """
        if self.load is None:
            raise StateError(
                "stats: expected a layer that counts its load, got one made with load_steps=0; make it with "
                "load_steps >= 1"
            )
        return self.load.stats()


@dataclass(frozen=True)
class LayerLoad:
    """One layer's load as far as the given reports tell.

    Attributes:
        name: of the module in its model.
        ranks: ranks whose tokens are counted.
        stats: their sum (of replicated tokens: one rank's, as all count the same).
    """

    name: str
    ranks: tuple[int, ...]
    stats: LoadStats


def combine_reports(documents: Sequence[dict[str, Any]]) -> list[LayerLoad]:
    """Put the reports of different ranks of one run together, layer by layer.

    Raises:
        ArgumentError: one is no such report, a rank comes twice, or layers, sizes or steps differ.
    """
    for document in documents:
        if document.get("kind") != KIND or document.get("schema_version") != SCHEMA_VERSION:
            got = f"kind {document.get('kind')!r}, schema_version {document.get('schema_version')!r}"
            raise ArgumentError("documents", f"JSON of moelink.nn.save_load, schema_version {SCHEMA_VERSION}", got)
    names = [[layer["name"] for layer in document["layers"]] for document in documents]
    if not names or not names[0] or any(other != names[0] for other in names):
        raise ArgumentError("documents", "reports of the same layers, one at least", names)
    return [
        _sum(name, [_stats(document["layers"][index]) for document in documents]) for index, name in enumerate(names[0])
    ]


def _stats(layer: dict[str, Any]) -> LoadStats:
    fields = {field.name: layer[field.name] for field in dataclasses.fields(LoadStats)}
    tokens, steps = tuple(layer["tokens_per_expert"]), tuple(tuple(step) for step in layer["steps"])
    if any(len(step) != len(tokens) for step in steps):
        raise ArgumentError("documents", f"{layer['name']}: steps of {len(tokens)} experts", sorted({*map(len, steps)}))
    return LoadStats(**{**fields, "tokens_per_expert": tokens, "steps": steps})


def _sum(name: str, parts: list[LoadStats]) -> LayerLoad:
    shapes = {(p.world_size, p.replicated, len(p.tokens_per_expert), len(p.steps), p.first_step): p.rank for p in parts}
    ranks = tuple(sorted(p.rank for p in parts))
    if len(shapes) > 1:
        raise ArgumentError("documents", f"{name}: reports of one run, after the same steps", f"{list(shapes)}")
    if len(set(ranks)) < len(ranks):
        raise ArgumentError("documents", f"{name}: a report of each rank once", f"ranks {list(ranks)}")
    counted = parts[:1] if parts[0].replicated else parts
    total = _add([p.tokens_per_expert for p in counted])
    steps = tuple(_add(rows) for rows in zip(*(p.steps for p in counted), strict=True))
    stats = dataclasses.replace(parts[0], rank=ranks[0], tokens_per_expert=total, steps=steps)
    return LayerLoad(name=name, ranks=ranks, stats=stats)


def _add(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))
