"""Gradients of combine's rows and conversions between dtypes: the kernel against its twin, the operators, a layer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import moelink
from moelink.kernels.launch.device import is_interpreted
from moelink.nn import MoE
from moelink.rows.scale_rows import cast_rows, row_gradients, slot_gradients, twin, zero_rows
from moelink.rows.scale_rows_kernel import launch

ROWS, SPARE = 11, 2
OFFSETS = [0, 3, 3, 8, ROWS]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
each_device = pytest.mark.parametrize("device", DEVICES)


def drawn(hidden: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients, rows, weights and offsets; NaN in the rows that do not exist."""
    generator = torch.Generator().manual_seed(hidden)
    d, y = torch.randn(2, ROWS + SPARE, hidden, generator=generator, dtype=torch.float64)
    weights = torch.rand(ROWS + SPARE, generator=generator, dtype=torch.float64)
    for tensor in (d, y, weights):
        tensor[ROWS:] = float("nan")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    return d.to(device, dtype), y.to(device, dtype), weights.to(device, wide), offsets


def skip_unless_kernels_run_on(device: str) -> None:
    if (device == "cpu") != is_interpreted():
        pytest.skip("a process either interprets kernels, on CPUs, or compiles them (TRITON_INTERPRET)")


def assert_dots(dots: Tensor, d: Tensor, y: Tensor) -> None:
    """``dots`` within the bound that the kernel's docstring states, against sums in fp64."""
    hidden = d.shape[1]
    columns = min(1024, 1 << (hidden - 1).bit_length())
    products = d.double() * y.double()
    eps = 2.0**-53 if dots.dtype == torch.float64 else 2.0**-24
    bound = (math.ceil(hidden / columns) + 32) * eps * products.abs().sum(1)
    reference = products.sum(1)
    if dots.dtype == torch.float64:  # the judge's own sum is not exact there
        bound = 2 * bound
    assert bool(((dots.double() - reference).abs() <= bound).all())


@pytest.mark.quick("each dtype is another compiled form")
@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_twin(dtype: torch.dtype, device: str) -> None:
    skip_unless_kernels_run_on(device)
    for hidden in (3, 64, 1500):
        d, y, weights, offsets = drawn(hidden, dtype, device)
        out, dots = torch.full_like(d, 7.0), torch.full_like(weights, 7.0)
        launch(d, offsets, weights=weights, other=y, out=out, dots=dots)
        rows, _ = twin(d[:ROWS], None, weights[:ROWS], dtype)
        assert torch.equal(out[:ROWS], rows)
        assert_dots(dots[:ROWS], d[:ROWS], y[:ROWS])
        assert bool((out[ROWS:] == 7).all()), "rows that do not exist are not written"
        assert bool((dots[ROWS:] == 7).all())


@each_device
def test_each_result_alone_and_no_rows(device: str) -> None:
    skip_unless_kernels_run_on(device)
    d, y, weights, offsets = drawn(8, torch.float32, device)
    out, dots, both = torch.full_like(d, 7.0), torch.full_like(weights, 7.0), torch.full_like(weights, 7.0)
    launch(d, offsets * 0, weights=weights, other=y, out=out, dots=dots)
    assert bool((out == 7).all())
    assert bool((dots == 7).all())
    launch(d, offsets, weights=weights, out=out)
    launch(d, offsets, other=y, dots=dots)
    launch(d, offsets, other=y, dots=both, out=torch.empty_like(d))
    assert torch.equal(out[:ROWS], d[:ROWS] * weights[:ROWS, None])
    torch.testing.assert_close(dots, both)  # of two compiled forms
    launch(d, offsets + 100, out=out)
    assert torch.equal(out.nan_to_num(5.0), d.nan_to_num(5.0)), "no more rows than there is room for"
    launch(d[:0], offsets, out=out[:0])


@pytest.mark.quick("each pair of dtypes is another compiled form")
@each_device
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_the_kernel_converts_as_torch_does(source: torch.dtype, device: str) -> None:
    skip_unless_kernels_run_on(device)
    d, _, _, offsets = drawn(48, torch.float64, device)
    d = (100 * d).to(source)
    for dtype in DTYPES:
        out = torch.full(d.shape, 7.0, dtype=dtype, device=device)
        launch(d, offsets, out=out)
        assert torch.equal(out[:ROWS], d[:ROWS].to(dtype)), dtype
        assert bool((out[ROWS:] == 7).all())
    one = d[:1].expand(d.shape)
    launch(one, offsets, out=out)
    assert torch.equal(out[:ROWS], one[:ROWS].to(out.dtype))


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled in this process; interpreted ones show this")
def test_the_example_of_the_kernel() -> None:
    d, y = torch.tensor([[1.0, 2], [4, -1], [9, 9]]), torch.tensor([[5.0, 1], [2, 3], [9, 9]])
    weights, offsets = torch.tensor([3.0, 2, 9]), torch.tensor([0, 1, 2], dtype=torch.int32)
    out, dots = torch.full((3, 2), 7.0), torch.full((3,), 7.0)
    launch(d, offsets, weights=weights, other=y, out=out, dots=dots)
    assert out.tolist() == [[3, 6], [8, -2], [7, 7]]
    assert dots.tolist() == [7, 5, 7]
    src_info = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 1]], dtype=torch.int32)
    out.fill_(7.0)
    launch(d, offsets, weights=weights, out=out, src_info=src_info, slot=1)
    assert out.tolist() == [[7, 7], [8, -2], [7, 7]]


@each_device
def test_slots_fill_every_row(device: str) -> None:
    d, y, _, offsets = drawn(6, torch.float32, device)
    slots = torch.tensor([0, 2, 1, -1, 0, 0, 1, 2, -1, 1, 2, 0, 1], dtype=torch.int32, device=device)
    src_info = torch.stack([slots, slots, slots], dim=1)
    expected = torch.where(slots[:, None] < 0, 0.0, torch.where(slots[:, None] == 1, y, d)).bfloat16()
    out = torch.full(d.shape, 7.0, dtype=torch.bfloat16, device=device)
    for slot in range(3):
        slot_gradients(out, y if slot == 1 else d, src_info, offsets, slot)
    assert torch.equal(out[:ROWS], expected[:ROWS])
    assert bool((out[ROWS:] == 7).all())
    if device == "cpu" and is_interpreted():
        by_kernel = torch.full_like(out, 7.0)
        for slot in range(3):
            launch(y if slot == 1 else d, offsets, out=by_kernel, src_info=src_info, slot=slot)
        assert torch.equal(by_kernel, out)


@each_device
def test_the_operators_compute_what_is_wanted(device: str) -> None:
    d, y, weights, offsets = drawn(6, torch.bfloat16, device)
    scaled, dots = twin(d[:ROWS], y[:ROWS], weights[:ROWS], torch.bfloat16)
    assert dots is not None
    for w in (weights, None):
        for wanted in (torch.bfloat16, torch.float32, None):
            for rows in (y, None):
                dy, dw = row_gradients(d, offsets, y=rows, weights=w, dtype=wanted)
                assert (dy is None) == (wanted is None)
                assert (dw is None) == (rows is None)
                if dy is not None:
                    expected = d[:ROWS].float() * (1 if w is None else w[:ROWS, None])
                    assert torch.equal(dy[:ROWS], expected.to(wanted))
                if dw is not None:
                    assert_dots(dw[:ROWS], d[:ROWS], y[:ROWS])
    assert row_gradients(d, offsets, y=y, weights=None, dtype=torch.bfloat16)[0] is d
    assert torch.equal(zero_rows(offsets, (ROWS + SPARE, 6), torch.bfloat16)[:ROWS], torch.zeros_like(scaled))


def test_the_operators_follow_the_rules_of_operators() -> None:
    d, y, weights, offsets = (t[:ROWS] for t in drawn(4, torch.float64, "cpu"))
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    src_info = torch.zeros(ROWS, 3, dtype=torch.int32)
    ops = torch.ops.moelink
    # Compiled they are in test_ops_compile.py, which costs this process seconds.
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    for operator, args in (
        (ops.row_gradients.default, (d, offsets, y, weights, torch.float32)),
        (ops.slot_gradients.default, (torch.zeros_like(d), d, src_info, offsets, 0)),
        (ops.cast_rows.default, (d.clone().requires_grad_(), offsets, torch.float32)),
    ):
        torch.library.opcheck(operator, args, test_utils=rules)


@each_device
def test_conversions_have_a_gradient(device: str) -> None:
    d, y, _, offsets = drawn(4, torch.float32, device)
    leaf = d.clone().requires_grad_()
    assert cast_rows(leaf, offsets, torch.float32) is leaf
    cast_rows(leaf, offsets, torch.bfloat16).backward(y.bfloat16())
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32
    assert torch.equal(leaf.grad[:ROWS], y[:ROWS].bfloat16().float())


def test_a_layer_does_not_read_what_lies_behind_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NaN in all memory that nobody wrote, of a layer whose experts have a dtype of their own."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    sizes = {"num_experts": 4, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 8, "dispatch_format": "fp32"}
    results = []
    with moelink.init(**sizes, combine_dtype=torch.bfloat16, device="cpu", transport="collective") as ep:
        layer = MoE(ep, intermediate_size=8, dtype=torch.float32)
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
        for poisoned in (False, True):
            torch.use_deterministic_algorithms(poisoned)
            try:
                leaf = x.clone().requires_grad_()
                layer.zero_grad()
                layer(leaf, max_tokens=8).square().sum().backward()
            finally:
                torch.use_deterministic_algorithms(False)
            results.append([leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    for clean, poisoned in zip(*results, strict=True):
        assert bool(clean.any())
        assert torch.equal(clean, poisoned)
