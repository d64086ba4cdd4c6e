"""Ranks whose signal handler uses the communicator while a call is handed to the background thread."""

from __future__ import annotations

import os
import signal
from typing import Any

import moelink
from moelink.transports.collective import background
from tests.support.fault_ranks import FIELDS, check_round_trip
from tests.support.patience import join, meet


def signalled(rank: int, world_size: int, what: str) -> str:
    """SIGTERM comes to rank 0 while its second call is handed over; its handler uses the communicator and exits."""
    ep = join(**FIELDS, device="cpu", transport="collective")
    check_round_trip(ep, rank)
    meet()  # else the report of rank 0 may come to rank 1 in the check of its first call

    def handler(*_: Any) -> None:
        getattr(ep, what)()
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, handler)
    hand_over = background.BackgroundCall.__init__

    def struck(self: Any, *arguments: Any) -> None:
        hand_over(self, *arguments)
        background.BackgroundCall.__init__ = hand_over  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == 0:
        background.BackgroundCall.__init__ = struck  # type: ignore[method-assign]
    try:
        check_round_trip(ep, rank, seed=4)
    except (SystemExit, moelink.MoelinkError) as error:
        return type(error).__name__
    return ""
