"""Auxiliary losses of routers: balanced load, and small logits.

Legend: ``T`` tokens without padding, ``E`` experts, ``K`` topk; ``p`` [T, E] softmax scores, or sigmoid scores divided
by their sum; ``c`` [T, E] is 1 where a token chooses an expert, else 0::

    balance    E / (K T T) sum over e of (sum over t of c[t, e]) (sum over t of p[t, e])      1 for even load
    sequence   the same of the tokens of each sequence; the mean over the sequences
    z          mean over t of logsumexp(logits[t])^2

``balance`` is the loss of Switch Transformers, DeepSeek-V2 and Megatron; transformers' for Mixtral is K times as large.
``sequence`` is that of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), ``z`` that of ST-MoE. A token chooses the experts
to which it goes. If the router has a correction bias, it chooses the K experts of the largest scores without the bias.

The losses are attached to the router weights, and not returned: an autograd function, which is the identity of the
weights, starts the gradient of the losses when the gradient of the weights arrives. That happens once in a backward,
recomputed or not. A tensor that each layer keeps for the end of the forward would be lost in reentrant checkpointing,
would keep the graph of each recomputation alive, and could not be compiled in checkpointed regions. The function does
not know by which factor the loss is scaled (gradient accumulation, gradient scalers), so :func:`add_aux_losses` tells
the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.control.exchange import Peers, all_reduce
from moelink.errors import ArgumentError, ConfigError, StateError, UnsupportedError
from moelink.nn.owned import Ownership
from moelink.nn.parameters import KeepsBuffers
from moelink.nn.router import RouterConfig, Routing

TERMS = ("balance", "sequence", "z")


@dataclass(frozen=True, kw_only=True)
class AuxLossConfig:
    """The auxiliary losses of a layer; see the module.

    Attributes:
        balance, sequence, z: coefficients; 0 for none. One at least is positive.
        over: "rank": each rank's losses are of its own tokens, and the mean over the ranks counts. "all": counts are
            summed over all ranks, by an all-reduce of E + 2 numbers in each forward, so that the losses are those of
            one process with all tokens of the call.
        group: the ranks over which gradients are summed or averaged; None for all.

    Raises:
        ConfigError: a coefficient is negative or not finite, all are zero, or there is no such ``over``.
    """

    balance: float = 0.0
    sequence: float = 0.0
    z: float = 0.0
    over: Literal["rank", "all"] = "rank"
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        coefficients = {name: getattr(self, name) for name in TERMS}
        for name, value in coefficients.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"aux_loss.{name}", "a finite number >= 0", value)
        if not any(coefficients.values()):
            raise ConfigError("aux_loss", f"a positive coefficient of {', '.join(TERMS)}", coefficients)
        if self.over not in ("rank", "all"):
            raise ConfigError("aux_loss.over", "'rank' or 'all'", self.over)

    def __deepcopy__(self, memo: dict[int, Any]) -> AuxLossConfig:
        return self  # nothing changes it, and process groups have no copies


class AuxLosses(KeepsBuffers):
    """Computes a layer's auxiliary losses and attaches them to its router weights. In training mode only.

    Args:
        config: the losses.
        router: the kind of router.
        rank, world_size, timeout: of the layer's communicator.
        device: of the buffers.

    Attributes:
        values: [3] fp32, this rank's share of balance, sequence and z in the last forward, times their coefficients.
            The shares of all ranks add up to the losses; in DistributedDataParallel their mean is the losses.

    Raises:
        ConfigError: ``config.group`` has fewer ranks than the communicator.
    """

    kept = ("values", "scale")
    values: Tensor
    scale: Tensor

    def __init__(
        self, config: AuxLossConfig, router: RouterConfig, *, rank: int, world_size: int, timeout: float,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.router = config, router
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.ranks = dist.get_world_size(config.group) if dist.is_initialized() else 1
        if self.ranks < world_size:
            raise ConfigError("aux_loss.group", f"the {world_size} ranks of the communicator", f"{self.ranks} ranks")
        self.scaled = False
        self.register_buffer("values", torch.zeros(3, device=device), persistent=False)
        self.register_buffer("scale", torch.full((), math.nan, device=device), persistent=False)

    @property
    def ownership(self) -> Ownership:
        """The values are of this rank's tokens."""
        return Ownership(self.rank, self.world_size)

    def check_move(self, world_size: int) -> None:
        """Raise UnsupportedError if the losses, or gradients, are of other ranks than the communicator's, which will be
        ``world_size`` now."""
        if world_size != self.world_size and (self.config.over == "all" or self.ranks != self.world_size):
            raise UnsupportedError(
                f"aux_loss: expected losses of the communicator's {self.world_size} ranks, each of its own tokens, got "
                f"over={self.config.over!r} and {self.ranks} ranks, a group that has changed; make the layer anew"
            )

    def move(self, rank: int, world_size: int) -> None:
        """Be ``rank`` of other ranks from now on."""
        self.ranks = world_size if self.ranks == self.world_size else self.ranks
        self.rank, self.world_size = rank, world_size

    def reset_buffers(self) -> None:
        """No losses yet, and no scale."""
        self.values.zero_()
        self.scale.fill_(math.nan)

    def forward(self, weights: Tensor, routing: Routing, present: Tensor | None, length: int, mean_over: int) -> Tensor:
        """Return ``weights``, whose gradient brings that of the losses. Collective if ``over`` is "all".

        Args:
            weights: [T, K] of ``routing``.
            routing: of all tokens, padding included.
            present: [T] bool, False for padding; None for no padding.
            length: tokens of a sequence, padding included.
            mean_over: ranks over which gradients are a mean; 1 if they are sums.
        """
        if not self.training:
            self.values.zero_()
            return weights
        terms = self._terms(routing, present, length) * mean_over
        self.values.copy_(terms.detach())
        loss = terms.sum()
        if loss.requires_grad and not torch.compiler.is_compiling():
            loss.register_hook(self._require_scale)
        return _Attach.apply(weights, loss, self.scale)  # type: ignore[no-any-return, no-untyped-call]

    def _terms(self, routing: Routing, present: Tensor | None, length: int) -> Tensor:
        """This rank's share of each loss in the sum over the ranks, [3]."""
        logits, (tokens, topk) = routing.logits, routing.topk_ids.shape
        experts = logits.shape[1]
        real = logits.new_ones(tokens) if present is None else present.to(logits.dtype)
        scores = logits.softmax(-1) if self.router.scoring == "softmax" else logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        ids = scores.topk(topk, dim=-1).indices if self.router.correction_bias else routing.topk_ids.long()
        chosen = torch.zeros_like(scores).scatter(1, ids, 1.0)
        counts, sums = ((each * real[:, None]).view(-1, length, experts).sum(1) for each in (chosen, scores))
        lengths = real.view(-1, length).sum(1)
        totals = torch.cat([counts.sum(0), lengths.sum()[None], (lengths > 0).sum()[None]]).detach()
        if self.config.over == "all" and self.ranks > 1:
            all_reduce(totals, Peers(self.config.group, self.timeout, what="auxiliary losses"))
        num_tokens, num_sequences = totals[experts:].clamp(min=1).unbind()
        terms = {
            "balance": lambda: experts / topk * (totals[:experts] * sums.sum(0)).sum() / num_tokens**2,
            "sequence": lambda: experts / topk
            * ((counts * sums).sum(1) / lengths.clamp(min=1) ** 2).sum() / num_sequences,
            "z": lambda: (logits.logsumexp(-1) ** 2 * real).sum() / num_tokens,
        }  # fmt: skip
        factors = {name: getattr(self.config, name) for name in TERMS}
        shares = [factors[name] * terms[name]() if factors[name] else num_tokens.new_zeros(()) for name in TERMS]
        return torch.stack(shares) / (self.ranks if self.config.over == "rank" else 1)

    def _require_scale(self, _: Tensor) -> None:
        if not self.scaled:
            raise StateError(
                "aux_loss: expected the loss to be that of add_aux_losses, got a backward from another one; call "
                "loss = moelink.nn.add_aux_losses(loss, model) after the forward"
            )


class _Attach(torch.autograd.Function):
    """The identity of ``weights``, whose backward gives ``loss`` the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, _read_scale(scale, grad).to(ctx.dtype), None


@torch.library.custom_op("moelink::read_aux_scale", mutates_args=())
def _read_scale(scale: Tensor, grad: Tensor) -> Tensor:
    """Return ``scale`` when ``grad`` has come. Compilers move to the forward what needs no gradient."""
    return scale.clone()


_read_scale.register_fake(lambda scale, grad: torch.empty_like(scale))


class _Add(torch.autograd.Function):
    """The sum of ``loss`` and ``total``, whose backward tells layers the gradient, before theirs begins."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, total: Tensor, layers: list[AuxLosses]) -> Tensor:
        ctx.layers = layers
        return loss + total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        for layer in ctx.layers:
            layer.scale.data.copy_(grad.reshape(()))  # compiled backwards have saved it: no new version
            layer.scaled = True
        return grad, None, None


def add_aux_losses(loss: Tensor, model: torch.nn.Module) -> Tensor:
    """Return ``loss`` plus the auxiliary losses of the last forward of ``model``. Call it after each forward.

    The result may be scaled as any loss: divided for gradient accumulation, multiplied by a gradient scaler. Backward
    gives the layers the same factor. Before the first call, backward raises StateError in eager code, and gradients of
    compiled layers are NaN; later a backward without the call takes the last factor.

    Args:
        loss: one number; this rank's, whose sum over the ranks (in DistributedDataParallel: whose mean) is the loss.
        model: with layers that were made with ``aux_loss``.

    Raises:
        ArgumentError: ``loss`` is not one number, or no layer of ``model`` has auxiliary losses.
    """
    if loss.numel() != 1:
        raise ArgumentError("loss", "one number", list(loss.shape))
    layers = [module for module in model.modules() if isinstance(module, AuxLosses)]
    if not layers:
        raise ArgumentError("model", "layers made with aux_loss=", f"{type(model).__name__} without any")
    total = torch.stack([layer.values.sum().to(loss.device) for layer in layers]).sum()
    return _Add.apply(loss, total, layers)  # type: ignore[no-any-return, no-untyped-call]
