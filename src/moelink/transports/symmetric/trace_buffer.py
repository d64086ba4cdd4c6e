"""Keep the trace buffer of one rank while a trace is open, and compare the clocks of ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.errors import UnsupportedError
from moelink.kernels.launch.constants import combine_spec
from moelink.kernels.launch.grid import most_ctas
from moelink.kernels.sync.clocks import ClockNumbers, ep_compare_clocks_kernel
from moelink.memory.protocol import TRACE_AT
from moelink.memory.trace_layout import buffer_shape
from moelink.memory.workspace import Workspace

if TYPE_CHECKING:
    from moelink.transports.symmetric.rank import Rank

MOST_RANKS = 64
"""Where rows are their own signal, kernels keep a bit for each rank whose row is late."""
ROUNDS = 32
"""Questions to each rank in a comparison of clocks."""


def require_traceable(config: EPConfig, workspace: Workspace, device: torch.device) -> None:
    """Raise UnsupportedError where kernels cannot be traced."""
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
    """Where the stamps of one rank go.

    Attributes:
        ctas: most CTAs of a role that have a record.
        words: the buffer, as ``memory.trace_layout`` lays it out.
    """

    def __init__(self, world_size: int, control: Tensor) -> None:
        """``control``: the rank's control words, which tell its kernels where the buffer is."""
        self.ctas = most_ctas(control.device)
        self.words = torch.zeros(buffer_shape(world_size, self.ctas), dtype=torch.int64, device=control.device)
        self._control = control
        control[TRACE_AT] = self.words.data_ptr()

    def in_form(self, spec: Any) -> Any:
        """Return ``spec`` of kernels that stamp."""
        return dataclasses.replace(spec, TRACE=True, TRACE_CTAS=self.ctas)

    def close(self) -> Tensor:
        """Let kernels stamp nothing more, and return the buffer on the host. Calls must be over."""
        self._control[TRACE_AT] = 0
        return self.words.cpu()


class ClockComparison:
    """A comparison of this rank's clock with those of its peers that is under way. Collective.

    Attributes:
        out: what the kernel writes.
    """

    def __init__(self, rank: Rank, comparisons: int) -> None:
        """``comparisons``: how many these ranks have made before."""
        spec = combine_spec(rank.workspace, rank.device, row_weights=False, home_weights=False)
        self.out = torch.zeros(rank.workspace.world_size, 2, dtype=torch.int64, device=rank.device)
        numbers = ClockNumbers(rank.me, comparisons * ROUNDS, ROUNDS, rank.limit, 1)
        kernel = rank.launcher.kernel(ep_compare_clocks_kernel, 1, S=spec, num_warps=1)
        with rank.launching(apart=False):
            rank.launcher.launch(kernel, lambda _: (self.out,), numbers)

    def result(self) -> list[tuple[int, int]] | None:
        """Return of each rank how far its clock is ahead of rank 0's, and by how much that may be wrong, in ticks.

        Ranks other than 0 return zeros. None when a rank did not answer in time. The host waits."""
        rows = self.out.tolist()
        return [(0, 0), *map(tuple, rows[1:])] if rows[0][0] == 1 else None
