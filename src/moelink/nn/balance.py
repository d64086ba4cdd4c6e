"""Move experts between ranks so that their load evens out, a bounded number of bytes at a time.

A :class:`Balancer` does this for the :class:`moelink.nn.MoE` layers of a model that were made with a ``placement``:

1. *Plan.* Sum the layers' loads over the ranks, and place the experts anew (:mod:`moelink.nn.placement`). All ranks sum
   the same numbers, so all find the same placement.
   Or clear ranks that are about to leave (:meth:`Balancer.drain`).
2. *Move.* Between two forward passes, :meth:`Balancer.step` brings some physical experts their new weights. No rank
   receives more than ``max_bytes`` in a step, which bounds the pause. Then all ranks' layers use the new ids.

Why a forward between two steps is right: a step changes a physical expert's weights and the layer's map of ids
together, on all ranks, and reads all old weights before it writes new ones. :func:`order_moves` orders the moves so
that after each step every expert has a place. Experts in a ring, each with the only copy of the next one's weights,
move in one step, even if that exceeds ``max_bytes``.

Why ranks never use different maps: a step happens on all ranks or on none (:mod:`moelink.nn.steps`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.control.exchange import all_reduce
from moelink.errors import ArgumentError, StateError
from moelink.lifetime import peers_of
from moelink.nn.load import BalancedLayer
from moelink.nn.placement import Placement, drain_ranks, place_experts
from moelink.nn.steps import MAX_BYTES, Route, Steps, check_max_bytes, digest, divide, owners


@dataclass(frozen=True)
class LayerBalance:
    """The effect of a plan on one layer.

    Attributes:
        name: of the layer in its model.
        before, after: the busiest rank's tokens over the mean of all ranks, with the load that was measured.
        moves: physical experts that get other weights.
        nbytes: of these weights.
    """

    name: str
    before: float
    after: float
    moves: int
    nbytes: int


@dataclass(frozen=True)
class _Move:
    """Bring physical expert ``place`` of layer ``layer`` the weights of ``expert``."""

    layer: int
    place: int
    expert: int


class Balancer(Steps[_Move]):
    """Balances the MoE layers of a model, for inference. All methods are collective over the ranks.

    Args:
        model: holds layers that were made with a ``placement`` and count their load (``load_steps >= 1``); or the
            model of :func:`moelink.integrations.transformers.parallelize`, called with a ``placement``.
        max_bytes: most bytes of weights that a rank receives in a :meth:`step`, a single expert or ring aside.
        group: the process group of the ranks, as the layers' communicators number them; None for the default group.

    Raises:
        ArgumentError: the model has no such layer, or ``max_bytes`` is no positive number.
        ConfigMismatchError: ranks have other layers, placements or ``max_bytes``.

    Example: ``examples/balance_experts.py``.
    """

    def __init__(
        self, model: torch.nn.Module, *, max_bytes: int = MAX_BYTES, group: dist.ProcessGroup | None = None
    ) -> None:
        check_max_bytes(max_bytes)
        found = ((name, module) for name, module in model.named_modules() if isinstance(module, BalancedLayer))
        named = [(name or "moe", module) for name, module in found]
        self._names = [name for name, layer in named if layer.placement is not None]
        self._layers = [layer for _, layer in named if layer.placement is not None]
        if not self._layers or any(layer.load is None for layer in self._layers):
            expected = "MoE layers with placement= and load_steps >= 1"
            raise ArgumentError("model", expected, f"{len(self._layers)} with a placement of {len(named)} layers")
        first = self._layers[0].ep
        super().__init__(
            (layer.ep for layer in self._layers), peers_of(first, group, "balancing"), "a step of the balancer"
        )
        self._max_bytes = max_bytes
        self._steps: list[list[_Move]] = []
        self._agree()

    def plan(self) -> list[LayerBalance]:
        """Place the experts of all layers by the load since the layers were made, or since the last move.

        Nothing moves yet. An unfinished plan is dropped; experts that it moved stay in their new places.

        Raises:
            ConfigMismatchError: ranks have other placements, or in mode "allreduce" counted other tokens.
        """

        def balanced(current: Placement, load: tuple[float, ...]) -> Placement:
            new = place_experts(load, num_physical=current.num_physical, world_size=self._world_size, current=current)
            helps = new.imbalance(load, self._world_size) < current.imbalance(load, self._world_size)
            return new if helps else current

        return self._plan("a plan", balanced)

    def drain(self, ranks: Iterable[int]) -> list[LayerBalance]:
        """Plan to move experts away from ``ranks``, which are about to leave, so that all other ranks together hold
        every expert.

        Nothing moves yet: :meth:`step` moves, as after :meth:`plan`. Until the ranks leave they go on to compute
        tokens of their experts, of which other ranks have copies after the last step. An unfinished plan is dropped.

        Args:
            ranks: of the communicator, the same on every rank.

        Raises:
            ArgumentError: ``ranks`` are no ranks, or all of them; or the places of the others do not suffice for every
                expert of a layer. Nothing has changed.
            ConfigMismatchError: ranks have other placements, or were given other ``ranks``.
        """
        given = list(ranks)
        self._compare(f"a drain of ranks {given}", "balancer")
        known = all(isinstance(rank, int) and not isinstance(rank, bool) for rank in given)
        if not known or not 0 < len(set(given)) < self._world_size or not set(given) < set(range(self._world_size)):
            raise ArgumentError("ranks", f"some, and not all, of the ranks in [0, {self._world_size})", given)
        leaving = sorted(set(given))
        return self._plan(
            f"a drain of ranks {leaving}", lambda old, load: drain_ranks(old, load, leaving, self._world_size)
        )

    def _plan(self, what: str, place: Callable[[Placement, tuple[float, ...]], Placement]) -> list[LayerBalance]:
        """Plan the moves to the placement that ``place`` makes of each layer's placement and load."""
        self._agree()
        loads = self._sum_loads()
        wanted, report = [], []
        for name, layer, load in zip(self._names, self._layers, loads, strict=True):
            current = _placement(layer)
            new = place(current, load)
            before, after = (each.imbalance(load, self._world_size) for each in (current, new))
            moves = sum(a != b for a, b in zip(current.experts, new.experts, strict=True))
            report.append(LayerBalance(name, before, after, moves, moves * layer.expert_bytes))
            wanted.append(new)
        self._compare(f"{what} of load {digest(loads)}", "balancer")
        self._steps = self._divide(wanted)
        return report

    @property
    def steps_left(self) -> int:
        """Steps until the plan is done."""
        return len(self._steps)

    @torch.no_grad()
    def step(self) -> float:
        """Move the experts of one step of the plan, and use them from now on. Returns the seconds that it took here.

        Call it on every rank between the same two forward passes. On CUDA the copies are ordered with the current
        stream's work, and the host waits for them.

        Raises:
            StateError: nothing is left to move: :meth:`plan` first.
            PeerAbortedError: the step raised on another rank. No rank has changed anything; it may be repeated.
            PeerTimeoutError: a rank did not come in time, or (PeerLostError) is gone. The layers' communicators are
                ended: their calls raise the same.
        """
        if not self._steps:
            raise StateError("step: expected a plan with steps left, got none; call plan() first")
        start = time.perf_counter()
        self._make(self._steps[0])
        self._steps.pop(0)
        return time.perf_counter() - start

    def _commit(self, moves: Sequence[_Move]) -> None:
        """Use the maps of ids and counters of the new places."""
        changed: dict[int, list[int]] = {}
        for move in moves:
            experts = changed.setdefault(move.layer, list(_placement(self._layers[move.layer]).experts))
            experts[move.place] = move.expert
        for index, experts in changed.items():
            self._layers[index].place(Placement(tuple(experts)))

    def run(self) -> list[LayerBalance]:
        """Plan, and move everything in as many steps as it takes."""
        report = self.plan()
        while self._steps:
            self.step()
        return report

    def _agree(self) -> None:
        """Refuse ranks whose layers, sizes or placements differ."""
        layers = [
            (name, layer.expert_bytes, _placement(layer).experts)
            for name, layer in zip(self._names, self._layers, strict=True)
        ]
        said = f"max_bytes {self._max_bytes}, {len(layers)} layers with names, sizes and placements {digest(layers)}"
        self._compare(said, "balancer")

    def _sum_loads(self) -> list[tuple[float, ...]]:
        """Return the load of each layer by expert, of all ranks' tokens."""
        totals = [layer.load.total.clone() for layer in self._layers if layer.load is not None]
        if self._world_size > 1 and not self._layers[0].load.replicated:  # type: ignore[union-attr]
            flat = torch.cat(totals)
            self._ask(lambda: all_reduce(flat, self._peers))
            totals = list(flat.split([len(total) for total in totals]))
        return [
            _placement(layer).expert_load(total.tolist()) for layer, total in zip(self._layers, totals, strict=True)
        ]

    def _divide(self, wanted: Sequence[Placement]) -> list[list[_Move]]:
        """Divide the moves to ``wanted`` into steps."""
        items: list[tuple[list[_Move], Counter[int]]] = []
        for index, (layer, new) in enumerate(zip(self._layers, wanted, strict=True)):
            size, owner = layer.expert_bytes, self._owners(layer)
            for places in order_moves(_placement(layer).experts, new.experts):
                more = Counter({rank: size * count for rank, count in Counter(owner[p] for p in places).items()})
                items.append(([_Move(index, place, new.experts[place]) for place in places], more))
        return [[move for moves in step for move in moves] for step in divide(items, self._max_bytes)]

    def _routes(self, moves: Sequence[_Move]) -> Iterator[Route[_Move]]:
        """Each move's weights come from this rank if it has them, else from the rank that sends least until now."""
        sent: Counter[int] = Counter()
        for move in moves:
            layer = self._layers[move.layer]
            owner = self._owners(layer)
            here = owner[move.place]
            holders = _placement(layer).replicas[move.expert]
            source = min(holders, key=lambda place: (owner[place] != here, sent[owner[place]], place))  # noqa: B023
            sent[owner[source]] += owner[source] != here
            yield Route(
                move, owner[source], here,
                partial(self._tensors, move.layer, source), partial(self._tensors, move.layer, move.place),
            )  # fmt: skip

    def _tensors(self, layer: int, place: int) -> list[Tensor]:
        """Return the weights of physical expert ``place``, which is on this rank."""
        experts = self._layers[layer].holder
        group = place - experts.first + experts.num_shared
        return [getattr(experts, name)[group] for name in experts.stacked]

    def _owners(self, layer: BalancedLayer) -> list[int]:
        """Return the rank of each physical expert."""
        return owners(layer.ep.config.num_experts, self._world_size)


def order_moves(old: Sequence[int], new: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places whose expert changes from ``old`` to ``new``, in an order in which no expert is lost.

    A place whose expert has another copy can take its new expert at once. The remaining places are rings: each has the
    only copy of an expert that another one needs. A ring is one item.

    >>> list(order_moves([0, 1, 2, 0], [0, 2, 1, 1]))
    [[3], [1], [2]]
    >>> list(order_moves([0, 1], [1, 0]))
    [[0, 1]]
    """
    now, copies = list(old), Counter(old)
    waits: defaultdict[int, list[int]] = defaultdict(list)
    for place, (a, b) in enumerate(zip(old, new, strict=True)):
        if a != b:
            waits[b].append(place)
    pending = [place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    while pending:
        ring = [next((place for place in pending if copies[now[place]] > 1), pending[0])]
        while copies[now[ring[-1]]] == 1 and now[ring[-1]] not in {new[place] for place in ring}:
            ring.append(next(place for place in waits[now[ring[-1]]] if place in pending))
        for place in ring:
            copies[now[place]] -= 1
            copies[new[place]] += 1
            now[place] = new[place]
            pending.remove(place)
        yield sorted(ring)


def _placement(layer: BalancedLayer) -> Placement:
    assert layer.placement is not None, "layers without a placement were left out"
    return layer.placement.placement
