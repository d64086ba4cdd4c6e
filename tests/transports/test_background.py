"""The thread of the collective transport: a signal's handler may use it and end it at any point of a caller's code."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import moelink
from moelink.testing import run_ranks
from moelink.transports.collective import background
from moelink.transports.collective.background import Background
from tests.transports import handler_ranks


def test_calls_run_in_order_and_give_back_what_they_return_or_raise() -> None:
    thread = Background("test")
    seen: list[int] = []
    calls = [thread.submit(lambda number=number: seen.append(number) or number) for number in range(5)]
    wrong = thread.submit(lambda: 1 // 0)
    assert [call.result() for call in calls] == seen == list(range(5))
    with pytest.raises(ZeroDivisionError):
        wrong.result()
    thread.close(wait=True)
    thread.close(wait=True)
    with pytest.raises(moelink.ClosedError):
        thread.submit(lambda: 1)


def test_a_call_that_had_not_begun_when_the_thread_was_ended_raises_at_once() -> None:
    thread, gate, inside = Background("test"), threading.Event(), threading.Event()
    running = thread.submit(lambda: inside.set() or gate.wait(60))
    waiting = thread.submit(lambda: 1)
    assert inside.wait(60)
    thread.close(wait=False)
    gate.set()
    assert running.result() is True
    with pytest.raises(moelink.ClosedError):
        waiting.result()


def test_the_thread_ends_with_its_owner() -> None:
    thread = Background("test-ends-with-its-owner")
    thread.submit(lambda: None).result()
    (running,) = [each for each in threading.enumerate() if each.name == "test-ends-with-its-owner"]
    del thread
    gc.collect()
    running.join(60)
    assert not running.is_alive()


def _interrupted_everywhere(handler: Callable[[Background], Any]) -> int:
    """Hand a call over, wait for it and close, with ``handler`` at every line of it once; return how many lines."""
    own = background.__file__
    number = 0
    while True:
        thread, left = Background("test"), number
        struck = False

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal left, struck
            if frame.f_code.co_filename not in (own, threading.__file__):
                return None
            if event == "line" and not struck:
                struck = left == 0
                left -= 1
                if struck:
                    handler(thread)  # noqa: B023 - of this turn
            return trace

        sys.settrace(trace)
        try:
            assert thread.submit(lambda: 7).result() == 7
        except moelink.ClosedError:
            pass
        finally:
            sys.settrace(None)
        thread.close(wait=True)
        if not struck:
            return number
        number += 1


def test_a_handler_may_hand_over_a_call_at_every_line() -> None:
    assert _interrupted_everywhere(lambda thread: thread.submit(lambda: 1).result()) > 10


def test_a_handler_may_end_the_thread_at_every_line() -> None:
    """Closes over: the locks that an executor holds while a call is handed over."""
    assert _interrupted_everywhere(lambda thread: thread.close(wait=True)) > 10


@pytest.mark.parametrize("what", ["close", "check"])
def test_a_handler_of_sigterm_may_use_the_communicator_within_a_call(what: str) -> None:
    struck, peer = run_ranks(handler_ranks.signalled, 2, what)
    assert struck == "SystemExit"
    assert peer in ("PeerLeftError", "PeerLostError", "PeerTimeoutError", "PeerAbortedError"), peer
