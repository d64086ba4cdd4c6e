"""Which stored tensors a rank needs, by transformers' own conversion mapping: nothing here knows a name of a weight.

The mapping says of a stored name what parameter of the model it goes to. A parameter of experts is stored as one tensor
for each expert, in the order of the experts, or as one tensor whose first dimension is the experts. A rank takes its
part of either. transformers then merges, transposes and renames the part as it would the whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from moelink.errors import UnsupportedError
from moelink.integrations.transformers.checkpoint import Checkpoint
from moelink.integrations.transformers.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """This rank's experts of a parameter: ``first`` to ``first + count - 1`` of ``num_experts``."""

    first: int
    count: int
    num_experts: int

    @property
    def rows(self) -> slice:
        """Of the first dimension of the whole."""
        return slice(self.first, self.first + self.count)

    def has(self, expert: int) -> bool:
        """Whether ``expert`` is one of them."""
        return self.first <= expert < self.first + self.count


@dataclass
class Plan:
    """What to read of a checkpoint.

    Attributes:
        wanted: by stored name, the rows of the first dimension to read; None for all.
        others: stored names that belong to other ranks.
        missing: stored names that should be there, as the mapping spells them.
    """

    wanted: dict[str, slice | None] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


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
    """What this rank reads of ``checkpoint``. Nothing is read yet but the shapes of what it has to read.

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
            plan.wanted[names[0]] = part.rows if part.count < part.num_experts else None
        elif len(names) % part.num_experts:
            lacking.add(target)
        else:
            for position, name in enumerate(names):
                if part.has(position % part.num_experts):
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
    """Compare the shapes of the tensors that ``plan`` wants with those that ``model`` is written in. Where files have
    other names, transformers compares what it has made of them.

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
    """(parameter, pattern of the conversion) by stored name, of those that have a place; and all parameters that get a
    value, also those that a conversion makes besides the first."""
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
    """Those of ``names`` that need not be stored: tied to others, or listed by the model's class as such."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return {name for name in names if name in tied or any(re.search(pattern, name) for pattern in patterns)}
