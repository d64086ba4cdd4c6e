"""Admit one thread of one process at a time to a communicator, and refuse others by name.

Calls of a communicator have an order, and two threads have none between them. A child of a fork has the parent's
sockets and memory, and would answer and write in its place. So each call enters here: a process number is compared, and
a lock is taken without waiting for it.
"""

from __future__ import annotations

import os
import threading
from os import getpid as _process_number
from threading import get_ident as _thread_number

from moelink.errors import ConcurrencyError, ForkedError


class Guard:
    """The door of one communicator.

    A thread that is inside may enter again: a hook may make a call. A thread that an exception kept from leaving is
    still inside when it comes again, so that it is not refused.
    """

    def __init__(self) -> None:
        self._process, self._lock, self._caller = os.getpid(), threading.Lock(), 0

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the communicator's process."""
        return os.getpid() != self._process

    def require_own_process(self, what: str) -> None:
        """Raise ForkedError in a child of the process that made the communicator."""
        if os.getpid() != self._process:
            raise ForkedError(what, owner=self._process, child=os.getpid())

    def enter(self, what: str) -> None:
        """Begin ``what`` in this thread.

        Raises:
            ForkedError: this process is a child of the communicator's process.
            ConcurrencyError: another thread is inside.
        """
        if _process_number() != self._process:
            self.require_own_process(what)
        me = _thread_number()
        if self._caller != me:
            # On one line, so that a signal's handler hardly ever comes between.
            self._caller = me if self._lock.acquire(False) else self._refuse(what)

    def _refuse(self, what: str) -> int:
        raise ConcurrencyError(what)

    def leave(self) -> None:
        """End what :meth:`enter` began."""
        if self._caller == _thread_number():
            self._caller = 0
            self._lock.release()
