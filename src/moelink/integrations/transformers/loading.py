"""Models whose weights come from a checkpoint: built without memory, then filled with what this rank needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from moelink.errors import UnsupportedError
from moelink.integrations.transformers.checkpoint import Checkpoint, LoadReport
from moelink.integrations.transformers.errors import CheckpointError
from moelink.integrations.transformers.families import Family


def empty_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    auto_class: Any = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model that ``folder`` describes, its parameters on the meta device: nothing of its weights is read.

    Args:
        folder: with ``config.json`` (and ``generation_config.json``, if it is to generate as its makers meant).
        dtype: of the weights; None for the one in ``config.json``.
        auto_class: one of transformers' auto classes; None for AutoModelForCausalLM.
        attn_implementation: as transformers calls it; None for its choice.

    Raises:
        UnsupportedError: the checkpoint is quantised.
    """
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"checkpoint {folder}: expected bf16, fp16 or fp32 weights, got quantised ones (quantization_config); "
            "load a checkpoint of plain weights"
        )
    with init_empty_weights():  # buffers that no file has, of rotary embeddings, keep their values
        model: PreTrainedModel = (auto_class or AutoModelForCausalLM).from_config(
            config,
            dtype=dtype or config.dtype,
            **({} if attn_implementation is None else {"attn_implementation": attn_implementation}),
        )
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def is_empty(model: nn.Module) -> bool:
    """Whether any parameter has no memory (the meta device)."""
    return any(parameter.is_meta for parameter in model.parameters())


@dataclass(frozen=True)
class LocalExperts:
    """The experts of one layer that this rank is to hold.

    Attributes:
        first, count: global id of the first one, and how many.
        num_experts: of the layer.
        intermediate_size, hidden_size: rows of an expert's gate, and its columns.
        dtype: of the weights.
    """

    first: int
    count: int
    num_experts: int
    intermediate_size: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ExpertWeights:
    """``gate_up`` [L, 2 * I, H] and ``down`` [L, H, I]."""

    gate_up: Tensor
    down: Tensor


def stored_name(checkpoint: Checkpoint, family: Family, name: str) -> str:
    """What ``checkpoint`` calls the parameter ``name``: as the family's files do, or as the model does."""
    usual = family.stored_name(name)
    return name if usual not in checkpoint and name in checkpoint else usual


def stored_experts(checkpoint: Checkpoint, family: Family, name: str, experts: range) -> list[str]:
    """What ``checkpoint`` calls the tensors with the weights of ``experts`` of the module ``name``."""
    whole = [f"{name}.gate_up_proj", f"{name}.down_proj"]
    if all(tensor in checkpoint for tensor in whole):
        return whole
    stored = [family.stored_expert(name, expert) for expert in experts]
    return [tensor for expert in stored for tensor in (expert.gate, expert.up, expert.down)]


def read_experts(
    checkpoint: Checkpoint, family: Family, name: str, wanted: LocalExperts, device: torch.device
) -> ExpertWeights:
    """This rank's experts of the module ``name``, and nothing else, whether files hold them one by one or together."""
    inner, hidden = wanted.intermediate_size, wanted.hidden_size
    local = range(wanted.first, wanted.first + wanted.count)
    if f"{name}.gate_up_proj" in checkpoint:
        rows = slice(local.start, local.stop)
        gate_up = checkpoint.read(f"{name}.gate_up_proj", (wanted.num_experts, 2 * inner, hidden), rows)
        down = checkpoint.read(f"{name}.down_proj", (wanted.num_experts, hidden, inner), rows)
        return ExpertWeights(*(t.to(device, wanted.dtype) for t in (gate_up, down)))
    gate_up = torch.empty(wanted.count, 2 * inner, hidden, dtype=wanted.dtype, device=device)
    down = torch.empty(wanted.count, hidden, inner, dtype=wanted.dtype, device=device)
    for index, expert in enumerate(local):
        stored = family.stored_expert(name, expert)
        gate_up[index, :inner] = checkpoint.read(stored.gate, (inner, hidden))
        gate_up[index, inner:] = checkpoint.read(stored.up, (inner, hidden))
        down[index] = checkpoint.read(stored.down, (hidden, inner))
    return ExpertWeights(gate_up, down)


def fill(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    family: Family,
    experts: Mapping[str, LocalExperts],
    device: torch.device,
) -> tuple[dict[str, ExpertWeights], LoadReport]:
    """Read all that this rank needs: the replicated weights into ``model``, the experts' weights by module name.

    Args:
        experts: by name of the module, which experts are wanted.

    Raises:
        CheckpointError: a file or tensor is missing, or has another shape.
    """
    replicated = dict(_replicated(model, experts))
    stored = {name: stored_name(checkpoint, family, name) for name in replicated}
    # A tied parameter is in the files once, under another name; what ties them is the model's to say.
    absent = [name for name in stored if stored[name] not in checkpoint]
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    wanted = [stored[name] for name in stored if name not in absent or name not in tied]
    for name, local in experts.items():
        wanted += stored_experts(checkpoint, family, name, range(local.first, local.first + local.count))
    checkpoint.require(wanted)
    weights = {name: read_experts(checkpoint, family, name, local, device) for name, local in experts.items()}
    state = {
        name: checkpoint.read(stored[name], tensor.shape).to(device, _dtype_of(model, name, tensor))
        for name, tensor in replicated.items()
        if name not in absent
    }
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, tensor in _replicated(model, experts) if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder}: expected values for all parameters and buffers, got none for "
            f"{', '.join(empty)}; load the checkpoint of this model"
        )
    everyone = [
        tensor
        for name, local in experts.items()
        for tensor in stored_experts(checkpoint, family, name, range(local.num_experts))
    ]
    return weights, checkpoint.report(everyone)


def _replicated(model: nn.Module, experts: Mapping[str, LocalExperts]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what files hold and every rank needs."""
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in experts:
            yield name, tensor


def _dtype_of(model: PreTrainedModel, name: str, tensor: Tensor) -> torch.dtype:
    """The dtype a weight is kept in: the model's, or fp32 where its class insists (DeepSeek-V3's router bias)."""
    if not tensor.is_floating_point():
        return tensor.dtype
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if tensor.dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return torch.float32 if any(part in name for part in kept) else tensor.dtype
