"""Launches outside calls: those that only compile, before the first call, and the comparison of clocks for a trace."""

from __future__ import annotations

import torch

from moelink.kernels.launch.constants import combine_spec
from moelink.kernels.launch.grid import bounds_of_kernels
from moelink.tracing.device.clocks import ClockNumbers, ep_compare_clocks_kernel
from moelink.transports.base import EVERY_CALL, CombineRequest, DispatchRequest, Rehearsal
from moelink.transports.symmetric.combine import Combine
from moelink.transports.symmetric.dispatch import Dispatch
from moelink.transports.symmetric.rank import Rank


def prepare_calls(rank: Rank, num_sms: int | None, calls: Rehearsal = EVERY_CALL) -> None:
    """Make calls of a rank, within an SM limit, while its launcher only prepares."""
    config = rank.config
    dtype = config.format.input_dtypes[-1 if config.dispatch_format == "fp64" else 0]
    x = torch.empty(1, config.hidden_size, dtype=dtype, device=rank.device)
    ids = torch.empty(1, config.topk, dtype=torch.int32, device=rank.device)
    weights = torch.empty(1, config.topk, dtype=config.weight_dtype, device=rank.device)
    for given in (weights if weighted else None for weighted in calls.weighted):
        for bound in bounds_of_kernels(config, rank.device, calls.bounds):
            dispatch = Dispatch(rank, DispatchRequest(x, ids, given, max_tokens=bound, num_sms=num_sms), "")
            for name in calls.dispatch:
                for call in (dispatch.send_and_receive,) if name == "fused" else (dispatch.send, dispatch.receive):
                    call()
        rows = dispatch.output.tokens.shape[:-1]
        y = torch.empty(*rows, config.hidden_size, dtype=config.combine_dtype, device=rank.device)
        rank.overwrite_expired_rows()
        rank.grant_credits()
        for shared in calls.shared:
            added = x.to(config.combine_dtype) if shared else None
            combine = Combine(rank, CombineRequest(y, dispatch.output, shared=added, num_sms=num_sms))
            for name in calls.combine:
                for pass_ in (combine.send_and_receive,) if name == "fused" else (combine.send, combine.receive):
                    pass_(combine.passes[0])
        plain = config.combine_dtype in config.format.input_dtypes and config.format.scale_dtype is None
        if plain and num_sms is None:
            # Gradients of combine's result travel in this way, over the routing of the forward call.
            grad = x.to(config.combine_dtype)
            request = DispatchRequest(x=grad, topk_ids=ids, topk_weights=given, routing=dispatch.output)
            Dispatch(rank, request, "").send_and_receive()


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
