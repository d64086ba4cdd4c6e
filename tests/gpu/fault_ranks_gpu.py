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
from tests.support.patience import until

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


class Calls:
    """A rank's eager calls, a captured graph and bound calls, which stay while ranks leave and return."""

    def __init__(self, ep: moelink.Communicator) -> None:
        ep.warmup()
        self.ep = ep
        self.x, self.ids, _ = inputs(ep.config.rank, seed=5, **SIZES)
        self.bound = ep.bind(self.x, self.ids)
        self.bound_recv = self.bound()
        self.y = self.bound_recv.tokens.clone()
        self.bound_combine = self.bound.combine(self.y)
        self.bound_combine()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.recv = ep.dispatch(self.x, self.ids)
            self.out = ep.combine(self.recv.tokens, self.recv)

    def check(self) -> None:
        """Compare all with the sums of the experts that are there."""
        there = (~self.ep.absent_experts[self.ids.long()]).sum(1, keepdim=True)
        # The sum of no row is 0.0, while the product of a negative number and 0 is -0.0.
        expected = torch.where(there > 0, self.x * there, 0.0)
        for number in range(5):
            what = f"rank {self.ep.config.rank}, {self.ep.present}, {number}: "
            self.out.fill_(-1)
            self.graph.replay()
            self.ep.check()
            assert_bitwise_equal(self.out, expected, what + "graph")
            again = self.ep.dispatch(self.x, self.ids)
            assert_bitwise_equal(self.ep.combine(again.tokens, again), expected, what + "eager")
            assert int(again.masked) == int((SIZES["topk"] - there).sum())
            self.bound()
            self.y.copy_(self.bound_recv.tokens)
            assert_bitwise_equal(self.bound_combine(), expected, what + "bound")
            self.ep.check()


def leaves_and_returns(process: int, processes: int, most: int, place: str, port: int) -> dict[str, Any] | None:
    """The last rank is masked while it lives, and comes back. Then it is killed and masked, and the last process takes
    its place. All go on in the same graphs and bound calls, at the same addresses."""
    world_size, victim = processes - 1, processes - 2
    newcomer = process == world_size
    rank = min(process, victim)
    torch.cuda.set_device(rank)
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    others = range(victim)

    def gathered(what: str, ranks: Any) -> None:
        torch.cuda.synchronize()
        store.set(f"{what} {rank}", "1")
        until(lambda: store.check([f"{what} {other}" for other in ranks]))

    if newcomer:
        until(lambda: store.check(["admit"]))
        ep = moelink.join(store, rank, world_size, **FIELDS, max_tokens_per_rank=most, device=f"cuda:{rank}")
        x, ids, _ = inputs(rank, seed=5, **SIZES)
        for _ in range(15):  # as often as the others
            recv = ep.dispatch(x, ids)
            assert_bitwise_equal(ep.combine(recv.tokens, recv), x * SIZES["topk"], "newcomer")
            ep.check()
        ep.close()
        return None
    group = dist.PrefixStore("group", store)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=group, rank=rank, world_size=world_size)
    ep = moelink.init(**FIELDS, max_tokens_per_rank=most)
    calls = Calls(ep)
    calls.check()
    addresses, taken = ep._session.transport.ranks[0].memory.pointers.tolist(), taken_without_torch()  # type: ignore[attr-defined]
    seconds = {}
    gathered("mask", range(world_size))
    if rank == victim:
        with pytest.raises(moelink.RankMaskedError):
            calls.check()
    else:
        seconds["mask a living rank"] = ep.mask([victim]).seconds
        calls.check()
        until(lambda: ep.applicants(store) == (victim,))
        gathered("admit", others)
    seconds["admit it"] = ep.admit([victim], store).seconds
    calls.check()
    gathered("strike", range(world_size))

    def strike() -> None:
        if rank != victim:
            return
        if place == "running":
            threading.Timer(0.3, die).start()
            return
        pending = ep.dispatch_async(calls.x, calls.ids)
        torch.cuda.synchronize()
        die()
        pending.wait()

    told = caught(ep, rank, strike)
    seconds["mask"] = ep.mask([victim]).seconds
    calls.check()
    with pytest.raises(moelink.ForeignHandleError):
        ep.combine(calls.recv.tokens, calls.recv)
    store.set("admit", "1")
    until(lambda: ep.applicants(store) == (victim,))
    gathered("admit a newcomer", others)
    seconds["admit a newcomer"] = ep.admit([victim], store).seconds
    calls.check()
    assert ep._session.transport.ranks[0].memory.pointers.tolist() == addresses  # type: ignore[attr-defined]
    grown = taken_without_torch() - taken
    nbytes = new_block_bytes(ep)
    ep.close()
    return {"told": told, "seconds": seconds, "grown": grown, "block": nbytes}


def taken_without_torch() -> int:
    """Bytes of the current device that all processes have taken, without those of this process's torch allocator, which
    keeps room for outputs of calls."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def new_block_bytes(ep: moelink.Communicator) -> int:
    """Bytes of a rank's workspace."""
    from moelink.memory.workspace import Workspace

    return Workspace(ep.config).nbytes
