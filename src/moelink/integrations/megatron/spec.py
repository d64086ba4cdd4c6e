"""Put moelink into a layer spec of Megatron-core."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

from moelink.integrations.versions import require

require("megatron-core")  # before any of its specs is changed

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from moelink.errors import UnsupportedError
from moelink.integrations.megatron.layer import MoelinkMoELayer
from moelink.integrations.megatron.settings import Settings


def with_moelink(spec: Any, settings: Settings) -> Any:
    """Return a copy of ``spec`` in which each Mixture-of-Experts layer dispatches through moelink.

    Args:
        spec: of a transformer layer, of a block (``TransformerBlockSubmodules``), or of an MoE layer itself. It is not
            changed.
        settings: arguments that Megatron does not have.

    Raises:
        UnsupportedError: there is no MoELayer of Megatron in ``spec``.
    """
    replaced = copy.deepcopy(spec)
    if _replace(replaced, settings) == 0:
        raise UnsupportedError(
            "spec: expected one with a MoELayer of Megatron-core, got none; make it with num_experts=, or name "
            "moelink.integrations.megatron.layer.MoelinkMoELayer in your own spec"
        )
    return replaced


def _replace(node: Any, settings: Settings) -> int:
    """Replace the MoE layers under ``node`` in place; return how many there were."""
    if isinstance(node, (list, tuple)):
        return sum(_replace(item, settings) for item in node)
    if isinstance(node, ModuleSpec) and node.module is MoELayer:
        node.module, node.params = MoelinkMoELayer, {**node.params, "moelink": settings}
        return 1
    if isinstance(node, ModuleSpec):
        return _replace(node.submodules, settings)
    if is_dataclass(node) and not isinstance(node, type):
        return sum(_replace(getattr(node, field.name), settings) for field in fields(node))
    return 0
