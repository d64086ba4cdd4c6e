"""``init`` refuses a probe server's address that leads other hosts elsewhere, and asks nothing on one host."""

from __future__ import annotations

import struct

import pytest

from moelink.control import handshake
from moelink.control.group import World
from moelink.control.probe import Address, ProbeResult
from moelink.errors import UnsupportedError

HERE, THERE = Address("10.0.0.1", 4000, bytes(16)), Address("127.0.1.1", 4001, bytes(16))
GONE, LIVES = ProbeResult(None, lost=True), ProbeResult(3)


def said_by_all(monkeypatch: pytest.MonkeyPatch, found: dict[int, dict[int, ProbeResult]]) -> list[str]:
    """The refusals of three ranks, by rank, of which each finds at the others' addresses what ``found`` says."""
    missed: dict[int, bytes] = {}

    def probed(_addresses: object, ranks: list[int]) -> dict[int, ProbeResult]:
        (me,) = {0, 1, 2} - set(ranks)
        return {rank: found[me][rank] for rank in ranks}

    monkeypatch.setattr(handshake, "probe_all", probed)

    def told(world: World, payload: bytes, _timeout: float) -> list[bytes]:
        missed[world.rank] = payload
        return [missed.get(rank, struct.pack("<i", -1)) for rank in range(3)]

    monkeypatch.setattr(handshake, "gather_bytes", told)
    said = []
    for rank in (2, 1, 0, 1, 2):  # all have said what they miss when the last three hear it
        try:
            handshake.require_reach(World(rank, 3), [HERE, HERE, THERE], ["a", "a", "b"], 1.0)
            said.append("")
        except UnsupportedError as error:
            said.append(str(error))
    return said[2:]


def test_an_address_that_leads_elsewhere_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {0: {1: LIVES, 2: GONE}, 1: {0: LIVES, 2: LIVES}, 2: {0: LIVES, 1: LIVES}}
    said = said_by_all(monkeypatch, found)
    assert set(said) == {
        "MOELINK_PROBE_HOST: expected an address at which every rank reaches rank 2, got '127.0.1.1', at which rank 0 "
        "finds no probe server of it; set the variable on rank 2 to the address of an interface that all hosts reach, "
        "and open its ports"
    }
    everyone = {rank: {peer: LIVES for peer in range(3) if peer != rank} for rank in range(3)}
    assert said_by_all(monkeypatch, everyone) == ["", "", ""]


def test_ranks_of_one_host_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "probe_all", None)
    handshake.require_reach(World(0, 2), [HERE, HERE], ["a", "a"], 1.0)
