"""Which transport a communicator gets: a function of configuration and machines alone. It never changes afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelink.config import EPConfig, TransportName
from moelink.errors import UnsupportedError


def choose_transport(config: EPConfig, devices: Sequence[torch.device], machines: int = 1) -> TransportName:
    """The transport that ``config.transport`` means for ranks on ``devices``, spread over ``machines`` machines.

    ``"auto"`` is symmetric on CUDA devices of one machine and collective everywhere else.

    Raises:
        UnsupportedError: ``"symmetric"`` was asked for across machines.
    """
    spread = machines > 1 or config.ranks_per_node not in (None, config.world_size)
    if config.transport == "symmetric" and spread and config.mode == "alltoall":
        raise UnsupportedError(
            f"transport='symmetric' needs all {config.world_size} ranks on one machine, there are {machines} "
            f"(ranks_per_node={config.ranks_per_node}); use transport='collective'"
        )
    if config.transport != "auto":
        return config.transport
    on_cuda = all(device.type == "cuda" for device in devices)
    return "symmetric" if on_cuda and not spread else "collective"
