"""The time of experts: by hand, the fit, its file, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moelink.errors import ConfigError
from moelink.tools.plan import Layer, MachineExperts, make_plan, to_document
from moelink.tools.plan import experts as model
from moelink.tools.plan import experts_fit as fitting
from moelink.tools.plan.experts import (
    FIELDS,
    ExpertConstants,
    Load,
    experts_time,
    load_expert_constants,
    packaged_expert_constants,
    product_time,
    read_expert_constants,
    slowest,
    work_of,
)
from moelink.tools.plan.routing import Trace, Uniform
from tests.support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
TRUTH = ExpertConstants(5.0, 2000.0, 800.0, 3000.0, 6.0, 2500.0)  # crossover: 200 rows of one byte


def points(fmt: str = "fp8_block128", device: str = "Some GPU") -> list[fitting.ExpertPoint]:
    """Measured by the model with TRUTH."""
    run, made = fitting.Run("x.json", "abc", "2026-01-02", device, 1), []
    for rows in ([4] * 32, [64] * 4, [128] * 32, [1024] * 32, [2048, 512, 64, 8, 0, 0, 0, 4]):
        load = Load.of_rows(rows)
        for columns, inner in ((4096, 7168), (7168, 2048), (0, 2048)):
            point = fitting.ExpertPoint(run, "", fmt, load, columns, inner, 0.0)
            us = fitting.predicted(point, TRUTH)
            made.append(fitting.ExpertPoint(run, "", fmt, load, columns, inner, us))
    return made


def test_a_product_by_hand() -> None:
    """Two experts, 1000 x 1000, one byte: one of 1 row by its weights, one of 500, four tiles, by arithmetic."""
    load = Load.of_rows([1, 500, 0])
    work = work_of(load, columns=1000, inner=1000, weight_bytes=1, crossover=200)
    assert (work.weights, work.operations, work.rows) == (1e6, 2 * 512e6, 501 * 3000)
    time = product_time(load, TRUTH, columns=1000, inner=1000, weight_bytes=1)
    assert (time.latency_us, time.weights_us, time.arithmetic_us) == (5, pytest.approx(0.5), pytest.approx(1.28))
    assert time.rows_us == pytest.approx(501 * 3000 / 3000 / 1e3)
    assert time.limit == "latency"
    wider = work_of(load, columns=1000, inner=1000, weight_bytes=8, crossover=200)
    assert (wider.weights, wider.operations) == (16e6, 0), "512 rows are few for weights of 8 bytes"


def test_experts_are_two_products_and_an_activation() -> None:
    load = Load.of_rows([1, 500])
    whole = experts_time(load, TRUTH, hidden_size=1000, intermediate_size=200, weight_bytes=1)
    both = [product_time(load, TRUTH, columns=n, inner=k, weight_bytes=1) for n, k in ((400, 1000), (1000, 200))]
    assert whole.activation_us == pytest.approx(501 * 6 * 200 / 2500 / 1e3)
    assert whole.total_us == pytest.approx(sum(time.total_us for time in both) + 6 + whole.activation_us)


def test_expected_rows_are_counted() -> None:
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.random((500, 4, 12)), axis=2)[:, :, :3]  # 500 times 4 tokens of top-3 of 12
    counts = np.array([np.bincount(draw.ravel(), minlength=12) for draw in ids])
    loads = Load.of_ranks(Uniform(12, 3), num_experts=12, ranks=2, tokens=2)
    assert [load.rows.size for load in loads] == [6, 6]
    assert loads[0].rows.tolist() == pytest.approx([1.0] * 6)
    assert loads[0].tiled.tolist() == pytest.approx((loads[0].rows + 64 * loads[0].active).tolist())
    assert float(loads[0].active[0]) == pytest.approx((counts > 0).mean(), abs=0.02)
    assert len(Load.of_ranks(Uniform(2, 1), num_experts=2, ranks=4, tokens=1)) == 2, "ranks without experts"


def test_the_slowest_rank_counts() -> None:
    ids = np.array([[2, 3]] * 10)
    loads = Load.of_ranks(Trace(ids), num_experts=4, ranks=2, tokens=100)
    load, time = slowest(loads, TRUTH, hidden_size=512, intermediate_size=256, weight_bytes=1)
    assert float(load.rows.sum()) == 400
    assert time.total_us > experts_time(
        loads[0], TRUTH, hidden_size=512, intermediate_size=256, weight_bytes=1
    ).total_us  # fmt: skip


def test_the_plan_has_the_layer() -> None:
    layer = Layer(
        num_experts=256, topk=8, hidden_size=7168, tokens=128, intermediate_size=2048, expert_format="fp8_block128"
    )
    machine = MachineExperts({"fp8_block128": TRUTH}, "fitted: x", "Some GPU")
    plan = make_plan(layer, [8, 16], ranks_per_node=8, routing=Uniform(256, 8), experts=machine)
    found = [size.layer for size in plan.sizes]
    assert all(entry is not None for entry in found)
    assert [round(entry.rows) for entry in found if entry] == [1024, 1024]
    document = to_document(plan)
    assert document["sizes"][0]["layer"]["experts"]["total_us"] > document["sizes"][1]["layer"]["experts"]["total_us"]
    assert document["sizes"][0]["layer"]["total_us"] == {"rank": None, "node": None}, "dispatch has no time"
    unknown = make_plan(layer, [8], ranks_per_node=8, routing=Uniform(256, 8)).sizes[0].layer
    assert unknown is not None
    assert (round(unknown.rows), unknown.experts) == (1024, None)


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    document = fitting.fit_experts(points())
    assert document["formats"].keys() == {"fp8_block128"}
    for name, value in vars(TRUTH).items():
        assert document["formats"]["fp8_block128"][name] == pytest.approx(value, rel=1e-3), name
    assert document["largest_error"] < 1e-4


def test_packaged_constants_are_fitted_to_what_stands_here() -> None:
    packaged = json.loads((Path(model.__file__).parent / model.FILE.packaged).read_text())
    paths = [RESULTS / run["file"] for run in packaged["fitted_to"]]
    fitted = fitting.fit_experts(fitting.load_expert_points(paths))
    for fmt, constants in fitted["formats"].items():
        assert packaged["formats"][fmt] == pytest.approx(constants, rel=1e-4)
    same = {name: value for name, value in fitted.items() if name not in ("formats", "largest_error")}
    assert {name: packaged[name] for name in same} == same
    assert set(packaged_expert_constants().formats) == {"bf16", "fp8_block128"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "something"}, "plan fit-experts, with 'moelink plan expert constants' as kind"),
        ({"schema_version": 2}, "1 as schema_version, got '2 in"),
        ({"formats": {"fp8_block128": {"tflop_per_s": 1.0}}}, "as formats.fp8_block128.product_floor_us, got 'nothing"),
        ({"formats": {"mxfp8": dict.fromkeys(FIELDS, 1.0)}}, "formats bf16 and fp8_block128, got 'mxfp8"),
        ({"formats": {"bf16": dict.fromkeys(FIELDS, 0.0)}}, "a positive number .* as formats.bf16.weights_gb_per_s"),
        ({"fitted_to": None}, "as fitted_to, got 'None"),
    ],
)
def test_files_that_are_no_constants_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_expert_constants({**fitting.fit_experts(points()), **change}, "file.json")


def test_results_from_which_nothing_follows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least four products"):
        fitting.fit_experts(points()[:3])
    with pytest.raises(ConfigError, match="devices that are all the same"):
        fitting.fit_experts(points() + points(device="Another"))
    constant = [fitting.ExpertPoint(p.run, "", p.format, p.load, p.columns, p.inner, 10.0) for p in points()]
    with pytest.raises(ConfigError, match="grow with"):
        fitting.fit_experts(constant)
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON files of moelink bench layer or experts, got .*no.json"):
        fitting.load_expert_points([tmp_path / "no.json"])
    with pytest.raises(ConfigError, match="as benchmark, got .*'moelink bench' in decode_2xh200.json"):
        fitting.load_expert_points([RESULTS / "decode_2xh200.json"])
    with pytest.raises(ConfigError, match="a JSON file of moelink plan fit-experts"):
        load_expert_constants(tmp_path / "absent.json")
