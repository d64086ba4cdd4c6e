"""Symmetric memory on CUDA devices: kernels write to peers through the table of pointers. Run by hand on GPUs."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from moelink.errors import ArgumentError, ClosedError
from moelink.memory import Members, TorchMemory, create_all
from moelink.testing import free_port
from tests.memory.memory_ranks import run_ranks, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]
NBYTES = 3 * 2**20 + 5000


@triton.jit(do_not_specialize=["rank"])
def put_everywhere(pointers, rank, n, B: tl.constexpr):
    """Program p writes 1000 * rank + p + i % 7 into int32 i of row ``rank`` of block p, and adds 1 to its word 0."""
    peer = tl.program_id(0)
    base = tl.load(pointers + peer).to(tl.pointer_type(tl.int32))
    o = tl.arange(0, B)
    for start in range(0, n, B):
        i = start + o
        tl.store(base + 32 + rank.to(tl.int64) * n + i, 1000 * rank + peer + i % 7, mask=i < n)
    tl.debug_barrier()
    tl.atomic_add(base, 1, sem="release", scope="sys")


@triton.jit
def read_row(pointers, peer, row, out, n, B: tl.constexpr):
    """Copies row ``row`` of block ``peer`` into ``out``."""
    base = tl.load(pointers + peer).to(tl.pointer_type(tl.int32))
    o = tl.arange(0, B)
    for start in range(0, n, B):
        i = start + o
        tl.store(out + i, tl.load(base + 32 + row * n + i, mask=i < n, other=-1), mask=i < n)


N = 12_345


def expected(rank, peer):
    return 1000 * rank + peer + torch.arange(N, dtype=torch.int32) % 7


def check_blocks(memory, device):
    """Every row of every block, read by a kernel through the table, and this rank's own block on the host."""
    for peer in range(memory.world_size):
        for row in range(memory.world_size):
            out = torch.full((N,), -7, dtype=torch.int32, device=device)
            read_row[(1,)](memory.pointers, peer, row, out, N, B=1024)
            assert torch.equal(out.cpu(), expected(row, peer)), (peer, row)
        assert memory.peer(peer)[:4].view(torch.int32).item() == memory.world_size
    words = memory.local[: NBYTES // 4 * 4].view(torch.int32).cpu()
    assert torch.equal(words[32 : 32 + N], expected(0, memory.rank))


def use_torch_memory(rank, world_size, exchange, port, backend):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    survivors = backend == "members"  # ranks that form no group of torch's
    if not survivors:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    switch = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    for turn in range(3):  # made, used and closed again and again
        group = Members(rank, world_size, store, f"turn {turn}") if survivors else dist.group.WORLD
        memory = TorchMemory.create(NBYTES, device=device, group=group, exchange=exchange)
        assert (memory.rank, memory.world_size, memory.nbytes) == (rank, world_size, NBYTES)
        assert memory.local.shape == (NBYTES,)
        assert memory.local.device == memory.pointers.device == device
        assert memory.pointers[rank].item() == memory.local.data_ptr()
        assert all(pointer % 128 == 0 for pointer in memory.pointers.tolist())
        assert memory._handle.multicast_ptr == 0
        assert not memory.local.any()
        exchange(b"all zero")
        put_everywhere[(world_size,)](memory.pointers, rank, N, B=1024)
        torch.cuda.synchronize()
        exchange(b"written")
        check_blocks(memory, device)
        exchange(b"read")
        memory.close()
        memory.close()
        with pytest.raises(ClosedError):
            memory.peer(rank)
    assert os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == switch
    free_before = torch.cuda.mem_get_info(device)[0]
    big = TorchMemory.create(2**28, device=device, group=group, exchange=exchange)
    held = free_before - torch.cuda.mem_get_info(device)[0]
    big.close()
    exchange(b"all closed")
    given_back = torch.cuda.mem_get_info(device)[0] - (free_before - held)
    with pytest.raises(ArgumentError, match="a CUDA device"):
        TorchMemory.create(64, device=torch.device("cpu"), group=group, exchange=exchange)
    if not survivors:
        dist.destroy_process_group()
    return held, given_back


def share_a_device(rank, world_size, exchange, port):
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    TorchMemory.create(NBYTES, device=torch.device("cuda", 0), group=dist.group.WORLD, exchange=exchange)


@pytest.mark.alone("compares what is free on a device before and after")
@pytest.mark.parametrize("backend", ["nccl", "gloo", "members"])
def test_processes_write_to_each_other(backend):
    for held, given_back in values(run_ranks(torch.cuda.device_count(), use_torch_memory, free_port(), backend)):
        assert held >= 2**28
        assert given_back >= 2**28, "close() frees the block"


def test_ranks_that_share_a_device_are_refused():
    for result in run_ranks(2, share_a_device, free_port()):
        assert result[:2] == ("error", "UnsupportedError")
        assert result[2].startswith("expected a device of its own for each rank, got ")


@pytest.mark.parametrize("twice", [False, True], ids=["each-device", "each-device-twice"])
def test_one_process_writes_to_all_devices(twice):
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] * (2 if twice else 1)
    memories = create_all(devices, NBYTES)
    for memory, device in zip(memories, devices, strict=True):
        assert memory.local.device == memory.pointers.device == device
        with torch.cuda.device(device):
            put_everywhere[(len(devices),)](memory.pointers, memory.rank, N, B=1024)
    for device in devices:
        torch.cuda.synchronize(device)
    for memory, device in zip(memories, devices, strict=True):
        with torch.cuda.device(device):
            check_blocks(memory, device)
    for memory in memories:
        memory.close()


def test_expandable_segments_are_reached_too():
    """In a process of its own, because the allocator reads its setting once."""
    assert values(run_ranks(1, with_expandable_segments)) == ["expandable"]


def with_expandable_segments(rank, world_size, exchange):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its successor does not exist in every release from 2.10 on
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    test_one_process_writes_to_all_devices(False)
    return "expandable" if any(s["is_expandable"] for s in torch.cuda.memory_snapshot()) else "not expandable"
