"""Start threads that may be left behind in a call of torch's, so that the program can end at any time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

EXIT_SECONDS = 2.0
"""How long the end of the program waits for such a thread."""


def start_daemon(run: Callable[[], None], name: str) -> threading.Thread:
    """Start ``run`` in a thread that does not keep the process alive, and return the thread.

    A thread that is in C++ when the interpreter ends aborts the process when it comes back: a program that calls
    ``sys.exit(7)`` after a failed ``init`` would end by SIGABRT. All calls of torch here have a timeout,
    which has mostly passed by then. So the end of the program waits for the thread, ``EXIT_SECONDS`` at most.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    weakref.finalize(thread, _join, weakref.ref(thread))
    thread.start()
    return thread


def _join(thread: weakref.ref[threading.Thread]) -> None:
    """Wait for ``thread`` at the end of the program. One that has been collected has ended."""
    left = thread()
    if left is not None:
        left.join(EXIT_SECONDS)
