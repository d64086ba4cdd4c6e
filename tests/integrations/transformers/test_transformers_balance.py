"""Replicas, placements and the Balancer in a parallelised model: it says the same, and its files are the same."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import moelink
from moelink.integrations.transformers import from_pretrained, parallelize
from moelink.nn import Balancer, Placement, load_report
from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_fp8_ranks import save as save_fp8
from tests.integrations.transformers.transformers_models import (
    MAX_TOKENS,
    MOE_LAYERS,
    NUM_EXPERTS,
    build,
    save_all,
    tensors_of,
    tokens,
    train,
)

PHYSICAL = 12
REPLICATED = Placement.identity(NUM_EXPERTS, PHYSICAL)
PERMUTED = Placement((5, 2, 7, 0, 1, 6, 3, 4))
ONE: dict[str, Any] = {"max_tokens_per_rank": MAX_TOKENS, "device": "cpu"}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_all(tmp_path_factory.mktemp("balance"))["mixtral"]


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


def counted(model: Any) -> list[tuple[int, ...]]:
    """Tokens of each layer by physical expert."""
    return [tuple(layer["tokens_per_expert"]) for layer in load_report(model)["layers"]]


def balanced(rank: int, world_size: int, mode: Any, folder: str, out: str) -> dict[str, Any]:
    """Logits before, between and after the steps of a Balancer, what was counted, and a checkpoint."""
    ids = tokens() if mode == "allreduce" else tokens()[rank::world_size]
    said: dict[str, Any] = {}
    with from_pretrained(folder, mode=mode, placement=REPLICATED, **ONE) as parallel:
        said["logits"] = [logits(parallel.model, ids)]
        said["counted"] = counted(parallel.model)
        balancer = Balancer(parallel.model, max_bytes=1)
        said["plan"] = balancer.plan()
        while balancer.steps_left:
            balancer.step()
            said["logits"].append(logits(parallel.model, ids))
        said["placements"] = [m.placement.placement for m in parallel.model.modules() if hasattr(m, "place")]
        parallel.save_pretrained(out)
        for parameter in parallel.model.parameters():
            parameter.data.zero_()
        parallel.load_pretrained(out)
        said["logits"].append(logits(parallel.model, ids))
        try:
            parallel.model(ids)
        except moelink.UnsupportedError as error:
            said["refused"] = str(error)
    return said


@pytest.mark.parametrize(("world_size", "mode"), [(2, "alltoall"), (4, "allreduce"), (1, "alltoall")])
def test_a_balanced_model_says_the_same(world_size: int, mode: str, mixtral: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral)
    chosen: list[Counter[int]] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(Counter(args[1].flatten().tolist())))
    want = logits(model, tokens())
    said = run_ranks(balanced, world_size, mode, mixtral, str(tmp_path), timeout=200)
    for rank, found in enumerate(said):
        mine = want if mode == "allreduce" else want[rank::world_size]
        assert len(found["logits"]) > 3, "several steps"
        for got in found["logits"]:
            torch.testing.assert_close(got, mine, atol=1e-5, rtol=1e-5)
        assert found["placements"] == said[0]["placements"]
        assert all(placement.num_physical == PHYSICAL for placement in found["placements"])
        assert any(placement != REPLICATED for placement in found["placements"])
        assert all(plan.after <= plan.before for plan in found["plan"])
        assert "placement: expected a call without gradients, as replicas" in found["refused"]
    ranks = said[:1] if mode == "allreduce" else said
    for index, right in enumerate(chosen):
        load = [sum(numbers) for numbers in zip(*(found["counted"][index] for found in ranks), strict=True)]
        assert REPLICATED.expert_load(load) == tuple(right[expert] for expert in range(NUM_EXPERTS))
        assert world_size == 1 or min(load[0], load[NUM_EXPERTS]) > 0, "replicas share the tokens"
    was, now = tensors_of(mixtral), tensors_of(tmp_path)
    assert was.keys() == now.keys()
    assert all(torch.equal(was[name], now[name]) for name in was)


def trained(rank: int, world_size: int) -> tuple[list[int], dict[str, Tensor]]:
    """Gradients of experts in another order, of a model in memory; and which experts they are."""
    with parallelize(build("mixtral"), placement=PERMUTED, **ONE) as parallel:
        train(parallel.model, tokens()[rank::world_size])
        experts = parallel.model.model.layers[0].mlp.experts
        gradients = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
        return list(experts.ownership.experts), gradients


def test_experts_in_another_order_train() -> None:
    model = build("mixtral")
    for rank in range(3):
        train(model, tokens()[rank::3])
    want = dict(model.model.layers[0].mlp.experts.named_parameters())
    held = []
    for experts, gradients in run_ranks(trained, 3):
        held += experts
        assert gradients.keys() == want.keys()
        for name, got in gradients.items():
            torch.testing.assert_close(got, want[name].grad[experts], atol=1e-6, rtol=1e-4)
    assert tuple(held) == PERMUTED.experts


def refused(rank: int, world_size: int) -> str:
    try:
        parallelize(build("mixtral"), placement=Placement.identity(4, 8), **ONE)
    except moelink.ConfigError as error:
        return str(error)
    return ""


def test_a_placement_of_other_experts_is_refused() -> None:
    assert refused(0, 1) == "placement: expected a placement of 8 experts, got 4"


def fp8(rank: int, world_size: int, folder: str) -> list[Tensor]:
    """Logits in fp8: as stored, with replicas, and after balancing."""
    with from_pretrained(folder, **ONE) as parallel:
        said = [logits(parallel.model, tokens())]
    with from_pretrained(folder, placement=REPLICATED, **ONE) as parallel:
        said.append(logits(parallel.model, tokens()))
        moved = Balancer(parallel.model).run()
        assert sum(layer.moves for layer in moved) > 0
        said.append(logits(parallel.model, tokens()))
    return said


@pytest.mark.skipif(not hasattr(FineGrainedFP8HfQuantizer, "get_load_operations"), reason="5.23 can load scales")
def test_experts_in_fp8_have_replicas_and_are_balanced(tmp_path: Path) -> None:
    folder, _ = save_fp8(tmp_path)
    for stored, *others in run_ranks(fp8, 2, str(folder)):
        for got in others:
            torch.testing.assert_close(got, stored, atol=1e-5, rtol=1e-5)


def test_layers_without_a_placement_count_nothing() -> None:
    with parallelize(build("mixtral"), **ONE) as parallel:
        assert load_report(parallel.model)["layers"] == []
        with pytest.raises(moelink.ArgumentError, match=f"0 with a placement of {MOE_LAYERS} layers"):
            Balancer(parallel.model)
