"""Checkpoints with experts in mxfp4, as gpt_oss is published: experts stay as stored, in another order.

For a weight of experts, [E, K, N] in the model, files have *blocks* [E, N, K / 32, 16] and *scales* [E, N, K / 32],
both uint8, and a bias [E, N]. Rows of gate and up take turns; here gate comes before up. Sizes are padded to multiples
of 128, as rows in fp8_block128 have them: 2880 to 2944. All of the padding is zero, in tokens as they are sent, in
weights and in biases. It adds nothing to a product, and the activation of zeros, ``0 * sigmoid(0) * (0 + 1)``, is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import functional

from moelink.errors import UnsupportedError
from moelink.integrations.transformers.forms import Form
from moelink.nn.mxfp4 import BLOCK, GROUP, Mxfp4Weight

METHOD = "mxfp4"
"""The value of quant_method in a configuration."""


def check_method(stored: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedError if the quantisation ``stored`` has settings that no published checkpoint has."""
    known = {"quant_method", "modules_to_not_convert"}
    others = [f"{name}={value!r}" for name, value in stored.items() if name not in known and value]
    if others:
        raise UnsupportedError(
            f"{where}: expected experts in mxfp4 as gpt_oss checkpoints have them, got other settings "
            f"(quantization_config: {', '.join(others)}); load a checkpoint of plain weights"
        )


def what_form_lacks(form: Form) -> str:
    """Return why experts of ``form`` cannot have such weights, or ""."""
    of_gpt_oss = form.gated and form.biased and form.transposed and form.interleaved and not form.norm
    if not of_gpt_oss or form.activation is None:
        return "such experts need gate and up in turn, biases, transposed weights and no norm, as gpt_oss has them"
    odd = [size for size in (form.hidden_size, form.intermediate_size) if size % GROUP]
    return f"such experts need sizes that are multiples of {GROUP}, got {odd[0]}" if odd else ""


def stored_parts(name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes, by name, of the tensors that stand for an expert's weight ``name`` [K, N], all uint8."""
    inner, columns = shape
    return {f"{name}_blocks": (columns, inner // GROUP, GROUP // 2), f"{name}_scales": (columns, inner // GROUP)}


def take_weight(module: nn.Module, name: str, *, halves: int) -> Mxfp4Weight:
    """Take the weight ``name`` out of ``module``, which has it as it is stored, so that it is freed. ``halves`` are 2
    for gate and up in turn, else 1."""
    parts: list[Any] = [module._parameters.pop(f"{name}_{part}") for part in ("blocks", "scales", "bias")]
    blocks, scales, bias = (part.detach().unflatten(1, (-1, halves)).transpose(1, 2) for part in parts)
    rows, inner = -blocks.shape[2] % BLOCK, -blocks.shape[3] % (BLOCK // GROUP)
    return Mxfp4Weight.from_blocks(
        functional.pad(blocks, (0, 0, 0, inner, 0, rows)).flatten(1, 2),
        functional.pad(scales, (0, inner, 0, rows)).flatten(1, 2),
    ).with_bias(functional.pad(bias, (0, rows)).flatten(1, 2))
