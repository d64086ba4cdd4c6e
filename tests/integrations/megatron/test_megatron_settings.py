"""What Megatron's configuration and router come to. No Megatron-core is needed: see test_megatron.py for the rest."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from moelink.errors import ConfigError, UnsupportedError
from moelink.integrations.megatron import Settings
from moelink.integrations.megatron.settings import COMPARED, check, ids_and_weights, options_of


def config(**options: object) -> SimpleNamespace:
    usual = {
        "num_moe_experts": 8, "moe_router_topk": 2, "hidden_size": 64, "params_dtype": torch.bfloat16,
        "moe_router_dtype": "fp32", "cuda_graph_impl": "none", "cuda_graph_scope": [],
        "overlap_moe_expert_parallel_comm": False, "moe_latent_size": None,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **options})


def test_arguments_follow_from_the_model() -> None:
    settings = Settings(max_tokens_per_rank=32, device="cpu", pre_reduce=False)
    assert settings.init_arguments(config(), alignment=16) == {
        "num_experts": 8, "topk": 2, "hidden_size": 64, "max_tokens_per_rank": 32, "dispatch_format": "bf16",
        "combine_dtype": torch.bfloat16, "expert_alignment": 16, "capacity": None, "pre_reduce": False,
        "transport": "auto", "num_sms": None, "timeout": 60.0, "batch_invariant": False, "device": torch.device("cpu"),
    }  # fmt: skip
    other = config(params_dtype=torch.float16, moe_latent_size=32)
    arguments = settings.init_arguments(other, alignment=1)
    assert (arguments["dispatch_format"], arguments["combine_dtype"]) == ("fp32", torch.float16)
    assert arguments["hidden_size"] == 32
    with pytest.raises(ConfigError, match="device: expected a mesh of cuda or cpu devices, got 'meta'"):
        Settings(max_tokens_per_rank=1, device="meta").init_arguments(config(), alignment=1)
    with pytest.raises(UnsupportedError, match="params_dtype: expected one of .*, got torch.float8"):
        settings.init_arguments(config(params_dtype=torch.float8_e4m3fn), alignment=1)


@pytest.mark.quick("each is a refusal of its own, in microseconds")
@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 2, r"expert_tensor_parallel_size: expected 1, .*, got 2; pass --expert-tensor-parallel-size 1 .*alltoall"),
        ({"moe_router_dtype": "fp64"}, 1, "moe_router_dtype: expected fp32 or None, .*, got fp64; pass fp32"),
        ({"overlap_moe_expert_parallel_comm": True}, 1, "overlap_moe_expert_parallel_comm: expected False, .*got True"),
        ({"cuda_graph_impl": "local"}, 1, "cuda_graph_scope: expected attn.*, got everything; leave the experts out"),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": [SimpleNamespace(name="moe")]}, 1,
            "cuda_graph_scope: expected attn.*, got moe;",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(options: dict, size: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check(config(**options), expert_tensor_parallel_size=size)


def test_what_is_supported_is_not_refused() -> None:
    check(config(), expert_tensor_parallel_size=1)
    check(config(moe_router_dtype="fp64", params_dtype=torch.float64), expert_tensor_parallel_size=1)
    scope = [SimpleNamespace(name="moe_router"), SimpleNamespace(name="moe_preprocess")]
    check(config(cuda_graph_impl="local", cuda_graph_scope=scope), expert_tensor_parallel_size=1)


def test_options_are_compared_by_name() -> None:
    options = options_of(config(moe_expert_capacity_factor=1.5))
    assert set(options) == set(COMPARED)
    assert options["moe_expert_capacity_factor"] == 1.5


def by_loops(probs: torch.Tensor, chosen: torch.Tensor, topk: int) -> tuple[list[list[int]], list[list[float]]]:
    ids, weights = [], []
    for token in range(len(probs)):
        experts = [expert for expert in range(probs.shape[1]) if chosen[token, expert]]
        ids.append(experts + [-1] * (topk - len(experts)))
        weights.append([probs[token, expert].item() for expert in experts] + [0.0] * (topk - len(experts)))
    return ids, weights


def test_a_table_of_experts_becomes_ids_in_ascending_order() -> None:
    generator = torch.Generator().manual_seed(0)
    topk, experts, tokens = 3, 7, 50
    probs = torch.rand(tokens, experts, generator=generator)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    for token in range(tokens):
        count = int(torch.randint(0, topk + 1, (1,), generator=generator))
        chosen[token, torch.randperm(experts, generator=generator)[:count]] = True
    probs = (probs * chosen).requires_grad_()
    ids, weights = ids_and_weights(probs, chosen, topk)
    assert (ids.tolist(), weights.tolist()) == by_loops(probs.detach(), chosen, topk)
    weights.sum().backward()
    assert torch.equal(probs.grad, chosen.float()), "each chosen probability counts once, others not at all"


def test_a_chosen_expert_of_probability_zero_keeps_its_gradient() -> None:
    probs = torch.tensor([[0.0, 0.7, 0.0]], requires_grad=True)
    chosen = torch.tensor([[True, True, False]])
    ids, weights = ids_and_weights(probs, chosen, 2)
    assert ids.tolist() == [[0, 1]]
    (weights * torch.tensor([[3.0, 5.0]])).sum().backward()
    assert probs.grad.tolist() == [[3.0, 5.0, 0.0]]


def test_tokens_that_fill_a_capacity_stay_at_home() -> None:
    probs = torch.tensor([[0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.9, 0.1]])
    filled = torch.ones(2, 4, dtype=torch.bool)
    ids, weights = ids_and_weights(probs, filled, 2, padded=True)
    assert ids.tolist() == [[0, 1], [2, 3]]
    assert torch.equal(weights, probs[probs > 0].view(2, 2))


@pytest.mark.skipif(find_spec("megatron") is not None, reason="Megatron-core is installed, so nothing is missing")
@pytest.mark.parametrize("module", ["spec", "layer"])
def test_without_megatron_the_package_is_named(module: str) -> None:
    words = r"megatron-core: expected a release from 0.16.0 .*run pip install 'megatron-core>="
    with pytest.raises(UnsupportedError, match=words):
        __import__(f"moelink.integrations.megatron.{module}")
