"""What ranks do in the GPU tests of faults: processes with a device each, on the symmetric transport."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moelink
from moelink.testing import assert_bitwise_equal
from tests.gpu.gpu_compile import Kernel, warmup_kernels
from tests.gpu.gpu_ranks import inputs, prepare
from tests.support.fault_ranks import Told, die, stop_for

TIMEOUT = 3.0
SIZES = {"tokens": 512, "hidden": 2048, "experts": 24, "topk": 4}
FIELDS = {"num_experts": 24, "topk": 4, "hidden_size": 2048, "timeout": TIMEOUT, "transport": "symmetric"}
WITHOUT_FLAGS, WITH_FLAGS = 512, 2048
"""Most tokens of a rank: sums go home without flags, or with them."""


def kernels(world_size: int, most: int) -> list[Kernel]:
    """Everything that all ranks of :func:`falls` launch, and later the survivors."""
    fields = {**FIELDS, "max_tokens_per_rank": most}
    return [kernel for world in (world_size, world_size - 1) for kernel in warmup_kernels(fields, world)]


def round_trip(ep: moelink.Communicator, rank: int, seed: int, graph: Any = None) -> None:
    """A call with identity experts gives 4 times the input, exactly: 4 equal rows summed in fp32, rounded once."""
    x, ids, _ = inputs(rank, seed=seed, **SIZES)
    recv = ep.dispatch(x, ids)
    out = ep.combine(recv.tokens, recv)
    ep.check()
    assert_bitwise_equal(out, x * 4, f"rank {rank}, seed {seed}")


def caught(ep: moelink.Communicator, rank: int, strike: Any) -> Told:
    """Call without synchronising until an error comes; ``strike`` is called first on the rank that is to fall."""
    x, ids, _ = inputs(rank, seed=9, **SIZES)
    strike()
    last = time.monotonic()
    try:
        while True:
            recv = ep.dispatch(x, ids)
            ep.combine(recv.tokens, recv)
            ep.check()
            last = time.monotonic()
    except moelink.PeerTimeoutError as error:
        return Told(type(error).__name__, error.rank, error.peer, error.phase, error.call, time.monotonic() - last)


def falls(rank: int, world_size: int, victim: int, how: str, place: str, most: int) -> dict[str, Any] | None:
    """Rank ``victim`` is killed or stopped while its kernels run, or between the halves of ``place``; the others
    recover.

    ``grown`` is what less is free on the device afterwards, whoever took it.
    """
    prepare(rank)
    ep = moelink.init(**FIELDS, max_tokens_per_rank=most)
    ep.warmup()  # or the victim's compiler would take the others' time
    for seed in range(3):
        round_trip(ep, rank, seed)
    x, ids, _ = inputs(rank, seed=5, **SIZES)
    recv = ep.dispatch(x, ids)
    kept = [recv.tokens.clone(), recv.src_info.clone(), recv.row_offsets.clone()]
    ep.combine(recv.tokens, recv)
    torch.cuda.synchronize()
    dist.barrier()
    blow = die if how == "killed" else lambda: stop_for(TIMEOUT + 4)

    def strike() -> None:
        if rank != victim:
            return
        if place == "running":  # somewhere in a stream of calls
            threading.Timer(0.3, blow).start()
            return
        pending = ep.dispatch_async(x, ids)
        if place == "combine":
            other = pending.wait()
            pending = ep.combine_async(other.tokens, other)
        torch.cuda.synchronize()
        blow()
        pending.wait()

    told = caught(ep, rank, strike)
    if rank == victim:
        ep.close()
        return {"told": told}
    survivors = [other for other in range(world_size) if other != victim]
    free_before = torch.cuda.mem_get_info()[0]
    start = time.monotonic()
    new = ep.recover(survivors)
    recovered = time.monotonic() - start
    for seed in range(50):  # with "stopped", while the rank left out comes back and writes what it still has to
        round_trip(new, rank, seed)
        time.sleep(0.1 if how == "stopped" else 0.0)
    for tensor, copy in zip([recv.tokens, recv.src_info, recv.row_offsets], kept, strict=True):
        rows = int(recv.row_offsets[-1]) if len(tensor) > len(recv.row_offsets) else len(tensor)
        assert_bitwise_equal(tensor[:rows], copy[:rows], "an output of a finished call")
    with pytest.raises(moelink.ForeignHandleError):
        new.combine(recv.tokens, recv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = new.dispatch(x, ids)
        out = new.combine(again.tokens, again)
    for _ in range(3):
        graph.replay()
    new.check()
    assert_bitwise_equal(out, x * 4, "replayed")
    grown = free_before - torch.cuda.mem_get_info()[0]
    new.close()
    return {"told": told, "recovered": recovered, "grown": grown, "block": new_block_bytes(new), "pid": os.getpid()}


def masked(rank: int, world_size: int, most: int, place: str) -> dict[str, Any] | None:
    """The last rank is refused while it lives. It is killed, and the others mask it: eager calls, a captured graph and
    bound calls go on in the same memory, and miss its experts."""
    prepare(rank)
    victim = world_size - 1
    ep = moelink.init(**FIELDS, max_tokens_per_rank=most)
    ep.warmup()
    x, ids, _ = inputs(rank, seed=5, **SIZES)
    bound = ep.bind(x, ids)
    bound_recv = bound()
    y = bound_recv.tokens.clone()
    bound_combine = bound.combine(y)
    bound_combine()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recv = ep.dispatch(x, ids)
        out = ep.combine(recv.tokens, recv)

    def check_all() -> None:
        there = (~ep.absent_experts[ids.long()]).sum(1, keepdim=True)
        # The sum of no row is 0.0, while the product of a negative number and 0 is -0.0.
        expected = torch.where(there > 0, x * there, 0.0)
        for number in range(5):
            out.fill_(-1)
            graph.replay()
            ep.check()
            assert_bitwise_equal(out, expected, f"rank {rank}, replay {number}")
            again = ep.dispatch(x, ids)
            assert_bitwise_equal(ep.combine(again.tokens, again), expected, f"rank {rank}, call {number}")
            assert int(again.masked) == int((SIZES["topk"] - there).sum())
            bound()
            y.copy_(bound_recv.tokens)
            assert_bitwise_equal(bound_combine(), expected, f"rank {rank}, bound call {number}")
            ep.check()

    check_all()
    torch.cuda.synchronize()
    dist.barrier()
    if rank != victim:
        with pytest.raises(moelink.UnsupportedError, match="expected ranks whose processes have ended"):
            ep.mask([victim])
    dist.barrier()
    check_all()
    torch.cuda.synchronize()
    dist.barrier()

    def strike() -> None:
        if rank != victim:
            return
        if place == "running":
            threading.Timer(0.3, die).start()
            return
        pending = ep.dispatch_async(x, ids)
        torch.cuda.synchronize()
        die()
        pending.wait()

    told = caught(ep, rank, strike)
    change = ep.mask([victim])
    assert change.masked == (victim,)
    check_all()
    with pytest.raises(moelink.ForeignHandleError):
        ep.combine(recv.tokens, recv)
    ep.close()
    return {"told": told, "seconds": change.seconds}


def new_block_bytes(ep: moelink.Communicator) -> int:
    """Bytes of a rank's workspace."""
    from moelink.memory.workspace import Workspace

    return Workspace(ep.config).nbytes
