"""Compare the clock of a rank with those of its peers, so that their traces have one time."""

from __future__ import annotations

import torch

from moelink.kernels.launch.constants import combine_spec
from moelink.tracing.device.clocks import ClockNumbers, ep_compare_clocks_kernel
from moelink.transports.symmetric.rank import Rank

ROUNDS = 32
"""Questions to each rank in a comparison of clocks."""


class ClockComparison:
    """A comparison of this rank's clock with those of its peers that is under way. Collective.

    Attributes:
        out: the output of the kernel.
    """

    def __init__(self, rank: Rank, comparisons: int) -> None:
        """``comparisons``: how many these ranks have made before."""
        spec = combine_spec(rank.workspace, rank.device, row_weights=False, home_weights=False)
        self.out = torch.zeros(rank.workspace.world_size, 2, dtype=torch.int64, device=rank.device)
        numbers = ClockNumbers(rank.me, comparisons * ROUNDS, ROUNDS, rank.limit, 1)
        kernel = rank.launcher.kernel(ep_compare_clocks_kernel, 1, S=spec, num_warps=1)
        with rank.launching(own_stream=False):
            rank.launcher.launch(kernel, lambda _: (self.out,), numbers)

    def result(self) -> list[tuple[int, int]] | None:
        """Return of each rank how far its clock is ahead of rank 0's, and by how much that may be wrong, in ticks.

        Ranks other than 0 return zeros. None when a rank did not answer in time. The host waits."""
        rows = self.out.tolist()
        return [(0, 0), *map(tuple, rows[1:])] if rows[0][0] == 1 else None
