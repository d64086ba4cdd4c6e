"""Bound waits inside a library without time limits: NVSHMEM's start, and kernels whose puts wait in its queues.

A host call that blocks in C++ can be abandoned in two ways:

* **If it has released the interpreter's lock,** a thread makes it. The caller waits for the thread, raises
  NetworkTimeoutError when the time is over, and leaves the thread behind.
* **If it holds the interpreter's lock**, as torch 2.11 and 2.13 do while NVSHMEM starts and allocates, no thread of the
  process runs Python any more. Then a small process beside the rank writes the error's message to the rank's standard
  error and ends the rank. Its peers see that its process is gone, and its launcher that it was aborted.

:func:`within` has both: the process acts :data:`GRACE_SECONDS` after the thread would have. A wait that is over in time
costs the start of one process, about 30 ms, so it is for calls that are made once.

This file is also the program of that process, ``watchdog.py PIPE PID SECONDS MESSAGE``, in which nothing of the package
can be imported.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
GRACE_SECONDS = 1.0
_PAUSE_SECONDS = 2e-4
_LAST_SECONDS = 2.0


def within(seconds: float, what: str, call: Callable[[], T], *, rank: int, node: int, kills: bool = True) -> T:
    """Return ``call()``, which a thread makes, or raise its exception.

    Args:
        seconds: how long to wait for it.
        what: names the call in the message.
        call: may block for ever. It runs in another thread, which has this one's context variables, but has to choose
            its CUDA device.
        rank, node: this rank and its node, for the message.
        kills: end this process if ``call`` holds the interpreter's lock for too long.

    Raises:
        NetworkTimeoutError: it did not end in time. It goes on in its thread.
    """
    from moelink.errors import NetworkTimeoutError

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
    """Wait until ``query()`` says that the device is done, and return whether it is.

    The program's other work on the stream may take any time, so the wait is bounded only after a failure: at most
    ``seconds`` after ``failed()``. From then on moelink's kernels return at once, unless a put waits inside NVSHMEM for
    room in a queue, which a network that is gone never makes.
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
                [sys.executable, "-I", "-S", __file__, *arguments], pass_fds=(reading,),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/",
            )  # fmt: skip
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)

    def call_off(self) -> None:
        """Say that the wait is over, in a byte: a child that this process has forked may hold the pipe open."""
        with contextlib.suppress(BrokenPipeError):  # the watchdog itself has been killed
            os.write(self._writing, b"\0")
        os.close(self._writing)
        self._process.wait()


def _signaller(pid: int) -> Callable[[int], None]:
    """Return a function that signals process ``pid`` as it is now, and no later process with the same number."""
    if not hasattr(os, "pidfd_open"):
        return lambda number: os.kill(pid, number)
    handle = os.pidfd_open(pid)
    return lambda number: signal.pidfd_send_signal(handle, number)


def watch(pipe: int, pid: int, seconds: float, message: str) -> None:
    """Wait for ``pipe`` to say something or to close, at most ``seconds``; then end process ``pid``.

    It is ended by SIGABRT, on which Python's ``faulthandler`` shows the rank's place, and by SIGKILL if it still
    lives a moment later.
    """
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
