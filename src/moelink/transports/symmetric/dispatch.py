"""One rank's dispatch: its tensors, and the launches that fill them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.hooks import evaluate_input_scale, evaluate_weights
from moelink.kernels.dispatch import kernel as kernels
from moelink.kernels.dispatch.scales import ep_lay_out_scales_kernel
from moelink.kernels.launch.constants import COPY, ENCODE, dispatch_spec
from moelink.kernels.launch.grid import Cut, dispatch_launch, layout_launch, shared_bounds
from moelink.memory.protocol import STATUS_ABORT, STATUS_OK
from moelink.output import Blank, DispatchHandle, DispatchOutput, OutputShape, make
from moelink.transports.base import DispatchRequest
from moelink.transports.symmetric.notes import Parts, SymmetricPlan
from moelink.transports.symmetric.program import Program
from moelink.transports.symmetric.rank import Rank


@dataclass(frozen=True)
class Recipe:
    """What all dispatches of one kind have in common, computed once: a call would otherwise spend most of its host time
    on it.

    Attributes:
        send, receive, both, layout: the kernels, the last one where it brings scales into their layout.
        sending, receiving, fused: the numbers that the first three get; the latter two up to rows of a column of
            scales, behind which comes what is in ``ends``.
        copies: rows are bytes to the kernels.
        notes, counts, outputs: the tensors that a call makes. scale_rows: of such scales.
    """

    send: Program
    receive: Program
    both: Program
    layout: Program | None
    sending: tuple[int, ...]
    receiving: tuple[int, ...]
    fused: tuple[int, ...]
    ends: tuple[tuple[int, ...], tuple[int, ...]]
    copies: bool
    notes: Blank
    counts: Blank
    outputs: OutputShape
    scale_rows: int

    @classmethod
    def of(
        cls, rank: Rank, num_tokens: int, dtype: torch.dtype, quantized: bool, weights: bool, input_scale: bool,
        cached: bool,
    ) -> Recipe:  # fmt: skip
        """The recipe of ``rank`` for ``num_tokens`` rows of ``dtype``; the others as in :func:`dispatch_spec`."""
        config, device = rank.config, rank.device
        spec = dispatch_spec(
            rank.workspace, device, input_dtype=dtype, quantized=quantized, weights=weights, input_scale=input_scale,
            cached=cached,
        )  # fmt: skip
        launch = dispatch_launch(config, device, num_tokens, encodes=bool(spec.SOURCE == ENCODE))
        later = layout_launch(config, device)
        cut = Cut.of(num_tokens, programs=launch.send, world_size=rank.workspace.world_size)
        senders = 1 + cut.programs
        shared, local, groups = shared_bounds(config, num_tokens), config.num_local_experts, config.num_groups
        tokens = (num_tokens, cut.tokens_per_program, cut.split)
        room = (*shared, config.row_capacity)
        outputs = OutputShape.of(config, rows=config.row_capacity, weighted=weights)
        return cls(
            send=rank.program(kernels.ep_dispatch_async_kernel, senders, S=spec, launch=launch),
            receive=rank.program(kernels.ep_dispatch_wait_kernel, launch.receive, S=spec, launch=launch),
            both=rank.program(kernels.ep_fused_dispatch_kernel, senders + launch.receive, S=spec, launch=launch),
            layout=rank.program(ep_lay_out_scales_kernel, later.receive, S=spec, launch=later) if spec.LATER else None,
            sending=(rank.me, rank.first, local, *tokens, *shared, STATUS_OK, rank.limit),
            receiving=(rank.me, config.rank, local, groups, *room),
            fused=(rank.me, config.rank, rank.first, local, groups, *tokens, *room),
            ends=((config.world_size, STATUS_OK, rank.limit), (config.world_size, STATUS_OK, senders, rank.limit)),
            copies=bool(spec.SOURCE == COPY),
            notes=Blank.of(rank.workspace.note_words(num_tokens)),
            counts=Blank.of(local, config.world_size),
            outputs=outputs,
            scale_rows=_scale_rows(dict(outputs.present).get("scales")),
        )


def _scale_rows(scales: Blank | Tensor | None) -> int:
    """Rows of a column of scales, where they are in columns."""
    return scales.shape[1] if scales is not None and len(scales.shape) == 2 else 0


def _bytes(tensor: Tensor, typed: bool) -> Tensor:
    """``tensor`` as kernels know it, if its type is asked for."""
    return tensor.view(torch.uint8) if typed else tensor


class Dispatch:
    """A dispatch of one rank: :meth:`send` and then :meth:`receive`, or :meth:`send_and_receive` in one launch."""

    def __init__(self, rank: Rank, request: DispatchRequest, identity: str) -> None:
        self.rank, self.request = rank, request
        config, device, out = rank.config, rank.device, request.out
        x, scales, weights, input_scale = request.x, request.scales, request.topk_weights, request.input_scale
        num_tokens = x.shape[0]
        if weights is not None:
            weights = evaluate_weights(
                weights, num_tokens=num_tokens, topk=config.topk, device=device, dtype=rank.weight_dtype
            )
            assert weights is not None
            weights = weights.contiguous()
        if input_scale is not None:
            input_scale = evaluate_input_scale(input_scale)
        self.recipe = recipe = rank.recipe(
            Recipe, num_tokens, x.dtype, scales is not None, weights is not None, input_scale is not None,
            request.routing is not None,
        )  # fmt: skip
        counts = recipe.counts.on(device)
        if request.routing is None:
            self.plan = SymmetricPlan(rank.notes, recipe.notes.on(device))
        else:
            # An earlier call's notes are only read. Its ``received`` and ``counts`` are read beside this call's own, as
            # this one may fail where that one did not.
            self.plan = request.routing.handle.plan.again()
        handle = make(DispatchHandle, {
            "owner": identity, "rank": config.rank, "num_tokens": num_tokens, "topk_ids": request.topk_ids,
            "topk_weights": weights, "counts": counts, "plan": self.plan, "carrier": None,
        })  # fmt: skip
        if out is None:
            self.output, self._scale_rows = recipe.outputs.allocate(handle, device), recipe.scale_rows
        else:
            self.output, self._scale_rows = dataclasses.replace(out, handle=handle), _scale_rows(out.scales)
        if x.data_ptr() % 16:  # a view that begins anywhere; rows are read in words of up to 16 bytes
            x = x.clone()
        self._x, self._input_scale, self._weights = x, input_scale, weights
        self._given = [t for t in (x, scales, input_scale, request.topk_ids, weights) if t is not None]

    def _rows(self, typed: bool, parts: Parts) -> tuple[Any, ...]:
        """What the sender role reads and notes."""
        request, nothing = self.request, self.rank.table
        x, scales, input_scale, weights = self._x, request.scales, self._input_scale, self._weights
        if typed and self.recipe.copies:
            x = x.view(torch.uint8)
        return (
            x, nothing if scales is None else _bytes(scales, typed), nothing if input_scale is None else input_scale,
            request.topk_ids, nothing if weights is None else weights, parts.slot_of, parts.sent,
        )  # fmt: skip

    def _outputs(self, typed: bool, parts: Parts) -> tuple[Any, ...]:
        """What the receiver role writes, and reads over a routing."""
        out, nothing = self.output, self.rank.table
        weights = out.weights if out.topk_ids is None else out.topk_weights
        scales = out.scales if self.recipe.layout is None else self.rank.message_of_row
        return (
            _bytes(out.tokens, typed), nothing if scales is None else _bytes(scales, typed), out.row_offsets,
            nothing if out.expert_ids is None else out.expert_ids, out.src_info,
            nothing if out.scales_offsets is None else out.scales_offsets, nothing if weights is None else weights,
            nothing if out.topk_ids is None else out.topk_ids, out.num_recv_tokens, out.overflow, out.handle.counts,
            parts.received, parts.rows_of_message, parts.message_token, *self._routed(typed, parts),
        )  # fmt: skip

    def _routed(self, typed: bool, parts: Parts) -> tuple[Any, Any]:
        """What the call that made the routing received and counted."""
        routing = self.request.routing
        if routing is None:
            return parts.received, self.output.handle.counts  # not read
        plan: SymmetricPlan = routing.handle.plan
        return plan.given(typed).received, routing.handle.counts

    def _sent(self, typed: bool) -> tuple[Any, ...]:
        parts = self.plan.given(typed)
        return (*self._rows(typed, parts), self._routed(typed, parts)[0])

    def _received(self, typed: bool) -> tuple[Any, ...]:
        return self._outputs(typed, self.plan.given(typed))

    def _both(self, typed: bool) -> tuple[Any, ...]:
        parts = self.plan.given(typed)
        return (*self._rows(typed, parts), *self._outputs(typed, parts))

    def send(self) -> None:
        """Launch the sender role."""
        self.rank.launch(self.recipe.send, self._sent, self.recipe.sending, self._given)

    def receive(self) -> None:
        """Launch the receiver role."""
        recipe = self.recipe
        numbers = (*recipe.receiving, self._scale_rows, *recipe.ends[0])
        self.rank.launch(recipe.receive, self._received, numbers, self._given)
        self._lay_out_scales()
        self.rank.tell_drained()

    def send_and_receive(self) -> None:
        """Launch both roles at once."""
        recipe = self.recipe
        self.rank.launch(recipe.both, self._both, (*recipe.fused, self._scale_rows, *recipe.ends[1]), self._given)
        self._lay_out_scales()

    def _lay_out_scales(self) -> None:
        """Where the receiver only noted which message a row came with: bring the scales into their layout."""
        rank, out, program = self.rank, self.output, self.recipe.layout
        if program is None:
            return
        scales = out.scales
        assert scales is not None
        tensors = (out.row_offsets, rank.message_of_row, scales.view(torch.uint8))
        rank.launch(program, lambda _: tensors, (rank.config.num_groups, self._scale_rows))

    def result(self) -> DispatchOutput:
        """The output; with ``host_counts`` cut to its exact size, for which the host waits."""
        if not self.request.host_counts:
            return self.output
        out, config = self.output, self.rank.config
        rows = int(out.row_offsets[-1])
        scales = out.scales
        if scales is not None:
            width = config.format.scale_width(config.hidden_size)
            shape: tuple[int, ...] = (rows, width)
            if config.layout == "expert" and config.format.scale_layout is not None:
                shape = config.format.scale_layout.shape(rows, width, config.num_groups)
            scales = scales.view(torch.uint8 if scales.element_size() == 1 else torch.int32)
            scales = scales[tuple(slice(size) for size in shape)].contiguous().view(out.scales.dtype)  # type: ignore[union-attr]

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:rows].clone()

        return dataclasses.replace(
            out, tokens=out.tokens[:rows].clone(), scales=scales, src_info=out.src_info[:rows].clone(),
            weights=cut(out.weights), topk_ids=cut(out.topk_ids), topk_weights=cut(out.topk_weights),
        )  # fmt: skip


def refuse_dispatch(rank: Rank) -> None:
    """Take part in a dispatch with nothing but the word that this rank refused it.

    A call over an earlier one's routing is refused alike: all that its peers wait for, and more, is in the words of one
    that counts.
    """
    spec = dispatch_spec(
        rank.workspace, rank.device, input_dtype=rank.config.format.payload_dtype, quantized=True, weights=False
    )
    launch = dispatch_launch(rank.config, rank.device, 0, encodes=False)
    dummy = rank.nothing
    local, groups, stride = rank.config.num_local_experts, rank.config.num_groups, rank.config.world_size
    rank.launch(
        rank.program(kernels.ep_dispatch_async_kernel, 1, S=spec, launch=launch), lambda _: [dummy] * 8,
        (rank.me, rank.first, local, 0, 1, 1, 0, 0, STATUS_ABORT, rank.limit),
    )  # fmt: skip
    rank.launch(
        rank.program(kernels.ep_dispatch_wait_kernel, 1, S=spec, launch=launch), lambda _: [dummy] * 16,
        (rank.me, rank.config.rank, local, groups, 0, 0, 0, 0, stride, STATUS_ABORT, rank.limit),
    )  # fmt: skip
    rank.tell_drained()
