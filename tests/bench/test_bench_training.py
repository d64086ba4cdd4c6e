"""The benchmark of a training step: its truth, its gate, its memory and its rows."""

import dataclasses
from typing import Any

import pytest
import torch

from moelink.testing import run_ranks
from moelink_bench.exchange import Exchange
from moelink_bench.layer.data import fill_expert, make_input, make_router
from moelink_bench.layer.plan import SHAPES, LayerPlan, make_layer_plan
from moelink_bench.training import GRADIENT_TOLERANCE, living_bytes, merged, table, truth
from tests.bench.training_ranks import NAMES, broken_main, few_main

TINY, CPU = SHAPES["tiny"], torch.device("cpu")


def plan_of(ranks: int) -> LayerPlan:
    plan = make_layer_plan("layer", ranks=ranks, device="cpu", cases=["tiny"], tokens=[5], samples=2)
    return dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, calls=2))


def test_the_worked_example_of_memory() -> None:
    assert living_bytes(TINY, tokens=5, rows=7, groups=3) == {"activations": 5048, "gradients": 75264}


@pytest.mark.parametrize("model", ["tiny", "deepseek-v3"])
def test_the_truth_is_what_torch_differentiates(model: str) -> None:
    """One graph of dense products in fp64, in which every token goes through every expert."""
    shape = dataclasses.replace(
        SHAPES[model], hidden_size=128, num_experts=16, topk=4 if model == "tiny" else 8, intermediate_size=32
    )
    given = make_input(shape, 6, make_router(shape, seed=3, device=CPU), seed=1)
    grad = torch.randn(6, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = truth(given, grad, shape, fmt="bf16", seed=5)
    x = given.x.double().requires_grad_()
    router = given.router.weight.detach().double().requires_grad_()
    logits = x @ router.T
    scores = logits.exp() if shape.router.scoring == "softmax" else 1 / (1 + (-logits).exp())
    used = torch.zeros_like(scores).scatter(1, given.router(given.x).topk_ids.long(), 1.0)
    weights = scores * used / (scores * used).sum(1, keepdim=True) * shape.router.scaling_factor
    out = torch.zeros(6, 128, dtype=torch.float64)
    for expert in range(16):
        gate_up, down = torch.empty(64, 128).bfloat16(), torch.empty(128, 32).bfloat16()
        fill_expert(gate_up, down, seed=5, expert=expert)
        gate, up = (x @ gate_up.double().T).split(32, dim=1)
        out = out + (torch.nn.functional.silu(gate) * up) @ down.double().T * weights[:, expert, None]
    out.backward(grad.double())
    for got, want in ((found.out, out), (found.x, x.grad), (found.router, router.grad)):
        assert want is not None
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_an_exchange_moves_gradients_as_torch_does() -> None:
    """On one rank: those of an index, and of a weighted sum."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 0], [2, 1], [0, 2], [1, 2]])
    weights = torch.rand(4, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    exchange = Exchange(num_experts=3, topk=2, rank=0, world_size=1)
    arrived, _, home = exchange.dispatch(x, ids, weights)
    exchange.combine(arrived * 2, home).square().sum().backward()
    plain = x.detach().clone().requires_grad_()
    other = weights.detach().clone().requires_grad_()
    (2 * plain[:, None] * other[..., None]).sum(1).square().sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(x.grad, plain.grad)
    torch.testing.assert_close(weights.grad, other.grad)


@pytest.fixture(scope="module")
def reports() -> list[list[list[dict[str, Any]]]]:
    """What two ranks return."""
    return list(run_ranks(few_main, 2, plan_of(2), timeout=120))


def test_ranks_measure_steps_that_are_right(reports: list[list[list[dict[str, Any]]]]) -> None:
    assert reports[0] == reports[1], "every rank has the rows of all"
    rows = [merged(column) for column in zip(*reports[0], strict=True)]
    assert [row["contender"] for row in rows] == list(NAMES)
    for row in rows[:2]:
        assert row["reason"] == ""
        assert 0 < row["errors"]["x"] < GRADIENT_TOLERANCE
        assert row["us"].keys() == {"forward", "step"}
        assert row["memory"] is None, "a CPU has no such figure"
    assert rows[2]["reason"] == "runs on one rank only"
    assert table(["tiny"], rows).count("\n") == 3
    assert sum(each[0]["rows"] for each in reports[0]) == 2 * 5 * TINY.topk


def test_a_wrong_gradient_is_found_and_not_timed() -> None:
    (rows, _) = run_ranks(broken_main, 2, plan_of(2), timeout=120)
    (row,) = [merged(column) for column in zip(*rows, strict=True)]
    assert "rank 1: the gradient of x is wrong by" in row["reason"]
    assert not row["us"]


def test_memory_is_that_of_the_rank_with_most_over_what_must_be_alive() -> None:
    column = [
        {"case": 0, "contender": "a", "note": "", "reason": "", "errors": {"x": error}, "rows": rows,
         "us": {"step": [3.0, 5.0]}, "peak_bytes": peak, "living_bytes": {"activations": 10, "gradients": 30}}
        for error, rows, peak in ((0.1, 4, 60), (0.2, 5, 80))
    ]  # fmt: skip
    row = merged(column)
    assert row["memory"] == {"peak": 80, "rows": 5, "activations": 10, "gradients": 30, "over": 2.0}
    assert row["errors"] == {"x": 0.2}
    assert row["us"]["step"]["median"] == 4.0
