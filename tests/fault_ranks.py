"""What ranks do in the tests of faults: die or stop at a chosen place, say what they got, go on without the dead."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch

import moelink
from moelink.testing import assert_bitwise_equal, rank_data

FIELDS = {"num_experts": 7, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 3}
TIMEOUT = 2.0


@dataclass(frozen=True)
class Told:
    """An error as a rank got it, and the seconds it took.

    ``after`` is how long later calls took that must raise the same at once.
    """

    kind: str
    rank: int
    peer: int
    phase: str
    call: int
    took: float
    after: float = 0.0


def data(rank: int, seed: int = 3, tokens: int = 3) -> Any:
    return rank_data(seed=seed, rank=rank, num_tokens=tokens, hidden_size=16, num_experts=7, topk=2, holes=0.2)


def round_trip(ep: moelink.Communicator, origin: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A dispatch and combine with identity experts of the tokens of rank ``origin``: (result, what it must be)."""
    d = data(origin, seed)
    recv = ep.dispatch(d.x, d.topk_ids)
    out = ep.combine(recv.tokens, recv)
    routed = (d.topk_ids >= 0).sum(1, keepdim=True)
    return out, (d.x.float() * routed + 0.0).to(out.dtype)  # sums start at +0


def check_round_trip(ep: moelink.Communicator, origin: int, seed: int = 3) -> None:
    got, expected = round_trip(ep, origin, seed)
    assert_bitwise_equal(got, expected, f"round trip of rank {origin}")
    ep.check()


def caught(ep: moelink.Communicator, rank: int, seed: int = 4) -> Told:
    """Call until an error comes, and again, which must give the same error."""
    start, d = time.monotonic(), data(rank, seed)
    try:
        for _ in range(50):
            start = time.monotonic()
            recv = ep.dispatch(d.x, d.topk_ids)
            start = time.monotonic()
            ep.combine(recv.tokens, recv)
        raise AssertionError("no error came")
    except moelink.PeerTimeoutError as error:
        first, took = error, time.monotonic() - start
    start = time.monotonic()
    d = data(rank)
    for again in (lambda: ep.dispatch(d.x, d.topk_ids), ep.check):
        try:
            again()
        except moelink.PeerTimeoutError as error:
            assert str(error) == str(first)
        else:
            raise AssertionError("a poisoned communicator did not raise")
    after = time.monotonic() - start
    return Told(type(first).__name__, first.rank, first.peer, first.phase, first.call, took, after)


def strike_in_kernel(kernel: str, after_stores: int, blow: Any) -> None:
    """Call ``blow`` in the middle of the interpreted kernel ``kernel``, at its ``after_stores``-th store."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    store, launch = builder.create_masked_store, executor.__call__
    running: list[str] = [""]
    left = [after_stores]

    def counted(self: Any, *args: Any) -> Any:
        if kernel in running[0]:
            left[0] -= 1
            if left[0] == 0:
                blow()
        return store(self, *args)

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        running[0] = self.fn.__name__
        return launch(self, *args, **kwargs)

    builder.create_masked_store, executor.__call__ = counted, named


def strike_in_collective(phase: str, place: str, blow: Any) -> None:
    """Call ``blow`` in a collective call of ``phase``: "announced" (headers are out) or "moving" (rows are)."""
    from moelink.transports.collective.group_wire import GroupWire

    announce, exchange = GroupWire._announce, GroupWire._exchange_rows

    def announced(self: Any, call: int, now: str, what: Any) -> Any:
        headers = announce(self, call, now, what)
        if (now, place) == (phase, "announced"):
            blow()
        return headers

    def moving(self: Any, call: int, now: str, transfer: Any, deadline: float) -> Any:
        if (now, place) == (phase, "moving"):
            into = transfer.into[: sum(transfer.recv_counts)]
            self._world.data.alltoall_base(into, transfer.rows, transfer.recv_counts, transfer.send_counts)
            blow()
        return exchange(self, call, now, transfer, deadline)

    GroupWire._announce, GroupWire._exchange_rows = announced, moving  # type: ignore[method-assign]


def die() -> None:
    """As the kernel's out-of-memory killer would have it."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for(seconds: float) -> None:
    """SIGSTOP this process; a child continues it."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def strike(transport: str, place: str, number: int, blow: Any) -> None:
    """Arrange for ``blow``: ``place`` is "dispatch" or "combine", ``number`` which store of the kernel, or moment."""
    if transport == "symmetric":
        strike_in_kernel(f"ep_fused_{place}_kernel", number, blow)
    else:
        strike_in_collective(place, ("announced", "moving")[number % 2], blow)


def leftovers() -> list[str]:
    """What moelink left in the shared-memory file system under a name."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("moelink")]


def mapped() -> int:
    """Shared-memory mappings of this process that are blocks of moelink (files without a name in /dev/shm)."""
    with open("/proc/self/maps") as lines:
        return sum("/dev/shm/" in line and "(deleted)" in line for line in lines)


def killed(
    rank: int, world_size: int, transport: str, victim: int, place: str, number: int, timeout: float
) -> dict[str, Any]:
    """Rank ``victim`` dies in the middle of a call; the others say what they got, and go on without it."""
    at_first = mapped()
    ep = moelink.init(**FIELDS, transport=transport, timeout=timeout)
    got, expected = round_trip(ep, rank)
    assert_bitwise_equal(got, expected, "before")
    before = data(rank)
    recv = ep.dispatch(before.x, before.topk_ids)
    ep.combine(recv.tokens, recv)
    kept = [got.clone(), recv.tokens.clone(), recv.src_info.clone()]
    if rank == victim:
        strike(transport, place, number, die)
    told = caught(ep, rank)
    survivors = [other for other in range(world_size) if other != victim]
    start = time.monotonic()
    new = ep.recover(survivors)
    recovered = time.monotonic() - start
    assert (new.config.rank, new.config.world_size) == (survivors.index(rank), world_size - 1)
    for seed in range(3):
        check_round_trip(new, rank, seed)
    for tensor, copy in zip([got, recv.tokens, recv.src_info], kept, strict=True):
        assert_bitwise_equal(tensor, copy, "an output of a finished call")
    try:
        new.combine(recv.tokens, recv)
    except moelink.ForeignHandleError:
        pass
    else:
        raise AssertionError("an output of the old generation was accepted")
    assert mapped() - at_first == (world_size - 1 if transport == "symmetric" else 0), "the old blocks are released"
    new.close()
    assert mapped() == at_first
    return {"told": told, "recovered": recovered, "left": leftovers()}
