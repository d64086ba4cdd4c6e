"""The parts of a model that belong to one rank alone: its experts and their adapters, counters and maps of ids.

torch takes parameters of one name for equal on all ranks. Experts have one name and differ. Functions on whole models
(:class:`~torch.nn.parallel.DistributedDataParallel`, sums and norms of gradients, checkpoints) ask this file.

The mark is on *modules*, not on tensors: the class of a module that holds experts has a property ``ownership``, an
:class:`Ownership`. Everything below the module is owned, except the children that the mark names as replicated. A mark
on a tensor would be lost when new tensors are made: by ``load_state_dict(assign=True)``, casts that cannot change a
tensor in place, ``torch.nn.utils.parametrize`` (``parametrizations.down_proj.original``), and adapters, which have
parameters of their own. In all of these the module stays the same object, and its copies are marked. An adapter around
the experts (PEFT keeps the wrapped module as ``base_layer``) is owned with them.

With a communicator of one rank every rank has all experts, so they are replicated; its counters are not.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from moelink.errors import ArgumentError, UnsupportedError

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_ORIGINAL = re.compile(r"parametrizations\.(\w+)\.original$")
_WRAPPED = ("base_layer",)
"""Names under which adapters hold the module that they wrap."""


@dataclass(frozen=True)
class Ownership:
    """The contents of a module that belong to its rank.

    Attributes:
        rank, world_size: of the communicator.
        experts: the experts of the layer that are here, in the order of the stacked tensors; none for counters and
            maps, which are never the same on two ranks.
        num_shared: leading groups of the stacked tensors that every rank has: 1 if a shared expert is fused, else 0.
        replicated: names of children that every rank has.
        num_even: the number of experts over all ranks if every rank has as many, in the order of their ids; else 0.
    """

    rank: int = 0
    world_size: int = 1
    experts: tuple[int, ...] = ()
    num_shared: int = 0
    replicated: tuple[str, ...] = ()
    num_even: int = 0

    @property
    def num_groups(self) -> int:
        """Groups of a stacked tensor here."""
        return len(self.experts) + self.num_shared

    @classmethod
    def of(
        cls, rank: int, world_size: int, first: int, count: int, placed: Sequence[int], num_shared: int
    ) -> Ownership:
        """Return the mark of a rank that has ``count`` of the experts ``placed`` over all ranks, from ``first`` on."""
        even = len(placed) % world_size == 0 and tuple(placed) == tuple(range(len(placed)))
        held = tuple(placed[first : first + count])
        return cls(rank, world_size, experts=held, num_shared=num_shared, num_even=len(placed) if even else 0)


@dataclass(frozen=True)
class OwnedTensor:
    """A parameter or buffer of one rank.

    Attributes:
        name: in the model.
        tensor: the parameter or buffer.
        owner: the mark of its module.
        module: the marked module.
        is_parameter, persistent: whether it is a parameter, and part of the state_dict.
    """

    name: str
    tensor: Tensor
    owner: Ownership
    module: torch.nn.Module
    is_parameter: bool
    persistent: bool

    @property
    def is_stacked(self) -> bool:
        """Whether the first dimension is the groups."""
        return self.tensor.dim() > 0 and self.tensor.shape[0] == self.owner.num_groups > 0


def ownership_of(module: torch.nn.Module) -> Ownership | None:
    """Return the mark of ``module`` itself. Wrappers that forward attributes have none."""
    mark = module.ownership if hasattr(type(module), "ownership") else None
    return mark if isinstance(mark, Ownership) else None


def owned_tensors(model: torch.nn.Module) -> Iterator[OwnedTensor]:
    """Yield the tensors of this rank alone, each name once, in the order of modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: set[str] = set()
    for name, module in modules.items():
        owner = ownership_of(module)
        if owner is None:
            continue
        top = name
        while top.rpartition(".")[2] in _WRAPPED:
            top = top.rpartition(".")[0]
        replicated = tuple(_join(name, part) for part in owner.replicated)
        for below, inner in modules.items():
            if not _is_below(below, top) or any(_is_below(below, part) for part in replicated):
                continue
            tensors = [(n, p, True) for n, p in inner._parameters.items()]
            tensors += [(n, b, False) for n, b in inner._buffers.items()]  # type: ignore[misc]
            for part, tensor, is_parameter in tensors:
                full = _join(below, part)
                if tensor is None or full in seen:
                    continue
                seen.add(full)
                persistent = part not in inner._non_persistent_buffers_set
                yield OwnedTensor(full, tensor, owner, module, is_parameter, persistent)


def owned_gradients(model: torch.nn.Module) -> dict[str, OwnedTensor]:
    """Return the parameters of this rank alone, by name: experts of a communicator of several ranks.

    Raises:
        UnsupportedError: a parameter has no separate group for the fused shared expert, which every rank has.
    """
    found = {t.name: t for t in owned_tensors(model) if t.is_parameter and t.owner.world_size > 1}
    for each in found.values():
        if each.owner.num_shared and not each.is_stacked:
            raise UnsupportedError(
                f"{each.name}: expected parameters of {each.owner.num_groups} groups where a shared expert is fused, "
                f"got shape {list(each.tensor.shape)}, whose gradient mixes it with this rank's experts; use "
                "shared_expert= in place of fused_shared_expert"
            )
    return found


def ignored_by_ddp(model: torch.nn.Module) -> list[str]:
    """Return the names in ``model`` that DistributedDataParallel must leave alone.

    Raises:
        UnsupportedError: a shared expert is fused.
    """
    names = []
    for each in owned_tensors(model):
        if each.owner.world_size == 1 and each.owner.experts:
            continue
        _refuse_fused(each, "DistributedDataParallel")
        names.append(each.name)
    return names


def _refuse_fused(each: OwnedTensor, wrapper: str) -> None:
    if each.owner.num_shared and each.is_parameter:
        raise UnsupportedError(
            f"{each.name}: expected experts without a shared one for {wrapper}, got a fused shared expert, part of the "
            "same parameter, of which it would sum no gradient; use shared_expert=, or "
            f"moelink.nn.all_reduce_gradients in place of {wrapper}"
        )


def mark_experts(model: torch.nn.Module) -> torch.nn.Module:
    """Make ``DistributedDataParallel(model)`` leave experts, their load counters and maps of ids to their rank.

    Call it on the very module that is wrapped, after adapters and parametrisations are in place. Without it,
    DistributedDataParallel gives every rank the experts of rank 0; a layer of :mod:`moelink.nn` then refuses its first
    forward. A :class:`MoE` that is wrapped by itself, and models of
    :func:`moelink.integrations.transformers.parallelize`, need no call.

    In a forward of DistributedDataParallel, gradients of experts are divided by the number of ranks, so that they are
    the mean over the ranks, like all other gradients.

    Returns:
        ``model``, whose list of names to ignore (``_ddp_params_and_buffers_to_ignore``) has grown.

    Raises:
        ArgumentError: ``model`` has no layer of :mod:`moelink.nn`.
        UnsupportedError: a shared expert is fused (``fused_shared_expert=True``).

    Example:
        >>> import torch
        >>> from moelink.nn import MoE, mark_experts
        >>> sizes = {"num_experts": 4, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 8}
        >>> layer = MoE(sizes, intermediate_size=32)
        >>> model = mark_experts(torch.nn.Sequential(torch.nn.Linear(16, 16), layer))
        >>> layer.close()
    """
    if all(ownership_of(module) is None for module in model.modules()):
        raise ArgumentError("model", "a module with layers of moelink in it", f"{type(model).__name__} without any")
    names = [*getattr(model, _IGNORED, ()), *ignored_by_ddp(model)]
    setattr(model, _IGNORED, list(dict.fromkeys(names)))
    return model


def fully_shard(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Shard the replicated parameters of ``model`` by :func:`torch.distributed.fsdp.fully_shard`; experts stay whole.

    torch's function alone would mix the experts of all ranks. Parts of a model can be sharded before the whole, as with
    torch's function. Gradients are *summed* over the ranks, like those of experts: for the gradient of a mean over all
    ranks' tokens, divide each rank's loss by the number of all tokens.

    Args:
        model: with layers of :mod:`moelink.nn`, or a part of it.
        options: of torch's function (``mesh``, ``reshard_after_forward``, ``mp_policy``, ...). ``ignored_params`` are
            left alone besides experts.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: a shared expert is fused.
    """
    own = [each for each in owned_tensors(model) if each.is_parameter and each.owner.world_size > 1]
    for each in own:
        _refuse_fused(each, "fully_shard")
    ignored = {*(options.pop("ignored_params", None) or ()), *(each.tensor for each in own)}
    sharded = torch.distributed.fsdp.fully_shard(model, ignored_params=ignored, **options)  # type: ignore[arg-type]
    sharded.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]
    sharded.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined] # gloo has no other in torch 2.11
    return model


class Wrapping:
    """The DistributedDataParallel around a layer, which the layer finds in its forward.

    It stays known: activation checkpointing computes the layer again outside of that forward, and must find the same
    gradients. A copy of a layer has none.
    """

    def __init__(self) -> None:
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._ranks = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapping:
        made = Wrapping()
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Wrapping, ()

    def ranks(self) -> int:
        """Return the divisor of gradients: the ranks of DistributedDataParallel, or 1 without it."""
        return self._ranks if self._ddp is not None and self._ddp() is not None else 1

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def mean_over(self) -> int:
        """Return the number of ranks over which gradients of replicated parameters are a mean; 1 if they are sums."""
        ddp = None if self._ddp is None else self._ddp()
        return 1 if ddp is None else ddp.process_group.size()

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def look(self, mode: str, world_size: int, complete: bool = False) -> int:
        """Find the calling DistributedDataParallel, and check it; return :meth:`ranks`. In compiled code this happens
        at tracing, where torch 2.11 allows no objects as arguments.

        Args:
            mode, world_size: of the communicator.
            complete: all ranks have the same tokens, so each has the whole gradient of its experts.

        Raises:
            UnsupportedError: it has not left experts alone, or is over other ranks.
        """
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is None or (self._ddp is not None and self._ddp() is ddp):
            return self.ranks()
        # PEFT makes its adapters parametrisations for the time of a forward, so the names were others at the wrapping.
        known = ddp.parameters_to_ignore
        missing = [n for n in ignored_by_ddp(ddp.module) if n not in known and _ORIGINAL.sub(r"\1", n) not in known]
        if missing:
            raise UnsupportedError(
                f"DistributedDataParallel: expected {missing[0]} and {len(missing) - 1} more to be left to their "
                "ranks, got a model in which they were overwritten with those of rank 0; make the model again, and "
                "call moelink.nn.mark_experts on it right before it is wrapped"
            )
        if mode == "allreduce" and not complete and world_size > 1:
            raise UnsupportedError(
                "DistributedDataParallel: expected mode='alltoall', got mode='allreduce', in which each rank has a "
                "share of the router's gradient, to be added; use moelink.nn.all_reduce_gradients in its place"
            )
        ranks = ddp.process_group.size()
        if world_size not in (1, ranks):
            raise UnsupportedError(
                f"DistributedDataParallel: expected the {world_size} ranks of the communicator, got {ranks} "
                "ranks, and it sums no gradient of experts that several of them hold; use "
                "moelink.nn.all_reduce_gradients in its place"
            )
        self._ddp, self._ranks = weakref.ref(ddp), 1 if complete or world_size == 1 else ranks
        return self.ranks()


def share_of_gradient(weight: Tensor, ranks: int) -> Tensor:
    """Return ``weight``, whose gradient is divided by ``ranks``."""
    if ranks == 1 or not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    return _Divide.apply(weight, ranks)  # type: ignore[no-any-return, no-untyped-call]


class _Divide(torch.autograd.Function):
    """The identity; its gradient is divided."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _is_below(name: str, top: str) -> bool:
    """Whether the module ``name`` is ``top`` or in it."""
    return not top or name == top or name.startswith(f"{top}.")
