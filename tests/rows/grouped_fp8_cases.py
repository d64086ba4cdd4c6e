"""Inputs of the grouped fp8 product, and the bound that its results are held to. Shared by CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.formats import get_format
from moelink.nn.block_quantized import BlockQuantized, quantize_weight

POISON = 7.0
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
TINY = {torch.bfloat16: 1e-30, torch.float16: 2.0**-24, torch.float32: 1e-30}
"""Where results are subnormal, steps do not shrink any more."""
FP32_SUMS = 2.0**-18
TENSOR_CORES = 2.0**-10
TENSOR_CORES_AT_WORST = 2.0**-6


@dataclass(frozen=True)
class Problem:
    """Rows and weights, quantised, with offsets."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    weight: BlockQuantized

    @property
    def rows(self) -> int:
        return int(self.offsets[-1])


def problem(
    sizes: tuple[int, ...], room: int, inner: int, columns: int, device: str = "cpu", spread: int = 6
) -> Problem:
    """Groups of ``sizes`` rows and ``room`` rows more, whose codes and scales are NaN.

    Blocks differ by up to 2 ** (4 * ``spread``), so that a scale of a wrong block shows.
    """
    generator = torch.Generator().manual_seed(0)
    total = sum(sizes) + room
    shifts = torch.randint(-spread, spread + 1, (total, inner // 128), generator=generator)
    rows = torch.randn(total, inner, generator=generator) * 2.0 ** shifts.repeat_interleave(128, 1)
    quantized = get_format("fp8_block128").quantize(rows)
    assert quantized.scales is not None
    codes, scales = quantized.payload.clone(), quantized.scales.t().contiguous()
    codes.view(torch.uint8)[sum(sizes) :] = 0x7F
    scales[:, sum(sizes) :] = float("nan")
    weight = torch.randn(len(sizes), columns, inner, generator=generator)
    blocks = torch.randint(-spread, spread + 1, (len(sizes), -(-columns // 128), inner // 128), generator=generator)
    weight *= 2.0 ** blocks.repeat_interleave(128, 1)[:, :columns].repeat_interleave(128, 2)
    of = quantize_weight(weight)
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    moved = BlockQuantized(of.codes.to(device), of.scales.to(device))
    return Problem(codes.to(device), scales.to(device), offsets.to(device), moved)


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [n, K] and scales [n, K / 128] as fp64."""
    return codes.to(torch.float64) * scales.to(torch.float64).repeat_interleave(128, 1)


def error_over_bound(out: Tensor, given: Problem, sums: float) -> float:
    """The largest error of the rows that exist over what ``block_quantized`` allows: at most 1 if all is right."""
    offsets, worst = given.offsets.tolist(), 0.0
    for group, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if start == end:
            continue
        rows = numbers(given.codes[start:end], given.scales[:, start:end].t())
        columns = given.weight.codes.shape[1]
        by_row = given.weight.scales[group].repeat_interleave(128, 0)[:columns]
        weight = numbers(given.weight.codes[group], by_row)
        exact = rows @ weight.t()
        bound = HALF_STEP[out.dtype] * exact.abs() + sums * (rows.abs() @ weight.abs().t()) + TINY[out.dtype]
        error = (out[start:end].double() - exact).abs() / bound
        assert not error.isnan().any(), "rows that do not exist reached rows that do"
        worst = max(worst, float(error.max()))
    return worst


def assert_replays_follow_the_offsets(graph: torch.cuda.CUDAGraph, given: Problem, out: Tensor) -> None:
    """Whether a captured product of ``given`` into ``out`` multiplies the groups that offsets name at each replay."""
    for sizes in ((4, 260, 0, 64), (0, 0, 328, 0), (0, 0, 0, 0), (128, 100, 60, 40)):
        given.offsets.copy_(torch.tensor([0, *sizes]).cumsum(0))
        out.fill_(POISON)
        graph.replay()
        assert error_over_bound(out, given, TENSOR_CORES) <= 1
        assert (out[given.rows :] == POISON).all()
