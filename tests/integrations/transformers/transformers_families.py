"""A tiny random model of every family of transformers whose experts use the experts interface, found by looking.

A family is a package ``transformers.models.NAME`` that declares a class of experts. Its configuration is shrunk by
names of fields that families share (:data:`SMALL`), and by :data:`OWN` where the fields of one depend on one another.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY, HIDDEN, EXPERTS, TOPK, LAYERS = 96, 64, 4, 2, 2
BATCH, LENGTH, NEW_TOKENS = 2, 7, 3

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 32,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 64, "initializer_range": 0.15, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
    # how many experts, and how many of a token
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOPK, "moe_topk": TOPK, "moe_k": TOPK, "top_k_experts": TOPK, "n_group": 2, "topk_group": 1,
    # which layers have experts
    "first_k_dense_replace": 1, "num_dense_layers": 1, "num_mtp_layers": 0, "mlp_only_layers": [0],
    # attention of several kinds
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "sliding_window": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_heads": 2,
    "linear_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "d_rel": 8,
    "rel_extent": 16, "o_lora_rank": 16, "o_groups": 2,
    # state-space layers
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_d_head": 16}
BOTH: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
INDEXER: dict[str, Any] = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": BOTH,
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "gemma4": {"enable_moe_block": True, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
                                      "partial_rotary_factor": 0.5}},
    "glm5_next": {"index_kpool": 2, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]},
    "granitemoehybrid": BOTH | MAMBA,
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": BOTH,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {"num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 24},
    "muse_spark": {"moe_hidden_size": 32},
    "nemotron_h": {"layer_types": ["moe", "full_attention", "linear_attention"], "moe_latent_size": 32,
                   "num_hidden_layers": 3},
    "qwen3_5_moe": BOTH,
    "qwen3_next": BOTH,
    "qwen4_exp": BOTH | INDEXER,
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""By family, fields of the configuration that is built (the text model's, where there is one)."""

ENDINGS = ("ForCausalLM", "TextModel", "ForTokenClassification")
"""Of the class of the model that stands for a family, the best first: one with a head, else the text model alone."""


@cache
def families() -> tuple[str, ...]:
    """Names of the packages whose files mention the decorator of the experts interface, sorted."""
    models = Path(inspect.getfile(transformers)).parent / "models"
    files = models.glob("*/modeling_*.py")
    return tuple(sorted({file.parent.name for file in files if "use_experts_implementation" in file.read_text()}))


def model_class(family: str) -> type[PreTrainedModel]:
    """The class of the model that stands for ``family``."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, PreTrainedModel)]
    kinds = [kind for kind in kinds if kind.__module__ == module.__name__]
    return next(kind for ending in ENDINGS for kind in kinds if kind.__name__.endswith(ending))


def small(kind: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    """A configuration with the fields of :data:`SMALL` that it has, and ``own``."""
    fields = set(inspect.signature(kind).parameters) | kind.attribute_map.keys()
    parts = {name: sub for name, sub in (kind.sub_configs or {}).items() if issubclass(sub, PreTrainedConfig)}
    nested = {name: small(sub, {}) for name, sub in parts.items() if sub is not PreTrainedConfig}
    return kind(**{name: value for name, value in SMALL.items() if name in fields} | nested | own)


def build(family: str) -> PreTrainedModel:
    """The model, the same weights every time, none of them zero."""
    kind = model_class(family)
    torch.manual_seed(1)
    model = kind(small(kind.config_class, OWN.get(family, {}))).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.any():
                continue
            if tensor.is_floating_point():
                tensor.uniform_(-0.1, 0.1)
            elif tensor.shape == (VOCABULARY, TOPK):  # of each token the experts
                tensor.copy_(torch.arange(VOCABULARY)[:, None].add(torch.arange(TOPK)) % EXPERTS)
    return model


def experts_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every layer's experts, told by the method that the decorator adds."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "_apply_gate")]


def tokens() -> Tensor:
    """[BATCH, LENGTH]."""
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))


def output(model: Any, ids: Tensor) -> Tensor:
    """Logits, or hidden states of a model without a head: [BATCH, LENGTH, ...]."""
    out = model(ids, use_cache=False)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state  # type: ignore[no-any-return]


def backward(model: Any, ids: Tensor, rows: slice) -> None:
    """Gradients of a sum over ``rows`` of the batch, of terms of either sign."""
    model.train()
    out = output(model, ids[rows])
    signs = torch.rand(BATCH, *out.shape[1:], generator=torch.Generator().manual_seed(5)) - 0.5
    (out * signs[rows]).sum().backward()
    model.train(False)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By parameter, those that there are."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def generate(model: Any, ids: Tensor) -> Tensor:
    """Greedy continuations [BATCH, NEW_TOKENS]."""
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return made[:, ids.shape[1] :]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Truth:
    """What the unsharded model, as transformers loads and runs it, says.

    Attributes:
        output: see :func:`output`. without_experts: the same, had the experts said nothing.
        continuation: see :func:`generate`; None of a model that cannot.
        gradients: see :func:`backward`, of the whole batch. experts: names of the modules with experts.
    """

    output: Tensor
    without_experts: Tensor
    continuation: Tensor | None
    gradients: dict[str, Tensor]
    experts: tuple[str, ...]


def truth(family: str, folder: str | Path) -> Truth:
    model = model_class(family).from_pretrained(folder)
    ids, experts = tokens(), experts_in(model)
    with torch.no_grad():
        out = output(model, ids)
        continuation = generate(model, ids) if model.can_generate() else None
    backward(model, ids, slice(None))
    with torch.no_grad():
        for _, module in experts:
            for parameter in module.parameters(recurse=False):
                parameter.zero_()
        without = output(model, ids)
    return Truth(out, without, continuation, gradients(model), tuple(name for name, _ in experts))
