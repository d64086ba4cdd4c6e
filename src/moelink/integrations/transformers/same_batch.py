"""Mode "allreduce" takes the same batch on every rank; what tells whether it got it.

Experts' outputs are summed over ranks by position, so ranks whose tokens differ would add outputs of different tokens.
Sampling with seeds of their own, dropout before a layer and a router's jitter make them differ. A comparison waits for
the host and for all ranks: every forward of ``generate`` makes one, of its tokens. With MOELINK_DEBUG=1 all forwards
do, and every layer compares the experts that were chosen; so does a layer in training behind a router with jitter.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moelink.control.exchange import Peers
from moelink.control.values import gather_values
from moelink.env import DEBUG
from moelink.errors import ArgumentError

_INPUTS = ("input_ids", "inputs_embeds")
_JITTER = ("router_jitter_noise", "input_jitter_noise")
"""Names of a router's jitter in the configurations of models."""


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
