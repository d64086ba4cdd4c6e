"""Allocate symmetric memory between processes with a CUDA device each, by ``torch.distributed._symmetric_memory``.

Only this file and ``memory.nodes.nvshmem`` touch that module, which torch calls alpha. Reasons for the uses:

* Blocks come straight from its allocator (``empty_strided_p2p``). Newer versions of ``symm_mem.empty`` take them from a
  pool that keeps freed memory *and its rendezvous*: after a ``close`` one rank could reuse an old rendezvous while
  another waits for a new one, and memory would never be given back.
* Addresses come from ``get_buffer``: ``buffer_ptrs`` are those of the allocation, not of the block.
* NVLink multicast is off while blocks are made: it is not used here, and some machines fail when it is set up.
* The backend must be torch's default, "CUDA": freeing an NVSHMEM block is collective, and ``close`` waits for no peer.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moelink.errors import ArgumentError, UnsupportedError
from moelink.memory.cuda_blocks import CudaMemory
from moelink.memory.driver import DEVICE, CudaDriver, device_uuid, refuse_shared_devices, refuse_unreachable
from moelink.memory.setup import MACHINE, NUMBER, Exchange, Schema, machine_id, refuse_other_places, set_up

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_SCHEMA: Schema = {"nbytes": NUMBER, "machine": MACHINE, "device": DEVICE}


@dataclass(frozen=True)
class Members:
    """Ranks that form no ProcessGroup of torch's: the survivors of one.

    Attributes:
        rank, world_size: this rank among them, and their number.
        store: theirs alone.
        name: the same on every rank, and never used before in any of these processes.
    """

    rank: int
    world_size: int
    store: Any
    name: str


def place_in(group: ProcessGroup | Members) -> tuple[int, int]:
    """Return this rank in ``group``, and the number of ranks."""
    return (group.rank, group.world_size) if isinstance(group, Members) else (group.rank(), group.size())


class TorchMemory(CudaMemory):
    """Blocks on the CUDA devices of one machine, mapped into this process; ``pointers`` on this rank's device."""

    def __init__(self, local: Tensor, handle: Any) -> None:
        """Wrap a block and its rendezvous handle, which :meth:`create` makes."""
        blocks = [handle.get_buffer(r, (local.numel(),), torch.uint8) for r in range(handle.world_size)]
        super().__init__(handle.rank, blocks, cache(partial(CudaDriver, local.device)))
        self.local = local  # owns the memory that get_buffer's view of it only borrows
        self._handle: Any = handle

    @classmethod
    def create(
        cls, nbytes: int, *, device: torch.device, group: ProcessGroup | Members, exchange: Exchange
    ) -> TorchMemory:
        """Make this rank's block on ``device`` and map those of all ranks. Collective over ``group``.

        After the two exchanges all ranks go on, or all raise. Then only the timeout of the group's store bounds torch's
        rendezvous.

        Args:
            nbytes: bytes of each block, at least 1, the same on every rank.
            device: this rank's CUDA device, another for each rank.
            group: the ranks that take part; only its store is used, so it needs no backend (:class:`Members`).
            exchange: bounded all-gather of byte strings over the same ranks, called exactly twice.

        Raises:
            ArgumentError: ``nbytes`` is not positive, or ``device`` is no CUDA device.
            ConfigMismatchError: ranks passed different ``nbytes``.
            UnsupportedError: torch lacks the module, there is too little memory, ranks are on different machines or
                share a device, or two devices cannot reach each other; raised on all ranks, naming the two.
            ProtocolError: a peer's record is malformed.
        """
        block: list[Tensor] = []

        def prepare() -> dict[str, str]:
            if nbytes < 1:
                raise ArgumentError("nbytes", "at least 1", nbytes)
            if device.type != "cuda":
                raise ArgumentError("device", "a CUDA device", device)
            machine = machine_id()
            block.append(_allocate(nbytes, device))
            return {"nbytes": str(nbytes), "machine": machine, "device": device_uuid(device)}

        def accept(peers: list[dict[str, str]]) -> None:
            refuse_other_places(peers)
            uuids = dict(enumerate(fields["device"] for fields in peers))
            refuse_shared_devices(uuids)
            refuse_unreachable(uuids)

        rank, world_size = place_in(group)
        set_up(exchange, kind="cuda", rank=rank, world_size=world_size, schema=_SCHEMA, prepare=prepare, accept=accept)
        try:
            with torch.cuda.device(device), without_multicast():
                return cls(block[0], _rendezvous(block[0], group))
        except RuntimeError as error:
            raise UnsupportedError(
                f"expected torch to share memory between the devices of the group, got this error: {error}; use "
                "transport='collective'"
            ) from error

    def close(self) -> None:
        """Unmap all blocks and free this rank's; waits for this device's kernels, for no peer. Safe to call twice.

        A peer that maps this rank's block may go on using it: the driver frees memory that no process maps.
        """
        if self._handle is not None:
            torch.cuda.synchronize(self.local.device)
        super().close()
        self._handle = None


def symmetric_memory_module() -> Any:
    """Return ``torch.distributed._symmetric_memory``. Raises UnsupportedError if this torch was built without it."""
    try:
        return importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        raise UnsupportedError(
            f"expected a torch with symmetric memory, got one without ({error}); use transport='collective'"
        ) from error


def _rendezvous(block: Tensor, group: ProcessGroup | Members) -> Any:
    module = symmetric_memory_module()
    if not isinstance(group, Members):
        return module.rendezvous(block, group)
    # Torch asks its registry of groups for the store, so a group without a backend is registered meanwhile.
    registry = importlib.import_module("torch._C._distributed_c10d")
    members: Any = ProcessGroup(group.store, group.rank, group.world_size)
    members._set_group_name(group.name)
    registry._register_process_group(group.name, members)
    try:
        return module._SymmetricMemory.rendezvous(block, group.name)
    finally:
        registry._unregister_process_group(group.name)


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    """Return [nbytes] uint8 zeros that can be shared, written before a peer can map them."""
    module = symmetric_memory_module()
    backend = module.get_backend(device)
    if backend != "CUDA":
        raise UnsupportedError(
            f"torch's symmetric memory on {device}: expected backend 'CUDA' for ranks of one node, got {backend!r} (a "
            "process has one backend, and a communicator with ranks_per_node sets 'NVSHMEM'); use "
            "transport='collective'"
        )
    try:
        with torch.cuda.device(device), without_multicast():
            block: Tensor = module._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        block.zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise UnsupportedError(
            f"expected {nbytes} bytes of symmetric memory on {device}, got this error: {error}; lower "
            "max_tokens_per_rank, free memory, or use transport='collective'"
        ) from error
    return block


@contextmanager
def without_multicast(switch: str = _MULTICAST_OFF) -> Iterator[None]:
    """Set the environment variable ``switch``, which turns NVLink multicast off, and restore it afterwards."""
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before
