"""Tiny models of each family, saved as checkpoints, and what they say unsharded."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY, HIDDEN, NUM_EXPERTS = 96, 128, 8
BATCH, LENGTH, NEW_TOKENS = 5, 7, 5
MAX_TOKENS = BATCH * LENGTH

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip


def mixtral(*, num_local_experts: int = NUM_EXPERTS) -> PreTrainedModel:
    config = MixtralConfig(
        **COMMON, num_hidden_layers=2, num_key_value_heads=4, num_local_experts=num_local_experts, num_experts_per_tok=2
    )
    return MixtralForCausalLM(config)


def qwen3_moe() -> PreTrainedModel:
    """The first layer is dense, and the head is tied to the embeddings."""
    config = Qwen3MoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=4, head_dim=16, moe_intermediate_size=32,
        num_experts=NUM_EXPERTS, num_experts_per_tok=3, mlp_only_layers=[0], tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def deepseek_v3() -> PreTrainedModel:
    """The first layer is dense; a shared expert; two groups of experts of which a token takes one, with a bias."""
    config = DeepseekV3Config(
        **COMMON, num_hidden_layers=3, num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=NUM_EXPERTS,
        n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    return model


BUILDERS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3}


MOE_LAYERS = 2
"""Layers with experts, of each of them."""


def build(family: str, **changes: Any) -> PreTrainedModel:
    """The same weights every time. With these, rounding rows to fp8 changes no router's choice."""
    torch.manual_seed(1)
    return BUILDERS[family](**changes)


def save_all(folder: Path) -> dict[str, str]:
    """A checkpoint of several files for each family; folder by family."""
    for family in BUILDERS:
        build(family).save_pretrained(folder / family, max_shard_size="100KB")
    return {family: str(folder / family) for family in BUILDERS}


def tensors_of(folder: str | Path) -> dict[str, Tensor]:
    """Everything in a checkpoint's files."""
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def write(folder: Path, source: str | Path, files: dict[str, dict[str, Tensor]], *, leave_out: set[str]) -> None:
    """A checkpoint with an index of ``files``, of which those in ``leave_out`` are not there."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(Path(source) / name, folder / name)
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file, tensors in files.items():
        if file not in leave_out:
            save_file(tensors, folder / file, metadata={"format": "pt"})


def files_by_expert(folder: str | Path) -> dict[str, dict[str, Tensor]]:
    """A checkpoint's tensors in a file for each expert (over all layers) and one for the rest."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors_of(folder).items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        files.setdefault(f"expert-{expert[1]}.safetensors" if expert else "rest.safetensors", {})[name] = tensor
    return files


def only_experts(target: Path, source: str | Path, experts: range) -> str:
    """A checkpoint without the files of all other experts."""
    others = {f"expert-{e}.safetensors" for e in range(NUM_EXPERTS) if e not in experts}
    write(target, source, files_by_expert(source), leave_out=others)
    return str(target)


def tokens() -> Tensor:
    """[BATCH, LENGTH]."""
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))


def share(rank: int, world_size: int) -> slice:
    """A rank's sequences of the batch; ranks have different numbers of them."""
    return slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)


def num_items() -> int:
    """Tokens of the whole batch that the loss is the mean over: every sequence's but its first."""
    return BATCH * (LENGTH - 1)


def generate(model: PreTrainedModel, ids: Tensor, *, new_tokens: int = NEW_TOKENS, **options: Any) -> Tensor:
    """Greedy continuations [sequences, new_tokens]."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, **options
    )
    return out[:, ids.shape[1] :]


def train(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """One step's loss, this batch's share of the whole batch's mean; gradients are in the parameters afterwards."""
    model.train()
    loss = model(ids, labels=ids, num_items_in_batch=num_items(), use_cache=False).loss
    loss.backward()
    return loss.detach().cpu()


@dataclass(frozen=True)
class Truth:
    """What the unsharded model, transformers' own, says of the whole batch.

    Attributes:
        logits: [BATCH, LENGTH, VOCABULARY]. without_experts: the same, had the experts said nothing.
        continuation: [BATCH, NEW_TOKENS].
        loss: of a training step. gradients: by parameter.
    """

    logits: Tensor
    without_experts: Tensor
    continuation: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def truth(folder: str, dtype: torch.dtype = torch.float32) -> Truth:
    ids = tokens()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        logits, continuation = model(ids).logits, generate(model, ids)
    loss = train(model, ids)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter.zero_()
        without = model(ids).logits
    return Truth(logits, without, continuation, loss, gradients)
