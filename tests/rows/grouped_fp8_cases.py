"""Inputs of the grouped fp8 product, and the bound that its results are held to. Shared by CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moelink.formats import get_format
from moelink.kernels.launch.row_launch import row_launcher
from moelink.nn.block_quantized import BlockQuantized, Weight, quantize_weight
from moelink.nn.mxfp4 import Mxfp4Weight
from moelink.reference.rounding import E2M1_VALUES

POISON = 7.0
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
TINY = {torch.bfloat16: 1e-30, torch.float16: 2.0**-24, torch.float32: 1e-30}
"""Where results are subnormal, steps do not shrink any more."""
FP32_SUMS = 2.0**-18
TENSOR_CORES = 2.0**-10
TENSOR_CORES_AT_WORST = 2.0**-6


@dataclass(frozen=True)
class Problem:
    """Rows and weights, quantised, with offsets. ``exact``: the weights' numbers [G, N, K], fp64; ``bias``: theirs,
    [G, N]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    weight: Weight
    exact: Tensor
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        return int(self.offsets[-1])


def problem(
    sizes: tuple[int, ...], room: int, inner: int, columns: int, device: str = "cpu", spread: int = 6,
    kind: str = "fp8",
) -> Problem:  # fmt: skip
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
    make = mxfp4_weights if kind == "mxfp4" else fp8_weights
    weight, exact = make(len(sizes), columns, inner, spread, generator, device)
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    return Problem(codes.to(device), scales.to(device), offsets.to(device), weight, exact)


def exact_problem(sizes: tuple[int, ...], room: int, inner: int, columns: int, device: str = "cpu") -> Problem:
    """Of small integers and scales that are powers of two: all sums are exact in fp32 and in tensor cores."""
    given, generator = problem(sizes, room, inner, columns, spread=2, kind="mxfp4"), torch.Generator().manual_seed(1)
    codes = torch.randint(-2, 3, given.codes.shape, generator=generator).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-2, 3, given.scales.shape, generator=generator)
    weight = Mxfp4Weight(given.weight.codes.to(device), given.weight.scales.to(device))
    return Problem(codes.to(device), scales.to(device), given.offsets.to(device), weight, given.exact.to(device))


def biased(given: Problem) -> Problem:
    """The same, in mxfp4, with biases that are small integers."""
    bias = torch.randint(-8, 9, given.exact.shape[:2], generator=torch.Generator().manual_seed(2))
    assert isinstance(given.weight, Mxfp4Weight)
    weight = given.weight.with_bias(bias.to(given.codes.device, torch.float32))
    return replace(given, weight=weight, bias=bias.to(given.codes.device, torch.float64))


def fp8_weights(
    groups: int, columns: int, inner: int, spread: int, generator: torch.Generator, device: str
) -> tuple[BlockQuantized, Tensor]:
    """Weights in fp8, and their numbers."""
    weight = torch.randn(groups, columns, inner, generator=generator)
    blocks = torch.randint(-spread, spread + 1, (groups, -(-columns // 128), inner // 128), generator=generator)
    weight *= 2.0 ** blocks.repeat_interleave(128, 1)[:, :columns].repeat_interleave(128, 2)
    of = quantize_weight(weight)
    moved = BlockQuantized(of.codes.to(device), of.scales.to(device))
    by_row = moved.scales.repeat_interleave(128, 1)[:, :columns]
    return moved, moved.codes.to(torch.float64) * by_row.to(torch.float64).repeat_interleave(128, 2)


def mxfp4_weights(
    groups: int, columns: int, inner: int, spread: int, generator: torch.Generator, device: str
) -> tuple[Mxfp4Weight, Tensor]:
    """Weights in mxfp4, and their numbers."""
    blocks = torch.randint(0, 256, (groups, columns, inner // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(127 - spread, 128 + spread, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    blocks, scales = blocks.to(device), scales.to(device)
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64, device=device)
    exact = (values[nibbles] * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2)
    return Mxfp4Weight.from_blocks(blocks, scales), exact


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
        weight = given.exact[group]
        exact = rows @ weight.t() + (0 if given.bias is None else given.bias[group])
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


def assert_the_counter_is_zero_again(fill: Callable[..., None], given: Problem, out: Tensor) -> None:
    """Whether products by ``fill(given, out)``, of other groups each, leave zeros in the stream's counter of tiles."""
    counter = row_launcher().tile_counters.of(out.device)
    for sizes in ((4, 260, 0, 64), (1, 0, 0, 0), (0, 0, 0, 0), (128, 100, 60, 40)):
        given.offsets.copy_(torch.tensor([0, *sizes]).cumsum(0))
        for num_programs in (1, 7, 131):
            for early in (False, True):
                out.fill_(POISON)
                fill(given, out, num_programs=num_programs, early=early)
                assert error_over_bound(out, given, TENSOR_CORES) <= 1
                assert not counter.any()
