"""The model of :mod:`moelink_bench.serve`: a Qwen3-MoE with random weights and a tokenizer of single bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TALK = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template of a chat."""
SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
"""Of the model, by the names of transformers. vLLM's kernels for CPUs want hidden sizes that are multiples of 32."""
SPREAD = 0.2
"""Standard deviation of the weights, ten times that of transformers: likeliest tokens differ from step to step."""


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the 256 bytes and three special ones, with :data:`TALK`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate((*letters, *special))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=tokenizer, chat_template=TALK, **SPECIAL)


def save_model(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Save the model and its tokenizer to ``folder`` as a checkpoint in fp32. Return its sizes, with "parameters".

    Nothing is fetched from a hub.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        **SIZES, vocab_size=len(tokenizer), initializer_range=SPREAD, norm_topk_prob=True, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = Qwen3MoeForCausalLM(config)
    tokenizer.save_pretrained(folder)
    model.float().save_pretrained(folder)
    return {**SIZES, "vocab_size": config.vocab_size, "parameters": sum(p.numel() for p in model.parameters())}
