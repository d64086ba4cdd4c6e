"""What ranks do that ``test_network_faults.py`` and ``test_watchdog.py`` start as processes."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moelink
from moelink.memory import NetworkProxy
from moelink.memory.nodes import network, watchdog
from moelink.memory.protocol import RING_ENTRY_WORDS, RING_HEADER_WORDS
from moelink.testing import rank_data
from moelink_testing.network import NetworkFaults
from tests.support.patience import ROOMY, hurry, join, meet, until

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


def check_without(ep: moelink.Communicator, rank: int, seed: int) -> None:
    """Make a dispatch, one over its routing, and their combines, of the experts that are present."""
    data = inputs(rank, seed)
    there = ~ep.absent_experts[data.topk_ids.long()]
    recv = ep.dispatch(data.x, data.topk_ids)
    again = ep.dispatch(data.x, data.topk_ids, routing=recv)
    for each in (recv, again):
        assert torch.equal(ep.combine(each.tokens, each), data.x * there.sum(1, keepdim=True))
        assert int(each.masked) == int((~there).sum())


def call_again_and_again(ep: moelink.Communicator, rank: int) -> None:
    for seed in range(1, 40):
        check_without(ep, rank, seed)


def masked_over_a_network(
    rank: int, world_size: int, faults: dict[int, NetworkFaults], dies: bool, levels: bool
) -> int:
    """Rank 2 of 4 dies between calls, or its links are cut in a call. The others mask it, and go on at once."""
    make = functools.partial(NetworkProxy, faults=faults.get(rank, NetworkFaults()).links(rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "NetworkProxy", make)
        ep = join(**FIELDS, transport="symmetric", ranks_per_node=2, two_level=levels)
    check_without(ep, rank, 0)
    meet()
    hurry(ep, 12.0)
    if dies and rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(moelink.PeerTimeoutError) as told:
        call_again_and_again(ep, rank)
    if rank == 2:
        ep.close()
        return 0
    assert told.value.peer == 2 or not dies
    hurry(ep, ROOMY)
    assert ep.mask([2]).present == (0, 1, 3)
    made = 0
    for seed in range(4):
        check_without(ep, rank, seed)
        made += 1
    ep.check()
    ep.close()
    return made


def node_dies(rank: int, world_size: int, levels: bool) -> tuple[int, ...]:
    """Both ranks of node 1 die between calls. A call of the others masks them, and the next ones go on."""
    ep = join(**FIELDS, transport="symmetric", ranks_per_node=2, two_level=levels, on_failure="mask")
    check_without(ep, rank, 0)
    meet()
    if rank >= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    hurry(ep, 12.0)
    with pytest.raises(moelink.MembershipError) as told:
        call_again_and_again(ep, rank)
    hurry(ep, ROOMY)
    for seed in range(2):
        check_without(ep, rank, seed)
    ep.close()
    return told.value.masked


def late_put_of_before(rank: int, world_size: int) -> int:
    """Rank 0 of 3 nodes has a put to rank 1 under way when both mask rank 2, which lives. Return the word that
    its signal would set."""
    ep = join(**FIELDS, transport="symmetric", ranks_per_node=1)
    check_without(ep, rank, 0)
    (own,) = ep._session.transport.ranks  # type: ignore[attr-defined]
    proxy, memory, regions = own.network.proxy, own.memory, own.workspace.regions
    if rank == 2:
        with pytest.raises(moelink.RankMaskedError):
            call_again_and_again(ep, rank)
        ep.close()
        return 0
    if rank == 0:  # to the flag of a fourth message, of which there are three
        until(lambda: proxy.idle and not proxy._under_way)
        proxy._delay, ticket, base = 1e9, int(proxy.ring[0]), memory.local.data_ptr()
        idle, flag = base + regions["idle"].offset, base + regions["message_flag"].offset + 3 * 8
        proxy.ring[0] += 1
        at = RING_HEADER_WORDS + ticket % int(proxy.ring[1]) * RING_ENTRY_WORDS
        proxy.ring[at : at + RING_ENTRY_WORDS] = torch.tensor([idle, idle, 8, flag, 1000, 1, 0, ticket + 1])
        until(lambda: len(proxy._under_way) == 1)
    ep.mask([2])
    proxy._delay = 0.0
    for put in list(proxy._under_way):
        put.due = 0.0
    until(lambda: not proxy._under_way)
    for seed in range(2):
        check_without(ep, rank, seed)
    word = int(regions["message_flag"].view(memory.local)[0, 3])
    ep.close()
    return word


def refused_between_nodes(rank: int, world_size: int) -> bool:
    """Nobody is admitted between nodes; nothing has changed after each refusal."""
    store: Any = dist.HashStore()
    ep = join(**FIELDS, transport="symmetric", ranks_per_node=1)
    for what in (
        lambda: ep.admit([1], store),
        lambda: ep.admit([rank], store),
        lambda: moelink.join(store, 1, 2, **FIELDS, transport="symmetric", ranks_per_node=1),
    ):
        with pytest.raises(moelink.UnsupportedError, match="(admit|join): expected ranks of one node .*masked but"):
            what()
    for wrong in ([], [rank], [0, 1], [2], [1 - rank, 1 - rank], None):
        with pytest.raises(moelink.ArgumentError, match="ranks: expected"):
            ep.mask(wrong)  # type: ignore[arg-type]
    assert ep.present == (0, 1)
    round_trip(ep, rank, 0, [])
    ep.close()
    return True
