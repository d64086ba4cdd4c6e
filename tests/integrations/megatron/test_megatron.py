"""moelink as Megatron-core's token dispatcher, against Megatron's allgather and alltoall dispatchers, on CPU ranks."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import pytest
import torch

if find_spec("megatron") is None:
    pytest.skip("Megatron-core is not installed here: run by make test-frameworks", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

from moelink.errors import UnsupportedError
from moelink.integrations.megatron.spec import with_moelink
from moelink.testing import assert_bitwise_equal, run_ranks
from tests.integrations.megatron import megatron_ranks as ranks

FP32, BF16 = torch.float32, torch.bfloat16
CAPACITY = {"moe_expert_capacity_factor": 0.5}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
SHARED = {"moe_shared_expert_intermediate_size": 48}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

ONE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
EXACT = [
    (2, "alltoall", FP32, {}, {}),
    (2, "allgather", FP32, {}, {}),
    (2, "alltoall", FP32, CAPACITY, {}),
    (2, "alltoall", FP32, {"moe_token_drop_policy": "position", **CAPACITY}, {}),
    (2, "alltoall", FP32, PADDED, {}),
    (2, "alltoall", FP32, SHARED, {}),
    (2, "alltoall", FP32, {**SHARED, "moe_shared_expert_overlap": True}, {}),
    (2, "alltoall", FP32, {"moe_router_padding_for_quantization": True}, {}),
    (2, "alltoall", FP32, {"moe_router_dtype": None}, {"pre_reduce": False}),
    (2, "alltoall", FP32, ONE, {}),
    (2, "alltoall", FP32, {**ONE, "moe_apply_probs_on_input": True}, {}),
    (2, "allgather", FP32, {"moe_permute_fusion": True}, {}),
    (2, "alltoall", FP32, {"moe_latent_size": 32}, {}),
    (2, "alltoall", FP32, RECOMPUTED, {}),
    (2, "alltoall", FP32, {**SHARED, **RECOMPUTED, "recompute_modules": ["moe", "shared_experts"]}, {}),
    (4, "allgather", FP32, {}, {}),
    (4, "alltoall", FP32, {}, {}),
]
"""With one or two experts of a token, a sum has one or two terms: the same bits, whoever adds them."""
ROUNDED = [
    (2, "alltoall", BF16, {}, {}),
    (4, "alltoall", BF16, {"moe_router_topk": 4}, {}),
    (4, "alltoall", FP32, {"moe_router_topk": 4}, {"pre_reduce": False}),
]


@functools.cache
def results_on(world_size: int) -> list[list]:
    """By rank: results of all cases on so many ranks. Importing Megatron takes long, so they share processes."""
    cases = [case[1:] for case in (*EXACT, *ROUNDED) if case[0] == world_size]
    return run_ranks(ranks.compared, world_size, cases, timeout=500)


def results_of(case: tuple) -> list:
    """By rank: what :func:`megatron_ranks.one_case` returned for the case."""
    number = [each for each in (*EXACT, *ROUNDED) if each[0] == case[0]].index(case)
    return [made[number] for made in results_on(case[0])]


def scale(tensor: torch.Tensor) -> float:
    return tensor.float().abs().max().item()


def same_checkpoints(names: tuple, used: tuple, theirs: str) -> None:
    assert names[0] == names[1]
    assert names[0]
    name = {"allgather": "MoEAllGatherTokenDispatcher", "alltoall": "MoEAlltoAllTokenDispatcher"}[theirs]
    assert used == (name, "MoelinkTokenDispatcher")


@pytest.mark.quick("all cases run in the processes that the first one starts")
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_two_experts_a_token_give_the_same_bits(case: tuple) -> None:
    _, theirs, _, options, _ = case
    for expected, made, expected_twice, made_twice, names, used in results_of(case):
        same_checkpoints(names, used, theirs)
        assert scale(expected["out"]) > 0
        for name in expected:
            # Filling rows of Megatron's, whose sums come to zero, change the order in which a matmul adds.
            if "moe_pad_expert_input_to_capacity" in options or "moe_router_padding_for_quantization" in options:
                torch.testing.assert_close(made[name], expected[name], rtol=1e-5, atol=1e-6)
            else:
                assert_bitwise_equal(made[name], expected[name], name)
                assert_bitwise_equal(made_twice[name], expected_twice[name], name)


@pytest.mark.quick("all cases run in the processes that the first one starts")
@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_elsewhere_sums_are_rounded_once_more_or_less(case: tuple) -> None:
    _, theirs, dtype, options, _ = case
    step = 2.0**-8 if dtype == BF16 else 2.0**-23
    for expected, made, _, _, names, used in results_of(case):
        same_checkpoints(names, used, theirs)
        for name in expected:
            # A sum of topk terms, each of them rounded to dtype by one side at most.
            bound = options.get("moe_router_topk", 2) * step * scale(expected[name])
            assert scale(made[name].float() - expected[name].float()) <= bound, name


BALANCED = [
    ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}, False),
    ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}, True),
    (
        {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.5, 0.25, 0.125],
        },
        True,
    ),
    ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5, **ranks.BIASED}, False),
    ({"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5, **RECOMPUTED}, False),
]


def test_losses_biases_and_masks_of_the_router_give_the_same_bits() -> None:
    for by_case in run_ranks(ranks.balanced, 2, BALANCED, timeout=500):
        for (options, _), (theirs, ours, without) in zip(BALANCED, by_case, strict=True):
            assert theirs.keys() == ours.keys()
            for name, expected in theirs.items():
                assert_bitwise_equal(ours[name], expected, f"{name} with {options}")
            assert scale(ours["router.grad"] - without["router.grad"]) > 1e-3, "the losses have gradients"
            if "moe_router_enable_expert_bias" in options:
                assert scale(ours["expert_bias"]) == 0.125


def test_padding_and_biases_together_are_refused() -> None:
    for said in run_ranks(ranks.bias_of_padded_tokens, 2):
        assert said.startswith("UnsupportedError: padding_mask: expected None with moe_router_enable_expert_bias")


def test_every_token_comes_back_as_it_was() -> None:
    assert run_ranks(ranks.dropless, 2) == [True, True]


def test_whole_layers_that_backward_runs_again_give_the_same_bits() -> None:
    for found in run_ranks(ranks.recomputed_block, 2):
        *kept, dispatches = found["kept"]
        *full, twice = found["full"]
        assert (int(dispatches), int(twice)) == (2, 4)
        assert scale(kept[1]) > 0
        for number, (made, expected) in enumerate(zip(full, kept, strict=True)):
            assert_bitwise_equal(made, expected, f"tensor {number}")


def test_layers_of_a_size_share_a_communicator() -> None:
    assert run_ranks(ranks.shared_by_layers, 2) == [(2, 0)] * 2


def test_options_of_other_ranks_are_named() -> None:
    for said in run_ranks(ranks.other_options, 2):
        assert "ConfigMismatchError: moe_expert_capacity_factor" in said["theirs"]
        assert "1.0" in said["theirs"]
        assert "2.0" in said["theirs"]
        assert "ConfigMismatchError: pre_reduce" in said["ours"]


def test_expert_tensor_parallelism_is_refused_at_construction() -> None:
    for said in run_ranks(ranks.expert_tensor_parallel, 2):
        assert said.startswith("UnsupportedError: expert_tensor_parallel_size: expected 1, ")
        assert "got 2; pass --expert-tensor-parallel-size 1" in said


def test_a_block_of_dense_and_moe_layers_is_built_from_its_spec() -> None:
    for found in run_ranks(ranks.whole_block, 2):
        assert found == ["MLP", "MoelinkMoELayer", "MLP", "MoELayer"]


def test_a_spec_without_experts_is_refused() -> None:
    dense = ranks.get_gpt_layer_local_spec()
    with pytest.raises(UnsupportedError, match="spec: expected one with a MoELayer of Megatron-core, got none"):
        with_moelink(dense, ranks.settings())
