"""Addresses of the contract's buffers: [dispatch, combine] x [send, recv, recv_count], for each rank."""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.memory.workspace import Workspace

DISPATCH, COMBINE = 0, 1
"""Groups: first index of ``dev_ptrs`` and ``pointers``."""

SEND, RECV, RECV_COUNT = 0, 1, 2
"""Buffers of a group: second index."""

REGIONS = (("messages", "counts"), ("rows", "combine_flag"))
"""Regions that (recv, recv_count) of each group are."""


STAGED = ("staged_messages", "staged_rows")
"""Regions that send of each group is, across nodes."""


def pointer_table(workspace: Workspace, blocks: Tensor) -> Tensor:
    """[2 groups, 3 buffers, n] int64 addresses in the blocks at ``blocks`` [n]: W of them, 0 for those of other nodes,
    and what else a network's table holds (:class:`~moelink.memory.network.Network`), which stays as it is.

    send is 0 inside a node, where it does not exist.

    Example: a block at 4096 whose messages start at byte 1024 has recv of group 0 at 5120.
    """
    regions, there = workspace.regions, blocks != 0
    there[workspace.world_size :] = False
    tables = []
    for staged, names in zip(STAGED, REGIONS, strict=True):
        send = [torch.zeros_like(blocks) if not workspace.far_ranks else blocks + there * regions[staged].offset]
        tables.append(torch.stack(send + [blocks + there * regions[name].offset for name in names]))
    return torch.stack(tables)
