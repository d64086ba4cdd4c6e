"""A rank finds out whom to blame: what peers have told it counts for more than what it sees."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from moelink.control.failure_detector import FailureDetector
from moelink.control.probe import GONE, Address, Failure, ProbeResult, ProbeServer, furthest_behind, probe

REPORT = Failure(peer=1, phase="dispatch", call=5, expected=5, got=4)


@pytest.mark.parametrize("reported", [True, False])
def test_a_report_that_waits_to_be_read_comes_before_a_refused_connection(reported):
    gone = ProbeServer()
    gone.close()
    addresses: list[Address] = [gone.address]
    own = ProbeServer()
    addresses.append(own.address)
    detector = FailureDetector(rank=1, probe_server=own, addresses=addresses)
    reporter = threading.Thread(target=probe, args=(own.address, REPORT))
    os.kill(own.pid, signal.SIGSTOP)
    threading.Timer(0.15, os.kill, (own.pid, signal.SIGCONT)).start()
    if reported:
        reporter.start()
        time.sleep(0.05)  # it is in the queue, and not read yet
        assert detector.reported is None
    found = detector.blame("dispatch", 5)
    assert found == (REPORT if reported else Failure(0, "dispatch", 5, expected=5, got=GONE))
    if reported:
        reporter.join()
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


def test_the_first_report_stays():
    server = ProbeServer()
    for peer in (1, 2):
        probe(server.address, replace(REPORT, peer=peer))
    assert server.failure == REPORT
    server.close()
