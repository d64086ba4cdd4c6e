"""NVSHMEM memory without a GPU: what is refused before anything is allocated, the table of addresses, and closing.

Ranks are threads; torch's module, which a CPU build has only half of, is played by :class:`Job`.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import moelink
from moelink.errors import ArgumentError, ClosedError, ConfigMismatchError, UnsupportedError
from moelink.memory import Members, NvshmemMemory, driver, torch_symm
from moelink.memory.nodes import network, nvshmem, watchdog
from moelink.memory.workspace import Workspace
from moelink.transports.build import choose_transport

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")

WORLD, NODE, NBYTES = 4, 2, 1000
SECONDS = 20.0


class Here:
    """Which rank the running thread is, or the thread that started it on its behalf."""

    def __init__(self) -> None:
        self._rank: contextvars.ContextVar[int] = contextvars.ContextVar("rank")

    rank = property(lambda self: self._rank.get(), lambda self, rank: self._rank.set(rank))


class Job:
    """NVSHMEM's processes, the machines they are on, and torch's module, as far as one is asked.

    Attributes:
        machines, devices, orderings, free: of each rank: machine, device's id, CUDA's writes ordering, free bytes.
        apart: pairs of devices without peer access. hidden: ranks whose blocks no other rank can address.
        allocated: blocks made so far, by rank. full: allocation fails. stuck: ranks whose allocation does not end
            before ``over`` is set.
    """

    def __init__(self) -> None:
        self.here = Here()
        self.machines = [f"{rank // NODE:036x}" for rank in range(WORLD)]
        self.devices = [f"gpu-{rank}" for rank in range(WORLD)]
        self.orderings, self.free = [100] * WORLD, [10 * NBYTES] * WORLD
        self.apart: set[tuple[int, int]] = set()
        self.hidden: set[int] = set()
        self.available, self.full, self.in_use = True, False, False
        self.backend, self.backends = "CUDA", []
        self.allocated: dict[int, torch.Tensor] = {}
        self.groups = SimpleNamespace(ranks=list(range(WORLD)), size=WORLD)
        self.met = threading.Barrier(WORLD)
        self.stuck: set[int] = set()
        self.over = threading.Event()
        self._SymmetricMemory = SimpleNamespace(empty_strided_p2p=self.allocate)

    # -- what torch.distributed._symmetric_memory has ---------------------------------------------------------------

    def is_nvshmem_available(self):
        return self.available

    def get_backend(self, device):
        return self.backend

    def set_backend(self, name):
        if self.in_use:
            raise RuntimeError("an allocation was made already")
        self.backends.append(name)
        self.backend = name

    def allocate(self, shape, strides, dtype, device):
        assert self.backend == "NVSHMEM"
        if self.full:
            raise RuntimeError("nvshmem_malloc failed")
        if self.here.rank in self.stuck:
            self.over.wait(SECONDS / 2)
        block = torch.full(shape, 7, dtype=dtype)
        self.allocated[self.here.rank] = block
        return block

    def rendezvous(self, block, group):
        rank = self.here.rank
        assert group.rank() == rank
        assert not block.any(), "a block is reached before it is zero"
        self.met.wait(SECONDS)
        unseen = self.hidden - {rank}
        pointers = [0 if peer in unseen else self.allocated[peer].data_ptr() for peer in range(WORLD)]
        return SimpleNamespace(
            rank=rank, world_size=WORLD, buffer_ptrs=pointers,
            get_buffer=lambda peer, shape, dtype: self.allocated[peer].view(shape),
        )  # fmt: skip


@pytest.fixture
def job(monkeypatch):
    job = Job()
    for module in (nvshmem, torch_symm):
        monkeypatch.setattr(module, "symmetric_memory_module", lambda: job)
    for module in (nvshmem, driver):
        monkeypatch.setattr(module, "device_uuid", lambda device: job.devices[device.index])
    monkeypatch.setattr(nvshmem, "machine_id", lambda: job.machines[job.here.rank])
    monkeypatch.setattr(nvshmem, "_writes_ordering", lambda device: job.orderings[device.index])
    monkeypatch.setattr(nvshmem, "device_library", lambda: "libnvshmem_device.bc")
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 60.0)  # one that is called off too late would end the tests
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: job.groups.ranks)
    monkeypatch.setattr(dist, "get_world_size", lambda: job.groups.size)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (job.free[device.index], 1 << 40))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: WORLD)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in job.apart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return job


def create(job, *, nbytes=NBYTES, group=None, device="cuda", ranks_per_node=NODE, timeout=SECONDS):
    """What ``NvshmemMemory.create`` returns or raises on every rank, and how often each called its exchange."""
    meeting, records = threading.Barrier(WORLD), [b""] * WORLD
    sizes = nbytes if isinstance(nbytes, list) else [nbytes] * WORLD

    def run(rank):
        job.here.rank, calls = rank, []

        def exchange(record):
            calls.append(record)
            records[rank] = record
            meeting.wait(SECONDS)
            everybody = list(records)
            meeting.wait(SECONDS)
            return everybody

        mine = group or SimpleNamespace(rank=lambda: rank, size=lambda: WORLD)
        if group is Members:
            mine = Members(rank, WORLD, store=None, name="survivors")
        try:
            memory = NvshmemMemory.create(
                sizes[rank], device=torch.device(device, rank) if device == "cuda" else torch.device(device),
                group=mine, ranks_per_node=ranks_per_node, exchange=exchange, timeout=timeout,
            )  # fmt: skip
        except moelink.MoelinkError as error:
            return error, len(calls)
        return memory, len(calls)

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, range(WORLD)))


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_a_rank_addresses_the_blocks_of_its_node(job):
    for rank, (memory, calls) in enumerate(create(job)):
        assert (memory.rank, memory.world_size, memory.nbytes) == (rank, WORLD, NBYTES)
        near = [peer for peer in range(WORLD) if peer // NODE == rank // NODE]
        table = [job.allocated[peer].data_ptr() if peer in near else 0 for peer in range(WORLD)]
        assert memory.pointers.tolist() == table
        assert not memory.local.any()
        assert memory.local.data_ptr() == table[rank]
        for peer in range(WORLD):
            if peer in near:
                assert memory.peer(peer).data_ptr() == table[peer]
            else:
                with pytest.raises(
                    ArgumentError, match=f"rank: expected a rank of the node of rank {rank}, got {peer}"
                ):
                    memory.peer(peer)
        assert calls == 4, "two exchanges before the allocation, two after it"
    assert job.backend == "NVSHMEM"


def test_a_peer_that_can_be_addressed_is_left_to_the_network_all_the_same(job):
    """Nodes forced on one machine: NVSHMEM would give addresses of all."""
    job.machines = ["0" * 36] * WORLD
    job.orderings = [0] * WORLD  # nothing is written by a network card here
    memories = [memory for memory, _ in create(job, ranks_per_node=1)]
    for rank, memory in enumerate(memories):
        assert [peer for peer in range(WORLD) if memory.pointers[peer] != 0] == [rank]


def test_closing_lets_go_but_the_block_is_never_released(job):
    """Torch would release it collectively: a rank that goes before others would wait for them."""
    memories = [memory for memory, _ in create(job)]
    blocks = [weakref.ref(block) for block in job.allocated.values()]
    for memory in memories:
        memory.close()
        memory.close()
        assert memory.local.numel() == 0
        assert memory.pointers.tolist() == [0] * WORLD
        with pytest.raises(ClosedError):
            memory.peer(memory.rank)
    del memories, memory
    job.allocated.clear()
    assert all(block() is not None for block in blocks)


def test_another_communicator_finds_the_backend_set(job):
    create(job)
    job.in_use = True
    assert all(isinstance(memory, NvshmemMemory) for memory, _ in create(job))


# -- what is refused, on every rank and before anything is allocated ------------------------------------------------


def refused(job, expected=UnsupportedError, **options):
    """The messages of all ranks, each of ``expected`` or about the rank that had it; nothing was left behind."""
    results = create(job, **options)
    assert all(isinstance(error, moelink.MoelinkError) for error, _ in results), results
    assert any(type(error) is expected for error, _ in results), results
    assert [calls for _, calls in results] == [2] * WORLD
    assert job.allocated == {}
    assert job.backend == "CUDA", "the process may still use another backend"
    return [str(error) for error, _ in results]


def test_survivors_of_a_job(job):
    assert all("start the job again" in text for text in refused(job, group=Members))


@pytest.mark.parametrize("ranks, size", [([0, 1, 2, 3], 8), ([1, 0, 2, 3], 4)], ids=["part", "order"])
def test_other_ranks_than_the_whole_world(job, ranks, size):
    job.groups = SimpleNamespace(ranks=ranks, size=size)
    texts = refused(job)
    assert all("all ranks of the default group in their order" in text for text in texts)
    assert f"got ranks {ranks} of {size}" in texts[0]


def test_no_nvshmem(job):
    job.available = False
    assert all("expected a torch that loads NVSHMEM" in text for text in refused(job))


def test_rocm(job, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert all("a torch that is for ROCm" in text for text in refused(job))


def test_no_device_library(job, monkeypatch):
    monkeypatch.undo()
    finder = SimpleNamespace(find_device_library=raiser(RuntimeError("NVSHMEM device library not found. Searched: []")))
    name = "torch.distributed._symmetric_memory._nvshmem_triton"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(NvshmemLibFinder=finder))
    with pytest.raises(UnsupportedError, match=r"not found. Searched: \[\]; install nvidia-nvshmem-cu13 \(or -cu12\)"):
        nvshmem.device_library()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    with pytest.raises(UnsupportedError, match="expected a torch that finds NVSHMEM's device library"):
        nvshmem.device_library()


def raiser(error):
    def fail():
        raise error

    return fail


def test_another_backend_in_use(job):
    job.in_use = True
    assert all("expected backend 'NVSHMEM'" in text and "got 'CUDA' in use" in text for text in refused(job))


def test_too_little_memory_on_one_rank(job):
    job.free[1] = NBYTES - 1
    texts = refused(job)
    expected = f"expected {NBYTES} free bytes on cuda:1 for symmetric memory, got {NBYTES - 1}; lower"
    assert texts[1].startswith(expected)
    assert texts[3] == f"rank 1 could not set up its memory: {texts[1]}"


def test_a_node_on_two_machines(job):
    job.machines[3] = "f" * 36
    assert all(
        "ranks_per_node=2: expected ranks 2 and 3 on one machine, got ranks on different machines" in text
        for text in refused(job)
    )


def test_two_ranks_with_one_device(job):
    job.devices[3] = "gpu-0"
    assert all("got gpu-0 on ranks 0 and 3" in text for text in refused(job))


def test_a_node_without_peer_access(job):
    job.apart = {(0, 2), (3, 2)}
    texts = refused(job)
    assert all("expected ranks 2 and 3 to have devices that access each other's memory" in text for text in texts)


def test_devices_that_need_a_flush_after_what_a_network_card_writes(job):
    job.orderings[2] = 0
    assert all("expected a device that sees a network's writes in order" in text for text in refused(job))


def test_sizes(job):
    texts = refused(job, ConfigMismatchError, nbytes=[NBYTES, NBYTES, NBYTES, 16])
    assert all("nbytes" in text for text in texts)
    assert "nbytes: expected at least 1, got 0" in refused(job, ArgumentError, nbytes=0)[0]


def test_a_cpu(job):
    assert "device: expected a CUDA device, got cpu" in refused(job, ArgumentError, device="cpu")[0]


# -- what goes wrong with the allocation itself ---------------------------------------------------------------------


def test_an_allocation_that_fails(job):
    job.full = True
    for error, _ in create(job):
        assert isinstance(error, UnsupportedError)
        assert f"NVSHMEM could not make a block of {NBYTES} bytes" in str(error)
        assert "nvshmem_malloc failed" in str(error)


def test_no_address_of_a_block_of_the_own_node(job):
    job.hidden = {3}
    results = [error for error, _ in create(job)]
    assert all(isinstance(error, UnsupportedError) for error in results)
    assert "expected an address of rank 3's block on rank 2" in str(results[2])
    assert str(results[0]) == f"rank 2 could not set up its memory: {results[2]}"


@pytest.mark.parametrize("stuck", [range(WORLD), range(2)], ids=["all ranks", "two of them"])
def test_a_start_that_never_ends(job, stuck):
    """No other rank ends either, so that the time may be short."""
    job.stuck = set(stuck)
    if len(stuck) < WORLD:  # NVSHMEM keeps the others until all are there
        job.met = SimpleNamespace(wait=lambda seconds: job.over.wait(SECONDS / 2))
    begin = time.monotonic()
    results = create(job, timeout=0.3)
    took = time.monotonic() - begin
    job.over.set()
    for rank, (error, calls) in enumerate(results):
        assert isinstance(error, moelink.NetworkTimeoutError)
        assert (error.rank, error.node, error.seconds) == (rank, rank // NODE, 0.3)
        assert f"rank {rank} of node {rank // NODE}: NVSHMEM's start (initialisation, " in str(error)
        assert "did not end: expected its end within 0.3 s, got none; start the job again" in str(error)
        assert calls == 4, "the exchanges are made to the end, so that no rank waits for another in them"
    assert took < SECONDS


def test_a_start_that_one_rank_does_not_end(job):
    """The others have started, and learn it from that rank."""
    job.stuck, job.met = {1}, threading.Barrier(WORLD - 1)
    job.allocated[1] = torch.zeros(NBYTES, dtype=torch.uint8)
    results = [error for error, _ in create(job, timeout=2.0)]
    job.over.set()
    assert isinstance(results[1], moelink.NetworkTimeoutError)
    assert "rank 1 could not set up its memory: rank 1 of node 0: NVSHMEM's start" in str(results[3])


def test_a_close_that_waits_for_kernels_that_never_end(job, monkeypatch):
    memory = create(job, timeout=SECONDS)[2][0]
    memory._seconds = 0.2
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: job.over.wait())
    with pytest.raises(
        moelink.NetworkTimeoutError, match="rank 2 of node 1: work of this rank's device, .* within 0.2 s"
    ):
        memory.close()
    job.over.set()
    memory.close()
    with pytest.raises(ClosedError):
        memory.peer(2)


# -- the network ----------------------------------------------------------------------------------------------------

SHAPE = dict(num_experts=8, topk=2, hidden_size=64, max_tokens_per_rank=4, world_size=WORLD)


def cuda_memory():
    return SimpleNamespace(
        rank=1, pointers=torch.tensor([10, 20, 30, 40]), local=SimpleNamespace(device=torch.device("cuda", 1))
    )


def test_kernels_get_the_library_and_their_modules_are_initialised(monkeypatch):
    monkeypatch.setattr(network, "device_library", lambda: "/somewhere/libnvshmem_device.bc")
    seen = []
    monkeypatch.setattr(network, "initialize_module", seen.append)
    workspace = Workspace(moelink.EPConfig(**SHAPE, ranks_per_node=NODE))
    made = network.connect(cuda_memory(), workspace, rank=1)
    assert isinstance(made, network.NvshmemNetwork)
    assert made.table.tolist() == [10, 20, 0, 0]
    assert made.options == {"extern_libs": (("libnvshmem_device", "/somewhere/libnvshmem_device.bc"),)}
    hash(tuple(made.options.items()))
    made.load(SimpleNamespace(module=1234))
    assert seen == [1234]
    made.close()


def test_one_node_needs_no_network():
    made = network.connect(cuda_memory(), Workspace(moelink.EPConfig(**SHAPE)), rank=1)
    assert isinstance(made, network.OneNode)
    assert (made.table.tolist(), made.options, made.tensors) == ([10, 20, 30, 40], {}, ())


def test_rocm_has_no_network_between_nodes(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    config = moelink.EPConfig(**SHAPE, ranks_per_node=NODE, transport="symmetric")
    with pytest.raises(UnsupportedError, match="a torch that is for ROCm"):
        network.connect(cuda_memory(), Workspace(config), rank=1)
    with pytest.raises(
        UnsupportedError, match=r"is for ROCm; leave out ranks_per_node=2, or use transport='collective'"
    ):
        choose_transport(config, [torch.device("cuda", 0)])
