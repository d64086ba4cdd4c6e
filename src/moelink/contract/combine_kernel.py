"""``EPCombineKernel``: layouts and launch facts of combine, and its phases as launches of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelink.arith import align_up
from moelink.contract.combine import CheckedCombine, prepare_sender, spec_of
from moelink.contract.launch import grant_credits, launch, notes_of
from moelink.contract.layouts import NUM_WARPS_COMBINE, LaunchFacts, facts_of, inside
from moelink.contract.notes import Given
from moelink.contract.params import EPParams
from moelink.contract.tensors import (
    EPRouting,
    check_counters,
    check_dispatched,
    check_ids,
    check_num_tokens,
    check_pointers,
    check_tensor,
    describe,
)
from moelink.errors import ArgumentError, ConfigError
from moelink.hooks import Hook
from moelink.kernels.combine import phases
from moelink.kernels.launch.grid import Launch, combine_numbers, sm_count
from moelink.kernels.records import CombineInputs, CombineOutputs
from moelink.memory.layout import REGION_ALIGNMENT
from moelink.memory.workspace import COMBINE

if TYPE_CHECKING:
    from moelink.contract.buffers import EPBuffers

WARPS = (1, 2, 4, 8)
"""Warps that a phase can be launched with."""


@dataclass(frozen=True, kw_only=True)
class EPCombineKernel(LaunchFacts):
    """Layout and launch facts of combine, and its phases, one launch each.

    A combine is :meth:`send_tokens_back`, :meth:`wait_for_all_arrivals`, with a fused shared expert
    :meth:`copy_shared_expert_outputs`, and :meth:`reduce_and_copy_to_output`, in this order on one stream. The result
    is bit for bit that of ``ep_fused_combine``, which does all of it in one launch. Phases are launched through
    ``ep.combine_kernel``, or through a copy of it with other ``n_sms`` and ``num_threads``, with which a phase is
    launched. In one process of several ranks on CPUs every rank makes one phase before any makes the next.

    Attributes:
        pre_reduce: as in :class:`EPParams`.
        n_parts: parts in which a message's row travels, each with a flag (``Workspace.combine_parts``).
    """

    pre_reduce: bool = False
    n_parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flag("pre_reduce")
        self._integer("n_parts", 1)

    def send_buf_layout(self, row: int) -> int:
        """Row ``row`` of the expert outputs, which are sent from where they are; across nodes its copy that is put.
        With ``pre_reduce`` that holds sums instead, and ``row`` is far * max_tokens_per_rank + slot of the message, far
        as in :meth:`EPDispatchKernel.send_buf_layout`."""
        if row < 0:
            raise ArgumentError("row", "at least 0", row)
        return row * (align_up(self.msg_bytes, REGION_ALIGNMENT) if self.inter_node_ranks else self.msg_bytes)

    def recv_buf_layout(self, token: int, copy: int) -> int:
        """The row of ``token`` in slot ``copy`` (with pre_reduce: formed by rank ``copy``).

        14336-byte rows, 8 slots, 128 tokens: (5, 2) is at (5 * 8 + 2) * 14336 = 602112; with pre_reduce at
        (2 * 128 + 5) * 14336 = 3741696.
        """
        inside("token", token, self._tokens)
        if self.pre_reduce:
            at = inside("copy", copy, self._copies) * self._tokens + token
        else:
            at = token * self.top_k + inside("copy", copy, self.top_k)
        return at * align_up(self.msg_bytes, REGION_ALIGNMENT)

    def recv_count_layout(self, sender: int, slot: int, part: int = 0) -> int:
        """The int64 flag of part ``part`` of message ``slot`` of rank ``sender``.

        128 tokens: (1, 3) is at (128 + 3) * 8 = 1048; in 4 parts (1, 3, 2) at ((128 + 3) * 4 + 2) * 8 = 4208.
        """
        message = inside("sender", sender, self._copies) * self._tokens + inside("slot", slot, self._tokens)
        return (message * self.n_parts + inside("part", part, self.n_parts)) * 8

    def send_tokens_back(
        self,
        ep: EPBuffers,
        input_tokens: Tensor,
        routing: EPRouting,
        pointers: Tensor,
        atomic_counters: Tensor,
        *,
        row_weights: Tensor | None = None,
    ) -> None:
        """Send processed tokens back to their original ranks, with ``n_send_sms`` CTAs.

        It is ``ep_combine_async`` with the arguments in the contract's order. Each CTA takes rows of one home rank.
        Rows go straight into the memory of ranks of this node, and by puts to other nodes. With ``skip_a2a`` nothing is
        launched.

        Args:
            ep: the result of ``ep_init``.
            input_tokens: [rows, hidden_size] of ``combine_dtype``: the tokens to be sent back. Unmodified until the
                last phase.
            routing: stands for the contract's ``src_info``: filled by the dispatch that is combined.
            pointers: ``ep.pointers[1]``; stands for ``send_buf_p``, ``recv_buf_ptrs`` and ``recv_count_ptrs``.
            atomic_counters: ``ep.atomic_counters[1]``; stands for ``atomic_counter``. A ``rank_completion_counter`` is
                not needed, and ``my_rank`` is ``ep.my_rank``.
            row_weights: [rows], as in ``ep_fused_combine``; with ``skip_a2a`` pass them to the last phase.

        Raises:
            ArgumentError: a tensor or a fact of this object does not fit ``ep``; nothing was launched.
        """
        self._check(ep)
        prepare_sender(
            ep, atomic_counters, input_tokens, routing, pointers, row_weights=row_weights, how=self._launch(),
        )()  # fmt: skip

    def wait_for_all_arrivals(
        self, ep: EPBuffers, routing: EPRouting, pointers: Tensor, atomic_counters: Tensor, topk_ids: Tensor
    ) -> None:
        """Wait, with ``n_wait_sms`` CTAs, until all rows of this rank's tokens have arrived.

        The order of the stream tells the next launch. With ``skip_a2a`` nothing is launched.

        Args:
            ep, routing, atomic_counters: as in :meth:`send_tokens_back`.
            pointers: ``ep.pointers[1]``; this rank's column of its last row is the contract's ``recv_count_p``.
            topk_ids: [T, top_k] int32 or int64, the ids of the dispatch: how many tokens there are.

        Raises:
            ArgumentError: an argument does not fit, or nothing was sent back over ``routing``; nothing was launched.
        """
        self._check(ep)
        check_pointers(ep, COMBINE, pointers)
        check_counters(ep, atomic_counters)
        routing.check(ep)
        count = check_ids(ep, topk_ids)
        check_dispatched(ep, routing, count)
        if not ep.notes.given("combine", routing.slot_of):
            expected = "one whose rows were sent back (send_tokens_back, ep_combine_async)"
            raise ArgumentError("routing", expected, "one whose rows were not")
        ep.notes.add("arrival", routing.slot_of, Given(count, weighted=False))
        spec = spec_of(ep, row_weights=False)
        if spec.ALLREDUCE:
            return
        inputs = CombineInputs(pointers, pointers, pointers, topk_ids, pointers, pointers)
        numbers = combine_numbers(ep, count)._replace(programs=self.n_wait_sms)
        launch(
            ep, phases.ep_wait_for_all_arrivals_kernel, pointers, atomic_counters, (inputs, notes_of(ep, routing)),
            numbers, self._launch(), S=spec,
        )  # fmt: skip

    def copy_shared_expert_outputs(self, ep: EPBuffers, input_tokens: Tensor, output_tokens: Tensor) -> None:
        """Copy the fused shared expert's rows to the output, with ``n_sms`` CTAs.

        Only where ``fused_shared_expert`` is enabled. :meth:`reduce_and_copy_to_output` adds the routed rows to them,
        before it rounds. With ``skip_a2a`` a rank computes the shared expert for its part of the tokens; the rows of
        the others become zero.

        Args:
            ep: the result of ``ep_init``.
            input_tokens: [rows, hidden_size] of ``combine_dtype``: expert outputs; the first rows are those of the
                shared expert.
            output_tokens: [T, hidden_size] of ``combine_dtype``, filled.

        Raises:
            ArgumentError: there is no fused shared expert, or a tensor does not fit; nothing was launched.
        """
        self._check(ep)
        if not self.fused_shared_expert:
            raise ArgumentError("fused_shared_expert", "True, for rows to copy", self.fused_shared_expert)
        config, most = ep.config, ep.params.max_token_per_rank
        count = len(output_tokens) if isinstance(output_tokens, Tensor) and output_tokens.dim() == 2 else -1
        if not 0 <= count <= most:
            raise ArgumentError("output_tokens", f"[T, {config.hidden_size}], T up to {most}", describe(output_tokens))
        check_tensor(ep, "output_tokens", output_tokens, (count, config.hidden_size), config.combine_dtype)
        numbers = combine_numbers(ep, count, y_rows=len(input_tokens))._replace(programs=self.n_sms)
        check_tensor(ep, "input_tokens", input_tokens, (len(input_tokens), config.hidden_size), config.combine_dtype)
        if len(input_tokens) < numbers.shared_end - numbers.shared_begin:
            expected = f"at least the {numbers.shared_end - numbers.shared_begin} rows of the shared expert"
            raise ArgumentError("input_tokens", expected, f"{len(input_tokens)} rows")
        ep.notes.add("copy", output_tokens, Given(count, weighted=False))
        unused = ep.pointers[COMBINE]
        inputs = CombineInputs(input_tokens, *[unused] * 5)
        launch(
            ep, phases.ep_copy_shared_expert_outputs_kernel, unused, ep.atomic_counters[COMBINE],
            (inputs, CombineOutputs(output_tokens, (unused,))), numbers, self._launch(),
            S=spec_of(ep, row_weights=False),
        )  # fmt: skip

    def reduce_and_copy_to_output(
        self,
        ep: EPBuffers,
        output_tokens: Tensor,
        routing: EPRouting,
        pointers: Tensor,
        atomic_counters: Tensor,
        topk_ids: Tensor,
        *,
        input_tokens: Tensor | None = None,
        router_weights: Tensor | None = None,
        row_weights: Tensor | None = None,
        shared: Tensor | None = None,
        epilogue_fn: Tensor | Hook | None = None,
    ) -> None:
        """Sum the rows that have arrived and store the result, with ``n_reduce_sms`` CTAs, or one if that is none.

        Args:
            ep, routing, atomic_counters, topk_ids: as in :meth:`wait_for_all_arrivals`.
            output_tokens: [T, hidden_size] or [T, top_k, hidden_size] of ``combine_dtype``, as in ``ep_fused_combine``.
                With a fused shared expert it holds the rows that :meth:`copy_shared_expert_outputs` stored, to which
                the sums are added.
            pointers: ``ep.pointers[1]``; this rank's column of its middle row is the contract's ``recv_buf_p``.
            input_tokens: [rows, hidden_size] expert outputs, with ``skip_a2a`` only, where rows are read in place.
            router_weights: [T, top_k], the contract's ``router_weights_wrapper``.
            row_weights: [rows], with ``skip_a2a`` only; elsewhere :meth:`send_tokens_back` multiplies.
            shared: as in ``ep_fused_combine``.
            epilogue_fn: the contract's ``elementwise_lambda_fn``, as in ``ep_fused_combine``.

        Raises:
            ArgumentError: an argument does not fit, or a phase before this one is missing; nothing was launched.
        """
        self._check(ep)
        if (input_tokens is not None) != self.skip_a2a:
            expected = "a tensor with skip_a2a" if self.skip_a2a else "None without skip_a2a: rows are read from recv"
            raise ArgumentError("input_tokens", expected, describe(input_tokens))
        if row_weights is not None and not self.skip_a2a:
            expected = "None without skip_a2a: send_tokens_back has multiplied by them"
            raise ArgumentError("row_weights", expected, describe(row_weights))
        rows = input_tokens
        if rows is None:
            rows = torch.empty(0, ep.config.hidden_size, dtype=ep.config.combine_dtype, device=ep.device)
        given = CheckedCombine(
            ep, output_tokens, atomic_counters, rows, routing, pointers, topk_ids, router_weights=router_weights,
            row_weights=row_weights, shared=shared, epilogue_fn=epilogue_fn,
        )  # fmt: skip
        self._check_phases(ep, output_tokens, routing, len(topk_ids))
        inputs, spec = given.inputs, given.spec
        if self.fused_shared_expert:
            # The rows are in the output: they are added as those of ``shared=`` are, where nothing is fused.
            inputs = inputs._replace(shared=output_tokens)
            spec = dataclasses.replace(spec, FUSED_SHARED_EXPERT=0, HAS_SHARED=True)
        launch(
            ep, phases.ep_reduce_and_copy_to_output_kernel, pointers, atomic_counters,
            (inputs, given.outputs, given.notes), given.numbers._replace(programs=max(1, self.n_reduce_sms)),
            self._launch(), S=spec,
        )  # fmt: skip
        grant_credits(ep, pointers, atomic_counters, spec)

    def _launch(self) -> Launch:
        """How a phase is launched."""
        return Launch(self.n_send_sms, max(1, self.n_reduce_sms), num_warps=self.n_warps)

    def _check(self, ep: EPBuffers) -> None:
        """Raise ArgumentError unless the facts are those of ``ep`` and a phase can be launched with them."""
        if ep.params.lamport:
            raise ArgumentError("lamport", "False for phases: sums without flags are summed while they arrive", True)
        known = ep.combine_kernel
        for field in dataclasses.fields(self):
            if field.name not in ("n_sms", "num_threads") and getattr(self, field.name) != getattr(known, field.name):
                expected = f"{getattr(known, field.name)!r}, as in ep.combine_kernel"
                raise ArgumentError(field.name, expected, getattr(self, field.name))
        limit_sms(self.n_sms, ep.device)
        if self.n_warps not in WARPS:
            expected = f"{', '.join(str(warps * self.warp_size) for warps in WARPS)} to launch with"
            raise ArgumentError("num_threads", expected, self.num_threads)

    def _check_phases(self, ep: EPBuffers, output_tokens: Tensor, routing: EPRouting, count: int) -> None:
        """Raise ArgumentError unless the phases before the last one were launched. Each counts once."""
        arrived = ep.notes.given("arrival", routing.slot_of)
        if not arrived and not self.skip_a2a:
            raise ArgumentError("routing", "one that wait_for_all_arrivals was given since", "one that it was not")
        copied = ep.notes.given("copy", output_tokens) if self.fused_shared_expert else {Given(count, weighted=False)}
        if not copied:
            expected = "the one that copy_shared_expert_outputs has filled since"
            raise ArgumentError("output_tokens", expected, "one that it has not")
        for name, given in (("topk_ids", arrived), ("output_tokens", copied)):
            if given:
                check_num_tokens(name, count, given, where="the phase before")
        ep.notes.finish(routing.slot_of, output_tokens)


def combine_kernel(params: EPParams, *, n_sms: int, warp_size: int = 32) -> EPCombineKernel:
    """The facts of a combine with these parameters."""
    row = params.config(0).combine_row_bytes
    return EPCombineKernel(
        **facts_of(params, n_sms, warp_size, num_warps=NUM_WARPS_COMBINE), msg_bytes=row, pre_reduce=params.pre_reduce,
        n_parts=params.workspace.combine_parts,
    )  # fmt: skip


def limit_sms(n_sms: int | None, device: torch.device) -> int:
    """Return the SMs of ``device`` that launches keep to: ``n_sms``, or all. On a CPU None stands for 2 CTAs.

    Raises:
        ConfigError: the device has fewer. CTAs of a phase wait for others, so all of them must be resident.
    """
    if device.type == "cpu":
        return n_sms or 2
    available = sm_count(device)
    if n_sms is not None and n_sms > available:
        raise ConfigError("n_sms", f"at most {available}, the SMs of {device}", n_sms)
    return n_sms or available
