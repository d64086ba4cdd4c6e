"""Place experts on ranks by their load: which expert each physical expert holds, so that all ranks have as much to do.

Legend: ``E`` experts of the model (*logical*), ``P >= E`` *physical* experts, which ranks own as contiguous blocks
(:class:`moelink.routing.ExpertMap`). A physical expert is a place for weights. An expert that many tokens choose may be
in several; those are its *replicas*, and its tokens are divided among them. Dispatch and combine know physical ids
only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moelink.errors import ArgumentError, ConfigError
from moelink.nn.owned import Ownership
from moelink.nn.parameters import KeepsBuffers
from moelink.routing import ExpertMap


@dataclass(frozen=True)
class Placement:
    """The expert of each physical expert.

    Attributes:
        experts: [P], the expert of each physical expert. Every expert in [0, E) is there at least once.

    Example: ``Placement((0, 1, 2, 1))`` on two ranks: rank 0 has experts 0 and 1, rank 1 has 2 and a replica of 1.

    Raises:
        ConfigError: an expert below the largest id is nowhere, or an id is negative.
    """

    experts: tuple[int, ...]

    def __post_init__(self) -> None:
        missing = sorted(set(range(max(self.experts, default=-1) + 1)) - set(self.experts))
        if not self.experts or missing or min(self.experts) < 0:
            got = f"experts {missing} nowhere" if missing else list(self.experts)
            raise ConfigError("placement", "each expert from 0 on held by a physical expert", got)

    @classmethod
    def identity(cls, num_experts: int, num_physical: int | None = None) -> Placement:
        """Return the placement that holds expert e at e, and from ``num_experts`` on replicas of experts 0, 1, ...

        >>> Placement.identity(3, 5).experts
        (0, 1, 2, 0, 1)
        """
        return cls(tuple(place % num_experts for place in range(num_physical or num_experts)))

    @cached_property
    def num_experts(self) -> int:
        """E."""
        return max(self.experts) + 1

    @property
    def num_physical(self) -> int:
        """P."""
        return len(self.experts)

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """[E]: the physical experts of each expert, ascending."""
        places: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(self.experts):
            places[expert].append(place)
        return tuple(map(tuple, places))

    def expert_load(self, physical_load: Sequence[float]) -> tuple[float, ...]:
        """Sum the load [P] of physical experts by expert: [E]."""
        return tuple(sum(physical_load[place] for place in places) for places in self.replicas)

    def rank_load(self, load: Sequence[float], world_size: int) -> tuple[float, ...]:
        """Return the load of each rank [world_size], if the load [E] of an expert is divided evenly among its
        replicas.

        >>> Placement((0, 1, 2, 1)).rank_load([3, 8, 1], 2)
        (7.0, 5.0)
        """
        _check_load(load, self.num_experts)
        ranks = ExpertMap(self.num_physical, world_size)
        each = [load[expert] / len(self.replicas[expert]) for expert in self.experts]
        return tuple(sum(each[ranks.first(rank) : ranks.first(rank + 1)]) for rank in range(world_size))

    def imbalance(self, load: Sequence[float], world_size: int) -> float:
        """Return the busiest rank's load over the mean of all ranks: 1.0 is even. 1.0 without load."""
        by_rank = self.rank_load(load, world_size)
        return max(by_rank) * world_size / sum(by_rank) if sum(by_rank) else 1.0


def place_experts(
    load: Sequence[float], *, num_physical: int, world_size: int, current: Placement | None = None
) -> Placement:
    """Place experts by their ``load`` [E], any unit, so that the busiest rank has little more than the mean.

    Places beyond E go to the experts with the most load a replica, one after the other. Then the replicas are placed,
    the busiest first, on the rank with the least load that has room and no replica of the same expert (the greedy
    algorithm of Graham for parallel machines, 1969). Ranks that hold nearly the same experts as in ``current`` keep
    them, so that few weights move.

    Raises:
        ArgumentError: a load is negative, physical experts are fewer than experts, or ``current`` has other sizes.

    >>> place_experts([8, 1, 1, 2], num_physical=6, world_size=2).rank_load([8, 1, 1, 2], 2)
    (6.0, 6.0)
    """
    _check_load(load, len(load))
    if num_physical < len(load):
        raise ArgumentError("num_physical", f"at least the {len(load)} experts", num_physical)
    if current is not None and (current.num_experts, current.num_physical) != (len(load), num_physical):
        got = f"{current.num_experts} experts in {current.num_physical}"
        raise ArgumentError("current", f"{len(load)} experts in {num_physical} physical ones", got)
    replicas = _replicate(load, num_physical, world_size)
    ranks = _assign(load, replicas, num_physical, world_size)
    if current is None:
        return Placement(tuple(expert for experts in ranks for expert in sorted(experts)))
    owned = ExpertMap(num_physical, world_size)
    before = [list(current.experts[owned.first(rank) : owned.first(rank + 1)]) for rank in range(world_size)]
    return Placement(
        tuple(
            expert
            for mine, experts in zip(before, _keep(before, ranks), strict=True)
            for expert in _in_place(mine, experts)
        )
    )


def drain_ranks(placement: Placement, load: Sequence[float], leaving: Sequence[int], world_size: int) -> Placement:
    """Return ``placement`` with a copy of every expert outside of the ranks ``leaving``, by few moves.

    An expert that only those ranks have takes the place of a replica elsewhere, the busiest expert first, on the rank
    with the least load. Places of the leaving ranks stay as they are: their experts are copies then.

    Args:
        placement: now.
        load: [E], of each expert.
        leaving: ranks, some of [0, world_size).
        world_size: all ranks.

    Raises:
        ArgumentError: the other ranks have fewer places than there are experts.

    >>> drain_ranks(Placement((0, 1, 2, 1, 0, 3)), [1, 1, 1, 1], leaving=[2], world_size=3).experts
    (0, 3, 2, 1, 0, 3)
    """
    _check_load(load, placement.num_experts)
    ranks = ExpertMap(placement.num_physical, world_size)
    staying = [r for r in range(world_size) if r not in leaving]
    places = {place: rank for rank in staying for place in range(ranks.first(rank), ranks.first(rank + 1))}
    if len(places) < placement.num_experts:
        expected = (
            f"ranks whose absence leaves places for all {placement.num_experts} experts (make the communicator "
            "with more experts, for replicas, or use host copies)"
        )
        got = f"{sorted(leaving)}, whose absence leaves {len(places)}"
        raise ArgumentError("ranks", expected, got)
    experts = list(placement.experts)
    copies = Counter(experts[place] for place in places)
    total = dict.fromkeys(staying, 0.0)
    for place, rank in places.items():
        total[rank] += load[experts[place]] / copies[experts[place]]
    for expert in sorted(set(experts) - set(copies), key=lambda expert: (-load[expert], expert)):
        spare = [place for place in places if copies[experts[place]] > 1]
        place = min(
            spare, key=lambda place: (total[places[place]] - load[experts[place]] / copies[experts[place]], place)
        )
        old, rank = experts[place], places[place]
        for other in (p for p in places if experts[p] == old):
            total[places[other]] += load[old] / (copies[old] - 1) - load[old] / copies[old]
        total[rank] += load[expert] - load[old] / (copies[old] - 1)
        copies[old] -= 1
        copies[expert] = 1
        experts[place] = expert
    return Placement(tuple(experts))


def _check_load(load: Sequence[float], num_experts: int) -> None:
    if not load or len(load) != num_experts:
        raise ArgumentError("load", f"a number for each of {num_experts or 1} experts", f"{len(load)} numbers")
    if not all(0 <= each < float("inf") for each in load):
        raise ArgumentError("load", "finite numbers, not negative", list(load))


def _replicate(load: Sequence[float], num_physical: int, world_size: int) -> list[int]:
    """Return [E]: replicas of each expert. An expert has several on a rank only if all experts have that many."""
    counts = [1] * len(load)
    for _ in range(num_physical - len(load)):
        most = min(counts) // world_size * world_size + world_size
        open_ones = [expert for expert, count in enumerate(counts) if count < most]
        busiest = max(open_ones, key=lambda expert: (load[expert] / counts[expert], -counts[expert], -expert))
        counts[busiest] += 1
    return counts


def _assign(load: Sequence[float], replicas: list[int], num_physical: int, world_size: int) -> list[list[int]]:
    """Return the experts of each rank."""
    owned = ExpertMap(num_physical, world_size)
    each = [load[expert] / count for expert, count in enumerate(replicas)]
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    total = [0.0] * world_size
    items = [expert for expert, count in enumerate(replicas) for _ in range(count)]
    for expert in sorted(items, key=lambda expert: (-each[expert], expert)):
        room = [rank for rank in range(world_size) if len(ranks[rank]) < owned.num_local(rank)]
        rank = min(room, key=lambda rank: (expert in ranks[rank], total[rank], rank))
        ranks[rank].append(expert)
        total[rank] += each[expert]
    return ranks


def _keep(before: list[list[int]], ranks: list[list[int]]) -> list[list[int]]:
    """Give the sets of experts to ranks anew, each to the rank that has most of it already and owns as many."""
    pairs = [
        (-sum((Counter(mine) & Counter(experts)).values()), rank, number)
        for rank, mine in enumerate(before)
        for number, experts in enumerate(ranks)
        if len(mine) == len(experts)
    ]
    chosen: dict[int, int] = {}
    for _, rank, number in sorted(pairs):
        if rank not in chosen and number not in chosen.values():
            chosen[rank] = number
    return [ranks[chosen[rank]] for rank in range(len(before))]


def _in_place(mine: list[int], experts: list[int]) -> list[int]:
    """Order ``experts`` so that those in ``mine`` keep their places."""
    left = Counter(experts)
    result: list[int | None] = []
    for expert in mine:
        stays = left[expert] > 0
        left[expert] -= stays
        result.append(expert if stays else None)
    rest = iter(sorted(left.elements()))
    return [next(rest) if expert is None else expert for expert in result]


class PlacementMap(KeepsBuffers):
    """Turns ids of experts into ids of physical experts, on the device.

    Its buffers are not part of a state_dict. They keep their shape when the placement changes, so a CUDA graph that
    captured a call goes on with the new one.

    Args:
        placement: at first.
        rank: of this process. Ranks begin with different replicas.
        device: of the ids.
    """

    kept = ("table", "count")
    table: Tensor
    count: Tensor

    def __init__(self, placement: Placement, *, rank: int = 0, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.rank = rank
        self._absent: frozenset[int] = frozenset()
        most = placement.num_physical - placement.num_experts + 1
        for name, shape in (("table", (placement.num_experts, most)), ("count", (placement.num_experts,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int32, device=device), persistent=False)
        self.set(placement)

    @property
    def ownership(self) -> Ownership:
        """The map is this rank's: ranks begin with different replicas."""
        return Ownership()

    def set(self, placement: Placement) -> None:
        """Use ``placement``, of the same sizes, from now on."""
        sizes = self.table.shape[0], self.table.shape[0] + self.table.shape[1] - 1
        if (placement.num_experts, placement.num_physical) != sizes:
            got = f"{placement.num_experts} in {placement.num_physical}"
            raise ArgumentError("placement", f"{sizes[0]} experts in {sizes[1]} physical ones", got)
        self.placement = placement
        self.reset_buffers()

    def leave_out(self, absent: Tensor) -> None:
        """Choose replicas that are not ``absent``, [num_physical] bool, where an expert has some: after a mask or an
        admission those that ``ep.absent_experts`` says. Tokens of other experts go where they went, and are dropped."""
        if len(absent) != self.placement.num_physical:
            raise ArgumentError("absent", f"one entry for each of {self.placement.num_physical}", len(absent))
        self._absent = frozenset(place for place, is_absent in enumerate(absent.tolist()) if is_absent)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """The tables of the placement in use."""
        if self.table.is_meta:
            return
        width = self.table.shape[1]
        left = ([place for place in places if place not in self._absent] for places in self.placement.replicas)
        replicas = [there or places for there, places in zip(left, self.placement.replicas, strict=True)]
        rows = [[places[k % len(places)] for k in range(width)] for places in replicas]
        self.table.copy_(torch.tensor(rows, dtype=torch.int32, device="cpu"))
        self.count.copy_(torch.tensor([len(places) for places in replicas], dtype=torch.int32, device="cpu"))

    @torch.no_grad()
    def forward(self, topk_ids: Tensor) -> Tensor:
        """Return physical ids for ``topk_ids`` [T, K]: token t takes replica (t + rank) modulo the number of them. -1
        stays -1.

        >>> PlacementMap(Placement((0, 1, 2, 1)))(torch.tensor([[1, 0], [1, 2], [1, -1]])).tolist()
        [[1, 0], [3, 2], [1, -1]]
        """
        routed = topk_ids >= 0
        experts = topk_ids.clamp(min=0).long()
        turn = torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None] + self.rank
        physical = self.table[experts, turn % self.count[experts]]
        return torch.where(routed, physical, -1).to(topk_ids.dtype)
