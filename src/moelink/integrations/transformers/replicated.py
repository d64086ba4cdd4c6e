"""Sums over ranks: of activations that every rank holds alike, and of the gradients of replicated parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from moelink.control.exchange import Peers, all_reduce
from moelink.nn.parallel import sum_over_ranks


class _Share(torch.autograd.Function):
    """The identity; each rank's gradient is a share, so the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(total, ctx.peers)
        return total, None


class _Total(torch.autograd.Function):
    """``total``, which is the sum over ranks; the gradient, the same on every rank, is that of each summand.

    The sum is made before: torch 2.11, when it compiles a function that writes into a tensor of its own, loses the
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, total: Tensor) -> Tensor:
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def shared_by_ranks(value: Tensor, peers: Peers | None) -> Tensor:
    """``value``, the same on every rank, each of which uses it for its own experts only (None: one rank)."""
    if peers is None or not (value.requires_grad and torch.is_grad_enabled()):
        return value
    return _Share.apply(value, peers)  # type: ignore[no-any-return, no-untyped-call]


def total_over_ranks(value: Tensor, peers: Peers | None) -> Tensor:
    """The sum of the ranks' ``value`` (None: one rank)."""
    if peers is None:
        return value
    total = value.detach().clone()
    all_reduce(total, peers)
    return _Total.apply(value, total)  # type: ignore[no-any-return, no-untyped-call]


def sum_gradients(parameters: Iterable[torch.nn.Parameter], peers: Peers | None) -> None:
    """Sum the gradients of ``parameters``, which every rank lists in the same order, over the ranks.

    One collective for each dtype, and one before. A parameter that only some ranks have a gradient for counts as zero
    on the others; one that none has stays without.
    """
    if peers is None:
        return
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    if not learning:
        return
    present = torch.tensor([p.grad is not None for p in learning], dtype=torch.int32, device=learning[0].device)
    all_reduce(present, peers, ReduceOp.MAX)
    wanted = [p for p, anywhere in zip(learning, present.tolist(), strict=True) if anywhere]
    for parameter in wanted:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sum_over_ranks([p.grad for p in wanted if p.grad is not None], peers)


def gradient_norm(
    replicated: Iterable[torch.nn.Parameter], own: Iterable[torch.nn.Parameter], peers: Peers | None
) -> Tensor:
    """The 2-norm, [] fp32, of the gradients of ``replicated`` (the same on every rank) and of every rank's ``own``."""
    parts = [[p.grad.detach().float().norm() for p in some if p.grad is not None] for some in (replicated, own)]
    device = next((part.device for part in parts[0] + parts[1]), torch.device("cpu"))
    same, mine = (torch.stack([*norms, torch.zeros((), device=device)]).square().sum() for norms in parts)
    if peers is not None:
        all_reduce(mine, peers)
    return (same + mine).sqrt()
