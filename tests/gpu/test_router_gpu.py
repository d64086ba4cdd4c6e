"""Routers on a GPU: the kernel against its twin bit for bit, logits with fp32 sums, graphs, the compiler, gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moelink.nn import Router, RouterConfig, route
from moelink.rows.choose import choose, twin
from moelink.rows.wide_product import wide_product
from moelink.tuning import FEW_LOGITS
from tests.rows.choose_cases import LOGITS, Form, drawn, forms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEEPSEEK = RouterConfig(
    scoring="sigmoid", correction_bias=True, num_groups=8, topk_groups=4, group_score="top2", scaling_factor=2.5
)
MODELS = {"DeepSeek-V3": (7168, 256, 8, DEEPSEEK), "Qwen3": (2048, 128, 8, RouterConfig()),
          "Mixtral": (4096, 8, 2, RouterConfig())}  # fmt: skip
each_model = pytest.mark.parametrize("model", MODELS)


def assert_same_bits(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0].cpu(), expected[0].cpu())
    bits = [torch.where(w.isnan(), torch.nan, w).view(torch.int32).cpu() for w in (got[1], expected[1])]
    assert torch.equal(*bits)


@pytest.mark.parametrize("form", list(forms()), ids=str)
def test_the_kernel_is_the_twin_on_both_devices(form: Form) -> None:
    for logits in LOGITS:
        x, bias = drawn(form, logits)
        x_there, bias_there = x.cuda(), None if bias is None else bias.cuda()
        got = choose(x_there, bias_there, form.choice)
        assert_same_bits(got, twin(x, bias, form.choice))
        assert_same_bits(got, twin(x_there, bias_there, form.choice))


def router_of(model: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Router, int]:
    """A router of a model, its bias drawn; and its hidden size."""
    hidden, experts, topk, config = MODELS[model]
    router = Router(hidden, experts, topk=topk, config=config, dtype=dtype, device="cuda")
    if router.correction_bias is not None:
        router.correction_bias.normal_(std=0.1, generator=torch.Generator("cuda").manual_seed(1))
    return router, hidden


def tokens_of(hidden: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(tokens, hidden, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("tokens", [0, 1, 3, 4097, 20000])
@each_model
def test_any_number_of_tokens(model: str, tokens: int) -> None:
    _, experts, topk, config = MODELS[model]
    logits = tokens_of(experts, tokens, dtype=torch.float32)
    bias = tokens_of(experts, 1, seed=1, dtype=torch.float32)[0] if config.correction_bias else None
    got = route(logits, config, topk=topk, correction_bias=bias)
    expected = route(logits.cpu(), config, topk=topk, correction_bias=None if bias is None else bias.cpu())
    assert_same_bits((got.topk_ids, got.topk_weights), (expected.topk_ids, expected.topk_weights))


@pytest.mark.parametrize("tokens", [1, 2, 3, 9, 36, 40, 130, FEW_LOGITS, FEW_LOGITS + 1])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@each_model
def test_logits_have_wide_sums(model: str, weight_dtype: torch.dtype, tokens: int) -> None:
    """Rounded to bf16 they would be 2**-14 of the terms off."""
    router, hidden = router_of(model, weight_dtype)
    x = tokens_of(hidden, tokens)
    logits = router(x).logits.detach()
    assert logits.dtype == torch.float32
    exact = x.double() @ router.weight.detach().double().t()
    terms = x.double().abs() @ router.weight.detach().double().abs().t()
    assert float(((logits - exact).abs() / terms).max()) < 2.0**-18
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(router(x).logits, logits)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 36])
@each_model
def test_logits_of_few_tokens_are_one_kernel_whatever_the_call(model: str, tokens: int) -> None:
    """With gradients and without, by the operator, and captured; ids and weights are the twin's of these logits."""
    router, hidden = router_of(model)
    x = tokens_of(hidden, tokens)
    routing = router(x)
    bias = None if router.correction_bias is None else router.correction_bias.cpu()
    expected = route(routing.logits.detach().cpu(), router.config, topk=router.topk, correction_bias=bias)
    assert_same_bits((routing.topk_ids, routing.topk_weights.detach()), (expected.topk_ids, expected.topk_weights))
    assert torch.equal(torch.ops.moelink.wide_product(x, router.weight), routing.logits)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        first, again = router(x), router(x)
        with torch.cuda.graph(graph):
            captured = router(x)
        graph.replay()
        for other in (first, again, captured):
            assert torch.equal(other.logits, routing.logits)
            assert_same_bits((other.topk_ids, other.topk_weights), (expected.topk_ids, expected.topk_weights))
    kernels = kernels_of(router, x)
    assert len(kernels) == 2, kernels
    assert "choose_experts_kernel" in kernels[0]
    assert "wide_product_kernel" in kernels[1]


def test_gradients_are_those_of_fp64() -> None:
    for model in MODELS:
        router, hidden = router_of(model)
        x = tokens_of(hidden, 33).requires_grad_()
        got = router(x)
        d = tokens_of(got.topk_weights.shape[1], 33, seed=5, dtype=torch.float32)
        grads = torch.autograd.grad(got.topk_weights, (x, router.weight), d)
        wide, weight = x.detach().double().requires_grad_(), router.weight.detach().double().requires_grad_()
        bias = router.correction_bias
        expected = route(wide_product(wide, weight), router.config, topk=router.topk, correction_bias=bias)
        same = (got.topk_ids == expected.topk_ids).all(1)
        assert int(same.sum()) >= 32, "but for a near tie"
        exact = torch.autograd.grad(expected.topk_weights, (wide, weight), d.double())
        assert (grads[0][same] - exact[0][same]).norm() <= 2.0**-7 * exact[0][same].norm()
        if bool(same.all()):
            assert (grads[1] - exact[1]).norm() <= 2.0**-7 * exact[1].norm()


@each_model
def test_a_captured_router_follows_its_tokens(model: str) -> None:
    router, hidden = router_of(model)
    x = tokens_of(hidden, 7)
    with torch.no_grad():
        router(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = router(x)
        for seed in range(3):
            x.copy_(tokens_of(hidden, 7, seed))
            graph.replay()
            eager = router(x)
            for field in dataclasses.fields(eager):
                assert torch.equal(getattr(captured, field.name), getattr(eager, field.name)), field.name


# Inductor advises users of fp32 matrices and of softmax.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:\\s*Online softmax is disabled")
@each_model
def test_a_compiled_router_is_one_graph_with_its_gradient(model: str) -> None:
    router, hidden = router_of(model)
    x, results = tokens_of(hidden, 8).requires_grad_(), []
    for function in (router, torch.compile(router, fullgraph=True)):
        routing = function(x)
        grads = torch.autograd.grad(routing.topk_weights.square().sum(), (x, router.weight))
        results.append((routing.topk_ids, routing.topk_weights, *grads))
    assert torch.equal(results[0][0], results[1][0])
    for eager, compiled in zip(results[0][1:], results[1][1:], strict=True):
        assert (eager - compiled).norm() <= 2.0**-7 * eager.norm()


def kernels_of(router: Router, x: Tensor) -> list[str]:
    """The names of the kernels of a call without gradients, sorted."""
    with torch.no_grad():
        router(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            router(x)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(name for name in names if not name.startswith(("Mem", "Context", "Event", "Stream")))


def test_a_router_launches_two_kernels() -> None:
    """The product, for which the library may need one more to add parts up, and the choice. Nothing is converted."""
    router, hidden = router_of("DeepSeek-V3")
    kernels = kernels_of(router, tokens_of(hidden, FEW_LOGITS + 8))
    assert sum("choose_experts_kernel" in name for name in kernels) == 1, kernels
    assert len(kernels) <= 3, kernels
