"""Allocate symmetric memory of ranks on several nodes, one CUDA device each, by torch's NVSHMEM backend.

Ranks of a node address one another's blocks; NVSHMEM's device functions carry bytes to the others
(``kernels.nodes.internode``). Reasons for the uses of ``torch.distributed._symmetric_memory``:

* NVSHMEM numbers the processes of the *job*: torch initialises it, once a process, with the default group's ranks. So
  a communicator must be all of that group, in its order; then NVSHMEM's number of a process is its rank.
* Allocation is collective over the job (``nvshmem_malloc``), and so is the release: torch 2.11 calls ``nvshmem_free``
  with the last reference to the tensor, and every process waits there for all others. So **a block is never
  released**: one reference to it is leaked on purpose, and its memory returns when the process ends.
* A process has one backend: "NVSHMEM" is set before the block is made, and the process can make no communicators of
  one node (``torch_symm``) afterwards.
* Nothing has a time limit. So the start (initialisation, allocation, the barrier of the rendezvous) and the wait of
  ``close`` for this device's kernels run under a watchdog (:mod:`moelink.memory.nodes.watchdog`).
* NVSHMEM's own use of NVLink multicast is off while it starts, unless its variable is set.

NVSHMEM promises that data put before a signal is *visible* to waits by its own functions, which on some platforms flush
something first. Kernels here wait by themselves. So with ranks on several machines each device has to see writes of a
network card in order (CUDA: GPUDirect RDMA writes ordering "owner" or better).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moelink.errors import ArgumentError, NetworkTimeoutError, UnsupportedError
from moelink.memory.blocks import SymmetricMemory
from moelink.memory.driver import device_uuid, refuse_shared_devices, refuse_unreachable
from moelink.memory.nodes.watchdog import within
from moelink.memory.setup import MACHINE, NUMBER, Exchange, Schema, machine_id, refuse_other_sizes, set_up
from moelink.memory.torch_symm import Members, place_in, symmetric_memory_module, without_multicast

BACKEND = "NVSHMEM"
_START = "NVSHMEM's start (initialisation, allocation and barrier of all ranks)"
_KERNELS = "work of this rank's device, in which puts may wait for room in NVSHMEM's queues,"
_CLOSE_SECONDS = 60.0
_MULTICAST_OFF = "NVSHMEM_DISABLE_NVLS"
_WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
_ORDERED_FOR_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_DEVICE = re.compile(r"[0-9a-zA-Z-]{1,64}")
_SCHEMA: Schema = {"nbytes": NUMBER, "machine": MACHINE, "device": _DEVICE, "ordering": NUMBER}


class NvshmemMemory(SymmetricMemory):
    """Blocks on the CUDA devices of a job. ``pointers`` has the blocks of this rank's node; NVSHMEM's device functions
    reach the others by the address in the own block."""

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        device: torch.device,
        group: ProcessGroup | Members,
        ranks_per_node: int,
        exchange: Exchange,
        timeout: float,
    ) -> NvshmemMemory:
        """Make this rank's block on ``device`` and map those of its node. Collective over ``group``.

        Two exchanges come before the allocation, so that all ranks refuse alike, and two after it, so that no rank uses
        a block that another has not zeroed or could not map. In between NVSHMEM is initialised and allocates,
        collectively. If a rank dies there, the others' watchdogs end their waits.

        Args:
            nbytes: bytes of each block, at least 1, the same on every rank.
            device: this rank's CUDA device, another for each rank.
            group: the whole default world of ``torch.distributed``, in rank order.
            ranks_per_node: consecutive ranks on one machine, which address each other's blocks.
            exchange: bounded all-gather of byte strings over the same ranks, called two or four times.
            timeout: seconds within which NVSHMEM has to start.

        Raises:
            ArgumentError: ``nbytes`` is not positive, or ``device`` is no CUDA device.
            ConfigMismatchError: ranks passed different ``nbytes``.
            UnsupportedError: no NVSHMEM here, another backend is in use, ranks other than the whole world, too little
                memory, ranks of a node on different machines or out of each other's reach; on all ranks, naming them.
            ProtocolError: a peer's record is malformed.
            NetworkTimeoutError: NVSHMEM did not start in time. If it holds the interpreter's lock, the watchdog writes
                this error to standard error and ends the process.
        """
        rank, world_size = place_in(group)
        before: list[Any] = []

        def prepare() -> dict[str, str]:
            if nbytes < 1:
                raise ArgumentError("nbytes", "at least 1", nbytes)
            if device.type != "cuda":
                raise ArgumentError("device", "a CUDA device", device)
            _refuse_part_of_the_world(group)
            refuse_rocm(ranks_per_node)
            if not symmetric_memory_module().is_nvshmem_available():
                raise UnsupportedError(
                    "transport='symmetric' between nodes: expected a torch that loads NVSHMEM (CUDA builds from 2.10 "
                    "on bring nvidia-nvshmem), got one that does not; install such a build, or use "
                    "transport='collective'"
                )
            device_library()
            free = torch.cuda.mem_get_info(device)[0]
            if nbytes > free:
                raise UnsupportedError(
                    f"expected {nbytes} free bytes on {device} for symmetric memory, got {free}; lower "
                    "max_tokens_per_rank, or free memory"
                )
            before.append(_set_backend(device))
            fields = (nbytes, machine_id(), device_uuid(device), _writes_ordering(device))
            return dict(zip(_SCHEMA, map(str, fields), strict=True))

        try:
            set_up(
                exchange, kind="nvshmem", rank=rank, world_size=world_size, schema=_SCHEMA, prepare=prepare,
                accept=lambda peers: _refuse_places(peers, ranks_per_node),
            )  # fmt: skip
        except BaseException:
            if before and before[0] is not None:  # nothing was allocated yet
                symmetric_memory_module().set_backend(before[0])
            raise
        made: list[tuple[Tensor, Any]] = []
        failure: RuntimeError | None = None
        try:
            start = partial(_allocate, nbytes, device, group)
            made.append(within(timeout, _START, start, rank=rank, node=rank // ranks_per_node))
        except RuntimeError as error:
            failure = error

        def view() -> dict[str, str]:
            if isinstance(failure, NetworkTimeoutError):
                raise failure
            if not made:
                raise UnsupportedError(
                    f"NVSHMEM could not make a block of {nbytes} bytes on {device}: expected memory, got this error: "
                    f"{failure}; set NVSHMEM_SYMMETRIC_SIZE higher, lower max_tokens_per_rank, or use "
                    "transport='collective'"
                )
            for peer, address in enumerate(made[0][1].buffer_ptrs):
                if peer // ranks_per_node == rank // ranks_per_node and not address:
                    raise UnsupportedError(
                        f"ranks_per_node={ranks_per_node}: expected an address of rank {peer}'s block on rank {rank}, "
                        "of the same node, got none from NVSHMEM (no peer access, or NVSHMEM_DISABLE_P2P is set); "
                        "use transport='collective'"
                    )
            return {}

        set_up(
            exchange, kind="nvshmem-block", rank=rank, world_size=world_size, schema={}, prepare=view,
            accept=lambda peers: None,
        )  # fmt: skip
        return cls(*made[0], rank=rank, ranks_per_node=ranks_per_node, timeout=timeout)

    def __init__(self, local: Tensor, handle: Any, *, rank: int, ranks_per_node: int, timeout: float) -> None:
        """Wrap a block and its rendezvous handle, which :meth:`create` makes."""
        node = rank // ranks_per_node
        blocks: list[Tensor | None] = [
            handle.get_buffer(peer, (local.numel(),), torch.uint8) if peer // ranks_per_node == node else None
            for peer in range(handle.world_size)
        ]
        blocks[rank] = local
        super().__init__(rank, blocks)
        self._handle: Any = handle
        self._node, self._seconds = node, max(timeout, _CLOSE_SECONDS)

    def close(self) -> None:
        """Let go of all blocks; waits for this device's kernels, for no peer. Safe to call twice.

        The memory stays allocated until the process ends, so puts that are still under way to this rank do no harm.

        Raises:
            NetworkTimeoutError: kernels are still under way after a minute, or after the timeout if that is longer.
                Their memory is kept for as long as the process lives.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            wait = partial(torch.cuda.synchronize, self.local.device)
            try:
                within(self._seconds, _KERNELS, wait, rank=self.rank, node=self._node, kills=False)
            except NetworkTimeoutError:
                for used in (handle, self.pointers):
                    _keep(used)
                raise
            finally:
                super().close()


def device_library() -> str:
    """Return the path of NVSHMEM's device functions, ``libnvshmem_device.bc``, by torch's own search.

    Raises:
        UnsupportedError: torch does not find it, or has no search for it.
    """
    advice = (
        "; install nvidia-nvshmem-cu13 (or -cu12), the version that this torch names, or set NVSHMEM_LIB_DIR to the "
        "folder with libnvshmem_device.bc, or use transport='collective'"
    )
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory._nvshmem_triton")
        return str(module.NvshmemLibFinder.find_device_library())
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"expected a torch that finds NVSHMEM's device library, got one that does not ({error}){advice}"
        ) from error
    except RuntimeError as error:
        raise UnsupportedError(f"expected NVSHMEM's device library, got this error: {error}{advice}") from error


def initialize_module(module: int) -> None:
    """Make NVSHMEM known to a CUDA module (its handle) with NVSHMEM's device functions, before any launch."""
    importlib.import_module("torch._C._distributed_c10d")._nvshmemx_cumodule_init(module)


def _refuse_part_of_the_world(group: ProcessGroup | Members) -> None:
    """Raise UnsupportedError unless the ranks of ``group`` are all ranks of the default world, in its order."""
    if isinstance(group, Members):
        raise UnsupportedError(
            "transport='symmetric' between nodes: expected all processes of the job, which NVSHMEM numbers, got "
            "survivors of one; start the job again, or use transport='collective'"
        )
    ranks, size = dist.get_process_group_ranks(group), dist.get_world_size()
    if ranks != list(range(size)):
        raise UnsupportedError(
            "transport='symmetric' between nodes: expected all ranks of the default group in their order, because "
            f"NVSHMEM numbers the processes of the job, got ranks {ranks} of {size}; use transport='collective'"
        )


def refuse_rocm(ranks_per_node: int) -> None:
    """Raise UnsupportedError if torch is for ROCm, which NVSHMEM does not know."""
    if torch.version.hip:
        raise UnsupportedError(
            "transport='symmetric' between nodes: expected NVSHMEM and CUDA, got a torch that is for ROCm; leave out "
            f"ranks_per_node={ranks_per_node}, or use transport='collective'"
        )


def _set_backend(device: torch.device) -> Any:
    """Choose NVSHMEM for this process; return the backend before it, None if that was NVSHMEM."""
    module = symmetric_memory_module()
    backend = module.get_backend(device)
    if backend == BACKEND:
        return None
    try:
        module.set_backend(BACKEND)
    except RuntimeError as error:
        raise UnsupportedError(
            f"expected backend {BACKEND!r} for torch's symmetric memory, of which a process has one, got {backend!r} "
            f"in use ({error}); make the communicator with ranks_per_node first and no other of one node, or use "
            "transport='collective'"
        ) from error
    return backend or "CUDA"


def _writes_ordering(device: torch.device) -> int:
    """Return CUDA's ordering of network cards' writes for ``device``: 0 none, 100 for it alone, 200 for all devices."""
    index = torch.cuda.current_device() if device.index is None else device.index
    handle, value = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(
            f"expected the CUDA driver's library libcuda.so.1, got this error: {error}; install the driver"
        ) from error
    failed = driver.cuDeviceGet(ctypes.byref(handle), index)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), _WRITES_ORDERING, handle)
    return 0 if failed else value.value


def _refuse_places(peers: list[dict[str, str]], size: int) -> None:
    """Raise unless all ranks ask for the same size, and the ``size`` ranks of each node reach each other."""
    refuse_other_sizes(peers)
    machines = [fields["machine"] for fields in peers]
    uuids = {rank: fields["device"] for rank, fields in enumerate(peers)}
    refuse_shared_devices(uuids)
    for first in range(0, len(peers), size):
        for rank in range(first, first + size):
            if machines[rank] != machines[first]:
                raise UnsupportedError(
                    f"ranks_per_node={size}: expected ranks {first} and {rank} on one machine, got ranks on different "
                    "machines; number ranks node by node, or use transport='collective'"
                )
        refuse_unreachable({rank: uuids[rank] for rank in range(first, first + size)})
    for rank, fields in enumerate(peers):
        if len(set(machines)) > 1 and int(fields["ordering"]) < _ORDERED_FOR_OWNER:
            raise UnsupportedError(
                "expected a device that sees a network's writes in order (CUDA's GPUDirect RDMA writes ordering of "
                f"at least {_ORDERED_FOR_OWNER}), got {fields['ordering']} on rank {rank}; use transport='collective'"
            )


def _allocate(nbytes: int, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """Return [nbytes] uint8 zeros, which are never released, and the rendezvous handle. Collective over the job."""
    module = symmetric_memory_module()
    quiet = nullcontext() if _MULTICAST_OFF in os.environ else without_multicast(_MULTICAST_OFF)
    with torch.cuda.device(device), quiet:
        torch.cuda.synchronize(device)  # gives this thread the device's context, which NVSHMEM asks for
        block: Tensor = module._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        _keep(block)
        block.zero_()
        torch.cuda.synchronize(device)
        return block, module.rendezvous(block, group)


def _keep(used: object) -> None:
    """Never release ``used``, a block for example, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(used))
