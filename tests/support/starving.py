"""Measure how long a busy machine kept a process from running. Tests of promised times add it to what is promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Starved = Callable[[], float]
_BEAT = 0.01


@contextmanager
def starvation() -> Iterator[Callable[[], float]]:
    """Measure by how many seconds a thread of this process, which wants to wake all the time, has woken too late.

    On a machine at rest that is almost nothing. What a rank itself waits for does not count: it is another process.
    """
    late, over = [0.0], threading.Event()

    def beat() -> None:
        while not over.is_set():
            begin = time.monotonic()
            time.sleep(_BEAT)
            late[0] += max(time.monotonic() - begin - 2 * _BEAT, 0.0)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield lambda: late[0]
    finally:
        over.set()
        thread.join()
