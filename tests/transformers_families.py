"""A tiny random model of every family of transformers whose experts use the experts interface, found by looking.

A family is a package ``transformers.models.NAME`` that declares a class of experts. Its configuration is shrunk by field
names that families share (:data:`SMALL`), and by :data:`OWN` where a family's fields depend on one another.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY, HIDDEN, EXPERTS, TOPK = 96, 64, 4, 2

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 32, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 64, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {}


@cache
def families() -> tuple[str, ...]:
    """Names of the packages whose files mention the decorator of the experts interface, sorted."""
    models = Path(inspect.getfile(transformers)).parent / "models"
    files = models.glob("*/modeling_*.py")
    return tuple(sorted({file.parent.name for file in files if "use_experts_implementation" in file.read_text()}))
