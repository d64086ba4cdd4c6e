"""The benchmark of the layer: its truth, its contenders, its gate, and what is made of its result."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moelink
from moelink.formats import get_format
from moelink.nn.block_quantized import BlockQuantized, dequantize_weight, multiply_by_group
from moelink.nn.experts import grouped_matmul
from moelink.tools.results import LAYER_BENCHMARK
from moelink_bench import render
from moelink_bench.layer import data, make_layer_plan, peers, run
from moelink_bench.layer import result as tables
from moelink_bench.layer.contenders import LAYER, PARTS, MoelinkLayer, Part, Setting, chained, run_parts
from moelink_bench.layer.plan import SHAPES, LayerPlan
from moelink_bench.layer.result import layer_document
from moelink_bench.measure import PhaseSamples, by_part
from moelink_bench.presets import Settings
from moelink_bench.report import RankReport, RankRow
from moelink_bench.timing import WallClock
from tests.bench import bench_ranks
from tests.bench.bench_fakes import FakeClock, FakeDevice

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")
OURS, FP8 = "moelink bf16", "moelink fp8_block128"


def setting(plan: LayerPlan, rank: int = 0) -> Setting:
    weights = data.make_weights(TINY, seed=0, rank=rank, world_size=plan.ranks, device=CPU)
    return Setting(plan, TINY, weights, 5, rank, CPU, 20.0)


def tiny_input(tokens: int, rank: int = 0) -> data.LayerInput:
    return case_input("layer-smoke", tokens, rank)


def case_input(preset: str, tokens: int, rank: int = 0) -> data.LayerInput:
    (case,) = make_layer_plan(preset, ranks=1, device="cpu", cases=["tiny"], tokens=[tokens]).cases
    return data.make_inputs(case, Settings(calls=1), rank=rank, device=CPU)[0]


def run_bench_cli(*arguments: str) -> Any:
    from typer.testing import CliRunner

    from moelink.tools.cli import app

    return CliRunner().invoke(app.app, ["bench", *arguments])


# --- the truth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128"])
def test_the_truth_is_the_layer_token_by_token(fmt: str) -> None:
    given = tiny_input(3)
    weights = data.make_weights(TINY, seed=7, rank=0, world_size=1, device=CPU)
    codec = get_format(fmt)
    quantized = codec.quantize(given.x)
    x = codec.dequantize(quantized.payload, quantized.scales).double()
    probabilities = (given.x.double() @ given.router.weight.double().T).softmax(-1)
    want = torch.zeros_like(x)
    for token in range(3):
        best = sorted(range(TINY.num_experts), key=lambda e, t=token: -probabilities[t, e])[: TINY.topk]
        total = sum(probabilities[token, expert] for expert in best)
        for expert in best:
            gate, up = (weights.gate_up[expert].double() @ x[token]).chunk(2)
            y = weights.down[expert].double() @ (torch.nn.functional.silu(gate) * up)
            want[token] += probabilities[token, expert] / total * y
    assert data.worst_error(want, data.truth(given, TINY, fmt=fmt, seed=7)) < 1e-5
    assert data.worst_error(want, data.truth(given, TINY, fmt=fmt, seed=8)) > 0.5


def test_tokens_choose_evenly_or_by_zipf() -> None:
    """The busiest of six experts has little more than a sixth of the choices, or nearly half of them."""
    busiest = []
    for preset in ("layer-smoke", "layer-zipf"):
        inputs = [case_input(preset, 2048, rank) for rank in range(2)]
        assert torch.equal(inputs[0].router.weight, inputs[1].router.weight)
        assert not torch.equal(inputs[0].x, inputs[1].x)
        ids = torch.cat([data.choose(given).topk_ids for given in inputs])
        busiest.append(ids.flatten().bincount(minlength=TINY.num_experts).max().item() / ids.numel())
    assert busiest[0] < 0.25
    assert 0.3 < busiest[1] <= 0.5, "of a token's two choices at most one"


def test_ranks_share_the_experts_of_one_rank() -> None:
    whole = data.make_weights(TINY, seed=3, rank=0, world_size=1, device=CPU)
    parts = [data.make_weights(TINY, seed=3, rank=rank, world_size=4, device=CPU) for rank in range(4)]
    assert torch.equal(torch.cat([part.gate_up for part in parts]), whole.gate_up)
    assert torch.equal(torch.cat([part.down for part in parts]), whole.down)
    assert not torch.equal(whole.down[0], whole.down[1])


def test_the_error_is_that_of_the_worst_token() -> None:
    got, want = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[3.0, 5.0], [0.0, 2.0]])
    assert data.worst_error(got, want) == pytest.approx(34**-0.5)


# --- contenders -------------------------------------------------------------------------------------------------------


def test_a_chain_starts_again_from_its_input() -> None:
    parts = [Part("route", lambda given: given + 1), Part("dispatch", lambda at: 10 * at)]
    calls = chained(parts, 1)
    assert [call() for _, call in (*calls, *calls)] == [2, 20, 2, 20] == [2, run_parts(parts, 1)] * 2


def test_a_shape_without_room_has_a_row_for_everybody() -> None:
    plan = make_layer_plan("layer", ranks=1, device="cuda", cases=["tiny", "mixtral-8x7b"], tokens=[1, 2])
    rows = run.absent_rows(plan, SHAPES["mixtral-8x7b"], "out of memory")
    assert {(row.case, row.contender) for row in rows} == {(case, name) for case in (2, 3) for name in run.MAKERS}
    assert {row.reason for row in rows} == {"out of memory"}


def test_a_shape_with_the_experts_of_one_rank() -> None:
    given = {"device": "cuda", "cases": ["deepseek-v3"], "tokens": [8], "experts": 32}
    (case,) = make_layer_plan("layer", ranks=1, **given).cases
    assert (case.label, case.shape.num_experts) == ("DeepSeek-V3 with 32 experts, 8 tokens", 32)
    with pytest.raises(moelink.ConfigError, match="at most the 32 experts of DeepSeek-V3 with 32 experts"):
        make_layer_plan("layer", ranks=33, **given)
    with pytest.raises(moelink.ConfigError, match=r"num_groups: expected a divisor of num_experts = 12"):
        make_layer_plan("layer", ranks=1, **{**given, "experts": 12})


class FakeFlashInfer:
    """Its all-to-all of two ranks in one process: what rank ``rank`` receives, and what it gives to combine."""

    def __init__(self, rank: int, payloads: list[list[Tensor]]) -> None:
        self.rank, self.payloads = rank, payloads
        self.given: Tensor | None = None

    def dispatch(self, ids: Tensor, mine: list[Tensor], tokens: int, **options: int) -> list[Tensor]:
        assert options == {"invalid_token_expert_id": -1, "expert_id_payload_index": len(mine) - 2}
        assert all(torch.equal(a, b) for a, b in zip(mine, self.payloads[self.rank], strict=True))
        blocks = []
        for *rows, chosen, weights in self.payloads:
            here = (chosen // 3 == self.rank).any(1, keepdim=True)
            theirs = (x.where(here, float("nan") if x.is_floating_point() else 127) for x in rows)
            blocks.append((*theirs, chosen.where(here, -1), weights.where(here, float("nan"))))
        return [torch.stack(each) for each in zip(*blocks, strict=True)]

    def get_combine_payload_tensor_in_workspace(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        return torch.full((2, tokens, hidden), float("nan"), dtype=dtype)

    def combine(self, ready: Tensor, tokens: int, *, payload_in_workspace: bool) -> Tensor:
        assert payload_in_workspace
        self.given = ready.clone()
        return ready[self.rank]


def test_the_layer_over_flashinfer_permutes_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(make_layer_plan("layer-smoke", ranks=2, device="cpu"), device="cuda")
    inputs = [tiny_input(5, rank) for rank in range(2)]
    chosen = [data.choose(given) for given in inputs]
    payloads = [[g.x, c.topk_ids, c.topk_weights] for g, c in zip(inputs, chosen, strict=True)]
    fakes = [FakeFlashInfer(rank, payloads) for rank in range(2)]
    monkeypatch.setattr(peers, "flashinfer_refusal", lambda: "")
    monkeypatch.setattr(peers, "open_flashinfer", lambda *, rank, **sizes: fakes[rank])
    for rank in range(2):
        peers.FlashInferLayer(setting(plan, rank)).layer(inputs[rank])
    for rank in range(2):
        out = sum(fake.given[rank].float() for fake in fakes)
        # Tokens without an expert on a rank are not read by combine there, and are zeros.
        want = data.truth(inputs[rank], TINY, fmt="bf16", seed=0)
        assert data.worst_error(out, want) < peers.FlashInferLayer.tolerance


def in_fp8(monkeypatch: pytest.MonkeyPatch, ranks: int) -> Setting:
    """A setting of the second tiny shape, whose experts fit fp8, where products and compiled functions are torch's."""
    shape = dataclasses.replace(TINY, intermediate_size=256)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def multiply(*given: Any, likely_rows: int) -> None:
        assert likely_rows == -(-len(given[0]) // ranks)
        multiply_by_group(*given)

    monkeypatch.setattr(peers, "launch_kernel", multiply)
    plan = dataclasses.replace(make_layer_plan("layer-smoke", ranks=ranks, device="cpu"), device="cuda")
    weights = data.make_weights(shape, seed=0, rank=0, world_size=ranks, device=CPU)
    return Setting(plan, shape, weights, 5, 0, CPU, 20.0)


def test_the_layer_over_flashinfer_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    at = in_fp8(monkeypatch, 2)
    inputs = [tiny_input(5, rank) for rank in range(2)]
    payloads = []
    for given in inputs:
        (codes, scales), chosen = peers.quantize_blocks(given.x), data.choose(given)
        payloads.append([codes.view(torch.uint8), scales, chosen.topk_ids, chosen.topk_weights])
    fakes = [FakeFlashInfer(rank, payloads) for rank in range(2)]
    monkeypatch.setattr(peers, "flashinfer_refusal", lambda: "")
    monkeypatch.setattr(peers, "open_flashinfer", lambda *, rank, **sizes: fakes[rank])
    for rank in range(2):
        weights = data.make_weights(at.shape, seed=0, rank=rank, world_size=2, device=CPU)
        peers.FlashInferFp8Layer(dataclasses.replace(at, rank=rank, weights=weights)).layer(inputs[rank])
    for rank in range(2):
        out = sum(fake.given[rank].float() for fake in fakes)
        want = data.truth(inputs[rank], at.shape, fmt="fp8_block128", seed=0, fp8_experts=True)
        assert data.worst_error(out, want) < peers.FlashInferFp8Layer.tolerance


class FakeDeepGemm:
    """Its fused kernel for one rank, computed by torch from what the launch before it took."""

    def transform_weights_for_mega_moe_sm90(self, gate_up: Any, down: Any) -> Any:
        return ("gate_up", *gate_up), ("down", *down)

    def get_symm_buffer_for_mega_moe(self, group: Any, *sizes: int) -> Any:
        assert sizes == (TINY.num_experts, 5, TINY.topk, TINY.hidden_size, 256)
        return SimpleNamespace(x=None, x_sf=None, topk_idx=None, topk_weights=None, destroy=lambda: None)

    def mega_moe_pre_dispatch_sm90(
        self, x: Tensor, ids: Tensor, weights: Tensor, *places: Any, num_tokens: int
    ) -> None:
        assert (len(places), num_tokens, ids.dtype, weights.dtype) == (4, len(x), torch.int32, torch.float32)
        self.taken = x, ids, weights

    def fp8_mega_moe(self, out: Tensor, gate_up: Any, down: Any, buffer: Any) -> None:
        x, ids, weights = self.taken
        assert (gate_up[0], down[0]) == ("gate_up", "down")
        up, back = (dequantize_weight(BlockQuantized(*each[1:])) for each in (gate_up, down))
        codes, scales = peers.quantize_blocks(x)
        rows = get_format("fp8_block128").dequantize(codes, scales)
        out.zero_()
        for token, chosen in enumerate(ids.tolist()):
            for slot, expert in enumerate(chosen):
                gate, value = (up[expert] @ rows[token].float()).chunk(2)
                inner = peers.quantize_blocks((torch.nn.functional.silu(gate) * value)[None])
                out[token] += weights[token, slot] * (back[expert] @ get_format("fp8_block128").dequantize(*inner)[0])


def test_the_fused_kernel_of_deep_gemm_gets_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    at, given = in_fp8(monkeypatch, 1), tiny_input(5)
    monkeypatch.setattr(peers, "deep_gemm_refusal", lambda *_: "")
    monkeypatch.setitem(sys.modules, "deep_gemm", FakeDeepGemm())
    layer = peers.DeepGemmLayer(at)
    want = data.truth(given, at.shape, fmt="fp8_block128", seed=0, fp8_experts=True)
    assert data.worst_error(layer.layer(given), want) < layer.tolerance


def test_one_scale_a_row_is_within_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    at, given = in_fp8(monkeypatch, 1), tiny_input(5)

    def scaled(rows: Tensor, weight: Tensor, scales: Tensor, columns: Tensor, **options: Any) -> Tensor:
        assert (columns.shape, options["use_fast_accum"]) == (weight.shape[::2], True)
        numbers = weight.float() * columns[:, None]
        out = grouped_matmul(rows.float() * scales[:, None], starts_of(options["offs"]), numbers.transpose(1, 2))
        return out.to(options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    want = data.truth(given, at.shape, fmt="bf16", seed=0, fp8_experts=True)
    assert 2**-8 < data.worst_error(peers.ExchangeFp8Layer(at).layer(given), want) < peers.ExchangeFp8Layer.tolerance


def starts_of(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends])


def test_experts_in_fp8_and_their_parts_are_close_to_the_truth_that_rounds_as_they_do() -> None:
    shape = dataclasses.replace(TINY, intermediate_size=256)
    weights, given = data.make_weights(shape, seed=0, rank=0, world_size=1, device=CPU), tiny_input(5)
    layer = MoelinkLayer(
        shape, weights, fmt="fp8_block128", max_tokens=5, device=CPU, timeout=20.0, experts_backend="torch"
    )
    try:
        want, other = (data.truth(given, shape, fmt="fp8_block128", seed=0, fp8_experts=fp8) for fp8 in (True, False))
        with torch.no_grad():
            outputs = layer.layer(given), run_parts(layer.parts(), given)
        assert torch.equal(*outputs)
        assert data.worst_error(outputs[0], want) < layer.tolerance < data.worst_error(outputs[0], other)
        assert "experts in fp8 by torch" in layer.note
    finally:
        layer.close()


class WrongLayer:
    """Returns the layer, but its second call and all after that lack a part."""

    name, note, fmt, fp8_experts, tolerance, capturable = "wrong", "", "bf16", False, 2.0**-6, False

    def __init__(self, out: Tensor, right: int) -> None:
        self.out, self.right, self.calls = out, right, 0

    def layer(self, given: data.LayerInput) -> Tensor:
        self.calls += 1
        return self.out if self.calls <= self.right else 0.97 * self.out

    def parts(self) -> tuple[Part, ...]:
        return (Part("route", self.layer),)

    def check(self) -> str:
        return ""

    def close(self) -> None:
        return None


@pytest.fixture
def alone() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.quick("each takes milliseconds, and another of them fails without either comparison")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("right", [0, 1, 2])
def test_what_is_wrong_is_not_timed(right: int) -> None:
    """Neither as a whole nor as a chain of parts."""
    want = torch.ones(3, 4)
    contender = WrongLayer(want, right)
    settings = Settings(calls=1, samples=1, warmup=0, host_calls=1, host_samples=1, rotation_bytes=0)
    row, fault = run.run_contender(contender, [tiny_input(3)], want, settings, WallClock())
    if right == 2:
        assert (fault, row.reason, row.error) == ("", "", 0.0)
        assert len(row.phases[LAYER].eager) == len(row.phases["route"].eager) == 1
    else:
        assert row.error == pytest.approx(0.03, abs=1e-6)
        assert row.reason == f"not timed: {fault}"
        assert "is wrong by 0.03 of its length, more than the 0.015625 of roundings" in fault
        assert row.phases == {}
        assert contender.calls == 2


def test_a_result_that_is_no_number_is_wrong() -> None:
    out = torch.full((3, 4), float("nan"))
    assert run.wrong_by(WrongLayer(out, 2), tiny_input(3), torch.ones(3, 4)) == float("inf")


class TakingLayer(WrongLayer):
    """Can be captured; in a graph its two parts take 10 and 30 us."""

    capturable = True

    def __init__(self, device: FakeDevice, out: Tensor) -> None:
        super().__init__(out, 1000)
        self.device = device

    def takes(self, us: int) -> Any:
        def run_part(_: Any) -> Tensor:
            def node(_: int) -> None:
                self.device.now += us

            if self.device.capturing is not None:
                self.device.capturing.nodes.append(node)
            return self.layer(None)

        return run_part

    def parts(self) -> tuple[Part, ...]:
        return (Part("dispatch", self.takes(10)), Part("combine", self.takes(30)))


@pytest.mark.usefixtures("alone")
def test_a_graph_is_measured_whole_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    device, want = FakeDevice(monkeypatch), torch.ones(3, 4)
    contender = TakingLayer(device, want)
    settings = Settings(calls=2, samples=3, warmup=1, host_calls=2, host_samples=2)
    row, fault = run.run_contender(contender, [tiny_input(3)] * 2, want, settings, FakeClock(device))
    assert (fault, row.reason) == ("", "")
    assert row.phases[LAYER].graph == (1.5,) * 3, "of a clock that says 3 us for two calls"
    assert row.phases[LAYER].eager == (1.5,) * 2
    assert len(row.phases["dispatch"].eager) == 2
    assert {name: row.phases[name].pairs for name in ("dispatch", "combine")} == {
        "dispatch": (10.0,) * 3, "combine": (30.0,) * 3,
    }  # fmt: skip
    contender.right = 3  # those that are compared: the layer, and its two parts
    contender.calls = 0
    row, fault = run.run_contender(contender, [tiny_input(3)] * 2, want, settings, FakeClock(device))
    assert "the output of a replayed graph is wrong by 0.03" in fault
    assert (row.reason, row.phases) == (fault, {})


def test_steps_are_summed_to_parts() -> None:
    assert by_part(["dispatch", "combine"], [[1.0, 5.0, 3.0, 7.0]]) == {"dispatch": (2.0,), "combine": (6.0,)}


# --- from end to end --------------------------------------------------------------------------------------------------


def test_one_rank_by_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ensure_running()  # ranks of other tests come from the same server, and triton may be loaded there
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    out = tmp_path / "layer.json"
    done = run_bench_cli(
        "--preset", "layer-smoke", "--ranks", "1", "--tokens", "3", "--experts", "4", "--out", str(out)
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert (document["benchmark"], document["schema_version"], document["preset"]) == (
        LAYER_BENCHMARK,
        1,
        "layer-smoke",
    )
    assert document["gate"] == {"passed": True, "fault": ""}
    (case,) = document["cases"]
    assert (case["label"], case["max_tokens"], case["calls"]) == ("tiny with 4 experts, 3 tokens", 3, 1)
    rows = {row["contender"]: row for row in document["rows"]}
    assert list(rows) == list(run.MAKERS)
    reasons = {name: row["reason"] for name, row in rows.items() if row["reason"]}
    for name in (peers.EXCHANGE_FP8, *run.APART):
        assert reasons.pop(name) == "runs on CUDA devices only"
    assert set(reasons) <= {peers.TRANSFORMERS}, "where it is not installed"
    for name, row in rows.items():
        if row["reason"]:
            continue
        assert 0 < row["error"] < 2**-6
        assert row["eager"]["median"] > 0
        assert row["graph"] is None
        without = () if name == FP8 else ("convert",)
        expected = [] if name == peers.TRANSFORMERS else [part for part in PARTS if part not in without]
        assert list(row["parts"]) == expected
    assert [verdict["contender"] for verdict in document["verdicts"]] == [OURS, FP8]
    assert document["faster_everywhere"] == (not document["not_faster"])
    assert "correctness gate passed" in done.output
    assert "tiny with 4 experts, 3 tokens" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_two_ranks_over_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """moelink's symmetric kernels, interpreted, and the all-to-all of gloo."""
    monkeypatch.setattr(run, "layer_main", bench_ranks.interpreted_layer_main)
    names = (OURS, peers.TRANSFORMERS, peers.EXCHANGE, peers.DEEP_GEMM)
    plan = make_layer_plan("layer-smoke", ranks=2, device="cpu", tokens=[2], contenders=names)
    noted: list[dict[str, Any]] = []
    document = run.run_layer_bench(plan, commit="abc1234", note=noted.append)
    assert document["gate"]["passed"], document["gate"]
    rows = {row["contender"]: row for row in document["rows"]}
    assert list(rows) == list(names)
    (so_far,) = noted
    assert so_far["rows"] == document["rows"][:3], "before the one that runs in processes of its own"
    assert rows[OURS]["note"] == "symmetric transport, sized for 2 tokens, experts in bf16"
    assert rows[peers.TRANSFORMERS]["reason"] == "runs on one rank only"
    for name in (OURS, peers.EXCHANGE):
        assert 0 < rows[name]["error"] < 2**-6
        assert rows[name]["parts"]["combine"]["median"] > 0


def test_a_wrong_layer_of_moelink_shows_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "layer_main", bench_ranks.broken_layer_main)
    ensure_running()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    out = tmp_path / "red.json"
    done = run_bench_cli("--preset", "layer-smoke", "--ranks", "2", "--tokens", "3", "--no-peers", "--out", str(out))
    assert done.exit_code == 1
    assert "the correctness gate failed, no figures: tiny, 3 tokens: moelink bf16: rank 1: its output" in done.output
    assert not out.exists()


# --- plans and results ------------------------------------------------------------------------------------------------


def test_presets_are_what_the_docs_say() -> None:
    plan = make_layer_plan("layer", ranks=8, device="cuda")
    assert {case.shape.model for case in plan.cases} == {"DeepSeek-V3", "Qwen3-30B-A3B", "Mixtral-8x7B"}
    assert set(plan.shapes().values()) == {4096}
    assert [case.tokens for case in plan.cases if case.name == "qwen3-30b-a3b"] == [1, 4, 8, 32, 128, 512, 4096]
    assert [case.calls(plan.settings) for case in plan.cases if case.name == "deepseek-v3"] == [8, 8, 8, 8, 4, 2]
    for wrong in ({"cases": ["gpt"]}, {"tokens": [0]}, {"ranks": 9}):
        with pytest.raises(moelink.ConfigError):
            make_layer_plan("layer", **{"ranks": 1, "device": "cuda", **wrong})
    with pytest.raises(moelink.ConfigError, match="contender"):
        run.takes_part(make_layer_plan("layer", ranks=1, device="cuda", contenders=["mine"]))
    with pytest.raises(moelink.ConfigError, match="preset"):
        make_layer_plan("decode", ranks=1, device="cuda")


@pytest.mark.quick("each is refused elsewhere, in milliseconds")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--preset", "layer-smoke", "--format", "bf16"),
        ("--preset", "layer-smoke", "--num-sms", "8"),
        ("--preset", "smoke", "--case", "tiny"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: tuple[str, ...]) -> None:
    done = run_bench_cli(*arguments)
    assert isinstance(done.exception, moelink.ConfigError), done.output
    assert str(done.exception).startswith(f"{arguments[2].removeprefix('--')}: ")


def synthetic() -> dict[str, Any]:
    """A result of a GPU: moelink faster at 1 token, slower at 4; transformers is not taken apart."""
    plan = make_layer_plan("layer", ranks=1, device="cuda", cases=["qwen3-30b-a3b"], tokens=[1, 4])
    rows = []
    for index, (ours, theirs) in enumerate(((90.0, 100.0), (120.0, 110.0))):
        parts = {"dispatch": PhaseSamples(pairs=(20.0, 20.0)), "product 1": PhaseSamples(pairs=(80.0, 80.0))}
        whole, alone, sent = (
            {LAYER: PhaseSamples(graph=(graph,) * 2, eager=(eager,) * 2)}
            if graph
            else {LAYER: PhaseSamples(eager=(eager,) * 2)}
            for graph, eager in ((ours, 400.0), (theirs, 50.0), (None, 500.0))
        )
        rows += [
            RankRow(index, OURS, "a note", "", {**parts, **whole}, 0.004),
            RankRow(index, peers.TRANSFORMERS, "", "", alone, 0.005),
            RankRow(index, peers.EXCHANGE, "", "", sent, 0.005),
            RankRow(index, peers.FLASHINFER_LAYER, reason="flashinfer is not installed"),
        ]
    made = RankReport("Some GPU", "", rows=tuple(rows))
    report = RankReport.decode(json.loads(json.dumps(dataclasses.asdict(made))))
    document: dict[str, Any] = layer_document(plan, [report], commit="abc1234", command="moelink bench --preset layer")
    return json.loads(json.dumps(document))  # type: ignore[no-any-return]


def test_bf16_is_compared_with_bf16_and_fp8_with_all() -> None:
    plan = make_layer_plan("layer", ranks=1, device="cuda", cases=["qwen3-30b-a3b"], tokens=[1])
    times = {OURS: 90.0, FP8: 50.0, peers.EXCHANGE: 100.0, peers.DEEP_GEMM: 60.0}
    rows = tuple(RankRow(0, name, "", "", {LAYER: PhaseSamples(graph=(us,) * 2)}, 0.01) for name, us in times.items())
    document = layer_document(plan, [RankReport("Some GPU", "", rows=rows)], commit=None, command="")
    others = [[duel["contender"] for duel in verdict["duels"]] for verdict in document["verdicts"]]
    assert others == [[peers.EXCHANGE], [peers.EXCHANGE, peers.DEEP_GEMM]]
    assert document["faster_everywhere"] is True


def test_verdicts_compare_by_the_same_method() -> None:
    document = synthetic()
    first, second = document["verdicts"]
    assert [tuple(duel.values()) for duel in first["duels"]] == [
        (peers.TRANSFORMERS, "graph", 90.0, 100.0), (peers.EXCHANGE, "eager", 400.0, 500.0),
    ]  # fmt: skip
    assert (first["faster"], second["faster"]) == (True, False)
    assert document["faster_everywhere"] is False
    assert document["not_faster"] == [second["text"]]
    assert second["text"].startswith("Qwen3-30B-A3B, 4 tokens, moelink bf16: NOT faster (0.92 times as fast as")


def test_results_become_tables() -> None:
    document = synthetic()
    lines = tables.times_table(document, spread=False).splitlines()
    assert lines[0] == "| layer, tokens per rank | moelink bf16 | transformers grouped_mm | sort + all-to-all |"
    assert lines[2] == "| Qwen3-30B-A3B, 1 | **90.0** | 100.0 | 500.0\\* |"
    assert lines[3] == "| Qwen3-30B-A3B, 4 | 120.0 | **110.0** | 500.0\\* |"
    assert "| Qwen3-30B-A3B, 1 token | 20.0 | 80.0 |" in tables.parts_table(document)
    assert "top-8 of 128 experts of intermediate size 768" in render.layer_summary([document])
    page = render.page([], [("layer_1xgpu.json", document)])
    for words in ("## layer, 1 rank", "`benchmarks/results/layer_1xgpu.json`", "* moelink bf16: a note.", "NOT faster"):
        assert words in page
    assert render.layer_summary([]) == ""
    few = render.layer_summary([render.with_cases(document, ["Qwen3-30B-A3B, 4 tokens"])])
    assert "| Qwen3-30B-A3B, 4 | 120.0 | **110.0** | 500.0\\* |" in few
    assert "| Qwen3-30B-A3B, 1 |" not in few
    alone = render.layer_summary([render.with_cases(document, ["Qwen3-30B-A3B, 4 tokens"], [OURS])])
    assert "| Qwen3-30B-A3B, 4 | **120.0** |\n" in alone
    remarked = {**document, "remark": "Disturbed."}
    for text in (render.layer_summary([remarked]), render.page([], [("layer_1xgpu.json", remarked)])):
        assert text.count("\n\nDisturbed.") == 1


def test_results_are_drawn(tmp_path: Path) -> None:
    from moelink_bench.layer.picture import segments

    document = synthetic()
    ours, theirs, one_by_one = document["rows"][:3]
    assert segments(ours, 80.0) == [("dispatch", pytest.approx(18.0)), ("product 1", pytest.approx(72.0))]
    assert segments(theirs, 100.0) == [("", 100.0)]
    assert segments(one_by_one, 100.0) == [("", 100.0)], "of 500"
    path = tmp_path / "layer.json"
    path.write_text(json.dumps(document))
    pytest.importorskip("matplotlib")
    done = run_bench_cli("plot", str(path), "--out", str(tmp_path / "layer.svg"))
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "layer.svg").read_text()
    for words in ("Qwen3-30B-A3B", "moelink bf16", "not taken apart", "500*"):
        assert words in drawn
    done = run_bench_cli("plot", str(path), str(path), "--out", str(tmp_path / "two.svg"))
    assert isinstance(done.exception, moelink.ConfigError)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(500)
def test_a_small_run_on_gpus(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run_bench_cli("--preset", "layer", "--case", "tiny", "--tokens", "16", "--samples", "4", "--out", str(out))
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    for row in document["rows"]:
        if row["contender"].startswith("moelink"):
            assert row["reason"] == ""
            assert row["graph"]["median"] > 0
            assert row["parts_by"] == "graph"
