"""Launchers of dispatch over tensors and pointers of the caller: fused, and split into two launches.

No memory is allocated and nothing synchronises: they may be captured in a CUDA graph. They launch on the current stream
of their device; all launches of one rank belong on one stream, or on streams ordered by events. Every ``async`` is
followed by its ``wait`` before the next ``async`` of the same group. Ranks make the same sequence of calls, each with
any number of tokens.

Arguments are checked before anything is launched; a rank whose arguments are refused launches nothing, so the waits of
its peers end after ``timeout``. (``moelink.init`` tells them at once.)

A CPU runs programs and launches one after the other: with several ranks in a process use the split form, every rank's
``async`` before the first ``wait``, as :func:`~moelink.contract.devices.distributed_ep_dispatch` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moelink.arith import is_integer
from moelink.contract.launch import Prepared, grant_credits, launch, launching, notes_of, or_dummy, relative_to
from moelink.contract.notes import Given
from moelink.contract.tensors import (
    EPRouting,
    TokenHandler,
    check_counters,
    check_ids,
    check_num_tokens,
    check_output,
    check_pointers,
    check_tensor,
    describe,
)
from moelink.errors import ArgumentError
from moelink.kernels.dispatch import kernel as kernels
from moelink.kernels.dispatch.scales import ep_lay_out_scales_kernel
from moelink.kernels.launch.constants import COPY, ENCODE, DispatchSpec, dispatch_spec
from moelink.kernels.launch.grid import Launch, TokenSplit, dispatch_launch, dispatch_numbers, layout_launch
from moelink.kernels.records import CachedRouting, DispatchInputs, DispatchNumbers, DispatchOutputs
from moelink.memory.layout import as_bytes
from moelink.memory.workspace import DISPATCH

if TYPE_CHECKING:
    from moelink.contract.buffers import EPBuffers


@launching
def ep_fused_dispatch(
    ep: EPBuffers,
    token_handler: TokenHandler,
    row_offsets: Tensor,
    expert_ids: Tensor | None,
    src_info: Tensor,
    atomic_counters: Tensor,
    input_tokens: Tensor,
    topk_ids: Tensor,
    pointers: Tensor,
    routing: EPRouting,
    *,
    router_weights: Tensor | None = None,
    input_scales: Tensor | None = None,
) -> Prepared:
    """Quantise and send tokens to their experts' ranks, wait for rows of others, and pack them: one launch.

    ``T`` tokens of this rank, ``G`` groups: local experts, and before them the shared one when it is fused. Tensors
    that are filled begin at a multiple of 16 bytes.

    Args:
        ep: the result of ``ep_init``.
        token_handler: where rows and their scales go.
        row_offsets: [G + 1] int32, filled: exclusive starts of the groups; the last one counts all rows.
        expert_ids: [G] int32, filled with 0 .. G - 1, which never changes; None once that is done.
        src_info: [rows, 3] int32, filled: source rank, source token, top-k slot.
        atomic_counters: ``ep.atomic_counters[0]``.
        input_tokens: [T, hidden_size] bf16, fp16 or fp32 (fp64 for format fp64), from a multiple of 4 bytes on.
        topk_ids: [T, top_k] int32 or int64, -1 where not routed. Combine reads it again.
        pointers: ``ep.pointers[0]``: [3, W] send, recv and recv_count of every rank.
        routing: filled, for combine.
        router_weights: [T, top_k] of the accumulation dtype, to travel with the rows. ``token_handler.weights`` gets
            them. With ``pre_reduce`` that is the only way to weight.
        input_scales: fp32, at least one element, of which the first counts: the global scale of NVFP4.

    Raises:
        ArgumentError: a tensor does not fit; nothing was launched.
    """
    given = _Given(ep, pointers, atomic_counters, input_tokens, topk_ids, routing, router_weights, input_scales)
    outputs = _Outputs(ep, token_handler, row_offsets, expert_ids, src_info, routing, pointers)
    require_weights(token_handler, given.noted.weighted, because="router_weights")
    how = given.how
    numbers = outputs.numbers(given.numbers)._replace(programs=given.senders + how.receive)
    records = (given.inputs, outputs.record(given.spec), given.notes, outputs.cached)

    def start(*, in_turn: bool = False) -> None:
        ep.notes.add("dispatch", routing.slot_of, given.noted)
        outputs.note()
        launch(ep, kernels.ep_fused_dispatch_kernel, pointers, atomic_counters, records, numbers, how, S=given.spec)
        outputs.lay_out_scales(pointers, atomic_counters, numbers, given.spec)

    return start


@launching
def ep_dispatch_async(
    ep: EPBuffers,
    atomic_counters: Tensor,
    input_tokens: Tensor,
    topk_ids: Tensor,
    pointers: Tensor,
    routing: EPRouting,
    *,
    router_weights: Tensor | None = None,
    input_scales: Tensor | None = None,
) -> Prepared:
    """The first half of :func:`ep_fused_dispatch`: start the transfers. Inputs stay unmodified until the other half."""
    given = _Given(ep, pointers, atomic_counters, input_tokens, topk_ids, routing, router_weights, input_scales)
    cached = CachedRouting(routing.received, routing.counts)
    numbers = given.numbers._replace(programs=given.senders)
    records = (given.inputs, given.notes, cached)

    def start(*, in_turn: bool = False) -> None:
        ep.notes.add("dispatch", routing.slot_of, given.noted)
        launch(
            ep, kernels.ep_dispatch_async_kernel, pointers, atomic_counters, records, numbers, given.how, S=given.spec
        )

    return start


@launching
def ep_dispatch_wait(
    ep: EPBuffers,
    token_handler: TokenHandler,
    row_offsets: Tensor,
    expert_ids: Tensor | None,
    src_info: Tensor,
    pointers: Tensor,
    atomic_counters: Tensor,
    routing: EPRouting,
    *,
    num_input_tokens: int,
) -> Prepared:
    """The second half: wait for the transfers and pack the rows.

    ``num_input_tokens`` is ``T`` of the first half: rows of the shared group, when one is fused. ``routing`` is that of
    the first half, and ``token_handler`` has weights exactly when that was given weights.

    Raises:
        ArgumentError: a tensor does not fit, or something differs from the first half; nothing was launched.
    """
    outputs = _Outputs(ep, token_handler, row_offsets, expert_ids, src_info, routing, pointers)
    check_pointers(ep, DISPATCH, pointers)
    check_counters(ep, atomic_counters)
    most = ep.params.max_token_per_rank
    if not is_integer(num_input_tokens, 0) or num_input_tokens > most:
        raise ArgumentError("num_input_tokens", f"an integer in [0, {most}]", num_input_tokens)
    spec = _spec(ep, ep.config.format.input_dtypes[0], weights=token_handler.weights is not None)
    how = _launch_of(ep, num_input_tokens, spec)
    numbers = outputs.numbers(dispatch_numbers(ep, num_input_tokens))._replace(programs=how.receive)
    records = (outputs.record(spec), notes_of(ep, routing), outputs.cached)

    def start(*, in_turn: bool = False) -> None:
        sent = ep.notes.given("dispatch", routing.slot_of)
        if not sent:
            raise ArgumentError("routing", "the one that ep_dispatch_async was given", "one that it was not given")
        check_num_tokens("num_input_tokens", num_input_tokens, sent, where="ep_dispatch_async")
        weighted = {each.weighted for each in sent if each.num_tokens == num_input_tokens}
        if len(weighted) == 1:
            require_weights(token_handler, weighted.pop(), because="router_weights of ep_dispatch_async")
        outputs.note()
        launch(ep, kernels.ep_dispatch_wait_kernel, pointers, atomic_counters, records, numbers, how, S=spec)
        outputs.lay_out_scales(pointers, atomic_counters, numbers, spec)
        grant_credits(ep, pointers, atomic_counters, spec, in_turn=in_turn)

    return start


def require_weights(token_handler: TokenHandler, weighted: bool, *, because: str) -> None:
    """Raise ArgumentError unless weights that travel have a tensor, and others have none."""
    if weighted != (token_handler.weights is not None):
        expected = f"a tensor, as {because} are given" if weighted else f"None without {because}"
        raise ArgumentError("token_handler.weights", expected, describe(token_handler.weights))


def _spec(ep: EPBuffers, input_dtype: torch.dtype, *, weights: bool, input_scale: bool = False) -> DispatchSpec:
    spec = dispatch_spec(
        ep.workspace, ep.device, input_dtype=input_dtype, quantized=False, weights=weights, input_scale=input_scale,
    )  # fmt: skip
    return cast(DispatchSpec, relative_to(spec, ep.starts[DISPATCH]))


def _launch_of(ep: EPBuffers, num_tokens: int, spec: DispatchSpec) -> Launch:
    """How a dispatch of so many own tokens is launched: as a communicator's."""
    return dispatch_launch(ep.config, ep.device, num_tokens, encodes=bool(spec.SOURCE == ENCODE))


class _Given:
    """Checked inputs of the sender role."""

    def __init__(
        self,
        ep: EPBuffers,
        pointers: Tensor,
        atomic_counters: Tensor,
        input_tokens: Tensor,
        topk_ids: Tensor,
        routing: EPRouting,
        router_weights: Tensor | None,
        input_scales: Tensor | None,
    ) -> None:
        config = ep.config
        check_pointers(ep, DISPATCH, pointers)
        check_counters(ep, atomic_counters)
        count = check_ids(ep, topk_ids)
        check_tensor(ep, "input_tokens", input_tokens, (count, config.hidden_size), *config.format.input_dtypes)
        if input_tokens.data_ptr() % 4:
            start = f"{input_tokens.data_ptr() % 4} bytes behind one"
            raise ArgumentError("input_tokens", "a tensor that begins at a multiple of 4 bytes", start)
        routing.check(ep)
        if router_weights is not None:
            check_tensor(ep, "router_weights", router_weights, (count, config.topk), config.weight_dtype)
        if input_scales is not None:
            if not config.format.uses_input_scale:
                raise ArgumentError("input_scales", f"None for format {config.format.name!r}", describe(input_scales))
            elements = input_scales.numel() if isinstance(input_scales, Tensor) else 1
            check_tensor(ep, "input_scales", input_scales, (max(1, elements),), torch.float32)
        self.noted = Given(count, router_weights is not None)
        self.spec = _spec(ep, input_tokens.dtype, weights=self.noted.weighted, input_scale=input_scales is not None)
        x = as_bytes(input_tokens) if self.spec.SOURCE == COPY else input_tokens
        self.inputs = DispatchInputs(
            x, pointers, or_dummy(input_scales, pointers), topk_ids, or_dummy(router_weights, pointers)
        )
        self.notes = notes_of(ep, routing)
        self.how = _launch_of(ep, count, self.spec)
        cut = TokenSplit.of(count, programs=self.how.send, world_size=ep.workspace.world_size)
        self.senders = 1 + cut.programs
        self.numbers = dispatch_numbers(ep, count, cut=cut, senders=self.senders)


class _Outputs:
    """Checked outputs of the receiver role."""

    def __init__(
        self,
        ep: EPBuffers,
        token_handler: TokenHandler,
        row_offsets: Tensor,
        expert_ids: Tensor | None,
        src_info: Tensor,
        routing: EPRouting,
        dummy: Tensor,
    ) -> None:
        token_handler.check(ep)
        rows, groups = len(token_handler.output_tokens), ep.config.num_groups
        check_output(ep, "row_offsets", row_offsets, (groups + 1,), torch.int32)
        check_output(ep, "src_info", src_info, (rows, 3), torch.int32)
        if expert_ids is not None:
            check_output(ep, "expert_ids", expert_ids, (groups,), torch.int32)
        routing.check(ep)
        scales = token_handler.output_scales
        self._ep, self._scales, self._row_offsets = ep, scales, row_offsets
        self._outputs = DispatchOutputs(
            as_bytes(token_handler.output_tokens), dummy if scales is None else as_bytes(scales),
            row_offsets, or_dummy(expert_ids, ep.spare), src_info, or_dummy(token_handler.scales_offsets, dummy),
            or_dummy(token_handler.weights, dummy), dummy, routing.num_recv_tokens, routing.overflow, routing.counts,
        )  # fmt: skip
        self.cached = CachedRouting(routing.received, routing.counts)
        self._notes, self._rows = ep.notes, rows
        scale_rows = scales.shape[1] if scales is not None and scales.dim() == 2 else 0
        self._extents = {"capacity": rows, "scale_rows": scale_rows}

    def record(self, spec: DispatchSpec) -> DispatchOutputs:
        """Return the record that the kernels fill. If a launch of its own writes the scales, they note each row's
        message in their place."""
        if not spec.SCALES_LATER:
            return self._outputs
        return self._outputs._replace(scales=self._ep.message_of_row)

    def lay_out_scales(
        self, pointers: Tensor, atomic_counters: Tensor, numbers: DispatchNumbers, spec: DispatchSpec
    ) -> None:
        """Launch the scale kernel where the receiver only noted the message that each row came with."""
        if not spec.SCALES_LATER:
            return
        assert self._scales is not None
        how = layout_launch(self._ep.config, self._ep.device)
        tensors = (self._row_offsets, self._ep.message_of_row, as_bytes(self._scales))
        numbers = numbers._replace(programs=how.receive)
        launch(self._ep, ep_lay_out_scales_kernel, pointers, atomic_counters, tensors, numbers, how, S=spec)

    def note(self) -> None:
        """Note the capacity, for ``ep.check()``."""
        self._notes.add_rows(self._rows)

    def numbers(self, numbers: DispatchNumbers) -> DispatchNumbers:
        """``numbers`` with those of the output."""
        return numbers._replace(**self._extents)
