"""What a layer prepares before its first call is what its calls launch. Triton's compiler and the GPU are played."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import moelink
from moelink.errors import ArgumentError
from moelink.kernels.launch import row_launch
from moelink.kernels.launch.row_launch import RowLauncher
from moelink.nn import GatedMLP, MoE, RouterConfig, block_quantized, moe, mxfp4, warmup
from moelink.rows import (
    activation_kernel,
    choose,
    common_kernel,
    eager,
    grouped_gluon,
    grouped_gluon_few,
    grouped_gluon_mxfp4,
)
from moelink.transports.base import Rehearsal
from moelink.tuning import FEW_LOGITS, FEW_ROWS, ROWS_OF_MXFP4
from moelink_bench.played import prepared_rows

SIZES: dict[str, Any] = {
    "num_experts": 8, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 16, "device": "cpu",
    "transport": "collective",
}  # fmt: skip


class Prepares:
    """Notes the kernels on rows that are asked for, and those that are prepared, with what they are compiled for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.made: list[str] = []

    def prepare(self, kernel: Any, given: Any, *rest: Any) -> Any:
        self.made.append(kernel.__name__)
        return prepared_rows(given)


@pytest.fixture
def prepares(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepares]:
    """A GPU that is played, on which every launch does nothing. Ids of a router that ran nothing are 0."""
    noted, launcher, fake = Prepares(), RowLauncher(), choose._choose_fake
    played = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 0))
    counter = torch.zeros(4, dtype=torch.int32)
    launcher.tile_counters = SimpleNamespace(of=lambda device: counter)  # type: ignore[assignment]
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(RowLauncher, "_prepare", lambda _, *given: noted.prepare(*given)),
            mock.patch.object(row_launch, "_compile", lambda kernel, *_: noted.asked.append(kernel.__name__)),
            mock.patch.object(row_launch, "is_interpreted", bool),
            mock.patch.object(row_launch, "driver", played),
            mock.patch.object(row_launch, "row_launcher", return_value=launcher),
            mock.patch.object(common_kernel, "row_launcher", return_value=launcher),
            mock.patch.object(choose, "_choose_fake", lambda *given: tuple(map(torch.zeros_like, fake(*given)))),
            mock.patch.object(eager, "takes_kernels", return_value=True),
            mock.patch.object(eager, "_launcher", return_value=launcher),
            mock.patch.object(torch.cuda, "current_device", return_value=None),
        ):
            stack.enter_context(patch)
        yield noted


@pytest.mark.quick("each launches other kernels")
@pytest.mark.parametrize(
    ("options", "layer_options", "training"),
    [
        pytest.param({"dispatch_format": "fp8_block128"}, {"experts_backend": "triton"}, False, id="fp8"),
        pytest.param({"dispatch_format": "fp8_block128"}, {}, True, id="fp8 rows, gradients"),
        pytest.param({}, {"router": RouterConfig(scoring="sigmoid", num_groups=4, topk_groups=2)}, True, id="bf16"),
        pytest.param({"combine_dtype": torch.float32}, {"dtype": torch.bfloat16}, True, id="fp32 home"),
        pytest.param({"dispatch_format": "mxfp8", "fused_shared_expert": True}, {}, False, id="mxfp8"),
    ],
)
def test_a_call_prepares_nothing_after_a_warmup(
    prepares: Prepares, options: dict[str, Any], layer_options: dict[str, Any], training: bool
) -> None:
    with moelink.init(**SIZES, **options) as ep, torch.set_grad_enabled(training):
        layer = MoE(ep, intermediate_size=128, load_steps=0, **{"dtype": torch.bfloat16, **layer_options})
        warmup.rehearse(layer, ep.config, (5, 16), training=training, load=False)
        assert prepares.made == []
        warmup.rehearse(layer, ep.config, (5, 16), training=training, load=True)
        assert set(prepares.made) == set(prepares.asked)
        assert "choose_experts_kernel" in prepares.made
        assert ("wide_product_kernel" in prepares.made) == (ep.config.combine_dtype == torch.bfloat16)
        assert ("gated_gradient_kernel" in prepares.made) == training
        known = len(prepares.made)
        for tokens in (3, 5):
            x = torch.ones(tokens, 256, dtype=ep.config.combine_dtype, requires_grad=training)
            out = layer(x, max_tokens=5 if tokens == 5 else None)
            if training:
                out.backward(torch.ones_like(out))
        layer.router(torch.ones(FEW_LOGITS, 256, dtype=ep.config.combine_dtype, requires_grad=training))
        assert prepares.made[known:] == []


@pytest.mark.quick("each backend launches other kernels")
@pytest.mark.parametrize(
    ("backend", "of_few", "of_many"), [("triton", 2 * len(FEW_ROWS), 2), ("mxfp4", 2 + 2 * len(ROWS_OF_MXFP4), 0)]
)
def test_calls_of_fewer_rows_than_those_that_were_rehearsed_find_their_tiles(
    prepares: Prepares, monkeypatch: pytest.MonkeyPatch, backend: str, of_few: int, of_many: int
) -> None:
    """With one rank a call's buffer has room for its own tokens, which chooses the tiles."""

    def few() -> None: ...

    def many() -> None: ...

    for module in (block_quantized, mxfp4):
        monkeypatch.setattr(module, "takes_gluon", lambda codes: True)
    # The launcher hashes a kernel by its source, and Triton cannot hash Gluon under its interpreter.
    monkeypatch.setattr(grouped_gluon_few, "grouped_gluon_few_kernel", few)
    monkeypatch.setattr(grouped_gluon_mxfp4, "grouped_gluon_mxfp4_kernel", few)
    monkeypatch.setattr(grouped_gluon, "grouped_gluon_kernel", many)
    monkeypatch.setattr(activation_kernel, "rows_of_short_steps", lambda *_: 100)
    sizes = {**SIZES, "max_tokens_per_rank": 1024, "dispatch_format": "fp8_block128"}
    with moelink.init(**sizes) as ep, torch.no_grad():
        layer = MoE(ep, intermediate_size=128, load_steps=0, dtype=torch.bfloat16, experts_backend=backend)
        warmup.rehearse(layer, ep.config, (1024,), training=False, load=True)
        known = len(prepares.made)
        assert prepares.made.count("few") == of_few
        assert prepares.made.count("many") == of_many
        assert prepares.made.count("silu_and_quantize_kernel") == 2, "of up to 50 tokens, and of more"
        for tokens in (1, 40, 41, 50, 51, 60, 61, 104, 105, 132, 133, 208, 209, 1024):
            layer(torch.ones(tokens, 256, dtype=torch.bfloat16))
        assert prepares.made[known:] == []


def test_rehearsed_calls_of_several_ranks_are_the_last_ones_of_their_tiles() -> None:
    """In mode "allreduce" a rank knows the tokens of all. Two ranks of 4 experts, top-2: a buffer has two rows a token,
    and of these a rank has half."""
    config = moelink.EPConfig(
        num_experts=8, topk=2, hidden_size=256, max_tokens_per_rank=512, world_size=2, mode="allreduce",
        dispatch_format="fp8_block128",
    )  # fmt: skip
    experts = SimpleNamespace(down_proj=torch.zeros(4, 1, 1), sizes=(4, 256, 128))
    means = {mean for mean, _ in (*FEW_ROWS, *ROWS_OF_MXFP4)}
    assert warmup._by_rows(config, 512, experts) == {4 * mean for mean in means}  # type: ignore[arg-type]
    limited = dataclasses.replace(config, capacity=41)  # which 41 tokens are likely to have
    assert warmup._by_rows(limited, 512, experts) == {40, 511}  # type: ignore[arg-type]


def test_a_layer_asks_for_the_calls_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    with moelink.init(**SIZES) as ep:
        plain = MoE(ep, intermediate_size=128)
        beside = MoE(ep, intermediate_size=128, shared_expert=GatedMLP(256, 128, dtype=torch.bfloat16))
        assert plain.warmup(max_tokens=[1]).kernels == (), "on a CPU there is nothing to do"
        monkeypatch.setattr(ep, "warmup", lambda **options: given.append(options))
        plain.warmup(max_tokens=[4, 1])
        monkeypatch.setattr(moe, "known_max_tokens", lambda *_: None)
        beside.warmup(training=True)
        beside.warmup(max_tokens=[4, 1])
        for wrong in (17, -1, True, 1.0):
            with pytest.raises(ArgumentError, match=r"max_tokens: expected integers in \[0, 16\]"):
                plain.warmup(max_tokens=[wrong])  # type: ignore[list-item]
    first, second, third = given
    assert third["calls"].bounds == (None, 4, 1)
    assert first["calls"] == Rehearsal(("fused",), ("fused",), (True,), (False,)), "one rank knows the tokens of all"
    assert second["calls"] == Rehearsal(("split",), ("fused",), (True,), (True,), (None,))
    assert (first["gradients"], second["gradients"]) == (False, True)
    assert [step.args[2] for step in (*first["beside"], *second["beside"])] == [(1, 4, 16), (16,)]
