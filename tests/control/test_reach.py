"""``init`` refuses a probe server's address that leads other hosts elsewhere, and asks nothing on one host."""

from __future__ import annotations

import os
import socket
import struct

import pytest

import moelink
from moelink.control import handshake
from moelink.control.group import World
from moelink.control.probe import GONE_IN_WORDS, Address, ProbeResult, ProbeServer, gone_in_words, probe
from moelink.errors import ConfigError, UnsupportedError
from moelink.testing import run_ranks
from tests.support.fault_ranks import FIELDS, check_round_trip

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


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_interface_is_no_address_for_peers(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Closes over: peers that ask themselves, and take the rank for dead."""
    monkeypatch.setenv("MOELINK_PROBE_HOST", host)
    with pytest.raises(
        ConfigError, match=f"MOELINK_PROBE_HOST: expected the address of one interface, .* got '{host}'"
    ):
        ProbeServer()


def test_nothing_at_an_address_of_one_machine_does_not_show_that_a_rank_is_gone() -> None:
    for own in ("127.0.1.1", "::1", "localhost"):
        words, is_sure = gone_in_words(Address(own, 1, b""), asked_from=HERE)
        assert words == f"nothing listens at {own}, which is its own machine's alone: set MOELINK_PROBE_HOST there"
        assert not is_sure
        assert gone_in_words(Address(own, 1, b""), asked_from=THERE) == (GONE_IN_WORDS, True)
    assert gone_in_words(HERE, asked_from=HERE) == (GONE_IN_WORDS, True)


def over_ipv6(rank: int, world_size: int) -> str:
    """Meet at an IPv6 address. Where this rank's probe server is."""
    os.environ["MASTER_ADDR"] = "::1"
    with moelink.init(**FIELDS, device="cpu", transport="collective", timeout=60) as ep:
        check_round_trip(ep, rank)
        detector = ep._session.detector
        assert detector is not None
        return detector.addresses[rank].host


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_probe_servers_are_at_the_address_of_ipv6_that_leads_to_rank_0() -> None:
    assert run_ranks(over_ipv6, 2) == ["::1"] * 2


@pytest.mark.usefixtures("patient")
def test_a_name_that_does_not_resolve_leads_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no such name")
    server = ProbeServer()
    assert server.address.host == "127.0.0.1"
    assert probe(server.address).reached == 0
    server.close()
