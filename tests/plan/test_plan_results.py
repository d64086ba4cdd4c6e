"""Every result in benchmarks/results is compared with the plan's predictions, or its reason why not is here.

A tolerance is what the predictions are off by at most, in per cent of what was measured; docs/plan.md names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moelink.tools.plan import experts_fit, fit, packaged_constants, packaged_expert_constants
from moelink.tools.plan.check_layer import compare_layer
from moelink.tools.plan.constants_file import Run
from moelink.tools.plan.experts import WEIGHT_BYTES, ExpertConstants, Load, product_time
from moelink.tools.plan.experts_fit import expert_points, fit_experts, predicted
from moelink.tools.plan.fit import Point, compare, left_out, points_of
from moelink.tools.plan.traffic import PHASES, Layer
from moelink.tools.results import BENCHMARK, COLLECTIVE, SYMMETRIC, read_result, sizes_of
from moelink_bench import picture
from moelink_bench.layer import picture as layer_plots
from tests.support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
Error = tuple[str, float]
"""What was compared, and predicted / measured - 1."""


def document_of(file: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / file).read_text())
    return document


def of_bench(document: dict[str, Any], file: str) -> Iterator[Error]:
    """Dispatch and combine by moelink's symmetric transport. Its encoders of 4-bit formats were not fitted."""
    for compared in compare(points_of(document, file, contender=SYMMETRIC), packaged_constants()):
        point = compared.point
        assert compared.error is not None
        yield f"{point.layer.dispatch_format} {point.phase} of {point.layer.tokens}, {point.routing}", compared.error


def of_layer(document: dict[str, Any], file: str) -> Iterator[Error]:
    """Experts and the whole layer, with constants of the same machine: the package's, or fitted to the file itself."""
    experts = packaged_expert_constants().formats
    if "H200" not in document["devices"][0]:
        made = fit_experts(expert_points(document, file))["formats"]
        experts = {fmt: ExpertConstants(**constants) for fmt, constants in made.items()}
    for compared in compare_layer(document, file, constants=packaged_constants(), experts=experts):
        point = compared.point
        assert compared.error is not None
        yield f"{point.phase}, {point.layer.tokens} tokens, {point.layer.dispatch_format}", compared.error


def of_experts(document: dict[str, Any], file: str) -> Iterator[Error]:
    """Each product with given rows."""
    for point in expert_points(document, file):
        us = predicted(point, packaged_expert_constants().formats[point.format])
        yield f"{point.what}, {point.format}", us / point.measured_us - 1


def of_experts_sweep(document: dict[str, Any], file: str) -> Iterator[Error]:
    """Each product in fp8 with the fastest tiles of its load, which the kernel has taken since."""
    hidden, inner = document["shape"]["hidden"], document["shape"]["intermediate"]
    best: dict[tuple[str, str], float] = {}
    for row in document["rows"]:
        if row["us"] is not None:
            key = (row["product"], row["load"])
            best[key] = min(best.get(key, row["us"]), row["us"])
    for (product, load), us in best.items():
        columns, width = (2 * inner, hidden) if product == "gate_up" else (hidden, inner)
        time = product_time(
            Load.of_rows(sizes_of(load, document["shape"]["experts"], document["most_rows"])),
            packaged_expert_constants().formats["fp8_block128"], columns=columns, inner=width,
            weight_bytes=WEIGHT_BYTES["fp8_block128"],
        )  # fmt: skip
        yield f"{product}, {load} rows an expert", time.total_us / us - 1


def of_transcript(document: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[Error]:
    """Rows {format, tokens, dispatch or combine: us}."""
    run = Run("", document.get("commit"), "", ", ".join(set(document["devices"])), document["ranks"])
    sizes = {name: document[name] for name in ("hidden_size", "num_experts", "topk")}
    for row in rows:
        layer = Layer(**sizes, tokens=row["tokens"], dispatch_format=row["format"])
        for phase in PHASES:
            if phase in row:
                (compared,) = compare([Point(run, layer, "uniform", phase, "graph", row[phase])], packaged_constants())
                assert compared.error is not None
                yield f"{row['format']} {phase} of {row['tokens']}", compared.error


def of_pairs(document: dict[str, Any], file: str) -> Iterator[Error]:
    """The newest commit of those of the file's rows, which else have none."""
    newest = document["rows"][-1].get("commit")
    return of_transcript(document, [row for row in document["rows"] if row.get("commit") == newest])


def of_sweep(document: dict[str, Any], file: str) -> Iterator[Error]:
    """The fastest launch settings of each size, at a commit of before the kernels that the constants are of."""
    best: dict[tuple[str, str, int], float] = {}
    for row in document["rows"]:
        key = (row["phase"], row["format"], row["tokens"])
        best[key] = min(best.get(key, row["us"]), row["us"])
    rows = [{"format": fmt, "tokens": tokens, phase: us} for (phase, fmt, tokens), us in best.items()]
    return of_transcript(document, rows)


Compare = Callable[[dict[str, Any], str], Iterator[Error]]

COMPARED: dict[str, tuple[Compare, float]] = {
    "decode_2xh200.json": (of_bench, 24),
    "decode_after_2xh200.json": (of_bench, 14),
    "decode_before_2xh200.json": (of_bench, 12),
    "decode_4xh200.json": (of_bench, 12),
    "prefill_2xh200.json": (of_bench, 15),
    "prefill_before_2xh200.json": (of_bench, 15),
    "prefill_4xh200.json": (of_bench, 26),
    "decode_2xh100.json": (of_bench, 27),
    "prefill_2xh100.json": (of_bench, 25),
    "layouts_2xh100.json": (of_bench, 28),
    "decode_4xh100.json": (of_bench, 20),
    "prefill_4xh100.json": (of_bench, 15),
    "layouts_4xh100.json": (of_bench, 20),
    "formats_2xh200.json": (of_bench, 45),
    "formats_before_2xh100.json": (of_bench, 92),
    "formats_after_2xh100.json": (of_bench, 49),
    "skew_2xh200.json": (of_bench, 13),
    "sms_2xh200.json": (of_bench, 11),
    "sms_before_2xh200.json": (of_bench, 10),
    "sms_few_2xh200.json": (of_bench, 11),
    "sms_2xh100.json": (of_bench, 13),
    "sms_4xh100.json": (of_bench, 13),
    "pairs_2xh200.json": (of_pairs, 33),
    "pairs_house_before_2xh200.json": (of_pairs, 24),
    "pairs_house_2xh200.json": (of_pairs, 24),
    "sweep_bf16_2xh200.json": (of_sweep, 35),
    "sweep_fp8_2xh200.json": (of_sweep, 43),
    "experts_h200.json": (of_experts, 26),
    "experts_deep_gemm_h200.json": (of_experts, 26),
    "experts_sweep_h200.json": (of_experts_sweep, 17),
    "layer_1xh200.json": (of_layer, 29),
    "layer_2xh100.json": (of_layer, 30),
    "layer_before_2xh200.json": (of_layer, 26),
    "layer_qwen3_2xh200.json": (of_layer, 44),
    "layer_qwen3_before_2xh200.json": (of_layer, 43),
    "layer_deepseek_v3_2xh200.json": (of_layer, 27),
    "layer_qwen3_fused_2xh200.json": (of_layer, 45),
    "layer_deepseek_v3_fused_2xh200.json": (of_layer, 27),
    "layer_qwen3_fused_1xh200.json": (of_layer, 63),
    "layer_deepseek_v3_fused_1xh200.json": (of_layer, 29),
    "layer_mixtral_1xh200.json": (of_layer, 27),
    "layer_qwen3_fused_before_1xh200.json": (of_layer, 62),
    "layer_deepseek_v3_fused_before_1xh200.json": (of_layer, 25),
    "layer_deepseek_v3_32_experts_1xh200.json": (of_layer, 42),
    "layer_deepseek_v3_64_experts_1xh200.json": (of_layer, 36),
    "layer_deepseek_v3_128_experts_1xh200.json": (of_layer, 34),
    "layer_qwen3_more_tokens_1xh200.json": (of_layer, 35),
    "layer_deepseek_v3_more_tokens_1xh200.json": (of_layer, 14),
    "layer_zipf_qwen3_fused_1xh200.json": (of_layer, 167),
    "experts_gluon_h200.json": (of_experts, 26),
}
"""By file: how, and the tolerance in per cent."""

HOST = "time of the host, which the plan leaves out"
KERNEL = "time of single kernels on one GPU, without their peers"
NOT_COMPARED = {
    "collective_vs_topk": "of CPUs; the model is of GPUs",
    "refused calls": "of CPUs; the model is of GPUs",
    "batch_invariance": "of CPUs; the model is of GPUs",
    "experiments": "kernels of changes that were not kept",
    "layer tiles": "forms of a layer with its router, kept and not kept; layer_qwen3_2xh200.json is compared",
    "hardware counters": KERNEL,
    "stalls": KERNEL,
    "roles": KERNEL,
    "moelink bench roles": KERNEL,
    "launchers": KERNEL,
    "router": KERNEL,
    "mxfp4": "weights in 4 bits, which the plan leaves out",
    "host_time": HOST,
    "layer_host_time": HOST,
    "startup": "compiling, which the plan leaves out",
    "generate": "whole models, eager, with the host's time",
    "overlap": "kernels beside one another, which the plan leaves out",
    "training": "gradients and their library calls, which the plan leaves out",
    "ops_overhead": HOST,
    "membership": "pauses between calls, which the plan leaves out",
    "quotients": "counts of roundings, no time",
    "layer": "routing, which the plan leaves out, is not told apart from the layer; layer_1xh200.json does",
    "frameworks": "layers of a framework, with the host's time, its own steps and gradients, which the plan leaves out",
}
"""By benchmark: why the plan says nothing about its times."""


def test_every_result_is_compared_or_has_a_reason() -> None:
    """Results of dispatch, combine, experts and layers need an entry of their own."""
    there = {path.name: document_of(path.name).get("benchmark") for path in RESULTS.glob("*.json")}
    assert COMPARED.keys() <= there.keys()
    assert not {there[file] for file in COMPARED} & NOT_COMPARED.keys()
    assert {"moelink bench", "moelink bench layer", "experts"} <= {there[file] for file in COMPARED}
    unlisted = [file for file, benchmark in there.items() if file not in COMPARED and benchmark not in NOT_COMPARED]
    of_gpus = [file for file in unlisted if document_of(file).get("device") != "cpu"]
    assert not of_gpus, "compare them, or say why not"


@pytest.mark.quick("each case checks another file")
@pytest.mark.parametrize("file", COMPARED)
def test_predictions_are_within_the_tolerance_of_the_file(file: str) -> None:
    how, tolerance = COMPARED[file]
    errors = list(how(document_of(file), file))
    assert errors
    wrong = [f"{what}: {error:+.1%}" for what, error in errors if abs(error) > tolerance / 100]
    assert not wrong, f"more than {tolerance} % off in {file}"
    largest = max(abs(error) for _, error in errors)
    assert largest > 0.6 * tolerance / 100, f"the tolerance of {file} could be {100 * largest:.0f} %"


@pytest.mark.parametrize("file", [file for file, (how, _) in COMPARED.items() if how is of_bench])
def test_no_case_is_left_out_without_a_reason(file: str) -> None:
    """Every row of moelink's symmetric transport is compared, in both phases, or is of a case that the model cannot
    describe. The collective transport has constants of its own, which the package does not hold."""
    document = document_of(file)
    assert document["benchmark"] == BENCHMARK
    rows = [row for row in document["rows"] if row["contender"] == SYMMETRIC]
    reasons = [left_out(document["cases"][row["case"]]["case"]) for row in rows]
    compared = points_of(document, file, contender=SYMMETRIC)
    assert len(compared) == 2 * reasons.count("")
    assert {reason.split(",")[0].split(" ")[0] for reason in reasons if reason} <= {"routing", "a", "layout"}
    assert points_of(document, file, contender=COLLECTIVE)


@pytest.mark.parametrize("forms", [{**fit.FORMS, **experts_fit.FORMS}, {**picture.FORMS, **layer_plots.FORMS}])
def test_results_have_the_forms_that_commands_read(forms: dict[str, Any]) -> None:
    """Those of ``moelink plan``, and those of ``moelink bench plot``."""
    files = [path for path in RESULTS.glob("*.json") if document_of(path.name).get("benchmark") in forms]
    assert len(files) > 15
    for path in files:
        assert read_result(path, forms) == document_of(path.name)


def test_reasons_say_what_the_model_lacks() -> None:
    case = {"distribution": "uniform", "num_sms": None}
    assert left_out(case) == ""
    for change in ({"distribution": "one-rank"}, {"num_sms": 16}, {"layout": "rank"}):
        assert len(left_out({**case, **change})) > 20


def test_docs_name_the_tolerances() -> None:
    """The table of docs/plan.md has a row for each tolerance here."""
    page = (RESULTS.parent.parent / "docs" / "plan.md").read_text()
    for file, (_, tolerance) in COMPARED.items():
        assert f"| `{file}` | {tolerance} % |" in page
