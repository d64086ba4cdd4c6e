"""Name a process of this machine so that others can find out when it has ended, with all that it had open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moelink.memory.setup import NUMBER, Schema

PROCESS_FIELDS: Schema = {"namespace": NUMBER, "pid": NUMBER, "started": NUMBER}
"""Fields of a record that name the process that wrote it."""


@dataclass(frozen=True)
class ProcessName:
    """A process: its PID, the number of the namespace in which that counts, and the clock tick in which it started, as
    the kernel gives a PID to another process later."""

    namespace: int
    pid: int
    started: int

    @classmethod
    def of_this(cls) -> ProcessName:
        """Return the name of this process."""
        return cls(pid_namespace(), os.getpid(), _state(os.getpid())[1])

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> ProcessName:
        """Return the name in a record with :data:`PROCESS_FIELDS`."""
        return cls(*(int(fields[name]) for name in PROCESS_FIELDS))

    @property
    def fields(self) -> dict[str, str]:
        """The inverse of :meth:`of`."""
        return {name: str(value) for name, value in vars(self).items()}

    def has_ended(self) -> bool:
        """Return whether the kernel has closed all files of the process, devices among them.

        A process that was killed is a zombie until its parent has asked for it. Its threads are gone by then, but for
        the first one, which may be a zombie before the others have ended. A process of another namespace is not known
        here, and counts as one that lives.
        """
        if self.namespace != pid_namespace():
            return False
        state, started = _state(self.pid)
        if state not in "ZX" and started == self.started:
            return False
        with suppress(OSError):
            return started != self.started or len(os.listdir(f"/proc/{self.pid}/task")) < 2
        return True


def pid_namespace() -> int:
    """Return the number of this process's PID namespace, 0 if the kernel does not say."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _state(pid: int) -> tuple[str, int]:
    """Return the state of process ``pid``, one letter, and the clock tick in which it started; ``("", -1)`` if there is
    none."""
    with suppress(OSError):
        # The name of its program, in parentheses, may have spaces.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], int(words[19])
    return "", -1
