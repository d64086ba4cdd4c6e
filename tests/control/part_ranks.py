"""What ranks do in the tests of what is not a call's own fault: exceptions, threads, children, what was dropped."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time

import pytest
import torch

import moelink
import moelink.ops
from moelink.testing import rank_data
from tests.support.fault_ranks import FIELDS, WIRES, Told, caught, check_round_trip, data, die
from tests.support.patience import Mark, hurried_gradients, hurry, is_gone, join, meet, until


def leaves_by_an_exception(rank: int, world_size: int, transport: str) -> tuple[str, float]:
    """Rank 1 leaves its ``with`` block by an exception while its peers wait for it."""
    start = time.monotonic()
    try:
        with join(**FIELDS, **WIRES[transport]) as ep:
            check_round_trip(ep, rank)
            meet()  # who is still in its call would hear of it there
            if rank == 1:
                raise ZeroDivisionError("a user's mistake")
            d, start = data(rank), time.monotonic()
            ep.dispatch(d.x, d.topk_ids)
    except (ZeroDivisionError, moelink.MoelinkError) as error:
        took = time.monotonic() - start
        meet()  # peers hear it from the rank, not from the end of its process
        return f"{type(error).__name__}: {error}", took
    raise AssertionError("no error came")


def backward_meets_a_late_rank(rank: int, world_size: int) -> tuple[str, float]:
    """Rank 1 is late in the backward, over a communicator of the gradients: forward calls raise the same at once."""
    ep = join(**FIELDS | {"hidden_size": 32}, dispatch_format="mxfp8", transport="collective")
    d = rank_data(seed=5, rank=rank, num_tokens=3, hidden_size=32, num_experts=7, topk=2)

    def loss() -> torch.Tensor:
        recv = ep.dispatch(d.x.clone().requires_grad_(), d.topk_ids)
        return ep.combine(moelink.ops.dequantize(ep, recv), recv).sum()

    loss().backward()
    last = loss()
    meet()
    if rank == 1:
        meet()
    with hurried_gradients(ep), pytest.raises(moelink.PeerTimeoutError) as first:
        last.backward()
    if rank != 1:
        meet()
    start = time.monotonic()
    for again in (lambda: ep.dispatch(d.x, d.topk_ids), ep.check):
        with pytest.raises(moelink.PeerTimeoutError, match=f"^{re.escape(str(first.value))}$"):
            again()
    took = time.monotonic() - start
    meet()
    ep.close()
    return f"{first.value.peer}", took


def dropped_and_forgotten(rank: int, world_size: int, transport: str) -> list[str]:
    """A pending call that is dropped is finished by the next one; one that is kept is named with its place."""
    with join(**FIELDS, **WIRES[transport]) as ep:
        d, found = data(rank), []
        for _ in range(2):
            ep.dispatch_async(d.x, d.topk_ids)
            check_round_trip(ep, rank)
        recv = ep.dispatch(d.x, d.topk_ids)
        ep.combine_async(recv.tokens, recv)
        ep.check()
        check_round_trip(ep, rank)
        kept = ep.dispatch_async(d.x, d.topk_ids)
        with pytest.raises(moelink.PendingError) as told:
            ep.dispatch(d.x, d.topk_ids)
        found.append(str(told.value))
        kept.wait()
        check_round_trip(ep, rank)
    return found


def forked(rank: int, world_size: int, transport: str) -> str:
    """A child of rank 0 calls, recovers, closes and ends: each is refused by name, and the parent goes on."""
    with join(**FIELDS, **WIRES[transport]) as ep:
        check_round_trip(ep, rank)
        d, words = data(rank), ""
        if rank == 0:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                said = []
                for call in (lambda: ep.dispatch(d.x, d.topk_ids), ep.check, lambda: ep.recover([0]), ep.close):
                    try:
                        call()
                        said.append("nothing")
                    except moelink.ForkedError as error:
                        said.append(str(error))
                with contextlib.suppress(BaseException):
                    ep.__exit__(None, None, None)
                os.write(writing, "\n".join(said).encode())
                os._exit(0)
            os.waitpid(child, 0)
            words = os.read(reading, 1 << 16).decode()
        for seed in range(2):
            check_round_trip(ep, rank, seed)
    return words


def outlived_by_a_child(rank: int, world_size: int, folder: str) -> Told:
    """Rank 1 dies, and a child that it has forked holds its sockets."""
    ep = join(**FIELDS, transport="collective")
    heard = Mark(folder, "rank 0 has heard")
    check_round_trip(ep, rank)
    meet()
    if rank == 1:
        if os.fork() == 0:
            with contextlib.suppress(AssertionError):
                heard.wait()
            os._exit(0)
        die()
    until(lambda: is_gone(ep, 1))
    hurry(ep)
    told = caught(ep, rank)
    heard.set()
    ep.close()
    return told


def two_threads(rank: int, world_size: int, transport: str) -> list[str]:
    """While a call waits, another thread calls: that is refused by name, and the first call goes on."""
    found: list[str] = []
    with join(**FIELDS, **WIRES[transport]) as ep:
        check_round_trip(ep, rank)
        d = data(rank)
        if rank == 0:
            first = threading.Thread(target=lambda: found.append(str(ep.dispatch(d.x, d.topk_ids).overflow)))
            detector = ep._session.detector
            assert detector is not None
            before = detector.probe_server.call
            first.start()
            until(lambda: detector.probe_server.call > before)
            for call in (lambda: ep.dispatch(d.x, d.topk_ids), lambda: ep.combine(d.x, None)):
                with pytest.raises(moelink.ConcurrencyError, match="expected one thread in the communicator") as told:
                    call()
                found.append(str(told.value))
            meet()
            first.join()
        else:
            meet()
            ep.dispatch(d.x, d.topk_ids)
        check_round_trip(ep, rank)
    return found
