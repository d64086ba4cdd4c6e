"""Walk at random over right, refused, wrong and interrupted calls: each result is the oracle's, the next call works."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moelink.testing import run_ranks
from tests.tiers import seeds
from tests.transports import walk_ranks

RANKS = 3
AT_A_TIME = 10


def walk(transport: str, numbers: Sequence[int]) -> None:
    for first in range(0, len(numbers), AT_A_TIME):
        part = list(numbers[first : first + AT_A_TIME])
        print(f"walks {part} over {transport}")
        said, *others = run_ranks(walk_ranks.walks, RANKS, transport, part, timeout=600)
        print("\n".join(said))
        assert all(len(other) == len(said) for other in others)
        assert len(said) >= walk_ranks.STEPS * len(part)


@seeds(3, 110)
@pytest.mark.timeout(3600)
def test_walks_of_the_collective_transport(seeds: Sequence[int]) -> None:
    walk("collective", seeds)


@seeds(1, 60)
@pytest.mark.timeout(3600)
def test_walks_of_the_symmetric_transport(seeds: Sequence[int]) -> None:
    walk("symmetric", seeds)
