"""Weights in mxfp4: their layout, their numbers, the product by kernel and twin, and the layer that has them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import moelink
from moelink.activation import Clamp
from moelink.formats import get_format
from moelink.nn import MoE, Mxfp4Weight, QuantizedExperts, dequantize_weight, grouped_fp8, quantize_mxfp4
from moelink.nn.placement import Placement
from moelink.reference.rounding import E2M1_VALUES, nearest_code
from moelink.rows.grouped_fp8 import Settings
from moelink.rows.grouped_mxfp4 import INTERPRETED, launch
from moelink_bench import mxfp4 as bench
from tests.kernels.test_kernels_aot import SPILLED, output_of
from tests.rows.grouped_fp8_cases import FP32_SUMS, POISON, biased, error_over_bound, exact_problem, problem

SIZES = {"num_experts": 4, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 8, "dispatch_format": "fp8_block128"}
BF16 = torch.bfloat16


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [128, 384])
def test_every_code_comes_back(inner: int) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 24, inner // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    weight = Mxfp4Weight.from_blocks(blocks, scales.view(torch.float8_e8m0fnu))
    assert weight.shape == (2, 24, inner)
    assert [torch.equal(*pair) for pair in zip(weight.to_blocks(), (blocks, scales), strict=True)] == [True, True]
    one = Mxfp4Weight.from_blocks(blocks[1], scales[1])
    assert torch.equal(one.codes, weight.codes[1]), "leading dimensions are optional"
    # The tensor begins one byte after an aligned address.
    apart = torch.cat((scales.new_zeros(1), scales.flatten()))[1:].view_as(scales)
    assert torch.equal(Mxfp4Weight.from_blocks(blocks, apart).scales, weight.scales)


def test_a_byte_has_two_elements_that_are_32_columns_apart() -> None:
    """As the table of ``rows.grouped_mxfp4`` says."""
    blocks, scales = torch.zeros(1, 2, 4, 16, dtype=torch.uint8), torch.full((1, 2, 4), 127, dtype=torch.uint8)
    blocks[0, 1, 2, 1], blocks[0, 1, 3, 1], scales[0, 1, 2] = 0x20, 0x90, 130  # columns 64 + 3 and 96 + 3: 1 and -0.5
    weight = Mxfp4Weight.from_blocks(blocks, scales)
    assert weight.codes.shape == (1, 2, 2, 32)
    assert weight.codes.nonzero().tolist() == [[0, 1, 1, 3]]
    assert weight.codes[0, 1, 1, 3] == 0b11000010
    assert weight.scales.tolist() == [[[0x7F7F7F7F, 0x7F827F7F]]]
    assert dequantize_weight(weight)[0, 1, [67, 99]].tolist() == [8.0, -0.5]


def test_weights_are_quantised_as_the_specification_says() -> None:
    weight = torch.randn(3, 40, 128, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 40)[:, None]
    weight[0, 0, :32], weight[0, 0, 32], weight[0, 0, 64] = 0.0, float("inf"), float("nan")
    blocks, scales = quantize_mxfp4(weight).to_blocks()
    assert scales[0, 0].tolist() == [0, 252, 255, 127 + int(weight[0, 0, 96:].abs().max().log2().floor()) - 2]
    assert not blocks[0, 0, 0].any()
    groups = weight[1:].double().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    assert torch.equal(scales[1:].double() - 127, exponents)
    quotients = groups / 2.0 ** exponents[..., None]
    codes = nearest_code(quotients, E2M1_VALUES) + 8 * torch.signbit(quotients)
    assert torch.equal(blocks[1:], (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8))


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    "weight", [torch.zeros(128), torch.zeros(4, 96), torch.zeros(0, 128), torch.zeros(4, 128).int()], ids=str
)
def test_weights_that_cannot_be_quantised(weight: torch.Tensor) -> None:
    with pytest.raises(moelink.ArgumentError, match=r"^weight: expected floating point \[\.\.\., N, K\]"):
        quantize_mxfp4(weight)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(("name", "blocks", "scales"), [
    ("blocks", torch.zeros(2, 4, 16), torch.zeros(2, 4, dtype=torch.uint8)),
    ("blocks", torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)),
    ("blocks", torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)),
    ("scales", torch.zeros(2, 4, 16, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8)),
    ("scales", torch.zeros(2, 4, 16, dtype=torch.uint8), torch.zeros(2, 4)),
], ids=str)  # fmt: skip
def test_blocks_that_do_not_fit(name: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    with pytest.raises(moelink.ArgumentError, match=f"^{name}: expected uint8"):
        Mxfp4Weight.from_blocks(blocks, scales)


# --- the product ------------------------------------------------------------------------------------------------------

SHAPES = [
    ((1, 0, 17, 3), 12, 128, 136),
    ((0, 0, 36, 0), 4, 256, 300),
    ((4, 0, 40, 8), 200, 384, 200),
    ((0, 0), 8, 128, 64),
]
OTHER_TILES = Settings(
    few=dataclasses.replace(INTERPRETED.few, columns=128),
    many=dataclasses.replace(INTERPRETED.many, columns=64, band=1), most_few=8,
)  # fmt: skip


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("settings", [None, OTHER_TILES], ids=["default", "other tiles"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_keeps_the_bound(shape: Any, settings: Settings | None, bias: bool) -> None:
    given = problem(*shape, kind="mxfp4", spread=1 if bias else 6)
    given = biased(given) if bias else given
    out = torch.full((given.codes.shape[0], given.exact.shape[1]), POISON, dtype=BF16)
    weight = given.weight.codes, given.weight.scales
    launch(given.codes, given.scales, given.offsets, *weight, out, settings)
    assert error_over_bound(out, given, FP32_SUMS) <= 1
    assert (out[given.rows :] == POISON).all(), "rows that do not exist are not written"


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_exact_sums_have_the_same_bits_by_kernel_and_twin(dtype: torch.dtype, bias: bool) -> None:
    given = exact_problem((1, 0, 12, 5), 4, 256, 136)
    given = biased(given) if bias else given
    arguments = given.codes, given.scales, given.offsets, given.weight
    out, twin = (
        grouped_fp8(*arguments, dtype=dtype, implementation=each)[: given.rows] for each in ("triton", "torch")
    )
    assert torch.equal(out, twin)
    assert error_over_bound(out, given, 0.0) <= 1


def test_the_worked_example() -> None:
    """That of ``rows.grouped_mxfp4``."""
    codes, offsets = torch.ones(4, 128).to(torch.float8_e4m3fn), torch.tensor([0, 2], dtype=torch.int32)
    weight = torch.full((1, 2, 64, 32), 0b00000010, dtype=torch.uint8)
    scales = torch.tensor([127, 128, 127, 127], dtype=torch.uint8).view(torch.int32).repeat(1, 1, 64)
    out = torch.full((4, 64), POISON, dtype=BF16)
    launch(codes, torch.full((1, 4), 2.0), offsets, weight, scales, out)
    assert (out[:2] == 128).all()
    assert (out[2:] == POISON).all()
    by = Mxfp4Weight(weight, scales).with_bias(torch.full((1, 64), 3.0))
    launch(codes, torch.full((1, 4), 2.0), offsets, by.codes, by.scales, out)
    assert (out[:2] == 131).all()


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(("name", "codes", "scales"), [
    ("weight", (3, 4, 32), (3, 1, 8)), ("weight", (3, 1, 8, 32), (3, 1, 8)), ("weight.codes", (3, 4, 8, 16), (3, 1, 8)),
    ("weight.scales", (3, 2, 8, 32), (3, 8, 1)), ("weight.scales", (3, 2, 8, 32), (8,)),
    ("weight.scales", (3, 2, 8, 32), (3, 3, 8)), ("weight", (4, 32), (3, 1, 8)),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_named(name: str, codes: tuple[int, ...], scales: tuple[int, ...]) -> None:
    given = problem((4, 0, 12), 4, 128, 8, kind="mxfp4")
    weight = Mxfp4Weight(torch.zeros(codes, dtype=torch.uint8), torch.zeros(scales, dtype=torch.int32))
    with pytest.raises(moelink.ArgumentError, match=f"^{name}: expected"):
        grouped_fp8(given.codes, given.scales, given.offsets, weight)


def test_a_bias_is_kept_beside_the_scales() -> None:
    plain, bias = problem((4, 0), 0, 256, 8, kind="mxfp4").weight, torch.randn(2, 8).to(BF16)
    weight = plain.with_bias(bias)
    assert plain.bias is None
    assert torch.equal(weight.bias, bias.float())
    assert torch.equal(dequantize_weight(weight), dequantize_weight(plain))
    assert [torch.equal(*pair) for pair in zip(weight.to_blocks(), plain.to_blocks(), strict=True)] == [True, True]
    again = weight.with_bias(2 * bias)
    assert torch.equal(again.bias, 2 * bias.float())
    assert again.scales.shape == weight.scales.shape
    for wrong in (bias[0], bias[:, :7], bias.int()):
        with pytest.raises(moelink.ArgumentError, match=r"^bias: expected floating point \[2, 8\]"):
            plain.with_bias(wrong)


def test_the_operator_keeps_torchs_rules() -> None:
    given = biased(problem((4, 0, 12), 0, 128, 8, kind="mxfp4"))
    arguments = (given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, BF16, False)
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(torch.ops.moelink.grouped_fp8.default, arguments, test_utils=checks)


# --- the layer --------------------------------------------------------------------------------------------------------


def test_a_layer_computes_with_the_numbers_of_its_codes() -> None:
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2)).to(BF16)
    with moelink.init(**SIZES) as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=128, activation=Clamp())
        exact = MoE(ep, intermediate_size=128, activation=Clamp())
        layer.quantize_experts("mxfp4")
        experts = layer.experts
        assert isinstance(experts, QuantizedExperts)
        assert "256, 128, experts 0 to 3 of 4, mxfp4, backend 'mxfp4'" in repr(layer)
        exact.experts.gate_up_proj.copy_(dequantize_weight(Mxfp4Weight(experts.gate_up_proj, experts.gate_up_scales)))
        exact.experts.down_proj.copy_(dequantize_weight(Mxfp4Weight(experts.down_proj, experts.down_scales)))
        want = exact(x)
        # The rows between the products are quantised once more.
        assert (layer(x) - want).norm() < 0.05 * want.norm()

        other = MoE(ep, intermediate_size=128, activation=Clamp(), experts_backend="mxfp4", seed=5)
        assert not torch.equal(other(x), layer(x))
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x))
        assert torch.equal(other.half().experts.down_scales, experts.down_scales), "a cast leaves codes and scales"
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), layer(x))


def test_experts_with_biases_add_them_to_both_products() -> None:
    torch.manual_seed(4)
    quantized, offsets = get_format("fp8_block128").quantize(torch.randn(12, 128)), torch.tensor([0, 5, 9]).int()
    codes, scales = quantized.payload, quantized.scales.t().contiguous()
    up, down = (quantize_mxfp4(torch.randn(2, n, 128) / 8) for n in (256, 128))
    biases = torch.randn(2, 256), torch.randn(2, 128)
    given = {"backend": "mxfp4", "activation": Clamp(), "experts": (0, 0), "placement": Placement.identity(2)}
    experts = QuantizedExperts(up.with_bias(biases[0]), down.with_bias(biases[1]), **given, dtype=torch.float32)
    out = experts(codes, scales, offsets)
    numbers = codes.float() * scales.t().repeat_interleave(128, 1)
    for group, (start, end) in enumerate(((0, 5), (5, 9))):
        gate, linear = (numbers[start:end] @ up.dequantize()[group].T + biases[0][group]).chunk(2, dim=1)
        gate, linear = gate.clamp(max=7.0), linear.clamp(-7.0, 7.0)
        inner = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
        want = inner @ down.dequantize()[group].T + biases[1][group]
        # The rows between the products are quantised once more.
        assert (out[start:end] - want).norm() < 0.05 * want.norm()


# --- ahead of time, and the benchmark ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_the_kernel_compiles_for_gpus_that_are_not_there(target: str) -> None:
    found = [json.loads(line) for line in output_of("rows.grouped_fp8_aot", target, "mxfp4")]
    assert [each["form"] for each in found] == ["few", "many", "few, bias", "many, bias"]
    for each in found:
        assert each["local"] <= 32 + SPILLED, f"{each} spills"
        if target == "sm_90":
            assert each["wgmma"] > 0, f"{each} leaves the tensor cores of this architecture"


def test_the_benchmark_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.SHAPES, "qwen3-30b-a3b", (128, 128))
    sizes = ["--shapes", "qwen3-30b-a3b", "--experts", "2", "--loads", "4", "--samples", "1"]
    assert bench.main(["--device", "cpu", *sizes, "--out", str(tmp_path / "mxfp4.json")]) == 0
    assert "ratio" in capsys.readouterr().out
    document = json.loads((tmp_path / "mxfp4.json").read_text())
    assert (document["benchmark"], document["gate"]) == ("mxfp4", "passed")
    assert [row["product"] for row in document["rows"]] == ["gate_up", "down", "experts"]
    real = bench.multiply
    monkeypatch.setattr(bench, "multiply", lambda *given, **how: 2 * real(*given, **how))
    assert bench.main(["--device", "cpu", *sizes, "--out", str(tmp_path / "mxfp4.json")]) == 1, "a wrong product"
