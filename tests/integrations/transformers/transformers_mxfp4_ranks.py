"""A tiny gpt_oss whose experts' checkpoint is in mxfp4, as published, and the same numbers in a plain checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

import moelink
from moelink.integrations.transformers import from_pretrained
from tests.integrations.transformers.transformers_models import MAX_TOKENS, VOCABULARY, tensors_of, tokens, write

EXPERTS, HIDDEN, INTERMEDIATE = 4, 192, 160
"""Neither size is a multiple of 128; each is one of 32."""
QUANTISED = re.compile(r"experts\.(gate_up|down)_proj$")
LAYERS = 2
BOUND = LAYERS * 2 * moelink.get_format("fp8_block128").tolerance
"""Of the relative error of logits: rows are rounded to fp8 twice in each layer."""
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def save(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """The folders of a checkpoint in mxfp4, and of one of the same numbers in fp32."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.15, "pad_token_id": 0,
        "swiglu_limit": 2.0,
    }  # fmt: skip
    torch.manual_seed(3)  # rounding rows to fp8 changes no choice of a router
    model = GptOssForCausalLM(GptOssConfig(**sizes | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_bias") or "sinks" in name:
                parameter.normal_()
    model.save_pretrained(folder / "first")
    mine: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors_of(folder / "first").items():
        if QUANTISED.search(name):
            experts, inner, columns = tensor.shape
            blocks = torch.randint(0, 256, (experts, columns, inner // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, blocks.shape[:-1], dtype=torch.uint8)
            mine[f"{name}_blocks"], mine[f"{name}_scales"] = blocks, scales
            plain[name] = dequantised(blocks, scales).transpose(1, 2).contiguous()
        else:
            mine[name] = plain[name] = tensor
    write(folder / "plain", folder / "first", {"all.safetensors": plain}, leave_out=set())
    write(folder / "mxfp4", folder / "first", {"all.safetensors": mine}, leave_out=set())
    config = json.loads((folder / "first" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }  # fmt: skip
    (folder / "mxfp4" / "config.json").write_text(json.dumps(config))
    return folder / "mxfp4", folder / "plain"


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, N, K] fp32: the low half of a byte is the even element."""
    nibbles = torch.stack([blocks % 16, blocks // 16], dim=-1).long()
    numbers = torch.where(nibbles < 8, 1.0, -1.0) * VALUES[nibbles % 8]
    return (numbers.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def rms(got: Tensor, want: Tensor) -> float:
    """The difference relative to what is wanted, both as root mean squares."""
    return float((got.float() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


def logits(rank: int, world_size: int, folder: Path, kind: str = "cpu") -> dict[str, Any]:
    """Logits of the whole batch in each mode, and what was read."""
    found: dict[str, Any] = {}
    device = f"cuda:{rank}" if kind == "cuda" else kind
    for mode in ("allreduce", "alltoall"):
        with from_pretrained(folder, mode=mode, max_tokens_per_rank=MAX_TOKENS, device=device) as parallel:
            with torch.no_grad():
                found[mode] = parallel.model(tokens().to(parallel.ep.device)).logits.cpu()
            found["read"] = parallel.loaded
    return found
