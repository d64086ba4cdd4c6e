"""Keep the trace buffer of one rank while a trace is open."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.errors import UnsupportedError
from moelink.kernels.launch.grid import most_ctas
from moelink.memory.protocol import TRACE_AT
from moelink.memory.workspace import Workspace
from moelink.tracing.device.layout import buffer_shape

MOST_RANKS = 64
"""For rows that are their own signal, kernels keep a bit for each rank whose row is late."""


def require_traceable(config: EPConfig, workspace: Workspace, device: torch.device) -> None:
    """Raise UnsupportedError if kernels cannot be traced."""
    if config.mode != "alltoall":
        raise UnsupportedError(
            f"trace: expected mode 'alltoall', in which ranks wait for one another, got {config.mode!r}; use "
            "mode='alltoall'"
        )
    if workspace.inter_node_ranks:
        raise UnsupportedError(
            f"trace: expected ranks of one node, which can compare their clocks, got nodes of {workspace.node_size} "
            f"ranks among {workspace.world_size}; use the ranks of one node"
        )
    if workspace.world_size > MOST_RANKS:
        raise UnsupportedError(
            f"trace: expected at most {MOST_RANKS} ranks, got {workspace.world_size}; use fewer ranks"
        )
    if device.type == "cuda" and torch.version.hip is not None:
        raise UnsupportedError("trace: expected an NVIDIA GPU or a CPU, got an AMD GPU; use one of these")


class TraceBuffer:
    """The stamps of one rank.

    Attributes:
        ctas: most CTAs of a role that have a record.
        words: the buffer, in the layout of ``tracing.device.layout``.
    """

    def __init__(self, world_size: int, control: Tensor) -> None:
        """``control``: the rank's control words, by which its kernels find the buffer."""
        self.ctas = most_ctas(control.device)
        self.words = torch.zeros(buffer_shape(world_size, self.ctas), dtype=torch.int64, device=control.device)
        self._control = control
        control[TRACE_AT] = self.words.data_ptr()

    def in_form(self, spec: Any) -> Any:
        """Return ``spec`` with stamps."""
        return dataclasses.replace(spec, TRACE=True, TRACE_CTAS=self.ctas)

    def close(self) -> Tensor:
        """End the stamps of kernels, and return the buffer on the host. Calls must be over."""
        self._control[TRACE_AT] = 0
        return self.words.cpu()
