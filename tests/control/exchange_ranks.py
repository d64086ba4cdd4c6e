"""Ranks that exchange over a caller's group, and one of them that does not come."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from moelink.control.exchange import Peers, all_gather, all_reduce, all_to_all
from moelink.errors import PeerTimeoutError
from tests.support.patience import HANG, ROOMY, SHORT, Mark

Said = tuple[str, int, float]


def exchanges(rank: int, world_size: int) -> list[list[float]]:
    """What each exchange gives when all come."""
    dist.init_process_group("gloo")
    peers = Peers(timeout=ROOMY)
    total = torch.tensor([1.0 + rank])
    all_reduce(total, peers)
    everyone = [float(part) for part in all_gather(torch.tensor([rank]), peers)]
    received = torch.empty(world_size)
    all_to_all(received, torch.full((world_size,), float(rank)), [1] * world_size, [1] * world_size, peers)
    dist.destroy_process_group()
    return [total.tolist(), everyone, received.tolist()]


def missing(rank: int, world_size: int, folder: str, how: str) -> Said:
    """The last rank is killed, stopped or late instead of coming; what the others raise, and it itself when it is late.

    Rank 1 comes when rank 0 waits already, so they do not fail at the same moment.
    """
    dist.init_process_group("gloo")
    total, last = torch.ones(1), rank == world_size - 1
    all_reduce(total, Peers(timeout=ROOMY))
    over = [Mark(folder, number) for number in range(world_size)]
    if last and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if last:
        for mark in over[:-1]:
            mark.wait()
    time.sleep(0.6 * (rank == 1))
    begin = time.monotonic()
    try:
        all_reduce(total, Peers(timeout=SHORT, what="a sum"))
        all_reduce(total, Peers(timeout=SHORT, what="a sum"))
    except PeerTimeoutError as error:
        took = time.monotonic() - begin
        assert took < HANG
        over[rank].set()
        if rank == 0:  # it hosts the store
            over[1].wait()
            while how == "late" and not over[2].is_set():
                time.sleep(0.01)
        return type(error).__name__, error.peer, took
    raise AssertionError("expected PeerTimeoutError")
