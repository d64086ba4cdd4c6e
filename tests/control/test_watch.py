"""A rank finds out whom to blame: what peers have told it counts for more than what it sees."""

from __future__ import annotations

import os
import signal
import socket
import threading
from dataclasses import replace

import pytest

from moelink.control.failure_detector import FailureDetector, _odd_rank
from moelink.control.probe import GONE, Address, Failure, ProbeResult, ProbeServer, furthest_behind, probe
from moelink.control.responder import FAILURE, TELL

REPORT = Failure(peer=1, phase="dispatch", call=5, expected=5, got=4)


pytestmark = pytest.mark.usefixtures("patient")


@pytest.mark.parametrize("reported", [True, False])
def test_a_report_that_waits_to_be_read_comes_before_a_refused_connection(reported):
    gone = ProbeServer()
    gone.close()
    addresses: list[Address] = [gone.address]
    own = ProbeServer()
    addresses.append(own.address)
    detector = FailureDetector(rank=1, probe_server=own, addresses=addresses)
    os.kill(own.pid, signal.SIGSTOP)
    with socket.create_connection((own.address.host, own.address.port)) as reporter:
        if reported:  # it is in the queue, and not read yet
            words = FAILURE.pack(REPORT.peer, 0, REPORT.call, REPORT.expected, REPORT.got)
            reporter.sendall(own.address.token + TELL + words)
            assert detector.reported is None
        threading.Timer(0.1, os.kill, (own.pid, signal.SIGCONT)).start()
        found = detector.blame("dispatch", 5)
    assert found == (REPORT if reported else Failure(0, "dispatch", 5, expected=5, got=GONE))
    detector.close()


def test_whom_to_blame():
    """Who is gone, stopped, behind, silent, in this order: silence outranks nothing that is known."""
    seen = {
        0: ProbeResult(call=5),
        1: ProbeResult(call=5),
        2: ProbeResult(call=None),
        3: ProbeResult(call=4),
        4: ProbeResult(call=3),
        5: ProbeResult(call=None, stopped=True),
        6: ProbeResult(call=None, lost=True),
    }
    for peer in (6, 5, 4, 3, 2, 0):
        assert furthest_behind(seen, 5) == (peer, seen[peer])
        del seen[peer]


def test_who_makes_another_call_than_most_is_odd():
    def seen(*calls):
        return {rank: ProbeResult(*call) for rank, call in enumerate(calls)}

    assert _odd_rank(seen((4, "combine"), (4, "dispatch"), (4, "combine")), 4) == 1
    assert _odd_rank(seen((4, "combine"), (4, "combine"), (4, "combine")), 4) is None
    assert _odd_rank(seen((4, "combine"), (4, "dispatch")), 4) is None, "either may be"
    assert _odd_rank(seen((4, "combine"), (3, "dispatch"), (4, "combine")), 4) is None, "that one is behind"
    assert _odd_rank(seen((4, "combine"), (None,), (4, "dispatch"), (4, "dispatch")), 4) == 0


def test_the_first_report_stays():
    server = ProbeServer()
    for peer in (1, 2):
        probe(server.address, replace(REPORT, peer=peer))
    assert server.failure == REPORT
    server.close()


@pytest.mark.parametrize("phases", [("combine", "dispatch", "combine"), ("combine", "combine", "dispatch")])
def test_the_rank_that_makes_another_call_is_named_by_whoever_asks(phases: tuple[str, ...]):
    """Whoever waited for whom: all are in their call 4, and one left a combine out before it."""
    for asks in range(3):
        servers = [ProbeServer() for _ in phases]
        try:
            for server, phase in zip(servers, phases, strict=True):
                server.progress = 4, phase
            addresses = tuple(server.address for server in servers)
            detector = FailureDetector(rank=asks, probe_server=servers[asks], addresses=addresses)
            suspicion = Failure(peer=(asks + 1) % 3, phase=phases[asks], call=4, expected=4, got=3)
            failure = detector.confirm(suspicion)
        finally:
            for server in servers:
                server.close()
        assert (failure.peer, failure.call, failure.got) == (phases.index("dispatch"), 4, 3)
