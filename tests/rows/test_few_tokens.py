"""The route of few tokens as one function on rows: the bits of its two parts, and the calls that must not take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

from moelink.kernels.launch.device import is_interpreted
from moelink.nn import Router, RouterConfig
from moelink.rows import eager, few_tokens
from moelink.testing import assert_bitwise_equal
from moelink.tuning import FEW_LOGITS

CONFIGS = (
    RouterConfig(),
    RouterConfig(
        scoring="sigmoid", correction_bias=True, num_groups=4, topk_groups=2, group_score="top2", scaling_factor=2.5
    ),
)


class Own(Tensor):
    """A tensor of a subclass."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Functions on rows of a device that is played, by name."""
    seen: list[str] = []

    def repeated(given: tuple[Tensor, ...], function: Any, *rest: Any) -> tuple[Tensor, ...]:
        seen.append(function.__module__.rpartition(".")[2])
        return function(*given, *rest)[0]  # type: ignore[no-any-return]

    monkeypatch.setattr(eager, "takes_kernels", lambda tensor: True)
    monkeypatch.setattr(eager, "repeated", repeated)
    return seen


def router_of(config: RouterConfig) -> Router:
    router = Router(24, 8, topk=3, config=config, dtype=torch.bfloat16)
    if router.correction_bias is not None:
        router.correction_bias.copy_(torch.linspace(-1, 1, 8))
    return router


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled here; GPU tests have the same")
@pytest.mark.parametrize("config", CONFIGS, ids=("softmax", "groups"))
@pytest.mark.parametrize("rows", [1, FEW_LOGITS])
def test_one_call_has_the_bits_of_two(config: RouterConfig, rows: int, calls: list[str]) -> None:
    """A call with gradients makes the two."""
    router = router_of(config)
    x = torch.randn(24, rows, generator=torch.Generator().manual_seed(0)).bfloat16().t()
    two = router(x)
    with torch.no_grad():
        one = router(x)
    assert calls == ["wide_product", "choose", "few_tokens"]
    for name in ("topk_ids", "topk_weights", "logits"):
        assert_bitwise_equal(getattr(one, name), getattr(two, name).detach(), name)


def test_which_calls_are_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = torch.zeros(8, 24).bfloat16(), torch.zeros(8)
    few = torch.zeros(FEW_LOGITS, 24).bfloat16()
    assert not few_tokens.are_few(few, weight, bias), "no kernels on CPUs"
    monkeypatch.setattr(eager, "takes_kernels", lambda tensor: True)
    assert few_tokens.are_few(few, weight, bias)
    assert few_tokens.are_few(few, weight, None)
    for x, by, offset in (
        (few[:0], weight, bias),
        (torch.zeros(FEW_LOGITS + 1, 24).bfloat16(), weight, bias),
        (few.float(), weight, bias),
        (few, weight.float(), bias),
        (few, weight, bias.double()),
    ):
        assert not few_tokens.are_few(x, by, offset)
    learns = weight.clone().requires_grad_()
    assert not few_tokens.are_few(few, learns, bias)
    assert not few_tokens.are_few(few.clone().requires_grad_(), weight, bias)
    with torch.no_grad():
        assert few_tokens.are_few(few, learns, bias)
    assert not few_tokens.are_few(few, weight.as_subclass(Own), bias), "which must see an operator"
    assert not few_tokens.are_few(few, weight, bias.as_subclass(Own))
    with FlopCounterMode(display=False):
        assert not few_tokens.are_few(few, weight, bias)


def test_a_tracer_takes_the_other_way_and_sees_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So one program serves few tokens and many."""
    monkeypatch.setattr(eager, "takes_kernels", lambda tensor: True)
    weight, counter = torch.zeros(8, 24).bfloat16(), CompileCounter()

    def routed(x: Tensor) -> Tensor:
        return x + 1 if few_tokens.are_few(x, weight, None) else x * 2

    compiled = torch.compile(routed, backend=counter, dynamic=True)
    for rows in (FEW_LOGITS - 2, FEW_LOGITS + 2):
        x = torch.ones(rows, 24).bfloat16()
        assert torch.equal(compiled(x), x * 2)
    assert counter.frame_count == 1
