"""LoRA adapters of PEFT on a parallelised model: of this rank's experts in memory, of all experts in files.

PEFT keeps the adapters of a parameter of E experts as two matrices, A [E * r, in] and B [out, r * E]: in the rows of A
the expert changes slowest, in the columns of B fastest. A rank has the columns and rows of its own experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from moelink.control.exchange import Peers
from moelink.errors import ArgumentError, UnsupportedError
from moelink.integrations.transformers.checkpoint import CheckpointError, LoadReport
from moelink.integrations.transformers.loading import gather_experts
from moelink.integrations.transformers.ranks import agreed
from moelink.nn.checkpoint import OneRanksExperts
from moelink.nn.owned import OwnedTensor, mark_experts, owned_tensors
from moelink.nn.parallel import sum_over_ranks

_A, _B = ".lora_A.", ".lora_B."


def attach(model: Any, adapters: Any, peers: Peers | None, *, trainable: bool) -> Any:
    """Return the PeftModel around ``model``; arguments and errors of ``ParallelModel.with_adapters``. Collective."""
    try:
        import peft
    except ImportError as error:
        raise UnsupportedError("with_adapters: expected the package peft, got none; run pip install peft") from error

    if not isinstance(adapters, (peft.LoraConfig, str, Path)):
        raise ArgumentError("adapters", "a peft.LoraConfig, or a folder with adapters", type(adapters).__name__)
    with agreed(peers):
        is_new = isinstance(adapters, peft.LoraConfig)
        config: Any = adapters if is_new else peft.PeftConfig.from_pretrained(str(adapters))
        if peers is not None:
            _refuse_copies(model, config.modules_to_save or ())
        if is_new:
            adapted: Any = peft.get_peft_model(model, config)
        else:
            adapted = peft.PeftModel.from_pretrained(model, str(adapters), is_trainable=trainable)
    if peers is not None:  # each rank has drawn its own numbers
        own = {each.name for each in owned_tensors(adapted)}
        with torch.no_grad():
            same = [p for name, p in adapted.named_parameters() if p.requires_grad and name not in own]
            if peers.own.rank():
                torch._foreach_zero_(same)
            sum_over_ranks(same, peers)
    mark_experts(adapted)
    if _adapters(adapted):
        adapted.save_pretrained = _refuse_save
    return adapted


def save(adapted: Any, folder: str | Path, peers: Peers | None, rank: int) -> None:
    """Write the adapters of all experts, and all others, as PEFT does for an unsharded model. Collective."""
    state = {name: value.detach() for name, value in adapted.state_dict(keep_vars=True).items()}
    for each in _adapters(adapted):
        stacked = _by_expert(each.name, each.tensor.detach(), len(each.owner.experts)).contiguous()
        whole = gather_experts(stacked, each.module, peers=peers, rank=rank)
        if whole is not None:
            state[each.name] = _flat(each.name, whole)
    with agreed(peers):
        if rank == 0:
            type(adapted).save_pretrained(adapted, str(folder), state_dict=state)


def load(adapted: Any, folder: str | Path, peers: Peers | None) -> LoadReport:
    """Read adapters of all experts into those of this rank. Collective.

    Raises:
        CheckpointError: the folder has adapters of other modules, or another rank raised.
    """
    from peft.utils import load_peft_weights, set_peft_model_state_dict
    from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME

    with agreed(peers):
        values = load_peft_weights(str(folder), device="cpu")
        result: Any = set_peft_model_state_dict(adapted, dict(values), adapter_name=adapted.active_adapter)
        wrong = [name for name in result.missing_keys if _A in name or _B in name] + list(result.unexpected_keys)
        if wrong:
            raise CheckpointError(
                f"{folder}: expected the adapters of this model, got others ({', '.join(wrong[:3])}); load adapters "
                "that were made with the same LoraConfig"
            )
    nbytes = sum(value.nbytes for value in values.values())
    return LoadReport(len(values), nbytes, files=(SAFETENSORS_WEIGHTS_NAME,), other_ranks=0, ignored=())


def keep_adapters_whole(model: nn.Module) -> None:
    """Make ``load_state_dict`` of ``model`` take its part of adapters of all experts, and PEFT's ``save_pretrained``
    refuse those of one rank."""
    model.register_load_state_dict_pre_hook(_take_part)
    model.register_state_dict_post_hook(_mark)


class OneRanksAdapters(OneRanksExperts):
    """This rank's adapters in a plain ``state_dict``, which safetensors cannot write: PEFT would take them for all."""

    def untyped_storage(self) -> NoReturn:
        """Refuse to be written."""
        _refuse_save()

    storage = untyped_storage  # type: ignore[assignment]


def _refuse_save(*_: Any, **_options: Any) -> NoReturn:
    """Stand for PEFT's ``save_pretrained``, which also writes files of ``torch.save``."""
    raise UnsupportedError(
        "save_pretrained: expected adapters of the experts of all ranks, got those of one rank; call "
        "save_pretrained of the ParallelModel that with_adapters returns, on every rank"
    )


def _refuse_copies(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse ``modules_to_save`` that hold experts: PEFT would copy the module, and train one rank's copy."""
    for name, module in model.named_modules():
        wanted = next(filter(name.endswith, names), None)
        if wanted is not None and any(each.owner.world_size > 1 for each in owned_tensors(module)):
            raise UnsupportedError(
                f"modules_to_save: expected modules without experts, got {wanted!r} ({name}); give the weights of "
                "experts in target_parameters, or train them without adapters"
            )


def _adapters(model: nn.Module) -> list[OwnedTensor]:
    """Return the adapters of this rank's experts, if other ranks have others."""
    return [t for t in owned_tensors(model) if t.owner.world_size > 1 and (_A in t.name or _B in t.name)]


def _take_part(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for each in _adapters(model):
        key, held = prefix + each.name, each.owner.experts
        value, num_experts = state.get(key), int(each.module.num_experts)  # type: ignore[arg-type]
        if value is None or value.shape == each.tensor.shape:
            continue
        sizes = list(each.tensor.shape)
        sizes[_B in key] = sizes[_B in key] // len(held) * num_experts
        if list(value.shape) == sizes:  # torch names all others
            state[key] = _flat(key, _by_expert(key, value, num_experts)[list(held)]).contiguous()


def _mark(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for each in _adapters(model):
        key = prefix + each.name
        if type(state.get(key)) in (Tensor, OneRanksExperts):
            state[key] = state[key].as_subclass(OneRanksAdapters)


def _by_expert(name: str, value: Tensor, num_experts: int) -> Tensor:
    """Return [E, r, in] of A, or [E, out, r] of B."""
    first: Tensor = value.unflatten(0, (num_experts, -1)) if _A in name else value.unflatten(1, (-1, num_experts))
    return first if _A in name else first.permute(2, 0, 1)


def _flat(name: str, value: Tensor) -> Tensor:
    """Undo :func:`_by_expert`."""
    return value.flatten(0, 1) if _A in name else value.permute(1, 2, 0).flatten(1)
