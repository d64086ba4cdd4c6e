"""Lay received messages out as a DispatchOutput; no other module of this transport computes rows' places."""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.formats.scale_layouts import scatter_by_group
from moelink.memory.layout import DispatchMessage
from moelink.output import DispatchHandle, DispatchOutput, OutputShape, replace_fields
from moelink.routing import RowPlan
from moelink.transports.collective.plan import CollectivePlan
from moelink.transports.collective.sums import gather_rows


def fill_output(
    config: EPConfig,
    plan: CollectivePlan,
    message: DispatchMessage,
    *,
    received: Tensor,
    own: Tensor,
    handle: DispatchHandle,
    capacity: int,
    host_counts: bool,
    out: DispatchOutput | None,
) -> DispatchOutput:
    """Lay out ``received`` [M + 1, bytes] (its last row is scratch) and the shared rows of ``own`` [T, bytes] in up to
    ``capacity`` rows (of each group, where these have one size)."""
    masked, by_group = config.layout == "masked", config.rows_by_group
    total = plan.num_rows if by_group else min(plan.num_rows, capacity)
    weighted = message.weight_dtype is not None
    rows = total if host_counts and not by_group else capacity
    result = (
        out
        if out is not None
        else OutputShape.of(config, rows=rows, weighted=weighted).allocate(handle, received.device)
    )
    result = replace_fields(result, handle=handle, host_counts=None)
    result.row_offsets.copy_(plan.row_offsets.clamp(max=total))
    if result.expert_ids is not None:
        torch.arange(config.num_groups, out=result.expert_ids, device=result.expert_ids.device)
    if plan.rows is None:
        _fill_rank(plan, message, result, received, total)
    elif masked:
        _fill_masked(config, plan, plan.rows, message, result, received)
    else:
        _fill_expert(config, plan, plan.rows, message, result, received=received, own=own, total=total)
    if host_counts:
        result = replace_fields(result, host_counts=result.num_recv_per_expert.tolist())
    return result


def _fill_rank(
    plan: CollectivePlan, message: DispatchMessage, out: DispatchOutput, received: Tensor, total: int
) -> None:
    """Write messages to the first ``total`` rows in their order, or with ``zero_copy`` to their places."""
    got, places = plan.messages, plan.places
    fits = slice(total) if places is None else (places >= 0).nonzero().squeeze(1)
    rows = fits if places is None else places[fits]

    def fill(field: Tensor, values: Tensor) -> None:
        field.flatten(0, -2)[rows] = values[fits]

    fill(out.tokens.view(torch.uint8), message.field(received, "payload"))
    if out.scales is not None:
        fill(out.scales.view(torch.uint8), message.field(received, "scales"))
    fill(out.src_info, torch.stack((got.sources, got.tokens, torch.full_like(got.tokens, -1)), 1).int())
    assert out.topk_ids is not None
    ids = got.local_ids
    fill(out.topk_ids.fill_(-1), torch.where(ids >= 0, ids + out.handle.first_id, -1))
    if out.topk_weights is not None:
        fill(out.topk_weights, message.field(received, "weights")[: len(ids)].masked_fill(ids < 0, 0))
    count = len(ids[fits])
    out.num_recv_tokens.fill_(count)
    out.overflow.fill_(plan.num_messages - count)


def _fill_masked(
    config: EPConfig,
    plan: CollectivePlan,
    rows: RowPlan,
    message: DispatchMessage,
    out: DispatchOutput,
    received: Tensor,
) -> None:
    """Write the rows that there are, and nothing else."""
    got, row, source = plan.messages, rows.row, rows.message
    out.tokens.view(torch.uint8).flatten(0, 1)[row] = message.field(received, "payload")[source]
    if out.scales is not None:
        layout, dtype = config.format.scale_layout, config.format.scale_dtype
        assert layout is not None
        assert dtype is not None
        scales = message.field(received, "scales")[source].view(dtype)
        inner, most = row - plan.row_offsets[rows.group], out.tokens.shape[1]
        scatter_by_group(layout, out.scales, scales, groups=rows.group, inner=inner, rows_per_group=most)
    out.src_info.flatten(0, 1)[row] = torch.stack((got.sources[source], got.tokens[source], rows.slot), 1).int()
    if out.weights is not None:
        out.weights.flatten()[row] = message.field(received, "weights")[source, rows.slot]
    out.num_recv_tokens.fill_(len(row))
    out.overflow.copy_(plan.group_sizes.sum() - len(row))


def _fill_expert(
    config: EPConfig,
    plan: CollectivePlan,
    rows: RowPlan,
    message: DispatchMessage,
    out: DispatchOutput,
    *,
    received: Tensor,
    own: Tensor,
    total: int,
) -> None:
    shared = plan.shared if plan.shared is not None else range(0)
    own = own[shared.start : shared.start + min(len(shared), total)]
    num_shared, num_routed = len(own), int((rows.row < total).sum())
    row, source_message = rows.row[:num_routed], rows.message[:num_routed]
    received[-1].zero_()

    # Padding rows read the zeroed scratch row, so that one gather writes routed and padding rows alike.
    gather = torch.full((total,), plan.num_messages, device=received.device)
    gather[row] = source_message
    tokens = out.tokens.view(torch.uint8)
    tokens[:num_shared].copy_(message.field(own, "payload"))
    gather_rows(message.field(received, "payload"), gather[num_shared:], tokens[num_shared:total])

    shared_rows = torch.arange(num_shared, device=received.device)
    if out.scales is not None:
        layout, dtype = config.format.scale_layout, config.format.scale_dtype
        assert layout is not None
        assert dtype is not None
        offsets = out.row_offsets
        present = torch.minimum(plan.group_sizes, offsets[1:].long() - offsets[:-1].long())
        routed = message.field(received, "scales")[source_message].view(dtype)
        layout.scatter(out.scales, routed, rows=row, groups=rows.group[:num_routed], row_offsets=offsets)
        own_scales = message.field(own, "scales").contiguous().view(dtype)
        layout.scatter(
            out.scales, own_scales, rows=shared_rows, groups=torch.zeros_like(shared_rows), row_offsets=offsets
        )
        layout.clear_padding(out.scales, row_offsets=offsets, group_sizes=present)
        if out.scales_offsets is not None:
            out.scales_offsets.copy_(layout.scales_offsets(offsets))  # type: ignore[arg-type]

    info = out.src_info[:total].fill_(-1)
    got = plan.messages
    slot = rows.slot[:num_routed]
    info[row] = torch.stack((got.sources[source_message], got.tokens[source_message], slot), 1).int()
    info[:num_shared, 0] = config.rank
    info[:num_shared, 1] = shared_rows.int() + shared.start
    if out.weights is not None:
        weights = out.weights[:total].zero_()
        weights[row] = message.field(received, "weights")[source_message, slot]
        weights[:num_shared] = 1
    out.num_recv_tokens.fill_(num_routed)
    out.overflow.fill_(len(rows.row) - num_routed + len(shared) - num_shared)


class Scratch:
    """Named buffers of one rank, which only grow: fresh pages cost more than the copies into them.

    A buffer may be taken again when the call that took it has ended; calls of one rank never overlap on this transport.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """[rows, row_bytes] uint8, uninitialised, contiguous. The previous content of ``name`` is lost."""
        size = rows * row_bytes
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            with torch.inference_mode(False):  # a later call may not be in inference mode
                buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[:size].view(rows, row_bytes)
