"""Training while torch looks for NaN: rows that do not exist must not raise an alarm, and real NaN must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import moelink
from moelink.nn import MoE
from moelink.nn.experts import grouped_experts

SIZES = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 16, "device": "cpu"}
FORMATS = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "fp8_block128": torch.bfloat16,
}  # fmt: skip


@pytest.fixture
def _new_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def softplus(gate: Tensor) -> Tensor:
    """A function that moelink has no operator for."""
    return torch.nn.functional.softplus(gate)


@pytest.mark.usefixtures("_new_memory_is_nan")
@pytest.mark.parametrize("activation", [torch.nn.functional.silu, softplus], ids=["known", "other"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.quick("milliseconds, each takes another way home")
def test_rows_that_do_not_exist_raise_no_alarm(name: str, activation: object) -> None:
    with moelink.init(**SIZES, dispatch_format=name, combine_dtype=FORMATS[name], transport="collective") as ep:
        layer = MoE(ep, intermediate_size=128, activation=activation)
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(FORMATS[name])
        grads = []
        for check in (False, True):
            layer.zero_grad()
            tokens = x.clone().requires_grad_()
            with torch.autograd.set_detect_anomaly(check):
                layer(tokens, max_tokens=16).square().sum().backward()
            grads.append([tokens.grad, *(parameter.grad for parameter in layer.parameters())])
        for got, want in zip(*grads, strict=True):
            assert got is not None
            assert got.isfinite().all()
            assert torch.allclose(got, want, rtol=0.02, atol=1e-6), "looking changes no gradient"


@pytest.mark.usefixtures("_new_memory_is_nan")
def test_nor_do_those_of_experts_where_torch_looks_in_the_backward_alone() -> None:
    """torch's product reads the rows that exist of the gradient, and leaves the others of its result unwritten."""
    generator = torch.Generator().manual_seed(1)
    rows, gate_up, down = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((8, 16), (2, 32, 16), (2, 16, 16))
    )
    rows.requires_grad_()
    row_offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    out = grouped_experts(rows, row_offsets, gate_up, down, activation=torch.nn.functional.silu)
    with torch.autograd.set_detect_anomaly(True):
        out.backward(torch.where(torch.arange(8)[:, None] < 3, 1.0, torch.nan).bfloat16().expand(8, 16))
    assert rows.grad is not None
    assert rows.grad[:3].isfinite().all()
    assert not rows.grad[3:].any()


def test_a_gradient_that_is_nan_does() -> None:
    with moelink.init(**SIZES, dispatch_format="fp32", combine_dtype=torch.float32, transport="collective") as ep:
        layer = MoE(ep, intermediate_size=128)
        with torch.no_grad():
            layer.experts.down_proj[:] = float("nan")
        with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
            layer(torch.ones(3, 128, requires_grad=True), max_tokens=16).sum().backward()
