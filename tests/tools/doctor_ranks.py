"""Ranks that an examination finds something wrong with."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.control.probe import ProbeServer
from moelink.tools.doctor import diagnose, facts
from moelink.tools.doctor import run as doctor
from moelink.tools.doctor.diagnosis import Examination
from moelink.tools.doctor.pairs import GroupWire

FORMATS = ("bf16", "fp8_block128")


class SlowWire(GroupWire):
    """Over which messages between ranks 0 and 2 take longer."""

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        if {dist.get_rank(), peer} == {0, 2}:
            time.sleep(0.05)
        super().send(tensor, peer)


class BrokenWire(GroupWire):
    """Over which nothing passes between ranks 0 and 2."""

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        if {dist.get_rank(), peer} == {0, 2}:
            raise RuntimeError("Connection reset by peer")
        super().send(tensor, peer)


class ClosedServer(ProbeServer):
    """Whose port is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.close()


def examined(rank: int, world_size: int, fault: str) -> Any:
    """Run rank ``rank`` of an examination with ``fault``; return what was found and what is wrong."""
    if fault == "absent" and rank == 2:
        time.sleep(4)
        return None
    if fault == "version" and rank == 2:
        own = facts.versions
        facts.versions = lambda: {**own(), "torch": "2.10.0"}
    if fault == "closed port" and rank == 2:
        doctor.ProbeServer = ClosedServer
    wires = {"slow link": SlowWire, "broken link": BrokenWire}
    examine = doctor.examine

    def with_wire(*arguments: Any, **options: Any) -> Examination:
        return examine(*arguments, **options, make_wire=wires.get(fault, GroupWire))

    doctor.examine = with_wire
    seconds = 6.0 if fault in ("absent", "broken link") else 60.0
    found = doctor.rank_main(rank, world_size, "cpu", FORMATS, "collective", seconds)
    return found, diagnose(found)


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
