"""Implement the common part of symmetric memory: one block per rank, and the table of their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moelink.errors import ArgumentError, ClosedError


class Blocks:
    """One rank's view of mapped blocks (implements :class:`~moelink.memory.base.SymmetricMemory`).

    Attributes:
        rank: this rank.
        world_size: number of blocks.
        nbytes: bytes of each block.
        local: [nbytes] uint8, this rank's block, zero at creation. Empty after :meth:`close`.
        pointers: [world_size] int64 on the device of ``local``: each block's address, valid in this process and on that
            device, 0 where a block cannot be addressed. Zeros after :meth:`close`.
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

    def close(self) -> None:
        """Release all blocks. Waits for no peer; safe to call twice.

        A block's memory is freed when the last rank has released it. A view that the caller holds keeps that block
        mapped. Kernels must not use ``pointers`` read before.
        """
        self._blocks = []
        self.local = self.local.new_empty(0)
        self.pointers = torch.zeros_like(self.pointers)
