"""Experts in fp8: weights, the product by kernel and twin, the layer, and what chooses the backend."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import re
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import moelink
from moelink.activation import Clamp
from moelink.kernels.launch import device
from moelink.nn import (
    MoE,
    QuantizedExperts,
    dequantize_weight,
    grouped_fp8,
    local_state_dict,
    merge_state_dicts,
    placed_experts,
)
from moelink.nn import expert_backends as backends
from moelink.nn.block_quantized import BlockQuantized, quantize_weight
from moelink.nn.experts import group_of_rows, likely_rows
from moelink.nn.placement import Placement
from moelink.rows import grouped_fp8 as grouped_fp8_kernels
from moelink.rows import grouped_gluon, grouped_gluon_few
from moelink.rows.grouped_fp8 import (
    BLACKWELL,
    HOPPER,
    INTERPRETED,
    SMALL_CACHE,
    Settings,
    default_settings,
    launch,
    launches_of,
    tile_in_group,
)
from moelink.testing import run_ranks
from moelink_bench import experts as bench
from tests.kernels.test_kernels_aot import output_of
from tests.rows.grouped_fp8_cases import FP32_SUMS, POISON, error_over_bound, numbers, problem
from tests.support.paths import ROOT

SIZES = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 8, "dispatch_format": "fp8_block128"}
BF16 = torch.bfloat16


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_have_a_scale_a_block() -> None:
    weight = torch.zeros(2, 200, 256)
    weight[1, 199, 255], weight[1, 0, 0], weight[0, 127, 127] = 896.0, -44.8, float("inf")
    weight[0, 130, 130] = float("nan")
    quantized = quantize_weight(weight)
    assert quantized.codes.shape == weight.shape
    assert quantized.codes.dtype == torch.float8_e4m3fn
    assert quantized.scales.shape == (2, 2, 2)
    torch.testing.assert_close(quantized.scales[1], torch.tensor([[0.1, 1e-4 / 448], [1e-4 / 448, 2.0]]))
    assert quantized.scales[0].isnan().tolist() == [[False, False], [False, True]], "a NaN is its block's alone"
    assert dequantize_weight(quantized)[1, 199, 255] == 896
    assert float(quantized.codes[0, 127, 127]) == 448, "an inf saturates"


def test_weights_lose_half_a_step_of_e4m3() -> None:
    weight = torch.randn(3, 130, 128, generator=torch.Generator().manual_seed(3)).to(BF16)
    back = dequantize_weight(quantize_weight(weight), dtype=torch.float64)
    for block, lost in ((weight[:, :128], back[:, :128]), (weight[:, 128:], back[:, 128:])):
        largest = block.double().abs().amax(dim=(1, 2), keepdim=True)
        assert ((lost - block.double()).abs() <= largest * (1 / 28 + 2.0**-20)).all()
    assert quantize_weight(weight[0]).scales.shape == (2, 1), "leading dimensions are optional"


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("weight", [torch.zeros(128), torch.zeros(4, 100), torch.zeros(4, 128).int()], ids=str)
def test_weights_that_cannot_be_quantised(weight: torch.Tensor) -> None:
    with pytest.raises(moelink.ArgumentError, match=r"^weight: expected floating point \[\.\.\., N, K\]"):
        quantize_weight(weight)


# --- the product ------------------------------------------------------------------------------------------------------

SHAPES = [
    ((4, 0, 12, 8), 12, 128, 136),
    ((0, 0, 36, 0), 4, 256, 300),
    ((4, 0, 40, 8), 200, 256, 200),
    ((0, 0), 8, 128, 64),
]
OTHER_TILES = Settings(
    few=dataclasses.replace(INTERPRETED.few, columns=128, swapped=False, descriptors=True),
    many=dataclasses.replace(INTERPRETED.many, columns=64, swapped=True, descriptors=True, band=1), most_few=8,
)  # fmt: skip


@pytest.mark.parametrize("settings", [None, OTHER_TILES], ids=["default", "descriptors"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_keeps_the_bound(shape: Any, settings: Settings | None) -> None:
    given = problem(*shape)
    out = torch.full((given.codes.shape[0], given.weight.codes.shape[1]), POISON, dtype=BF16)
    launch(given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, out, settings)
    assert error_over_bound(out, given, FP32_SUMS) <= 1
    assert (out[given.rows :] == POISON).all(), "rows that do not exist are not written"


@pytest.mark.quick("each condition decides alone")
@pytest.mark.parametrize(
    "capability, other, rows, likely, kernel",
    [
        ((9, 0), "", 40, None, 16), ((9, 0), "", 41, None, 32), ((9, 0), "", 104, None, 32),
        ((9, 0), "", 105, None, 64), ((9, 0), "", 208, None, 64), ((9, 0), "", 209, None, "many"),
        ((9, 0), "", 209, 40, 16),
        ((10, 0), "", 40, None, "triton"), ((9, 4), "hip", 40, None, "triton"),
        ((9, 0), "interpreted", 40, None, "triton"),
    ],
)  # fmt: skip
def test_the_mean_rows_of_a_group_choose_the_kernel(
    capability: tuple[int, int], other: str, rows: int, likely: int | None, kernel: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", "6.4" if other == "hip" else None)
    monkeypatch.setattr(device, "is_interpreted", lambda: other == "interpreted")
    taken: list[Any] = []
    monkeypatch.setattr(grouped_gluon_few, "launch", lambda *given, early: taken.append((given[-1], early)))
    monkeypatch.setattr(grouped_gluon, "launch", lambda *given, early: taken.append(("many", early)))
    monkeypatch.setattr(grouped_fp8_kernels, "launch", lambda *given: taken.append(("triton", False)))
    codes = mock.MagicMock(is_cuda=True, device="cuda")
    codes.__len__.return_value = rows
    weight = BlockQuantized(torch.zeros(4, 1, 1), torch.zeros(1))
    for follows in (False, True):
        weight.launch(codes, *[None] * 3, follows_product=follows, likely_rows=likely)  # type: ignore[arg-type]
    assert taken == [(kernel, False), (kernel, kernel != "triton")]


@pytest.mark.parametrize(
    "capability, settings", [((9, 0), HOPPER), ((10, 0), BLACKWELL), ((8, 9), SMALL_CACHE)]
)  # fmt: skip
def test_large_groups_have_a_launch_of_their_own(
    capability: tuple[int, int], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(grouped_fp8_kernels, "is_interpreted", bool)
    monkeypatch.setattr(grouped_fp8_kernels, "has_native_casts", lambda device: True)
    cuda = torch.device("cuda")
    assert default_settings(cuda) == settings
    made = launches_of.__wrapped__(None, torch.Size((64, 1536, 2048)), cuda)
    assert [(one.tiles, one.least, one.most) for one in made] == [(settings.few, 1, 64), (settings.many, 65, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_twin_and_kernel_keep_the_bound_of_each_dtype(implementation: str, dtype: torch.dtype) -> None:
    given = problem((4, 0, 12), 4, 256, 136, spread=1 if dtype == torch.float16 else 6)
    out = grouped_fp8(
        given.codes, given.scales, given.offsets, given.weight, dtype=dtype, implementation=implementation
    )
    assert out.dtype == dtype
    assert error_over_bound(out, given, FP32_SUMS) <= 1


def test_tiles_go_down_a_band_of_rows() -> None:
    constants = types.SimpleNamespace(N=200, BLOCK_COLUMNS=128, PARTS=1, BAND=2)
    import triton
    import triton.language as tl

    @triton.jit
    def list_tiles(out, S: tl.constexpr):
        for number in range(6):
            row, column = tile_in_group(number, 3, S)
            tl.store(out + 2 * number, row)
            tl.store(out + 2 * number + 1, column)

    out = torch.zeros(6, 2, dtype=torch.int32)
    list_tiles[(1,)](out, constants)
    assert out.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [2, 1]]


def test_the_worked_example() -> None:
    """That of ``rows.grouped_fp8``."""
    codes = torch.ones(8, 128).to(torch.float8_e4m3fn)
    weight = torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    out = torch.full((8, 128), POISON, dtype=BF16)
    offsets = torch.tensor([0, 4, 4], dtype=torch.int32)
    launch(codes, torch.full((1, 8), 2.0), offsets, weight, torch.full((2, 1, 1), 0.5), out)
    assert (out[:4] == 128).all()
    assert (out[4:] == POISON).all()


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(("name", "change"), [
    ("codes", {"codes": torch.zeros(20, 100).to(torch.float8_e4m3fn)}),
    ("codes", {"codes": torch.zeros(20, 128)}),
    ("scales", {"scales": torch.zeros(20, 1)}),
    ("row_offsets", {"row_offsets": torch.zeros(4, dtype=torch.int64)}),
    ("row_offsets", {"row_offsets": torch.zeros(4, dtype=torch.int32, device="meta")}),
    ("weight", {"weight": BlockQuantized(torch.zeros(3, 8, 100), torch.zeros(3, 1, 1))}),
    ("weight.scales", {"weight": BlockQuantized(torch.zeros(3, 8, 128).to(torch.float8_e4m3fn), torch.zeros(3, 2, 1))}),
    ("dtype", {"dtype": torch.float64}),
    ("implementation", {"implementation": "cutlass"}),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_named(name: str, change: dict[str, Any]) -> None:
    given = problem((4, 0, 12), 4, 128, 8)
    arguments = {
        "codes": given.codes, "scales": given.scales, "row_offsets": given.offsets, "weight": given.weight, **change,
    }  # fmt: skip
    with pytest.raises(moelink.ArgumentError, match=f"^{re.escape(name)}: expected"):
        grouped_fp8(**arguments)


def test_the_operator_keeps_torchs_rules() -> None:
    given = problem((4, 0, 12), 0, 128, 8)
    arguments = (given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, BF16, False)
    # All but the schema's check, which compares float8 inputs by operators that torch lacks.
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(torch.ops.moelink.grouped_fp8.default, arguments, test_utils=checks)


# --- the layer --------------------------------------------------------------------------------------------------------


def exact_experts(layer: MoE, recv: moelink.DispatchOutput) -> torch.Tensor:
    """The experts' outputs in fp64 from the same codes; only the quantisation between the products is left out."""
    experts = layer.experts
    rows = numbers(recv.tokens, recv.scales.t())
    gate_up = dequantize_weight(BlockQuantized(experts.gate_up_proj, experts.gate_up_scales), dtype=torch.float64)
    down = dequantize_weight(BlockQuantized(experts.down_proj, experts.down_scales), dtype=torch.float64)
    out = torch.zeros(len(rows), down.shape[1], dtype=torch.float64)
    offsets = recv.row_offsets.tolist()
    for group, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        gate, up = (rows[start:end] @ gate_up[group].t()).chunk(2, dim=1)
        out[start:end] = (functional.silu(gate) * up) @ down[group].t()
    return out


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "fused shared expert"])
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_layer_multiplies_the_rows_that_travelled(backend: Any, transport: Any, shared: bool) -> None:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    with moelink.init(**SIZES, fused_shared_expert=shared, transport=transport) as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=128, experts_backend=backend)
        assert isinstance(layer.experts, QuantizedExperts)
        assert layer.experts.num_local_experts == 4
        routing = layer.router(x)
        recv = ep.dispatch(x, routing.topk_ids, routing.topk_weights)
        want = exact_experts(layer, recv)
        got = layer.experts(recv.tokens, recv.scales, recv.row_offsets)
        end = int(recv.row_offsets[-1])
        # Half a step of e4m3 between the products (1/28 of a group's largest), as rows of 128 terms add it up.
        assert (got[:end] - want[:end]).abs().max() <= 0.05 * want[:end].abs().max()
        assert want[:end].abs().max() > 0
        y = ep.combine(got.to(BF16), recv)
        assert torch.equal(layer(x), y)


def test_hooks_on_parts_of_a_layer_are_called_and_may_change_what_it_computes() -> None:
    """At each call, of other shapes and strides of the tokens as well."""
    x, called = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)).to(BF16), []
    with moelink.init(**SIZES) as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=128, experts_backend="torch")
        plain = layer(x)
        layer.router.register_forward_hook(lambda *given: called.append("router"))
        layer.experts.register_forward_pre_hook(lambda *given: called.append("experts"))
        layer.experts.register_forward_hook(lambda module, given, out: out * 2)
        for tokens in (x, x.view(2, 4, 128), x.t().contiguous().t()):
            assert torch.equal(layer(tokens), 2 * plain.view(tokens.shape))
    assert called == ["router", "experts"] * 3


def test_experts_take_a_buffer_that_is_swapped_or_parametrised() -> None:
    with moelink.init(**SIZES) as ep, torch.no_grad():
        experts = MoE(ep, intermediate_size=128, experts_backend="torch").experts
        other = MoE(ep, intermediate_size=128, experts_backend="torch", seed=1).experts
    given = torch.ones(4, 128).to(torch.float8_e4m3fn), torch.ones(1, 4), torch.tensor([0, 1, 2, 3, 4]).int()
    mine, wanted = experts(*given), other(*given)
    assert not torch.equal(mine, wanted)
    assert torch.equal(torch.func.functional_call(experts, dict(other.named_buffers()), given), wanted)
    doubled = torch.nn.Module()
    doubled.forward = lambda scales: scales * 2
    torch.nn.utils.parametrize.register_parametrization(experts, "down_scales", doubled, unsafe=True)
    assert torch.equal(experts(*given), 2 * mine)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_experts_refuse_rows_that_do_not_fit_after_rows_that_do(backend: Any, rows: int) -> None:
    """The same tensors are refused while a tracer looks, with sizes that it makes up."""
    with moelink.init(**SIZES) as ep, torch.no_grad():
        experts = MoE(ep, intermediate_size=128, experts_backend=backend).experts
    codes, scales = torch.zeros(rows, 128).to(torch.float8_e4m3fn), torch.ones(1, rows)
    offsets = torch.full((5,), rows, dtype=torch.int32)
    assert experts(codes, scales, offsets).shape == codes.shape
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode, pytest.raises(moelink.ArgumentError, match="scales: expected"):
            experts(codes, torch.ones(2, rows), offsets)
        with mode, pytest.raises(moelink.ArgumentError, match="row_offsets: expected a contiguous"):
            experts(codes, scales, offsets.repeat_interleave(2)[::2])


def test_a_layer_in_fp8_is_near_the_layer_in_bf16() -> None:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(2)).to(BF16)
    with moelink.init(**SIZES) as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=256, activation=Clamp())
        want = layer(x)
        assert "experts_backend='dequantize'" in repr(layer)
        layer.quantize_experts("torch")
        assert layer.experts_backend == "torch"
        assert "fp8, backend 'torch'" in repr(layer)
        got = layer(x)
        assert not torch.equal(got, want)
        assert (got - want).norm() < 0.08 * want.norm()
        with pytest.raises(moelink.StateError, match="expected experts that are not quantised"):
            layer.quantize_experts()
        with pytest.raises(moelink.StateError, match="expected experts with parameters"):
            layer.reset_parameters()


def part_of_layer(rank: int, world: int, transport: str) -> tuple[torch.Tensor, set[tuple[int, int]]]:
    """The layer's output for this rank's share of eight tokens, of which the second of two ranks has two; and the rows
    of the buffers of its products, and the likely ones of them."""
    seen = set()

    def multiply(backend: str, codes: torch.Tensor, *given: Any, likely_rows: int, **options: Any) -> None:
        seen.add((len(codes), likely_rows))
        backends.multiply(backend, codes, *given, **options)

    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(3)).to(BF16)
    mine = x if world == 1 else (x[:6], x[6:])[rank]
    with (
        mock.patch.object(placed_experts, "multiply", multiply),
        moelink.init(**SIZES, transport=transport) as ep,
        torch.no_grad(),
    ):
        return MoE(ep, intermediate_size=128, experts_backend="torch")(mine), seen


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_two_ranks_compute_what_one_does(transport: str) -> None:
    want, seen = part_of_layer(0, 1, "collective")
    assert seen == {(28, 16)}
    parts = run_ranks(part_of_layer, 2, transport, timeout=200)
    got = torch.cat([part for part, _ in parts])
    assert all(seen == {(38, 16)} for _, seen in parts), "buffers for 8 tokens of 2 ranks, in groups of 4 rows"
    # fp32 sums may be made in another order where a group has other rows beside it.
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-7 * float(want.abs().max()))


def test_likely_rows_are_those_of_uniform_routing() -> None:
    config = moelink.EPConfig(**SIZES, world_size=2)
    assert [likely_rows(config, tokens) for tokens in (0, 3, None)] == [0, 6, 16]
    replicated = dataclasses.replace(config, mode="allreduce", fused_shared_expert=True)
    assert [likely_rows(replicated, tokens) for tokens in (3, None)] == [5, 12]
    assert likely_rows(dataclasses.replace(config, capacity=12), None) == 12
    assert likely_rows(dataclasses.replace(config, capacity=4000), None) == 16


def test_a_layer_is_exported_for_any_number_of_tokens() -> None:
    for capacity in (None, 60):
        with moelink.init(**SIZES | {"max_tokens_per_rank": 32}, capacity=capacity) as ep, torch.no_grad():
            layer = MoE(ep, intermediate_size=128, experts_backend="torch", load_steps=0)
            x = torch.randn(8, 128).to(BF16)
            shapes = ({0: torch.export.Dim("tokens", min=2, max=32)},)
            exported = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=False).module()
            assert torch.equal(exported(x[:5]), layer(x[:5]))


def test_gradients_are_refused_before_anything_travels() -> None:
    with moelink.init(**SIZES) as ep:
        layer = MoE(ep, intermediate_size=128, experts_backend="torch")
        x = torch.randn(2, 128).to(BF16)
        with pytest.raises(moelink.UnsupportedError, match="torch.no_grad"):
            layer(x)
        layer.requires_grad_(False)
        assert layer(x).shape == x.shape
        with pytest.raises(moelink.UnsupportedError, match="torch.no_grad"):
            layer(x.requires_grad_())


def test_codes_and_scales_are_part_of_a_checkpoint() -> None:
    with moelink.init(**SIZES, fused_shared_expert=True) as ep, torch.no_grad():
        first, second = (MoE(ep, intermediate_size=128, experts_backend="torch", seed=seed) for seed in (0, 1))
        full = first.state_dict()
        assert {"experts.gate_up_proj", "experts.gate_up_scales", "experts.down_scales"} < set(full)
        second.load_state_dict(local_state_dict(second, full))
        x = torch.randn(8, 128).to(BF16)
        assert torch.equal(first(x), second(x))
        merged = merge_state_dicts(first, [full])
        assert all(torch.equal(merged[name].view(torch.uint8), full[name].view(torch.uint8)) for name in full)
        assert moelink.nn.all_reduce_gradients(first) is None


def test_a_compiled_layer_has_no_graph_break() -> None:
    torch._dynamo.reset()
    given = problem((4, 0, 12), 4, 128, 256)
    down = quantize_weight(torch.randn(3, 128, 128))
    experts = QuantizedExperts(
        given.weight,
        down,
        backend="torch",
        activation=functional.silu,
        experts=(0, 0),
        placement=Placement.identity(3),
        dtype=BF16,
    )
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    arguments = given.codes, given.scales, given.offsets
    assert torch.equal(compiled(*arguments)[: given.rows], experts(*arguments)[: given.rows])


# --- backends ---------------------------------------------------------------------------------------------------------


def choose(wanted: str, *, device: str = "cpu", activation: Any = functional.silu, **change: Any) -> backends.Choice:
    inner = change.pop("intermediate_size", 128)
    dtype, stored = change.pop("dtype", BF16), change.pop("stored", None)
    config = moelink.EPConfig(**{**SIZES, **change})
    return backends.choose_backend(
        wanted, config, intermediate_size=inner, activation=activation, device=torch.device(device), dtype=dtype,
        stored=stored,
    )  # fmt: skip


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(("change", "reason"), [
    ({"dispatch_format": "bf16"}, "dispatch_format='fp8_block128', got 'bf16'"),
    ({"dispatch_format": "mxfp8"}, "dispatch_format='fp8_block128', got 'mxfp8'"),
    ({"dispatch_format": "nvfp4"}, "dispatch_format='fp8_block128', got 'nvfp4'"),
    ({"intermediate_size": 100}, "multiple of 128, got 100"),
    ({"activation": functional.gelu}, "silu or a moelink.activation.Clamp"),
    ({"dtype": torch.float64}, "got torch.float64"),
], ids=str)  # fmt: skip
def test_where_no_backend_fits_auto_dequantises_and_names_are_refused(change: dict[str, Any], reason: str) -> None:
    choice = choose("auto", **change)
    assert choice.backend == "dequantize"
    assert reason in choice.reason
    for name in ("triton", "torch", "mxfp4", "flashinfer"):
        with pytest.raises(moelink.UnsupportedError, match=re.escape(reason)):
            choose(name, **change)
    assert choose("dequantize", **change) == backends.Choice("dequantize")


def test_weights_that_are_quantised_stay_as_they_are() -> None:
    assert choose("mxfp4") == backends.Choice("mxfp4")
    with pytest.raises(moelink.UnsupportedError, match="'mxfp4': expected weights that are not stored in fp8"):
        choose("mxfp4", stored="fp8")
    assert choose("auto", stored="mxfp4") == choose("mxfp4", stored="mxfp4") == backends.Choice("mxfp4")
    assert "multiple of 128" in choose("auto", stored="mxfp4", intermediate_size=100).reason
    with pytest.raises(moelink.UnsupportedError, match="'torch': expected weights that are not stored in mxfp4"):
        choose("torch", stored="mxfp4")


def test_a_library_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, command in backends.PIP.items():
        with pytest.raises(moelink.UnsupportedError, match=re.escape(command)):
            choose(name)
    with pytest.raises(moelink.ConfigError, match="experts_backend: expected one of auto"):
        choose("cutlass")


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(("device", "capability", "stored_in_fp8", "wanted"), [
    ("cuda", (9, 0), False, "triton"), ("cuda", (9, 0), True, "triton"), ("cuda", (10, 0), False, "dequantize"),
    ("cuda", (10, 0), True, "triton"), ("cuda", (8, 9), False, "dequantize"), ("cuda", (8, 9), True, "triton"),
    ("cuda", (8, 0), True, "dequantize"), ("cpu", None, False, "dequantize"), ("cpu", None, True, "torch"),
])  # fmt: skip
def test_auto_takes_what_was_measured_to_be_fastest(
    device: str, capability: tuple[int, int] | None, stored_in_fp8: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is installed: no library was faster than the kernel wherever it runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    choice = choose("auto", device=device, stored="fp8" if stored_in_fp8 else None)
    assert choice.backend == wanted
    assert bool(choice.reason) == (wanted == "dequantize")


def test_auto_was_faster_than_the_default_in_every_row_that_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "experts_h200.json").read_text())["rows"]
    whole = [row for row in rows if row["product"] == "experts"]
    assert len(whole) >= 6
    assert all(row["fp8"]["us"] < 0.8 * row["bf16"]["us"] for row in whole)


def test_libraries_get_rows_as_dispatch_lays_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the libraries' signatures compute what theirs promise, from their own layouts."""
    given = problem((128, 0, 128), 128, 256, 256)

    def flashinfer(a, b, a_scale, b_scale, m_indptr, *, scale_granularity_mnk, scale_major_mode, out, out_dtype):  # noqa: ANN001, ANN202
        assert (scale_granularity_mnk, scale_major_mode, out_dtype) == ((1, 128, 128), "MN", out.dtype)
        assert a_scale.shape == (2, 384)
        assert b_scale.shape == (3, 2, 2)
        for group in range(3):
            rows = slice(int(m_indptr[group]), int(m_indptr[group + 1]))
            weight = numbers(b[group], b_scale[group].t().repeat_interleave(128, 0))
            out[rows] = (numbers(a[rows], a_scale[:, rows].t()) @ weight.t()).to(out.dtype)

    fakes = {"flashinfer.gemm": types.SimpleNamespace(group_gemm_fp8_nt_groupwise=flashinfer)}
    monkeypatch.setattr(backends, "importlib", types.SimpleNamespace(import_module=fakes.__getitem__))
    out = torch.full((384, 256), POISON, dtype=BF16)
    backends.multiply("flashinfer", given.codes, given.scales, given.offsets, given.weight, out)
    assert error_over_bound(out, given, FP32_SUMS) <= 1
    assert (out[given.rows :] == POISON).all()


def test_rows_that_do_not_exist_belong_to_no_group() -> None:
    assert group_of_rows(torch.tensor([0, 2, 2, 3]), 4).tolist() == [0, 0, 2, -1]


def test_the_choice_of_auto_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moelink")
    with moelink.init(**{**SIZES, "dispatch_format": "bf16"}) as ep:
        MoE(ep, intermediate_size=128, experts_backend="auto")
        MoE(ep, intermediate_size=128)
    said = [record.message for record in caplog.records if "experts_backend" in record.message]
    assert len(said) == 1
    assert said[0].startswith("experts_backend 'auto': dequantize (quantised experts need dispatch_format=")


# --- ahead of time, and the benchmark ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_the_kernel_compiles_for_gpus_that_are_not_there(target: str) -> None:
    found = [json.loads(line) for line in output_of("rows.grouped_fp8_aot", target)]
    forms = ["few", "many", "few, pointers"]
    assert [each["form"] for each in found] == forms[: {"sm_90": 4, "sm_100": 3, "gfx942": 2}[target]]
    for each in found:
        assert each["local"] == 0, f"{each} spills"
        if target == "sm_90":
            assert each["wgmma"] > 0, f"{each} leaves the tensor cores of this architecture"
            assert (each["tma"] > 0) == ("pointers" not in each["form"]), each
        if target == "sm_100":
            assert each["tcgen05"] > 0, f"{each} leaves the tensor cores of this architecture"


@pytest.mark.parametrize("sweep", [False, True], ids=["products", "sweep"])
def test_the_benchmark_runs_on_a_cpu(sweep: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--experts", "2", "--hidden", "128", "--intermediate", "128", "--most", "8", "--samples", "1"]
    command = ["--device", "cpu", *sizes, "--out", str(tmp_path / "experts.json"), "--loads", "one"]
    assert bench.main([*command, *(["--sweep"] if sweep else [])]) == 0
    capsys.readouterr()
    document = json.loads((tmp_path / "experts.json").read_text())
    assert (document["benchmark"], document["gate"]) == ("experts", "passed")
    if sweep:
        assert {row["tiles"]["rows"] for row in document["rows"]} == {16, 32}
    else:
        assert [row["product"] for row in document["rows"]] == ["gate_up", "down", "experts"]
        assert all(row["bf16"]["us"] > 0 and row["fp8"]["us"] > 0 for row in document["rows"])


def test_a_wrong_product_fails_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.by_kernel

    def double(rows: bench.Rows, weights: bench.Weights, settings: Any = None) -> torch.Tensor:
        return 2 * real(rows, weights)

    monkeypatch.setattr(bench, "by_kernel", double)
    sizes = ["--experts", "2", "--hidden", "128", "--intermediate", "128", "--most", "8", "--samples", "1"]
    assert bench.main(["--device", "cpu", *sizes, "--loads", "4", "--out", str(tmp_path / "experts.json")]) == 1
