"""Define symmetric memory, one block of equal size on every rank, and allocate it inside one process.

The other files allocate it between processes. A process that has all ranks has their blocks on CPUs, or on CUDA devices
with peer access.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moelink.errors import ArgumentError, ClosedError, UnsupportedError
from moelink.memory.setup import Exchange


class Renewal(Protocol):
    """New blocks that are prepared."""

    def commit(self) -> None:
        """Put the new blocks in the place of the old ones."""

    def discard(self) -> None:
        """Give the new blocks up. Safe after :meth:`commit`."""


class SymmetricMemory:
    """One rank's view of the blocks of all ranks.

    Attributes:
        rank: this rank.
        world_size: number of blocks.
        nbytes: bytes of each block.
        local: [nbytes] uint8, this rank's block, zero at creation. Empty after :meth:`close`.
        pointers: [world_size] int64 on the device of ``local``: each block's address, valid in this process and on that
            device, 0 for blocks that cannot be addressed. Zeros after :meth:`close`.
    """

    def __init__(self, rank: int, blocks: Sequence[Tensor | None]) -> None:
        """View ``blocks``, one [nbytes] uint8 tensor per rank, as rank ``rank``; None for a block that cannot be
        addressed."""
        local = blocks[rank]
        if local is None:
            raise ArgumentError("blocks", f"this rank's own block at {rank}", None)
        self.rank, self.world_size, self.nbytes = rank, len(blocks), local.numel()
        self.local = local
        self._blocks = list(blocks)
        addresses = [0 if block is None else block.data_ptr() for block in blocks]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=local.device)

    def peer(self, rank: int) -> Tensor:
        """View rank ``rank``'s block, [nbytes] uint8, in this process.

        Raises:
            ClosedError: after :meth:`close`.
            ArgumentError: there is no such rank, or its block cannot be addressed.
        """
        if not self._blocks:
            raise ClosedError("peer")
        if not 0 <= rank < self.world_size:
            raise ArgumentError("rank", f"a rank in [0, {self.world_size})", rank)
        block = self._blocks[rank]
        if block is None:
            raise ArgumentError("rank", f"a rank of the node of rank {self.rank}", rank)
        return block

    def renew(self, members: Sequence[int], exchange: Exchange, fill: Callable[[Tensor], None]) -> Renewal:
        """Prepare new blocks at the addresses of these, for the ranks ``members``. Collective over them.

        ``exchange``: over the members, called exactly twice. ``fill`` writes what the new own block begins with, and
        is given zeros. Until :meth:`Renewal.commit` nothing has changed.

        Raises:
            UnsupportedError: memory of this kind cannot begin anew, or not with these members.
        """
        raise UnsupportedError(
            "mask: expected blocks that can begin anew, which are those of processes of one machine, got "
            f"{type(self).__name__} on {self.local.device}; use transport='collective', or recover(ranks), which makes "
            "a new communicator"
        )

    def close(self) -> None:
        """Release all blocks. Waits for no peer; safe to call twice.

        A block's memory is freed when the last rank has released it. A view that the caller holds keeps that block
        mapped. Kernels must not use earlier ``pointers``.
        """
        self._blocks = []
        self.local = self.local.new_empty(0)
        self.pointers = torch.zeros_like(self.pointers)


class SingleProcessMemory(SymmetricMemory):
    """One rank's view of blocks that all live in this process; a block is free once every rank's view is closed."""


def create_all(devices: Sequence[torch.device | str], nbytes: int) -> list[SymmetricMemory]:
    """Allocate zeroed blocks for ``len(devices)`` ranks, rank r's on ``devices[r]``; return each rank's view of them.

    Args:
        devices: all CPU (any number) or all CUDA; a device may be listed more than once.
        nbytes: bytes of each block, at least 1.

    Raises:
        ArgumentError: no devices, devices of several kinds or of a kind that is not supported, ``nbytes`` below 1.
        UnsupportedError: two of the CUDA devices, named, cannot reach each other.
    """
    places = [_with_index(torch.device(device)) for device in devices]
    kinds = sorted({place.type for place in places})
    if kinds not in (["cpu"], ["cuda"]):
        raise ArgumentError("devices", "CPU devices only or CUDA devices only", ", ".join(map(str, places)) or "none")
    if nbytes < 1:
        raise ArgumentError("nbytes", "at least 1", nbytes)
    _enable_peer_access([place for place in dict.fromkeys(places) if place.type == "cuda"])
    blocks = [torch.zeros(nbytes, dtype=torch.uint8, device=place) for place in places]
    memories: list[SymmetricMemory] = [SingleProcessMemory(rank, blocks) for rank in range(len(blocks))]
    _synchronize(places)  # a peer's kernel must find zeros
    return memories


def _with_index(device: torch.device) -> torch.device:
    """Return ``cuda`` as ``cuda:<current>``, so that equal devices compare equal."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _enable_peer_access(devices: Sequence[torch.device]) -> None:
    """Let kernels on each of ``devices`` address the memory of all the others.

    Torch enables peer access, once per ordered pair and for all memory of its allocator (expandable segments and
    ``cudaMallocAsync`` included, which the driver's own call does not cover), when it first copies between two devices.
    So one byte is copied in both directions of every pair.
    """
    pairs = [(a, b) for a in devices for b in devices if a != b]
    for a, b in pairs:
        if not torch.cuda.can_device_access_peer(a, b):
            raise UnsupportedError(
                f"expected peer access between all devices, got none from {a} to {b}; use transport='collective'"
            )
    bytes_of = {device: torch.zeros(1, dtype=torch.uint8, device=device) for device in devices}
    for a, b in pairs:
        bytes_of[a].copy_(bytes_of[b])
    _synchronize(devices)


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
