"""SGLang over moelink: the plugin, its refusals and its arithmetic without SGLang, and the dispatcher with SGLang's."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import moelink
from moelink.errors import UnsupportedError
from moelink.integrations import versions
from moelink.integrations.settings import Settings
from moelink.integrations.sglang import plugin
from moelink.integrations.sglang.settings import (
    ends_of,
    expected_rows,
    format_of,
    init_arguments,
    refuse_elastic,
    scales_of,
)
from moelink.testing import run_ranks
from tests.integrations.sglang import sglang_ranks as ranks

needs_sglang = pytest.mark.skipif(
    find_spec("sglang") is None, reason="SGLang is not installed; run by make test-engines"
)
FITS: dict[str, Any] = {"backend": "deepep_v2", "fp8": True, "e8m0": False, "block": 128}


def test_the_plugin_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda package: pytest.fail("nobody asked"))
    assert not plugin.register({})
    assert not plugin.register({"MOELINK_SGLANG": "0"})


def test_a_release_outside_the_range_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    monkeypatch.setattr(versions, "version", lambda package: "0.6.1")
    with pytest.raises(UnsupportedError, match=r"sglang: expected a release from 0.5.23 to before 0.6, got 0.6.1"):
        plugin.register({"MOELINK_SGLANG": "1"})
    monkeypatch.setenv("MOELINK_SGLANG", "1")
    with pytest.raises(SystemExit, match=r"moelink: sglang: expected a release from 0.5.23"):
        plugin.load()
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] == "sglang"}


def test_how_rows_travel() -> None:
    assert format_of(torch.bfloat16, **FITS) == "fp8_block128"
    assert format_of(torch.bfloat16, **{**FITS, "e8m0": True}) == "fp8_block128_e8m0"
    assert format_of(torch.bfloat16, **{**FITS, "fp8": False, "block": 32}) == "bf16"


@pytest.mark.quick("no time, and each is another option")
@pytest.mark.parametrize(
    ("activations", "change", "named"),
    [
        (torch.float16, {}, "--dtype: expected bfloat16"),
        (torch.bfloat16, {"backend": "deepep"}, "--moe-a2a-backend: expected deepep_v2.*got deepep"),
        (torch.bfloat16, {"block": 32}, "--quantization: .*one for each 32"),
    ],
)
def test_options_are_refused_by_name(activations: torch.dtype, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{named}.*unset MOELINK_SGLANG"):
        format_of(activations, **{**FITS, **change})


@pytest.mark.quick("no time, and each is another option")
@pytest.mark.parametrize(
    ("backend", "backup", "named"),
    [
        ("mooncake", False, "--elastic-ep-backend: expected none.*got mooncake.*--enable-eplb and"),
        ("nixl", True, "--elastic-ep-backend: expected none.*got nixl"),
        (None, True, "--enable-elastic-expert-backup: expected it off.*leave it out"),
    ],
)
def test_elastic_expert_parallelism_is_refused_by_name(backend: str | None, backup: bool, named: str) -> None:
    refuse_elastic(None, False)
    refuse_elastic("none", False)
    with pytest.raises(UnsupportedError, match=f"{named}.*unset MOELINK_SGLANG"):
        refuse_elastic(backend, backup)


@pytest.mark.parametrize("dispatch_format", ["bf16", "fp8_block128", "fp8_block128_e8m0"])
def test_the_expanded_format(dispatch_format: str) -> None:
    arguments = init_arguments(
        settings=Settings(), num_experts=4, topk=2, hidden_size=512, max_tokens=5, dispatch_format=dispatch_format,
        device=torch.device("cpu"),
    )  # fmt: skip
    ids = torch.tensor([[0, 2], [2, 3], [2, -1]])
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    with moelink.init(**arguments) as ep:
        recv = ep.dispatch(x, ids, torch.ones(3, 2))
        assert ends_of(recv.row_offsets, recv.num_recv_per_expert).tolist() == [1, 128, 131, 257]
        scales = scales_of(recv.scales)
        if dispatch_format == "bf16":
            assert scales is None
            return
        assert scales is not None
        groups = {"fp8_block128": 4, "fp8_block128_e8m0": 1}[dispatch_format]  # an int32 holds four
        assert scales.shape == (len(recv.tokens), groups)
        if dispatch_format == "fp8_block128":
            assert scales.is_contiguous()
            amax = x[2].float().view(4, 128).abs().amax(-1)
            torch.testing.assert_close(scales[130], amax / 448, atol=0, rtol=1e-6)


def test_the_hint_for_masked_products() -> None:
    assert expected_rows(0, world_size=8, topk=8, num_experts=256) == 1
    assert expected_rows(128, world_size=8, topk=8, num_experts=256) == 33


@pytest.fixture(scope="module", params=[2, 4])
def by_rank(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    """What each rank of SGLang answered."""
    made: list[dict[Any, Any]] = run_ranks(ranks.everything, request.param, timeout=560)
    return made


@needs_sglang
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extend", [True, False], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", ["bf16", "fp8_block128"])
def test_the_dispatcher(by_rank: list[dict[Any, Any]], name: str, extend: bool) -> None:
    for results in by_rank:
        assert results["class"] == "MoelinkDispatcher"
        ours, truth = results[name, extend]
        torch.testing.assert_close(ours.float(), truth, atol=2.0**-5, rtol=0)  # bf16 sums of values up to 4
        facts = results["facts", name, extend]
        most = -(-len(by_rank) * ranks.TOKENS // 128) * 128
        assert (facts["format"], facts["expanded"], facts["alignment"]) == ("deepep_v2", True, 128)
        assert (facts["masked"], facts["most"]) == (not extend, 0 if extend else most)
        assert facts["total"] == (0 if extend else facts["rows"])
        assert facts["ends"] == torch.int32
        assert facts["scale"] == (None if name == "bf16" else (facts["rows"], 1))


@needs_sglang
@pytest.mark.timeout(600)
def test_what_a_layer_refuses(by_rank: list[dict[Any, Any]]) -> None:
    for results in by_rank:
        said = results["said"]
        assert "combine: expected a dispatch before it" in said["combine first"]
        assert "dispatch: expected a combine" in said["dispatch twice"]
        assert "rows that are multiplied by the router weights" in said["unweighted"]
        assert "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK" in said["too many"]
        assert "--quantization" in said["mxfp8"]
        assert "--moe-a2a-backend" in said["backend"]
        assert "--elastic-ep-backend: expected none" in said["elastic"]
        assert "timeout: expected the same value on every rank" in said["settings"]
        assert all(f"rank {rank}" in said["settings"] for rank in range(len(by_rank)))


@needs_sglang
def test_the_entry_point_is_found() -> None:
    from importlib.metadata import entry_points

    (found,) = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "moelink"]
    assert found.load() is plugin.load
