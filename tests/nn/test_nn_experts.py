"""Experts over grouped rows: the grouped product and the loop agree, with each other and with one matmul a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import moelink
from moelink.nn import experts
from moelink.nn.experts import grouped_experts, grouped_matmul
from moelink.rows.dequantize import dequantized
from moelink.testing import assert_bitwise_equal

OFFSETS = torch.tensor([0, 3, 3, 9, 10], dtype=torch.int32)
ROWS, HIDDEN, INTER = 13, 16, 8


def inputs(dtype: torch.dtype = torch.float32, hidden: int = HIDDEN, inter: int = INTER) -> list[Tensor]:
    """Rows (those that no group has are NaN), gate_up, down."""
    torch.manual_seed(0)
    rows = torch.randn(ROWS, hidden, dtype=torch.float64)
    rows[int(OFFSETS[-1]) :] = float("nan")
    weights = [torch.randn(4, 2 * inter, hidden, dtype=torch.float64) / 4, torch.randn(4, hidden, inter).double() / 4]
    return [tensor.to(dtype) for tensor in (rows, *weights)]


def plain(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Group by group."""
    offsets = OFFSETS.tolist()
    groups = []
    for g, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        gate, up = (rows[start:end] @ gate_up[g].T).chunk(2, dim=1)
        groups.append((F.silu(gate) * up) @ down[g].T)
    return torch.cat(groups)


def gradients(call: Any, leaves: list[Tensor]) -> list[Tensor]:
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = call(*leaves)[: OFFSETS[-1]]
    out.sum().backward()
    rows, *rest = (leaf.grad for leaf in leaves)
    return [out.detach(), rows[: OFFSETS[-1]], *rest]


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("loop", [False, True], ids=["grouped_mm", "loop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_results_and_gradients_are_those_of_single_experts(
    dtype: torch.dtype, loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    real = torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda *args, **kwargs: taken.append(1) or real(*args, **kwargs))
    if loop:
        monkeypatch.setattr(experts, "_fits_grouped_mm", lambda rows, weight: False)
    got = gradients(lambda *args: grouped_experts(args[0], OFFSETS, *args[1:], activation=F.silu), inputs(dtype))
    assert bool(taken) == (not loop and dtype == torch.bfloat16)
    want = gradients(plain, [leaf.to(dtype).double() for leaf in inputs(dtype)])
    for a, b in zip(got, want, strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(a.double(), b, rtol=0, atol=8 * eps * float(b.abs().max()))
    assert not got[2][1].any(), "a group without rows has zero gradients"


def test_gradients_of_groups_without_rows_are_zero_where_torch_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    run = lambda *args: grouped_experts(args[0], OFFSETS, *args[1:], activation=F.silu)  # noqa: E731
    want = gradients(run, inputs(torch.bfloat16))
    monkeypatch.setattr(experts, "_leaves_empty_groups", lambda device: True)
    weight = inputs(torch.bfloat16)[1].requires_grad_()
    experts._ZeroGradWithoutRows.apply(weight, OFFSETS).backward(torch.full_like(weight, float("nan")))
    assert weight.grad.isnan().all(dim=(1, 2)).tolist() == [True, False, True, True]
    assert not weight.grad[1].any()
    for a, b in zip(gradients(run, inputs(torch.bfloat16)), want, strict=True):
        assert torch.equal(a, b)


def test_odd_sizes_and_no_rows_take_the_loop() -> None:
    rows, gate_up, down = inputs(hidden=6, inter=5)
    got = grouped_experts(rows, OFFSETS, gate_up, down, activation=F.silu)
    torch.testing.assert_close(got[: OFFSETS[-1]], plain(rows, gate_up, down))
    none = grouped_experts(rows[:0], OFFSETS * 0, gate_up, down, activation=F.silu)
    assert none.shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_both_paths_compile_without_a_graph_break(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    run = lambda *args: grouped_experts(args[0], OFFSETS, *args[1:], activation=F.silu)  # noqa: E731
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled, inputs(dtype)), gradients(run, inputs(dtype)), strict=True):
        assert torch.equal(a, b)


def test_operators_keep_torchs_rules() -> None:
    rows, gate_up, _ = inputs(torch.float64)
    rows = rows.nan_to_num(1.0)
    arguments = (rows.requires_grad_(), OFFSETS, gate_up.requires_grad_())
    torch.library.opcheck(torch.ops.moelink.matmul_by_group.default, arguments)
    torch.library.opcheck(torch.ops.moelink.outer_by_group.default, (rows.detach(), rows.detach(), OFFSETS))
    small = [tensor[..., :3].detach().contiguous().requires_grad_() for tensor in (rows, gate_up)]
    assert torch.autograd.gradcheck(lambda a, b: grouped_matmul(a, OFFSETS, b), small)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gate_up", {"gate_up": torch.zeros(4, 3, HIDDEN)}),
        ("down", {"down": torch.zeros(4, HIDDEN, INTER + 1)}),
        ("tokens", {"tokens": torch.zeros(ROWS, HIDDEN + 1)}),
        ("tokens", {"tokens": torch.zeros(ROWS, HIDDEN, dtype=torch.float64)}),
        ("row_offsets", {"row_offsets": OFFSETS[:-1]}),
        ("row_offsets", {"row_offsets": OFFSETS.long()}),
        ("row_offsets", {"row_offsets": OFFSETS.to("meta")}),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: dict[str, Tensor]) -> None:
    rows, gate_up, down = inputs()
    arguments = {"tokens": rows, "row_offsets": OFFSETS, "gate_up": gate_up, "down": down, **change}
    with pytest.raises(moelink.ArgumentError, match=f"^{name}: expected"):
        grouped_experts(**arguments, activation=F.silu)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("name", moelink.format_names())
def test_rows_of_every_format_become_numbers(name: str) -> None:
    torch.manual_seed(1)
    x, ids = torch.randn(5, 128), torch.tensor([[0, 2], [1, 2], [2, 0], [-1, 1], [2, 1]])
    fmt, dtype = moelink.get_format(name), torch.float64 if name == "fp64" else torch.float32
    with moelink.init(
        num_experts=3, topk=2, hidden_size=128, max_tokens_per_rank=5, dispatch_format=name, combine_dtype=dtype
    ) as ep:
        recv = ep.dispatch(x, ids)
        got = dequantized(recv, ep.config)
    quantized = fmt.quantize(x)
    want = fmt.dequantize(quantized.payload, quantized.scales).to(dtype)
    present = recv.src_info[: recv.row_offsets[-1], 1]
    routed = present >= 0
    assert got.dtype == dtype
    assert int(routed.sum()) == 9
    assert torch.equal(got[: len(present)][routed], want[present[routed].long()])


@pytest.mark.parametrize("frozen", ["", "tokens", "gate_up", "down"])
def test_experts_in_one_function_have_the_bits_of_torchs_own(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = {"tokens": (9, 32), "gate_up": (3, 32, 32), "down": (3, 32, 16)}
    drawn = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    row_offsets, results = torch.tensor([0, 4, 4, 7], dtype=torch.int32), []
    for fits in (experts._fits_node, lambda *_: False):
        monkeypatch.setattr(experts, "_fits_node", fits)
        given = {name: value.clone().requires_grad_(name != frozen) for name, value in drawn.items()}
        tokens, *weights = given.values()
        out = grouped_experts(tokens, row_offsets, *weights, activation=torch.nn.functional.silu)
        assert ("_GroupedExperts" in type(out.grad_fn).__name__) == (not results)
        out.backward(torch.ones(1, 32).bfloat16().expand(9, 32))
        rows = None if tokens.grad is None else tokens.grad[:7]
        results.append([out.detach()[:7], rows, *[weight.grad for weight in weights]])
    for mine, want in zip(*results, strict=True):
        assert (mine is None) == (want is None)
        if mine is not None and want is not None:
            assert_bitwise_equal(mine, want, "gradient")
