"""One rank's dispatch: its tensors, and the launches that fill them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.blank import Blank
from moelink.hooks import evaluate_input_scale, evaluate_weights
from moelink.kernels import dispatch as kernels
from moelink.kernels.cut import Cut, Launch, dispatch_launch, layout_launch, shared_bounds
from moelink.kernels.scale_layout import ep_lay_out_scales_kernel
from moelink.kernels.spec import COPY, ENCODE, DispatchSpec, dispatch_spec
from moelink.output import DispatchHandle, DispatchOutput
from moelink.protocol import STATUS_ABORT, STATUS_OK
from moelink.transports.base import DispatchRequest
from moelink.transports.collective.outputs import OutputShape
from moelink.transports.symmetric.plan import SymmetricPlan
from moelink.transports.symmetric.rank import Rank


@dataclass(frozen=True)
class Recipe:
    """What all dispatches of one kind have in common, computed once: a call would otherwise spend most of its host time
    on it.

    Attributes:
        spec, launch: the kernel, and how it is launched. layout: how scales are brought into their layout.
        senders: programs of the sender role.
        shared: first and last + 1 own token of the fused shared expert's group.
        sending: the numbers among the sender role's arguments.
        notes, counts, outputs: the tensors that a call makes.
    """

    spec: DispatchSpec
    launch: Launch
    layout: Launch
    senders: int
    shared: tuple[int, int]
    sending: tuple[int, ...]
    notes: tuple[Blank, ...]
    counts: Blank
    outputs: OutputShape

    @classmethod
    def of(cls, rank: Rank, num_tokens: int, *, dtype: torch.dtype, **kind: bool) -> Recipe:
        """The recipe of ``rank`` for ``num_tokens`` rows of ``dtype``; ``kind`` as in :func:`dispatch_spec`."""

        def make() -> Recipe:
            config, device = rank.config, rank.device
            spec = dispatch_spec(rank.workspace, device, input_dtype=dtype, **kind)
            launch = dispatch_launch(config, device, num_tokens, encodes=bool(spec.SOURCE == ENCODE))
            cut = Cut.of(num_tokens, programs=launch.send, world_size=rank.workspace.world_size)
            shared = shared_bounds(config, num_tokens)
            sending = (
                rank.me, rank.first, config.num_local_experts, num_tokens, cut.tokens_per_program, cut.split, *shared
            )  # fmt: skip
            return cls(
                spec, launch, layout_launch(config, device), 1 + cut.programs, shared, sending,
                notes=rank.workspace.notes(num_tokens),
                counts=Blank.of(config.num_local_experts, config.world_size),
                outputs=OutputShape.of(config, rows=config.row_capacity, weighted=bool(spec.WEIGHTS)),
            )  # fmt: skip

        return rank.once((cls, num_tokens, dtype, *kind.values()), make)


class Dispatch:
    """A dispatch of one rank: :meth:`send` and then :meth:`receive`, or :meth:`send_and_receive` in one launch."""

    def __init__(self, rank: Rank, request: DispatchRequest, identity: str) -> None:
        config, device = rank.config, rank.device
        self.rank, self.request = rank, request
        num_tokens = request.x.shape[0]
        weights = request.topk_weights
        if weights is not None:
            weights = evaluate_weights(
                weights, num_tokens=num_tokens, topk=config.topk, device=device, dtype=config.weight_dtype
            )
            assert weights is not None
            weights = weights.contiguous()
        input_scale = None if request.input_scale is None else evaluate_input_scale(request.input_scale)
        self.recipe = Recipe.of(
            rank, num_tokens, dtype=request.x.dtype, quantized=request.scales is not None, weights=weights is not None,
            input_scale=input_scale is not None, cached=request.routing is not None,
        )  # fmt: skip
        counts = self.recipe.counts.on(device)
        plan = self._plan(counts)
        handle = DispatchHandle(
            owner=identity, rank=config.rank, num_tokens=num_tokens, topk_ids=request.topk_ids, topk_weights=weights,
            counts=counts, plan=plan,
        )  # fmt: skip
        if request.out is None:
            self.output = self.recipe.outputs.allocate(handle, device)
        else:
            self.output = dataclasses.replace(request.out, handle=handle)
        x, scales = request.x, request.scales
        if x.data_ptr() % 16:  # a view that begins anywhere; rows are read in words of up to 16 bytes
            x = x.clone()
        if self.recipe.spec.SOURCE == COPY:
            x = x.view(torch.uint8)
        self._rows = (
            x, rank.optional(None if scales is None else scales.view(torch.uint8)), rank.optional(input_scale),
            request.topk_ids, rank.optional(weights), plan.slot_of, plan.sent,
        )  # fmt: skip
        self._given = [t for t in (x, scales, input_scale, request.topk_ids, weights) if t is not None]

    def _plan(self, counts: Tensor) -> SymmetricPlan:
        """What this call notes. Over an earlier call's routing: in which that one's notes stand, which are only read.
        Its ``received`` and ``counts`` are read beside this call's own, as this one may fail where that one did not."""
        routing = self.request.routing
        if routing is None:
            plan = SymmetricPlan.allocate(self.recipe.notes, self.rank.device)
            self._routed = (plan.received, counts)  # not read
            return plan
        noted: SymmetricPlan = routing.handle.plan
        self._routed = (noted.received, routing.handle.counts)
        return noted.again()

    def _outputs(self) -> tuple[Tensor, ...]:
        out, rank = self.output, self.rank
        plan: SymmetricPlan = out.handle.plan
        routed = out.weights if self.rank.config.layout == "expert" else out.topk_weights
        scales = rank.message_of_row if self.recipe.spec.LATER else out.scales
        return (
            out.tokens.view(torch.uint8), rank.optional(None if scales is None else scales.view(torch.uint8)),
            out.row_offsets, rank.optional(out.expert_ids), out.src_info, rank.optional(out.scales_offsets),
            rank.optional(routed), rank.optional(out.topk_ids), out.num_recv_tokens, out.overflow, out.handle.counts,
            plan.received, plan.rows_of_message, plan.message_token, *self._routed,
        )  # fmt: skip

    def _receiving(self) -> tuple[int, ...]:
        config, rank = self.rank.config, self.rank
        return (
            rank.me, config.rank, config.num_local_experts, config.num_groups, *self.recipe.shared,
            self.output.tokens.shape[0], self._scale_rows(), config.world_size,
        )  # fmt: skip

    def _scale_rows(self) -> int:
        """Rows of a column of scales, where they are in columns."""
        scales = self.output.scales
        return scales.shape[1] if scales is not None and scales.dim() == 2 else 0

    def send(self) -> None:
        """Launch the sender role."""
        self.rank.launch(
            kernels.ep_dispatch_async_kernel,
            self.recipe.senders,
            *self._rows,
            self._routed[0],
            *self.recipe.sending,
            STATUS_OK,
            self.rank.limit,
            given=self._given,
            S=self.recipe.spec,
            options=self.recipe.launch.options,
            resident=self.recipe.launch.resident,
        )

    def receive(self) -> None:
        """Launch the receiver role."""
        self.rank.launch(
            kernels.ep_dispatch_wait_kernel, self.recipe.launch.receive, *self._outputs(), *self._receiving(),
            STATUS_OK, self.rank.limit, given=self._given, S=self.recipe.spec,
            options=self.recipe.launch.options, resident=self.recipe.launch.resident,
        )  # fmt: skip
        self._lay_out_scales()
        self.rank.tell_drained()

    def send_and_receive(self) -> None:
        """Launch both roles at once."""
        me, _, num_local, num_groups, *rest = self._receiving()
        recipe, rank = self.recipe, self.rank
        shared_begin, shared_end, capacity, scale_rows, stride = rest
        rank.launch(
            kernels.ep_fused_dispatch_kernel, recipe.senders + recipe.launch.receive, *self._rows, *self._outputs(),
            me, rank.config.rank, rank.first, num_local, num_groups, *recipe.sending[3:6], shared_begin, shared_end,
            capacity, scale_rows, stride, STATUS_OK, recipe.senders, rank.limit, given=self._given, S=recipe.spec,
            options=recipe.launch.options, resident=recipe.launch.resident,
        )  # fmt: skip
        self._lay_out_scales()

    def _lay_out_scales(self) -> None:
        """Where the receiver only noted which message a row came with: bring the scales into their layout."""
        rank, out, recipe = self.rank, self.output, self.recipe
        if not recipe.spec.LATER:
            return
        assert out.scales is not None
        launch = recipe.layout
        rank.launch(
            ep_lay_out_scales_kernel, launch.receive, out.row_offsets, rank.message_of_row,
            out.scales.view(torch.uint8), rank.config.num_groups, self._scale_rows(), S=recipe.spec,
            options=launch.options, resident=launch.resident,
        )  # fmt: skip

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
    rank.launch(
        kernels.ep_dispatch_async_kernel, 1, *[dummy] * 8, rank.me, rank.first, rank.config.num_local_experts,
        0, 1, 1, 0, 0, STATUS_ABORT, rank.limit, S=spec, options=launch.options,
    )  # fmt: skip
    rank.launch(
        kernels.ep_dispatch_wait_kernel, 1, *[dummy] * 16, rank.me, rank.config.rank, rank.config.num_local_experts,
        rank.config.num_groups, 0, 0, 0, 0, rank.config.world_size, STATUS_ABORT, rank.limit, S=spec,
        options=launch.options,
    )  # fmt: skip
    rank.tell_drained()
