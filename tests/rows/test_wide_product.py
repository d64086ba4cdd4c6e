"""Logits of a router: bf16 numbers into fp32 sums, other numbers converted first."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from moelink.errors import ArgumentError
from moelink.kernels.launch.device import is_interpreted
from moelink.nn import Router
from moelink.rows import eager
from moelink.rows import wide_product as module
from moelink.rows.wide_product import wide_product
from moelink.rows.wide_product_kernel import BY_FMA, LARGE, SMALL, Tiles, launch, tiles_of
from moelink.tuning import FEW_LOGITS

interpreted = pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled here; GPU tests have the same")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def drawn(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    """Numbers of a dtype, with a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_wide_and_no_number_is_rounded_before(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = drawn(dtype, 0, 5, 24), drawn(weight_dtype, 1, 7, 24)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = wide_product(x, weight)
    assert got.dtype == wide
    exact = x.double() @ weight.double().t()
    narrowed = weight_dtype == torch.float64 and wide == torch.float32
    terms = x.double().abs() @ weight.double().abs().t()
    assert bool(((got - exact).abs() <= terms * (2.0**-22 if wide == torch.float32 or narrowed else 2.0**-50)).all())
    got.square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (dtype, weight_dtype)


def test_the_operators_gradient_is_that_of_converted_numbers() -> None:
    """On CPUs, where the operator converts too; and autocast around it changes nothing."""
    results = []
    for function in (torch.ops.moelink.wide_product, lambda x, w: torch.nn.functional.linear(x.float(), w.float())):
        x, weight = drawn(torch.bfloat16, 0, 5, 24), drawn(torch.bfloat16, 1, 7, 24)
        out = function(x, weight)
        grads = torch.autograd.grad(out.square().sum(), (x, weight))
        results.append((out, *grads))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2.0**-7 if got.dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    x, weight = drawn(torch.bfloat16, 0, 5, 24), drawn(torch.bfloat16, 1, 7, 24)
    loss = torch.ops.moelink.wide_product(x, weight).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.autograd.grad(loss, (x, weight))
    assert all(map(torch.equal, grads, results[0][1:]))


def test_the_operator_follows_the_rules_of_operators() -> None:
    args = drawn(torch.bfloat16, 0, 5, 24), drawn(torch.bfloat16, 1, 7, 24)
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.moelink.wide_product.default, args, test_utils=rules)


@interpreted
def test_the_example_of_the_kernel() -> None:
    x = torch.tensor([[1, 2], [3, 4]]).bfloat16()
    weight, out = torch.tensor([[1, 1], [1, 0], [0, 2]]).bfloat16(), torch.empty(2, 3)
    for tiles in (None, Tiles(rows=1, columns=2, parts=2, chunk=1, num_warps=1, num_stages=1)):
        launch(x, weight, out.fill_(9), tiles)
        assert out.tolist() == [[3, 1, 4], [7, 3, 8]]
    column = weight[:, 1].contiguous()[:, None]
    launch(x[:, 1].contiguous()[:, None], column, out)
    assert out.tolist() == [[2, 0, 4], [4, 0, 8]], "part 1"


@interpreted
@pytest.mark.parametrize(("rows", "inner"), [(1, 1536), (2, 2100), (5, 2100), (8, 24), (205, 520)])
def test_the_kernel_multiplies_few_rows_and_writes_no_others(rows: int, inner: int) -> None:
    """Steps of a sum and a part of one; fewer rows and columns than tiles have, and more."""
    x, weight = drawn(torch.bfloat16, 0, rows, inner).detach(), drawn(torch.bfloat16, 1, 35, inner).detach()
    out = torch.full((rows + LARGE.rows, 35), 5.0)
    launch(x, weight, out[:rows])
    exact, terms = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert bool(((out[:rows] - exact).abs() <= terms * 2.0**-22).all())
    assert (out[rows:] == 5).all()


@pytest.mark.parametrize(
    "rows, columns, tiles",
    [(1, 128, BY_FMA), (2, 8, BY_FMA), (3, 128, SMALL), (64, 128, SMALL), (65, 128, LARGE),
     (1024, 8, SMALL), (1025, 8, LARGE)],
)  # fmt: skip
def test_the_number_of_tiles_chooses_them(rows: int, columns: int, tiles: Tiles) -> None:
    assert tiles_of(rows, columns) == tiles


@pytest.mark.parametrize(
    "rows, columns, few",
    [(0, 24, False), (1, 24, True), (FEW_LOGITS, 24, True), (FEW_LOGITS + 1, 24, False),
     (36, 7168, True), (37, 7168, False)],
)  # fmt: skip
def test_which_logits_are_few(rows: int, columns: int, few: bool) -> None:
    assert module.has_few_logits(rows, torch.empty(256, columns, device="meta")) == few


def test_tiles_fit_into_the_shared_memory_of_all_gpus() -> None:
    """A stage less than the compiler is told, as the last is multiplied while another arrives."""
    for tiles in (SMALL, LARGE):
        stage = (tiles.rows + tiles.columns) * tiles.parts * tiles.chunk * 2
        assert stage <= 2**16, "AMD"
        assert stage * (tiles.num_stages - 1) <= 96 * 2**10
        assert tiles.num_warps <= tiles.parts, "warps without a part repeat the products of others"


@interpreted
def test_few_rows_take_the_kernel_with_gradients_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and the gradient of converted numbers; more rows take the library's product."""
    seen: list[int] = []
    monkeypatch.setattr(eager, "takes_kernels", lambda tensor: True)
    monkeypatch.setattr(eager, "repeated", lambda given, run, *rest: seen.append(len(given[0])) or run(*given)[0])
    for rows in (0, 1, FEW_LOGITS, FEW_LOGITS + 1):
        x, weight = drawn(torch.bfloat16, 0, rows, 24), drawn(torch.bfloat16, 1, 7, 24)
        out = wide_product(x, weight)
        with torch.no_grad():
            assert torch.equal(wide_product(x, weight), out)
        assert torch.equal(torch.ops.moelink.wide_product(x, weight), out)
        got = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
        wide = torch.nn.functional.linear(x.float(), weight.float())
        expected = torch.autograd.grad(wide, (x, weight), torch.ones_like(out))
        for mine, other in zip((out, *got), (wide, *expected), strict=True):
            torch.testing.assert_close(mine, other, rtol=2.0**-7 if mine.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert seen == [1] * 3 + [FEW_LOGITS] * 3
    with pytest.raises(ArgumentError, match="weight: expected a tensor on cpu, as x is, got"):
        wide_product(x[:1].detach(), weight.detach().to("meta"))


def test_where_torch_has_wide_sums() -> None:
    """NVIDIA from 8.0 on."""
    cuda = torch.device("cuda")
    assert not module.has_wide_sums(torch.device("cpu"))
    for capability, hip, has in (
        ((9, 0), None, True), ((8, 0), None, True), ((7, 5), None, False), ((9, 4), "6.4", False),
    ):  # fmt: skip
        with (
            mock.patch.object(torch.cuda, "get_device_capability", lambda device, found=capability: found),
            mock.patch.object(torch.version, "hip", hip),
        ):
            module.has_wide_sums.cache_clear()
            assert module.has_wide_sums(cuda) == has
    module.has_wide_sums.cache_clear()


def test_a_router_converts_no_weight_that_it_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's product gets bf16 rows and weights as they are; here a stand-in for it, since CPUs have none."""
    seen = []

    def mm(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        seen.append((x.dtype, weight.dtype, out_dtype))
        return x.float() @ weight.float()

    router, x = Router(24, 8, topk=2, dtype=torch.bfloat16), drawn(torch.bfloat16, 0, 5, 24)
    expected = router(x).logits
    monkeypatch.setattr(module, "has_wide_sums", lambda device: True)
    monkeypatch.setattr(torch, "mm", mm)
    assert torch.equal(torch.ops.moelink.wide_product(x, router.weight), expected)
    assert seen == [(torch.bfloat16, torch.bfloat16, torch.float32)]
