"""Dispatch and combine without a library: sort by expert, all-to-all of a copy per expert, all-to-all back, sum.

Legend: ``T`` tokens, ``K`` topk, ``H`` hidden_size, ``E`` num_experts, ``G`` experts of a rank, ``R`` received rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moelink.routing import ExpertMap


@dataclass(frozen=True)
class Home:
    """The record of an exchange, by which its rows return.

    Attributes:
        weights: [T, K] fp32, router weights.
        order: [T * K], slots of this rank's tokens in order of their experts.
        arrived: [R], received rows in order of this rank's experts; None on one rank.
        sent, received: rows to and from each rank; () on one rank.
    """

    weights: Tensor
    order: Tensor
    arrived: Tensor | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Exchange:
    """Dispatch and combine of torch alone, over the default group.

    On one rank there is nothing to exchange, and the host need not know how many rows there are. ``wide``: counts have
    64 bits, and rows are weighted and summed in fp32 instead of in their dtype. Without it both are differentiable, and
    the backward moves each row once, as the forward does.
    """

    def __init__(self, *, num_experts: int, topk: int, rank: int, world_size: int, wide: bool = False) -> None:
        experts = ExpertMap(num_experts, world_size)
        self._wide, self._counted = wide, torch.int64 if wide else torch.int32
        self._num_experts, self._topk, self._ranks = num_experts, topk, world_size
        self._owned = [experts.num_local(each) for each in range(world_size)]
        self._local = self._owned[rank]

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Home]:
        """Return rows [R, H] by local expert, then source rank and slot; their exclusive starts [G + 1]; the way home.

        Collective. Counts travel first, then all rows at once; the host waits for the former.
        """
        experts, order = topk_ids.flatten().sort(stable=True)
        counts = count_ids(experts, self._num_experts).to(self._counted)
        rows = moved(x, lambda x: x[order // self._topk], partial(self._sum_copies, order))
        if self._ranks == 1:
            return rows, starts(counts), Home(topk_weights, order)
        incoming = torch.empty(self._ranks * self._local, dtype=self._counted, device=counts.device)
        dist.all_to_all_single(incoming, counts, [self._local] * self._ranks, self._owned)
        both = torch.cat([counts, incoming]).tolist()
        sent = tuple(sum(part) for part in _cut(both[: len(counts)], self._owned))
        received = tuple(sum(part) for part in _cut(both[len(counts) :], [self._local] * self._ranks))
        arrived = _travelled(rows, sent, received)
        groups = torch.arange(self._local, device=rows.device).repeat(self._ranks)
        by_expert = torch.repeat_interleave(groups, incoming.long(), output_size=sum(received)).argsort(stable=True)
        offsets = starts(incoming.view(self._ranks, -1).sum(0, dtype=torch.int32))
        return _gathered(arrived, by_expert), offsets, Home(topk_weights, order, by_expert, sent, received)

    def combine(self, rows: Tensor, home: Home) -> Tensor:
        """Return [T, H], the weighted sum of each token's rows. Collective."""
        if home.arrived is not None:
            back = home.arrived
            by_source = moved(rows, partial(scattered, index=back), lambda grad: grad[back])
            rows = _travelled(by_source, home.received, home.sent)
        copies = _gathered(rows, inverse(home.order)).view(*home.weights.shape, -1)
        if not self._wide:
            return (copies * home.weights.to(rows.dtype)[..., None]).sum(1)
        out = torch.zeros(len(copies), copies.shape[-1], device=rows.device)
        for slot in range(self._topk):
            out.addcmul_(copies[:, slot], home.weights[:, slot, None])
        return out.to(rows.dtype)

    def _sum_copies(self, order: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient [T, H] of tokens for that of their copies [T * K, H], which lie in ``order``."""
        return grad[inverse(order)].view(-1, self._topk, grad.shape[1]).sum(1)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad.contiguous()), None, None


def moved(rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``there(rows)``, a move of rows whose gradient is ``back(grad)``. Torch's own gradient of an index would
    sort it and add with atomics."""
    needed = torch.is_grad_enabled() and rows.requires_grad
    return _Moved.apply(rows, there, back) if needed else there(rows)  # type: ignore[no-any-return, no-untyped-call]


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation: ``inverse([2, 0, 1]) == [1, 2, 0]``."""
    return scattered(torch.arange(len(order), device=order.device), order)


def scattered(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows`` at the places ``index``, a permutation."""
    out = torch.empty_like(rows)
    out[index] = rows
    return out


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows[index]`` of a permutation."""
    return moved(rows, lambda rows: rows[index], partial(scattered, index=index))


def _travelled(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
    """Exchange rows; their gradients travel back. Collective."""
    there, back = (
        partial(exchange_rows, sent=sent, received=received),
        partial(exchange_rows, sent=received, received=sent),
    )
    return moved(rows, there, back)


def count_ids(ids: Tensor, num_experts: int) -> Tensor:
    """Count ids: [num_experts] int32, without a host synchronisation. Others, such as -1, do not count.

    >>> count_ids(torch.tensor([1, 1, 2, 3], dtype=torch.int32), 3).tolist()
    [0, 2, 1]
    """
    counted = ids.float() if ids.device.type == "cpu" else ids.int()
    return torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1).int()


def starts(counts: Tensor) -> Tensor:
    """Exclusive starts and the end: ``starts([2, 0, 1]) == [0, 2, 2, 3]``."""
    return functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def exchange_rows(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
    """All-to-all of rows, as bytes: [sum(sent), n] to [sum(received), n]. Collective."""
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), list(received), list(sent))
    return out


def _cut(values: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut a list into parts of these sizes."""
    parts, at = [], 0
    for size in sizes:
        parts.append(values[at : at + size])
        at += size
    return parts
