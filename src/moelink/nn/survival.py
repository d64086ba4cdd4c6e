"""Let experts outlive the ranks that own them: refresh host copies, and restore experts on a communicator of survivors.

:func:`restore_experts` gives each rank the weights of the experts that it owns in a communicator: after
:meth:`moelink.Communicator.recover`, which deals the experts out anew, or where a new process has taken a rank's place.

1. *Look.* Ranks tell each other of which experts they hold weights: on the device, and in which host copies. All find
   the same source for each expert: the rank itself, another rank's device (a survivor that owned it, or a replica), or
   the newest host copy. An expert without a source is named on every rank, and nothing has changed.
2. *Move*, layer by layer, in steps that happen on all ranks or on none (:mod:`moelink.nn.steps`). New weights have
   memory of their own until all of the layer are there; so a layer takes twice its memory, but no two layers at a time.
3. *Use* the communicator and the new weights. The old ones are freed after one more exchange. A rank that takes part
   in it has passed the last vote, so it has its new weights: no rank frees weights that another one still waits for.

If a rank dies meanwhile, some layers use the new communicator and some the old one. Recovering, and restoring, again
works: ranks look anew at the weights that they hold, those not yet freed among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelink.communicator import Communicator
from moelink.control.handshake import compare
from moelink.errors import ArgumentError, StateError, UnsupportedError
from moelink.lifetime import peers_of, require_no_pending, require_running
from moelink.nn.host_copies import keepers
from moelink.nn.load import BalancedLayer
from moelink.nn.moe import MoE
from moelink.nn.placed_experts import PlacedExperts
from moelink.nn.placement import Placement
from moelink.nn.steps import MAX_BYTES, Route, Steps, check_max_bytes, digest, divide
from moelink.routing import ExpertMap

_SHARED = -1
"""In place of an expert: the shared one, fused in group 0."""

_SAME = (
    "num_experts", "topk", "hidden_size", "mode", "layout", "dispatch_format", "combine_dtype", "fused_shared_expert",
    "batch_invariant",
)  # fmt: skip
"""Fields of a communicator's configuration that a layer was made for."""


@dataclass(frozen=True)
class RestoredExperts:
    """The sources of one layer's weights, as numbers of physical experts over all ranks.

    Attributes:
        name: of the layer in its model.
        stayed: were on their rank already.
        moved: came from another rank's device.
        copied: came from host copies.
        missing: ids of the experts without weights, which are NaN.
        refresh: number of the oldest refresh whose copies were taken; 0 if none was.
        nbytes: that travelled between ranks.
    """

    name: str
    stayed: int
    moved: int
    copied: int
    missing: tuple[int, ...]
    refresh: int
    nbytes: int


@dataclass(frozen=True)
class _Copy:
    """Copy ``expert`` of layer ``layer`` from rank ``source`` to the host memory of ``keeper``."""

    layer: int
    expert: int
    source: int
    keeper: int


@dataclass(frozen=True)
class _Fill:
    """Fill ``group`` of rank ``target`` with the weights of ``expert``, which ``source`` has, in a host copy or not."""

    target: int
    group: int
    expert: int
    source: int
    copied: bool = False


def refresh_host_copies(model: torch.nn.Module, *, max_bytes: int = MAX_BYTES) -> int:
    """Copy the experts of the layers made with ``host_copies`` to the host memory of other ranks. Collective.

    Call it between two forward passes: after loading, after a :class:`moelink.nn.Balancer` has moved experts, and in
    training as often as an expert may fall back. A copy is replaced once all ranks have the weights of its step, so an
    interrupted refresh leaves every copy whole, some of the refresh before.

    Args:
        model: with :class:`moelink.nn.MoE` layers, or one of them.
        max_bytes: most bytes that a rank receives in a step, a single expert aside, and the memory that it takes for
            them on the device or, over gloo, on the host.

    Returns:
        Bytes of host memory that this rank's copies take.

    Raises:
        ArgumentError: no layer was made with ``host_copies``; on every rank, before anything is copied.
        PendingError: a call is under way.
        ConfigMismatchError: ranks have other layers, placements or ``max_bytes``.
        PeerAbortedError, PeerTimeoutError: as :meth:`moelink.nn.Balancer.step`.
    """
    layers = [(name, layer) for name, layer in _layers(model) if layer.copies.count]
    if not layers:
        raise ArgumentError("model", "moelink.nn.MoE layers made with host_copies >= 1", f"{type(model).__name__}")
    return _Refresh(layers, max_bytes).run()


def restore_experts(
    model: torch.nn.Module, ep: Communicator, *, empty: bool = False, allow_missing: bool = False,
    max_bytes: int = MAX_BYTES,
) -> list[RestoredExperts]:  # fmt: skip
    """Let the layers of ``model`` go on over ``ep``, with the weights of the experts that each rank owns there.
    Collective over ``ep``.

    Weights come from the ranks that hold them and, for experts that no rank does, from the newest host copies. All else
    (routers, shared experts, other modules) every rank has already. Call :func:`refresh_host_copies` afterwards, before
    the next rank is lost.

    Args:
        model: with :class:`moelink.nn.MoE` layers, or one of them; the same on every rank.
        ep: the result of ``recover`` of the layers' communicator; or another one of the same sizes, also over more
            ranks.
        empty: this rank's experts hold no weights: it is a new process, which has taken another one's place. It takes
            the placement of the others.
        allow_missing: go on without the weights of some experts. They are NaN until a checkpoint is loaded
            (:func:`moelink.nn.local_state_dict`).
        max_bytes: most bytes that a rank receives in a step, a single expert aside.

    Returns:
        The sources of each layer's weights, the same on every rank. Parameters are the same objects with other shapes;
        make optimizers anew. CUDA graphs have to be captured again, unless ``ep`` is the layers' communicator, of which
        only ``empty`` ranks fill their experts.

    Raises:
        StateError: no rank and no host copy has the weights of some experts; it names them, and nothing has changed.
        ArgumentError: ``model`` has no such layer, or ``ep`` has other sizes than the layers were made for.
        UnsupportedError: a layer of another kind, experts in adapters or parametrisations, or an auxiliary loss of a
            group of ranks.
        PendingError: a call is under way.
        ConfigMismatchError: ranks have other layers, placements or arguments.
        PeerAbortedError, PeerTimeoutError: as :meth:`moelink.nn.Balancer.step`, about one layer: layers before it use
            ``ep``, and those after it do not. Call it again, on a new communicator if a rank is lost.
    """
    return _Restore(_layers(model), ep, empty, allow_missing, max_bytes).run()


def _layers(model: torch.nn.Module) -> list[tuple[str, MoE]]:
    """Return the layers by name. Raises ArgumentError or UnsupportedError if there is none, or one of another kind."""
    found = [(name or "moe", module) for name, module in model.named_modules() if isinstance(module, BalancedLayer)]
    for name, layer in found:
        if not isinstance(layer, MoE):
            kind = type(layer).__name__
            raise UnsupportedError(
                f"{name}: expected layers of moelink.nn.MoE, got {kind}; load its experts from files"
            )
    if not found:
        raise ArgumentError("model", "layers of moelink.nn.MoE", type(model).__name__)
    return [(name, layer) for name, layer in found if isinstance(layer, MoE)]


def _facts(name: str, layer: MoE) -> str:
    """Return the facts of a layer on which ranks agree, but for its placement."""
    experts = layer.experts
    shapes = [(tuple(t.shape[1:]), str(t.dtype)) for t in experts.weights]
    return (
        f"{name} {type(experts).__name__} {shapes} {experts.num_shared} {layer.placement is None} {layer.copies.count}"
    )


class _Refresh(Steps[_Copy]):
    """One refresh of the host copies of ``layers``."""

    def __init__(self, layers: Sequence[tuple[str, MoE]], max_bytes: int) -> None:
        first = layers[0][1].ep
        super().__init__((layer.ep for _, layer in layers), peers_of(first, None, "copying experts"), "a refresh")
        self._named, self._max_bytes, self._number = layers, max_bytes, 0

    def run(self) -> int:
        """Copy all experts; return the bytes that copies take here."""
        self._all(self._check)
        placed = [(_facts(name, layer), layer.experts.placement.experts) for name, layer in self._named]
        self._compare(
            f"max_bytes {self._max_bytes}, {len(placed)} layers with placements {digest(placed)}", "host copies"
        )
        newest = max((n for _, layer in self._named for n in layer.copies.refreshed.values()), default=0)
        self._number = 1 + max(self._gather(newest))
        copies: list[tuple[_Copy, dict[int, int]]] = []
        for index, (_, layer) in enumerate(self._named):
            for expert, source, keeper in keepers(layer.experts.placement, self._world_size, layer.copies.count):
                copies.append((_Copy(index, expert, source, keeper), {keeper: layer.expert_bytes}))
        for step in divide(copies, self._max_bytes):
            self._make(step)
        for index, (_, layer) in enumerate(self._named):
            layer.copies.keep({c.expert for c, _ in copies if (c.layer, c.keeper) == (index, self._rank)})
        return sum(layer.host_copy_bytes for _, layer in self._named)

    def _check(self) -> None:
        check_max_bytes(self._max_bytes)
        for ep in self._eps:
            require_no_pending(ep)

    def _routes(self, moves: Sequence[_Copy]) -> Iterator[Route[_Copy]]:
        for move in moves:
            layer = self._named[move.layer][1]
            like = [tensor[0] for tensor in layer.experts.weights]
            yield Route(
                move, move.source, move.keeper, partial(_held, layer, move.expert),
                partial(layer.copies.room, move.expert, like),
            )  # fmt: skip

    def _commit(self, moves: Sequence[_Copy]) -> None:
        for move in moves:
            if move.keeper == self._rank:
                self._named[move.layer][1].copies.refreshed[move.expert] = self._number


class _Restore(Steps[_Fill]):
    """One restoration of ``layers``, over ``ep``. ``_layer`` is the layer under way, ``_new`` its new weights."""

    def __init__(
        self, layers: Sequence[tuple[str, MoE]], ep: Communicator, empty: bool, allow_missing: bool, max_bytes: int
    ) -> None:
        super().__init__([ep], peers_of(ep, None, "restoring experts"), "a restoration of experts")
        self._named, self._ep, self._empty = layers, ep, empty
        self._allow_missing, self._max_bytes = allow_missing, max_bytes
        self._layer, self._new = layers[0][1], list[Tensor]()

    def run(self) -> list[RestoredExperts]:
        """Restore all layers."""
        require_running(self._ep)
        self._all(self._check)
        facts = [_facts(name, layer) for name, layer in self._named]
        options = f"allow_missing {self._allow_missing}, max_bytes {self._max_bytes}"
        self._compare(f"{options}, {len(facts)} layers, {digest(facts)}", "restore_experts")
        said = self._gather([self._look(layer) for _, layer in self._named])
        plans = []
        for index, (name, _) in enumerate(self._named):
            held = [layers[index] for layers in said]
            placement = self._placement(name, held)
            plans.append((placement, *self._plan(placement, held)))
        lost = [
            f"{missing} of {name}" for (name, _), (*_, missing, _) in zip(self._named, plans, strict=True) if missing
        ]
        if lost and not self._allow_missing:
            raise StateError(
                "restore_experts: expected the weights of every expert on a rank or in a host copy, got none of "
                f"experts {', '.join(lost)}; load them from a checkpoint after restore_experts(..., allow_missing=True)"
            )
        return [self._restore(name, layer, *plan) for (name, layer), plan in zip(self._named, plans, strict=True)]

    def _check(self) -> None:
        """Refuse what cannot be restored, on this rank."""
        check_max_bytes(self._max_bytes)
        require_no_pending(self._ep)
        for name, layer in self._named:
            old, new = layer.ep.config, self._ep.config
            differing = [field for field in _SAME if getattr(old, field) != getattr(new, field)]
            if differing or new.num_experts < new.world_size:
                got = {field: getattr(new, field) for field in differing} or f"{new.world_size} ranks"
                raise ArgumentError("ep", f"a communicator as {name} was made for, an expert at least a rank", got)
            experts = layer.experts
            plain = isinstance(experts, PlacedExperts) and all(
                part in experts._parameters or part in experts._buffers for part in experts.stacked
            )
            if not plain or experts.gate_up_proj.is_meta:
                raise UnsupportedError(
                    f"{name}: expected experts with weights of their own, got {type(experts).__name__} with adapters, "
                    "parametrisations or without values; load a layer without them from a checkpoint"
                )
            if layer.aux_losses is not None:
                layer.aux_losses.check_move(new.world_size)

    def _look(self, layer: MoE) -> dict[str, Any]:
        """Return the weights that this rank has of ``layer``."""
        experts = [] if self._empty else sorted({*_experts_of(layer.experts), *layer.copies.former})
        refreshed = [[expert, number] for expert, number in layer.copies.refreshed.items()]
        return {"experts": experts, "copies": refreshed, "placement": list(layer.experts.placement.experts)}

    def _placement(self, name: str, held: Sequence[dict[str, Any]]) -> Placement:
        """Return the placement on which all ranks with weights agree."""
        full = {rank: each["placement"] for rank, each in enumerate(held) if each["experts"]}
        if not full:
            raise StateError(
                f"restore_experts: expected a rank with weights of {name}, got empty ranks alone; load a checkpoint"
            )
        compare([{"restore_experts": f"{name} placed {digest(placed)}"} for placed in full.values()], list(full))
        return Placement(tuple(next(iter(full.values()))))

    def _plan(
        self, placement: Placement, held: Sequence[dict[str, Any]]
    ) -> tuple[list[_Fill], list[int], dict[int, int]]:
        """Return how each group of each rank is filled, the experts without weights, and the refreshes of the copies
        that are taken, by expert."""
        owned = ExpertMap(placement.num_physical, self._world_size)
        on_device = [set(each["experts"]) for each in held]
        copies = [{expert: number for expert, number in each["copies"]} for each in held]
        shared = [_SHARED] * self._named[0][1].experts.num_shared
        sent: Counter[int] = Counter()
        fills, missing, refreshes = [], set(), {}
        for target in range(self._world_size):
            wanted = [*shared, *placement.experts[owned.first(target) : owned.first(target + 1)]]
            for group, expert in enumerate(wanted):
                newest = max((each.get(expert, 0) for each in copies), default=0)
                sources = [rank for rank, here in enumerate(on_device) if expert in here]
                copied = not sources
                if copied and newest:
                    sources = [rank for rank, each in enumerate(copies) if each.get(expert) == newest]
                    refreshes[expert] = newest
                if not sources:
                    missing.add(expert)
                    continue
                source = min(sources, key=lambda rank: (rank != target, sent[rank], rank))  # noqa: B023
                sent[source] += source != target
                fills.append(_Fill(target, group, expert, source, copied))
        return fills, sorted(missing), refreshes

    def _restore(
        self, name: str, layer: MoE, placement: Placement, fills: list[_Fill], missing: list[int],
        refreshes: dict[int, int],
    ) -> RestoredExperts:  # fmt: skip
        """Move the weights of one layer, and let it use them and the communicator."""
        self._layer = layer
        size, travel = layer.expert_bytes, [fill for fill in fills if fill.source != fill.target]
        self._new = self._all(partial(self._begin, placement, fills))
        for step in divide(((fill, {fill.target: size}) for fill in travel), self._max_bytes):
            self._make(step)
        if self._new[0].data_ptr() != layer.experts.weights[0].data_ptr():
            layer.copies.former |= {expert: _held(layer, expert) for expert in self._look(layer)["experts"]}
        layer.use_communicator(self._ep, placement, self._new)
        self._gather(None)
        layer.copies.former, self._new = {}, []
        copied = sum(fill.copied for fill in fills)
        moved = sum(not fill.copied for fill in travel)
        return RestoredExperts(
            name, len(fills) - moved - copied, moved, copied, tuple(missing), min(refreshes.values(), default=0),
            size * len(travel),
        )  # fmt: skip

    @torch.no_grad()
    def _begin(self, placement: Placement, fills: Sequence[_Fill]) -> list[Tensor]:
        """Return room for this rank's weights, with those that it has itself; NaN, or bytes 255 in tensors of integers,
        whose products are not finite either, for the others until they arrive."""
        experts = self._layer.experts
        old, config = experts.weights, self._ep.config
        here = [fill for fill in fills if fill.source == fill.target == self._rank]
        groups = experts.num_shared + ExpertMap(placement.num_physical, config.world_size).num_local(config.rank)
        fits = len(old[0]) == groups
        if fits and [(fill.group, fill.expert) for fill in here if not fill.copied] == list(
            enumerate(_experts_of(experts))
        ):
            return old
        new = old if fits and self._empty else [torch.empty((groups, *t.shape[1:]), **_kind(t)) for t in old]
        for tensor in new:
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
            else:
                tensor.view(torch.uint8).fill_(255)
        for fill in here:
            for tensor, mine in zip(new, self._sent(fill), strict=True):
                tensor[fill.group].copy_(mine)
        return new

    def _sent(self, fill: _Fill) -> list[Tensor]:
        """Return the weights of the expert that this rank has."""
        layer = self._layer
        return layer.copies.weights(fill.expert) if fill.copied else _held(layer, fill.expert, fill.group)

    def _routes(self, moves: Sequence[_Fill]) -> Iterator[Route[_Fill]]:
        for fill in moves:
            room = partial(_rows, self._new, fill.group)
            yield Route(fill, fill.source, fill.target, partial(self._sent, fill), room)

    def _commit(self, moves: Sequence[_Fill]) -> None:
        """Nothing yet: the layer uses its new weights when it has all."""


def _experts_of(experts: PlacedExperts) -> list[int]:
    """Return the expert of each group here."""
    return [*[_SHARED] * experts.num_shared, *experts.ownership.experts]


def _held(layer: MoE, expert: int, wanted: int = -1) -> list[Tensor]:
    """Return the weights of ``expert``, which this rank holds, from group ``wanted`` if that holds it."""
    held = _experts_of(layer.experts)
    if expert not in held:
        return layer.copies.former[expert]
    return _rows(layer.experts.weights, wanted if held[wanted : wanted + 1] == [expert] else held.index(expert))


def _kind(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _rows(tensors: Sequence[Tensor], group: int) -> list[Tensor]:
    return [tensor[group] for tensor in tensors]
