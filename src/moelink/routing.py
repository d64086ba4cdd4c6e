"""Compute routing without communication: which rank owns an expert, which ranks get a token, and in which row.

Legend: ``T`` tokens of a rank, ``K`` = topk, ``W`` = world_size, ``L`` = local experts, ``G`` = groups of the output,
``M`` received messages (one per token and source), ``R`` routed rows (one per token and local slot).
Expert ids are int32 or int64; -1 means not routed. All functions are vectorised torch and run on any device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertMap:
    """The owner of each expert. Ranks own contiguous blocks; if the number does not divide, the first ranks own one
    more.

    Example: 7 experts on 3 ranks: rank 0 owns 0-2, rank 1 owns 3-4, rank 2 owns 5-6.
    """

    num_experts: int
    world_size: int

    @property
    def _split(self) -> tuple[int, int]:
        return divmod(self.num_experts, self.world_size)

    def first(self, rank: int) -> int:
        """Return the global id of ``rank``'s first expert: ``ExpertMap(7, 3).first(1) == 3``; num_experts for
        ``world_size``."""
        per_rank, extra = self._split
        return rank * per_rank + min(rank, extra)

    def num_local(self, rank: int) -> int:
        """Return the number of experts that ``rank`` owns. ``ExpertMap(7, 3).num_local(0) == 3``."""
        return self.first(rank + 1) - self.first(rank)

    def owner(self, expert_ids: Tensor) -> Tensor:
        """Return the rank that owns each id, -1 for -1. ``ExpertMap(7, 3).owner([0, 3, 6, -1]) == [0, 1, 2, -1]``."""
        per_rank, extra = self._split
        boundary = extra * (per_rank + 1)
        low = expert_ids // (per_rank + 1)
        high = extra + (expert_ids - boundary) // max(per_rank, 1)
        return torch.where(expert_ids < boundary, low, high).where(expert_ids >= 0, -1)

    def local(self, expert_ids: Tensor, rank: int) -> Tensor:
        """Return ids local to ``rank``, -1 for others: ``ExpertMap(7, 3).local([0, 3, 4, -1], 1) == [-1, 0, 1,
        -1]``."""
        first = self.first(rank)
        mine = (expert_ids >= first) & (expert_ids < first + self.num_local(rank))
        return torch.where(mine, expert_ids - first, -1)


def absent_experts(num_experts: int, device: torch.device) -> Tensor:
    """Return [num_experts] bool: whether an expert is on a masked rank. None is, to begin with."""
    with torch.inference_mode(False):  # calls in any mode read it
        return torch.zeros(num_experts, dtype=torch.bool, device=device)


def mark_absent(absent: Tensor, experts: ExpertMap, masked: Iterable[int]) -> None:
    """Mark in ``absent`` the experts of the ranks ``masked``, in place, so that a captured graph finds them."""
    absent.zero_()
    for rank in masked:
        absent[experts.first(rank) : experts.first(rank + 1)] = True


@dataclass(frozen=True)
class SendPlan:
    """Which messages a rank sends: one per (token, destination rank), by destination, then token.

    Example: K = 2, 4 experts on 2 ranks, ids [[0, 3], [1, 0]]: token 0 goes to both ranks, token 1 (both slots on
    rank 0) once: ``tokens == [0, 1, 0]``, ``counts == [2, 1]``.

    Attributes:
        tokens: [M] int64, source token of each message.
        destinations: [M] int64, destination rank of each message.
        counts: [W] int64, messages per destination.
    """

    tokens: Tensor
    destinations: Tensor
    counts: Tensor


def plan_sends(topk_ids: Tensor, experts: ExpertMap) -> SendPlan:
    """Plan the messages of a rank with ``topk_ids`` [T, K]."""
    ranks = torch.arange(experts.world_size, device=topk_ids.device)
    present = (experts.owner(topk_ids)[:, None, :] == ranks[None, :, None]).any(-1)
    destinations, tokens = present.t().nonzero(as_tuple=True)
    return SendPlan(tokens=tokens, destinations=destinations, counts=present.sum(0))


@dataclass(frozen=True)
class RowPlan:
    """Where received messages go in the layouts "expert" and "masked".

    Routed rows in final order: local expert, then source rank, then source token, then slot.

    Attributes:
        message: [R] int64, index of the message that fills the row.
        slot: [R] int64, its top-k slot.
        group: [R] int64, group of the row (local expert, plus the shared group if there is one).
        row: [R] int64, its output row; rows of a group are consecutive, groups start at ``row_offsets``. Layout
            "masked" leaves out rows that do not fit.
        counts: [L, W] int32, rows per (local expert, source rank), before capacity.
        group_sizes: [G] int64, real rows per group, before capacity.
        row_offsets: [G + 1] int64, exclusive starts of the aligned groups, before capacity.
    """

    message: Tensor
    slot: Tensor
    group: Tensor
    row: Tensor
    counts: Tensor
    group_sizes: Tensor
    row_offsets: Tensor


def aligned_offsets(group_sizes: Tensor, alignment: int) -> Tensor:
    """Return the exclusive starts [G + 1] of groups whose sizes are rounded up to ``alignment``.

    Example: sizes [10, 10, 10, 10] with alignment 4 give [0, 12, 24, 36, 48].
    """
    aligned = (group_sizes + alignment - 1) // alignment * alignment
    return torch.nn.functional.pad(aligned.cumsum(0), (1, 0))


def plan_rows(
    local_ids: Tensor,
    sources: Tensor,
    *,
    num_local_experts: int,
    world_size: int,
    alignment: int = 1,
    shared_rows: int | None = None,
    rows_per_group: int | None = None,
) -> RowPlan:
    """Plan the rows of the "expert" layout, or with ``rows_per_group`` those of the "masked" layout.

    Args:
        local_ids: [M, K] local expert of each slot, -1 elsewhere. Messages come by source rank, then source token.
        sources: [M] int64 source rank of each message.
        shared_rows: rows of the shared group that precedes the routed ones, None without a shared group.
        rows_per_group: rows of every group. A group that gets more keeps its first ones.

    Example: L = 2, messages [[0, 1], [1, -1], [0, 0]] from sources [0, 0, 1]: expert 0 gets (message 0, slot 0),
    (2, 0), (2, 1) and expert 1 gets (0, 1), (1, 0): ``message == [0, 2, 2, 0, 1]``, ``slot == [0, 0, 1, 1, 0]``,
    ``row_offsets == [0, 3, 5]``; with alignment 4 ``row == [0, 1, 2, 4, 5]`` and ``row_offsets == [0, 4, 8]``;
    with ``rows_per_group`` 2 ``message == [0, 2, 0, 1]``, ``row == [0, 1, 2, 3]`` and ``row_offsets == [0, 2, 4]``.
    """
    topk = local_ids.shape[1]
    flat = local_ids.reshape(-1)
    pairs = (flat >= 0).nonzero().squeeze(1)
    expert, order = flat[pairs].sort(stable=True)
    pairs = pairs[order]
    expert = expert.long()
    message = pairs // topk
    counts = torch.bincount(expert * world_size + sources[message], minlength=num_local_experts * world_size)
    counts = counts.view(num_local_experts, world_size)
    group_sizes = counts.sum(1)
    group = expert
    if shared_rows is not None:
        group_sizes = torch.nn.functional.pad(group_sizes, (1, 0), value=shared_rows)
        group = expert + 1
    if rows_per_group is None:
        row_offsets = aligned_offsets(group_sizes, alignment)
    else:
        row_offsets = torch.arange(len(group_sizes) + 1, device=flat.device) * rows_per_group
    unaligned = group_sizes.cumsum(0) - group_sizes
    position = torch.arange(pairs.numel(), device=flat.device) + (shared_rows or 0)
    row = position + (row_offsets[:-1] - unaligned)[group]
    slot = pairs % topk
    if rows_per_group is not None:
        fits = position - unaligned[group] < rows_per_group
        message, slot, group, row = message[fits], slot[fits], group[fits], row[fits]
    return RowPlan(
        message=message,
        slot=slot,
        group=group,
        row=row,
        counts=counts.int(),
        group_sizes=group_sizes,
        row_offsets=row_offsets,
    )


def shared_slice(num_tokens: int, *, rank: int, parts: int) -> range:
    """Return the tokens of the shared expert that ``rank`` computes when ``parts`` ranks divide them (allreduce mode).

    Rank g takes (T + parts - g - 1) // parts tokens from g * (T // parts) + min(g, T mod parts) on (Modular MAX EP
    contract). Example: 7 tokens over 3 ranks are 0-2, 3-4, 5-6.
    """
    start = rank * (num_tokens // parts) + min(rank, num_tokens % parts)
    return range(start, start + (num_tokens + parts - rank - 1) // parts)
