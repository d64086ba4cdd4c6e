"""Launchers of combine over tensors and pointers of the caller: fused, and split into two launches.

The rules of ``contract.dispatch`` also hold here. Products are rounded before they are added (no fused
multiply-add), so results are the same bits everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from moelink.contract.launch import Prepared, grant_credits, launch, launching, notes_of, or_dummy, relative_to
from moelink.contract.notes import Given
from moelink.contract.tensors import (
    EPRouting,
    check_counters,
    check_dispatched,
    check_ids,
    check_pointers,
    check_tensor,
    describe,
)
from moelink.errors import ArgumentError
from moelink.hooks import Hook
from moelink.kernels.combine import kernel as kernels
from moelink.kernels.launch.constants import CombineSpec, combine_spec
from moelink.kernels.launch.grid import Launch, combine_launch, combine_numbers
from moelink.kernels.launch.own_rows import with_own_rows
from moelink.kernels.records import CombineInputs, CombineOutputs
from moelink.memory.workspace import COMBINE

if TYPE_CHECKING:
    from moelink.contract.buffers import EPBuffers


@launching
def ep_fused_combine(
    ep: EPBuffers,
    output_tokens: Tensor,
    atomic_counters: Tensor,
    input_tokens: Tensor,
    routing: EPRouting,
    pointers: Tensor,
    topk_ids: Tensor,
    *,
    router_weights: Tensor | None = None,
    row_weights: Tensor | None = None,
    shared: Tensor | None = None,
    epilogue_fn: Tensor | Hook | None = None,
) -> Prepared:
    """Send expert outputs home, wait for the rows that others send back, and sum them: one launch.

    Args:
        ep: the result of ``ep_init``.
        output_tokens: [T, hidden_size] of ``combine_dtype``, filled with the sums; or [T, top_k, hidden_size], filled
            with the rows as they came (without ``pre_reduce``, weights, shared expert or epilogue): zero where a slot
            has none.
        atomic_counters: ``ep.atomic_counters[1]``.
        input_tokens: [rows, hidden_size] of ``combine_dtype``: row i is the experts' output for row i of dispatch's.
        routing: filled by the dispatch that is combined. It may be an earlier one, and combined before, or its
            ``clone``.
        pointers: ``ep.pointers[1]``: [3, W] send, recv and recv_count of every rank.
        topk_ids: [T, top_k], the ids of that dispatch; ``T`` is its number of tokens.
        router_weights: [T, top_k] of the accumulation dtype, multiplied with the rows at home (without ``pre_reduce``).
        row_weights: [rows] ``token_handler.weights`` of a dispatch that was given weights, multiplied where the rows
            are (with ``pre_reduce`` or ``skip_a2a``). Without either kind rows are summed unweighted.
        shared: [T, hidden_size] of ``combine_dtype`` to add before the rounding: the output of a shared expert that is
            not fused.
        epilogue_fn: a bias [hidden_size] or residual [T, hidden_size] to add before the rounding (not with
            ``skip_a2a``, where every rank would add it), or a Hook with a ``triton_fn`` that stores instead
            (``output_tokens`` stays untouched).

    Raises:
        ArgumentError: a tensor does not fit; nothing was launched.
    """
    given = CheckedCombine(
        ep, output_tokens, atomic_counters, input_tokens, routing, pointers, topk_ids, router_weights=router_weights,
        row_weights=row_weights, shared=shared, epilogue_fn=epilogue_fn,
    )  # fmt: skip
    spec = with_own_rows(given.spec, ep.workspace, ep.device)
    how = launch_of(ep, len(topk_ids), spec)
    senders = 0 if spec.ALLREDUCE else how.send
    numbers = given.numbers._replace(programs=senders + how.receive, senders=senders, spread=how.spread)
    records = (given.inputs, given.outputs, given.notes)

    def start(*, in_turn: bool = False) -> None:
        launch(ep, kernels.ep_fused_combine_kernel, pointers, atomic_counters, records, numbers, how, S=spec)

    return start


@launching
def ep_combine_async(
    ep: EPBuffers,
    atomic_counters: Tensor,
    input_tokens: Tensor,
    routing: EPRouting,
    pointers: Tensor,
    *,
    row_weights: Tensor | None = None,
) -> Prepared:
    """The first half of :func:`ep_fused_combine`: send rows home. ``input_tokens`` stay unmodified until the second.

    With ``skip_a2a`` nothing travels, and nothing is launched.
    """
    return prepare_sender(ep, atomic_counters, input_tokens, routing, pointers, row_weights=row_weights)


def prepare_sender(
    ep: EPBuffers,
    atomic_counters: Tensor,
    input_tokens: Tensor,
    routing: EPRouting,
    pointers: Tensor,
    *,
    row_weights: Tensor | None,
    how: Launch | None = None,
) -> Prepared:
    """Check the arguments of :func:`ep_combine_async`; the result launches it, as ``how`` says, or as a communicator
    would."""
    _check_sender(ep, atomic_counters, input_tokens, routing, pointers, row_weights)
    check_dispatched(ep, routing)
    spec = spec_of(ep, row_weights=row_weights is not None)
    inputs = CombineInputs(input_tokens, or_dummy(row_weights, pointers), *[pointers] * 4)
    records = (inputs, notes_of(ep, routing))
    tokens = max(each.num_tokens for each in ep.notes.given("dispatch", routing.slot_of))
    chosen = launch_of(ep, tokens, spec) if how is None else how
    numbers = combine_numbers(ep, tokens, y_rows=len(input_tokens), spread=chosen.spread)._replace(programs=chosen.send)

    def start(*, in_turn: bool = False) -> None:
        ep.notes.add("combine", routing.slot_of, Given(0, row_weights is not None))
        if not spec.ALLREDUCE:
            launch(ep, kernels.ep_combine_async_kernel, pointers, atomic_counters, records, numbers, chosen, S=spec)

    return start


@launching
def ep_combine_wait(
    ep: EPBuffers,
    output_tokens: Tensor,
    atomic_counters: Tensor,
    input_tokens: Tensor,
    routing: EPRouting,
    pointers: Tensor,
    topk_ids: Tensor,
    *,
    router_weights: Tensor | None = None,
    row_weights: Tensor | None = None,
    shared: Tensor | None = None,
    epilogue_fn: Tensor | Hook | None = None,
) -> Prepared:
    """The second half: wait for the rows and sum them.

    ``input_tokens`` are read again with ``skip_a2a`` and for the fused shared expert. ``routing`` and ``row_weights``
    are those of the first half.

    Raises:
        ArgumentError: a tensor does not fit, or something differs from the first half; nothing was launched.
    """
    given = CheckedCombine(
        ep, output_tokens, atomic_counters, input_tokens, routing, pointers, topk_ids, router_weights=router_weights,
        row_weights=row_weights, shared=shared, epilogue_fn=epilogue_fn,
    )  # fmt: skip
    how = launch_of(ep, len(topk_ids), given.spec)
    numbers = given.numbers._replace(programs=how.receive)
    records = (given.inputs, given.outputs, given.notes)

    def start(*, in_turn: bool = False) -> None:
        sent = ep.notes.given("combine", routing.slot_of)
        if not sent and not ep.params.skip_a2a:
            raise ArgumentError("routing", "the one that ep_combine_async was given", "one that it was not given")
        weighted = {each.weighted for each in sent}
        if len(weighted) == 1 and (row_weights is not None) not in weighted:
            expected = "those of ep_combine_async" if weighted.pop() else "None, as in ep_combine_async"
            raise ArgumentError("row_weights", expected, describe(row_weights))
        launch(ep, kernels.ep_combine_wait_kernel, pointers, atomic_counters, records, numbers, how, S=given.spec)
        grant_credits(ep, pointers, atomic_counters, given.spec, in_turn=in_turn)

    return start


def spec_of(ep: EPBuffers, *, row_weights: bool, home_weights: bool = False, **options: Any) -> CombineSpec:
    """Launch constants of a combine, relative to its pointers; ``options``: of ``combine_spec``."""
    spec = combine_spec(ep.workspace, ep.device, row_weights=row_weights, home_weights=home_weights, **options)
    return cast(CombineSpec, relative_to(spec, ep.starts[COMBINE]))


def launch_of(ep: EPBuffers, num_tokens: int, spec: CombineSpec) -> Launch:
    """How a combine of so many own tokens is launched: as a communicator's."""
    sums, stay = bool(spec.SENDS_SUMS), bool(spec.OWN_ROWS_STAY)
    return combine_launch(ep.workspace, ep.device, num_tokens, sums=sums, own_rows_stay=stay)


def _check_sender(
    ep: EPBuffers,
    atomic_counters: Tensor,
    input_tokens: Tensor,
    routing: EPRouting,
    pointers: Tensor,
    row_weights: Tensor | None,
) -> None:
    config = ep.config
    check_pointers(ep, COMBINE, pointers)
    check_counters(ep, atomic_counters)
    check_tensor(ep, "input_tokens", input_tokens, (len(input_tokens), config.hidden_size), config.combine_dtype)
    if past := input_tokens.data_ptr() % 4:
        raise ArgumentError("input_tokens", "a tensor that begins at a multiple of 4 bytes", f"{past} bytes behind one")
    routing.check(ep)
    if row_weights is not None:
        if not (config.pre_reduce or config.mode == "allreduce"):
            expected = "None without pre_reduce and skip_a2a: rows are weighted at home, by router_weights"
            raise ArgumentError("row_weights", expected, describe(row_weights))
        check_tensor(ep, "row_weights", row_weights, (len(input_tokens),), config.weight_dtype)


class CheckedCombine:
    """Checked tensors of a combine."""

    def __init__(
        self,
        ep: EPBuffers,
        output_tokens: Tensor,
        atomic_counters: Tensor,
        input_tokens: Tensor,
        routing: EPRouting,
        pointers: Tensor,
        topk_ids: Tensor,
        *,
        router_weights: Tensor | None = None,
        row_weights: Tensor | None = None,
        shared: Tensor | None = None,
        epilogue_fn: Tensor | Hook | None = None,
    ) -> None:
        config = ep.config
        _check_sender(ep, atomic_counters, input_tokens, routing, pointers, row_weights)
        count = check_ids(ep, topk_ids)
        shape: tuple[int, ...] = (count, config.hidden_size)
        reduce = not (isinstance(output_tokens, Tensor) and output_tokens.dim() == 3)
        if not reduce:
            shape = (count, config.topk, config.hidden_size)
            given = (router_weights, row_weights, shared, epilogue_fn)
            if config.fused_shared_expert or config.pre_reduce or any(value is not None for value in given):
                expected = "[T, hidden_size] with pre_reduce, weights, a shared expert or an epilogue"
                raise ArgumentError("output_tokens", expected, describe(output_tokens))
        check_tensor(ep, "output_tokens", output_tokens, shape, config.combine_dtype)
        if router_weights is not None:
            if row_weights is not None or config.pre_reduce:
                expected = "None with row_weights or pre_reduce: there, weights go into dispatch"
                raise ArgumentError("router_weights", expected, describe(router_weights))
            check_tensor(ep, "router_weights", router_weights, (count, config.topk), config.weight_dtype)
        if shared is not None:
            if config.fused_shared_expert or config.mode == "allreduce":
                raise ArgumentError("shared", "None with fused_shared_expert or skip_a2a", describe(shared))
            check_tensor(ep, "shared", shared, shape, config.combine_dtype)
        bias, hook, tensors = _epilogue(ep, epilogue_fn, count)
        check_dispatched(ep, routing, count)
        self.spec = spec_of(
            ep, row_weights=row_weights is not None, home_weights=router_weights is not None, reduce=reduce,
            shared=shared is not None, epilogue="" if bias is None else "bias" if bias.dim() == 1 else "residual",
            hook=hook,
        )  # fmt: skip
        self.inputs = CombineInputs(
            input_tokens, or_dummy(row_weights, pointers), or_dummy(router_weights, pointers), topk_ids,
            or_dummy(shared, pointers), or_dummy(bias, pointers),
        )  # fmt: skip
        self.outputs = CombineOutputs(output_tokens, tensors or (pointers,))
        self.notes = notes_of(ep, routing)
        self.numbers = combine_numbers(ep, count, y_rows=len(input_tokens))


def _epilogue(
    ep: EPBuffers, epilogue_fn: Tensor | Hook | None, count: int
) -> tuple[Tensor | None, Any, tuple[Tensor, ...]]:
    """(bias or residual, Triton function, its tensors)."""
    if isinstance(epilogue_fn, Hook):
        if epilogue_fn.triton_fn is None:
            raise ArgumentError("epilogue_fn", "a Hook with a triton_fn", "one without")
        if epilogue_fn.check is not None:
            epilogue_fn.check(count, ep.config.hidden_size, ep.device)
        return None, epilogue_fn.triton_fn, epilogue_fn.tensors
    if epilogue_fn is not None:
        if not isinstance(epilogue_fn, Tensor):
            raise ArgumentError("epilogue_fn", "a tensor or a Hook", type(epilogue_fn).__name__)
        if ep.params.skip_a2a:
            expected = "None or a Hook with skip_a2a: a tensor would be added once per rank"
            raise ArgumentError("epilogue_fn", expected, describe(epilogue_fn))
        hidden = ep.config.hidden_size
        shape = (hidden,) if epilogue_fn.dim() == 1 else (count, hidden)
        check_tensor(ep, "epilogue_fn", epilogue_fn, shape, epilogue_fn.dtype)
    return epilogue_fn, None, ()
