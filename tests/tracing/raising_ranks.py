"""Ranks of which one raises within its trace block, and what all ranks can do afterwards."""

from __future__ import annotations

import moelink
from tests.support.fault_ranks import FIELDS, check_round_trip
from tests.support.patience import Mark, hurry, join


def raising(rank: int, world_size: int, victim: int) -> list[str]:
    """Trace three times; rank ``victim`` raises in the first two blocks. Returns how each trace ended."""
    ep = moelink.init(**FIELDS, timeout=60, device="cpu", transport="symmetric")
    ended = []
    for number in range(3):
        try:
            with ep.trace() as trace:
                check_round_trip(ep, rank, seed=number)
                if rank == victim and number < 2:
                    raise ZeroDivisionError("mine")
            ended.append(f"{len({record.rank for record in trace.records})} ranks")
        except (ZeroDivisionError, moelink.MoelinkError) as error:
            ended.append(f"{type(error).__name__} {getattr(error, 'peer', '')}".strip())
    check_round_trip(ep, rank, seed=7)
    ep.close()
    return ended


def staying(rank: int, world_size: int, folder: str) -> str:
    """Rank 0 stays in its trace block until its peer has given up. Returns what the peer was told."""
    ep, given_up = join(**FIELDS, device="cpu", transport="symmetric"), Mark(folder, "given up")
    told = ""
    if rank == 1:
        hurry(ep, recover=True)
    try:
        with ep.trace():
            if rank == 0:
                given_up.wait()
                raise ZeroDivisionError
    except (ZeroDivisionError, moelink.PeerTimeoutError) as error:
        told = str(error)
    given_up.set()
    return told
