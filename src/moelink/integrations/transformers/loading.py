"""Models whose weights come from a checkpoint: built without memory, then filled with what this rank needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from moelink.arith import ceil_div
from moelink.errors import ArgumentError
from moelink.integrations.transformers.checkpoint import Checkpoint, LoadReport
from moelink.integrations.transformers.conversion import Part, check_shapes, mapping_of, plan_of
from moelink.integrations.transformers.errors import CheckpointError
from moelink.integrations.transformers.fp8 import check_quantization, check_scaled, scales_name, with_scales
from moelink.integrations.versions import require
from moelink.nn.block_quantized import BLOCK


def empty_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    auto_class: Any = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model that ``folder`` describes, its parameters on the meta device: nothing of its weights is read.

    Args:
        folder: with ``config.json`` (and ``generation_config.json``, if it is to generate as its makers meant).
        dtype: of the weights, also by its name ("bfloat16"); None or "auto" for the one in ``config.json``.
        auto_class: one of transformers' auto classes, or a class of models; None for AutoModelForCausalLM.
        attn_implementation: as transformers calls it; None for its choice.

    Raises:
        ArgumentError: there is no such folder, or no such dtype.
        UnsupportedError: the checkpoint is quantised otherwise than in fp8 with blocks of 128 x 128.
    """
    require("transformers")
    if not (Path(folder) / "config.json").is_file():
        raise ArgumentError("folder", "a folder on this machine with config.json and safetensors files", str(folder))
    chosen = _dtype_of(dtype)
    builder: Any = auto_class or AutoModelForCausalLM
    is_model = isinstance(builder, type) and issubclass(builder, PreTrainedModel)
    config = (builder.config_class if is_model else AutoConfig).from_pretrained(folder)
    check_quantization(config, f"checkpoint {folder}")
    with init_empty_weights():  # buffers that no file has, of rotary embeddings, keep their values
        model: PreTrainedModel = (builder._from_config if is_model else builder.from_config)(
            config,
            dtype=chosen or config.dtype,
            **({} if attn_implementation is None else {"attn_implementation": attn_implementation}),
        )
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that is meant, or None for that of the checkpoint."""
    found = None if dtype == "auto" else getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ArgumentError("dtype", "a dtype of floating point, its name, or 'auto'", repr(dtype))
    return found


def is_empty(model: nn.Module) -> bool:
    """Whether any parameter has no memory (the meta device)."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def only_own(
    layers: Mapping[str, nn.Module], stacked: Mapping[str, Sequence[str]], part: Part, *, fp8: bool
) -> Iterator[dict[str, Part]]:
    """Leave, in place of each layer's experts, room for this rank's: empty parameters that loading replaces.

    Gives ``part`` by name of each such parameter. If loading fails, the parameters are what they were.
    """
    before = {name: dict(layer._parameters) for name, layer in layers.items()}
    parts: dict[str, Part] = {}
    for name, layer in layers.items():
        for own in stacked[name]:
            whole = layer._parameters[own]
            assert whole is not None
            shape, dtype = (part.count, *whole.shape[1:]), torch.float8_e4m3fn if fp8 else whole.dtype
            empty = torch.empty(shape, dtype=dtype, device="meta")
            layer._parameters[own] = nn.Parameter(empty, requires_grad=whole.requires_grad and not fp8)
            parts[f"{name}.{own}"] = part
            if fp8:
                blocks = (part.count, *(ceil_div(size, BLOCK) for size in whole.shape[1:]))
                scales = torch.empty(blocks, dtype=torch.float32, device="meta")
                layer.register_parameter(scales_name(own), nn.Parameter(scales, requires_grad=False))
                parts[f"{name}.{scales_name(own)}"] = part
    try:
        yield parts
    except BaseException:
        for name, layer in layers.items():
            layer._parameters.clear()
            layer._parameters.update(before[name])
        raise


class _Stored:
    """A tensor of a checkpoint that is read when transformers asks for its values."""

    def __init__(self, checkpoint: Checkpoint, name: str, rows: slice | None) -> None:
        self._checkpoint, self._name, self._rows = checkpoint, name, rows

    def __getitem__(self, index: Any) -> Tensor:
        assert index is Ellipsis, "transformers reads whole tensors"
        return self._checkpoint.read(self._name, self._rows)

    def get_dtype(self) -> str:
        """As a slice of safetensors."""
        return self._checkpoint.dtype(self._name)


def fill(model: PreTrainedModel, checkpoint: Checkpoint, parts: Mapping[str, Part], device: torch.device) -> LoadReport:
    """Read into ``model`` all that this rank needs, by transformers' own conversions.

    Args:
        parts: by name, the parameters of experts; ``model`` has room for this rank's part of each.

    Raises:
        CheckpointError: a file or tensor is missing, or has another shape.
        UnsupportedError: the experts of a parameter are stored along another dimension than the first.
    """
    own = {
        name: (parts[name].num_experts, *tensor.shape[1:])
        for name, tensor in model.state_dict().items()
        if name in parts
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} | own
    mapping, quantizer = with_scales(model, mapping_of(model))
    plan = plan_of(model, checkpoint, mapping, parts, shapes)
    checkpoint.require([*plan.wanted, *plan.missing])
    if quantizer is None:
        check_shapes(model, checkpoint, plan, parts, shapes)
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    info, _ = convert_and_load_state_dict_in_model(
        model,
        {name: _Stored(checkpoint, name, rows) for name, rows in plan.wanted.items()},
        LoadStateDictConfig(
            device_map={"": str(device)},
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
            weight_mapping=mapping,
            hf_quantizer=quantizer,
        ),
    )
    if info.conversion_errors or info.mismatched_keys:
        wrong = [f"{name}: {why.strip().splitlines()[-1]}" for name, why in info.conversion_errors.items()]
        wrong += [f"{name}: expected shape {list(e)}, got {list(g)}" for name, g, e in sorted(info.mismatched_keys)]
        raise CheckpointError(
            f"checkpoint {checkpoint.folder}: expected the tensors of this model, got others ({'; '.join(wrong[:3])}); "
            "load the checkpoint of this model"
        )
    if quantizer is not None:
        check_scaled(model, f"checkpoint {checkpoint.folder}", parts)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns.get(name, False) and parameter.is_floating_point())
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder}: expected values for all parameters and buffers, got none for "
            f"{', '.join(empty)}; load the checkpoint of this model"
        )
    return checkpoint.report(plan.others)
