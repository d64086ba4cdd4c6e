"""A process has ended once the kernel has closed all that it had open, and not before."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

from moelink.memory.processes import ProcessName
from tests.support.patience import state_of, until


def test_a_process_that_lives_or_is_stopped_has_not_ended() -> None:
    own = ProcessName.of_this()
    assert ProcessName.of(own.fields) == own
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(60)
    name = dataclasses.replace(own, pid=child, started=_started(child))
    assert not own.has_ended()
    assert not name.has_ended()
    os.kill(child, signal.SIGSTOP)
    until(lambda: state_of(child) == "T")
    assert not name.has_ended()
    assert dataclasses.replace(name, started=name.started - 1).has_ended()  # its PID belongs to another one now
    assert not dataclasses.replace(name, namespace=name.namespace + 1, started=0).has_ended()
    os.kill(child, signal.SIGKILL)
    until(lambda: state_of(child) == "Z")
    assert name.has_ended()
    os.waitpid(child, 0)
    assert name.has_ended()


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])
