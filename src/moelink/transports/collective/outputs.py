"""From received messages to a DispatchOutput: the one place of this transport that lays rows out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from moelink.blank import Blank
from moelink.config import EPConfig
from moelink.formats.base import ScaleLayout
from moelink.layout import DispatchMessage
from moelink.output import DispatchHandle, DispatchOutput, make
from moelink.routing import RowPlan
from moelink.transports.collective.plan import CollectivePlan
from moelink.transports.collective.sums import gather_rows


@dataclass(frozen=True)
class OutputShape:
    """The tensors of a DispatchOutput, not made yet.

    Attributes:
        present: by field, those that there are.
        absent: the fields that are None.
    """

    present: tuple[tuple[str, Blank], ...]
    absent: Mapping[str, None]

    @classmethod
    def of(cls, config: EPConfig, *, rows: int, weighted: bool) -> OutputShape:
        """That of ``rows`` rows; ``weighted`` when router weights travelled."""
        fmt, expert = config.format, config.layout == "expert"
        groups, topk, weight = config.num_groups, config.topk, config.weight_dtype
        scales = scales_offsets = None
        if fmt.scale_dtype is not None and fmt.scale_layout is not None:
            width = fmt.scale_width(config.hidden_size)
            shape = fmt.scale_layout.shape(rows, width, groups) if expert else (rows, width)
            scales = Blank.of(*shape, dtype=fmt.scale_dtype)
            if expert and _has_offsets(fmt.scale_layout, groups):
                scales_offsets = Blank.of(groups)
        blanks = {
            "tokens": Blank.of(rows, fmt.payload_width(config.hidden_size), dtype=fmt.payload_dtype),
            "scales": scales,
            "row_offsets": Blank.of(groups + 1),
            "expert_ids": Blank.of(groups) if expert else None,
            "src_info": Blank.of(rows, 3),
            "scales_offsets": scales_offsets,
            "weights": Blank.of(rows, dtype=weight) if weighted and expert else None,
            "num_recv_tokens": Blank.of(),
            "overflow": Blank.of(),
            "topk_ids": None if expert else Blank.of(rows, topk),
            "topk_weights": Blank.of(rows, topk, dtype=weight) if weighted and not expert else None,
        }
        present = tuple((name, blank) for name, blank in blanks.items() if blank is not None)
        return cls(present, MappingProxyType({name: None for name, blank in blanks.items() if blank is None}))

    def allocate(self, handle: DispatchHandle, device: torch.device) -> DispatchOutput:
        """Uninitialised tensors, in an output of ``handle``."""
        tensors = {name: blank.on(device) for name, blank in self.present}
        return make(DispatchOutput, {**tensors, **self.absent, "handle": handle})


@lru_cache(maxsize=64)
def _has_offsets(layout: ScaleLayout, num_groups: int) -> bool:
    return layout.scales_offsets(torch.zeros(num_groups + 1, dtype=torch.int32)) is not None


def fill_output(
    config: EPConfig,
    plan: CollectivePlan,
    message: DispatchMessage,
    *,
    received: Tensor,
    own: Tensor,
    handle: DispatchHandle,
    host_counts: bool,
    out: DispatchOutput | None,
) -> DispatchOutput:
    """Lay out ``received`` [M + 1, bytes] (its last row is scratch) and the shared rows of ``own`` [T, bytes]."""
    total = min(plan.num_rows, config.row_capacity)
    weighted = message.weight_dtype is not None
    rows = total if host_counts else config.row_capacity
    result = (
        out
        if out is not None
        else OutputShape.of(config, rows=rows, weighted=weighted).allocate(handle, received.device)
    )
    result.row_offsets.copy_(plan.row_offsets.clamp(max=total))
    if result.expert_ids is not None:
        torch.arange(config.num_groups, out=result.expert_ids)
    if plan.rows is None:
        _fill_rank(plan, message, result, received, total)
    else:
        _fill_expert(config, plan, plan.rows, message, result, received=received, own=own, total=total)
    return dataclasses.replace(result, handle=handle)


def _fill_rank(
    plan: CollectivePlan, message: DispatchMessage, out: DispatchOutput, received: Tensor, total: int
) -> None:
    got = plan.messages
    out.tokens.view(torch.uint8)[:total].copy_(message.field(received, "payload")[:total])
    if out.scales is not None:
        out.scales.view(torch.uint8)[:total].copy_(message.field(received, "scales")[:total])
    out.src_info[:total] = torch.stack((got.sources, got.tokens, torch.full_like(got.tokens, -1)), 1)[:total].int()
    assert out.topk_ids is not None
    out.topk_ids[:total] = got.local_ids[:total]
    if out.topk_weights is not None:
        weights = message.field(received, "weights")[:total]
        out.topk_weights[:total] = weights.masked_fill(got.local_ids[:total] < 0, 0)
    out.num_recv_tokens.fill_(total)
    out.overflow.fill_(plan.num_messages - total)


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
