"""Ranks that balance, one of which is late, raises, or is killed in a step; and what their layers compute then."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import moelink
from moelink.nn import Balancer, MoE, Placement
from tests.nn.balance_ranks import EXPERTS, PHYSICAL, SIZES, skewed, tokens
from tests.support.patience import SHORT, Mark, hurry, join

Said = tuple[str, int, tuple[int, ...], bool | str]
"""The error of the step, whom it names, the map of ids after it, and whether the output is right, or its error."""


class OddError(Exception):
    """What one rank's step raises."""


@torch.no_grad()
def faulty(rank: int, world_size: int, folder: str, how: str, transport: str) -> list[Said]:
    """Rank 1 is at fault in the first step; then all compute, and where they can, balance again and compute."""
    ep = join(**SIZES, transport=transport, device="cpu")
    layer = MoE(ep, intermediate_size=128, seed=1, placement=Placement(tuple(i % EXPERTS for i in range(PHYSICAL))))
    skewed(layer)
    before = layer(tokens(rank, 0))
    balancer = Balancer(layer, max_bytes=1 << 30)
    balancer.plan()
    over = [Mark(folder, number) for number in range(world_size)]
    if rank == 1:
        _break(balancer, how)
    if how in ("late", "killed", "_exchange:OddError"):
        hurry(ep)
        object.__setattr__(balancer._peers, "timeout", SHORT)
    if rank == 1 and how == "late":
        for mark in (over[0], *over[2:]):
            mark.wait()
    said = []
    for _ in range(2):
        name, peer = "", -1
        try:
            if balancer.steps_left:
                balancer.step()
        except (moelink.PeerTimeoutError, moelink.PeerAbortedError) as error:
            name, peer = type(error).__name__, error.peer
        except (OddError, KeyboardInterrupt) as error:
            name = type(error).__name__
        over[rank].set()
        for number, mark in enumerate(over):
            if not (how == "killed" and number == 1):
                mark.wait()
        said.append((name, peer, layer.experts.placement.experts, _computes(layer, rank, before)))
    ep.close()
    return said


def _break(balancer: Balancer, how: str) -> None:
    """Let the first step of ``balancer`` fail."""
    place, _, kind = how.rpartition(":")
    real: Any = getattr(balancer, place or "_pack")

    def broken(*arguments: Any) -> Any:
        setattr(balancer, place or "_pack", real)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if kind == "after":
            real(*arguments)
        raise OddError

    if how != "late":
        setattr(balancer, place or "_pack", broken)


def _computes(layer: MoE, rank: int, before: torch.Tensor) -> bool | str:
    """Whether the layer gives what it gave, or whom its error names. A report may come a moment after the step."""
    end = time.monotonic() + 20
    try:
        while True:
            layer.ep.check()
            after = layer(tokens(rank, 0))
            if layer.ep._session.fate.error is None and time.monotonic() < end:
                return bool(torch.allclose(after.float(), before.float(), atol=0.01, rtol=0.02))
    except moelink.PeerTimeoutError as error:
        return f"{error.peer}"
