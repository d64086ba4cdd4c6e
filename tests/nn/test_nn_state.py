"""What is done to a model around a layer: casts, autocast, the meta device. Dtypes that are promised stay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moelink
from moelink.nn import MoE, Placement, RouterConfig

SIZES: dict[str, Any] = {"topk": 2, "hidden_size": 32, "max_tokens_per_rank": 64, "device": "cpu"}
CASTS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "bfloat16": lambda module: module.bfloat16(), "half": lambda module: module.half(),
    "to": lambda module: module.to(torch.bfloat16), "double": lambda module: module.double(),
    "to_empty": lambda module: module.to_empty(device="cpu"), "share_memory": lambda module: module.share_memory(),
}  # fmt: skip

told_of_casts = pytest.mark.filterwarnings("ignore:Experts. expected weights of:UserWarning")


def experts_of(x: Tensor, weight: Tensor, bias: Tensor | float, topk: int) -> Tensor:
    """The experts of each token, ascending, by sigmoid scores in fp64."""
    return ((x.double() @ weight.double().T).sigmoid() + bias).topk(topk).indices.sort().values


@told_of_casts
@pytest.mark.quick("each cast takes another way through torch")
@pytest.mark.parametrize("cast", CASTS)
def test_the_correction_bias_keeps_its_values(cast: str) -> None:
    """Values that bf16 does not tell apart, as those of large models are."""
    with moelink.init(num_experts=256, **SIZES) as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=8, router=RouterConfig(scoring="sigmoid", correction_bias=True))
        generator = torch.Generator().manual_seed(1)
        bias = 6.8 + 0.25 * torch.rand(256, generator=generator)
        layer.router.correction_bias.copy_(bias)
        CASTS[cast](layer)
        assert torch.equal(layer.router.correction_bias, bias)
        weight, x = layer.router.weight, torch.randn(64, 32, generator=generator)
        weight.copy_(torch.randn(weight.shape, generator=generator))
        ids = layer.router(x).topk_ids.long().sort().values
        assert torch.equal(ids, experts_of(x, weight, bias.double(), 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_tokens_go_to_the_same_experts_and_the_layer_gives_the_same_bits(dtype: torch.dtype) -> None:
    wide = {"dispatch_format": "fp32", "combine_dtype": torch.float32}
    with moelink.init(num_experts=64, **SIZES, **wide) as ep:
        layer = MoE(ep, intermediate_size=16, seed=1)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        plain = layer(x)
        plain.sum().backward()
        gradients = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
        layer.zero_grad()
        with torch.autocast("cpu", dtype):
            routing, out = layer.router(x), layer(x)
        out.sum().backward()
        assert (routing.logits.dtype, routing.topk_weights.dtype) == (torch.float32, torch.float32)
        best = (x.double() @ layer.router.weight.double().T).topk(2).indices.sort().values
        assert torch.equal(routing.topk_ids.long().sort().values, best)
        assert torch.equal(out, plain)
        assert all(map(torch.equal, gradients, [parameter.grad for parameter in layer.parameters()]))


@pytest.mark.quick("without and with replicas")
@pytest.mark.parametrize("placement", [None, Placement.identity(8, 12)], ids=["experts", "replicas"])
@pytest.mark.parametrize("context", [False, True], ids=["argument", "context"])
def test_a_layer_that_was_meta_counts_and_places(
    placement: Placement | None, context: bool, filled_memory: None
) -> None:
    """By the usual idiom: a model on the meta device, ``to_empty``, then ``reset_parameters`` of all modules."""
    with moelink.init(num_experts=12, **SIZES) as ep, torch.no_grad():
        whole = MoE(ep, intermediate_size=16, placement=placement, seed=3)
        if context:
            with torch.device("meta"):
                layer = MoE(ep, intermediate_size=16, placement=placement, seed=3, device="meta")
        else:
            layer = MoE(ep, intermediate_size=16, placement=placement, seed=3, device="meta")
        layer.to_empty(device="cpu")
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert torch.equal(layer(x), whole(x))
        assert sum(layer.stats().tokens_per_expert) == 10


@told_of_casts
def test_counts_and_placement_survive_what_is_applied_to_a_model(filled_memory: None) -> None:
    with moelink.init(num_experts=12, **SIZES) as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=16, placement=Placement.identity(8, 12))
        x = torch.ones(5, 32).bfloat16()
        layer(x)
        for cast in CASTS.values():
            cast(layer)
        assert layer.load is not None
        assert layer.load.total.dtype == torch.int64
        assert sum(layer.stats().tokens_per_expert) == 10
        assert layer.placement is not None
        assert layer.placement(torch.arange(8).view(4, 2)).max() < 12


def test_a_cast_to_more_than_rows_carry_is_told() -> None:
    with moelink.init(num_experts=4, **SIZES) as ep:
        layer = torch.nn.Sequential(MoE(ep, intermediate_size=16))
        layer.half()
        with pytest.warns(UserWarning, match=r"Experts: .* of torch.bfloat16 or less.*got a cast to torch.float32"):
            layer.float()
        layer.float()
        MoE(ep, intermediate_size=16, dtype=torch.float32).to("cpu")


def test_experts_in_fp8_stay_in_fp8() -> None:
    sizes = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 8, "device": "cpu"}
    with moelink.init(**sizes, dispatch_format="fp8_block128") as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=128, experts_backend="torch")
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
        before, plain = {name: value.clone() for name, value in layer.experts.state_dict().items()}, layer(x)
        layer.bfloat16()
        after = layer.experts.state_dict()
        assert {name: value.dtype for name, value in after.items()} == {n: v.dtype for n, v in before.items()}
        assert torch.equal(layer(x), plain)


def test_a_copied_layer_has_parameters_of_its_own_over_the_same_communicator() -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer = MoE({"num_experts": 4, **SIZES}, intermediate_size=16)
    mean = torch.optim.swa_utils.AveragedModel(layer)
    for other in (copy.deepcopy(layer), copy.deepcopy(copy.deepcopy(layer)), mean.module):
        assert other.ep is layer.ep
        assert torch.equal(other(x), layer(x))
        assert other.experts.down_proj is not layer.experts.down_proj
        other.close()
    with torch.no_grad():
        layer.experts.down_proj.zero_()
    assert mean(x).abs().max() > 0
    layer.close()
    with pytest.raises(moelink.ClosedError):
        mean(x)


def test_pickling_a_layer_says_what_to_save(tmp_path: Path) -> None:
    said = "^copy or pickle: .*got a Communicator, .*; use it as it is, or make it again in another process"
    with moelink.init(num_experts=4, **SIZES) as ep:
        layer = torch.nn.Sequential(MoE(ep, intermediate_size=16))
        for save in (pickle.dumps, lambda each: torch.save(each, tmp_path / "model.pt")):
            with pytest.raises(moelink.UnsupportedError, match=said):
                save(layer)
        with pytest.raises(moelink.UnsupportedError, match=said):
            copy.copy(ep)
        torch.save(layer.state_dict(), tmp_path / "model.pt")


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_a_copied_output_is_combined_as_the_first_one_is(transport: str) -> None:
    with moelink.init(num_experts=4, **SIZES, transport=transport) as ep:
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        ids = torch.tensor([[0, 1], [2, 3], [3, -1], [1, 0], [2, 0]], dtype=torch.int32)
        ids += 0  # so that torch counts a change before the dispatch
        recv = ep.dispatch(x, ids)
        other = copy.deepcopy(recv)
        assert torch.equal(ep.combine(recv.tokens, other), ep.combine(recv.tokens, recv))
        ids.fill_(0)
        assert torch.equal(ep.combine(recv.tokens, other)[2], x[2])
        for overwritten in (recv, copy.deepcopy(recv)):
            with pytest.raises(moelink.ArgumentError, match="topk_ids were overwritten since"):
                ep.combine(recv.tokens, overwritten)
