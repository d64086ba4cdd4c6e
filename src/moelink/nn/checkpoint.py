"""Save models and optimizers with :mod:`torch.distributed.checkpoint`, and load them on another number of ranks.

``torch.distributed.checkpoint`` takes plain tensors of one name for equal on all ranks, and keeps those of one rank.
Experts have one name and differ. So :class:`TrainingState` gives them as DTensors: each is one tensor of all experts,
of which this rank has some. A checkpoint then holds ``[num_experts, ...]`` under each name, like a model on one rank.
Any number of ranks that divides the experts can load it, and so can a model that is not parallel.

A layer has no part in such a call, so its plain ``state_dict`` gives experts as :class:`OneRanksExperts`, which refuse
``save`` and ``load``. In all else these are plain tensors, and so are results, pickles and loaded values of them.
``async_save`` does not ask them, because it copies values to plain tensors first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from moelink.errors import ArgumentError, UnsupportedError
from moelink.nn.owned import OwnedTensor, owned_tensors

_SHARED = ".fused_shared"
"""Ends the name under which the rows of a fused shared expert are saved."""
_COPIES = {Tensor.detach, Tensor.clone, Tensor.cpu, Tensor.cuda, Tensor.to}
"""Copies of experts in a plain state_dict that also refuse. A parameter can only be made from a class whose ``detach``
keeps it."""
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and ``torch.compile`` give to names; names in checkpoints have none."""


class TrainingState:
    """A model with its optimizer, as ``torch.distributed.checkpoint`` saves and loads it.

    Every rank passes it to ``torch.distributed.checkpoint.save`` and ``load``, which call :meth:`state_dict` and
    :meth:`load_state_dict`:

        import torch.distributed.checkpoint as dcp

        dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)

    Ranks that hold the same experts, of other communicators, write them once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Take a model, and its optimizer.

        Args:
            model: with layers of :mod:`moelink.nn`, or of a model that ``parallelize`` returned; it may be wrapped in
                DistributedDataParallel, or sharded by ``fully_shard`` without its experts.
            optimizer: of ``model``; None to save the model alone.
            mesh: of one dimension, the ranks of the communicator; None for all ranks.

        Raises:
            ArgumentError: ``mesh`` has other ranks than the communicator.
            UnsupportedError: experts are not the same number on every rank, or not in the order of their ids, or a
                parameter of experts has another first dimension than experts.
        """
        self._model, self._optimizer = model, optimizer
        owned = [each for each in owned_tensors(model) if each.persistent]
        self._owned = {_plain_name(each.name): each for each in owned if each.owner.world_size > 1 or each.is_stacked}
        for name, each in self._owned.items():
            _refuse(name, each)
        self._mesh = self._checked(mesh)

    def _checked(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        first = next(iter(self._owned.values()), None)
        if first is None or first.owner.world_size == 1:
            return None
        if mesh is None:
            mesh = init_device_mesh(first.tensor.device.type, (torch.distributed.get_world_size(),))
        mine = first.owner.rank, first.owner.world_size
        if mesh.ndim != 1 or (mesh.get_local_rank(), mesh.size()) != mine:
            got = f"rank {mesh.get_local_rank()} of {mesh.size()}" if mesh.ndim == 1 else f"{mesh.ndim} dimensions"
            raise ArgumentError("mesh", f"the ranks of the communicator, rank {mine[0]} of {mine[1]}", got)
        return mesh

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model and the optimizer, by name, experts as DTensors over the mesh."""
        optimizers = [] if self._optimizer is None else [self._optimizer]
        model, optimizer = cast("tuple[Any, Any]", get_state_dict(self._model, optimizers, options=StateDictOptions()))
        result: dict[str, Any] = {"model": self._sharded(model)}
        if self._optimizer is not None:
            states = {name: self._sharded(state, name) for name, state in optimizer["state"].items()}
            result["optimizer"] = {**optimizer, "state": states}
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, on any number of ranks."""
        optimizers = [] if self._optimizer is None else [self._optimizer]
        loaded: dict[str, Any] = {}
        if self._optimizer is not None:
            states = {name: self._local(values, name) for name, values in state["optimizer"]["state"].items()}
            loaded = {**state["optimizer"], "state": states}
        set_state_dict(
            self._model, optimizers, model_state_dict=self._local(state["model"]), optim_state_dict=loaded,
            options=StateDictOptions(),
        )  # fmt: skip

    def _sharded(self, state: Mapping[str, Any], parameter: str = "") -> dict[str, Any]:
        """Return ``state`` with tensors of experts as DTensors. It is that of an optimizer for ``parameter``, or else
        of the model."""
        result: dict[str, Any] = {}
        for key, value in state.items():
            each = self._owned.get(parameter or key)
            if each is None or not isinstance(value, Tensor) or value.dim() == 0:
                result[key] = value
                continue
            shared, rows = each.owner.num_shared, each.owner.num_even
            if shared:
                result[key + _SHARED] = value[:shared]
            result[key] = local = value[shared:]
            if self._mesh is None:
                continue
            result[key] = DTensor.from_local(
                local, self._mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, *local.shape[1:])),
                stride=local.stride(),
            )  # fmt: skip
        return result

    def _local(self, state: Mapping[str, Any], parameter: str = "") -> dict[str, Any]:
        """Undo :meth:`_sharded`."""
        result: dict[str, Any] = {}
        for key, value in state.items():
            if key.endswith(_SHARED):
                continue
            owned = (parameter or key) in self._owned and isinstance(value, DTensor)
            local = value.to_local() if owned else value
            result[key] = torch.cat([state[key + _SHARED], local]) if key + _SHARED in state else local
        return result


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def _refuse(name: str, each: OwnedTensor) -> None:
    way = "use moelink.nn.merge_state_dicts and local_state_dict"
    if not each.owner.num_even:
        raise UnsupportedError(
            f"{name}: expected as many experts on every rank, in the order of their ids, got "
            f"{list(each.owner.experts)} on rank {each.owner.rank} of {each.owner.world_size}; {way}"
        )
    if not each.is_stacked:
        raise UnsupportedError(
            f"{name}: expected {each.owner.num_groups} groups as the first dimension of a tensor of experts, got shape "
            f"{list(each.tensor.shape)}, which is another on every rank; use torch.save for it, by rank"
        )


class OneRanksExperts(Tensor):
    """This rank's experts, in a plain ``state_dict``. ``torch.distributed.checkpoint`` calls two methods of it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _COPIES else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = memo[id(self)] = _as_plain(self).clone().as_subclass(type(self))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(self).__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return str(_as_plain(self).__repr__(**options))

    def __create_write_items__(self, name: str, value: object) -> NoReturn:
        """Refuse to be saved."""
        _refuse_plain(name)

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse to be loaded into."""
        _refuse_plain("state_dict")


def refuse_plain_checkpoints(module: torch.nn.Module) -> None:
    """Make the ``state_dict`` of a marked ``module`` give tensors of one rank as :class:`OneRanksExperts`."""
    module.register_state_dict_post_hook(_mark)
    module.register_load_state_dict_pre_hook(_unmark)


def _mark(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in _names(module, prefix):
        if type(state.get(name)) is Tensor:  # not a parameter, which state_dict(keep_vars=True) gives itself
            state[name] = state[name].as_subclass(OneRanksExperts)


def _unmark(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in _names(module, prefix):
        if isinstance(state.get(name), OneRanksExperts):  # load_state_dict(assign=True) would keep its class
            state[name] = _as_plain(state[name])


def _names(module: torch.nn.Module, prefix: str) -> list[str]:
    return [prefix + each.name for each in owned_tensors(module) if each.owner.world_size > 1]


def _as_plain(value: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def _refuse_plain(name: str) -> NoReturn:
    raise UnsupportedError(
        f"{name}: expected experts of all ranks for torch.distributed.checkpoint, got a plain state_dict, of which it "
        "would keep one rank's experts; pass moelink.nn.TrainingState(model, optimizer) in its place"
    )
