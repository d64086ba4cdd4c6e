"""The grouped fp8 product, compiled: within its bound in fp64, capturable, and its settings all right."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moelink
from moelink.nn import MoE, grouped_fp8
from moelink.rows.grouped_fp8 import Settings, Tiles, launch
from tests.rows.grouped_fp8_cases import (
    POISON,
    TENSOR_CORES,
    TENSOR_CORES_AT_WORST,
    assert_replays_follow_the_offsets,
    error_over_bound,
    problem,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

SHAPES = {
    "few rows": ((4, 0, 12, 32), 36, 512, 384),
    "one group has all": ((0, 0, 300, 0), 4, 256, 200),
    "few and many": ((4, 0, 260, 64, 68, 0), 1000, 384, 600),
    "no rows": ((0, 0, 0), 40, 256, 256),
    "many groups": (tuple(4 * (i % 5) for i in range(130)), 0, 128, 136),
    "DeepSeek-V3": ((36, 0, 128, 4), 200, 7168, 4096),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_keeps_the_bound(name: str, dtype: torch.dtype) -> None:
    given = problem(*SHAPES[name], device="cuda", spread=1 if dtype == torch.float16 else 6)
    out = torch.full((given.codes.shape[0], given.weight.codes.shape[1]), POISON, dtype=dtype, device="cuda")
    launch(given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, out)
    assert error_over_bound(out, given, TENSOR_CORES) <= 1
    assert (out[given.rows :] == POISON).all(), "rows that do not exist are not written"
    twin = grouped_fp8(given.codes, given.scales, given.offsets, given.weight, dtype=dtype, implementation="torch")
    assert error_over_bound(twin, given, TENSOR_CORES) <= 1


def test_terms_of_one_sign_keep_the_bound_at_worst() -> None:
    """Sums grow from one product to the next, which costs the tensor cores of compute capability 9.0 most bits."""
    given = problem((36, 0, 128), 0, 1024, 256, device="cuda", spread=0)
    codes = given.codes.view(torch.uint8).bitwise_and(0x7F).view(given.codes.dtype)
    positive = dataclasses.replace(given, codes=codes, exact=given.exact.abs())
    positive.weight.codes.view(torch.uint8).bitwise_and_(0x7F)
    out = grouped_fp8(positive.codes, positive.scales, positive.offsets, positive.weight, dtype=torch.float32)
    assert error_over_bound(out, positive, TENSOR_CORES_AT_WORST) <= 1


@pytest.mark.parametrize("descriptors", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("tiles", [
    Tiles(16, swapped=True, num_stages=5), Tiles(32, 64, swapped=True), Tiles(16, parts=2, swapped=True),
    Tiles(64, parts=2, swapped=True), Tiles(64), Tiles(128, num_warps=8), Tiles(128, 64, parts=2, num_warps=8, band=1),
    Tiles(128, parts=2, num_warps=8, num_stages=3, band=2),
], ids=str)  # fmt: skip
def test_all_forms_of_tiles_give_the_same_product(tiles: Tiles, descriptors: bool) -> None:
    given = problem((4, 0, 260, 64, 68, 0), 100, 384, 600, device="cuda")
    each = dataclasses.replace(tiles, descriptors=descriptors)
    out = torch.full((given.codes.shape[0], 600), POISON, dtype=torch.bfloat16, device="cuda")
    launch(given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, out,
           Settings(each, each, most_few=32))  # fmt: skip
    assert error_over_bound(out, given, TENSOR_CORES) <= 1
    assert (out[given.rows :] == POISON).all()


def test_a_captured_product_follows_the_offsets() -> None:
    """Nothing synchronises, and the same graph serves other groups."""
    given = problem((4, 260, 0, 64), 200, 384, 600, device="cuda")
    run = lambda: grouped_fp8(given.codes, given.scales, given.offsets, given.weight)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    assert_replays_follow_the_offsets(graph, given, out)


def test_a_captured_layer_replays_with_other_tokens() -> None:
    """Dispatch in fp8, both products and the activation, combine: what the twin makes of the same tokens, rounded."""
    sizes = {"num_experts": 8, "topk": 2, "hidden_size": 512, "max_tokens_per_rank": 256}
    with moelink.init(**sizes, dispatch_format="fp8_block128") as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=256, experts_backend="triton")
        twin = MoE(ep, intermediate_size=256, experts_backend="torch")
        x = torch.zeros(256, 512, dtype=torch.bfloat16, device="cuda")
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for seed in range(3):
            x.normal_(generator=torch.Generator("cuda").manual_seed(seed))
            graph.replay()
            want = twin(x)
            assert (out - want).norm() < 0.02 * want.norm()
        assert want.any()
