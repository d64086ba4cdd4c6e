"""Declare symmetric memory: one block of equal size on every rank, addressable by peers of the node."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SymmetricMemory(Protocol):
    """One rank's view of the blocks of all ranks.

    Attributes:
        rank: this rank.
        world_size: number of blocks.
        nbytes: bytes of each block.
        local: this rank's block, one-dimensional uint8, zero at creation.
        pointers: [world_size] int64 on the block's device: the address, valid in this process and on this device, of
            each rank's block (0 where a peer's block cannot be addressed).
    """

    rank: int
    world_size: int
    nbytes: int
    local: Tensor
    pointers: Tensor

    def peer(self, rank: int) -> Tensor:
        """View rank ``rank``'s block, [nbytes] uint8, in this process."""

    def close(self) -> None:
        """Unmap everything and release this rank's block. Safe to call twice."""
