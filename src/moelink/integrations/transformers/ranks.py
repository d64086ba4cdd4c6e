"""Exchanges of the ranks of a model: errors and batches that all must share, sums of activations and of gradients.

Mode "allreduce" takes the same batch on every rank: experts' outputs are summed over ranks by position, so different
tokens would be added. Sampling with different seeds, dropout before a layer and a router's jitter make tokens differ.
A comparison (:func:`check_same`) waits for the host and for all ranks. Every forward of ``generate`` makes one, of its
tokens. With MOELINK_DEBUG=1 all forwards do, and every layer compares the chosen experts; so does a layer in training
behind a router with jitter.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from transformers import PreTrainedModel

from moelink.control.exchange import Peers, all_reduce
from moelink.control.values import gather_values
from moelink.env import DEBUG
from moelink.errors import ArgumentError
from moelink.integrations.transformers.checkpoint import CheckpointError
from moelink.nn.parallel import sum_over_ranks

_INPUTS = ("input_ids", "inputs_embeds")
_JITTER = ("router_jitter_noise", "input_jitter_noise")
"""Names of a router's jitter in the configurations of models."""


@contextmanager
def agreed(peers: Peers | None) -> Iterator[None]:
    """Run a block on all ranks (None: one rank). An error is raised on its rank, and as a CheckpointError with its text
    on ranks without one. Collective at the end of the block."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the peers wait for this rank's word, after any error
        problem = error
    if peers is not None:
        told = gather_values(None if problem is None else str(problem), peers)
        if problem is None:
            for rank, text in enumerate(told):
                if text is not None:
                    raise CheckpointError(f"rank {rank}: {text}")
    if problem is not None:
        raise problem


def check_same(name: str, value: Tensor, peers: Peers) -> None:
    """Compare ``value`` of all ranks of ``peers``. Collective; synchronises with the host; nothing in compiled code.

    Raises:
        ArgumentError: it differs, on every rank.
    """
    if torch.compiler.is_compiling():
        return
    mine = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    told = gather_values([list(value.shape), zlib.crc32(mine.numpy().tobytes())], peers)
    others = [rank for rank, said in enumerate(told) if said != told[0]]
    if others:
        raise ArgumentError(
            name,
            "the same on all ranks, which mode='allreduce' adds up token by token",
            f"others than those of rank 0 on ranks {others}; pass the same batch, call torch.manual_seed with the same "
            "seed on every rank before sampling, dropout or a router's jitter, or use mode='alltoall'",
        )


def has_jitter(model: Any) -> bool:
    """Return whether routers of ``model`` multiply tokens by random numbers in training."""
    return any(getattr(model.config, name, 0) for name in _JITTER)


class CheckedGenerate:
    """``model.generate`` whose forwards compare tokens over the ranks of ``peers``. A copied model has its own."""

    def __init__(self, model: PreTrainedModel, peers: Peers) -> None:
        self._model, self._peers = model, peers
        if DEBUG.is_on():
            model.register_forward_pre_hook(self._compare, with_kwargs=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle = self._model.register_forward_pre_hook(self._compare, with_kwargs=True)
        try:
            return type(self._model).generate(self._model, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckedGenerate:
        made = self.__class__.__new__(self.__class__)
        made._model, made._peers = memo.get(id(self._model), self._model), self._peers
        return made

    def _compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {**dict(zip(_INPUTS, args[:1], strict=False)), **kwargs}
        for name in _INPUTS:
            if isinstance(named.get(name), Tensor):
                check_same(name, named[name], self._peers)


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

    The sum is computed before: torch 2.11 loses the gradient when it compiles a function that writes into a tensor of
    its own.
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


def sum_gradients(parameters: Iterable[nn.Parameter], peers: Peers | None) -> None:
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


def gradient_norm(replicated: Iterable[nn.Parameter], own: Iterable[nn.Parameter], peers: Peers | None) -> Tensor:
    """The 2-norm, [] fp32, of the gradients of ``replicated`` (the same on every rank) and of every rank's ``own``."""
    parts = [[p.grad.detach().float().norm() for p in some if p.grad is not None] for some in (replicated, own)]
    device = next((part.device for part in parts[0] + parts[1]), torch.device("cpu"))
    same, mine = (torch.stack([*norms, torch.zeros((), device=device)]).square().sum() for norms in parts)
    if peers is not None:
        all_reduce(mine, peers)
    return (same + mine).sqrt()
