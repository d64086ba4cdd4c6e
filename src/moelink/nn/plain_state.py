"""Values of a ``state_dict`` that ``torch.distributed.checkpoint`` would lose.

:mod:`moelink.nn.checkpoint` says why. A layer has no part in that call, so its ``state_dict`` gives experts as tensors
that ``save`` and ``load`` ask first, and that refuse. In all else they are plain tensors: values that are computed with
them, pickled or loaded from them are plain. ``async_save`` does not ask them, because it copies values to plain tensors
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from moelink.errors import UnsupportedError
from moelink.nn.owned import owned_tensors

_REFUSED = {Tensor.detach, Tensor.clone, Tensor.cpu, Tensor.cuda, Tensor.to}
"""Copies that are refused as well. A parameter can only be made from a class whose ``detach`` keeps it."""


class OneRanksExperts(Tensor):
    """This rank's experts, in a plain ``state_dict``. ``torch.distributed.checkpoint`` calls two methods of it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _REFUSED else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = memo[id(self)] = _plain(self).clone().as_subclass(type(self))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return str(_plain(self).__repr__(**options))

    def __create_write_items__(self, name: str, value: object) -> NoReturn:
        """Refuse to be saved."""
        _refuse(name)

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse to be loaded into."""
        _refuse("state_dict")


def refuse_plain_checkpoints(module: torch.nn.Module) -> None:
    """Make the ``state_dict`` of ``module``, which is marked, give what is one rank's as :class:`OneRanksExperts`."""
    module.register_state_dict_post_hook(_mark)
    module.register_load_state_dict_pre_hook(_unmark)


def _mark(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in _names(module, prefix):
        if type(state.get(name)) is Tensor:  # not a parameter, which state_dict(keep_vars=True) gives itself
            state[name] = state[name].as_subclass(OneRanksExperts)


def _unmark(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in _names(module, prefix):
        if isinstance(state.get(name), OneRanksExperts):  # load_state_dict(assign=True) would keep its class
            state[name] = _plain(state[name])


def _names(module: torch.nn.Module, prefix: str) -> list[str]:
    return [prefix + each.name for each in owned_tensors(module) if each.owner.world_size > 1]


def _plain(value: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def _refuse(name: str) -> NoReturn:
    raise UnsupportedError(
        f"{name}: expected experts of all ranks for torch.distributed.checkpoint, got a plain state_dict, of which it "
        "would keep one rank's experts; pass moelink.nn.TrainingState(model, optimizer) in its place"
    )
