"""What moelink knows of each family of models: which modules are its experts, and what files call their weights.

All of them hold their experts as ``gate_up_proj`` [E, 2 * I, H] and ``down_proj`` [E, H, I], and call them with
(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]). Files have three matrices for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from moelink.errors import ArgumentError


@dataclass(frozen=True)
class StoredExpert:
    """Names in the files of one expert's matrices.

    Attributes:
        gate, up: of [I, H].
        down: of [H, I].
    """

    gate: str
    up: str
    down: str


class Family(Protocol):
    """What the rest of this package asks of a family. Pass one of your own as ``parallelize(family=)``."""

    @property
    def model_type(self) -> str:
        """``model.config.model_type`` of its models."""

    def is_experts(self, module: nn.Module) -> bool:
        """Whether ``module`` holds the routed experts of a layer."""

    def stored_name(self, name: str) -> str:
        """What files call the parameter that the model calls ``name``."""

    def stored_expert(self, module_name: str, expert: int) -> StoredExpert:
        """What files call the weights of one expert (global id) of the experts module ``module_name``."""


@dataclass(frozen=True)
class PerExpertFiles:
    """A family whose files differ from the model in names only.

    Attributes:
        model_type: ``model.config.model_type``.
        experts_class: name of the class of experts modules.
        gate, up, down: names of an expert's matrices in files.
        block: what files call the module that the model calls ``mlp`` in layers with experts.
    """

    model_type: str
    experts_class: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = "mlp"

    def is_experts(self, module: nn.Module) -> bool:
        """Whether ``module`` is of the family's experts class."""
        return type(module).__name__ == self.experts_class

    def stored_name(self, name: str) -> str:
        """``name`` with the module around experts called as in files."""
        return name.replace(".mlp.", f".{self.block}.")

    def stored_expert(self, module_name: str, expert: int) -> StoredExpert:
        """Names such as ``model.layers.1.mlp.experts.7.up_proj.weight``."""
        prefix = self.stored_name(f"{module_name}.{expert}.")
        return StoredExpert(*(f"{prefix}{matrix}.weight" for matrix in (self.gate, self.up, self.down)))


MIXTRAL = PerExpertFiles("mixtral", "MixtralExperts", gate="w1", up="w3", down="w2", block="block_sparse_moe")
QWEN3_MOE = PerExpertFiles("qwen3_moe", "Qwen3MoeExperts")
DEEPSEEK_V3 = PerExpertFiles("deepseek_v3", "DeepseekV3Experts")

FAMILIES: tuple[Family, ...] = (MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)


def family_of(model: nn.Module, families: Sequence[Family] = FAMILIES) -> Family:
    """The family of ``model``, by its configuration's ``model_type``.

    Raises:
        ArgumentError: none of them.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    for family in families:
        if family.model_type == model_type:
            return family
    supported = ", ".join(repr(family.model_type) for family in families)
    raise ArgumentError(
        "model",
        f"a transformers model whose config.model_type is one of {supported} (or a family of your own, family=)",
        f"{type(model).__name__} with model_type {model_type!r}",
    )


def experts_of(model: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the experts of every layer that has them, in the order of layers."""
    return ((name, module) for name, module in model.named_modules() if family.is_experts(module))
