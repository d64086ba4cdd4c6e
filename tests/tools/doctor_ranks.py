"""Ranks that an examination finds something wrong with."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.control.probe import ProbeServer
from moelink.tools.doctor import diagnose, facts, pairs
from moelink.tools.doctor import run as doctor
from moelink.tools.doctor.diagnosis import Examination
from moelink.tools.doctor.pairs import GroupWire
from tests.support.patience import Mark, be_patient, stop_until

FORMATS = ("bf16", "fp8_block128")


class TimedWire(GroupWire):
    """Over which every message takes a millisecond, whatever else the machine does."""

    seconds = 0.0

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        super().send(tensor, peer)
        TimedWire.seconds += self.takes(peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        super().receive(tensor, peer)
        TimedWire.seconds += self.takes(peer)

    def takes(self, peer: int) -> float:
        return 0.001


class SlowWire(TimedWire):
    """Over which messages between ranks 0 and 2 take longer."""

    def takes(self, peer: int) -> float:
        return 0.05 if {dist.get_rank(), peer} == {0, 2} else 0.001


class OnceSlowWire(TimedWire):
    """Over which messages between ranks 0 and 2 take longer in the first measurement of the pair."""

    messages = 0

    def takes(self, peer: int) -> float:
        if {dist.get_rank(), peer} != {0, 2}:
            return 0.001
        self.messages += 1
        return 0.05 if self.messages <= 2 * (pairs.PINGS + 1 + 2 * pairs.REPEATS) else 0.001


class BrokenWire(TimedWire):
    """Over which nothing passes between ranks 0 and 2."""

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self.fail(peer)
        super().send(tensor, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        self.fail(peer)
        super().receive(tensor, peer)

    def fail(self, peer: int) -> None:
        if {dist.get_rank(), peer} == {0, 2}:
            raise RuntimeError("Connection reset by peer")


class ClosedServer(ProbeServer):
    """Whose port is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.close()


def examined(rank: int, world_size: int, fault: str) -> Any:
    """Run rank ``rank`` of an examination with ``fault``; return what was found and what is wrong."""
    if fault == "absent" and rank == 2:
        return None
    if fault == "version" and rank == 2:
        own = facts.versions
        facts.versions = lambda: {**own(), "torch": "2.10.0"}
    if fault == "closed port" and rank == 2:
        doctor.ProbeServer = ClosedServer
    be_patient()
    wires = {"none": GroupWire, "slow link": SlowWire, "once slow": OnceSlowWire, "broken link": BrokenWire}
    if fault != "none":
        pairs.time = SimpleNamespace(perf_counter=lambda: TimedWire.seconds)  # type: ignore[assignment]
    examine = doctor.examine

    def with_wire(*arguments: Any, **options: Any) -> Examination:
        return examine(*arguments, **options, make_wire=wires.get(fault, TimedWire))

    doctor.examine = with_wire
    seconds = 9.0 if fault == "absent" else 90.0  # for the absent rank the others wait a third of that
    found = doctor.rank_main(rank, world_size, "cpu", FORMATS, "collective", seconds)
    return found, diagnose(found)


def host_stopped(rank: int, world_size: int, folder: str) -> int:
    """Rank 0, which hosts the store, is stopped in the middle until the others end. How many facts a rank has."""
    be_patient()
    ended = [Mark(folder, f"rank {other} has ended") for other in range(1, world_size)]
    if rank == 0:
        reach = doctor._reach

        def stopped(board: Any) -> Any:
            stop_until(lambda: all(mark.is_set() for mark in ended))
            return reach(board)

        doctor._reach = stopped
    found = doctor.rank_main(rank, world_size, "cpu", FORMATS, "collective", 4.0)
    if rank > 0:
        ended[rank - 1].set()
    return sum(each is not None for each in found.facts)


def unreachable(rank: int, world_size: int) -> str:
    """Rank 1 looks for the store at a port that nobody serves."""
    if rank == 0:
        return ""
    os.environ["MASTER_PORT"] = "9"
    try:
        doctor.rank_main(rank, world_size, "cpu", FORMATS, "collective", 2.0)
    except moelink.UnsupportedError as error:
        return str(error)
    return "no error"
