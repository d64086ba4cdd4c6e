"""The gated activation of experts: its formulas, its operator, and its kernels against the twin in torch."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moelink.activation import Clamp
from moelink.errors import ArgumentError
from moelink.kernels.launch.device import is_interpreted
from moelink.rows.gated import GatedActivation, Kind, gated_activation, gradient_twin, known_activation, twin
from moelink.rows.gated_kernel import launch
from tests.support.processes import run_compiled

KINDS = (
    GatedActivation("silu"),
    GatedActivation("gelu"),
    GatedActivation("gelu_tanh"),
    GatedActivation("clamped", 1.7, 2.5),
)
BY_TORCH = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped": lambda gate, up: (
        gate.clamp(max=2.5) * torch.sigmoid(1.7 * gate.clamp(max=2.5)) * (up.clamp(-2.5, 2.5) + 1)
    ),
}
OFFSETS = [0, 3, 3, 8, 11]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
each_kind = pytest.mark.parametrize("known", KINDS, ids=lambda known: known.kind)


def drawn(rows: int, inner: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Rows [gate | up], a gradient, and offsets of which the last leaves two rows of capacity."""
    generator = torch.Generator().manual_seed(inner)
    gate_up = 3 * torch.randn(rows, 2 * inner, generator=generator, dtype=torch.float64)
    grad = torch.randn(rows, inner, generator=generator, dtype=torch.float64)
    gate_up[rows - 2 :] = float("nan")
    grad[rows - 2 :] = float("nan")
    return gate_up.to(device, dtype), grad.to(device, dtype), torch.tensor(OFFSETS, dtype=torch.int32, device=device)


@pytest.mark.quick("milliseconds each")
@each_kind
def test_the_twin_and_its_gradient_are_those_of_torch(known: GatedActivation) -> None:
    gate_up, grad, _ = drawn(13, 6, torch.float64)
    leaf = gate_up[:11].requires_grad_()
    expected = BY_TORCH[known.kind](*leaf.chunk(2, dim=1))
    (gradient,) = torch.autograd.grad(expected, leaf, grad[:11])
    torch.testing.assert_close(twin(leaf.detach(), known), expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient_twin(grad[:11], leaf.detach(), known), gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.quick("each kind and dtype is another compiled form")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@each_kind
def test_kernels_are_the_twin(known: GatedActivation, dtype: torch.dtype, device: str) -> None:
    if (device == "cpu") != is_interpreted():
        pytest.skip("a process either interprets kernels, on CPUs, or compiles them (TRITON_INTERPRET)")
    for inner in (6, 48, 256):
        gate_up, grad, offsets = drawn(13, inner, dtype, device)
        out, dgate_up = torch.full((13, inner), 7.0, dtype=dtype, device=device), torch.full_like(gate_up, 7.0)
        launch(gate_up, offsets, out, known.kind, known.alpha, known.limit)
        launch(gate_up, offsets, dgate_up, known.kind, known.alpha, known.limit, grad=grad)
        bounds = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 4e-6, torch.float64: 1e-11}
        bound = {"rtol": bounds[dtype], "atol": bounds[dtype]}
        torch.testing.assert_close(out[:11], twin(gate_up[:11], known), **bound)
        torch.testing.assert_close(dgate_up[:11], gradient_twin(grad[:11], gate_up[:11], known), **bound)
        assert bool((out[11:] == 7).all()), "rows that do not exist are not written"
        assert bool((dgate_up[11:] == 7).all())


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled in this process; interpreted ones show this")
def test_the_example_of_the_kernels() -> None:
    gate_up = torch.tensor([[0.0, 32, 4, 2], [32, 0, 1, 6], [9, 9, 9, 9]])
    z, offsets = torch.tensor([[1.0, 1], [3, 1], [9, 9]]), torch.tensor([0, 1, 2], dtype=torch.int32)
    out, dgate_up = torch.zeros(3, 2), torch.zeros(3, 4)
    launch(gate_up, offsets, out, "silu", 1.0, 1.0)
    launch(gate_up, offsets, dgate_up, "silu", 1.0, 1.0, grad=z)
    assert out.tolist() == [[0, 64], [32, 0], [0, 0]]
    assert dgate_up.tolist() == [[2, 2, 0, 32], [3, 3, 96, 0], [0, 0, 0, 0]]


@each_kind
def test_the_operator_follows_the_rules_of_operators(known: GatedActivation) -> None:
    gate_up, _, offsets = drawn(11, 4, torch.float64)
    args = (gate_up[:11].nan_to_num(1.0).requires_grad_(), offsets, known.kind, known.alpha, known.limit)
    torch.library.opcheck(torch.ops.moelink.gated_activation.default, args)


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_rows_that_exist_are_computed(device: str) -> None:
    gate_up, grad, offsets = drawn(13, 4, torch.float32, device)
    leaf = gate_up.requires_grad_()
    out = gated_activation(leaf, offsets, F.silu)
    out.backward(grad)
    assert leaf.grad is not None
    assert bool(out[:11].isfinite().all())
    assert bool(leaf.grad[:11].isfinite().all())
    none = gated_activation(gate_up.detach(), offsets * 0, F.silu)
    assert none.shape == (13, 4)
    assert gated_activation(gate_up.detach()[:0], offsets * 0, F.silu).shape == (0, 4)


def test_any_other_function_takes_the_slow_path() -> None:
    gate_up, _, offsets = drawn(11, 4, torch.float32)
    gate, up = gate_up.chunk(2, dim=1)
    assert torch.equal(gated_activation(gate_up, offsets, torch.tanh)[:9], (torch.tanh(gate) * up)[:9])


class NewGELU(torch.nn.GELU):
    """A class of one's own, which may compute anything that its base does by name only."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class Swish(torch.nn.SiLU):
    """Likewise."""


def _named(value: object) -> str:
    """Name a case without the address in memory that ``str`` prints, which differs between pytest's workers."""
    return str(getattr(value, "__name__", None) or value).split(" at 0x")[0].split(" of type")[0]


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("activation", "kind"),
    [
        (F.silu, "silu"),
        (torch.nn.SiLU(), "silu"),
        (F.gelu, "gelu"),
        (torch.nn.GELU(), "gelu"),
        (torch.nn.GELU("tanh"), "gelu_tanh"),
        (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh"),
        (functools.partial(F.gelu), "gelu"),
        (Clamp(), "clamped"),
        (torch.relu, None),
        (torch.sigmoid, None),
        (lambda x: F.silu(x), None),
        (NewGELU(), None),
        (Swish(), None),
        (functools.partial(F.leaky_relu, negative_slope=0.1), None),
    ],
    ids=_named,
)
def test_known_activations(activation: object, kind: Kind | None) -> None:
    known = known_activation(activation)  # type: ignore[arg-type]
    assert (None if known is None else known.kind) == kind


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kind: expected one of silu, gelu, gelu_tanh, clamped, got 'relu'"):
        GatedActivation("relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_kernels_of_rows_compile_without_a_gpu(target: str) -> None:
    """The gated activation, its gradient, dequantisation, gradients of combine, conversions: no spills, wide words."""
    done = run_compiled("tests.rows.row_kernels", target)
    assert done.returncode == 0, done.stderr[-3000:]
