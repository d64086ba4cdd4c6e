"""What ranks do in the tests of faults: die or stop at a chosen place, say what they got, go on without the dead."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moelink
from moelink.control import exchange, process
from moelink.control.values import gather_values
from moelink.testing import assert_bitwise_equal, rank_data
from tests.support.mismatches import no_host_ends_it
from tests.support.patience import (
    ROOMY,
    SHORT,
    Mark,
    all_pids,
    entered,
    hurry,
    join,
    meet,
    resume,
    stop,
    until,
)

FIELDS = {"num_experts": 7, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 3}
EXPIRY = {"collective": SHORT, "symmetric": 5.0, "nodes": 5.0}
"""Seconds after which a call gives up on a peer that is not there. Interpreted kernels of the others compute meanwhile,
which may take seconds on a busy machine where a wire takes milliseconds."""

WIRES: dict[str, dict[str, Any]] = {
    "collective": {"transport": "collective"},
    "symmetric": {"transport": "symmetric"},
    "nodes": {"transport": "symmetric", "ranks_per_node": 1},  # every rank is a node
}


@dataclass(frozen=True)
class Told:
    """An error as a rank got it, and the seconds it took; ``after`` of it, later calls raised the same at once, in so
    many seconds of a timeout of ROOMY."""

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


def refusals(ep: moelink.Communicator, rank: int, d: Any, *ways: dict[str, Any]) -> moelink.DispatchOutput:
    """Rank 1 refuses the rows of a dispatch, and of a combine with each of the options ``ways``, and then dispatches
    with other options than the rest, which no host reads. After each of that all ranks send ``d`` and get it back.
    Returns its rows."""

    def sent_back() -> moelink.DispatchOutput:
        recv = ep.dispatch(d.x, d.topk_ids)
        assert torch.equal(ep.combine(recv.tokens, recv), d.x * ep.config.topk)
        return recv

    def refused(rows: torch.Tensor, call: Any, *arguments: Any, **options: Any) -> None:
        if rank == 1:
            with pytest.raises(moelink.ArgumentError):
                call(rows[:, :31].contiguous(), *arguments, **options)
        else:
            with pytest.raises(moelink.PeerAbortedError, match="rank 1 refused its arguments"):
                call(rows, *arguments, **options)

    recv = sent_back()
    refused(d.x, ep.dispatch, d.topk_ids)
    for options in ways:
        sent_back()
        refused(recv.tokens, ep.combine, recv, **options)
    sent_back()
    with no_host_ends_it(), pytest.raises(moelink.ProtocolError, match="with other options"):
        ep.dispatch(d.x, d.topk_ids, d.topk_weights if rank == 1 else None)
    return sent_back()


def caught(ep: moelink.Communicator, rank: int, seed: int = 4) -> Told:
    """Call until an error comes, and again with time to wait, which must give the same error."""
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
    hurry(ep, ROOMY)
    start = time.monotonic()
    d = data(rank)
    for again in (lambda: ep.dispatch(d.x, d.topk_ids), ep.check):
        with pytest.raises(moelink.PeerTimeoutError, match=f"^{re.escape(str(first))}$"):
            again()
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

    announce, finish = GroupWire._announce, GroupWire._finish

    def announced(self: Any, call: int, now: str, what: Any) -> Any:
        headers = announce(self, call, now, what)
        if (now, place) == (phase, "announced"):
            blow()
        return headers

    def moving(self: Any, work: Any, call: int, now: str, deadline: float, *, on_device: bool) -> None:
        if (now, place, on_device) == (phase, "moving", True):
            blow()
        finish(self, work, call, now, deadline, on_device=on_device)

    GroupWire._announce, GroupWire._finish = announced, moving  # type: ignore[method-assign]


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
    time.sleep(0.2)  # another thread may have taken the signal, and this one run on for a moment


def strike(transport: str, place: str, number: int, blow: Any) -> None:
    """Arrange for ``blow``: ``place`` is "dispatch" or "combine"; ``number`` which store of the
    kernel, or which moment of a collective call: 0 with headers, 1 with rows under way."""
    if transport != "collective":
        strike_in_kernel(f"ep_fused_{place}_kernel", number, blow)
    else:
        strike_in_collective(place, ("announced", "moving")[number], blow)


def leftovers() -> list[str]:
    """What moelink left in the shared-memory file system under a name."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("moelink")]


def mapped() -> int:
    """Shared-memory mappings of this process that are blocks of moelink (files without a name in /dev/shm)."""
    gc.collect()  # an error's traceback holds the frames it went through
    with open("/proc/self/maps") as lines:
        return sum("/dev/shm/" in line and "(deleted)" in line for line in lines)


def killed(rank: int, world_size: int, transport: str, victim: int, place: str, number: int) -> dict[str, Any]:
    """Rank ``victim`` dies in the middle of a call; the others say what they got, and go on without it.

    Broken connections tell at once, of a timeout of ROOMY. Kernels wait for the timeout.
    """
    at_first = mapped()
    ep = join(**FIELDS, **WIRES[transport])
    got, expected = round_trip(ep, rank)
    assert_bitwise_equal(got, expected, "before")
    before = data(rank)
    recv = ep.dispatch(before.x, before.topk_ids)
    ep.combine(recv.tokens, recv)
    kept = [got.clone(), recv.tokens.clone(), recv.src_info.clone()]
    check_round_trip(ep, rank)
    meet()  # nobody is told of the death in a call that all had finished
    if rank == victim:
        strike(transport, place, number, die)
    if transport != "collective":
        hurry(ep, EXPIRY[transport])
    told = caught(ep, rank)
    survivors = [other for other in range(world_size) if other != victim]
    new = ep.recover(survivors)
    assert (new.config.rank, new.config.world_size) == (survivors.index(rank), world_size - 1)
    for seed in range(3):
        check_round_trip(new, rank, seed)
    for tensor, copy in zip([got, recv.tokens, recv.src_info], kept, strict=True):
        assert_bitwise_equal(tensor, copy, "an output of a finished call")
    with pytest.raises(moelink.ForeignHandleError):
        new.combine(recv.tokens, recv)
    assert mapped() - at_first == (0 if transport == "collective" else world_size - 1), "the old blocks are released"
    new.close()
    assert mapped() == at_first
    return {"told": told, "left": leftovers()}


def stopped(rank: int, world_size: int, transport: str, place: str, number: int) -> dict[str, Any]:
    """Rank 1 is stopped in the middle of a call, and continued when the others have gone on without it."""
    ep = join(**FIELDS, **WIRES[transport])
    check_round_trip(ep, rank)
    pids = all_pids(world_size)
    hurry(ep, EXPIRY[transport])
    if rank == 1:
        strike(transport, place, number, stop)
        told = caught(ep, rank)
        hurry(ep, SHORT, recover=True)
        with pytest.raises(moelink.PeerError):
            ep.recover([0, 1, 2])  # the others are not where they were
        ep.close()
        meet()
        return {"told": told}
    told = caught(ep, rank)
    new = ep.recover([0, 2])
    calls, over = 0, False
    for _ in range(2):
        check_round_trip(new, rank, calls)
        calls += 1
    if rank == 0:
        resume(pids[1])
    back: Any = dist.barrier(async_op=True)
    while not over:  # the stopped rank comes back meanwhile, and goes on with its call
        check_round_trip(new, rank, calls)
        over = says_stop(new, back.is_completed())
        calls += 1
    back.wait()
    new.close()
    return {"told": told, "calls": calls, "left": leftovers()}


def says_stop(ep: moelink.Communicator, stop: bool) -> bool:
    """What rank 0 says, on both ranks: its token goes to the first and to the last expert."""
    x = torch.full((int(ep.config.rank == 0), 16), float(stop), dtype=torch.bfloat16)
    ids = torch.tensor([[0, ep.config.num_experts - 1]] * len(x), dtype=torch.int32).view(-1, 2)
    return bool(ep.dispatch(x, ids, host_counts=True).tokens.any())


def late(rank: int, world_size: int, transport: str) -> Told:
    """Rank 1 comes when the others have given up on it. Nobody died, so all of them go on together."""
    ep = join(**FIELDS, **WIRES[transport])
    check_round_trip(ep, rank)
    meet()
    hurry(ep, EXPIRY[transport])
    if rank == 1:
        meet()
    told = caught(ep, rank)
    if rank != 1:
        meet()
    new = ep.recover(range(world_size))
    check_round_trip(new, rank)
    new.close()
    return told


def _let_gloo_take_its_time() -> None:
    """Half a second may not be enough for a thread of gloo's on a busy machine, which would show here alone."""
    process.await_release.__defaults__ = (ROOMY,)


def held_after_close(rank: int, world_size: int) -> list[int]:
    """How many hold each tensor of the last exchange, once the communicator is closed: 1 is this function."""
    _let_gloo_take_its_time()
    ep = join(num_experts=8, topk=2, hidden_size=16, max_tokens_per_rank=4, transport="collective")
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    recv = ep.dispatch(x, torch.tensor([[0, 5]] * 4))
    ep.combine(recv.tokens, recv)
    lent = ep._session.transport._wire._lent
    ep.close()
    return [tensor._use_count() for tensor in lent]


def held_after_gathers(rank: int, world_size: int) -> list[int]:
    """The same of two gathers of values, each of which exchanges sizes and then texts."""
    _let_gloo_take_its_time()
    dist.init_process_group("gloo")
    lent: list[Tensor] = []
    run = exchange._run

    def recorded(start: Any, tensors: list[Tensor], peers: exchange.Peers, **options: Any) -> None:
        run(start, tensors, peers, **options)
        lent.extend(tensors)

    with mock.patch.object(exchange, "_run", recorded):
        gather_values(rank)
        gather_values("text" * 1000)
    counts = [tensor._use_count() for tensor in lent]
    dist.destroy_process_group()
    return counts


def combine_left_out(rank: int, world_size: int, first: tuple[int, ...]) -> tuple[str, int, str]:
    """Rank 1 leaves out a combine and dispatches again; the others combine. Ranks ``first`` are in their calls when the
    others come."""
    ep = join(**FIELDS, transport="symmetric")
    check_round_trip(ep, rank)
    d = data(rank)
    recv = ep.dispatch(d.x, d.topk_ids)
    meet()
    hurry(ep)
    told = "", -1, ""
    if rank not in first:
        until(lambda: all(entered(ep, other, 4) for other in first))
    try:
        if rank == 1:
            ep.dispatch(d.x, d.topk_ids)
        else:
            ep.combine(recv.tokens, recv)
        ep.check()
    except moelink.PeerTimeoutError as error:
        told = type(error).__name__, error.peer, str(error)
    meet()  # the others ask this rank
    return told


def told_while_waiting(rank: int, world_size: int, folder: str) -> Told | None:
    """Rank 2 never calls. Rank 1 gives up on it, goes on living and calls no more; rank 0 has time to wait for both."""
    ep = join(**FIELDS, transport="collective")
    heard = Mark(folder, "rank 0 has heard")
    check_round_trip(ep, rank)
    meet()
    if rank == 2:
        heard.wait()  # when this rank ends, its connections do, too
        return None
    if rank == 1:
        hurry(ep)
    told = caught(ep, rank)
    if rank == 0:
        heard.set()
    else:
        heard.wait()
    ep.close()
    return told


def refused_where_nothing_travels(rank: int, world_size: int, transport: str) -> list[float]:
    """Mode allreduce: of arguments refused and hooks that raise on rank 1, rank 0 hears nothing, in no time."""
    seconds = []
    broken = moelink.Hook(None, lambda *_: 1 / 0)
    with join(**FIELDS, transport=transport, mode="allreduce") as ep:
        d = data(0)
        for arguments, kind in (
            ({"topk_weights": d.topk_ids}, moelink.ArgumentError),
            ({"topk_weights": broken}, ZeroDivisionError),
            ({"x": d.x.int()}, moelink.ArgumentError),
        ):
            start = time.monotonic()
            given = {"x": d.x, "topk_ids": d.topk_ids}
            if rank == 1:
                with pytest.raises(kind):
                    ep.dispatch(**given | arguments)
            recv = ep.dispatch(**given)
            ep.combine(recv.tokens, recv)
            if rank == 1:
                with pytest.raises(ZeroDivisionError):
                    ep.combine(recv.tokens, recv, epilogue=moelink.Hook(None, lambda *_: 1 / 0, (d.x,)))
                with pytest.raises(moelink.ArgumentError):
                    ep.combine(recv.tokens[1:], recv)
            ep.check()
            seconds.append(time.monotonic() - start)
    return seconds
