"""What a model with :class:`MoE` layers needs besides its forward: gradients of what is replicated, checkpoints.

Legend: *replicated* is every parameter that all ranks have whole: all of a model but the experts of its MoE layers, and
group 0 of these where the shared expert is fused. *Full* is a state_dict as one rank that owned all experts would have
it; a *part* is a rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from moelink.control.exchange import TIMEOUT, Peers, all_reduce
from moelink.errors import ArgumentError
from moelink.nn.moe import Experts, MoE
from moelink.nn.quantized_experts import QuantizedExperts


def _experts_by_key(model: torch.nn.Module) -> dict[str, Experts | QuantizedExperts]:
    """The owner of each stacked tensor, by its name in the state_dict of ``model``."""
    kinds = (Experts, QuantizedExperts)
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))
    return {f"{name}.{part}".lstrip("."): module for name, module in named for part in module.stacked}


def all_reduce_gradients(model: torch.nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of replicated parameters over the ranks of ``group`` (default: all), in place.

    Experts are left out: their rows came from all ranks, so their gradients are complete. For the gradient of a mean
    over all ranks' tokens, divide each rank's loss by the number of all tokens. Collective; nothing happens without a
    process group. Every rank must have gradients for the same parameters; frozen ones are skipped.

    Raises:
        PeerTimeoutError: on CPUs, a rank did not come within the ``timeout`` of the model's communicators, or
            (PeerLostError) is gone. It names the rank; ``group`` cannot be used any more.
    """
    if not dist.is_initialized():
        return
    stacked = _experts_by_key(model)
    gradients = []
    for name, parameter in model.named_parameters():
        owner = stacked.get(name)
        if parameter.grad is None or (owner is not None and not owner.num_shared):
            continue
        gradients.append(parameter.grad if owner is None else parameter.grad[: owner.num_shared])
    limits = [module.ep.config.timeout for module in model.modules() if isinstance(module, MoE)]
    sum_over_ranks(gradients, Peers(group, max(limits, default=TIMEOUT), what="the sum of gradients"))


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
    """The full state_dict of ``model`` from the parts of all ranks, in rank order. What is replicated is rank 0's.

    Raises:
        ArgumentError: the parts do not add up to all experts.
    """
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
