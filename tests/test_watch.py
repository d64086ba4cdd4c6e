"""A rank finds out whom to blame: what peers have told it counts for more than what it sees."""

from __future__ import annotations

import threading
import time

import pytest

from moelink.control.failure_detector import Watch
from moelink.control.probe import GONE, Address, Beacon, Failure, probe

REPORT = Failure(peer=1, phase="dispatch", call=5, expected=5, got=4)


class SlowBeacon(Beacon):
    """Its thread has been stopped, and takes a moment to get going again."""

    def _answer(self, connection):
        time.sleep(0.1)
        super()._answer(connection)


@pytest.mark.parametrize("told", [True, False])
def test_a_report_that_waits_to_be_read_comes_before_a_refused_connection(told):
    gone = Beacon()
    gone.close()
    addresses: list[Address] = [gone.address]
    own = SlowBeacon()
    addresses.append(own.address)
    watch = Watch(rank=1, beacon=own, addresses=addresses)
    reporter = threading.Thread(target=probe, args=(own.address, REPORT))
    if told:
        reporter.start()
        time.sleep(0.02)  # it is in the queue, and not read yet
        assert watch.told is None
    found = watch.blame("dispatch", 5)
    assert found == (REPORT if told else Failure(0, "dispatch", 5, expected=5, got=GONE))
    if told:
        reporter.join()
    watch.close()
