"""Combine on one rank: weight and sum rows on the expert's rank (or not), return them, sum them on the home rank.

Sums start at +0, and a product is rounded before it is added, so every transport gives the same bits.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.hooks import Hook, evaluate_weights
from moelink.memory.layout import ALIGNMENT, as_bytes
from moelink.memory.protocol import OPTIONS_BY_ROW, OPTIONS_BY_ROW_SUMMED, combine_options
from moelink.routing import RowPlan
from moelink.transports.base import CombineRequest
from moelink.transports.collective.outputs import Scratch
from moelink.transports.collective.plan import CollectivePlan
from moelink.transports.collective.sums import partial_sums, sum_rows
from moelink.transports.collective.wire import Announce, BadMessageError, Learn, Steps, Transfer


def combine_steps(config: EPConfig, request: CombineRequest, scratch: Scratch) -> Steps[Tensor]:
    """Combine on one rank. In allreduce mode nothing is yielded, so nothing travels."""
    plan: CollectivePlan = request.recv.handle.routing
    request = dataclasses.replace(request, y=request.y.flatten(0, -2))  # of layout "masked" it has a dimension more
    if request.reduce and config.pre_reduce:
        total = yield from _sum_of_ranks(config, request, plan, scratch)
    else:
        slots, arrived = yield from _slots(config, request, plan, scratch)
        if not request.reduce:
            return _store(config, request, slots)
        total = _sum_of_slots(config, request, slots, arrived)
    return _finish(config, request, plan, total)


def _sum_of_ranks(config: EPConfig, request: CombineRequest, plan: CollectivePlan, scratch: Scratch) -> Steps[Tensor]:
    """Sum one row per (token, rank) on the home rank, ranks ascending: [T, hidden] fp32."""
    num_tokens, y = request.recv.handle.num_tokens, request.y
    kept: slice | Tensor = slice(None)
    if plan.rows is None:
        kept = slice(len(y)) if plan.places is None else plan.places >= 0
    tokens, sources = plan.messages.tokens[kept], plan.messages.sources[kept]
    messages = len(tokens)
    if config.mode == "allreduce":
        total = torch.zeros(num_tokens, config.hidden_size, dtype=config.accumulate_dtype, device=y.device)
        sums = torch.empty(messages, config.hidden_size, dtype=config.accumulate_dtype, device=y.device)
        _partial_sums(config, request, plan, sums)
        return total.index_add_(0, tokens, sums)
    counts = torch.bincount(sources, minlength=config.world_size).tolist()
    options = combine_options(True, plan.rows is not None and request.row_weights is not None)
    yield Announce(options, counts, limit=num_tokens, row_bytes=config.home_message_bytes, origin=plan.call)
    home = _HomeRows(config, scratch, messages, y.device, sums=True)
    _partial_sums(config, request, plan, home.rows)
    got, keys = yield from home.send(tokens, counts, limit=num_tokens)
    return sum_rows(got, keys, num_tokens=num_tokens, dtype=config.accumulate_dtype)


def _partial_sums(config: EPConfig, request: CombineRequest, plan: CollectivePlan, out: Tensor) -> None:
    """Sum this rank's rows of each message, slots ascending, into ``out`` [messages, hidden]."""
    if plan.places is not None:
        kept = plan.places[plan.places >= 0]
        if out.dtype == request.y.dtype:
            torch.index_select(request.y, 0, kept, out=out)
        else:  # rows that a combine format encodes are wider
            out.copy_(torch.index_select(request.y, 0, kept))
        return
    if plan.rows is None:
        out.copy_(request.y[: len(out)])
        return
    partial_sums(
        request.y,
        None if request.row_weights is None else request.row_weights.flatten(),
        plan.rows,
        num_rows=_kept(plan.rows, request),
        out=out,
        dtype=config.accumulate_dtype,
    )


def _kept(rows: RowPlan, request: CombineRequest) -> int:
    """Count the routed rows within the capacity. They come first, because rows ascend."""
    return int((rows.row < request.recv.src_info.shape[:-1].numel()).sum())


def _slots(
    config: EPConfig, request: CombineRequest, plan: CollectivePlan, scratch: Scratch
) -> Steps[tuple[Tensor, Tensor]]:
    """Return every row to its home rank: [T, topk, hidden] of combine_dtype, or fp32 with a combine format, and
    [T, topk] bool: slots with a row."""
    assert plan.rows is not None
    routed = _kept(plan.rows, request)
    row, message, slot = plan.rows.row[:routed], plan.rows.message[:routed], plan.rows.slot[:routed]
    keys = plan.messages.tokens[message] * config.topk + slot
    num_tokens, y = request.recv.handle.num_tokens, request.y
    if config.mode == "allreduce":
        got = torch.index_select(y, 0, row)
    else:
        sources = plan.messages.sources[message]
        by_source = sources.argsort(stable=True)
        counts = torch.bincount(sources, minlength=config.world_size).tolist()
        options, limit = OPTIONS_BY_ROW_SUMMED if request.reduce else OPTIONS_BY_ROW, num_tokens * config.topk
        yield Announce(options, counts, limit=limit, row_bytes=config.home_message_bytes, origin=plan.call)
        home = _HomeRows(config, scratch, routed, y.device)
        torch.index_select(y, 0, row[by_source], out=home.rows)
        got, keys = yield from home.send(keys[by_source], counts, limit=limit)
    slots = torch.zeros(num_tokens * config.topk, config.hidden_size, dtype=got.dtype, device=y.device)
    arrived = torch.zeros(len(slots), dtype=torch.bool, device=y.device)
    slots[keys] = got
    arrived[keys] = True
    return slots.view(num_tokens, config.topk, config.hidden_size), arrived.view(num_tokens, config.topk)


def _sum_of_slots(config: EPConfig, request: CombineRequest, slots: Tensor, arrived: Tensor) -> Tensor:
    """Weight and sum slots, ascending: [T, hidden] fp32. A slot without a row adds nothing, whatever its weight."""
    handle = request.recv.handle
    weights = evaluate_weights(
        request.home_weights,
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


class _HomeRows:
    """Buffer of rows to return: fill ``rows`` [n, hidden], then ``send``.

    Without a combine format ``rows`` is the buffer itself, of combine_dtype. With one, ``rows`` is encoded when it is
    sent, all of it: what stays on this rank, too, so that the result does not depend on where an expert lives. Sums
    (``sums``) are then fp32, so that they are rounded once.
    """

    def __init__(
        self, config: EPConfig, scratch: Scratch, count: int, device: torch.device, *, sums: bool = False
    ) -> None:
        self._config, self._scratch, self._row = config, scratch, config.home_row
        self._row_bytes = config.home_message_bytes - ALIGNMENT
        self._buffer = scratch.take("sent", count, config.home_message_bytes, device)
        if self._row.format is None:
            self.rows = self._part(self._buffer, "payload", config.combine_dtype)
        else:
            dtype = config.accumulate_dtype if sums else config.combine_dtype
            self.rows = torch.empty(count, config.hidden_size, dtype=dtype, device=device)

    def _part(self, buffer: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        region = self._row.parts[name]
        return buffer[:, region.offset : region.end].view(dtype)

    def _encode(self) -> None:
        """Encode ``rows`` into the buffer."""
        fmt = self._row.format
        if fmt is None:
            return
        encoded = fmt.quantize(self.rows)
        for name, values in (("payload", encoded.payload), ("scales", encoded.scales)):
            assert values is not None
            self._part(self._buffer, name, torch.uint8).copy_(as_bytes(values))

    def _decoded(self, buffer: Tensor) -> Tensor:
        """Return the rows in ``buffer``: of combine_dtype, or decoded, fp32."""
        fmt = self._row.format
        if fmt is None:
            return self._part(buffer, "payload", self._config.combine_dtype)
        assert fmt.scale_dtype is not None
        scales = self._part(buffer, "scales", fmt.scale_dtype)
        return fmt.dequantize(self._part(buffer, "payload", fmt.payload_dtype), scales)

    def _keys(self, buffer: Tensor) -> Tensor:
        return buffer[:, self._row_bytes : self._row_bytes + 4].view(torch.int32)[:, 0]

    def send(self, keys: Tensor, counts: list[int], *, limit: int) -> Steps[tuple[Tensor, Tensor]]:
        """Send the rows with the ``keys`` [n] of their places on the home ranks, keys in [0, ``limit``).

        Returns the rows that arrived, ranks ascending, and their keys.
        """
        self._encode()
        self._keys(self._buffer).copy_(keys)
        recv_counts = yield Learn()
        assert isinstance(recv_counts, list)
        into = self._scratch.take("received", sum(recv_counts), self._buffer.shape[1], keys.device)
        received = yield Transfer(self._buffer, counts, recv_counts, into)
        assert isinstance(received, Tensor)
        got = self._keys(received)[: sum(recv_counts)].long()
        bad = (got < 0) | (got >= limit)
        if bool(bad.any()):
            sources = torch.repeat_interleave(torch.tensor(recv_counts, device="cpu")).to(got.device)
            raise BadMessageError(
                int(sources[bad][0]), f"rows for places in [0, {limit})", f"one for {int(got[bad][0])}"
            )
        return self._decoded(received), got


def _finish(config: EPConfig, request: CombineRequest, plan: CollectivePlan, total: Tensor) -> Tensor:
    """Add the shared rows and the epilogue, round once, and store."""
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
