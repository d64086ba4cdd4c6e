"""A tiny model whose checkpoint is in fp8, as DeepSeek-V3 is published; and what one rank does with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from moelink.integrations.transformers import from_pretrained
from moelink.nn import dequantize_weight, quantize_weight
from tests.integrations.transformers.transformers_models import (
    COMMON,
    MAX_TOKENS,
    NUM_EXPERTS,
    tensors_of,
    tokens,
    write,
)

QUANTISED = re.compile(r"(self_attn\.\w*_proj\w*|mlp\..*_proj)\.weight$")
SIZES: dict[str, Any] = COMMON | {
    "num_hidden_layers": 2, "num_key_value_heads": 4, "moe_intermediate_size": 128, "intermediate_size": 128,
    "n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24, "v_head_dim": 32, "num_mtp_layers": 0,
}  # fmt: skip
"""Rows of kv_a_proj_with_mqa are no multiple of 128, as in the published model."""


def save(folder: Path) -> tuple[Path, Path]:
    """The folders of a checkpoint in fp8, and of one of the same numbers in fp32; a file for each expert."""
    torch.manual_seed(1)
    DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).save_pretrained(folder / "first")
    fp8: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors_of(folder / "first").items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        file = f"expert-{expert[1]}.safetensors" if expert else "rest.safetensors"
        mine, same = fp8.setdefault(file, {}), plain.setdefault(file, {})
        if QUANTISED.search(name):
            quantised = quantize_weight(tensor)
            mine[name], mine[f"{name}_scale_inv"] = quantised.codes, quantised.scales
            same[name] = dequantize_weight(quantised)
        else:
            mine[name] = same[name] = tensor
    write(folder / "plain", folder / "first", plain, leave_out=set())
    write(folder / "fp8", folder / "first", fp8, leave_out=set())
    config = json.loads((folder / "first" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "fp8" / "config.json").write_text(json.dumps(config))
    return folder / "fp8", folder / "plain"


def logits(rank: int, world_size: int, folders: list[str]) -> dict[str, Any]:
    """Logits of the whole batch in each mode from this rank's folder, its experts' codes and scales, and refusals."""
    found: dict[str, Any] = {}
    for mode in ("allreduce", "alltoall"):
        with from_pretrained(folders[rank], mode=mode, max_tokens_per_rank=MAX_TOKENS, device="cpu") as parallel:
            with torch.no_grad():
                found[mode] = parallel.model(tokens()).logits
            experts = parallel.model.model.layers[1].mlp.experts
            assert experts.quantized.gate_up_proj.dtype == torch.float8_e4m3fn
            found["state"] = {name: tensor.float() for name, tensor in experts.state_dict().items()}
            found["backend"], found["read"] = experts.quantized.backend, parallel.loaded
    return found
