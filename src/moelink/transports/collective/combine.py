"""One rank's combine: weigh and sum (or not) on the expert's rank, send rows home, sum there.

Sums start at +0 and are never fused with the product before them, so that every transport gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.arith import align_up
from moelink.config import EPConfig
from moelink.hooks import Hook, evaluate_weights
from moelink.layout import ALIGNMENT, as_bytes
from moelink.routing import RowPlan
from moelink.transports.base import CombineRequest
from moelink.transports.collective.plan import CollectivePlan
from moelink.transports.collective.steps import Announce, BadMessageError, Steps, Transfer


def combine_steps(config: EPConfig, request: CombineRequest) -> Steps[Tensor]:
    """The combine of one rank. Nothing is yielded, so nothing travels, in allreduce mode."""
    plan: CollectivePlan = request.recv.handle.plan
    if request.reduce and config.pre_reduce:
        total = yield from _sum_of_ranks(config, request, plan)
    else:
        slots, arrived = yield from _slots(config, request, plan)
        if not request.reduce:
            return _store(config, request, slots)
        total = _sum_of_slots(config, request, slots, arrived)
    return _finish(config, request, plan, total)


def _sum_of_ranks(config: EPConfig, request: CombineRequest, plan: CollectivePlan) -> Steps[Tensor]:
    """fp32 sums [T, hidden] at home of one row per (token, rank), ranks ascending."""
    num_tokens = request.recv.handle.num_tokens
    partial, messages = _partial_sums(config, request, plan)
    total = torch.zeros(num_tokens, config.hidden_size, dtype=config.accumulate_dtype, device=partial.device)
    if config.mode == "allreduce":
        return total.index_add_(0, plan.messages.tokens[messages], partial)
    rows = partial.to(config.combine_dtype)
    keys = plan.messages.tokens[messages]
    counts = torch.bincount(plan.messages.sources[messages], minlength=config.world_size).tolist()
    got, keys, recv_counts = yield from _send_home(config, rows, keys, counts, limit=num_tokens, options="pre_reduced")
    for part, tokens in zip(got.split(recv_counts), keys.split(recv_counts), strict=True):
        total.index_add_(0, tokens, part.to(total.dtype))
    return total


def _partial_sums(config: EPConfig, request: CombineRequest, plan: CollectivePlan) -> tuple[Tensor, Tensor]:
    """fp32 sums of this rank's rows of each message, slots ascending, and the messages [n] they belong to."""
    y, weights = request.y, request.recv.weights
    if plan.rows is None:
        kept = torch.arange(min(plan.num_messages, len(y)), device=y.device)
        return y[: len(kept)].to(config.accumulate_dtype), kept
    routed = _kept(plan.rows, request)
    row, message, slot = plan.rows.row[:routed], plan.rows.message[:routed], plan.rows.slot[:routed]
    sums = torch.zeros(plan.num_messages, config.hidden_size, dtype=config.accumulate_dtype, device=y.device)
    for k in range(config.topk):
        here = (slot == k).nonzero().squeeze(1)
        if len(here) == 0 and not here.is_cuda:
            continue
        rows = torch.index_select(y, 0, row[here]).to(sums.dtype)
        if weights is not None:
            rows *= weights[row[here], None]
        sums.index_add_(0, message[here], rows)
    return sums, torch.arange(plan.num_messages, device=y.device)


def _kept(rows: RowPlan, request: CombineRequest) -> int:
    """Routed rows within the capacity: a prefix, since rows ascend."""
    return int((rows.row < request.recv.src_info.shape[0]).sum())


def _slots(config: EPConfig, request: CombineRequest, plan: CollectivePlan) -> Steps[tuple[Tensor, Tensor]]:
    """Every row at home: [T, topk, hidden] of combine_dtype, zero where nothing came, and [T * topk] bool arrivals."""
    assert plan.rows is not None
    routed = _kept(plan.rows, request)
    message, slot = plan.rows.message[:routed], plan.rows.slot[:routed]
    keys = plan.messages.tokens[message] * config.topk + slot
    num_tokens, y = request.recv.handle.num_tokens, request.y
    if config.mode == "allreduce":
        got = torch.index_select(y, 0, plan.rows.row[:routed])
    else:
        by_source = plan.messages.sources[message].argsort(stable=True)
        counts = torch.bincount(plan.messages.sources[message], minlength=config.world_size).tolist()
        rows = torch.index_select(y, 0, plan.rows.row[:routed][by_source])
        got, keys, _ = yield from _send_home(
            config,
            rows,
            keys[by_source],
            counts,
            limit=num_tokens * config.topk,
            options=f"slots reduce={request.reduce}",
        )
    slots = torch.zeros(num_tokens * config.topk, config.hidden_size, dtype=config.combine_dtype, device=y.device)
    arrived = torch.zeros(len(slots), dtype=torch.bool, device=y.device)
    slots[keys] = got
    arrived[keys] = True
    return slots.view(num_tokens, config.topk, config.hidden_size), arrived.view(num_tokens, config.topk)


def _sum_of_slots(config: EPConfig, request: CombineRequest, slots: Tensor, arrived: Tensor) -> Tensor:
    """fp32 weighted sums [T, hidden], slots ascending; what did not arrive contributes nothing, whatever its weight."""
    handle = request.recv.handle
    weights = handle.topk_weights
    if request.topk_weights is not None:
        weights = evaluate_weights(
            request.topk_weights,
            num_tokens=handle.num_tokens,
            topk=config.topk,
            device=slots.device,
            dtype=config.weight_dtype,
        )
    total = torch.zeros(len(slots), config.hidden_size, dtype=config.accumulate_dtype, device=slots.device)
    for k in range(config.topk):
        rows = slots[:, k].to(total.dtype)
        if weights is not None:
            rows *= weights[:, k].masked_fill(~arrived[:, k], 0)[:, None]
        total += rows
    return total


def _send_home(
    config: EPConfig, rows: Tensor, keys: Tensor, counts: list[int], *, limit: int, options: str
) -> Steps[tuple[Tensor, Tensor, list[int]]]:
    """Move ``rows`` [n, hidden] with the int32 ``keys`` [n] of their places at home. ``limit``: places at home."""
    row_bytes = align_up(config.combine_row_bytes, ALIGNMENT)
    buffer = torch.empty(len(rows), row_bytes + ALIGNMENT, dtype=torch.uint8, device=rows.device)
    buffer[:, : config.combine_row_bytes] = as_bytes(rows)
    buffer[:, row_bytes : row_bytes + 4].view(torch.int32)[:, 0] = keys.int()
    recv_counts = yield Announce(f"combine {options}", counts, limit=limit)
    assert isinstance(recv_counts, list)
    received = yield Transfer(buffer, counts, recv_counts)
    assert isinstance(received, Tensor)
    got = received[:, row_bytes : row_bytes + 4].view(torch.int32)[:, 0].long()
    bad = (got < 0) | (got >= limit)
    if bool(bad.any()):
        sources = torch.repeat_interleave(torch.tensor(recv_counts)).to(got.device)
        raise BadMessageError(int(sources[bad][0]), "returned a row to a token that does not exist")
    return received[:, : config.combine_row_bytes].view(config.combine_dtype), got, recv_counts


def _finish(config: EPConfig, request: CombineRequest, plan: CollectivePlan, total: Tensor) -> Tensor:
    """Add what belongs before the single final rounding, and store."""
    if plan.shared is not None:
        kept = min(len(plan.shared), len(request.y))
        total[plan.shared.start : plan.shared.start + kept] += request.y[:kept].to(total.dtype)
    if request.shared is not None:
        total += request.shared.to(total.dtype)
    if isinstance(request.epilogue, Hook):
        token = torch.arange(len(total), device=total.device)[:, None]
        columns = torch.arange(config.hidden_size, device=total.device)[None, :]
        mask = torch.ones_like(total, dtype=torch.bool)
        request.epilogue.torch_fn(request.epilogue.tensors, token, columns, total, mask)
        return request.out if request.out is not None else request.epilogue.tensors[0]
    if request.epilogue is not None:
        total += request.epilogue.to(total.dtype)
    return _store(config, request, total)


def _store(config: EPConfig, request: CombineRequest, result: Tensor) -> Tensor:
    if request.out is not None:
        return request.out.copy_(result)
    return result.to(config.combine_dtype)
