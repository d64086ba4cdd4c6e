"""The fp8 products in Gluon, on a device of compute capability 9.0: the bound in fp64, and the Triton kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moelink.rows import grouped_fp8
from moelink.rows.activation import silu_and_quantize
from tests.rows.grouped_fp8_cases import (
    POISON,
    TENSOR_CORES,
    Problem,
    assert_replays_follow_the_offsets,
    assert_the_counter_is_zero_again,
    error_over_bound,
    problem,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of compute capability 9.0"),
    pytest.mark.timeout(200),
]

SHAPES = {
    "one full tile": ((128,), 0, 256, 256),
    "a row of each group": ((1,) * 32, 0, 1152, 328),
    "one row": ((0, 1, 0), 3, 256, 256),
    "one block of K": ((36, 128), 5, 128, 256),
    "groups end inside tiles": ((4, 0, 260, 64, 68, 0, 129, 127), 1000, 384, 600),
    "one group has all": ((0, 0, 2500, 0), 4, 512, 512),
    "no rows": ((0, 0, 0), 40, 256, 256),
    "many groups": (tuple(37 * (i % 5) for i in range(130)), 0, 640, 200),
    "many tiles of a CTA": ((700, 900, 0, 1300), 60, 256, 4096),
    "DeepSeek-V3": ((36, 0, 1024, 257), 200, 7168, 4096),
    "its second product": ((300, 0, 128, 1), 0, 2048, 7168),
}


TILE_ROWS = (None, 16, 32, 64)
"""Of the product of few rows; None stands for that of many."""


@pytest.fixture(params=TILE_ROWS, ids=["many", "few-16", "few-32", "few-64"])
def fill(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Fills the output of a problem."""

    def fill(given: Problem, out: torch.Tensor, **options: Any) -> None:
        from moelink.rows import grouped_gluon, grouped_gluon_few

        arguments = (given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, out)
        if request.param is None:
            grouped_gluon.launch(*arguments, **options)
        else:
            grouped_gluon_few.launch(*arguments, request.param, **options)

    return fill


@cache
def shared_problem(name: str) -> Problem:
    """The problem of a shape, made once for all kernels: it takes seconds."""
    return problem(*SHAPES[name], device="cuda")


def product(
    fill: Callable[..., None], given: Problem, *, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> torch.Tensor:
    out = torch.full((given.codes.shape[0], given.weight.codes.shape[1]), POISON, dtype=dtype, device="cuda")
    fill(given, out, **options)
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_the_product_keeps_the_bound(fill: Callable[..., None], name: str) -> None:
    given = shared_problem(name)
    out = product(fill, given)
    assert (out[given.rows :] == POISON).all(), "rows that do not exist are not written"
    assert error_over_bound(out, given, TENSOR_CORES) <= 1
    other = torch.full_like(out, POISON)
    grouped_fp8.launch(given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, other)
    assert (out.double() - other.double()).norm() <= 2.0**-8 * other.double().norm()


def test_an_output_in_fp32_keeps_the_bound(fill: Callable[..., None]) -> None:
    given = problem((4, 0, 70, 33), 40, 640, 328, device="cuda")
    out = product(fill, given, dtype=torch.float32)
    assert (out[given.rows :] == POISON).all()
    assert error_over_bound(out, given, TENSOR_CORES) <= 1


def test_random_groups_keep_the_bound(fill: Callable[..., None]) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(6):
        sizes = torch.randint(0, 400, (8,), generator=generator) * torch.randint(0, 2, (8,), generator=generator)
        given = problem(tuple(sizes.tolist()), 17, 384, 512, device="cuda")
        out = product(fill, given)
        assert (out[given.rows :] == POISON).all()
        assert error_over_bound(out, given, TENSOR_CORES) <= 1


@pytest.mark.parametrize("num_programs", [1, 7, 131])
def test_bits_do_not_depend_on_the_number_of_programs_or_the_run(fill: Callable[..., None], num_programs: int) -> None:
    """Programs of many tiles reuse every stage; a race would show as other bits."""
    given = problem((260, 0, 700, 64, 129), 30, 640, 1536, device="cuda")
    want = product(fill, given)
    for _ in range(20):
        assert torch.equal(product(fill, given, num_programs=num_programs), want)


def test_a_captured_product_follows_the_offsets(fill: Callable[..., None]) -> None:
    given = problem((4, 260, 0, 64), 200, 384, 600, device="cuda")
    out = product(fill, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(given, out)
    assert_replays_follow_the_offsets(graph, given, out)


def test_the_counter_of_tiles_is_zero_again(fill: Callable[..., None]) -> None:
    """Also with more CTAs than tiles, of which there may be none."""
    given = problem((4, 260, 0, 64), 200, 384, 600, device="cuda")
    assert_the_counter_is_zero_again(fill, given, product(fill, given))


def test_products_of_several_streams_and_graphs_run_at_once(fill: Callable[..., None]) -> None:
    """Each takes tiles by a counter of its own; one that two shared would leave tiles out. Graphs are captured on one
    stream."""
    given = problem((260, 0, 700, 64, 129), 30, 640, 1536, device="cuda")
    want = product(fill, given)
    streams, outs = [torch.cuda.Stream() for _ in range(4)], [torch.full_like(want, POISON) for _ in range(4)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph, out in zip(graphs, outs, strict=False):
        with torch.cuda.graph(graph):
            for _ in range(3):
                fill(given, out, num_programs=33)
    for _ in range(20):
        for number, (stream, out) in enumerate(zip(streams, outs, strict=True)):
            with torch.cuda.stream(stream):
                out.fill_(POISON)
                if number < 2:
                    graphs[number].replay()
                else:
                    for _ in range(3):
                        fill(given, out, num_programs=33)
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in outs)


def test_an_early_product_follows_the_offsets_that_a_product_before_it_had(fill: Callable[..., None]) -> None:
    """Offsets change in front of each pair of products, in a graph; a load that is too early would see the last ones'
    groups."""
    sizes = (40, 0, 3, 90), (0, 70, 70, 1), (1, 1, 1, 130), (133, 0, 0, 0)
    up, down = problem(sizes[0], 0, 256, 512, device="cuda"), problem(sizes[0], 0, 256, 384, device="cuda")
    between = torch.empty(133, 512, dtype=torch.bfloat16, device="cuda")
    each = [torch.tensor([0, *size]).cumsum(0).to("cuda", torch.int32) for size in sizes]
    offsets = each[0].clone()
    up = replace(up, offsets=offsets)

    def chain(outs: list[torch.Tensor], early: bool) -> None:
        for those, out in zip(each, outs, strict=True):
            offsets.copy_(those)
            fill(up, between)
            inner = silu_and_quantize(between, offsets, format="fp8_block128")
            assert inner.scales is not None
            fill(replace(down, codes=inner.tokens, scales=inner.scales, offsets=offsets), out, early=early)

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
