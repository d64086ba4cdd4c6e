"""Build the table of the contract's buffers: addresses [dispatch, combine] x [send, recv, recv_count] for each rank."""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.memory.workspace import Workspace

DISPATCH, COMBINE = 0, 1
"""Groups: the first index of ``dev_ptrs`` and ``pointers``."""

SEND, RECV, RECV_COUNT = 0, 1, 2
"""Buffers of a group: the second index."""

REGIONS = (("messages", "counts"), ("rows", "combine_flag"))
"""Regions of (recv, recv_count) of each group."""

STAGED = ("staged_messages", "staged_rows")
"""Region of send of each group, between nodes; with two levels ``staged_relays`` in place of the first."""


def pointer_table(workspace: Workspace, blocks: Tensor) -> Tensor:
    """Add the buffers' offsets to the addresses ``blocks`` [n] of the ranks' blocks: [2 groups, 3 buffers, n] int64.

    The first world_size entries of ``blocks`` are addresses, 0 for blocks of other nodes. Entries behind them, which a
    network's table has (:class:`~moelink.memory.nodes.network.Network`), are returned unchanged. Within one node there
    are no send buffers: their entries are 0.

    Example: a block at 4096 whose messages start at byte 1024 has recv of group 0 at 5120.
    """
    regions, there = workspace.regions, blocks != 0
    there[workspace.world_size :] = False
    tables = []
    stagings = ("staged_relays", STAGED[COMBINE]) if workspace.two_level else STAGED
    for staged, names in zip(stagings, REGIONS, strict=True):
        send = [torch.zeros_like(blocks) if not workspace.inter_node_ranks else blocks + there * regions[staged].offset]
        tables.append(torch.stack(send + [blocks + there * regions[name].offset for name in names]))
    return torch.stack(tables)
