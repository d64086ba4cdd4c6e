"""MoE layers on GPUs: grouped products, and gradients. Run by hand: ``-m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from moelink.nn import experts
from moelink.nn.experts import grouped_experts, has_grouped_mm
from moelink.testing import run_ranks
from tests.gpu import moe_gpu_ranks
from tests.gpu.moe_gpu_ranks import WORLDS
from tests.nn import moe_layers
from tests.nn.moe_layers import Case, judge_rounded, judge_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

# Nine experts: enough for eight ranks, and for the three groups of the DeepSeek router.
TRAINED = [
    Case(shared="overlapped", router="deepseek", experts=9),
    Case("fp32", torch.float32, "fused", experts=9),
]
ROUNDED = [
    Case("bf16", torch.bfloat16, "overlapped", "deepseek", experts=9),
    Case("bf16", torch.bfloat16, "fused", experts=9),
    Case("fp8_block128", torch.bfloat16, "overlapped", experts=9),
    Case("nvfp4", torch.bfloat16, experts=9),
]


# --- grouped products -------------------------------------------------------------------------------------------------


def grouped(offsets: torch.Tensor, leaves: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = grouped_experts(leaves[0], offsets, *leaves[1:], activation=F.silu)
    out.backward(grad)
    rows = int(offsets[-1])
    return [out.detach()[:rows], leaves[0].grad[:rows], *(leaf.grad for leaf in leaves[1:])]


@pytest.mark.parametrize("sizes", [(16, 24), (512, 256), (7168, 2048)], ids=str)
@pytest.mark.parametrize("counts", [(5, 0, 130, 1, 0), (0, 0, 0, 0, 0), (64, 64, 64, 64, 64)], ids=str)
def test_the_grouped_product_equals_the_loop(
    counts: tuple[int, ...], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, inner = sizes
    device = torch.device("cuda")
    assert has_grouped_mm(device, torch.bfloat16) == (torch.cuda.get_device_capability()[0] in (9, 10))
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    total, surplus = sum(counts), 37
    offsets = torch.tensor([0, *counts], device=device).cumsum(0).int()
    rows, grad = random(total + surplus, hidden), random(total + surplus, hidden)
    rows[total:] = float("nan")
    grad[total:] = float("nan")
    weights = [random(5, 2 * inner, hidden) / hidden**0.5, random(5, hidden, inner) / inner**0.5]
    # Freed blocks of NaN, in which a gradient that is not written would be found.
    poison = [torch.full_like(weight, float("nan")) for weight in weights * 2]
    del poison
    got = grouped(offsets, [rows, *weights], grad)
    monkeypatch.setattr(experts, "_fits_grouped_mm", lambda rows, weight: False)
    loop = grouped(offsets, [rows, *weights], grad)
    exact = grouped(offsets, [tensor.double() for tensor in (rows, *weights)], grad.double())
    for a, b, want in zip(got, loop, exact, strict=True):
        largest = float(want.abs().max()) if want.numel() else 0.0
        for value in (a, b):
            error = float((value.double() - want).abs().max()) if want.numel() else 0.0
            assert error <= 16 * torch.finfo(torch.bfloat16).eps * largest
    for group, count in enumerate(counts):
        if not count:
            assert not any(bool(weight_grad[group].any()) for weight_grad in got[2:]), "no rows, zero gradients"


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_training_equals_one_process(world: int) -> None:
    cases: list[Any] = [*TRAINED, *ROUNDED]
    results = run_ranks(moe_gpu_ranks.train, world, cases, timeout=500)
    for index, case in enumerate(cases):
        judge = judge_training if case in TRAINED else judge_rounded
        judge(case, [result[index] for result in results])


def test_the_cpu_cases_are_of_the_same_kind() -> None:
    assert {case.combine_dtype for case in ROUNDED} == {torch.bfloat16}, "so that grouped products are used"
    assert moe_layers.TOKENS[1] == 0, "a rank without tokens takes part"
