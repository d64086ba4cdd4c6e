"""Run the symmetric transport of one communicator: one rank of a process, or all ranks of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from moelink.output import DispatchOutput, replace_fields
from moelink.transports.base import CallRequest, CombineRequest, DispatchRequest, Finished, Pending, Phase
from moelink.transports.pending import SymmetricPending
from moelink.transports.session import Session
from moelink.transports.symmetric.combine import Combine
from moelink.transports.symmetric.dispatch import Dispatch
from moelink.transports.symmetric.fast_path import SymmetricFastPath
from moelink.transports.symmetric.local_ranks import LocalRanks
from moelink.transports.symmetric.rank import Rank

T = TypeVar("T")


def _without_gradients() -> AbstractContextManager[object]:
    """Return ``torch.no_grad()`` where it would change something. Entering it takes longer than most work inside it."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


class SymmetricTransport(LocalRanks):
    """Kernels over symmetric memory: the calls of the local ranks."""

    name = "symmetric"

    def dispatch(self, requests: Sequence[DispatchRequest], *, fused: bool = False) -> Pending[list[DispatchOutput]]:
        """Start a dispatch on every local rank. ``fused``: one launch, for a caller that waits right away."""
        return self._start(requests, lambda rank, request: Dispatch(rank, request, self._identity), fused)

    def combine(self, requests: Sequence[CombineRequest], *, fused: bool = False) -> Pending[list[Tensor]]:
        """Start a combine on every local rank. ``fused``: one launch, for a caller that waits right away."""
        return self._start(requests, Combine, fused)

    def _start(
        self, requests: Sequence[CallRequest], make: Callable[[Rank, Any], Dispatch | Combine], fused: bool
    ) -> Pending[list[Any]]:
        """Start a call of which ``make`` makes each rank's part."""
        phase = requests[0].phase
        self.raise_error()
        with _without_gradients():
            try:
                calls = [make(rank, request) for rank, request in zip(self.ranks, requests, strict=True)]
            except Exception:  # for instance no memory for the outputs; peers are already in the call
                self.refuse(phase, over=requests[0].over)
                raise
        self._count_call(phase)
        fused = fused and self._overlap
        self._end_rows(own_stream=not fused)
        first, *further = calls[0].passes

        def each(step: str, slot: int) -> None:
            self._load(calls, lambda call: getattr(call, step)(slot))
            for rank, call in zip(self.ranks, calls, strict=True):
                with self._turn(rank, own_stream=not fused):
                    getattr(call, step)(slot)

        if fused:
            for slot in (first, *further):
                each("send_and_receive", slot)
            self._sent(calls)
            self._join()
            return Finished([call.result() for call in calls])
        each("send", first)
        self._sent(calls)

        def finish() -> list[Any]:
            each("receive", first)
            for slot in further:
                each("send", slot)
                each("receive", slot)
            self.partly_sent = False
            self._join()
            return [call.result() for call in calls]

        return SymmetricPending(self, finish)

    def _sent(self, calls: object) -> None:
        """Note that a half of a call is launched, and keep its tensors."""
        self.partly_sent = False
        self._under_way.append(calls)

    def bind(self, request: CallRequest) -> Callable[[CallRequest], Any]:
        """Return a function that launches this call again and again. A dispatch always returns the same output."""
        (rank,) = self.ranks
        with _without_gradients():
            if isinstance(request, CombineRequest):
                combine = Combine(rank, request)
                return self._again("combine", rank, combine, combine.output)
            dispatch = Dispatch(rank, request, self._identity)
        output = dispatch.output
        output = replace_fields(output, handle=dataclasses.replace(output.handle, ids_version=None))
        again, rows = self._again("dispatch", rank, dispatch, output), output.rows_in_place
        if rows is None:
            return again

        def renewed(request: CallRequest) -> DispatchOutput:
            output = again(request)
            rows.renew()
            return output

        return renewed

    def _again(self, phase: Phase, rank: Rank, call: Dispatch | Combine, result: T) -> Callable[[object], T]:
        made = [rank.overwriting(), *call.launches()] if rank.overwrites_expired else call.launches()
        launches = [rank.launcher.bind(*launch) for launch in made]  # these keep the call and its tensors

        def start(stream: int) -> None:
            for launch in launches:
                launch(stream)

        launch = launches[0] if len(launches) == 1 else start

        def again(_: object) -> T:
            if rank.has_error():
                self.raise_error()
            self.launch_quick(phase, rank, rank.stream_to_go_on(), launch)
            return result

        return again

    def fast_path(self, session: Session) -> SymmetricFastPath | None:
        """Return the fast path of a session with one local rank; else None, also if it overwrites expired rows."""
        return (
            SymmetricFastPath(session, self, self.ranks[0])
            if len(self.ranks) == 1 and not self._overwrites_expired
            else None
        )

    def launch_quick(self, phase: Phase, rank: Rank, stream: int, launch: Callable[[int], None]) -> None:
        """Count a call of the only local rank and launch it, with ``stream`` of :meth:`Rank.stream_to_go_on`."""
        self._count_call(phase)
        if stream >= 0:
            launch(stream)
            self.partly_sent = False
            if self._on_cpu:
                self.raise_error()
            return
        with rank.launching(own_stream=False):
            launch(rank.launcher.current_stream())
        self.partly_sent = False
        self._join()
