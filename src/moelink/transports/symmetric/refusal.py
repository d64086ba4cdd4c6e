"""Take part in a call that this rank refuses: send only the word that it does, so that no peer waits for its rows."""

from __future__ import annotations

from typing import Any

from moelink.kernels.combine import kernel as combine_kernels
from moelink.kernels.dispatch import kernel as dispatch_kernels
from moelink.kernels.launch.constants import combine_spec, dispatch_spec
from moelink.kernels.launch.grid import combine_launch, combine_numbers, dispatch_launch, dispatch_numbers
from moelink.kernels.launch.own_rows import with_own_rows
from moelink.kernels.records import CombineInputs, CombineOutputs, RoutingNotes
from moelink.memory.protocol import STATUS_ABORT
from moelink.transports.symmetric.dispatch import RECORDS
from moelink.transports.symmetric.rank import Rank


def refuse_dispatch(rank: Rank) -> None:
    """Take part in a dispatch that this rank refuses: send only the word that it does.

    A call over cached routing is refused in the same way: its peers wait only for words that a counting call also
    sends.
    """
    config, kernel = rank.config, rank.launcher.kernel
    spec = dispatch_spec(
        rank.workspace, rank.device, input_dtype=config.format.payload_dtype, quantized=True, weights=False
    )
    launch = dispatch_launch(config, rank.device, 0, encodes=False)
    numbers = dispatch_numbers(rank, 0, status=STATUS_ABORT)._replace(programs=1)
    send = kernel(dispatch_kernels.ep_dispatch_async_kernel, 1 + spec.FORWARDERS, S=spec, launch=launch)
    receive = kernel(dispatch_kernels.ep_dispatch_wait_kernel, 1, S=spec, launch=launch)
    inputs, outputs, *rest = (record(*[rank.nothing] * len(record._fields)) for record in RECORDS)
    rank.launcher.launch(send, lambda _: (inputs, *rest), numbers._replace(programs=send.programs))
    rank.launcher.launch(receive, lambda _: (outputs, *rest), numbers)
    rank.grant_credits()


def refuse_combine(rank: Rank) -> None:
    """Take part in a combine that this rank refuses: send only the word that it does."""
    spec = combine_spec(rank.workspace, rank.device, row_weights=False, home_weights=False)
    spec = with_own_rows(spec, rank.workspace, rank.device)
    if spec.ALLREDUCE:
        return
    how: Any = {"S": spec, "launch": combine_launch(rank.workspace, rank.device, 0, sums=True)}
    numbers = combine_numbers(rank, 0, status=STATUS_ABORT)._replace(programs=1)
    kernel, nothing = rank.launcher.kernel, rank.nothing
    inputs, notes = CombineInputs(*[nothing] * 6), RoutingNotes(*[nothing] * 5)
    outputs = CombineOutputs(nothing, (nothing,))
    send = kernel(combine_kernels.ep_combine_async_kernel, 1 + spec.COLLECTORS, **how)
    receive = kernel(combine_kernels.ep_combine_wait_kernel, 1, **how)
    rank.launcher.launch(send, lambda _: (inputs, notes), numbers._replace(programs=send.programs))
    rank.launcher.launch(receive, lambda _: (inputs, outputs, notes), numbers)
    rank.grant_credits()
