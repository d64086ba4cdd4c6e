"""Faults of a simulated network: shares, ranks concerned, cuts, and the same ones for the same seed."""

from __future__ import annotations

import math

import pytest

from moelink_testing.network import Cut, NetworkFaults

PUTS, PIECES = 400, 3


def taken(faults: NetworkFaults, peer: int = 1, seed: int = 0) -> list[tuple[float, int | None]]:
    links = faults.links(seed)
    return [links.take(peer, PIECES, float(number)) for number in range(PUTS)]


def test_no_faults_by_default():
    links = NetworkFaults().links(0)
    assert taken(NetworkFaults()) == [(0.0, None)] * PUTS
    assert [links.repeat(1, 2) for _ in range(PUTS)] == [None] * PUTS
    assert not links.is_cut(1, 0.0)
    assert not links.is_gone(1)


def test_shares_are_those_that_were_asked_for():
    puts = taken(NetworkFaults(late=0.25, latest=8.0, lose=0.5))
    late, lost = [late for late, _ in puts if late], [at for _, at in puts if at is not None]
    assert len(late) == pytest.approx(0.25 * PUTS, rel=0.3)
    assert 4.0 < max(late) <= 8.0
    assert len(lost) == pytest.approx(0.5 * PUTS, rel=0.2)
    assert set(lost) == set(range(PIECES + 1)), "at the first piece, at the signal, and in between"
    links = NetworkFaults(repeat=0.5).links(0)
    again = [links.repeat(1, 2) for _ in range(PUTS)]
    assert set(again) == {None, 0, 1, 2}
    assert again.count(None) == pytest.approx(0.5 * PUTS, rel=0.2)


def test_only_the_peers_that_are_named_are_concerned():
    faults = NetworkFaults(late=1.0, latest=1.0, lose=1.0, repeat=1.0, peers=frozenset({2}))
    assert taken(faults) == [(0.0, None)] * PUTS
    assert faults.links(0).repeat(1, 2) is None
    assert all(late and at is not None for late, at in taken(faults, peer=2))


def test_a_link_is_cut_after_so_many_puts_for_a_time_or_for_good():
    links = NetworkFaults(cuts=(Cut(1, after=2, lasts=5.0), Cut(2))).links(0)
    for number in range(3):
        assert not links.is_cut(1, float(number))
        links.take(1, PIECES, float(number))
    assert [links.is_cut(1, now) for now in (2.0, 6.9, 7.0)] == [True, True, False]
    assert not links.is_gone(1)
    links.take(2, PIECES, 0.0)
    assert links.is_cut(2, 1e9)
    assert links.is_gone(2)
    assert Cut(2).lasts == math.inf


def test_what_goes_wrong_is_the_same_for_the_same_seed():
    faults = NetworkFaults(late=0.3, latest=1.0, lose=0.3)
    assert taken(faults, seed=1) == taken(faults, seed=1)
    assert taken(faults, seed=1) != taken(faults, seed=2)
