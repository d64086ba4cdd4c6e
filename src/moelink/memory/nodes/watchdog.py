"""Bound waits inside a library that knows no time limit: NVSHMEM's start, and kernels whose puts wait in its queues.

A host call that blocks in C++ can be left alone in two ways, and only one of them is possible at a time:

* **It has released the interpreter's lock.** The caller waits for it beside a thread that makes it, raises
  NetworkTimeoutError when the time is over, and leaves the thread behind (:func:`within`).
* **It holds the interpreter's lock**, as torch 2.11 and 2.13 do while NVSHMEM starts and allocates. No line of Python
  runs in that process any more, in no thread, so nothing there can raise. A small process beside the rank
  (:mod:`moelink.memory.nodes.watchdog_process`) writes the error's message to the rank's standard error and ends the
  rank. Its peers then see that its process is gone, and its launcher that it was aborted.

:func:`within` has both: the process acts :data:`GRACE_SECONDS` after the thread would have. A wait that is over in time
costs the start of one process, about 30 ms, so it is for what happens once.

A stream that does not end is another matter (:func:`wait_for_device`). What else the program has queued there may
take any time, so a wait for it is bounded only once a failure is known: from then on moelink's kernels return at once,
unless a put waits inside NVSHMEM for room in a queue, which a network that is gone never makes.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from moelink.errors import NetworkTimeoutError
from moelink.memory.nodes import watchdog_process

T = TypeVar("T")
GRACE_SECONDS = 1.0
_PAUSE_SECONDS = 2e-4


def within(seconds: float, what: str, call: Callable[[], T], *, rank: int, node: int, kills: bool = True) -> T:
    """Return ``call()``, which a thread makes, or raise its exception.

    Args:
        seconds: how long to wait for it.
        what: what does not end then, for the message.
        call: may block for ever. It sees the context variables of this thread, but is another one: it has to choose its
            CUDA device.
        rank, node: this rank and its node, for the message.
        kills: end this process if ``call`` holds the interpreter's lock for too long.

    Raises:
        NetworkTimeoutError: it did not end in time. It goes on in its thread, and nobody waits for it.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    expired = NetworkTimeoutError(what, rank=rank, node=node, seconds=seconds)

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)

    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(run,), name="moelink-network-start", daemon=True
    )
    watchdog = _Watchdog(seconds + GRACE_SECONDS, f"moelink.NetworkTimeoutError: {expired}") if kills else None
    try:
        thread.start()
        thread.join(seconds)
    finally:
        if watchdog is not None:
            watchdog.call_off()
    if errors:
        raise errors[0]
    if not results:
        raise expired
    return results[0]


def wait_for_device(query: Callable[[], bool], failed: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``query()`` says that the device is done; once ``failed()``, at most ``seconds`` longer.

    Returns whether the device is done.
    """
    end: float | None = None
    while not query():
        now = time.monotonic()
        if end is None and failed():
            end = now + seconds
        if end is not None and now >= end:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


class _Watchdog:
    """A process that ends this one unless it is called off in time."""

    def __init__(self, seconds: float, message: str) -> None:
        reading, self._writing = os.pipe()
        try:
            arguments = [str(reading), str(os.getpid()), str(seconds), message]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", watchdog_process.__file__, *arguments], pass_fds=(reading,),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/",
            )  # fmt: skip
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)

    def call_off(self) -> None:
        """Say that the wait is over, in a byte: a child that this process has forked may hold the pipe open.

        Where the watchdog itself has been killed, nobody is to be told.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writing, b"\0")
        os.close(self._writing)
        self._process.wait()
