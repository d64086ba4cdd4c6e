"""Weights of a model from a checkpoint, of which a rank reads its part, and all weights on one rank again.

A model is built without memory (:func:`empty_model`), then filled (:func:`fill`). transformers' own conversion mapping
names the parameter of each stored tensor; nothing here knows the name of a weight. A parameter of experts is stored as
one tensor for each expert, in the order of the experts, or as one tensor whose first dimension is the experts. A rank
reads its part of either. transformers then merges, transposes and renames the part as it does the whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig

from moelink.arith import ceil_div
from moelink.config import EPConfig
from moelink.control.exchange import Peers, all_to_all
from moelink.errors import ArgumentError, UnsupportedError
from moelink.integrations.transformers import mxfp4
from moelink.integrations.transformers.checkpoint import Checkpoint, CheckpointError, LoadReport
from moelink.integrations.transformers.experts import ParallelExperts
from moelink.integrations.transformers.fp8 import check_quantization, check_scaled, scales_name, with_scales
from moelink.integrations.versions import require
from moelink.nn.block_quantized import BLOCK
from moelink.nn.expert_backends import Stored
from moelink.nn.placement import Placement
from moelink.routing import ExpertMap


@dataclass(frozen=True)
class Part:
    """This rank's experts of a parameter.

    Attributes:
        places: the expert of each of the communicator's experts here.
        num_experts: of the whole.
    """

    places: tuple[int, ...]
    num_experts: int

    @classmethod
    def of(cls, config: EPConfig, placement: Placement | None = None) -> Part:
        """Return the experts of the communicator's rank."""
        placed = placement or Placement.identity(config.num_experts)
        first = ExpertMap(config.num_experts, config.world_size).first(config.rank)
        return cls(placed.experts[first : first + config.num_local_experts], placed.num_experts)

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Those to read: each once, ascending."""
        return tuple(sorted(set(self.places)))

    @property
    def rows(self) -> tuple[slice, ...]:
        """Of the first dimension of the whole: runs of consecutive experts to read."""
        starts = [expert for expert in self.experts if expert - 1 not in self.experts]
        ends = [expert + 1 for expert in self.experts if expert + 1 not in self.experts]
        return tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))

    def arranged(self, read: Tensor) -> Tensor:
        """Return the experts that were read, [experts, ...], by place."""
        return read if self.places == self.experts else chosen(read, [self.experts.index(each) for each in self.places])


@dataclass
class Plan:
    """The tensors that a rank reads of a checkpoint.

    Attributes:
        wanted: by stored name, runs of rows of the first dimension to read; None for all.
        others: stored names that belong to other ranks.
        missing: stored names that should be there, as the mapping spells them.
    """

    wanted: dict[str, tuple[slice, ...] | None] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def chosen(stacked: Tensor, rows: Sequence[int]) -> Tensor:
    """Return ``rows`` of the first dimension, of any dtype (torch indexes no fp8)."""
    return torch.cat([stacked[row : row + 1] for row in rows])


def mapping_of(model: PreTrainedModel) -> list[Any]:
    """transformers' conversions from stored tensors to the parameters of ``model``."""
    return list(get_model_conversion_mapping(model))


def stored_shapes(model: PreTrainedModel, names: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Shape by stored name of the tensors that the parameters ``names``, of ``shapes``, are written as."""
    whole = {name: torch.empty(tuple(shapes[name]), device="meta") for name in names}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, whole).items()}


def plan_of(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    mapping: Sequence[Any],
    experts: Mapping[str, Part],
    shapes: Mapping[str, Sequence[int]],
) -> Plan:
    """Return the plan of this rank for ``checkpoint``. Only shapes are read yet.

    Args:
        mapping: :func:`mapping_of` the model, or that and more.
        experts: by name, the parameters of which this rank takes a part.
        shapes: of all parameters and buffers of the whole model that are stored.

    Raises:
        CheckpointError: a tensor has another shape than the model.
        UnsupportedError: the experts of a parameter are stored along another dimension than the first.
    """
    goes_to, covered = _targets(model, checkpoint, mapping)
    plan = Plan()
    pieces: dict[tuple[str, str | None], list[str]] = {}
    for name, (target, pattern) in goes_to.items():
        if target in experts:
            pieces.setdefault((target, pattern), []).append(name)
        else:
            plan.wanted[name] = None
    lacking = {name for name in model.state_dict() if name not in covered}
    for (target, _), names in pieces.items():
        part = experts[target]
        if len(names) == 1:
            plan.wanted[names[0]] = part.rows if len(part.experts) < part.num_experts else None
        elif len(names) % part.num_experts:
            lacking.add(target)
        else:
            for position, name in enumerate(names):
                if position % part.num_experts in part.experts:
                    plan.wanted[name] = None
                else:
                    plan.others.append(name)
    lacking -= _may_be_missing(model, lacking)
    if lacking:
        written = stored_shapes(model, sorted(lacking), shapes)
        plan.missing = [name for name in written if name not in checkpoint]
    return plan


def check_shapes(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    plan: Plan,
    experts: Mapping[str, Part],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Compare the shapes of the tensors in ``plan`` with those that ``model`` is written in. If files have other names,
    transformers compares the converted tensors.

    Raises: as :func:`plan_of`.
    """
    expected = stored_shapes(model, list(shapes), shapes)
    for name, rows in plan.wanted.items():
        got = checkpoint.shape(name)
        if name in expected and expected[name] != got:
            raise CheckpointError(
                f"checkpoint {checkpoint.folder}: {name}: expected shape {list(expected[name])}, got {list(got)}; load "
                "the checkpoint of this model"
            )
        if rows is not None and got[:1] != (next(iter(experts.values())).num_experts,):
            raise UnsupportedError(
                f"checkpoint {checkpoint.folder}: {name}: expected the experts as the first dimension, got shape "
                f"{list(got)}; write the model again with transformers' save_pretrained"
            )


def _targets(
    model: PreTrainedModel, checkpoint: Checkpoint, mapping: Sequence[Any]
) -> tuple[dict[str, tuple[str, str | None]], set[str]]:
    """Return (parameter, pattern of the conversion) by stored name, names without a place left out; and all parameters
    that get a value, also the second and later ones of a conversion."""
    mapping = copy.deepcopy(list(mapping))  # conversions remember whether they were used
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state: dict[str, Tensor] = model.state_dict()
    found: dict[str, tuple[str, str | None]] = {}
    covered: set[str] = set()
    for name in sorted(checkpoint.names, key=dot_natural_key):
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        found[name] = (target, pattern)
        covered.add(target)
        if pattern is not None:
            first, *more = by_pattern[pattern].target_patterns
            covered |= {target.replace(first, other) for other in more}
    return found, covered


def _may_be_missing(model: PreTrainedModel, names: set[str]) -> set[str]:
    """Return the ``names`` that need not be stored: tied to others, or listed as such by the model's class."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return {name for name in names if name in tied or any(re.search(pattern, name) for pattern in patterns)}


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
        dtype: of the weights, also by its name ("bfloat16"); None or "auto" for the one in ``config.json``, or, where
            it has none, for bf16 if the experts are in mxfp4.
        auto_class: one of transformers' auto classes, or a class of models; None for AutoModelForCausalLM.
        attn_implementation: as transformers calls it; None for its choice.

    Raises:
        ArgumentError: there is no such folder, or no such dtype.
        UnsupportedError: the checkpoint is quantised, but neither in fp8 with blocks of 128 x 128 nor in mxfp4.
    """
    require("transformers")
    if not (Path(folder) / "config.json").is_file():
        raise ArgumentError("folder", "a folder on this machine with config.json and safetensors files", str(folder))
    chosen = _dtype_of(dtype)
    builder: Any = auto_class or AutoModelForCausalLM
    is_model = isinstance(builder, type) and issubclass(builder, PreTrainedModel)
    config = (builder.config_class if is_model else AutoConfig).from_pretrained(folder)
    stored = check_quantization(config, f"checkpoint {folder}")
    with init_empty_weights():  # buffers that no file has, of rotary embeddings, keep their values
        model: PreTrainedModel = (builder._from_config if is_model else builder.from_config)(
            config,
            dtype=chosen or config.dtype or (torch.bfloat16 if stored == "mxfp4" else None),
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
    layers: Mapping[str, nn.Module], stacked: Mapping[str, Sequence[str]], own_parts: Mapping[str, Part], *,
    stored: Stored | None,
) -> Iterator[dict[str, Part]]:  # fmt: skip
    """Replace each layer's experts by empty parameters for this rank's experts, which loading fills.

    Gives the part by name of each such parameter; ``own_parts`` has it by name of the layer. Parameters are arranged by
    place afterwards. If loading fails, the old parameters return.
    """
    before = {name: dict(layer._parameters) for name, layer in layers.items()}
    parts: dict[str, Part] = {}
    for name, layer in layers.items():
        part = own_parts[name]
        for own in stacked[name]:
            whole = layer._parameters.pop(own)
            assert whole is not None
            for each, (shape, dtype) in _as_stored(own, whole, stored).items():
                empty = torch.empty((len(part.experts), *shape), dtype=dtype, device="meta")
                learns = whole.requires_grad and stored is None
                layer.register_parameter(each, nn.Parameter(empty, requires_grad=learns))
                parts[f"{name}.{each}"] = part
    try:
        yield parts
    except BaseException:
        for name, layer in layers.items():
            layer._parameters.clear()
            layer._parameters.update(before[name])
        raise
    for name, part in parts.items():
        owner, _, own = name.rpartition(".")
        read = layers[owner]._parameters[own]
        assert read is not None
        if part.places != part.experts:
            layers[owner]._parameters[own] = nn.Parameter(part.arranged(read.detach()), read.requires_grad)


def _as_stored(own: str, whole: Tensor, stored: Stored | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes without experts, and dtypes, by name of the tensors that stand for the parameter ``own``."""
    shape = tuple(whole.shape[1:])
    if stored == "mxfp4" and len(shape) == 2:  # not of biases
        return {name: (each, torch.uint8) for name, each in mxfp4.stored_parts(own, shape).items()}
    if stored == "fp8":
        blocks = tuple(ceil_div(size, BLOCK) for size in shape)
        return {own: (shape, torch.float8_e4m3fn), scales_name(own): (blocks, torch.float32)}
    return {own: (shape, whole.dtype)}


class _Stored:
    """A tensor of a checkpoint that is read when transformers asks for its values."""

    def __init__(self, checkpoint: Checkpoint, name: str, rows: tuple[slice, ...] | None) -> None:
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


def gathered_state_dict(
    model: nn.Module, experts: Mapping[str, ParallelExperts], *, peers: Peers | None, rank: int
) -> dict[str, Tensor] | None:
    """``model.state_dict()`` with all experts, on the CPU of rank 0; None on the others. Collective."""
    state: dict[str, Tensor] | None = {} if rank == 0 else None
    for name, tensor in model.state_dict().items():
        owner, _, own = name.rpartition(".")
        module = experts.get(owner)
        if module is not None and own in module.stacked:
            value = gather_experts(tensor, module, peers=peers, rank=rank)
        else:
            value = tensor
        if state is not None and value is not None:
            state[name] = value.detach().cpu()
    return state


def gather_experts(local: Tensor, module: Any, *, peers: Peers | None, rank: int) -> Tensor | None:
    """The ranks' blocks [experts, ...] of ``module``, a ParallelExperts, in order, on the CPU of rank 0; None on the
    others. One block at a time is on its device; replicas are left out. Collective."""
    places = None if module.placement is None else [each[0] for each in module.placement.placement.replicas]
    if peers is None:
        return local if places is None else chosen(local, places)
    world_size = peers.own.size()
    owned = ExpertMap(module.ep.config.num_experts, world_size)
    mine, nothing = local.detach().contiguous().view(-1).view(torch.uint8), [0] * world_size
    blocks = [local.detach().cpu()] if rank == 0 else []
    for peer in range(1, world_size):
        shape = (owned.num_local(peer), *local.shape[1:])
        block = torch.empty(shape if rank == 0 else 0, dtype=local.dtype, device=local.device)
        received = block.view(-1).view(torch.uint8)
        counts = [received.numel() if source == peer else 0 for source in range(world_size)]
        to = [mine.numel(), *nothing[1:]] if rank == peer else nothing
        all_to_all(received, mine if rank == peer else mine[:0], counts, to, peers)
        blocks += [block.cpu()] if rank == 0 else []
    if rank:
        return None
    whole = torch.cat(blocks)
    return whole if places is None else chosen(whole, places)
