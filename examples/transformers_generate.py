"""Generate with a Mixture-of-Experts model of transformers whose experts are spread over the ranks.

    torchrun --nproc-per-node 4 examples/transformers_generate.py                # a small Mixtral with random weights
    torchrun --nproc-per-node 8 examples/transformers_generate.py --model FOLDER --prompt "Down the rabbit-hole"

Every rank passes the same prompt (mode "allreduce"), computes attention for itself, and runs its own experts. Of a
checkpoint it reads its own experts only. Also runs with plain ``python``, as one rank.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

from moelink.integrations.transformers import ParallelModel, from_pretrained, parallelize

MAX_TOKENS = 512


def small_model() -> MixtralForCausalLM:
    """Random weights, the same on every rank; its tokens are bytes."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def generate(parallel: ParallelModel, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy continuation [new_tokens] of the prompt ``ids`` [length]."""
    ids = ids[None].to(parallel.ep.device)
    out = parallel.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return out[0, ids.shape[1] :].cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="a folder with a checkpoint (Mixtral, Qwen3-MoE, DeepSeek-V3) and its tokenizer"
    )
    parser.add_argument("--prompt", default="Alice was beginning to get very tired")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    if arguments.model is None:
        tokenizer = None
        ids = torch.tensor(list(arguments.prompt.encode()))
        parallel = parallelize(small_model(), max_tokens_per_rank=MAX_TOKENS, mode="allreduce")
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids[0]
        parallel = from_pretrained(arguments.model, max_tokens_per_rank=MAX_TOKENS, mode="allreduce")

    with parallel:
        new = generate(parallel, ids, arguments.new_tokens)
        config = parallel.ep.config
        if config.rank == 0:
            text = tokenizer.decode(new) if tokenizer else f"{bytes(new.tolist())!r} (random weights, random bytes)"
            print(f"{config.world_size} ranks, {config.num_local_experts} of {config.num_experts} experts on this one")
            if parallel.loaded:
                print(f"read {parallel.loaded.tensors} tensors, left {parallel.loaded.other_ranks} to other ranks")
            print(arguments.prompt, "->", text)


if __name__ == "__main__":
    main()
