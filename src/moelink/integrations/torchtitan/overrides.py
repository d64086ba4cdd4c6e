"""The overrides that ``--override.imports`` names. Importing this module registers them with torchtitan.

torchtitan applies an override after it has filled the model's configuration from the trainer's. A model that is
configured for ``moe_comm_backend="deepep"`` (or "hybridep", "minimal_async_ep")
has its hidden size and token bound by then, so :func:`dispatcher` needs no arguments. One that is configured for
"standard" has neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moelink.errors import UnsupportedError
from moelink.integrations.versions import require

require("torchtitan")  # before anything is registered with it

from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

from moelink.integrations.torchtitan.dispatcher import MoelinkSelectiveAC, MoelinkTokenDispatcher
from moelink.integrations.torchtitan.moe import MoelinkMoE
from moelink.integrations.torchtitan.settings import aux_loss_of, resolve


def _replacement(cfg: Any, given: dict[str, Any]) -> MoelinkTokenDispatcher.Config:
    configured = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    replacement: MoelinkTokenDispatcher.Config = derive(
        cfg, MoelinkTokenDispatcher.Config, **resolve(configured, given)
    )
    return replacement


@override(target=BaseEPTokenDispatcher.Config, description="moelink dispatch and combine")  # type: ignore[untyped-decorator]
def dispatcher(
    cfg: Any,
    *,
    hidden_dim: int | None = None,
    num_max_tokens_per_rank: int | None = None,
    dtype: str | None = None,
    dispatch_format: str | None = None,
    batch_invariant: bool = False,
    expert_alignment: int | None = None,
    capacity: int | None = None,
    transport: str | None = None,
    num_sms: int | None = None,
    timeout: float | None = None,
) -> Any:
    """Replace any expert-parallel token dispatcher by moelink's.

    Args:
        cfg: the dispatcher's configuration.
        hidden_dim: the model's dim; None: of ``cfg``.
        num_max_tokens_per_rank: the most tokens of a rank in one call; likewise, or more.
        dtype: of activations, "bfloat16" or "float32": ``training.mixed_precision_param``. None: of ``cfg``, else
            "bfloat16".
        dispatch_format: how rows travel. None: the format that carries ``dtype`` exactly.
        expert_alignment: rows of an expert are padded to a multiple of it. None: ``pad_multiple`` of ``cfg``, else 1.
        batch_invariant, capacity, transport, num_sms, timeout: as for :func:`moelink.init`.

    Raises:
        ConfigError: a size is missing, contradicts ``cfg``, or a value is not acceptable.
    """
    given = dict(locals())
    return _replacement(given.pop("cfg"), given)


@override(target=RoutedExperts.Config, description="moelink dispatch and combine; hidden size of the experts")  # type: ignore[untyped-decorator]
def routed_experts(cfg: Any, **given: Any) -> Any:
    """Replace the dispatcher of routed experts by moelink's, with the hidden size that the experts have.

    For models that are configured for "standard". It replaces the configuration of the experts, so it cannot be
    combined with another override of these; use :func:`dispatcher` there.

    Args:
        cfg: the routed experts' configuration.
        given: arguments of :func:`dispatcher`; ``num_max_tokens_per_rank`` is required.

    Raises:
        ConfigError: as :func:`dispatcher`.
    """
    sized = {**given, "hidden_dim": given.get("hidden_dim") or cfg.inner_experts.dim}
    return dataclasses.replace(cfg, token_dispatcher=dispatcher(cfg.token_dispatcher, **sized))


@override(target=MoE.Config, description="moelink dispatch and combine, auxiliary losses, padding")  # type: ignore[untyped-decorator]
def moe(cfg: Any, *, aux_loss: Mapping[str, Any] | None = None, **given: Any) -> Any:
    """Replace a layer of experts by one with auxiliary losses and with padding, and its dispatcher by moelink's.

    It replaces the configuration of the whole layer, so it cannot be combined with an override of a part of it.

    Args:
        cfg: the layer's configuration.
        aux_loss: ``balance``, ``sequence``, ``z`` and ``over`` of :class:`moelink.nn.AuxLossConfig`, and ``scale``, by
            which their gradient is multiplied: 1 / the backwards of a step, by default 1. None for no losses.
        given: arguments of :func:`dispatcher`.

    Raises:
        ConfigError: as :func:`dispatcher`, or ``aux_loss`` has an unacceptable value.
        UnsupportedError: the layer is of a model's own class.
    """
    if type(cfg) is not MoE.Config:
        raise UnsupportedError(
            f"moe: expected torchtitan's own layer, got the configuration {type(cfg).__qualname__}; use the override "
            "dispatcher for this model"
        )
    losses, scale = aux_loss_of(aux_loss)
    return derive(
        cfg,
        MoelinkMoE.Config,
        routed_experts=routed_experts(cfg.routed_experts, **given),
        aux_loss=losses,
        aux_scale=scale,
        timeout=given.get("timeout") or 60.0,
    )


@override(target=SelectiveAC.Config, description="selective checkpointing that keeps what moelink communicated")  # type: ignore[untyped-decorator]
def selective_checkpointing(cfg: Any) -> Any:
    """Replace selective activation checkpointing by one that keeps the results of moelink's operators."""
    return derive(cfg, MoelinkSelectiveAC.Config)
