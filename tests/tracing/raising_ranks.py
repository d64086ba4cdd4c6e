"""Ranks of which one raises within its trace block, and what all ranks can do afterwards."""

from __future__ import annotations

import moelink
from tests.support.fault_ranks import FIELDS, check_round_trip


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
