"""Gradients, norms and state_dicts of a model with :class:`MoE` layers.

Legend: *replicated* is every parameter that all ranks have whole: all of a model but the experts of its MoE layers, and
group 0 of these if the shared expert is fused. *Full* is the state_dict of one rank with all experts; a *part* is a
rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moelink.control.exchange import TIMEOUT, Peers, all_reduce
from moelink.errors import ArgumentError
from moelink.nn.moe import MoE
from moelink.nn.owned import OwnedTensor, owned_gradients
from moelink.nn.placed_experts import PlacedExperts


def _require_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError("model", "a torch.nn.Module (torch.nn.ModuleList for several)", f"a {type(model).__name__}")


def _experts_by_key(model: torch.nn.Module) -> dict[str, PlacedExperts]:
    """The owner of each stacked tensor, by its name in the state_dict of ``model``."""
    _require_module(model)
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, PlacedExperts))
    return {f"{name}.{part}".lstrip("."): module for name, module in named for part in module.stacked}


def all_reduce_gradients(
    model: torch.nn.Module, *, group: dist.ProcessGroup | None = None, replicas: dist.ProcessGroup | None = None
) -> None:
    """Sum the gradients of ``model`` over the ranks of ``group``, in place. Collective.

    Replicated parameters are summed over all ranks of ``group``. Experts are the parameters of one rank of the
    communicator, whose rows came from all of its ranks, so their gradients are complete if it has all ranks of
    ``group``. If it has fewer, other communicators hold the same experts, and ``replicas`` names the ranks that do.
    Parametrisations and adapters of experts count as experts.

    For the gradient of a mean over all ranks' tokens, divide each rank's loss by the number of all tokens. Nothing
    happens without a process group. Every rank must have gradients for the same parameters; frozen ones are skipped.

    Args:
        model: with layers of :mod:`moelink.nn`, or of a model that ``parallelize`` returned.
        group: the ranks over which the loss is summed; default: all.
        replicas: the ranks of ``group`` whose communicators give them the same experts: with a mesh of dimensions
            ``("replica", "expert")`` and a communicator over ``"expert"``, ``mesh["replica"].get_group()``.

    Raises:
        ArgumentError: ``replicas`` is missing, or is not one rank of each communicator; or ``model`` is no module.
        UnsupportedError: a parameter mixes a fused shared expert with those of this rank.
        PeerTimeoutError: on CPUs, a rank did not come within the ``timeout`` of the model's communicators, or
            (PeerLostError) is gone. It names the rank; the group cannot be used any more.
    """
    _require_module(model)
    if not dist.is_initialized():
        return
    owned = owned_gradients(model)
    replicated, own = _gradients(model, owned)
    copies = _copies(owned, group)
    if copies > 1 and (replicas is None or dist.get_world_size(replicas) != copies):
        raise ArgumentError(
            "replicas",
            f"the {copies} of {dist.get_world_size(group)} ranks that hold the same experts, as "
            "mesh['replica'].get_group()",
            None if replicas is None else f"{dist.get_world_size(replicas)} ranks",
        )
    sum_over_ranks(replicated, _peers(model, group, "the sum of gradients"))
    if copies > 1:
        sum_over_ranks(own, _peers(model, replicas, "the sum of gradients of experts"))


@torch.no_grad()
def update_router_bias(model: torch.nn.Module, rate: float, *, group: dist.ProcessGroup | None = None) -> None:
    """Balance the load of experts by the correction biases of the routers of ``model``. Collective.

    Of each layer, ``rate * sign(mean load - load)`` is added to the bias of an expert (DeepSeek-V3's balancing without
    an auxiliary loss, arXiv 2408.15664). The load are the tokens of all ranks of ``group`` that chose the expert in
    training mode since the last call: of several forwards if gradients are accumulated, without padding, and once if
    they are recomputed. Call it after each step of the optimizer.

    Args:
        model: with layers whose router has a correction bias.
        rate: 0.001 in DeepSeek-V3.
        group: the ranks of the batch; default: all.

    Raises:
        ArgumentError: there is no such layer, or ``rate`` is not a positive number.
        PeerTimeoutError: as :func:`all_reduce_gradients`.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ArgumentError("rate", "a positive number", rate)
    _require_module(model)
    layers = [module for module in model.modules() if isinstance(module, MoE) and module.router_load is not None]
    if not layers:
        raise ArgumentError("model", "layers with RouterConfig(correction_bias=True)", f"{type(model).__name__}")
    loads = [layer.router_load.total for layer in layers if layer.router_load is not None]
    if dist.is_initialized():
        sum_over_ranks(loads, _peers(model, group, "the sum of loads"))
    for layer, load in zip(layers, loads, strict=True):
        assert layer.router.correction_bias is not None
        layer.router.correction_bias += rate * (load.sum() - len(load) * load).sign()
        load.zero_()


def clip_grad_norm_(
    model: torch.nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of ``model`` so that their norm over all ranks is at most ``max_norm``. Collective.

    As :func:`torch.nn.utils.clip_grad_norm_` of the model on one rank, after :func:`all_reduce_gradients` or in
    DistributedDataParallel: a replicated parameter counts once, and the experts of all ranks count.

    Args:
        model: as for :func:`all_reduce_gradients`.
        max_norm, norm_type: as in torch; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: raise when the norm is NaN or infinite. All ranks have the same norm, so all raise.
        group: the ranks that hold the experts; default: all.

    Returns:
        [] the norm before, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        ArgumentError: ``group`` has not the ranks of whole communicators, or ``model`` is no module.
        PeerTimeoutError: as :func:`all_reduce_gradients`.
        UnsupportedError: a parameter mixes a fused shared expert with those of this rank.
    """
    _require_module(model)
    owned = owned_gradients(model)
    replicated, own = _gradients(model, owned)
    largest = math.isinf(norm_type)
    device = next((gradient.device for gradient in (*replicated, *own)), torch.device("cpu"))
    found = [get_total_norm(gradients, norm_type) for gradients in (replicated, own)]
    norms = [(norm.full_tensor() if isinstance(norm, DTensor) else norm).to(device) for norm in found]
    same, mine = norms if largest else [norm.double() ** norm_type for norm in norms]
    if dist.is_initialized():
        mine = mine if largest else mine / _copies(owned, group)
        reduced = mine.reshape(1).clone()
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        all_reduce(reduced, _peers(model, group, "the norm of gradients"), op)
        mine = reduced[0]
    norm = torch.maximum(same, mine) if largest else ((same + mine) ** (1.0 / norm_type)).to(norms[0].dtype)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"error_if_nonfinite: expected a finite norm of order {norm_type} of gradients, got {float(norm)}; look "
            "for the loss that is not finite, or pass error_if_nonfinite=False to scale by it"
        )
    learning = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for sharded in (True, False):  # torch multiplies no DTensors together with others
        clip_grads_with_norm_([p for p in learning if isinstance(p.grad, DTensor) == sharded], max_norm, norm)
    return norm


def _gradients(model: torch.nn.Module, own: Mapping[str, OwnedTensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of replicated parameters, and of this rank's experts; views if a shared expert is fused."""
    replicated: list[Tensor] = []
    mine: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if name not in own:
            replicated.append(parameter.grad)
            continue
        shared = own[name].owner.num_shared
        if shared:
            replicated.append(parameter.grad[:shared])
        mine.append(parameter.grad[shared:])
    return replicated, mine


def _peers(model: torch.nn.Module, group: dist.ProcessGroup | None, what: str) -> Peers:
    """The ranks of ``group``, each waited for as long as the communicators of ``model`` wait."""
    limits = [module.ep.config.timeout for module in model.modules() if isinstance(module, MoE)]
    return Peers(group, max(limits, default=TIMEOUT), what=what)


def _copies(own: Mapping[str, OwnedTensor], group: dist.ProcessGroup | None) -> int:
    """How many ranks of ``group`` hold each expert: 1 if a communicator has all of them, or if no rank owns experts."""
    ranks = dist.get_world_size(group)
    sizes = sorted({each.owner.world_size for each in own.values()} or {ranks})
    if len(sizes) > 1 or ranks % sizes[0]:
        raise ArgumentError("group", f"the ranks of whole communicators, of {sizes} ranks", ranks)
    return ranks // sizes[0]


def sum_over_ranks(tensors: Sequence[Tensor], peers: Peers) -> None:
    """Sum each tensor over the ranks of ``peers``, in place: one collective for each dtype. Every rank
    passes tensors of the same shapes and dtypes in the same order."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = _flatten_dense_tensors(alike)
        all_reduce(flat, peers)
        for tensor, total in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
            tensor.copy_(total)


def local_state_dict(model: torch.nn.Module, full: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a full state_dict that belongs on this rank, for ``model.load_state_dict``.

    Only this rank's experts are read of stacked weights: values may be tensors of ``torch.load(mmap=True)``, or
    anything else that has a ``shape`` and gives a tensor when it is sliced.

    Raises:
        ArgumentError: a weight of experts is missing or has another shape than the layer's experts make.
    """
    part = dict(full)
    for key, owner in _experts_by_key(model).items():
        if key not in full:
            raise ArgumentError("full", f"an entry {key!r}", f"{len(full)} entries without it")
        mine = getattr(owner, key.rpartition(".")[2])
        shared, value = owner.num_shared, full[key]
        wanted = [owner.num_experts + shared, *mine.shape[1:]]
        if list(value.shape) != wanted:
            raise ArgumentError(f"full[{key!r}]", f"shape {wanted}, all experts", list(value.shape))
        held = owner.placement.experts[owner.first : owner.first + owner.num_local_experts]
        first = held[0] + shared if held else shared
        if held == tuple(range(first - shared, first - shared + len(held))):
            routed = value[first : first + len(held)]
        else:
            routed = torch.cat([value[shared + expert : shared + expert + 1] for expert in held])
        part[key] = torch.cat([value[:shared], routed]) if shared else routed
    return part


def merge_state_dicts(model: torch.nn.Module, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The full state_dict of ``model`` from the parts of all ranks, in rank order. Replicated values are rank 0's.

    Raises:
        ArgumentError: there are no parts, or they do not add up to all experts.
    """
    if not parts:
        raise ArgumentError("parts", "the state_dicts of all ranks, in rank order", "none")
    full = dict(parts[0])
    for key, owner in _experts_by_key(model).items():
        shared = owner.num_shared
        pieces = [part[key][shared if rank else 0 :] for rank, part in enumerate(parts)]
        merged = torch.cat(pieces)
        if len(merged) != owner.placement.num_physical + shared:
            expected = f"parts of all ranks, {owner.placement.num_physical} experts in all"
            raise ArgumentError(f"parts[{key!r}]", expected, f"{len(merged) - shared} in {len(parts)} parts")
        full[key] = merged
        chosen = [*range(shared), *(shared + places[0] for places in owner.placement.replicas)]
        if chosen != list(range(len(merged))):
            full[key] = torch.cat([merged[row : row + 1] for row in chosen])
    return full
