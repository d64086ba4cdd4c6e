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
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moelink.errors import ArgumentError, UnsupportedError
from moelink.memory.blocks import Renewal, SymmetricMemory
from moelink.memory.in_place import begin_anew
from moelink.memory.processes import PROCESS_FIELDS, ProcessName
from moelink.memory.setup import MACHINE, NUMBER, Exchange, Schema, machine_id, refuse_other_places, set_up

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_SCHEMA: Schema = {
    "nbytes": NUMBER, "machine": MACHINE, "device": re.compile(r"[0-9a-zA-Z-]{1,64}"), **PROCESS_FIELDS,
}  # fmt: skip


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


class TorchMemory(SymmetricMemory):
    """Blocks on the CUDA devices of one machine, mapped into this process; ``pointers`` on this rank's device."""

    in_place = True

    def __init__(self, local: Tensor, handle: Any, processes: Sequence[ProcessName]) -> None:
        """Wrap a block and its rendezvous handle, which :meth:`create` makes. ``processes``: of each rank."""
        shape = (local.numel(),)
        super().__init__(handle.rank, [handle.get_buffer(r, shape, torch.uint8) for r in range(handle.world_size)])
        self.local = local  # owns the memory that get_buffer's view of it only borrows
        self._handle: Any = handle
        self._processes = dict(enumerate(processes))

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
            own = ProcessName.of_this().fields
            return {"nbytes": str(nbytes), "machine": machine, "device": device_uuid(device), **own}

        def accept(peers: list[dict[str, str]]) -> list[ProcessName]:
            refuse_other_places(peers)
            uuids = [fields["device"] for fields in peers]
            refuse_shared_devices(uuids)
            refuse_unreachable(uuids)
            return [ProcessName.of(fields) for fields in peers]

        rank, world_size = place_in(group)
        processes = set_up(
            exchange, kind="cuda", rank=rank, world_size=world_size, schema=_SCHEMA, prepare=prepare, accept=accept
        )
        try:
            with torch.cuda.device(device), without_multicast():
                return cls(block[0], _rendezvous(block[0], group), processes)
        except RuntimeError as error:
            raise UnsupportedError(
                f"expected torch to share memory between the devices of the group, got this error: {error}; use "
                "transport='collective'"
            ) from error

    def renew(self, members: Sequence[int], exchange: Exchange, fill: Callable[[Tensor], None]) -> Renewal:
        """Begin the block anew where it is, without ranks whose processes have ended. The blocks of those stay mapped.

        Raises:
            UnsupportedError: a rank among ``members`` is a newcomer, or a process of another one has not ended.
        """
        if not set(members) <= set(self._processes):
            raise UnsupportedError(
                f"admit: expected blocks that can be mapped at addresses of before, which are those of CPU ranks, got "
                f"blocks on {self.local.device}; use transport='collective', or make a new communicator"
            )
        leaving = {rank: process for rank, process in self._processes.items() if rank not in members}
        begin_anew(
            self.local, self.rank, members, leaving, exchange=exchange, fill=fill,
            synchronize=partial(torch.cuda.synchronize, self.local.device),
        )  # fmt: skip
        return _Emptied(self._processes, leaving)

    def close(self) -> None:
        """Unmap all blocks and free this rank's; waits for this device's kernels, for no peer. Safe to call twice.

        A peer that maps this rank's block may go on using it: the driver frees memory that no process maps.
        """
        if self._handle is not None:
            torch.cuda.synchronize(self.local.device)
        super().close()
        self._handle = None


class _Emptied:
    """A block that was written over (:class:`moelink.memory.blocks.Renewal`)."""

    def __init__(self, processes: dict[int, ProcessName], leaving: Collection[int]) -> None:
        self._processes, self._leaving = processes, tuple(leaving)

    def commit(self) -> None:
        """Forget the ranks that have left."""
        for rank in self._leaving:
            del self._processes[rank]

    def discard(self) -> None:
        """Leave it to the poison that no call uses it."""


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


def device_uuid(device: torch.device) -> str:
    """Return the device's own id: processes that see different sets of devices have different indices for one."""
    return str(torch.cuda.get_device_properties(device).uuid)


def refuse_shared_devices(uuids: Sequence[str]) -> None:
    """Raise UnsupportedError naming two ranks that use the same device. ``uuids`` are the devices of the ranks."""
    for b, uuid in enumerate(uuids):
        a = uuids.index(uuid)
        if a != b:
            raise UnsupportedError(
                f"expected a device of its own for each rank, got {uuid} on ranks {a} and {b}; give each rank its own"
            )


def refuse_unreachable(uuids: Sequence[str], first: int = 0) -> None:
    """Raise UnsupportedError naming two ranks whose devices cannot access each other.

    ``uuids`` are the devices of consecutive ranks from ``first`` on. Pairs that this process does not see
    (CUDA_VISIBLE_DEVICES) are left to torch.
    """
    index = {device_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    for a, b in itertools.combinations(range(len(uuids)), 2):
        ours, theirs = index.get(uuids[a]), index.get(uuids[b])
        if ours is None or theirs is None:
            continue
        for source, target in ((ours, theirs), (theirs, ours)):
            if not torch.cuda.can_device_access_peer(source, target):
                raise UnsupportedError(
                    f"expected ranks {first + a} and {first + b} to have devices that access each other's memory, got "
                    "no peer access (NVLink or PCIe); use transport='collective'"
                )


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
