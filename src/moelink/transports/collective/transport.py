"""Run dispatch and combine wherever torch.distributed runs: the default on CPUs, and every benchmark's baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.error_record import Losses, raise_losses
from moelink.control.probe import Failure
from moelink.errors import PeerError, UnsupportedError
from moelink.lease import CallCount
from moelink.output import DispatchOutput, OutputShape, leave_in_place, replace_fields
from moelink.routing import ExpertMap, absent_experts, mark_absent
from moelink.transports.base import (
    EVERY_CALL,
    CallRequest,
    CombineRequest,
    DispatchRequest,
    Pending,
    Phase,
    Rehearsal,
    Traffic,
)
from moelink.transports.collective.combine import combine_steps
from moelink.transports.collective.dispatch import dispatch_steps
from moelink.transports.collective.outputs import Scratch
from moelink.transports.collective.wire import Steps, Wire
from moelink.transports.counters import Counters, LatestDispatch


class _InPlace:
    """A dispatch with ``zero_copy`` under way: its rows live from its end, not from when they came."""

    def __init__(self, pending: Pending[list[DispatchOutput]]) -> None:
        self._pending = pending

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return self._pending.over

    def wait(self) -> list[DispatchOutput]:
        """Return the outputs."""
        outputs = self._pending.wait()
        for output in outputs:
            assert output.rows_in_place is not None
            output.rows_in_place.renew()
        return outputs


class CollectiveTransport:
    """One communicator's transport over ``wire``, for the local ranks that ``configs`` describe.

    Its transfers need row counts on the host, so on CUDA it synchronises once per call (on a thread of its own).
    """

    name = "collective"
    partly_sent = False

    def __init__(self, configs: Sequence[EPConfig], wire: Wire, *, identity: str) -> None:
        self._configs, self._wire, self._identity = configs, wire, identity
        self._scratch = [Scratch() for _ in configs]
        self._losses: list[list[tuple[Tensor, Tensor]]] = [[] for _ in configs]
        self._taken = [(0, 0) for _ in configs]
        self._begun: dict[Phase, int] = {"dispatch": 0, "combine": 0}
        self._latest: list[tuple[int, list[int], Tensor] | None] = [None for _ in configs]  # no rows, no ids
        # Rows are tensors here, but their time is the same as on the other transport, so that programs run on both.
        self._calls = [CallCount() for _ in configs] if configs[0].zero_copy else []
        self._absent: Tensor | None = None
        self._masked: tuple[int, ...] = ()

    def dispatch(self, requests: Sequence[DispatchRequest], *, fused: bool = False) -> Pending[list[DispatchOutput]]:
        """Start a dispatch on every local rank."""
        self.partly_sent = self._wire.shared
        self._end_rows("dispatch")
        calls = [self._counted(i, request) for i, request in enumerate(requests)]
        with torch.no_grad():
            pending = self._wire.start("dispatch", calls)
        self.partly_sent = False  # the wire brings it to its end, whatever happens here
        return _InPlace(pending) if self._calls else pending

    def combine(self, requests: Sequence[CombineRequest], *, fused: bool = False) -> Pending[list[Tensor]]:
        """Start a combine on every local rank."""
        self.partly_sent = self._wire.shared
        self._end_rows("combine")
        calls = [
            combine_steps(config, request, scratch)
            for config, request, scratch in zip(self._configs, requests, self._scratch, strict=True)
        ]
        with torch.no_grad():
            pending = self._wire.start("combine", calls)
        self.partly_sent = False
        return pending

    def fast_path(self, session: object) -> None:
        """Return None: rows are counted and moved on the host, beside which the rest of a call is little."""

    def bind(self, request: CallRequest) -> Callable[[CallRequest], Any]:
        """Return a function that makes this call, a dispatch into the same tensors. Each call counts sizes anew."""
        if isinstance(request, CombineRequest):
            return lambda request: self.combine([request], fused=True).wait()[0]  # type: ignore[list-item]
        (config,) = self._configs
        shape = OutputShape.of(config, rows=request.output_rows(config), weighted=request.topk_weights is not None)
        out = request.out or shape.allocate(None, request.x.device)  # type: ignore[arg-type]

        def again(request: CallRequest) -> DispatchOutput:
            (made,) = self.dispatch([dataclasses.replace(request, out=out)], fused=True).wait()  # type: ignore[arg-type, list-item]
            return replace_fields(made, handle=dataclasses.replace(made.handle, ids_version=None))

        return again

    def _counted(self, index: int, request: DispatchRequest) -> Steps[DispatchOutput]:
        output = yield from dispatch_steps(
            self._configs[index], request, self._scratch[index], identity=self._identity,
            absent=self.absent_on(request.topk_ids.device), masked=bool(self._masked),
        )  # fmt: skip
        losses = (output.overflow.clone(), output.handle.routing.messages.invalid_ids)
        earlier = self._losses[index]
        handle = output.handle
        self._latest[index] = handle.num_tokens, handle.routing.messages.recv_counts, handle.counts
        earlier[:] = [(losses[0] + earlier[0][0], losses[1] + earlier[0][1])] if earlier else [losses]
        return leave_in_place(output, self._calls[index]) if self._calls else output

    def begin_without(self, masked: Sequence[int]) -> None:
        """Drop ids of the experts of the ranks ``masked`` from now on."""
        self._masked = tuple(masked)
        if self._absent is not None:
            mark_absent(self._absent, self._experts, masked)

    @property
    def _experts(self) -> ExpertMap:
        return ExpertMap(self._configs[0].num_experts, self._configs[0].world_size)

    def absent_on(self, device: torch.device) -> Tensor:
        """Return which experts are on masked ranks, a tensor that :meth:`change` writes."""
        if self._absent is None or self._absent.device != device:
            self._absent = absent_experts(self._configs[0].num_experts, device)
            mark_absent(self._absent, self._experts, self._masked)
        return self._absent

    def _end_rows(self, phase: Phase) -> None:
        """Begin a call, which with ``zero_copy`` ends the rows of the dispatch before."""
        self._begun[phase] += 1
        for count in self._calls:
            count.begin(phase)

    def refuse(self, phase: Phase, *, over: DispatchOutput | None = None) -> None:
        """Report to the peers that this rank refused its arguments. ``over`` is not needed here."""
        self._end_rows(phase)
        self._wire.refuse(phase)
        self.partly_sent = False

    def abandon(self, failure: Failure) -> PeerError:
        """Poison this rank and its peers, and return the error."""
        return self._wire.abandon(failure)

    def warmup(self, num_sms: Sequence[int] = (), calls: Rehearsal = EVERY_CALL, *, load: bool = True) -> None:
        """Do nothing: there are no kernels to compile."""

    def check(self) -> None:
        """Raise the first error since the last check: a peer's, rows lost to ``capacity``, ids out of range."""
        self._wire.check()
        found = [(int(total[0][0]), int(total[0][1])) if total else (0, 0) for total in self._losses]
        for total in self._losses:
            total.clear()
        self._taken = [(a + c, b + d) for (a, b), (c, d) in zip(self._taken, found, strict=True)]
        raise_losses(
            Losses(config.rank, dropped, config.row_capacity, invalid, config.num_experts, config.row_bound)
            for config, (dropped, invalid) in zip(self._configs, found, strict=True)
        )

    def traffic(self) -> Traffic:
        """Bytes of rows sent to other ranks so far."""
        return Traffic(**self._wire.sent)

    def counters(self) -> list[Counters]:
        """Return the counters of each local rank, with those that are tensors only if these are on the CPU."""
        return [self._counters_of(i) for i in range(len(self._configs))]

    def _counters_of(self, index: int) -> Counters:
        latest, on_cpu, noted = None, True, self._latest[index]
        if noted is not None:
            tokens, messages, counts = noted
            on_cpu = not counts.is_cuda
            latest = LatestDispatch(tokens, tuple(messages), tuple(counts.sum(1).tolist()) if on_cpu else None)
        calls: dict[str, int] = {phase: count for phase, count in self._begun.items()}
        sent: dict[str, int] = {phase: count for phase, count in self._wire.sent.items()}
        if not on_cpu:
            return Counters(calls, sent, None, None, latest, awaited={})
        dropped, invalid = self._taken[index]
        for lost, outside in self._losses[index][:]:
            dropped, invalid = dropped + int(lost), invalid + int(outside)
        return Counters(calls, sent, dropped, invalid, latest, awaited={})

    def dev_ptrs(self) -> list[Tensor]:
        """Raise UnsupportedError: this transport has none."""
        raise UnsupportedError(
            "dev_ptrs: the collective transport has no device buffers: expected transport='symmetric', got "
            "'collective'; use moelink.init(transport='symmetric')"
        )

    def atomic_counters(self) -> list[tuple[Tensor, Tensor]]:
        """Raise UnsupportedError: this transport has none."""
        raise UnsupportedError(
            "atomic_counters: the collective transport has no counters: expected transport='symmetric', got "
            "'collective'; use moelink.init(transport='symmetric')"
        )

    def open_trace(self) -> None:
        """Raise UnsupportedError: this transport has no kernels."""
        raise UnsupportedError(
            "trace: the collective transport has no kernels to trace: expected transport='symmetric', got "
            "'collective'; use moelink.init(transport='symmetric')"
        )

    def close_trace(self) -> list[Tensor]:
        """Return nothing: no trace is ever open."""
        return []

    def compare_clocks(self) -> list[tuple[int, int]] | None:
        """Return None: there are no clocks of kernels."""
        return None

    def change(self, wire: Wire, identity: str, masked: Sequence[int]) -> None:
        """Go on over ``wire``, without the ranks ``masked``."""
        wire.sent = self._wire.sent
        self._wire.close()
        self._wire, self._identity, self.partly_sent = wire, identity, False
        self.begin_without(masked)
        for count in self._calls:
            count.begin("dispatch")

    def close(self) -> None:
        """Release the wire."""
        for count in self._calls:
            count.close()
        self._wire.close()
