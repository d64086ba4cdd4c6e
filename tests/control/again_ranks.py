"""What ranks do in the tests of ``init`` after an exception that is none of moelink's."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import torch.distributed as dist

import moelink
from moelink.control import group, meeting
from moelink.transports import build
from tests.support.fault_ranks import FIELDS, check_round_trip
from tests.support.patience import until

ATTEMPTS = 8


class HandlerError(Exception):
    """What the handler of a program's own raises."""


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise HandlerError


def interrupted(rank: int, world_size: int, kind: str) -> list[tuple[str, bool]]:
    """A signal of ``kind`` comes to rank 0 while ``init`` makes the default group; then all repeat ``init``.

    Returns the class of each attempt's exception (empty: a communicator), and whether a default group was there after.
    """
    number = {"ctrl-c": signal.SIGINT, "handler": signal.SIGUSR2}[kind]
    signal.signal(signal.SIGUSR2, _raise)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background of a shell ignore it
    make = group._DefaultGroup.make

    def struck(*arguments: object) -> None:
        group._DefaultGroup.make = make  # type: ignore[method-assign]
        os.kill(os.getpid(), number)
        make(*arguments)  # type: ignore[arg-type]

    if rank == 0:
        group._DefaultGroup.make = struck  # type: ignore[method-assign]
    tried: list[tuple[str, bool]] = []
    for _ in range(ATTEMPTS):
        try:
            ep = moelink.init(**FIELDS, timeout=20, device="cpu", transport="collective")
        except (HandlerError, KeyboardInterrupt, moelink.MoelinkError) as error:
            tried.append((type(error).__name__, dist.is_initialized()))
            continue
        check_round_trip(ep, rank)
        tried.append(("", dist.is_initialized()))
        time.sleep(0.2)  # nobody ends, and takes the store away, while another leaves
        ep.close()
        break
    return tried


def given_up(rank: int, world_size: int, late: float) -> tuple[str, int, str]:
    """The last rank never comes. Rank 0, which hosts the store, came ``late`` seconds before the others."""
    if rank == world_size - 1:
        time.sleep(8.0)
        return "", -1, ""
    if rank > 0:
        time.sleep(late)
    meeting._HOST_SECONDS = 30.0  # also on a machine that is busy with other things
    try:
        moelink.init(**FIELDS, timeout=4.0, device="cpu", transport="collective")
    except moelink.MoelinkError as error:
        if rank == 0:
            os._exit(0)  # as a program ends: nothing that this process holds outlives its exception
        return type(error).__name__, getattr(error, "peer", -1), str(error)
    return "", -1, ""


def ended_by_one(rank: int, world_size: int) -> str:
    """Rank 0, which hosts the store, closes and ends before rank 1, which has set up, is done with ``init``."""
    finish = meeting.Meeting.finish

    def late(self: meeting.Meeting) -> None:
        until(lambda: self._setback is not None)  # it has found that rank 0 is gone
        finish(self)

    if rank == 1:
        meeting.Meeting.finish = late  # type: ignore[method-assign]
    with moelink.init(**FIELDS, timeout=30, device="cpu", transport="collective", mode="allreduce") as ep:
        return repr(ep)


def closed_by_one(rank: int, world_size: int, mode: str) -> list[str]:
    """Rank 1 sets up for longer than the others, which close meanwhile and make the next communicator."""
    make = build._transport

    def slow(*arguments: object) -> object:
        build._transport = make
        time.sleep(2.0)
        return make(*arguments)  # type: ignore[arg-type]

    if rank == 1:
        build._transport = slow  # type: ignore[assignment]
    made = []
    for _ in range(2):
        try:
            ep = moelink.init(**FIELDS, timeout=30, device="cpu", transport="collective", mode=mode)
            ep.close()
            made.append("made")
        except moelink.MoelinkError as error:
            made.append(str(error))
    time.sleep(0.5)  # rank 0 hosts the store
    return made
