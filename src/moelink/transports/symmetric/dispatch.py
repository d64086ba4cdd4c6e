"""Run one rank's dispatch: choose its tensors, and launch the kernels that fill them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from moelink.hooks import evaluate_input_scale, evaluate_weights
from moelink.kernels.dispatch import kernel as kernels
from moelink.kernels.launch.constants import dispatch_spec
from moelink.kernels.launch.grid import dispatch_launch
from moelink.kernels.records import CachedRouting, DispatchInputs, DispatchNumbers, DispatchOutputs, RoutingNotes
from moelink.lease import RowsInPlace
from moelink.memory.layout import as_bytes
from moelink.memory.protocol import STATUS_ABORT
from moelink.output import (
    DispatchHandle,
    DispatchOutput,
    made,
    replace_fields,
    shape_of_outputs,
    version_at_dispatch,
)
from moelink.transports.base import DispatchRequest
from moelink.transports.symmetric.notes import SymmetricNotes
from moelink.transports.symmetric.plans import LaunchPlan, scale_rows_of
from moelink.transports.symmetric.rank import Rank
from moelink.transports.symmetric.received import Received


def _bytes(tensor: Tensor, typed: bool) -> Tensor:
    """Return ``tensor`` with the type that kernels are compiled for, if ``typed``."""
    return as_bytes(tensor) if typed else tensor


class Dispatch:
    """A dispatch of one rank: :meth:`send` and then :meth:`receive`, or :meth:`send_and_receive` in one launch."""

    def __init__(self, rank: Rank, request: DispatchRequest, identity: str) -> None:
        self.rank, self.request = rank, request
        config, device, out = rank.config, rank.device, request.out
        x, weights, input_scale = request.x, request.topk_weights, request.input_scale
        if weights is not None:
            weights = evaluate_weights(
                weights, num_tokens=x.shape[0], topk=config.topk, device=device, dtype=rank.weight_dtype
            )
            assert weights is not None
            weights = weights.contiguous()
        if input_scale is not None:
            input_scale = evaluate_input_scale(input_scale)
        self.launch_plan = plan = self.plan_of(rank, request)
        self._rows = plan.rows if request.routing is None else request.output_rows(config)
        in_arena = out is None and not request.separate and self._rows == plan.rows
        self._arena = plan.arena.allocate(device) if in_arena else None
        again = None
        if request.routing is not None:
            # An earlier call's notes are only read. Its ``received`` and ``counts`` are read beside this call's own, as
            # this one may fail where that one did not.
            again = request.routing.handle.routing.again()
        version = version_at_dispatch(request.topk_ids)
        if self._arena is not None:
            at, ids = self._arena.data_ptr(), request.topk_ids
            received = Received(plan, identity, self._arena, at, ids, weights, version, again)
            self.notes, self._scale_rows = received.notes, plan.fused.scale_rows
            large: dict[str, Any] = {name: blank.on(device) for name, blank in plan.large}
            if plan.in_place is not None:
                large["_rows"] = RowsInPlace(rank.calls, plan.in_place)  # type: ignore[arg-type]
            self.output = made(DispatchOutput, {"_source": received, **large})
        else:
            self.notes = SymmetricNotes(rank.notes, plan.notes.on(device)) if again is None else again
            handle = DispatchHandle(
                owner=identity, rank=plan.rank, num_tokens=x.shape[0], topk_ids=request.topk_ids, topk_weights=weights,
                counts=plan.counts.on(device), routing=self.notes, ids_version=version, first_id=plan.first_id,
            )  # fmt: skip
            if out is not None:
                self.output = dataclasses.replace(out, handle=handle, host_counts=None)
            else:
                shape = shape_of_outputs(config, rows=self._rows, weighted=weights is not None)
                stay = None
                if rank.calls is not None:
                    stay = RowsInPlace(rank.calls, rank.rows_in_place(self._rows))
                self.output = shape.allocate(handle, device, stay)
            self._scale_rows = scale_rows_of(self.output.scales)
        if x.data_ptr() % 16:  # a view that begins anywhere; rows are read in words of up to 16 bytes
            x = x.clone()
        self._x: Tensor = x
        self._input_scale: Tensor | None = input_scale  # type: ignore[assignment]
        self._weights: Tensor | None = weights

    @staticmethod
    def plan_of(rank: Rank, request: DispatchRequest) -> LaunchPlan:
        """Return the launch plan of calls like ``request``."""
        return rank.plan(
            LaunchPlan.of,
            num_tokens=request.x.shape[0],
            dtype=request.x.dtype,
            quantized=request.scales is not None,
            weights=request.topk_weights is not None,
            input_scale=request.input_scale is not None,
            cached=request.routing is not None,
            max_tokens=request.max_tokens,
            num_sms=request.num_sms,
        )

    @property
    def given(self) -> list[Tensor]:
        """The caller's tensors that kernels read."""
        tensors = (self._x, self.request.scales, self._input_scale, self.request.topk_ids, self._weights)
        return [tensor for tensor in tensors if tensor is not None]

    def _inputs(self, typed: bool) -> tuple[Any, ...]:
        """Return the inputs of the sender role."""
        request, nothing = self.request, self.rank.table
        x, scales, input_scale, weights = self._x, request.scales, self._input_scale, self._weights
        if typed and self.launch_plan.copies:
            x = as_bytes(x)
        fields = (
            x, nothing if scales is None else _bytes(scales, typed), nothing if input_scale is None else input_scale,
            request.topk_ids, nothing if weights is None else weights,
        )  # fmt: skip
        return DispatchInputs._make(fields) if typed else fields

    def _outputs(self, typed: bool) -> tuple[Any, ...]:
        """Return the outputs of the receiver role."""
        if self._arena is not None and not typed:
            return self._addresses(self._arena.data_ptr())
        out, nothing = self.output, self.rank.table
        weights = out.weights if out.topk_ids is None else out.topk_weights
        tokens, scales = self._rows_of(out)
        fields = (
            _bytes(tokens, typed), nothing if scales is None else _bytes(scales, typed), out.row_offsets,
            nothing if out.expert_ids is None else out.expert_ids, out.src_info,
            nothing if out.scales_offsets is None else out.scales_offsets, nothing if weights is None else weights,
            nothing if out.topk_ids is None else out.topk_ids, out.num_recv_tokens, out.overflow, out.handle.counts,
        )  # fmt: skip
        return DispatchOutputs._make(fields) if typed else fields

    def _addresses(self, start: int) -> tuple[Any, ...]:
        """Return the addresses of the receiver role's outputs, without making its small tensors.

        ``start``: that of the arena.
        """
        out, nothing = self.output, self.rank.table
        tokens, scales = self._rows_of(out)
        small = [nothing if begin < 0 else start + begin for begin in self.launch_plan.small]
        if out.topk_ids is not None:  # layout "rank", which has these in tensors of their own
            small[4], small[5] = nothing if out.topk_weights is None else out.topk_weights, out.topk_ids
        return (tokens, nothing if scales is None else scales, *small)

    def _rows_of(self, out: DispatchOutput) -> tuple[Tensor, Tensor | None]:
        """Return where the receiver role stores rows, and their scales or what the scale kernel needs."""
        if out.rows_in_place is not None:
            return self.rank.table, None
        return out.tokens, out.scales if self.launch_plan.layout is None else self.rank.message_of_row

    def _routing(self, typed: bool) -> tuple[Any, Any]:
        """Return this call's notes, and what the call that made the routing received and counted.

        A call that makes its own routing passes its own in their place, which the kernels do not read.
        """
        notes, routing = self.notes.given(typed), self.request.routing
        if routing is None:
            cached = (notes.received, self._counts(typed))
        else:
            cached = (routing.handle.routing.given(typed).received, routing.handle.counts)
        return notes, CachedRouting._make(cached) if typed else cached

    def _counts(self, typed: bool) -> Any:
        """Return this call's counts, or their address."""
        if self._arena is None or typed:
            return self.output.handle.counts
        return self._arena.data_ptr() + self.launch_plan.arena.places["counts"][0]

    def _sent(self, typed: bool) -> tuple[Any, ...]:
        return (self._inputs(typed), *self._routing(typed))

    def _received(self, typed: bool) -> tuple[Any, ...]:
        return (self._outputs(typed), *self._routing(typed))

    def _both(self, typed: bool) -> tuple[Any, ...]:
        return (self._inputs(typed), self._outputs(typed), *self._routing(typed))

    def _numbers(self, numbers: DispatchNumbers) -> DispatchNumbers:
        """Return ``numbers`` for this call's output, which may be the caller's, or have the rows of an earlier one."""
        if numbers.scale_rows == self._scale_rows and numbers.capacity == self._rows:
            return numbers
        return numbers._replace(scale_rows=self._scale_rows, capacity=self._rows)

    def send(self) -> None:
        """Launch the sender role."""
        plan = self.launch_plan
        self.rank.launcher.launch(plan.send, self._sent, plan.sending, self.given)

    def receive(self) -> None:
        """Launch the receiver role."""
        plan = self.launch_plan
        self.rank.launcher.launch(plan.receive, self._received, self._numbers(plan.receiving), self.given)
        self._lay_out_scales()
        self.rank.has_received()

    def send_and_receive(self) -> None:
        """Launch both roles at once."""
        for launch in self.launches():
            self.rank.launcher.launch(*launch)

    def launches(self) -> list[tuple[Any, ...]]:
        """Return the arguments of the launches of both roles at once, as :meth:`Launcher.launch` takes them."""
        plan = self.launch_plan
        return [(plan.both, self._both, self._numbers(plan.fused), self.given), *self._scales_later()]

    def _lay_out_scales(self) -> None:
        """Launch the scale kernel where the receiver only noted the message that each row came with."""
        for launch in self._scales_later():
            self.rank.launcher.launch(*launch)

    def _scales_later(self) -> list[tuple[Any, ...]]:
        """Return the arguments of the scale kernel's launch, if there is one."""
        rank, out, plan = self.rank, self.output, self.launch_plan
        if plan.layout is None:
            return []
        scales = out.scales
        assert scales is not None
        tensors = (out.row_offsets, rank.message_of_row, as_bytes(scales))
        return [(plan.layout, lambda _: tensors, self._numbers(plan.laying))]

    def result(self) -> DispatchOutput:
        """Return the output; with ``host_counts`` cut to its exact size, for which the host waits."""
        if self.output.rows_in_place is not None:
            self.output.rows_in_place.renew()
        if not self.request.host_counts:
            return self.output
        out, config = self.output, self.rank.config
        if config.node_size < config.world_size:
            self.rank.synchronize()  # which ends, whatever the network does; the counts may never come
            error = self.rank.error() if self.rank.poisoned else None
            if error is not None:
                raise error
        *counted, rows = torch.cat((out.num_recv_per_expert, out.row_offsets[-1:])).tolist()
        if config.rows_by_group:  # combine finds rows by the size of a group
            return replace_fields(out, host_counts=counted)
        scales = out.scales
        if scales is not None:
            shape = config.scale_shape(rows)
            scales = scales.view(torch.uint8 if scales.element_size() == 1 else torch.int32)
            scales = scales[tuple(slice(size) for size in shape)].contiguous().view(out.scales.dtype)  # type: ignore[union-attr]

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:rows].clone()

        return dataclasses.replace(
            out, tokens=out.tokens[:rows].clone(), scales=scales, src_info=out.src_info[:rows].clone(),
            weights=cut(out.weights), topk_ids=cut(out.topk_ids), topk_weights=cut(out.topk_weights),
            host_counts=counted,
        )  # fmt: skip


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
    numbers = DispatchNumbers(
        me=rank.me, rank=config.rank, first_expert=rank.first_expert, num_local_experts=config.num_local_experts,
        num_groups=config.num_groups, num_tokens=0, tokens_per_program=1, split=1, shared_begin=0, shared_end=0,
        capacity=0, scale_rows=0, counts_stride=config.world_size, status=STATUS_ABORT, senders=0, limit=rank.limit,
        programs=1,
    )  # fmt: skip
    nothing = rank.nothing
    inputs, outputs = DispatchInputs(*[nothing] * 5), DispatchOutputs(*[nothing] * 11)
    notes, cached = RoutingNotes(*[nothing] * 5), CachedRouting(nothing, nothing)
    send = kernel(kernels.ep_dispatch_async_kernel, 1 + spec.FORWARDERS, S=spec, launch=launch)
    receive = kernel(kernels.ep_dispatch_wait_kernel, 1, S=spec, launch=launch)
    rank.launcher.launch(send, lambda _: (inputs, notes, cached), numbers._replace(programs=send.programs))
    rank.launcher.launch(receive, lambda _: (outputs, notes, cached), numbers)
    rank.grant_credits()
