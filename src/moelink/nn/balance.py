"""Move experts between ranks so that their load evens out, a bounded number of bytes at a time.

A :class:`Balancer` does this for the :class:`moelink.nn.MoE` layers of a model that were made with a ``placement``:

1. *Plan.* Sum the layers' loads over the ranks, and place the experts anew (:mod:`moelink.nn.placement`). All ranks sum
   the same numbers, so all find the same placement.
2. *Move.* Between two forward passes, :meth:`Balancer.step` brings some physical experts their new weights. No rank
   receives more than ``max_bytes`` in a step, which bounds the pause. Then all ranks' layers use the new ids.

Why a forward between two steps is right: a step changes a physical expert's weights and the layer's map of ids
together, on all ranks, and reads all old weights before it writes new ones. :func:`order_moves` orders the moves so
that after each step every expert has a place. Experts in a ring, each with the only copy of the next one's weights,
move in one step, even if that exceeds ``max_bytes``.

Why ranks never use different maps: in a step each rank *packs* the weights it sends and allocates room for those it
receives, *exchanges* them, *unpacks* them, and *uses* them. After packing and after unpacking all ranks vote on their
success, and nothing of the model changes before the second vote. If one rank's part raised, it raises that and the
others PeerAbortedError; the step is still to do. If a vote does not end on a rank, that rank cannot know whether the
others have continued. So it ends the layers' communicators and reports that to its peers: from then on every call of
every rank raises the error of the rank at fault. An exception in the exchange or in the use after the second vote has
the same effect: the other ranks are in that exchange, and would mistake a vote of this rank for its part of it.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.control.exchange import all_reduce, all_to_all
from moelink.control.values import gather_values
from moelink.errors import ArgumentError, ConfigMismatchError, PeerAbortedError, PeerTimeoutError, StateError
from moelink.lifetime import end_outside_calls, peers_of, require_running
from moelink.nn.load import BalancedLayer
from moelink.nn.placement import Placement, place_experts
from moelink.routing import ExpertMap

T = TypeVar("T")


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


@dataclass(frozen=True)
class _Packed:
    """The bytes that one rank sends to each rank, and the moves and old weights of those that it receives from each.

    Attributes:
        sent: all that is sent. room: for all that is received.
        to: bytes to each rank. counts: bytes from each.
    """

    sent: Tensor
    room: Tensor
    to: list[int]
    counts: list[int]
    incoming: list[list[tuple[_Move, list[Tensor]]]]

    @classmethod
    def of(
        cls, outgoing: list[list[Tensor]], incoming: list[list[tuple[_Move, list[Tensor]]]], device: torch.device
    ) -> _Packed:
        """Allocate all that the exchange needs, so that nothing can fail in it."""
        counts = [sum(t.nbytes for _, tensors in moves for t in tensors) for moves in incoming]
        none = torch.empty(0, dtype=torch.uint8, device=device)
        sent = torch.cat([none, *(t for parts in outgoing for t in parts)])
        room = torch.empty(sum(counts), dtype=torch.uint8, device=device)
        return cls(sent, room, [sum(t.nbytes for t in parts) for parts in outgoing], counts, incoming)


class Balancer:
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
        self, model: torch.nn.Module, *, max_bytes: int = 1 << 28, group: dist.ProcessGroup | None = None
    ) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ArgumentError("max_bytes", "a positive number of bytes", max_bytes)
        found = ((name, module) for name, module in model.named_modules() if isinstance(module, BalancedLayer))
        named = [(name or "moe", module) for name, module in found]
        self._names = [name for name, layer in named if layer.placement is not None]
        self._layers = [layer for _, layer in named if layer.placement is not None]
        if not self._layers or any(layer.load is None for layer in self._layers):
            expected = "MoE layers with placement= and load_steps >= 1"
            raise ArgumentError("model", expected, f"{len(self._layers)} with a placement of {len(named)} layers")
        config = self._layers[0].ep.config
        self._rank, self._world_size, self._max_bytes = config.rank, config.world_size, max_bytes
        self._peers = peers_of(self._layers[0].ep, group, "balancing")
        self._steps: list[list[_Move]] = []
        self._agree()

    def plan(self) -> list[LayerBalance]:
        """Place the experts of all layers by the load since the layers were made, or since the last move.

        Nothing moves yet. An unfinished plan is dropped; experts that it moved stay in their new places.

        Raises:
            ConfigMismatchError: ranks have other placements, or in mode "allreduce" counted other tokens.
        """
        self._agree()
        loads = self._sum_loads()
        wanted, report = [], []
        for name, layer, load in zip(self._names, self._layers, loads, strict=True):
            current = _placement(layer)
            new = place_experts(load, num_physical=current.num_physical, world_size=self._world_size, current=current)
            before, after = (each.imbalance(load, self._world_size) for each in (current, new))
            if after >= before:
                new, after = current, before
            moves = sum(a != b for a, b in zip(current.experts, new.experts, strict=True))
            report.append(LayerBalance(name, before, after, moves, moves * _expert_bytes(layer)))
            wanted.append(new)
        self._compare(f"a plan of load {_digest(loads)}")
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
        for layer in self._layers:
            require_running(layer.ep)
        start = time.perf_counter()
        moves = self._steps[0]
        try:
            packed, problem = self._vote(lambda: self._pack(moves))
            if problem is None:
                self._exchange(packed)
                arrived, problem = self._vote(lambda: self._unpack(packed))
            if problem is None:
                self._use(moves, arrived)
        except BaseException as error:
            ended = self._end(error)
            if ended is None:
                raise
            raise ended from error
        if problem is not None:
            raise problem
        self._steps.pop(0)
        return time.perf_counter() - start

    def _use(self, moves: Sequence[_Move], arrived: Sequence[tuple[_Move, list[Tensor]]]) -> None:
        """Change weights, maps of ids and counters, on which all ranks have agreed."""
        for move, tensors in arrived:
            for old, new in zip(self._tensors(move.layer, move.place), tensors, strict=True):
                old.copy_(new.view(old.dtype).view_as(old))
        changed: dict[int, list[int]] = {}
        for move in moves:
            experts = changed.setdefault(move.layer, list(_placement(self._layers[move.layer]).experts))
            experts[move.place] = move.expert
        for index, experts in changed.items():
            self._layers[index].place(Placement(tuple(experts)))
        if self._layers[0].ep.device.type == "cuda":
            torch.cuda.synchronize(self._layers[0].ep.device)

    def _vote(self, act: Callable[[], T]) -> tuple[T, BaseException | None]:
        """Return the result of ``act`` and None if it succeeded on all ranks; else the error to raise on this rank.

        A rank whose ``act`` raised reports it in the exchange in which the others wait for it.
        """
        result: Any = None
        problem: BaseException | None = None
        try:
            result = act()
        except PeerTimeoutError:
            raise
        except BaseException as error:  # noqa: BLE001 - the peers wait for this rank's word, after any error
            problem = error
        if self._world_size > 1:
            for rank, failed in enumerate(gather_values(problem is not None, self._peers)):
                if failed and problem is None:
                    problem = PeerAbortedError(rank=self._rank, peer=rank, phase="a step of the balancer", call=0)
        return result, problem

    def _end(self, error: BaseException) -> PeerTimeoutError | None:
        """End the layers' communicators, because ranks may differ from now on; return the error about a peer, if
        ``error`` is one."""
        cause = error if isinstance(error, PeerTimeoutError) else None
        ended = [end_outside_calls(ep, cause) for ep in dict.fromkeys(layer.ep for layer in self._layers)]
        return ended[0] if cause is not None else None

    def run(self) -> list[LayerBalance]:
        """Plan, and move everything in as many steps as it takes."""
        report = self.plan()
        while self._steps:
            self.step()
        return report

    def _agree(self) -> None:
        """Refuse ranks whose layers, sizes or placements differ."""
        layers = [
            (name, _expert_bytes(layer), _placement(layer).experts)
            for name, layer in zip(self._names, self._layers, strict=True)
        ]
        self._compare(
            f"max_bytes {self._max_bytes}, {len(layers)} layers with names, sizes and placements {_digest(layers)}"
        )

    def _compare(self, mine: str) -> None:
        """Refuse ranks whose text differs."""
        if self._world_size == 1:
            return
        try:
            said = gather_values(mine, self._peers)
        except PeerTimeoutError as error:
            raise (self._end(error) or error) from error
        ranks: dict[str, Sequence[int]] = {
            words: [rank for rank, other in enumerate(said) if other == words] for words in said
        }
        if len(ranks) > 1:
            raise ConfigMismatchError("balancer", ranks)

    def _sum_loads(self) -> list[tuple[float, ...]]:
        """Return the load of each layer by expert, of all ranks' tokens."""
        totals = [layer.load.total.clone() for layer in self._layers if layer.load is not None]
        if self._world_size > 1 and not self._layers[0].load.replicated:  # type: ignore[union-attr]
            flat = torch.cat(totals)
            try:
                all_reduce(flat, self._peers)
            except PeerTimeoutError as error:
                raise (self._end(error) or error) from error
            totals = list(flat.split([len(total) for total in totals]))
        return [
            _placement(layer).expert_load(total.tolist()) for layer, total in zip(self._layers, totals, strict=True)
        ]

    def _divide(self, wanted: Sequence[Placement]) -> list[list[_Move]]:
        """Divide the moves to ``wanted`` into steps."""
        steps: list[list[_Move]] = []
        received: Counter[int] = Counter()
        for index, (layer, new) in enumerate(zip(self._layers, wanted, strict=True)):
            size, owner = _expert_bytes(layer), self._owners(layer)
            for places in order_moves(_placement(layer).experts, new.experts):
                more = Counter({rank: size * count for rank, count in Counter(owner[p] for p in places).items()})
                if not steps or max((received + more).values()) > self._max_bytes:
                    steps.append([])
                    received = Counter()
                received += more
                steps[-1] += [_Move(index, place, new.experts[place]) for place in places]
        return steps

    def _pack(self, moves: Sequence[_Move]) -> _Packed:
        """Collect the weights that this rank sends to each rank and receives from each, in the order of ``moves``."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self._world_size)]
        incoming: list[list[tuple[_Move, list[Tensor]]]] = [[] for _ in range(self._world_size)]
        sent: Counter[int] = Counter()
        for move in moves:
            layer = self._layers[move.layer]
            owner = self._owners(layer)
            here = owner[move.place]
            holders = _placement(layer).replicas[move.expert]
            source = min(holders, key=lambda place: (owner[place] != here, sent[owner[place]], place))  # noqa: B023
            there = owner[source]
            sent[there] += there != here
            if self._rank == there:
                outgoing[here] += [t.contiguous().view(-1).view(torch.uint8) for t in self._tensors(move.layer, source)]
            if self._rank == here:
                incoming[there].append((move, self._tensors(move.layer, move.place)))
        return _Packed.of(outgoing, incoming, self._layers[0].ep.device)

    def _exchange(self, packed: _Packed) -> None:
        """Receive the new weights of this rank's physical experts."""
        if self._world_size > 1:
            all_to_all(packed.room, packed.sent, packed.counts, packed.to, self._peers)
        else:
            packed.room.copy_(packed.sent)

    def _unpack(self, packed: _Packed) -> list[tuple[_Move, list[Tensor]]]:
        """Return the bytes of each new weight, by move. Old weights are not written yet."""
        arrived, first = [], 0
        for move, tensors in (each for moves in packed.incoming for each in moves):
            parts = []
            for tensor in tensors:
                parts.append(packed.room[first : first + tensor.nbytes].clone())
                first += tensor.nbytes
            arrived.append((move, parts))
        return arrived

    def _tensors(self, layer: int, place: int) -> list[Tensor]:
        """Return the weights of physical expert ``place``, which is on this rank."""
        experts = self._layers[layer].holder
        group = place - experts.first + experts.num_shared
        return [getattr(experts, name)[group] for name in experts.stacked]

    def _owners(self, layer: BalancedLayer) -> list[int]:
        """Return the rank of each physical expert."""
        experts = layer.ep.config.num_experts
        return ExpertMap(experts, self._world_size).owner(torch.arange(experts)).tolist()


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


def _expert_bytes(layer: BalancedLayer) -> int:
    return sum(getattr(layer.holder, name)[0].nbytes for name in layer.holder.stacked)


def _digest(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:8]
