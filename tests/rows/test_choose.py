"""The choice of experts: the kernel against its twin bit for bit, the twin against a loop, the operator, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moelink.kernels.launch.device import is_interpreted
from moelink.rows.choice import Choice
from moelink.rows.choose import choose, gradient, twin
from moelink.rows.choose_kernel import launch, launch_gradient
from tests.rows.choose_cases import LOGITS, Form, choose_one, drawn, forms
from tests.support.processes import run_compiled

interpreted = pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled here; GPU tests have the same")
each_form = pytest.mark.parametrize("form", list(forms()), ids=str)
SMALL = (12,)


def by_kernel(x: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """Ids and weights in buffers that were full of 7."""
    shape = len(x), choice.topk
    ids, weights = torch.full(shape, 7, dtype=torch.int32), torch.full(shape, 7.0)
    launch(x, bias, ids, weights, choice)
    return ids, weights


def assert_same_bits(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Of ids and weights; one NaN is like another."""
    assert torch.equal(got[0], expected[0])
    got_weights, weights = (torch.where(w.isnan(), torch.nan, w).view(torch.int32) for w in (got[1], expected[1]))
    assert torch.equal(got_weights, weights)


@pytest.mark.quick("each form is another kernel, in milliseconds")
@interpreted
@each_form
def test_the_kernel_is_the_twin(form: Form) -> None:
    for logits in LOGITS:
        x, bias = drawn(form, logits)
        assert_same_bits(by_kernel(x, bias, form.choice), twin(x, bias, form.choice))


@interpreted
def test_steps_of_several_tokens_and_none_left_over() -> None:
    choice = Choice(2, "softmax", True, 1, 1, "max", 1.0)
    for tokens in (0, 1, 127, 1100):
        x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(tokens))
        assert_same_bits(by_kernel(x, None, choice), twin(x, None, choice))


@interpreted
def test_the_example_of_the_kernel() -> None:
    x, bias = torch.zeros(1, 6), torch.tensor([0, 0.25, 0.5, 0.5, 0, 0.5])
    x[0, 2] = -torch.inf
    ids, weights = by_kernel(x, bias, Choice(2, "sigmoid", False, 2, 1, "top2", 4.0))
    assert ids.tolist() == [[3, 5]]
    assert weights.tolist() == [[2, 2]]


@pytest.mark.quick("each form is another formula, in milliseconds")
@each_form
def test_the_twin_is_a_loop_over_tokens(form: Form) -> None:
    x, bias = drawn(form, "normal")
    ids, weights = twin(x, bias, form.choice)
    shifts = [0.0] * form.experts if bias is None else bias.tolist()
    for token in range(len(x)):
        chosen, exact = choose_one(x[token].tolist(), shifts, form.choice)
        assert ids[token].tolist() == chosen
        distance = float(x[token].max() - x[token].min()) if form.choice.scoring == "softmax" else 0.0
        assert weights[token].tolist() == pytest.approx(exact, rel=(16 + 2 * distance) * 2.0**-24, abs=0)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("logits, chosen", [
    ([0.0, 1.0, 1.0, 1.0], [1, 2]),
    ([-0.0, 0.0, -1.0, 0.0], [0, 1]),
    ([1.0, torch.nan, 2.0, torch.nan], [1, 3]),
    ([torch.inf, torch.nan, 2.0, torch.inf], [1, 0]),
    ([-torch.inf] * 4, [0, 1]),
    ([80.0, 90.0, 70.0, 100.0], [3, 1]),
])  # fmt: skip
def test_of_equal_numbers_the_lower_id_comes_first(logits: list[float], chosen: list[int]) -> None:
    """And NaN before all numbers. Scores of the last case are all one, and yet its logits differ."""
    for scoring in ("softmax", "sigmoid"):
        assert twin(torch.tensor([logits]), None, Choice(2, scoring, True, 1, 1, "max", 1.0))[0].tolist() == [chosen]


def test_a_group_that_is_not_chosen_lends_no_expert() -> None:
    """Its experts have zeros or more, and come first; of the chosen group only one is above -inf."""
    bias = torch.tensor([0.0, 0.0, 9.0, -torch.inf])
    ids, _ = twin(torch.zeros(1, 4), bias, Choice(2, "sigmoid", True, 2, 1, "max", 1.0))
    assert ids.tolist() == [[2, 3]]
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.0, -torch.inf]])
    assert twin(logits, None, Choice(2, "softmax", True, 2, 1, "max", 1.0))[0].tolist() == [[2, 3]]


@pytest.mark.quick("each form has another gradient, in milliseconds")
@interpreted
@each_form
def test_the_gradients_kernel_is_the_twin(form: Form) -> None:
    x, bias = drawn(form, "normal", 17)
    ids, _ = twin(x, bias, form.choice)
    grad = torch.randn(len(x), form.choice.topk, generator=torch.Generator().manual_seed(form.experts))
    out = torch.full_like(x, 7.0)
    launch_gradient(grad, x, ids.int().contiguous(), out, form.choice)
    # The gradients of a row are differences of numbers as large as the largest of them.
    largest = float(grad.abs().max()) * form.choice.scaling_factor
    torch.testing.assert_close(out, gradient(grad, x, ids, form.choice), rtol=1e-5, atol=2.0**-20 * largest)


@interpreted
def test_the_gradients_example() -> None:
    out, ids = torch.empty(1, 4), torch.tensor([[3, 1]], dtype=torch.int32)
    choice = Choice(2, "sigmoid", False, 1, 1, "max", 4.0)
    launch_gradient(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 4), ids, out, choice)
    assert out.tolist() == [[0.0, 2.0, 0.0, 1.0]]


@pytest.mark.quick("each form has another gradient, in milliseconds")
@pytest.mark.parametrize("form", [form for form in forms() if form.experts in SMALL], ids=str)
def test_gradients(form: Form) -> None:
    x, bias = (None if t is None else t[:12].double() for t in drawn(form, "normal", 3))
    assert x is not None
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: choose(logits, bias, form.choice)[1], x)
    ids, weights = choose(x, bias, form.choice)
    assert not ids.requires_grad
    weights.sum().backward()
    narrow = gradient(torch.ones(3, form.choice.topk), x.detach().float(), ids, form.choice)
    torch.testing.assert_close(narrow.double(), x.grad, rtol=1e-4, atol=1e-6)


def test_the_operator_follows_the_rules_of_operators() -> None:
    """All but what needs outputs that can be added: ids are integers."""
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    for scoring, renormalize in (("softmax", True), ("sigmoid", False)):
        x, bias = torch.randn(5, 12, requires_grad=True), torch.randn(12)
        choice = Choice(3, scoring, renormalize, 4, 2, "top2", 2.5)
        torch.library.opcheck(torch.ops.moelink.choose_experts.default, (x, bias, *choice), test_utils=rules)


def test_it_is_one_graph_with_its_gradient() -> None:
    x, choice = torch.randn(5, 12, requires_grad=True), Choice(3, "softmax", False, 4, 2, "top2", 2.5)

    def loss(logits: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = choose(logits, None, choice)
        return weights.square().sum(), ids

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        value, ids = function(x)
        (grad,) = torch.autograd.grad(value, x)
        results.append((value, ids, grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_the_kernel_compiles_without_a_gpu(target: str) -> None:
    """No spills, wide loads, and on NVIDIA one instruction for a reduction over a warp."""
    done = run_compiled("tests.rows.choose_aot", target)
    assert done.returncode == 0, done.stderr[-3000:]
