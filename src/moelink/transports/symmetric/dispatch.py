"""Run one rank's dispatch: choose its tensors, and launch the kernels that fill them."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moelink.hooks import evaluate_input_scale, evaluate_weights
from moelink.kernels.records import CachedRouting, DispatchInputs, DispatchNumbers, DispatchOutputs, RoutingNotes
from moelink.lease import RowsInPlace
from moelink.memory.layout import as_bytes
from moelink.output import DispatchHandle, DispatchOutput, replace_fields, shape_of_outputs, version_at_dispatch
from moelink.transports.base import DispatchRequest
from moelink.transports.symmetric.notes import SymmetricNotes
from moelink.transports.symmetric.plans import LaunchPlan, Received, scale_rows_of
from moelink.transports.symmetric.rank import Rank

RECORDS: tuple[Any, ...] = (DispatchInputs, DispatchOutputs, RoutingNotes, CachedRouting)
"""The records of the kernels' addresses: a sender has no outputs, a receiver no inputs."""

ADDRESSES = tuple((record, name) for record in RECORDS for name in record._fields)
"""These addresses in one list."""

SMALL = ADDRESSES.index((DispatchOutputs, "row_offsets"))
"""The first address that may be one in the arena."""

PLACES = {name: ADDRESSES.index((DispatchOutputs, name)) for name in DispatchOutputs._fields}
PLACES["topk_weights"] = PLACES["weights"]
"""The place of an output's field among the addresses."""

_BEGINS = [sum(len(record._fields) for record in RECORDS[:i]) for i in range(len(RECORDS) + 1)]


class Dispatch:
    """A dispatch of one rank: :meth:`send` and then :meth:`receive`, or :meth:`send_and_receive` in one launch.

    Attributes:
        passes: its launches of a half, one.
        output: the output that it fills.
    """

    passes = (0,)

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
        if x.data_ptr() % 16:  # a view that begins anywhere; rows are read in words of up to 16 bytes
            x = x.clone()
        self._inputs = DispatchInputs(x, request.scales, input_scale, request.topk_ids, weights)
        self.launch_plan = plan = self.plan_of(rank, request)
        self._rows = plan.rows if request.routing is None else request.output_rows(config)
        # An earlier call's notes are only read. Its ``received`` and ``counts`` are read beside this call's own, as
        # this one may fail where that one did not.
        again = None if request.routing is None else request.routing.handle.routing.again()
        version = version_at_dispatch(request.topk_ids)
        self._received: Received | None = None
        if out is None and not request.separate and self._rows == plan.rows:
            memory = plan.make_arena()
            self._received = received = Received(
                plan, identity, memory, request.topk_ids, weights, version, again, rank.absent
            )
            self.notes, self._scale_rows = received.notes, plan.fused.scale_rows
            self.output = received.output(rank.calls)
            return
        self.notes = SymmetricNotes(rank.notes, plan.notes.on(device)) if again is None else again
        handle = DispatchHandle(
            owner=identity, rank=plan.rank, num_tokens=x.shape[0], topk_ids=request.topk_ids, topk_weights=weights,
            counts=plan.counts.on(device), routing=self.notes, ids_version=version, first_id=plan.first_id,
            absent=rank.absent,
        )  # fmt: skip
        if out is not None:
            self.output = dataclasses.replace(out, handle=handle, host_counts=None)
        else:
            shape = shape_of_outputs(config, rows=self._rows, weighted=weights is not None)
            stay = None if rank.calls is None else RowsInPlace(rank.calls, rank.rows_in_place(self._rows))
            self.output = shape.allocate(handle, device, stay)
        self._scale_rows = scale_rows_of(self.output.scales)

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
        return [tensor for tensor in self._inputs if tensor is not None]

    def _tensors(self) -> list[Tensor]:
        """Return the tensors of all addresses, of the types that kernels are compiled for."""
        out, nothing, earlier = self.output, self.rank.table, self.request.routing
        x, scales, *inputs = self._inputs
        tokens, row_scales = self._rows_of(out)
        notes = self.notes.parts
        cached = (notes.received, out.handle.counts)  # which kernels do not read
        if earlier is not None:
            cached = (earlier.handle.routing.parts.received, earlier.handle.counts)
        tensors = (
            as_bytes(x) if self.launch_plan.copies else x, scales if scales is None else as_bytes(scales), *inputs,
            as_bytes(tokens), row_scales if row_scales is None else as_bytes(row_scales), out.row_offsets,
            out.expert_ids, out.src_info, out.scales_offsets, out.weights if out.topk_ids is None else out.topk_weights,
            out.topk_ids, out.num_recv_tokens, out.overflow, out.handle.counts, *notes, *cached,
        )  # fmt: skip
        return [nothing if tensor is None else tensor for tensor in tensors]

    def _addresses(self) -> list[int]:
        """Return all addresses, without making tensors in the arena."""
        received, nothing = self._received, self.rank.nothing_at
        if received is None:
            return [tensor.data_ptr() for tensor in self._tensors()]
        out, earlier = self.output, self.request.routing
        tokens, row_scales = self._rows_of(out)
        flat = [nothing if t is None else t.data_ptr() for t in (*self._inputs, tokens, row_scales)]
        flat += [nothing if begin < 0 else received.at + begin for begin in self.launch_plan.in_arena]
        if out.topk_ids is not None:  # layout "rank", which has these in tensors of their own
            flat[PLACES["topk_ids"]] = out.topk_ids.data_ptr()
            flat[PLACES["weights"]] = nothing if out.topk_weights is None else out.topk_weights.data_ptr()
        if earlier is not None:
            cached = (earlier.handle.routing.addresses.received, earlier.handle.counts.data_ptr())
            flat[_BEGINS[2] :] = [*self.notes.addresses, *cached]
        return flat

    def _rows_of(self, out: DispatchOutput) -> tuple[Tensor, Tensor | None]:
        """Return the tensor in which the receiver role stores rows, and that of their scales or of the numbers that
        the scale kernel needs."""
        if out.rows_in_place is not None:
            return self.rank.table, None
        return out.tokens, out.scales if self.launch_plan.layout is None else self.rank.message_of_row

    def _records(self, typed: bool, *, without: Any = None) -> tuple[Any, ...]:
        """Return the records as a launch asks for them (:meth:`Launcher.launch`), but for one."""
        flat: list[Any] = self._tensors() if typed else self._addresses()  # type: ignore[assignment]
        parts = [flat[begin:end] for begin, end in pairwise(_BEGINS)]
        made = [(record, part) for record, part in zip(RECORDS, parts, strict=True) if record is not without]
        return tuple([record._make(part) if typed else tuple(part) for record, part in made])

    def _numbers(self, numbers: DispatchNumbers) -> DispatchNumbers:
        """Return ``numbers`` for this call's output, which may be the caller's, or have the rows of an earlier one."""
        if numbers.scale_rows == self._scale_rows and numbers.capacity == self._rows:
            return numbers
        return numbers._replace(scale_rows=self._scale_rows, capacity=self._rows)

    def send(self, slot_begin: int = 0) -> None:
        """Launch the sender role."""
        plan = self.launch_plan
        self.rank.launcher.launch(plan.send, partial(self._records, without=DispatchOutputs), plan.sending, self.given)

    def receive(self, slot_begin: int = 0) -> None:
        """Launch the receiver role."""
        plan, numbers = self.launch_plan, self._numbers(self.launch_plan.receiving)
        self.rank.launcher.launch(plan.receive, partial(self._records, without=DispatchInputs), numbers, self.given)
        self._lay_out_scales()
        self.rank.has_received()

    def send_and_receive(self, slot_begin: int = 0) -> None:
        """Launch both roles at once."""
        for launch in self.launches():
            self.rank.launcher.launch(*launch)

    def launches(self) -> list[tuple[Any, ...]]:
        """Return the arguments of the launches of both roles at once, as :meth:`Launcher.launch` takes them."""
        plan = self.launch_plan
        return [(plan.both, self._records, self._numbers(plan.fused), self.given), *self._scales_later()]

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
