"""Ranks that refresh host copies and restore experts in virtual time, while ranks die at any place of it.

The layers of one schedule go from communicator to communicator: first all ranks refresh, then those that are left
restore, then those that are left of them. Before each restoration brute force over the objects of all ranks says which
weights every rank must have afterwards, or which experts are lost.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import moelink
from moelink.nn import MoE, Placement, refresh_host_copies, restore_experts
from moelink.routing import ExpertMap
from tests.support.simulated_groups import Fault, OddError, Rank, Ranks

HIDDEN, INNER, SPAN = 8, 4, 60
NEVER = Fault("killed", 0, 10**6, 0.0)
FOUR_RANKS = 2
"""A seed of :func:`begin` with four ranks and a host copy of each expert."""
Weights = dict[int, list[torch.Tensor]]
"""By expert."""


@dataclass
class Schedule:
    """The state of a schedule.

    Attributes:
        models: by rank that is alive, in the order of ranks.
        given: faults that happen in place of drawn ones.
        seen: what happened, for the test's counts.
    """

    choice: random.Random
    fields: dict[str, Any]
    models: list[torch.nn.ModuleDict] = field(default_factory=list)
    given: list[Fault] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def fault(self) -> Fault:
        """Draw what hits one of the ranks that are alive, or nothing."""
        if self.given:
            return self.given.pop(0)
        kind = self.choice.choice(("nothing", "killed", "killed", "raises"))
        if kind == "nothing":
            return NEVER
        return Fault(kind, self.choice.randrange(len(self.models)), self.choice.randrange(SPAN), 0.0)

    def run(self, call: Callable[[Rank, moelink.Communicator], Any]) -> dict[int, Any]:
        """Let all ranks that are alive make ``call``; return results, and errors, by rank. The dead leave."""
        ranks = Ranks(self.choice.randrange(10**6), self.fault(), len(self.models))
        results: dict[int, Any] = {}

        def main(process: Rank) -> None:
            ep = ranks.communicator(**self.fields)
            if not self.models[process.rank]:
                return
            process.arm()
            try:
                results[process.rank] = call(process, ep)
            except (moelink.errors.MoelinkError, OddError) as error:
                results[process.rank] = error

        ranks.run(main)
        self.seen[ranks.fault.kind if ranks.hit else "calm"] += 1
        if ranks.hit and ranks.fault.kind == "killed":
            results.pop(ranks.fault.victim, None)
            del self.models[ranks.fault.victim]
        assert len(results) == len(self.models)
        return results


def begin(seed: int) -> Schedule:
    """Draw layers of 2 to 4 ranks, with or without replicas and host copies, which are refreshed once."""
    choice = random.Random(f"survival {seed}")
    world = choice.randint(2, 4)
    experts = choice.randint(3, 7)
    physical = max(world, experts + choice.choice((0, 0, 2)))
    placed = [place % experts for place in range(physical)]
    choice.shuffle(placed)
    fields = {
        "num_experts": physical, "topk": 2, "hidden_size": HIDDEN, "max_tokens_per_rank": 4, "dispatch_format": "fp32",
        "combine_dtype": torch.float32, "fused_shared_expert": choice.random() < 0.3,
    }  # fmt: skip
    made = Schedule(choice, fields)
    options: dict[str, Any] = {"placement": Placement(tuple(placed)), "intermediate_size": INNER}
    copies = choice.randint(0, min(2, world - 1))
    ranks = Ranks(seed, NEVER, world)
    models: dict[int, torch.nn.ModuleDict] = {}

    def main(process: Rank) -> None:
        ep = ranks.communicator(**fields)
        layers = {name: MoE(ep, seed=number, host_copies=copies, **options) for number, name in enumerate("ab")}
        models[process.rank] = torch.nn.ModuleDict(layers)
        if copies:
            refresh_host_copies(models[process.rank], max_bytes=1)

    ranks.run(main)
    made.models = [models[rank] for rank in range(world)]
    for model in made.models:
        for layer in model.values():
            for tensor in layer.experts.weights:
                tensor.mul_(2)  # what the copies do not have before the next refresh
    return made


def refresh(schedule: Schedule) -> None:
    """Refresh again, and check that each copy is whole, of one refresh or the other."""
    truth = [_live(schedule.models, name) for name in "ab"]
    models = list(schedule.models)

    def call(process: Rank, ep: moelink.Communicator) -> Any:
        model = models[process.rank]
        for layer in model.values():
            layer.ep = ep
        return refresh_host_copies(model, max_bytes=1)

    results = schedule.run(call)
    assert all(
        isinstance(each, (int, moelink.PeerTimeoutError, moelink.PeerAbortedError, OddError))
        for each in results.values()
    )
    for model in schedule.models:
        for layer, weights in zip(model.values(), truth, strict=True):
            for expert, number in layer.copies.refreshed.items():
                for copy, now in zip(layer.copies.weights(expert), weights[expert], strict=True):
                    assert torch.equal(copy * (2 if number == 1 else 1), now)


def restore(schedule: Schedule) -> bool:
    """Restore over the ranks that are alive, and compare with brute force. Returns whether all ranks have an answer."""
    wanted = [_wanted(schedule.models, name) for name in "ab"]
    lost = {name: sorted(experts) for name, (_, experts) in zip("ab", wanted, strict=True) if experts}
    before = [[_state(layer) for layer in model.values()] for model in schedule.models]
    models = list(schedule.models)
    somewhere = {(id(model), name): _somewhere(model[name]) for model in models for name in "ab"}
    was = {id(model): state for model, state in zip(models, before, strict=True)}
    results = schedule.run(lambda process, ep: restore_experts(models[process.rank], ep, max_bytes=1))
    world = len(models)
    done = 0
    for model in schedule.models:
        rank = next(number for number, each in enumerate(models) if each is model)
        result = results[rank]
        if lost:
            if isinstance(result, moelink.StateError):
                named = {
                    n: [int(e) for e in ids.split(",")] for ids, n in re.findall(r"\[([\d, ]+)\] of (\w)", str(result))
                }
                assert named == lost
                done += 1
            else:
                assert not isinstance(result, list), "experts are lost, and nobody says so"
            assert _same([_state(layer) for layer in model.values()], was[id(model)])
            continue
        for layer, (weights, _), old in zip(model.values(), wanted, was[id(model)], strict=True):
            if layer.experts.ranks != (rank, world) or layer.ep.config.world_size != world:
                assert not isinstance(result, list)
                assert _same([_state(layer)], [old])
                continue
            owned = ExpertMap(schedule.fields["num_experts"], world)
            held = layer.experts.placement.experts[owned.first(rank) : owned.first(rank + 1)]
            if isinstance(result, list):
                assert _experts(layer) == list(held)
            for expert, mine in _held(layer).items():
                assert all(torch.equal(a, b) for a, b in zip(mine, weights[expert], strict=True))
        done += isinstance(result, list)
    for name in "ab":  # nothing that those who are left had is lost, but for what the dead had come to own
        owned_by_dead = [
            _somewhere(m[name]) for m in models if m not in schedule.models and m[name].ep.config.world_size == world
        ]
        had = set().union(*(somewhere[id(model), name] for model in schedule.models)).difference(*owned_by_dead)
        assert had <= set().union(*(_somewhere(model[name]) for model in schedule.models))
    schedule.seen["lost" if lost else "restored"] += done
    return done == len(schedule.models)


def _held(layer: MoE) -> Weights:
    shared = layer.experts.num_shared
    found = {e: [t[shared + g] for t in layer.experts.weights] for g, e in enumerate(_experts(layer))}
    return found | ({-1: [t[0] for t in layer.experts.weights]} if shared else {})


def _experts(layer: MoE) -> list[int]:
    return list(layer.experts.ownership.experts)


def _live(models: list[torch.nn.ModuleDict], name: str) -> Weights:
    """The weights that any rank holds on its device, which are the same on all."""
    found: Weights = {}
    for model in models:
        held = model[name].copies.former | _held(model[name])
        found |= {expert: [t.clone() for t in tensors] for expert, tensors in held.items()}
    return found


def _wanted(models: list[torch.nn.ModuleDict], name: str) -> tuple[Weights, set[int]]:
    """Return the weights that each expert must have after a restoration, and the experts that are lost."""
    live = _live(models, name)
    newest: dict[int, int] = {}
    for model in models:
        copies = model[name].copies
        for expert, number in copies.refreshed.items():
            if (expert not in live or expert in newest) and number > newest.get(expert, 0):
                newest[expert] = number
                live[expert] = [t.clone() for t in copies.weights(expert)]
    return live, set(range(models[0][name].experts.num_experts)) - set(live)


def _somewhere(layer: MoE) -> set[int]:
    """The experts of which this rank has weights, on its device or in a copy."""
    return {*_held(layer), *layer.copies.refreshed, *layer.copies.former}


def _state(layer: MoE) -> tuple[Any, ...]:
    experts = layer.experts
    return experts.ranks, experts.first, experts.placement, [t.clone() for t in experts.weights]


def _same(now: list[tuple[Any, ...]], old: list[tuple[Any, ...]]) -> bool:
    return all(
        a[:3] == b[:3] and all(torch.equal(x, y) for x, y in zip(a[3], b[3], strict=True))
        for a, b in zip(now, old, strict=True)
    )


@torch.no_grad()
def run_at(place: int, victim: int = 2) -> bool:
    """Of four ranks the last dies, then one of the others at a place of the restoration; the last two restore. Returns
    whether the place was reached."""
    schedule = begin(FOUR_RANKS)
    assert len(schedule.models) == 4
    assert schedule.models[0]["a"].copies.count == 1
    del schedule.models[3]
    schedule.given = [Fault("killed", victim, place, 0.0), NEVER]
    restore(schedule)
    if schedule.seen["killed"]:
        restore(schedule)
    return bool(schedule.seen["killed"])


@torch.no_grad()
def newer_copy(which: Callable[[list[int]], int]) -> None:
    """Of two copies of an expert, one was refreshed once more when the expert's rank died."""
    schedule = next(s for s in map(begin, range(100)) if s.models[0]["a"].copies.count == 2 and len(s.models) == 4)
    schedule.given = [NEVER]
    layers = [model["a"] for model in schedule.models]
    expert = next(e for e in layers[0].copies.refreshed if sum(e in layer.copies.refreshed for layer in layers) == 2)
    owner = next(rank for rank, layer in enumerate(layers) if expert in _experts(layer))
    newer = which([rank for rank, layer in enumerate(layers) if expert in layer.copies.refreshed])
    layers[newer].copies.refreshed[expert] = 2
    for tensor in layers[newer].copies.weights(expert):
        tensor.fill_(7)
    others = [rank for rank, layer in enumerate(layers) if expert in _experts(layer)]
    assert others == [owner], "no replica"
    del schedule.models[owner]
    restore(schedule)
    assert schedule.seen["restored"] == 3
    holder = next(model["a"] for model in schedule.models if expert in _experts(model["a"]))
    assert all(bool((tensor == 7).all()) for tensor in _held(holder)[expert])


@torch.no_grad()
def run(seed: int) -> Counter[str]:
    """A schedule: a refresh, then as many restorations as it takes, in each of which a rank may be hit."""
    schedule = begin(seed)
    if any(layer.copies.count for layer in schedule.models[0].values()):
        refresh(schedule)
    if len(schedule.models) > 1 and schedule.choice.random() < 0.7:
        del schedule.models[schedule.choice.randrange(len(schedule.models))]
    for _ in range(4):
        if not schedule.models or restore(schedule):
            break
    return schedule.seen
