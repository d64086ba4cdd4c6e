"""vLLM over moelink: the plugin, its refusals and its arithmetic without vLLM, and vLLM's modular kernel with it."""

from __future__ import annotations

import ast
import dataclasses
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moelink
from moelink.env import VLLM
from moelink.errors import ConfigError, UnsupportedError
from moelink.integrations import settings as common
from moelink.integrations import versions
from moelink.integrations.vllm import plugin
from moelink.integrations.vllm.settings import (
    LOCAL_IDS,
    Parallelism,
    Quantization,
    Rows,
    bound_of,
    init_arguments,
    refuse,
    rows_of,
    takes_local_ids,
    without_gaps,
)
from moelink.testing import run_ranks
from tests.integrations.vllm import vllm_ranks as ranks

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; run by make test-engines")
# A sum of at most 8 terms of size 5 in bf16, whose step there is 2**-6; each rank's sum is rounded, and the total.
BF16 = 2.0**-5
FP8 = torch.float8_e4m3fn


@pytest.mark.quick("no time, and each is another spelling")
@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("0", None), ("", None), (" 1 ", common.Settings()),
        ("transport=collective", common.Settings(transport="collective")),
        ("batch_invariant=1", common.Settings(batch_invariant=True)),
        ("batch_invariant=0", common.Settings()),
        ("num_sms=24, timeout=5", common.Settings(num_sms=24, timeout=5.0)),
    ],
)  # fmt: skip
def test_the_variable_switches_the_plugin(text: str, settings: common.Settings | None) -> None:
    assert common.read(VLLM, {"MOELINK_VLLM": text}) == settings


@pytest.mark.quick("no time, and each is another mistake")
@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "num_sms",
        "sms=3",
        "num_sms=many",
        "transport=mpi",
        "timeout=1,timeout=2",
        "num_sms=1,",
        "batch_invariant=yes",
    ],
)
def test_what_the_variable_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="MOELINK_VLLM"):
        common.read(VLLM, {"MOELINK_VLLM": text})


def test_the_plugin_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda package: pytest.fail("nobody asked"))
    assert not plugin.register({})
    assert not plugin.register({"MOELINK_VLLM": "0"})


def test_a_release_outside_the_range_is_refused_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    monkeypatch.setattr(versions, "version", lambda package: "0.34.1")
    with pytest.raises(UnsupportedError, match=r"vllm: expected a release from 0.32.0 to before 0.34, got 0.34.1"):
        plugin.register({"MOELINK_VLLM": "1"})
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] == "vllm"}


def test_a_missing_name_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"vllm 0.33.9: expected moelink.env.Variable.gone, got no such name"):
        common._owner(("moelink.env", "Variable", "gone"), "vllm", "0.33.9", VLLM)
    assert common._owner(("moelink.env", "Variable", "read"), "vllm", "0.33.9", VLLM) is type(VLLM)


def test_a_layer_that_gathers_by_itself_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="quantization: expected a method that vLLM runs in its modular kernel"):
        plugin._refuse_gather(None, torch.zeros(1))


FITS = Parallelism(backend="allgather_reducescatter", spread=True)


@pytest.mark.quick("no time, and each is another option")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "deepep_v2"}, "--all2all-backend: expected allgather_reducescatter.*got deepep_v2"),
        ({"spread": False}, "--enable-expert-parallel, --data-parallel-size"),
        ({"monolithic": True}, "--moe-backend.*choose triton"),
        ({"lora": True}, "--enable-lora.*merge the adapter"),
        ({"elastic": True}, "--enable-elastic-ep: expected it off, as .*, got it on; leave it out .*--enable-eplb"),
        ({"fault_tolerance": True}, "--enable-fault-tolerance: expected it off, as .*start anew"),
    ],
)
def test_options_are_refused_by_name(change: dict[str, object], named: str) -> None:
    refuse(FITS)
    with pytest.raises(UnsupportedError, match=f"{named}.*unset MOELINK_VLLM"):
        refuse(dataclasses.replace(FITS, **change))


@pytest.mark.quick("no time, and each is another quantisation")
@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        (Quantization(), Rows("bf16", "nobody")),
        (Quantization(FP8, (128, 128)), Rows("fp8_block128", "moelink")),
        (Quantization(FP8, (128, 128), e8m0=True), Rows("fp8_block128", "vllm")),
        (Quantization(FP8, (128, 128), deferred=True), Rows("bf16", "nobody")),
        (Quantization(FP8, per_token=True), Rows("fp8_token", "moelink")),
        (Quantization(FP8, static=True), Rows("bf16", "arrival")),
        (Quantization("nvfp4", static=True), Rows("bf16", "arrival")),
        (Quantization("mxfp8", (1, 32)), Rows("bf16", "arrival")),
    ],
)
def test_how_rows_travel(wanted: Quantization, rows: Rows) -> None:
    assert rows_of(torch.bfloat16, wanted) == rows
    assert rows_of(torch.float32, Quantization()).format == "fp32"
    assert rows.format in moelink.format_names()


@pytest.mark.quick("no time, and each is another quantisation")
@pytest.mark.parametrize(
    ("activations", "wanted", "named"),
    [
        (torch.float16, Quantization(), "--dtype: .*got torch.float16; pass --dtype bfloat16"),
        (torch.bfloat16, Quantization(FP8, (64, 64)), "blocks of 128 x 128"),
        (torch.bfloat16, Quantization(FP8, (128, 128), transposed=True), "--moe-backend"),
        (torch.bfloat16, Quantization(FP8), "one scale for all tokens of a rank"),
    ],
)
def test_quantisations_are_refused(activations: torch.dtype, wanted: Quantization, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        rows_of(activations, wanted)


def test_the_bound_is_a_power_of_two_that_holds_all_tokens() -> None:
    assert bound_of(None, own=3, shards=1, limit=64) is None
    for largest in range(70):
        for shards in (1, 2, 3):
            own = min(-(-largest // shards), 64)
            bound = bound_of(largest, own=own, shards=shards, limit=64)
            assert bound is not None
            assert own <= bound <= max(1, 2 * own - 1, min(64, 2 * own))
            assert bound == 64 or bound & (bound - 1) == 0


def test_the_arguments_of_init() -> None:
    layer = SimpleNamespace(
        num_experts=12, experts_per_token=2, hidden_dim=64, max_num_tokens=5, in_dtype=torch.bfloat16
    )
    arguments = init_arguments(
        Rows("bf16", "nobody"), settings=common.Settings(), config=layer, device=torch.device("cpu"), microbatches=2
    )
    with moelink.init(**arguments) as ep:
        assert (ep.config.num_experts, ep.config.lanes, ep.config.layout) == (12, 2, "rank")
        assert ep.config.global_ids


def test_ids_of_experts_that_ignore_the_map_have_no_gaps() -> None:
    theirs = type("CPUExperts", (), {"__module__": LOCAL_IDS})
    assert takes_local_ids(theirs)
    assert takes_local_ids(type("Mine", (theirs,), {}))
    assert not takes_local_ids(type("TritonExperts", (), {}))
    ids = torch.tensor([[-1, 2, -1], [0, -1, 1], [-1, -1, -1], [2, 1, 0]], dtype=torch.int32)
    full = without_gaps(ids)
    assert full.dtype == torch.int32
    assert full.tolist() == [[2, 2, 2], [0, 1, 1], [0, 0, 0], [2, 1, 0]]


@needs_vllm
def test_vllms_experts_for_cpus_ignore_the_map() -> None:
    """They name ``expert_map`` among their parameters and nowhere else, so that their ids have to be local."""
    source = Path(str(find_spec(LOCAL_IDS).origin)).read_text()
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Name, ast.Attribute))]
    assert not [node for node in names if "expert_map" in (getattr(node, "id", ""), getattr(node, "attr", ""))]
    assert "expert_map:" in source


CASES = {
    "bf16": ranks.Case(),
    "fp8_block128": ranks.Case(rows="fp8_block128"),
    "fp8_token": ranks.Case(rows="fp8_token"),
    "fp32": ranks.Case(rows="fp32"),
    "replicas, not divisible": ranks.Case(experts=11, topk=3),
    "weights on the input": ranks.Case(topk=1, on_input=True),
    "local ids": ranks.Case(rows="fp32", experts=11, topk=3, local_ids=True),
}
SIZES = [24, 9, 2, 17]
BOUNDS = {"bf16": BF16, "fp32": 1e-5, "fp8_block128": BF16, "fp8_token": BF16}


@pytest.fixture(scope="module", params=[2, 4])
def by_rank(request: pytest.FixtureRequest) -> list[ranks.Everything]:
    """What each rank of vLLM answered to all cases."""
    return run_ranks(ranks.everything, request.param, list(CASES.values()), SIZES[: request.param], timeout=560)


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_the_modular_kernel(by_rank: list[ranks.Everything], name: str) -> None:
    case, place = CASES[name], list(CASES).index(name)
    for rank, everything in enumerate(by_rank):
        made = everything.answers[place]
        assert made.facts["class"] == "MoelinkPrepareAndFinalize"
        assert made.facts["format"] == case.rows
        assert made.facts["dispatchers"] == len(by_rank)
        assert made.facts["shared"]
        assert made.facts["reduced"]
        assert made.facts["overlap"] == [False, True], "vLLM overlaps shared experts itself without microbatches"
        assert made.facts["bounds"] == [24, 4], "24 is the most there is room for; 3 tokens have room for 4"
        assert made.rows == len(by_rank) * 4
        assert made.ours.shape == (SIZES[rank], ranks.HIDDEN)
        torch.testing.assert_close(made.ours.float(), made.truth, atol=BOUNDS[case.rows], rtol=0)
        assert (made.theirs is None) == (case.rows.startswith("fp8") or case.on_input or case.local_ids)
        if made.theirs is not None:
            torch.testing.assert_close(made.ours, made.theirs, atol=BOUNDS[case.rows], rtol=0)


@needs_vllm
@pytest.mark.timeout(600)
def test_two_microbatches_in_flight(by_rank: list[ranks.Everything]) -> None:
    for everything in by_rank:
        assert len(everything.overlapped) == 2
        for output, truth in everything.overlapped:
            torch.testing.assert_close(output.float(), truth, atol=BF16, rtol=0)


@needs_vllm
@pytest.mark.timeout(600)
def test_what_a_layer_refuses(by_rank: list[ranks.Everything]) -> None:
    for everything in by_rank:
        said = everything.refused
        assert "timeout: expected the same value on every rank" in said["settings"]
        assert all(f"rank {rank}" in said["settings"] for rank in range(len(by_rank)))
        assert "--all2all-backend: expected allgather_reducescatter" in said["backend"]
        assert "--enable-lora" in said["lora"]
        assert "apply_router_weight_on_input: expected False, or one expert for a token" in said["weights on input"]


@needs_vllm
@pytest.mark.timeout(600)
def test_the_log_of_vllm_says_that_experts_communicate_over_moelink(by_rank: list[ranks.Everything]) -> None:
    for everything in by_rank:
        (line,) = everything.said
        assert "experts communicate over moelink" in line


@needs_vllm
def test_the_entry_point_is_found_and_patches_nothing() -> None:
    from importlib.metadata import entry_points

    (found,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "moelink"]
    assert found.load() is plugin.register
