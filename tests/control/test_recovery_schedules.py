"""Survivors never split and never hang: the real agreement under random faults, in virtual time."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import moelink
from moelink.control import recovery
from tests.control.recovery_schedules import Simulation
from tests.support.simulated_ranks import prefixed
from tests.tiers import seeds


@pytest.fixture(autouse=True)
def _simulated_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "PrefixStore", prefixed)


def groups_of(seed: int, *, lingers: bool = True) -> tuple[Counter[str], int]:
    """How the ranks of a schedule ended, and how many groups living ranks believe in.

    Ranks of one group that have finished in the same corner are one group, whoever of it has not: they find that out
    in their first call, and the others are left out.
    """
    simulation = Simulation(seed, lingers=lingers)
    assert simulation.run(), f"seed {seed}: a rank hangs: {simulation.nodes}"
    nodes = [node for node in simulation.nodes if node.outcome == "finished" and not node.dies < simulation.clock.now]
    groups = {node.name if len(node.finished) > 1 else str(node.finished) for node in nodes}
    return Counter(node.outcome for node in simulation.nodes if node.outcome), len(groups)


@seeds(200, 5000)
def test_survivors_never_split(seeds: Any) -> None:
    ended: Counter[str] = Counter()
    for seed in seeds:
        outcomes, groups = groups_of(seed)
        assert groups <= 1, f"seed {seed}: {groups} groups believe that they are the survivors"
        assert "gave up" not in outcomes, f"seed {seed}: {outcomes}"
        ended += outcomes
    print(f"seeds {seeds}: {ended}")
    assert ended["finished"] > len(seeds)
    assert ended["dead"] > len(seeds) // 4


class Corner(dict[str, bytes]):
    """What ranks have written in one corner."""

    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: bytes) -> bytes:
        return self.get(key, bytes(expected)) if expected else self.setdefault(key, desired)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["who gives up", "who goes on"])
@pytest.mark.quick("milliseconds; either order of two writes")
def test_ranks_leave_a_corner_alike(first: str) -> None:
    """Rank 0 finds rank 2 gone before it has seen all in the corner; rank 1 has seen all."""

    def gone() -> Any:
        raise moelink.PeerLostError(rank=0, peer=2, phase="recover", call=0, expected=0, got=None)

    def leave(rank: int) -> object:
        board: Any = SimpleNamespace(
            rank=rank,
            read=gone,
            mine=SimpleNamespace(ranks=(0, 1, 2)),
            around=SimpleNamespace(now=lambda: 0.0, phase="recover"),
        )
        try:
            return recovery._all_arrived(board, {}, corner, 1.0)
        except moelink.PeerLostError as error:
            return error.peer

    corner = Corner()
    if first == "who gives up":
        corner["1"] = b"1"
        assert leave(0) == 2
        corner["2"] = b"1"  # it arrived, and died
        assert leave(1) == 2
    else:
        corner |= {"0": b"1", "2": b"1"}
        assert leave(1) is True
        assert leave(0) is True


def test_a_probe_server_that_closes_at_once_splits_survivors() -> None:
    """What the simulation finds where a rank that has gone on looks like a dead one."""
    assert any(groups_of(seed, lingers=False)[1] > 1 for seed in range(2000))
