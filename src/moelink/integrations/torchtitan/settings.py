"""Settings of a dispatcher, of a torchtitan configuration and an override. torchtitan is not imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import moelink
from moelink.errors import ArgumentError, ConfigError
from moelink.integrations.settings import SharedCommunicators
from moelink.nn import AuxLossConfig

COMMUNICATORS = SharedCommunicators()
close = COMMUNICATORS.close
"""Close the communicators of all dispatchers in this process, as at the end of training. Collective."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"bfloat16": torch.bfloat16, "float32": torch.float32})
"""The dtypes of rows, by torchtitan's names."""

FORMATS: Mapping[str, str] = MappingProxyType({"bfloat16": "bf16", "float32": "fp32"})
"""By torchtitan's name of a dtype, the format that carries it exactly."""

_BOUND = (
    "the most tokens of a rank in one call, training.local_batch_size * training.seq_len / (context_parallel_degree * "
    "tensor_parallel_degree); pass num_max_tokens_per_rank to the override, or configure the model for "
    "moe_comm_backend='deepep', where torchtitan fills it in"
)
_HIDDEN = (
    "the model's dim; pass hidden_dim to the override, use the override routed_experts, which reads it, or configure "
    "the model for moe_comm_backend='deepep', where torchtitan fills it in"
)


AUX_LOSS = ("balance", "sequence", "z", "over", "scale")
"""The fields of an override's ``aux_loss``."""


def aux_loss_of(given: Mapping[str, Any] | None) -> tuple[AuxLossConfig | None, float]:
    """Return the losses of an override's ``aux_loss``, and by which their gradient is multiplied.

    Raises:
        ConfigError: there is no such field, or it has an unacceptable value.
    """
    fields = dict(given or {})
    unknown = sorted({*fields} - {*AUX_LOSS})
    if unknown:
        raise ConfigError("aux_loss", f"fields of {', '.join(AUX_LOSS)}", unknown)
    scale = fields.pop("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise ConfigError("aux_loss.scale", "a finite number > 0", scale)
    return (None if given is None else AuxLossConfig(**fields)), float(scale)


def set_padding_mask(model: torch.nn.Module, padding_mask: Tensor | None) -> None:
    """Set which tokens are padding in all forwards of ``model`` from now on, and in their recomputations.

    Padding is sent to no expert, counts in no auxiliary loss and no update of biases, and comes out of layers as zeros.

    Args:
        model: with layers of the override ``moe``.
        padding_mask: [B, L] bool on the device, True for padding, of this rank's tokens; None for no padding.

    Raises:
        ArgumentError: no layer of ``model`` takes a mask.
    """
    layers = [module for module in model.modules() if hasattr(module, "padding_mask")]
    if not layers:
        raise ArgumentError("model", "layers of the override moe", f"{type(model).__name__} without any")
    for layer in layers:
        layer.padding_mask = padding_mask  # type: ignore[assignment]


def resolve(configured: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dispatcher's configuration.

    Args:
        configured: fields of the dispatcher configuration that is replaced, by torchtitan's names. Fields without an
            equivalent are left out; unsupported values are refused.
        given: arguments of the override; None for the default.

    Raises:
        ConfigError: a size is missing or given twice with different values, or a value is not acceptable.
    """
    factor = configured.get("non_blocking_capacity_factor")
    if factor is not None and factor < 1.0:
        raise ConfigError(
            "non_blocking_capacity_factor",
            "None or 1.0, as moelink counts rows; pass capacity= to the override (rows that a rank receives at most)",
            factor,
        )
    hidden_dim = _one("hidden_dim", configured.get("hidden_dim"), given.get("hidden_dim"), _HIDDEN)
    bound = _larger(configured.get("num_max_tokens_per_rank"), given.get("num_max_tokens_per_rank"))
    dtype = given.get("dtype") or _name(configured.get("dtype")) or "bfloat16"
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"one of {', '.join(DTYPES)} (training.mixed_precision_param)", dtype)
    name = given.get("dispatch_format") or FORMATS[dtype]
    if name not in moelink.format_names():
        raise ConfigError("dispatch_format", f"one of {', '.join(moelink.format_names())}", name)
    alignment = _one("expert_alignment", configured.get("pad_multiple"), given.get("expert_alignment"), "", default=1)
    return {
        "hidden_dim": hidden_dim,
        "num_max_tokens_per_rank": bound,
        "dtype": dtype,
        "dispatch_format": name,
        "expert_alignment": alignment,
        "batch_invariant": given.get("batch_invariant", False),
        "capacity": given.get("capacity"),
        "transport": given.get("transport") or "auto",
        "num_sms": given.get("num_sms"),
        "timeout": given.get("timeout") or 60.0,
    }


def init_arguments(fields: Mapping[str, Any], *, num_experts: int, top_k: int, device: torch.device) -> dict[str, Any]:
    """Return arguments of :func:`moelink.init`, without the group, for ``fields`` that :func:`resolve` returned."""
    same = ("dispatch_format", "batch_invariant", "expert_alignment", "capacity", "transport", "num_sms", "timeout")
    return {
        "num_experts": num_experts,
        "topk": top_k,
        "hidden_size": fields["hidden_dim"],
        "max_tokens_per_rank": fields["num_max_tokens_per_rank"],
        "combine_dtype": DTYPES[fields["dtype"]],
        "device": device,
        **{name: fields[name] for name in same},
    }


def _one(name: str, configured: Any, given: Any, expected: str, default: Any = None) -> Any:
    """The value that was configured, or given; both if they are equal."""
    if configured is not None and given is not None and configured != given:
        raise ConfigError(name, f"what the model is configured for, {configured}, or no argument", given)
    value = given if configured is None else configured
    if value is None and default is None:
        raise ConfigError(name, expected, None)
    return default if value is None else value


def _larger(configured: int | None, given: int | None) -> int:
    """The bound that was configured, or a given one, which may be larger."""
    if configured is None and given is None:
        raise ConfigError("num_max_tokens_per_rank", _BOUND, None)
    if configured is not None and given is not None and given < configured:
        raise ConfigError("num_max_tokens_per_rank", f"at least {configured}, for which torchtitan set it up", given)
    bound = configured if given is None else given
    assert bound is not None
    return bound


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
