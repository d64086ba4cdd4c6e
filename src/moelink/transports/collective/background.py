"""Run calls one after the other on a thread, so that a signal's handler may hand over one more, or end the thread.

``concurrent.futures`` holds locks while a call is handed over. A handler that comes then, and hands over a call of its
own or ends the executor, waits for a lock of the very code that it has interrupted. Here the thread and the callers
share two things, neither of which a handler can find half changed:

* a ``SimpleQueue``, whose ``put`` may be entered again at any point;
* per call a lock that is taken from the beginning, and that the thread lets go of once when the call is over. A caller
  waits for the lock, after which it looks at ``over``, and holds nothing meanwhile. The thread waits for the queue.

So the thread always ends the call that it is in, whose own deadline bounds it, and every caller waits for the thread
alone. A call that is handed over when the thread has ended, because a handler came between, is found by its waiting
caller: no thread is left to run it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from moelink.errors import ClosedError

R = TypeVar("R")

_LOOK_SECONDS = 0.5
"""How often an idle thread looks whether the program has ended, and a waiting caller whether it was woken in vain."""


class BackgroundCall(Generic[R]):
    """A call that was handed over. ``over``: it has ended, or will never run."""

    def __init__(self, run: Callable[[], R], thread: threading.Thread) -> None:
        self.over = False
        self._run: Callable[[], R] | None = run
        self._thread = thread
        self._result: R | None = None
        self._error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self) -> None:
        """Run it, on the thread. An exception of the call is for :meth:`end`."""
        run, self._run = self._run, None
        if run is not None:
            self._result = run()
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """End it: its waiting caller gets the result, or ``error``."""
        if not self.over:
            self._run, self._error = None, error
            self.over = True
            self._ended.release()

    def result(self) -> R:
        """Wait until it is over; return its result, or raise its exception.

        Raises:
            ClosedError: the thread was ended before it began.
        """
        while not self.over:
            # An exception that comes between these two lines leaves the lock taken, which then keeps nobody for long.
            if self._ended.acquire(timeout=_LOOK_SECONDS):
                self._ended.release()
            elif not self._thread.is_alive():
                self.end(_never_begun())
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class _Calls:
    """The state that the thread and the callers share."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[BackgroundCall[Any] | None] = SimpleQueue()
        self.closed = False


class Background:
    """A thread that runs calls in the order in which they come. It ends with the program, or with this object."""

    def __init__(self, name: str) -> None:
        self._calls = _Calls()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=name)
        self._thread.start()
        self._stop = weakref.finalize(self, self._calls.queue.put, None)
        self._stop.atexit = False  # the thread sees the end of the program by itself, and earlier

    def submit(self, run: Callable[[], R]) -> BackgroundCall[R]:
        """Hand over a call.

        Raises:
            ClosedError: after :meth:`close`.
        """
        if self._calls.closed:
            raise ClosedError("a call")
        call = BackgroundCall(run, self._thread)
        self._calls.queue.put(call)
        return call

    def close(self, *, wait: bool) -> None:
        """End the thread after the call that it is in; those that have not begun never will. May be called again.

        Args:
            wait: until the thread has ended. Not on the thread itself.
        """
        self._calls.closed = True
        self._stop()
        if wait and self._thread is not threading.current_thread():
            self._thread.join()


def _never_begun() -> ClosedError:
    return ClosedError("a call that had not begun")


def _work(calls: _Calls) -> None:
    """Run calls until the queue is closed or the program has ended. No reference to the queue's owner is kept."""
    while True:
        try:
            call = calls.queue.get(timeout=_LOOK_SECONDS)
        except Empty:
            if calls.closed or not threading.main_thread().is_alive():
                return
            continue
        if call is None:
            return
        try:
            call.end(_never_begun()) if calls.closed else call.run()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            call.end(error)
        del call  # it holds the tensors of the call, and its owner
