"""Copies of experts' weights in the host memory of other ranks, so that they outlive the rank that owns them.

Of each expert the rank of its first physical expert sends the weights, and the next ranks that do not own the expert
keep them. A copy belongs to the *expert*, wherever the balancer places it later, until the next refresh. Copies of a
rank that died are those of experts that other ranks own; they were never the only ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moelink.nn.placement import Placement
from moelink.nn.steps import owners


class HostCopies:
    """The copies that this rank keeps for one layer.

    Args:
        count: ranks that keep a copy of each expert.

    Attributes:
        refreshed: by expert, the number of the refresh whose weights its copy has.
        former: by expert, weights that this rank had on its device before a restoration of which it does not know that
            it ended on all ranks.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.refreshed: dict[int, int] = {}
        self.former: dict[int, list[Tensor]] = {}
        self._weights: dict[int, list[Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostCopies:
        """A copy of a layer has no host copies before its first refresh."""
        return HostCopies(self.count)

    def __reduce__(self) -> tuple[Any, ...]:
        return HostCopies, (self.count,)

    def weights(self, expert: int) -> list[Tensor]:
        """Return the weights of ``expert``, which has a copy here."""
        return self._weights[expert]

    def room(self, expert: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return host memory for the weights of ``expert``, of the shapes and dtypes of ``like``. It is pinned if they
        are on a CUDA device."""
        if expert not in self._weights:
            self._weights[expert] = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in like]
        return self._weights[expert]

    def keep(self, experts: set[int]) -> None:
        """Free the copies of other experts than these."""
        self._weights = {expert: weights for expert, weights in self._weights.items() if expert in experts}
        self.refreshed = {expert: number for expert, number in self.refreshed.items() if expert in experts}


def keepers(placement: Placement, world_size: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, rank that sends its weights, rank that keeps a copy), ``count`` for each expert if so many ranks
    do not own it.

    >>> list(keepers(Placement((0, 1, 2, 0)), 3, 1))
    [(0, 0, 1), (1, 0, 1), (2, 1, 2)]
    """
    owner = owners(placement.num_physical, world_size)
    for expert, places in enumerate(placement.replicas):
        holders = [owner[place] for place in places]
        others = [rank for step in range(1, world_size) if (rank := (holders[0] + step) % world_size) not in holders]
        for keeper in others[:count]:
            yield expert, holders[0], keeper
