"""The time model, its constants and their provenance, the fit, and the comparison with measured times."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moelink.errors import ConfigError
from moelink.tools.plan import constants_file, model
from moelink.tools.plan import fit as fitting
from moelink.tools.plan.model import (
    FIELDS,
    Constants,
    PhaseConstants,
    Shape,
    load_constants,
    microseconds,
    packaged_constants,
    predict,
    read_constants,
)
from moelink.tools.plan.traffic import PHASES, LinkBytes
from moelink.tools.results import BENCHMARK, COLLECTIVE, SYMMETRIC
from tests.plan.plan_ranks import bench_document
from tests.support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
TRUTH = {
    "dispatch": PhaseConstants(floor_us=9.0, per_peer_us=0.5, nvlink_gb_per_s=310.0, memory_gb_per_s=2400.0),
    "combine": PhaseConstants(floor_us=7.5, per_peer_us=0.25, nvlink_gb_per_s=340.0, memory_gb_per_s=1900.0),
}
CASES = tuple((tokens, name) for tokens in (1, 8, 128, 1024, 4096) for name in ("uniform", "zipf"))


def links(nvlink: float, network: float = 0.0, memory: float = 0.0) -> LinkBytes:
    return LinkBytes(nvlink, network, memory, 0.0, 0.0)


def modelled(ranks: int, factor: float = 1.0) -> dict[str, Any]:
    """A result whose times are those of the model with TRUTH, times ``factor``."""
    empty = [{"tokens": t, "distribution": d, "dispatch": 1.0, "combine": 1.0} for t, d in CASES]
    points = fitting.points_of(bench_document(ranks, empty), "x", contender=SYMMETRIC)
    times = [compared.predicted_us for compared in fitting.compare(points, Constants(TRUTH))]
    for entry, (dispatch, combine) in zip(empty, zip(times[::2], times[1::2], strict=True), strict=True):
        entry |= {"dispatch": dispatch * factor, "combine": combine * factor}
    return bench_document(ranks, empty)


def write(folder: Path, name: str, document: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def test_the_sum_by_hand() -> None:
    constants = PhaseConstants(10.0, 0.5, 400.0, 50.0, 2000.0, 3.0)
    time = predict(links(4e6, 1e6, 2e6), constants, Shape(16, 2), "rank")
    assert time.latency_us == 10 + 0.5 * 15 + 3
    assert (time.nvlink_us, time.network_us, time.memory_us) == (10, 20, 1)
    assert time.total_us == 20.5 + 20 + 1
    assert (time.busiest_link, time.limit) == ("network", "latency")
    forwarded = predict(links(4e6, 1e6), constants, Shape(16, 2), "node", 6.0)
    assert forwarded.latency_us == 10 + 0.5 * 15 + 3 + 6
    assert predict(links(4e6), constants, Shape(16, 1), "node", 6.0).latency_us == 10 + 0.5 * 15, "nothing to forward"
    assert microseconds(1e6, 100) == 10


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    ("bytes_", "limit", "busiest"),
    [
        (links(100.0), "latency", "NVLink"),
        (links(40e6, 1e6), "NVLink", "NVLink"),
        (links(1e6, 9e6), "network", "network"),
        (links(1e6, 0.0, 9e9), "memory", "NVLink"),
        (links(0.0), "latency", None),
    ],
)
def test_the_largest_part_is_the_limit(bytes_: LinkBytes, limit: str, busiest: str | None) -> None:
    time = predict(bytes_, PhaseConstants(10.0, 0.0, 400.0, 50.0, 2000.0), Shape(8, 1), "rank")
    assert (time.limit, time.busiest_link) == (limit, busiest)


def test_a_missing_constant_leaves_no_time_and_is_named() -> None:
    known = PhaseConstants(floor_us=10.0, nvlink_gb_per_s=400.0)
    assert predict(links(1e6), known, Shape(8, 1), "rank").total_us == 12.5
    across = predict(links(1e6, 1e6), known, Shape(16, 2), "rank")
    assert (across.total_us, across.limit, across.missing) == (None, None, ("network_gb_per_s",))
    rates = PhaseConstants(nvlink_gb_per_s=400.0, network_gb_per_s=10.0)
    half = predict(links(1e6, 1e6), rates, Shape(16, 2), "rank")
    assert (half.total_us, half.busiest_link, half.missing) == (None, "network", ("floor_us",))


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    ("name", "value"),
    [("floor_us", -1.0), ("floor_us", float("nan")), ("hop_us", float("inf")), ("nvlink_gb_per_s", 0.0),
     ("network_gb_per_s", -3.0), ("memory_gb_per_s", "fast"), ("per_peer_us", True)],
)  # fmt: skip
def test_bad_constants_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        PhaseConstants(**{name: value})


def test_sources_say_what_was_measured_and_what_was_assumed(tmp_path: Path) -> None:
    document = fitting.fit(fitting.points_of(modelled(4), "a.json", contender=SYMMETRIC), contender=SYMMETRIC)
    found = load_constants(write(tmp_path, "h.json", document))
    assert found.are_measured
    assert found.sources["nvlink_gb_per_s"] == "fitted: h.json"
    assert "network_gb_per_s" not in found.sources
    assert "hop_us" not in found.sources
    assert found.ranks == (4,)
    assert found.description == "Some GPU, moelink symmetric by graph, fitted to a.json (2026-01-02, 4 ranks)"
    mixed = found.assume({"network_gb_per_s": (45.0, "--net"), "nvlink_gb_per_s": (None, "--nvlink")})
    assert not mixed.are_measured
    assert mixed.sources["network_gb_per_s"] == "assumed: --net 45"
    assert mixed.sources["nvlink_gb_per_s"] == "fitted: h.json"
    assert all(mixed.phases[phase].network_gb_per_s == 45 for phase in PHASES)
    assert not Constants().are_measured


def test_an_assumed_latency_replaces_all_of_a_measured_one() -> None:
    measured_ones = Constants(TRUTH, dict.fromkeys(("floor_us", "per_peer_us"), "fitted: x"), (2, 4))
    assumed = measured_ones.assume({"floor_us": (3.0, "--latency")})
    assert [assumed.phases[phase].per_peer_us for phase in PHASES] == [0, 0]
    assert assumed.sources == {"floor_us": "assumed: --latency 3"}
    assert predict(links(0.0), assumed.phases["dispatch"], Shape(8, 1), "rank").total_us == 3


def test_the_package_has_constants_only_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = fitting.fit(fitting.points_of(modelled(2), "a.json", contender=SYMMETRIC), contender=SYMMETRIC)
    monkeypatch.setattr(constants_file, "files", lambda _: tmp_path)
    assert packaged_constants() == Constants()
    write(tmp_path, "constants.json", document)
    assert packaged_constants().sources["floor_us"] == "fitted: moelink/tools/plan/constants.json"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "something"}, "a JSON file of moelink plan fit, with 'moelink plan constants' as kind"),
        ({"schema_version": 2}, "1 as schema_version, got '2 in"),
        ({"phases": {"dispatch": dict.fromkeys(FIELDS, 1.0)}}, "an object as phases.combine, got 'nothing"),
        ({"phases": dict.fromkeys(PHASES, {"floor_us": 1.0})}, "as phases.dispatch.per_peer_us, got 'nothing"),
        ({"phases": dict.fromkeys(PHASES, dict.fromkeys(FIELDS, -1.0))}, "floor_us"),
        ({"machine": None, "fitted_to": None}, "as machine, got 'None"),
        ({"fitted_to": []}, "one or more as fitted_to"),
    ],
)
def test_files_that_are_no_constants_are_refused(change: dict[str, Any], words: str) -> None:
    good = fitting.fit(fitting.points_of(modelled(2), "a.json", contender=SYMMETRIC), contender=SYMMETRIC)
    with pytest.raises(ConfigError, match=words):
        read_constants({**good, **change}, "file.json")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{")
    for name in ("no.json", "absent.json"):
        with pytest.raises(ConfigError, match="a JSON file of moelink plan fit"):
            load_constants(tmp_path / name)


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    points = [p for r in (2, 4, 8) for p in fitting.points_of(modelled(r), f"{r}.json", contender=SYMMETRIC)]
    document = fitting.fit(points, contender=SYMMETRIC)
    for phase in PHASES:
        for name, value in vars(TRUTH[phase]).items():
            found = document["phases"][phase][name]
            assert found == (None if value is None else pytest.approx(value, rel=1e-3)), (phase, name)
    assert document["largest_error"] < 1e-4
    assert (document["ranks"], document["formats"]) == ([2, 4, 8], ["fp8_block128"])
    assert [run["file"] for run in document["fitted_to"]] == ["2.json", "4.json", "8.json"]


def test_a_fit_to_one_number_of_ranks_leaves_out_what_it_cannot_tell() -> None:
    points = fitting.points_of(modelled(4), "4.json", contender=SYMMETRIC)
    uniform = [point for point in points if point.routing == "uniform"]
    document = fitting.fit(uniform, contender=SYMMETRIC)
    for phase in PHASES:
        entry = document["phases"][phase]
        assert entry["per_peer_us"] == 0
        assert entry["memory_gb_per_s"] is None
        assert entry["floor_us"] == pytest.approx(TRUTH[phase].floor_us + 3 * TRUTH[phase].per_peer_us, rel=1e-3)
        assert entry["nvlink_gb_per_s"] < TRUTH[phase].nvlink_gb_per_s, "memory's part is in it"
    assert document["largest_error"] < 1e-4


def test_a_fit_to_two_formats_tells_quantising_from_bytes() -> None:
    """Half the bytes in the same time: what quantised rows save on the links their senders spend."""
    empty = [
        {"tokens": tokens, "format": name, "dispatch": 1.0, "combine": 1.0}
        for name in ("fp8_block128", "bf16")
        for tokens in (1, 128, 4096)
    ]
    truth = {phase: dataclasses.replace(TRUTH[phase], memory_gb_per_s=None) for phase in PHASES}
    truth["dispatch"] = dataclasses.replace(truth["dispatch"], quantising_gb_per_s=600.0)
    points = fitting.points_of(bench_document(2, empty), "x", contender=SYMMETRIC)
    times = [compared.predicted_us for compared in fitting.compare(points, Constants(truth))]
    for entry, (dispatch, combine) in zip(empty, zip(times[::2], times[1::2], strict=True), strict=True):
        entry |= {"dispatch": dispatch, "combine": combine}
    points = fitting.points_of(bench_document(2, empty), "x", contender=SYMMETRIC)
    document = fitting.fit(points, contender=SYMMETRIC)
    assert document["phases"]["dispatch"]["quantising_gb_per_s"] == pytest.approx(600, rel=1e-3)
    assert document["phases"]["combine"]["quantising_gb_per_s"] is None
    assert document["largest_error"] < 1e-4
    alone = fitting.fit([point for point in points if point.layer.dispatch_format != "bf16"], contender=SYMMETRIC)
    assert alone["phases"]["dispatch"]["quantising_gb_per_s"] is None


def test_least_squares_by_hand() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0]])
    assert fitting.nonnegative_least_squares(matrix, np.array([3.0, 2.0])).tolist() == pytest.approx([2.5, 0])
    assert fitting.nonnegative_least_squares(matrix, np.array([3.0, 4.0])).tolist() == pytest.approx([2, 1])
    assert fitting.nonnegative_least_squares(matrix, np.array([-3.0, -4.0])).tolist() == [0, 0]
    assert fitting.nonnegative_least_squares(matrix, np.array([3.0, 2.0]), needed=1).tolist() == pytest.approx([0, 1.4])
    assert fitting.nonnegative_least_squares(matrix, np.array([-3.0, -4.0]), needed=1).tolist() == [0, 0]
    assert fitting.independent_columns(np.array([[1.0, 1, 2], [1, 2, 3], [1, 5, 6]])) == [0, 1]


def test_least_squares_is_optimal() -> None:
    """At the optimum no feasible direction lowers the error: the gradient is 0, or not negative where x is 0."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        matrix, target = rng.normal(size=(9, 4)), rng.normal(size=9)
        x = fitting.nonnegative_least_squares(matrix, target)
        gradient = matrix.T @ (matrix @ x - target)
        assert (x >= 0).all()
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-9
        assert (gradient[x == 0] > -1e-9).all()


def test_times_from_which_nothing_follows_are_refused() -> None:
    falling = [{"tokens": t, "dispatch": 100.0 / t, "combine": 100.0 / t} for t in (1, 10, 100)]
    with pytest.raises(ConfigError, match="grow with the bytes"):
        fitting.fit(fitting.points_of(bench_document(4, falling), "f.json", contender=SYMMETRIC), contender=SYMMETRIC)
    one = bench_document(4, falling[:1])
    with pytest.raises(ConfigError, match="at least two"):
        fitting.fit(fitting.points_of(one, "f.json", contender=SYMMETRIC), contender=SYMMETRIC)
    other = bench_document(2, falling, devices=["Another GPU"] * 2)
    both = [
        p
        for name, document in (("a", modelled(4)), ("b", other))
        for p in fitting.points_of(document, name, contender=SYMMETRIC)
    ]
    with pytest.raises(ConfigError, match="devices that are all the same"):
        fitting.fit(both, contender=SYMMETRIC)


def test_only_what_the_plan_can_describe_is_compared() -> None:
    times = [
        {"tokens": 8, "dispatch": 20.0, "combine": 30.0},
        {"tokens": 8, "dispatch": 20.0, "combine": 30.0, "distribution": "one-rank"},
        {"tokens": 8, "dispatch": 20.0, "combine": 30.0, "num_sms": 16},
        {"tokens": 9, "dispatch": 25.0, "combine": 35.0, "distribution": "zipf"},
        {"tokens": 8, "dispatch": 99.0, "combine": 99.0, "contender": COLLECTIVE},
    ]
    document = bench_document(4, times)
    points = fitting.points_of(document, "x.json", contender=SYMMETRIC)
    assert [(p.layer.tokens, p.routing, p.phase, p.measured_us) for p in points] == [
        (8, "uniform", "dispatch", 20), (8, "uniform", "combine", 30), (9, "zipf", "dispatch", 25),
        (9, "zipf", "combine", 35),
    ]  # fmt: skip
    assert {p.method for p in points} == {"graph"}
    (dispatch, _) = fitting.points_of(document, "x.json", contender=COLLECTIVE)
    assert (dispatch.measured_us, dispatch.layer.transport) == (99, "collective")
    for row in document["rows"]:
        for phase in row["phases"].values():
            phase["graph"] = None
    assert {p.method for p in fitting.points_of(document, "x", contender=SYMMETRIC)} == {"eager"}


def test_errors_are_relative_to_what_was_measured() -> None:
    points = fitting.points_of(modelled(8, factor=0.8), "x.json", contender=SYMMETRIC)
    compared = fitting.compare(points, Constants(TRUTH))
    assert [c.error for c in compared] == pytest.approx([0.25] * len(points))
    assert fitting.largest_error(compared) == pytest.approx(0.25)
    unknown = fitting.compare(points, Constants())
    assert {c.error for c in unknown} == {None}
    assert fitting.largest_error(unknown) is None


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "JSON files of moelink bench"),
        ({"benchmark": "another"}, "JSON files of moelink bench"),
        (bench_document(2, [], schema_version=2), "1 as schema_version, got '2"),
        (bench_document(2, [], device="cpu"), "times of GPUs"),
        (bench_document(2, [], gate={"passed": False}), "correctness gate passed"),
        (bench_document(2, []), "a list of one or more as cases"),
        (
            bench_document(2, [{"tokens": 8, "dispatch": 20.0, "combine": 30.0, "contender": COLLECTIVE}]),
            "none in these files",
        ),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, document: Any, words: str) -> None:
    path = write(tmp_path, "result.json", document)
    with pytest.raises(ConfigError, match=words):
        fitting.load_points([path], contender=SYMMETRIC)


FITTED_FORMATS = {"fp8_block128", "bf16"}
"""Those of the results that the constants were fitted to; other encoders take longer or shorter."""


def test_predictions_are_within_15_per_cent_of_what_was_measured() -> None:
    """The promise of docs/plan.md, for every result of the GPUs that the constants are of, in these formats, whatever
    its routing."""
    documents = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    gpu = [p for p, d in documents.items() if d.get("benchmark") == BENCHMARK and d.get("device") == "cuda"]
    gpu = [p for p in gpu if p.name != "decode_2xh200.json"]  # of kernels that loaded options repeatedly
    points = [
        p
        for p in fitting.load_points(gpu, contender=SYMMETRIC)
        if p.layer.tokens in (128, 4096) and p.layer.dispatch_format in FITTED_FORMATS and "H200" in p.run.device
    ]
    assert {p.run.ranks for p in points} >= {2, 4}
    wrong = [
        f"{c.point.run.file}: {c.point.run.ranks} ranks, {c.point.layer.tokens} tokens, {c.point.phase}: {c.error:+.1%}"
        for c in fitting.compare(points, packaged_constants())
        if c.error is None or abs(c.error) > 0.15
    ]
    assert not wrong


def test_packaged_constants_are_fitted_to_what_stands_here() -> None:
    """The package's file is what ``moelink plan fit`` makes of the results it names, and these are here."""
    packaged = json.loads((Path(model.__file__).parent / model.FILE.packaged).read_text())
    for run in packaged["fitted_to"]:
        assert json.loads((RESULTS / run["file"]).read_text())["commit"] == run["commit"]
    paths = [RESULTS / run["file"] for run in packaged["fitted_to"]]
    fitted = fitting.fit(fitting.load_points(paths, contender=SYMMETRIC), contender=SYMMETRIC)
    for phase in PHASES:
        for name, value in fitted["phases"][phase].items():
            assert packaged["phases"][phase][name] == (value if value is None else pytest.approx(value, rel=1e-4))
    exact = {name: value for name, value in fitted.items() if name not in ("phases", "largest_error")}
    assert {name: packaged[name] for name in exact} == exact
