"""Routers against a loop over tokens that does one thing after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import moelink
from moelink.nn import Router, RouterConfig, route

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")

EXPERTS, TOPK, TOKENS = 12, 3, 40

CONFIGS = {
    "softmax": RouterConfig(),
    "softmax unnormalised": RouterConfig(renormalize=False, scaling_factor=16.0),
    "groups by the best": RouterConfig(renormalize=False, num_groups=4, topk_groups=2),
    "sigmoid": RouterConfig(scoring="sigmoid"),
    "DeepSeek-V3": RouterConfig(
        scoring="sigmoid", correction_bias=True, num_groups=4, topk_groups=2, group_score="top2", scaling_factor=2.5
    ),
}


def choose(logits: list[float], config: RouterConfig, bias: list[float]) -> tuple[list[int], list[float]]:
    """Experts and weights of one token."""
    if config.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    else:
        scores = [math.exp(value) / sum(math.exp(other) for other in logits) for value in logits]
    compared = dict(enumerate(score + shift for score, shift in zip(scores, bias, strict=True)))
    size = len(logits) // config.num_groups
    groups = [
        sorted((compared[e] for e in range(g * size, (g + 1) * size)), reverse=True) for g in range(len(logits) // size)
    ]
    value = [group[0] + (group[1] if config.group_score == "top2" else 0) for group in groups]
    allowed = sorted(range(len(groups)), key=lambda g: -value[g])[: config.topk_groups]
    candidates = [expert for expert in compared if expert // size in allowed]
    ids = sorted(candidates, key=lambda expert: -compared[expert])[:TOPK]
    weights = [scores[expert] for expert in ids]
    total = sum(weights) if config.renormalize else 1.0
    return ids, [weight / total * config.scaling_factor for weight in weights]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula(name: str) -> None:
    config = CONFIGS[name]
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float64)
    bias = torch.randn(EXPERTS) if config.correction_bias else None
    got = route(logits, config, topk=TOPK, correction_bias=bias)
    shifts = [0.0] * EXPERTS if bias is None else bias.tolist()
    for token in range(TOKENS):
        ids, weights = choose(logits[token].tolist(), config, shifts)
        assert got.topk_ids[token].tolist() == ids
        assert got.topk_weights[token].tolist() == pytest.approx(weights, rel=1e-12)
    assert got.topk_ids.dtype == torch.int32


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    config = RouterConfig(scoring="sigmoid", correction_bias=True, renormalize=False)
    got = route(logits, config, topk=1, correction_bias=torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert got.topk_ids.tolist() == [[3]]
    torch.testing.assert_close(got.topk_weights, logits[:, 3:].sigmoid())


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_weights(name: str) -> None:
    config = CONFIGS[name]
    torch.manual_seed(1)
    logits = torch.randn(3, EXPERTS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(EXPERTS) if config.correction_bias else None
    assert torch.autograd.gradcheck(
        lambda values: route(values, config, topk=TOPK, correction_bias=bias).topk_weights, logits
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_module_computes_logits_in_fp32_at_least(dtype: torch.dtype) -> None:
    config = CONFIGS["DeepSeek-V3"]
    router = Router(16, EXPERTS, topk=TOPK, config=config, dtype=dtype)
    assert router.correction_bias is not None
    router.correction_bias.copy_(torch.arange(EXPERTS) / 8)
    x = torch.randn(5, 16, dtype=dtype)
    got = router(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = route(x.to(wide) @ router.weight.to(wide).T, config, topk=TOPK, correction_bias=router.correction_bias)
    assert got.topk_weights.dtype == wide
    assert torch.equal(got.topk_ids, want.topk_ids)
    torch.testing.assert_close(got.topk_weights, want.topk_weights)
    got.topk_weights.sum().backward()
    assert router.weight.grad is not None
    assert set(router.state_dict()) == {"weight", "correction_bias"}


def test_first_weights_follow_the_seed() -> None:
    def weight(seed: int) -> Tensor:
        return Router(16, EXPERTS, topk=TOPK, seed=seed).weight.detach()

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))
    assert float(weight(1).abs().max()) <= 0.25
    assert Router(16, EXPERTS, topk=TOPK, device="meta").weight.is_meta


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("scoring", {"scoring": "tanh"}),
        ("group_score", {"group_score": "mean"}),
        ("num_groups", {"num_groups": 0}),
        ("topk_groups", {"num_groups": 4, "topk_groups": 5}),
        ("num_groups", {"num_groups": 5}),
        ("topk", {"num_groups": 6}),
        ("num_groups", {"num_groups": 12, "topk_groups": 6, "group_score": "top2"}),
    ],
)
def test_what_cannot_be_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(moelink.ConfigError, match=f"^{field}: expected"):
        Router(16, EXPERTS, topk=TOPK, config=RouterConfig(**fields))


def test_a_bias_on_another_device_is_refused() -> None:
    """A kernel would read its address as one of the logits' device."""
    config, far = RouterConfig(correction_bias=True), torch.zeros(EXPERTS, device="meta")
    expected = "^correction_bias: expected a tensor on cpu, as the logits are, got one on meta"
    with pytest.raises(moelink.ArgumentError, match=expected):
        route(torch.randn(3, EXPERTS), config, topk=TOPK, correction_bias=far)
    router = Router(16, EXPERTS, topk=TOPK, config=config)
    router.correction_bias = far
    with pytest.raises(moelink.ArgumentError, match=expected):
        router(torch.randn(3, 16))


@pytest.mark.parametrize(("config", "bias", "message"), [
    (RouterConfig(), torch.zeros(6), "expected None, as config.correction_bias says, got Tensor"),
    (RouterConfig(correction_bias=True), None, "expected a tensor, as config.correction_bias says, got NoneType"),
    (RouterConfig(correction_bias=True), torch.zeros(5), r"expected shape \[6\], got \[5\]"),
    (RouterConfig(correction_bias=True), torch.zeros(3, 6), r"expected shape \[6\], got \[3, 6\]"),
])  # fmt: skip
def test_a_bias_fits_the_configuration(config: RouterConfig, bias: Tensor | None, message: str) -> None:
    with pytest.raises(moelink.ArgumentError, match=f"^correction_bias: {message}$"):
        route(torch.randn(3, 6), config, topk=1, correction_bias=bias)


@pytest.mark.parametrize("topk", [0, -1, 1.0, True])
def test_a_token_takes_one_expert_at_least(topk: Any) -> None:
    for make in (lambda: route(torch.randn(3, 6), RouterConfig(), topk=topk), lambda: Router(8, 6, topk=topk)):
        with pytest.raises(moelink.ConfigError, match="^topk: expected an integer >= 1, got"):
            make()


@pytest.mark.parametrize("field", [
    {"renormalize": "no"}, {"correction_bias": 1}, {"batch_invariant": None}, {"num_groups": 2.0},
    {"num_groups": 4, "topk_groups": 2.5}, {"num_groups": True},
], ids=str)  # fmt: skip
def test_a_field_of_another_type_is_named(field: dict[str, Any]) -> None:
    with pytest.raises(moelink.ConfigError, match=f"^{list(field)[-1]}: expected"):
        RouterConfig(**field)
