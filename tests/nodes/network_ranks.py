"""What ranks do that ``test_network_faults.py`` and ``test_watchdog.py`` start as processes."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import time
from typing import Any

import pytest
import torch

import moelink
from moelink.memory import NetworkProxy
from moelink.memory.nodes import network, watchdog
from moelink.testing import rank_data
from moelink_testing.network import NetworkFaults
from tests.support.patience import hurry, join

FIELDS: dict[str, Any] = {"num_experts": 8, "topk": 3, "hidden_size": 32, "max_tokens_per_rank": 4}


def locked_start(rank: int, world_size: int, errors: str, handles: bool) -> bool:
    """A start that ends in time; then one that blocks and holds the interpreter's lock, for longer than any test."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    if handles:
        faulthandler.enable(2)
    watchdog.GRACE_SECONDS = 0.1
    locked = ctypes.PyDLL(None)  # calls hold the interpreter's lock
    watchdog.within(20.0, "a start", lambda: locked.usleep(1000), rank=3, node=1)  # whose watchdog has ended now
    os.write(2, b"it lives\n")
    watchdog.within(0.2, "a start", lambda: locked.sleep(30), rank=3, node=1)
    return True


def inputs(rank: int, seed: int) -> Any:
    fields = {name: FIELDS[name] for name in ("num_experts", "topk", "hidden_size")}
    return rank_data(seed=seed, rank=rank, num_tokens=3, **fields)


def round_trip(ep: moelink.Communicator, rank: int, seed: int, begins: list[float]) -> None:
    """A dispatch, one over its routing, and their combines; every token comes home from each of its experts.

    ``begins`` gets the time at which each call begins.
    """
    data = inputs(rank, seed)
    begins.append(time.monotonic())
    recv = ep.dispatch(data.x, data.topk_ids)
    begins.append(time.monotonic())
    again = ep.dispatch(data.x, data.topk_ids, routing=recv)
    for each in (recv, again):
        begins.append(time.monotonic())
        assert torch.equal(ep.combine(each.tokens, each), data.x * FIELDS["topk"])


def over_a_network(
    rank: int, world_size: int, fields: dict[str, Any], faults: dict[int, NetworkFaults], rounds: int, seconds: float
) -> tuple[str, int, int | None, float] | None:
    """Calls until one fails: (class, peer, node, seconds of the call) of its error, after which ranks recover; None if
    none does.

    ``faults``: what goes wrong with the puts of a rank. ``seconds``: how long calls wait.
    """
    make = functools.partial(NetworkProxy, faults=faults.get(rank, NetworkFaults()).links(rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "NetworkProxy", make)
        ep = join(**{**FIELDS, **fields}, transport="symmetric")
    hurry(ep, seconds)
    begins: list[float] = []
    try:
        for seed in range(rounds):
            round_trip(ep, rank, seed, begins)
    except moelink.PeerTimeoutError as error:
        took, told = time.monotonic() - begins[-1], []
        for use in (ep.check, lambda: ep.dispatch(inputs(rank, 0).x, inputs(rank, 0).topk_ids)):
            with pytest.raises(type(error)) as again:
                use()
            told.append(str(again.value))
        if told != [str(error)] * 2:
            raise AssertionError(f"expected the same error each time, got {told}") from error
        new = ep.recover(range(world_size))
        round_trip(new, rank, 0, begins)
        new.close()
        return type(error).__name__, error.peer, error.node, took
    ep.check()
    ep.close()
    return None
