"""Run as a process beside a rank: end the rank, with a message, if it has not said in time that a wait is over.

``python watchdog_process.py PIPE PID SECONDS MESSAGE``: wait until the pipe's writing end says something or closes. If
neither has happened after ``SECONDS``, write ``MESSAGE`` to standard error, and end process ``PID`` by SIGABRT, on
which Python's ``faulthandler`` shows where the rank was; by SIGKILL if it is still there a moment later.
:mod:`moelink.memory.nodes.watchdog` says why this is a process. It imports nothing of the package.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

_LAST_SECONDS = 2.0


def _signaller(pid: int) -> Callable[[int], None]:
    """Return what sends a signal to process ``pid`` as it is now, and to none that gets its number later."""
    if not hasattr(os, "pidfd_open"):
        return lambda number: os.kill(pid, number)
    handle = os.pidfd_open(pid)
    return lambda number: signal.pidfd_send_signal(handle, number)


def watch(pipe: int, pid: int, seconds: float, message: str) -> None:
    """Wait for ``pipe``, at most ``seconds``, and then end process ``pid``."""
    try:
        end_it = _signaller(pid)
    except ProcessLookupError:
        return
    if select.select([pipe], [], [], seconds)[0]:
        return
    os.write(2, f"{message}\n".encode())
    for number in (signal.SIGABRT, signal.SIGKILL):
        try:
            end_it(number)
        except ProcessLookupError:
            return
        end = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < end:  # its end closes the pipe, unless it has forked
            if select.select([pipe], [], [], 0.05)[0]:
                return


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
