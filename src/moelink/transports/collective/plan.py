"""Plan a call: the messages it sent and received, and the rows they fill. Combine and ``routing=`` reuse the plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.routing import RowPlan, plan_rows, shared_slice


@dataclass(frozen=True)
class Messages:
    """The messages of one call, sent and received. M of them arrived, sources ascending, then source tokens.

    Attributes:
        send_tokens: [M_sent] int64, source token of each message sent, by destination.
        send_counts, recv_counts: messages per rank.
        tokens: [M] int64, source token of each message received.
        sources: [M] int64, source rank of each message received.
        local_ids: [M, topk] int32, local experts that each message received names, -1 elsewhere.
        invalid_ids: [] int64, ids outside [-1, num_experts) in this rank's topk_ids (they act as -1).
        call: number of the call that sent and received them; 0 in allreduce mode, where nothing travels.
    """

    send_tokens: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    tokens: Tensor
    sources: Tensor
    local_ids: Tensor
    invalid_ids: Tensor
    call: int


@dataclass(frozen=True)
class CollectivePlan:
    """Messages and the rows they fill.

    Attributes:
        messages: the messages that were sent and received.
        rows: rows of the "expert" layout before capacity, those of the "masked" layout that fit, None for layout
            "rank".
        row_offsets: [num_groups + 1] int64, before capacity.
        group_sizes: [num_groups] int64, real rows per group, before capacity and before rows are dropped.
        shared: own tokens in the fused shared expert's group (rows 0, 1, ...), None without one.
        call: number of the dispatch whose rows these are: not ``messages.call`` where that one's routing is reused.
        places: with ``zero_copy`` [M] int64, the row of each message among those of all groups, -1 where it did not
            fit. Else None: of layout "rank" the message that comes i-th is row i.
    """

    messages: Messages
    rows: RowPlan | None
    row_offsets: Tensor
    group_sizes: Tensor
    shared: range | None
    call: int
    places: Tensor | None = None

    @property
    def num_messages(self) -> int:
        """Messages received."""
        return len(self.messages.tokens)

    @property
    def num_rows(self) -> int:
        """Rows including padding, before capacity. Synchronises when the plan is on a device."""
        return int(self.row_offsets[-1])


def complete_plan(config: EPConfig, messages: Messages, *, num_tokens: int, capacity: int) -> CollectivePlan:
    """Plan the rows that ``messages`` fill on this rank, which has ``num_tokens`` tokens of its own. ``capacity``: rows
    of each expert in layout "masked", of each source rank with ``zero_copy``."""
    if config.layout == "rank":
        sizes = torch.tensor(messages.recv_counts, device=messages.tokens.device)
        if config.zero_copy:
            starts = torch.arange(config.world_size + 1, device=sizes.device) * capacity
            slot = torch.arange(len(messages.tokens), device=sizes.device)
            slot -= (sizes.cumsum(0) - sizes)[messages.sources]
            places = torch.where(slot < capacity, starts[messages.sources] + slot, -1)
            return CollectivePlan(messages, None, starts, sizes, None, messages.call, places)
        offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        return CollectivePlan(messages, None, offsets, sizes, None, messages.call)
    shared = None
    if config.fused_shared_expert:
        replicated = config.mode == "allreduce"
        rank, parts = (config.rank, config.world_size) if replicated else (0, 1)
        shared = shared_slice(num_tokens, rank=rank, parts=parts)
    rows = plan_rows(
        messages.local_ids,
        messages.sources,
        num_local_experts=config.num_local_experts,
        world_size=config.world_size,
        alignment=config.row_alignment,
        shared_rows=None if shared is None else len(shared),
        rows_per_group=capacity if config.layout == "masked" else None,
    )
    return CollectivePlan(messages, rows, rows.row_offsets, rows.group_sizes, shared, messages.call)


def expert_counts(config: EPConfig, plan: CollectivePlan) -> Tensor:
    """Count routed rows per (local expert, source rank), before capacity: [num_local_experts, world_size] int32."""
    if plan.rows is not None:
        return plan.rows.counts
    ids, sources = plan.messages.local_ids, plan.messages.sources
    valid = ids >= 0
    flat = (ids.long() * config.world_size + sources[:, None])[valid]
    return (
        torch.bincount(flat, minlength=config.num_local_experts * config.world_size).view(-1, config.world_size).int()
    )
