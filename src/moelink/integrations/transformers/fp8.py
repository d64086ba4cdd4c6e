"""Quantised checkpoints: in fp8 with a scale for each block of 128 x 128, as DeepSeek-V3 is published, or in mxfp4
(:mod:`moelink.integrations.transformers.mxfp4`). Experts stay as stored.

Codes and scales of experts are multiplied as they are stored. In fp8 checkpoints, replicated weights (attention, shared
experts) are dequantised to the model's dtype by transformers' own operation while they are read.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

import moelink
from moelink.arith import align_up
from moelink.errors import UnsupportedError
from moelink.integrations.transformers import mxfp4
from moelink.integrations.transformers.checkpoint import CheckpointError
from moelink.integrations.transformers.forms import Form
from moelink.nn.block_quantized import BLOCK, BlockQuantized, Weight, dequantize_weight
from moelink.nn.expert_backends import Stored, choose_backend
from moelink.nn.placed_experts import QuantizedExperts
from moelink.nn.placement import Placement
from moelink.routing import ExpertMap

FORMAT = "fp8_block128"


def scales_name(parameter: str) -> str:
    """Return transformers' name of the scales of ``parameter``."""
    return f"{parameter}_scale_inv"


def check_quantization(config: Any, where: str) -> Stored | None:
    """Return how weights of a model of ``config`` are quantised; None for plain ones.

    Raises:
        UnsupportedError: they are quantised in another way.
    """
    stored = _quantization_of(config)
    if stored is None:
        return None
    if stored.get("quant_method") == mxfp4.METHOD:
        mxfp4.check_method(stored, where)
        return "mxfp4"
    if not hasattr(FineGrainedFP8HfQuantizer, "get_load_operations"):
        raise UnsupportedError(
            f"{where}: expected transformers 5.23 or newer for quantised weights, got {transformers.__version__}; "
            "run pip install 'transformers>=5.23', or load a checkpoint of plain weights"
        )
    expected = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
                "scale_fmt": "float", "expert_dtype": "fp8", "modules_to_convert": None}  # fmt: skip
    got = {name: stored.get(name, expected[name]) for name in expected}
    got["weight_block_size"] = list(got["weight_block_size"] or [])
    wrong = [f"{name}={value!r}" for name, value in got.items() if value not in (expected[name], [])]
    if wrong or not got["weight_block_size"]:
        raise UnsupportedError(
            f"{where}: expected bf16, fp16 or fp32 weights, experts in mxfp4, or fp8 with fp32 scales of blocks of "
            f"{BLOCK} x {BLOCK}, got quantised ones (quantization_config: {', '.join(wrong) or 'no blocks'}); load a "
            "checkpoint of plain weights"
        )
    return "fp8"


def padded(size: int, stored: Stored | None) -> int:
    """Return hidden_size or intermediate_size as experts that are ``stored`` so have it here."""
    return align_up(size, BLOCK) if stored == "mxfp4" else size


def choose_for(form: Form, ep: moelink.Communicator, wanted: str, stored: Stored) -> str:
    """Return the backend for experts of ``form`` that are ``stored`` so: ``wanted``, or the best for "auto".

    Raises:
        ConfigError: there is no such backend.
        UnsupportedError: no backend can multiply them.
    """
    if stored == "mxfp4":
        reason = mxfp4.what_form_lacks(form)
    else:
        reason = "" if form.is_plain else "such experts need to be gated, without biases, transposition or norm"
    if not reason:
        assert form.activation is not None
        choice = choose_backend(
            wanted, ep.config, intermediate_size=padded(form.intermediate_size, stored), activation=form.activation,
            device=ep.device, dtype=form.dtype, stored=stored,
        )  # fmt: skip
        if choice.backend != "dequantize":
            return choice.backend
        reason = choice.reason or "experts_backend='dequantize' has weights of the model's dtype"
    raise UnsupportedError(
        f"checkpoint: expected experts in {stored} that a backend can multiply, got quantised ones where none can "
        f"({reason}); load a checkpoint of plain weights"
    )


class _Dequantize(Fp8Dequantize):  # type: ignore[misc]
    """transformers' operation, also for matrices of which the last block is cut off."""

    def _dequantize_one(self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        return dequantize_weight(BlockQuantized(quantized, scales.float()), dtype=output_dtype or torch.bfloat16)

    def convert(self, input_dict: dict[str, Any], *args: Any, **named: Any) -> dict[str, Any]:
        converted: dict[str, Any] = super().convert(input_dict, *args, **named)
        weight = input_dict.get("weight")
        weight = weight[0] if isinstance(weight, list) else weight
        if weight is None or weight.dtype != torch.float8_e4m3fn or "weight_scale_inv" in input_dict:
            return converted
        return dict.fromkeys(converted, weight)  # transformers 5.24 would cast it; check_scaled names it


class _Quantizer(FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Dequantize}


def with_scales(model: PreTrainedModel, mapping: list[Any]) -> tuple[list[Any], Any]:
    """Return ``mapping`` with the conversions of scales in fp8, and transformers' quantizer; or it alone, and None."""
    stored = _quantization_of(model.config)
    if stored is None or stored.get("quant_method") == mxfp4.METHOD:
        return mapping, None
    quantizer: Any = _Quantizer(FineGrainedFP8Config(**{**stored, "dequantize": True}), pre_quantized=True)
    return list(quantizer.update_weight_conversions(mapping, model)), quantizer


def check_scaled(model: PreTrainedModel, where: str, experts: Container[str]) -> None:
    """Raise CheckpointError if a parameter besides ``experts`` is still fp8 because its scales are missing."""
    fp8 = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float8_e4m3fn]
    left = [name for name in fp8 if name not in experts]
    if left:
        raise CheckpointError(
            f"{where}: expected scales for every tensor in fp8, got none for {', '.join(left[:3])}; complete the "
            "checkpoint"
        )


def quantized_experts(
    module: nn.Module, form: Form, ep: moelink.Communicator, *, backend: str, placement: Placement | None
) -> QuantizedExperts:
    """Return the experts of ``module``, whose parameters are codes and scales of this rank's, ready to multiply."""
    weights: list[Weight]
    if backend == "mxfp4":
        weights = [mxfp4.take_weight(module, name, halves=halves) for name, halves in ((form.up, 2), ("down_proj", 1))]
    else:
        weights = [
            BlockQuantized(
                getattr(module, name).detach().contiguous(), getattr(module, scales_name(name)).detach().contiguous()
            )
            for name in (form.up, "down_proj")
        ]
    assert form.activation is not None
    first = ExpertMap(ep.config.num_experts, ep.config.world_size).first(ep.config.rank)
    return QuantizedExperts(
        weights[0], weights[1], backend=backend, activation=form.activation,
        experts=(first, 0), placement=placement or Placement.identity(ep.config.num_experts), dtype=form.dtype,
        ranks=(ep.config.rank, ep.config.world_size),
    )  # fmt: skip


def _quantization_of(config: Any) -> dict[str, Any] | None:
    stored = getattr(config, "quantization_config", None)
    if stored is None or isinstance(stored, dict):
        return stored
    return dict(stored.to_dict())
