"""The product of fp8 rows and weights in mxfp4, compiled: its bits if sums are exact, else its bound."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moelink
from moelink.nn import MoE, Mxfp4Weight, grouped_fp8
from moelink.rows.grouped_fp8 import Settings, Tiles
from moelink.rows.grouped_mxfp4 import launch
from tests.rows.grouped_fp8_cases import (
    POISON,
    TENSOR_CORES,
    assert_replays_follow_the_offsets,
    biased,
    error_over_bound,
    exact_problem,
    problem,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

SHAPES = {
    "few rows": ((1, 0, 12, 17), 36, 512, 384),
    "one group has all": ((0, 0, 300, 0), 4, 256, 200),
    "few and many": ((4, 0, 260, 64, 68, 1), 1000, 384, 600),
    "no rows": ((0, 0, 0), 40, 256, 256),
    "many groups": (tuple(i % 5 for i in range(130)), 0, 128, 136),
    "DeepSeek-V3": ((36, 0, 128, 4), 200, 7168, 4096),
    "gpt_oss": ((36, 0, 128, 4), 200, 2944, 5888),
}
AT_WORST = 2.0**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_keeps_the_bound(name: str, bias: bool, dtype: torch.dtype) -> None:
    spread = 1 if bias or dtype == torch.float16 else 6
    given = problem(*SHAPES[name], device="cuda", spread=spread, kind="mxfp4")
    given = biased(given) if bias else given
    out = torch.full((given.codes.shape[0], given.exact.shape[1]), POISON, dtype=dtype, device="cuda")
    given.weight.launch(given.codes, given.scales, given.offsets, out)
    assert error_over_bound(out, given, TENSOR_CORES) <= 1
    assert (out[given.rows :] == POISON).all(), "rows that do not exist are not written"


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_exact_sums_have_the_bits_of_the_twin(bias: bool) -> None:
    given = exact_problem((1, 0, 12, 40), 12, 512, 200, device="cuda")
    given = biased(given) if bias else given
    arguments = given.codes, given.scales, given.offsets, given.weight
    out, twin = (grouped_fp8(*arguments, dtype=torch.float32, implementation=each) for each in ("triton", "torch"))
    assert torch.equal(out[: given.rows], twin[: given.rows])
    assert out[: given.rows].any()


def test_terms_of_one_sign_keep_the_bound_at_worst() -> None:
    given = problem((36, 0, 128), 0, 1024, 256, device="cuda", spread=0, kind="mxfp4")
    given.weight.codes.bitwise_and_(0x5F)  # bits 7 and 5 are signs
    positive = dataclasses.replace(
        given, codes=given.codes.view(torch.uint8).bitwise_and(0x7F).view(given.codes.dtype), exact=given.exact.abs()
    )
    out = grouped_fp8(positive.codes, positive.scales, positive.offsets, positive.weight, dtype=torch.float32)
    assert error_over_bound(out, positive, AT_WORST) <= 1


@pytest.mark.parametrize("tiles", [
    Tiles(16, num_stages=5), Tiles(16, 64, num_stages=5, programs=5), Tiles(16, 256, num_stages=3),
    Tiles(32, num_warps=8), Tiles(64, num_warps=8, band=2), Tiles(16, num_stages=3, registers=128, programs=4),
], ids=str)  # fmt: skip
def test_all_forms_of_tiles_give_the_same_product(tiles: Tiles) -> None:
    given = problem((4, 0, 260, 64, 65, 0), 100, 384, 600, device="cuda", kind="mxfp4")
    each = dataclasses.replace(tiles, swapped=True, descriptors=False)
    out = torch.full((given.codes.shape[0], 600), POISON, dtype=torch.bfloat16, device="cuda")
    weight = given.weight.codes, given.weight.scales
    launch(given.codes, given.scales, given.offsets, *weight, out, Settings(each, each, most_few=32))
    assert error_over_bound(out, given, TENSOR_CORES) <= 1
    assert (out[given.rows :] == POISON).all()


def test_a_captured_product_follows_the_offsets() -> None:
    given = problem((4, 260, 0, 64), 200, 384, 600, device="cuda", kind="mxfp4")
    run = lambda: grouped_fp8(given.codes, given.scales, given.offsets, given.weight)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    assert_replays_follow_the_offsets(graph, given, out)


def test_a_captured_layer_computes_what_the_cpu_does() -> None:
    """Dispatch in fp8, both products and the activation, combine."""
    sizes = {"num_experts": 8, "topk": 2, "hidden_size": 512, "max_tokens_per_rank": 256}
    with moelink.init(**sizes, dispatch_format="fp8_block128") as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=256, experts_backend="mxfp4")
        exact = MoE(ep, intermediate_size=256)
        experts = layer.experts
        exact.experts.gate_up_proj.copy_(Mxfp4Weight(experts.gate_up_proj, experts.gate_up_scales).dequantize())
        exact.experts.down_proj.copy_(Mxfp4Weight(experts.down_proj, experts.down_scales).dequantize())
        x = torch.zeros(256, 512, dtype=torch.bfloat16, device="cuda")
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for seed in range(3):
            x.normal_(generator=torch.Generator("cuda").manual_seed(seed))
            graph.replay()
            want = exact(x)
            assert (out - want).norm() < 0.05 * want.norm()
        assert want.any()
