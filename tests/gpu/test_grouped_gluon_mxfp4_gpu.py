"""The product of few rows and weights in mxfp4 in Gluon, on a device of compute capability 9.0: the bits of the Triton
kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moelink.rows import grouped_mxfp4
from moelink.rows.activation import silu_and_quantize
from moelink.rows.grouped_gluon_mxfp4 import FORMS, launch
from tests.rows.grouped_fp8_cases import (
    POISON,
    TENSOR_CORES,
    Problem,
    assert_replays_follow_the_offsets,
    assert_the_counter_is_zero_again,
    biased,
    error_over_bound,
    problem,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("tile_rows", FORMS),
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of compute capability 9.0"),
    pytest.mark.timeout(200),
]

SHAPES = {
    "a row of each group": ((1,) * 32, 0, 1152, 328),
    "one row": ((0, 1, 0), 3, 256, 256),
    "one block of K": ((36, 128), 5, 128, 256),
    "groups end inside tiles": ((4, 0, 260, 64, 68, 0, 129, 127), 1000, 384, 600),
    "one group has all": ((0, 0, 2500, 0), 4, 512, 512),
    "no rows": ((0, 0, 0), 40, 256, 256),
    "many groups": (tuple(37 * (i % 5) for i in range(130)), 0, 640, 200),
    "DeepSeek-V3": ((36, 0, 4, 16), 200, 7168, 4096),
    "its second product": ((30, 0, 128, 1), 0, 2048, 7168),
    "gpt_oss": ((36, 0, 12, 4), 200, 2944, 5888),
}


@cache
def shared_problem(name: str) -> Problem:
    """The problem of a shape, made once for all forms. Every other one has biases."""
    given = problem(*SHAPES[name], device="cuda", kind="mxfp4")
    return biased(given) if list(SHAPES).index(name) % 2 else given


def product(tile_rows: int, given: Problem, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.Tensor:
    out = torch.full((given.codes.shape[0], given.weight.shape[1]), POISON, dtype=dtype, device="cuda")
    launch(given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, out, tile_rows, **options)
    torch.cuda.synchronize()
    return out


def by_triton(given: Problem, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    out = torch.full((given.codes.shape[0], given.weight.shape[1]), POISON, dtype=dtype, device="cuda")
    grouped_mxfp4.launch(given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, out)
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_the_product_has_the_bits_of_the_triton_kernel(tile_rows: int, name: str) -> None:
    given = shared_problem(name)
    out = product(tile_rows, given)
    assert (out[given.rows :] == POISON).all(), "rows that do not exist are not written"
    assert error_over_bound(out, given, TENSOR_CORES) <= 1
    assert torch.equal(out, by_triton(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_outputs_of_all_dtypes(tile_rows: int, dtype: torch.dtype) -> None:
    given = biased(problem((4, 0, 70, 33), 40, 640, 328, device="cuda", spread=1, kind="mxfp4"))
    assert torch.equal(product(tile_rows, given, dtype=dtype), by_triton(given, dtype))


def test_random_groups(tile_rows: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(6):
        sizes = torch.randint(0, 90, (8,), generator=generator) * torch.randint(0, 2, (8,), generator=generator)
        given = problem(tuple(sizes.tolist()), 17, 384, 512, device="cuda", kind="mxfp4")
        assert torch.equal(product(tile_rows, given), by_triton(given))


@pytest.mark.parametrize("num_programs", [1, 7, 131])
def test_bits_do_not_depend_on_the_number_of_programs_or_the_run(tile_rows: int, num_programs: int) -> None:
    """Programs of many tiles reuse every stage; a race would show as other bits."""
    given = problem((60, 0, 200, 64, 29), 30, 640, 1536, device="cuda", kind="mxfp4")
    want = by_triton(given)
    for _ in range(20):
        assert torch.equal(product(tile_rows, given, num_programs=num_programs), want)


def test_a_captured_product_follows_the_offsets(tile_rows: int) -> None:
    given = problem((4, 260, 0, 64), 200, 384, 600, device="cuda", kind="mxfp4")
    out = product(tile_rows, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, out, tile_rows)
    assert_replays_follow_the_offsets(graph, given, out)


def test_the_counter_of_tiles_is_zero_again(tile_rows: int) -> None:
    """Also with more CTAs than tiles, of which there may be none."""
    given = problem((4, 260, 0, 64), 200, 384, 600, device="cuda", kind="mxfp4")

    def fill(given: Problem, out: torch.Tensor, **options: Any) -> None:
        weight = given.weight.codes, given.weight.scales
        launch(given.codes, given.scales, given.offsets, *weight, out, tile_rows, **options)

    assert_the_counter_is_zero_again(fill, given, product(tile_rows, given))


def test_an_early_product_follows_the_offsets_that_a_product_before_it_had(tile_rows: int) -> None:
    """Offsets change in front of each pair of products, in a graph; a load that is too early would see the last ones'
    groups."""
    sizes = (40, 0, 3, 90), (0, 70, 70, 1), (1, 1, 1, 130), (133, 0, 0, 0)
    up, down = (problem(sizes[0], 0, 256, n, device="cuda", kind="mxfp4") for n in (512, 384))
    between = torch.empty(133, 512, dtype=torch.bfloat16, device="cuda")
    each = [torch.tensor([0, *size]).cumsum(0).to("cuda", torch.int32) for size in sizes]
    offsets = each[0].clone()

    def fill(given: Problem, out: torch.Tensor, early: bool) -> None:
        weight = given.weight.codes, given.weight.scales
        launch(given.codes, given.scales, offsets, *weight, out, tile_rows, early=early)

    def chain(outs: list[torch.Tensor], early: bool) -> None:
        for those, out in zip(each, outs, strict=True):
            offsets.copy_(those)
            fill(up, between, early=False)
            inner = silu_and_quantize(between, offsets, format="fp8_block128")
            assert inner.scales is not None
            fill(replace(down, codes=inner.tokens, scales=inner.scales), out, early)

    def outputs() -> list[torch.Tensor]:
        return [torch.full((133, 384), POISON, dtype=torch.bfloat16, device="cuda") for _ in sizes]

    want, got = outputs(), outputs()
    chain(want, early=False)
    chain(got, early=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(got, early=True)
    for _ in range(50):
        for out in got:
            out.fill_(POISON)
        graph.replay()
        assert all(map(torch.equal, got, want))
