"""Fit the model's constants to results of ``moelink bench``, and compare its predictions with them.

The model is linear in the unknowns: with bytes L over NVLink, M in memory, Q to quantise, and W ranks of one node,

    time = floor + per_peer (W - 1) + L / NVLink rate + M / memory rate + Q / quantising rate

so floor, per_peer and the three reciprocals are found by least squares, not below 0. Errors are weighted by 1 /
measured time: one per cent counts the same at 10 us and at 1000. Results of one number of ranks cannot tell per_peer
from floor, nor, with uniform routing, memory from NVLink, nor those of one format quantising from either; columns that
say nothing new are then left out, the later ones first. NVLink is never left out, nor its part 0: without its rate no
other size could be predicted.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moelink.errors import ConfigError
from moelink.tools.documents import INDEX, RANKS, TEXT, US, Kind, Maybe, printable
from moelink.tools.plan.constants_file import Run, rounded
from moelink.tools.plan.model import FILE, Constants, PhaseConstants, Shape, predict, read_constants
from moelink.tools.plan.routing import Floats, Statistics, make_routing
from moelink.tools.plan.traffic import PHASES, Layer, LinkBytes, Units, link_bytes
from moelink.tools.results import BENCHMARK, CASE, METHODS, RUN, read_result

ROUTINGS = ("uniform", "zipf")
"""Distributions of the bench that the plan knows too. (Its third, one-rank, is no routing that one would plan for.)"""


GPU_RUN = {**RUN, "device": Kind("times of GPUs (a CPU run shows that things work)", lambda device: device == "cuda")}
FIGURES = {f"{method}?": Maybe({"median": US}) for method in METHODS}
FORMS = {
    BENCHMARK: {
        **GPU_RUN, "ranks": RANKS, "cases": [{"case": CASE}],
        "rows": [
            {"case": INDEX, "contender": TEXT, "phases": {f"{phase}?": Maybe(FIGURES) for phase in PHASES}},
        ],
    }
}  # fmt: skip
"""Of results of ``moelink bench``, as far as a plan reads them."""


@dataclass(frozen=True)
class Point:
    """One measured phase of one case, or a part of a layer.

    Attributes:
        run: of the measurement.
        layer, routing: the calls.
        phase: "dispatch", "combine", or the name of a part of a layer.
        method: "graph", "pairs" or "eager".
        measured_us: median over samples of the slowest rank, microseconds per call.
    """

    run: Run
    layer: Layer
    routing: str
    phase: Any
    method: str
    measured_us: float

    @property
    def links(self) -> LinkBytes:
        """Expected bytes of the call; all ranks of a result are on one node."""
        statistics = _statistics(self.routing, self.layer.num_experts, self.layer.topk, self.run.ranks)
        units = Units.of(self.layer, self.layer.ep_config(self.run.ranks))
        return link_bytes(self.phase, "rank", units, statistics, self.layer.tokens)


@functools.lru_cache(maxsize=16)
def _statistics(routing: str, num_experts: int, topk: int, ranks: int) -> Statistics:
    """Those of all points of a result with this routing; with Zipf's law they take long."""
    made = make_routing(routing, num_experts=num_experts, topk=topk)
    return Statistics.of(made, num_experts=num_experts, ranks=ranks, nodes=1)


@dataclass(frozen=True)
class Comparison:
    """A point and its prediction; ``predicted_us`` is None when a constant is missing."""

    point: Point
    predicted_us: float | None

    @property
    def error(self) -> float | None:
        """predicted / measured - 1: 0.1 is 10 % too slow."""
        return None if self.predicted_us is None else self.predicted_us / self.point.measured_us - 1

    @property
    def row(self) -> dict[str, Any]:
        """The JSON form."""
        point, layer = self.point, self.point.layer
        return {
            **dataclasses.asdict(point.run), "tokens": layer.tokens, "format": layer.dispatch_format,
            "routing": point.routing, "phase": point.phase, "method": point.method, "measured_us": point.measured_us,
            "predicted_us": self.predicted_us, "error": self.error,
        }  # fmt: skip


def left_out(case: Mapping[str, Any]) -> str:
    """Return why the plan cannot describe a case of the bench, or "" if it can."""
    if case["distribution"] not in ROUTINGS:
        return f"routing {case['distribution']!r} is none that one would plan for"
    if case["num_sms"] is not None:
        return "a limit of SMs, which the model does not know"
    if case.get("layout", "expert") != "expert":  # older results do not say
        return "layout 'rank', whose rows are not packed by expert"
    return ""


def points_of(document: Mapping[str, Any], file: str, *, contender: str) -> list[Point]:
    """Return the points of ``contender`` in a result: every phase of every case that the plan can describe.

    Cases for which :func:`left_out` gives a reason are left out.

    Raises:
        ConfigError: cases are of several layers.
    """
    run, points = Run.of(document, file), []
    if len({(entry["case"]["num_experts"], entry["case"]["topk"]) for entry in document["cases"]}) > 1:
        raise ConfigError("results", "cases of one num_experts and topk, as the bench makes them", file)
    for row in document["rows"]:
        case = document["cases"][row["case"]]["case"]
        if row["contender"] != contender or left_out(case):
            continue
        layer = Layer(
            num_experts=case["num_experts"], topk=case["topk"], hidden_size=case["hidden_size"],
            tokens=case["tokens"], dispatch_format=case["format"],
            transport="collective" if contender.endswith("collective") else "symmetric",
        )  # fmt: skip
        for phase in PHASES:
            result = row["phases"].get(phase)
            method = next((name for name in METHODS if result and result.get(name)), None)
            if result and method:
                median = float(result[method]["median"])
                points.append(Point(run, layer, case["distribution"], phase, method, median))
    return points


def load_points(paths: Iterable[Path], *, contender: str) -> list[Point]:
    """Read the points of several files.

    Raises:
        ConfigError: a file is refused, or nothing in them is about ``contender``.
    """
    return all_points({path: read_result(path, FORMS) for path in paths}, contender=contender)


def all_points(documents: Mapping[Path, Mapping[str, Any]], *, contender: str) -> list[Point]:
    """Return the points of results by their files.

    Raises:
        ConfigError: nothing in them is about ``contender``.
    """
    points = [
        point
        for path, document in documents.items()
        for point in points_of(document, printable(path.name), contender=contender)
    ]
    if not points:
        raise ConfigError("results", f"figures of {contender!r} with uniform or zipf routing", "none in these files")
    return points


def compare(points: Iterable[Point], constants: Constants) -> list[Comparison]:
    """Predict every point."""
    return [
        Comparison(
            point, predict(point.links, constants.phases[point.phase], Shape(point.run.ranks, 1), "rank").total_us
        )
        for point in points
    ]


def largest_error(comparisons: Iterable[Comparison]) -> float | None:
    """Return the largest absolute error; None without any prediction."""
    errors = [abs(comparison.error) for comparison in comparisons if comparison.error is not None]
    return max(errors, default=None)


def to_document(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the JSON form: a row per comparison."""
    return {
        "schema_version": 1,
        "report": "moelink plan check",
        "largest_error": largest_error(comparisons),
        "rows": [compared.row for compared in comparisons],
    }


COLUMNS = ("floor_us", "nvlink_gb_per_s", "quantising_gb_per_s", "memory_gb_per_s", "per_peer_us")
RESOLUTION = 1e-6
"""Columns (scaled to length 1) that differ from a combination of earlier ones by less say nothing new."""


def independent_columns(matrix: Floats) -> list[int]:
    """Return the columns that no combination of the earlier ones gives.

    Example: columns [1, 1], [1, 2], [2, 3]: the third is the sum of the others, ``[0, 1]``.
    """
    scaled = matrix / np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    chosen: list[int] = []
    for column in range(matrix.shape[1]):
        if np.linalg.svd(scaled[:, [*chosen, column]], compute_uv=False)[-1] > RESOLUTION and len(chosen) < len(matrix):
            chosen.append(column)
    return chosen


def nonnegative_least_squares(matrix: Floats, target: Floats, *, needed: int | None = None) -> Floats:
    """Return the x >= 0 with the smallest |matrix x - target|, by trying every set of columns that may be positive.

    With ``needed``, only sets with that column; x is 0 if none of them gives x >= 0.

    Example: matrix [[1, 1], [1, 2]], target [3, 2]: the line 4 - t falls, so the slope is 0 and x == [2.5, 0].
    With ``needed=1`` there is no such line but the one through the origin: x == [0, 1.4].
    """
    count = matrix.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for columns in itertools.combinations(range(count), size):
            if needed is not None and needed not in columns:
                continue
            part = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            difference = float(np.square(matrix[:, columns] @ part - target).sum())
            if (part >= 0).all() and difference < least:
                best, least = np.zeros(count), difference
                best[list(columns)] = part
    return best


def distance(matrix: Floats, x: Floats, target: Floats) -> float:
    """Return |matrix x - target|."""
    return float(np.linalg.norm(matrix @ x - target))


def fit_phase(points: Sequence[Point]) -> PhaseConstants:
    """Fit the constants of one phase.

    Raises:
        ConfigError: fewer than two points, or times that one constant describes as well as bytes do, so that no rate
            follows from them.
    """
    if len(points) < 2:
        raise ConfigError("results", "at least two measured cases of each phase", len(points))
    links = [point.links for point in points]
    peers = [point.run.ranks - 1 for point in points]
    columns = [
        np.ones(len(points)),
        [link.nvlink / 1e3 for link in links],
        [link.quantised / 1e3 for link in links],
        [link.memory / 1e3 for link in links],
        peers,
    ]
    measured = np.array([point.measured_us for point in points])
    matrix = np.array(columns, dtype=np.float64).T / measured[:, None]
    kept = independent_columns(matrix)
    scale = np.linalg.norm(matrix[:, kept], axis=0)
    found = dict.fromkeys(COLUMNS, 0.0)
    link, ones = COLUMNS.index("nvlink_gb_per_s"), np.ones(len(points))
    if link in kept:
        values = nonnegative_least_squares(matrix[:, kept] / scale, ones, needed=kept.index(link)) / scale
        constant = nonnegative_least_squares(matrix[:, :1], ones)
        if distance(matrix[:, kept], values, ones) < distance(matrix[:, :1], constant, ones):
            found |= {COLUMNS[column]: float(value) for column, value in zip(kept, values, strict=True)}
    if found["nvlink_gb_per_s"] == 0:
        raise ConfigError("results", "times that grow with the bytes over NVLink", "times that do not")
    return PhaseConstants(
        floor_us=found["floor_us"],
        per_peer_us=found["per_peer_us"],
        nvlink_gb_per_s=1 / found["nvlink_gb_per_s"],
        memory_gb_per_s=1 / found["memory_gb_per_s"] if found["memory_gb_per_s"] else None,
        quantising_gb_per_s=1 / found["quantising_gb_per_s"] if found["quantising_gb_per_s"] else None,
    )


def fit(points: Sequence[Point], *, contender: str) -> dict[str, Any]:
    """Return the constants file (:mod:`~moelink.tools.plan.model`) that describes ``points`` best.

    Raises:
        ConfigError: too few points, points of different devices or by different methods, or no rate in them.
    """
    devices, methods = {point.run.device for point in points}, {point.method for point in points}
    for name, values in (("devices", devices), ("methods", methods)):
        if len(values) > 1:
            raise ConfigError("results", f"{name} that are all the same", ", ".join(sorted(values)))
    phases = {phase: fit_phase([point for point in points if point.phase == phase]) for phase in PHASES}
    document: dict[str, Any] = {
        **FILE.head(devices.pop(), (point.run for point in points)),
        "contender": contender,
        "method": methods.pop(),
        "ranks": sorted({point.run.ranks for point in points}),
        "tokens": sorted({point.layer.tokens for point in points}),
        "formats": sorted({point.layer.dispatch_format for point in points}),
        "phases": {phase: rounded(phases[phase]) for phase in PHASES},
    }
    document["largest_error"] = largest_error(compare(points, constants_of(document)))
    return document


def constants_of(document: dict[str, Any]) -> Constants:
    """Read the constants of a document of :func:`fit`."""
    return read_constants(document, "the fit")
