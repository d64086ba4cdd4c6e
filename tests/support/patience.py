"""Keep a busy machine from deciding a test of faults: who is late is late by an event, and nobody else can be.

A rank gives up on a peer after ``timeout`` seconds, whatever kept the peer. On a machine that others use as well a
healthy rank may need seconds for what takes milliseconds at rest. So ranks of these tests

* set up, and make the calls that succeed, with :data:`ROOMY` seconds (:func:`join`), and wait less (:func:`hurry`) only
  for a rank that cannot come before they have given up;
* wait for one another where the order matters: in an exchange of their own (:func:`meet`), for a file (:class:`Mark`),
  or until a probe says how far a peer is (:func:`entered`), never for a number of seconds;
* ask peers with time for an answer. Of a probe server that does not answer within 0.4 s a rank says that it is silent.

What is promised to take no time is checked against :data:`HANG`, half of what a rank that waits for its timeout would
take. How long a timeout takes is checked in virtual time (``test_slow_link.py``, ``test_fault_schedules.py``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import moelink
from moelink.control import meeting
from moelink.control import probe as probing

ROOMY = 60.0
"""Seconds of timeouts that must not expire, and of waits for events."""
HANG = 30.0
"""Seconds after which what needs none counts as hanging."""
SHORT = 3.0
"""Seconds of timeouts that must expire: all ranks but the one that does not come enter the call at the same moment, and
a pause of one of them is shorter."""

_PAUSE = 0.005


def be_patient() -> None:
    """Give probe servers of peers, which share the processors with ranks, time to answer the probes of this process,
    and a rank whose set-up has failed time to hear the others' last word, and to be heard."""
    probing._PROBE_SECONDS = 20.0
    meeting._LAST_WORD_SECONDS = 5.0  # no more: with a store whose host is stopped it is spent twice
    meeting._HOST_SECONDS = 6.0


def join(timeout: float = ROOMY, **options: Any) -> moelink.Communicator:
    """Call ``moelink.init`` with time for every rank."""
    be_patient()
    return moelink.init(**options, timeout=timeout)


def hurry(ep: moelink.Communicator, seconds: float = SHORT, *, recover: bool = False) -> None:
    """Let every later call of ``ep`` give up after ``seconds``; with ``recover``, its recovery as well.

    Gradients that travel over communicators of their own wait as before, and so does what :meth:`recover` returns.
    """
    for lane in (ep, *ep._further):
        session, fast_path = lane._session, lane._fast_path
        if recover:
            session.configs = tuple(replace(config, timeout=seconds) for config in session.configs)
        _hurry_transport(session.transport, seconds)
        if fast_path is not None:  # its prepared calls hold the limit as well
            fast_path._prepared.clear()  # type: ignore[attr-defined]


def _hurry_transport(transport: Any, seconds: float) -> None:
    if transport.name == "collective":
        transport._wire._timeout = seconds
        return
    from moelink.kernels.launch.device import clock_ticks

    for rank in transport.ranks:
        rank.limit = clock_ticks(seconds, rank.device)
        rank._plans.clear()  # which hold the limit


@contextlib.contextmanager
def hurried_gradients(ep: moelink.Communicator, seconds: float = SHORT) -> Iterator[None]:
    """Let gradients of ``ep`` that travel over communicators of their own give up after ``seconds``, in this block."""
    sessions = ep._context.gradients._opened
    for session in sessions:
        _hurry_transport(session.transport, seconds)
    yield
    for session in sessions:
        _hurry_transport(session.transport, ROOMY)


def meet() -> None:
    """Wait for all ranks, over torch's default group. Its ranks must all live."""
    dist.barrier()


def all_pids(world_size: int) -> list[int]:
    """The process of each rank."""
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    return pids


def until(condition: Callable[[], object], seconds: float = ROOMY) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not after {seconds} s: {condition}"
        time.sleep(_PAUSE)


class Mark:
    """Something that has happened, as all processes can see: a file of ``folder``. It needs no rank to live."""

    def __init__(self, folder: str, name: object) -> None:
        self._path = Path(folder) / str(name)

    def set(self) -> None:
        """Say that it has happened."""
        self._path.touch()

    def is_set(self) -> bool:
        """Return whether it has happened."""
        return self._path.exists()

    def wait(self) -> None:
        """Wait until it has happened."""
        until(self.is_set)


def gather(folder: str, what: str, rank: int, ranks: Iterable[int]) -> None:
    """Wait for ``ranks``, this one among them, by files: where there is no group of all of them."""
    Mark(folder, f"{what}, {rank}").set()
    for peer in ranks:
        Mark(folder, f"{what}, {peer}").wait()


def entered(ep: moelink.Communicator, rank: int, call: int) -> bool:
    """Return whether ``rank`` has entered its call of that number."""
    detector = ep._session.detector
    assert detector is not None
    return probing.probe(detector.addresses[rank]).reached >= call


def is_gone(ep: moelink.Communicator, rank: int) -> bool:
    """Return whether the process of ``rank`` is gone."""
    detector = ep._session.detector
    assert detector is not None
    return probing.probe(detector.addresses[rank]).lost


def state_of(pid: int) -> str:
    """The state of a process, as the kernel names it: "T" when it is stopped, "" when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def stop() -> None:
    """SIGSTOP this process, until a peer says :func:`resume`."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # another thread may have taken the signal, and this one run on for a moment


def resume(pid: int) -> None:
    """Let a process go on that stops, or is about to."""
    until(lambda: state_of(pid) == "T")
    os.kill(pid, signal.SIGCONT)


def stop_until(condition: Callable[[], object]) -> None:
    """SIGSTOP this process; a child continues it when ``condition`` holds."""
    parent = os.getpid()
    if os.fork() == 0:
        try:
            until(lambda: condition() and state_of(parent) == "T", 2 * ROOMY)
        finally:
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
    stop()


def timeouts_of(ep: moelink.Communicator) -> set[timedelta]:
    """How long calls of ``ep`` and its group wait. Over the collective transport."""
    wire: Any = ep._session.transport._wire  # type: ignore[attr-defined]
    return {timedelta(seconds=wire._timeout), wire._world.control.options._timeout}
