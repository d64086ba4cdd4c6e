"""Ranks that recover in the tests of faults: several times, with wrong lists, and from faults within recover."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import moelink
import moelink.ops
from moelink.control import recovery
from moelink.testing import rank_data
from moelink.transports import build as set_up
from tests.support.fault_ranks import EXPIRY, FIELDS, caught, check_round_trip, data, die
from tests.support.patience import (
    ROOMY,
    Mark,
    gather,
    hurry,
    is_gone,
    join,
    meet,
    timeouts_of,
    until,
)


def one_after_the_other(rank: int, world_size: int, transport: str, folder: str) -> list[int]:
    """Of 4 ranks the first dies, then what has become the first, then the last: recover, three times."""
    ep = join(**FIELDS, transport=transport)
    alive, sizes = list(range(world_size)), []
    for victim in (0, 1, 3):
        check_round_trip(ep, rank)
        gather(folder, f"before {victim}", rank, alive)
        if rank == victim:
            die()
        if transport != "collective":
            hurry(ep, EXPIRY[transport])
        told = caught(ep, rank)
        assert alive[told.peer] == victim
        ep = ep.recover([number for number, old in enumerate(alive) if old != victim])
        alive.remove(victim)
        assert ep.config.rank == alive.index(rank)
        sizes.append(ep.config.num_local_experts)
    check_round_trip(ep, rank)
    with pytest.raises(moelink.ArgumentError, match="ranks: expected distinct ranks in"):
        ep.recover([])
    assert ep.recover([0]).config.world_size == 1
    return sizes


BAD_LISTS = ([], [0], [0, 1, 1], [0, 1, 3], [-1, 1], [1.0, 2], [True, 1], ["1"], 1, None)


def wrong_lists(rank: int, world_size: int) -> bool:
    """Lists that this rank alone can refuse, lists that differ, a rank that does not come; then the right one."""
    ep = join(**FIELDS)
    check_round_trip(ep, rank)
    if rank == 1:
        for ranks in BAD_LISTS:
            with pytest.raises(moelink.ArgumentError, match=r"ranks: expected distinct ranks in \[0, 3\) with this"):
                ep.recover(ranks)
    check_round_trip(ep, rank)  # nothing has changed
    lists = ([0, 1, 2], [0, 1], [1, 2])
    meet()
    with (
        mock.patch.object(recovery, "LINGER_SECONDS", ROOMY),  # a rank that comes later than the others reads them
        pytest.raises(moelink.ConfigMismatchError, match="ranks: expected the same value on every rank") as caught,
    ):
        ep.recover(lists[rank])
    assert str(lists[rank]) in str(caught.value)
    meet()
    ep._session.detector.probe_server.proposal = b""
    meet()
    check_round_trip(ep, rank)
    hurry(ep, 1.0, recover=True)
    meet()
    if rank != 2:
        with pytest.raises(moelink.PeerTimeoutError, match=r"rank 2 did not arrive in recover.*has not called") as told:
            ep.recover([0, 1, 2])
        assert told.value.peer == 2
    meet()
    hurry(ep, ROOMY, recover=True)
    new = ep.recover([2, 0, 1])
    check_round_trip(new, rank)
    with pytest.raises(moelink.ClosedError):
        ep.dispatch(data(rank).x, data(rank).topk_ids)
    with pytest.raises(moelink.ClosedError, match="recover: the communicator is closed"):
        ep.recover([0, 1, 2])
    new.close()
    with pytest.raises(moelink.ClosedError):
        new.recover([0, 1, 2])
    return True


def death_in_recover(rank: int, world_size: int, moment: str, folder: str) -> tuple[str, int]:
    """Rank 3 dies; then rank 0 dies in recover, before it has proposed anything or when it is about to meet."""
    ep = join(**FIELDS)
    check_round_trip(ep, rank)
    meet()
    if rank == 3:
        die()
    assert caught(ep, rank).peer == 3
    gather(folder, "told", rank, (0, 1, 2))
    if rank == 0:
        if moment == "meeting":
            recovery.meet = lambda *_, **__: die()
        elif moment == "building":
            set_up.build_in_group = lambda *_: die()
        else:
            die()
    with pytest.raises(moelink.PeerTimeoutError, match="in recover") as told:
        ep.recover([0, 1, 2])
    new = ep.recover([1, 2])
    check_round_trip(new, rank)
    new.close()
    return type(told.value).__name__, told.value.peer


def late_to_recover(rank: int, world_size: int) -> set[timedelta]:
    """Rank 2 comes late to init and to recover, so that less than the timeout is left there. How long calls may take
    afterwards."""
    if rank == 2:
        time.sleep(0.3)
    ep = join(**FIELDS, transport="collective")
    found = timeouts_of(ep)
    check_round_trip(ep, rank)
    meet()
    if rank == 0:
        die()
    assert caught(ep, rank).peer == 0
    if rank == 2:
        time.sleep(0.3)
    new = ep.recover([1, 2])
    found |= timeouts_of(new)
    check_round_trip(new, rank)
    new.close()
    return found


def left_out(rank: int, world_size: int, folder: str) -> bool:
    """Of three ranks that recover, the first dies at the end of the set-up. One survivor has its communicator."""
    ep = join(**FIELDS)
    told_twice = Mark(folder, "rank 1 has been told")
    check_round_trip(ep, rank)
    meet()
    build = set_up.build_in_group

    def last_exchange(*arguments: Any) -> Any:
        built = build(*arguments)
        if rank == 0:
            die()
        if rank == 1:
            until(lambda: is_gone(ep, 0))
            raise moelink.PeerLostError(rank=1, peer=0, phase="init", call=0, expected=0, got=None)
        return built

    set_up.build_in_group = last_exchange
    if rank == 2:
        new = ep.recover([0, 1, 2])
        told_twice.wait()
        new.close()
        return True
    with pytest.raises(moelink.PeerLostError) as told:
        ep.recover([0, 1, 2])
    assert told.value.peer == 0
    with pytest.raises(moelink.PeerTimeoutError, match="rank 2 has gone on with ranks .0, 1, 2.") as told_again:
        ep.recover([1, 2])
    assert told_again.value.peer == 1
    with pytest.raises(moelink.PeerTimeoutError, match="rank 2 has gone on"):
        ep.recover([1])
    told_twice.set()
    return True


def gradients(rank: int, world_size: int) -> bool:
    """A recovered communicator trains: the lanes that gradients take are made anew among the survivors."""
    ep = join(**FIELDS | {"hidden_size": 32}, dispatch_format="mxfp8")
    meet()
    if rank == 0:
        die()
    d = rank_data(seed=5, rank=rank, num_tokens=3, hidden_size=32, num_experts=7, topk=2)
    with pytest.raises(moelink.PeerLostError):
        ep.dispatch(d.x, d.topk_ids, d.topk_weights)
    new = ep.recover([1, 2])
    x, weights = d.x.clone().requires_grad_(), d.topk_weights.clone().requires_grad_()
    recv = new.dispatch(x, d.topk_ids, weights)
    out = new.combine(moelink.ops.dequantize(new, recv), recv)
    out.sum().backward()
    expected = d.topk_weights.sum(1, keepdim=True).expand(3, 32)
    torch.testing.assert_close(x.grad.float(), expected, rtol=2**-7, atol=0)  # partial sums travel as bf16
    assert bool((weights.grad != 0).any())
    new.close()
    return True


def host_of_recover_gives_up(rank: int, world_size: int, folder: str) -> tuple[int, tuple[int, ...]]:
    """Rank 2 dies when ranks go on to meet in the store of rank 0, which finds that out before it has seen all of them:
    whom a rank names, and who it goes on with."""
    ep = join(**FIELDS, transport="collective")
    meet()
    hurry(ep, EXPIRY["symmetric"], recover=True)
    if rank == 2:
        dying = mock.patch.object(recovery, "meet", _die)
    elif rank == 0:

        def check_late(store: Any, keys: list[str]) -> bool:
            until(lambda: is_gone(ep, 2))
            return False

        dying = mock.patch.object(recovery.PrefixStore, "check", check_late)
    else:
        dying = mock.patch.object(recovery, "meet", recovery.meet)
    with dying, pytest.raises(moelink.PeerTimeoutError) as caught:
        ep.recover(range(world_size))
    hurry(ep, ROOMY, recover=True)
    again = [other for other in range(world_size) if other != caught.value.peer]
    with ep.recover(again) as new:
        check_round_trip(new, rank)
        gather(folder, "goes on", rank, (0, 1))
        return caught.value.peer, tuple(again[: new.config.world_size])


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
