"""Compile the kernels of the launchers before the first call, without running any of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moelink.contract.combine import ep_combine_async, ep_combine_wait, ep_fused_combine
from moelink.contract.dispatch import ep_dispatch_async, ep_dispatch_wait, ep_fused_dispatch
from moelink.contract.notes import CallNotes, Given
from moelink.contract.tensors import EPRouting, TokenHandler
from moelink.errors import ArgumentError
from moelink.hooks import Hook
from moelink.memory.workspace import COMBINE, DISPATCH

if TYPE_CHECKING:
    from moelink.contract.buffers import EPBuffers

FORMS = ("fused", "split", "phases")
"""How a call may be launched: at once; in two halves; a combine in the phases of ``EPCombineKernel``."""

INTEGERS = (torch.int32, torch.int64)


def warm_up(
    ep: EPBuffers,
    *,
    input_dtypes: Sequence[torch.dtype] | None,
    id_dtypes: Sequence[torch.dtype],
    forms: Sequence[str],
    epilogues: Sequence[Tensor | Hook | None],
    shared: bool,
) -> None:
    """Compile and load the kernels of :meth:`EPBuffers.warmup`."""
    known = ep.config.format.input_dtypes
    dtypes = known[:1] if input_dtypes is None else tuple(input_dtypes)
    for name, values, legal in (("input_dtypes", dtypes, known), ("id_dtypes", id_dtypes, INTEGERS),
                                ("forms", forms, FORMS)):  # fmt: skip
        for value in values:
            if value not in legal:
                raise ArgumentError(name, f"of {', '.join(map(str, legal))}", value)
    if ep.device.type == "cpu":
        return
    with torch.no_grad(), ep.launcher.preparing():
        for start in launches(ep, dtypes, id_dtypes, forms, epilogues, shared):
            start()


def launches(
    ep: EPBuffers,
    input_dtypes: Sequence[torch.dtype],
    id_dtypes: Sequence[torch.dtype],
    forms: Sequence[str],
    epilogues: Sequence[Tensor | Hook | None],
    shared: bool,
) -> Iterator[Callable[[], None]]:
    """One launch of every form, of one token, over tensors and notes that nobody else uses."""
    scratch = dataclasses.replace(ep, notes=CallNotes())
    for ids_of in id_dtypes:
        ids = torch.zeros(min(1, ep.params.max_token_per_rank), ep.params.top_k, dtype=ids_of, device=ep.device)
        for weighted in (False, True):
            yield from _dispatches(scratch, input_dtypes, forms, ids, weighted)
        for options in _combine_options(ep, ids, epilogues, shared):
            yield from _combines(scratch, forms, ids, options)


def _dispatches(
    ep: EPBuffers, input_dtypes: Sequence[torch.dtype], forms: Sequence[str], ids: Tensor, weighted: bool
) -> Iterator[Callable[[], None]]:
    config, groups = ep.config, ep.config.num_groups
    handler = TokenHandler.allocate(ep, rows=1, weighted=weighted)
    offsets, experts, source = (
        torch.empty(*shape, dtype=torch.int32, device=ep.device) for shape in ((groups + 1,), (groups,), (1, 3))
    )
    routing, pointers, counters = EPRouting.allocate(ep), ep.pointers[DISPATCH], ep.atomic_counters[DISPATCH]
    weights = torch.empty(ids.shape, dtype=config.weight_dtype, device=ep.device) if weighted else None
    scales = [None, torch.ones(1, device=ep.device)] if config.format.uses_input_scale else [None]
    outputs = (handler, offsets, experts, source)
    for dtype in input_dtypes:
        x = torch.empty(len(ids), config.hidden_size, dtype=dtype, device=ep.device)
        for scale in scales:
            options: dict[str, Any] = {"router_weights": weights, "input_scales": scale}
            if "fused" in forms:
                yield ep_fused_dispatch.prepare(ep, *outputs, counters, x, ids, pointers, routing, **options)
            if "split" in forms:
                yield ep_dispatch_async.prepare(ep, counters, x, ids, pointers, routing, **options)
    if "split" in forms:
        # In turn: with the credits that ranks of one device grant after a receiving half, in ``distributed_*``.
        wait = ep_dispatch_wait.prepare(ep, *outputs, pointers, counters, routing, num_input_tokens=len(ids))
        yield partial(wait, in_turn=True)


def _combine_options(
    ep: EPBuffers, ids: Tensor, epilogues: Sequence[Tensor | Hook | None], shared: bool
) -> Iterator[dict[str, Any]]:
    """The keyword arguments of every combine that these parameters allow, and whether rows are summed."""
    config, replicated = ep.config, ep.params.skip_a2a
    weights: list[dict[str, Tensor]] = [{}]
    if config.pre_reduce or replicated:
        weights.append({"row_weights": torch.empty(1, dtype=config.weight_dtype, device=ep.device)})
    if not config.pre_reduce:
        weights.append({"router_weights": torch.empty(ids.shape, dtype=config.weight_dtype, device=ep.device)})
    added: list[dict[str, Tensor]] = [{}]
    if shared and not config.fused_shared_expert and not replicated:
        rows = torch.empty(len(ids), config.hidden_size, dtype=config.combine_dtype, device=ep.device)
        added.append({"shared": rows})
    for given in weights:
        for rows_added in added:
            for each in (None, *epilogues):
                epilogue = each[: len(ids)] if isinstance(each, Tensor) and each.dim() == 2 else each
                yield {**given, **rows_added, "epilogue_fn": epilogue}
    if not config.pre_reduce and not config.fused_shared_expert:
        yield {"reduce": False}


def _combines(ep: EPBuffers, forms: Sequence[str], ids: Tensor, given: dict[str, Any]) -> Iterator[Callable[[], None]]:
    config, kernel = ep.config, ep.combine_kernel
    names = ("router_weights", "row_weights", "shared", "epilogue_fn")
    options: dict[str, Any] = {name: given.get(name) for name in names}
    slots = () if given.get("reduce", True) else (config.topk,)
    y = torch.empty(1, config.hidden_size, dtype=config.combine_dtype, device=ep.device)
    out = torch.empty(len(ids), *slots, config.hidden_size, dtype=config.combine_dtype, device=ep.device)
    routing, pointers, counters = EPRouting.allocate(ep), ep.pointers[COMBINE], ep.atomic_counters[COMBINE]
    row = options["row_weights"]
    ep.notes.add("dispatch", routing.slot_of, Given(len(ids), weighted=False))  # with which the launchers compare
    if "fused" in forms:
        yield ep_fused_combine.prepare(ep, out, counters, y, routing, pointers, ids, **options)
    if "split" in forms:
        yield ep_combine_async.prepare(ep, counters, y, routing, pointers, row_weights=row)
        wait = ep_combine_wait.prepare(ep, out, counters, y, routing, pointers, ids, **options)
        yield partial(wait, in_turn=True)
    if "phases" in forms:
        ends, replicated = (routing, pointers, counters), ep.params.skip_a2a
        yield lambda: kernel.send_tokens_back(ep, y, *ends, row_weights=row)
        yield lambda: kernel.wait_for_all_arrivals(ep, *ends, ids)
        if config.fused_shared_expert:
            yield lambda: kernel.copy_shared_expert_outputs(ep, torch.empty_like(y), out)
        last: dict[str, Any] = {
            **options,
            "input_tokens": y if replicated else None,
            "row_weights": row if replicated else None,
        }
        yield lambda: kernel.reduce_and_copy_to_output(ep, out, *ends, ids, **last)
