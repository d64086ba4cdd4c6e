"""Choose a communicator's transport from its configuration, devices and machines. The choice never changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelink.config import EPConfig, TransportName
from moelink.errors import UnsupportedError
from moelink.memory.nodes.nvshmem import refuse_rocm


def choose_transport(config: EPConfig, devices: Sequence[torch.device], machines: int = 1) -> TransportName:
    """Choose the transport for ``config.transport`` and ranks on ``devices``, spread over ``machines`` machines.

    ``"auto"`` is symmetric on CUDA devices of one machine and collective everywhere else.

    Raises:
        UnsupportedError: ``"symmetric"`` was asked for, and no memory or network reaches all ranks.
    """
    nodes = config.world_size // config.node_size
    spread = machines > 1 or nodes > 1
    if config.transport == "symmetric" and config.mode == "alltoall":
        if machines > 1 and nodes == 1:
            raise UnsupportedError(
                f"transport='symmetric': expected ranks_per_node for ranks on {machines} machines, got "
                f"{config.ranks_per_node}; pass the number of ranks that can address each other's memory, or use "
                "transport='collective'"
            )
        if machines > 1 and any(device.type != "cuda" for device in devices):
            raise UnsupportedError(
                f"transport='symmetric': expected all {config.world_size} ranks on one machine for CPUs, got "
                f"{machines} machines; use transport='collective'"
            )
        if nodes > 1 and devices[0].type == "cuda":
            refuse_rocm(config.node_size)
        if nodes > 1 and len(devices) > 1 and devices[0].type == "cuda":
            raise UnsupportedError(
                f"ranks_per_node: expected None for one process, whose {len(devices)} devices are in one node, got "
                f"{config.ranks_per_node}; leave it out, or use transport='collective'"
            )
        if config.two_level and len(devices) > 1:
            raise UnsupportedError(
                f"two_level: expected False for one process with {len(devices)} ranks on CPUs, which run one after the "
                "other and cannot wait for one another's forwarders, got True; start a process for each rank, or leave "
                "it out"
            )
    if config.transport != "auto":
        return config.transport
    on_cuda = all(device.type == "cuda" for device in devices)
    return "symmetric" if on_cuda and not spread else "collective"
