"""Experts of a training adapter and of the serving ones give the same bits for the same token, with batch_invariant."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moelink.errors import UnsupportedError
from moelink.integrations.transformers import parallelize
from moelink.testing import run_ranks
from tests.integrations import train_serve_ranks as ranks

FORMATS = ("bf16", "fp8_block128")


def results(world: int, cases: list[tuple[str, str, int]], fixed: bool = True) -> list[Tensor]:
    """The results of all tokens, by case."""
    return [torch.cat(parts) for parts in zip(*run_ranks(ranks.run, world, cases, fixed), strict=True)]


def test_a_token_has_the_same_bits_in_training_and_in_serving() -> None:
    trained = results(1, [("transformers", dtype, ranks.TOKENS) for dtype in FORMATS])
    for world, layers in ((2, (("transformers", 7), ("vllm", 1))), (4, (("vllm", 7), ("sglang", 5)))):
        cases = [(name, dtype, size) for name, size in layers for dtype in FORMATS]
        for case, served in zip(cases, results(world, cases), strict=True):
            assert torch.equal(served, trained[FORMATS.index(case[1])]), (world, case)


def test_without_the_setting_they_differ() -> None:
    (trained,) = results(1, [("transformers", "bf16", ranks.TOKENS)], False)
    cases = [(name, "bf16", ranks.TOKENS) for name in ranks.LAYERS]
    for case, served in zip(cases, results(2, cases, False), strict=True):
        assert not torch.equal(served, trained), case
        torch.testing.assert_close(served, trained, rtol=0.1, atol=0.05)


def test_experts_without_a_fixed_activation_are_refused() -> None:
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=16,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, hidden_act="gelu",
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="batch_invariant: expected experts with a gate.*gelu"):
        parallelize(Qwen3MoeForCausalLM(config), max_tokens_per_rank=4, batch_invariant=True)
