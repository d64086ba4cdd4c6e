"""Predictions held against results of ``moelink bench``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelink.errors import ConfigError
from moelink.tools.plan.constants import Constants
from moelink.tools.plan.model import Shape, predict
from moelink.tools.plan.routing import make_routing
from moelink.tools.plan.settings import Layer
from moelink.tools.plan.statistics import Statistics
from moelink.tools.plan.traffic import PHASES, LinkBytes, Units, link_bytes
from moelink.transports.base import Phase

BENCHMARK, BENCH_SCHEMA = "moelink bench", 1
METHODS = ("graph", "pairs", "eager")
"""Of the bench; the first that a phase was measured by counts."""
ROUTINGS = ("uniform", "zipf")
"""Distributions of the bench that the plan knows too. (Its third, one-rank, is no routing that one would plan for.)"""


@dataclass(frozen=True)
class Run:
    """A result file, in what a reader needs to find it again."""

    file: str
    commit: str | None
    date: str
    device: str
    ranks: int


@dataclass(frozen=True)
class Point:
    """One measured phase of one case.

    Attributes:
        run: where it was measured.
        layer, routing, phase: what.
        method: "graph", "pairs" or "eager".
        measured_us: median over samples of the slowest rank, microseconds per call.
    """

    run: Run
    layer: Layer
    routing: str
    phase: Phase
    method: str
    measured_us: float

    @property
    def links(self) -> LinkBytes:
        """Expected bytes of the call; all ranks of a result are on one node."""
        statistics = Statistics.of(
            make_routing(self.routing, num_experts=self.layer.num_experts, topk=self.layer.topk),
            num_experts=self.layer.num_experts, ranks=self.run.ranks, nodes=1,
        )  # fmt: skip
        units = Units.of(self.layer, self.layer.ep_config(self.run.ranks))
        return link_bytes(self.phase, "rank", units, statistics, self.layer.tokens)


@dataclass(frozen=True)
class Comparison:
    """A point and its prediction; ``predicted_us`` is None when a constant is missing."""

    point: Point
    predicted_us: float | None

    @property
    def error(self) -> float | None:
        """predicted / measured - 1: 0.1 is 10 % too slow."""
        return None if self.predicted_us is None else self.predicted_us / self.point.measured_us - 1


def load_result(path: Path) -> dict[str, Any]:
    """A document of ``moelink bench`` on GPUs.

    Raises:
        ConfigError: as :func:`read_result`, or it is not of GPUs.
    """
    document = read_result(path)
    if document.get("device") != "cuda":
        raise ConfigError("results", "times of GPUs (a CPU run shows that things work)", f"{path.name}, of CPUs")
    return document


def read_result(path: Path) -> dict[str, Any]:
    """A document of ``moelink bench``.

    Raises:
        ConfigError: it is none of this schema, or its correctness gate failed, so that it has no figures.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError("results", "JSON files of moelink bench", f"{path} ({error})") from error
    if not isinstance(document, dict) or document.get("benchmark") != BENCHMARK:
        raise ConfigError("results", "JSON files of moelink bench", path.name)
    if document.get("schema_version") != BENCH_SCHEMA:
        raise ConfigError("results", f"schema_version {BENCH_SCHEMA}", f"{document.get('schema_version')} in {path}")
    if not document["gate"]["passed"]:
        raise ConfigError("results", "a run whose correctness gate passed", path.name)
    return document


def points_of(document: Mapping[str, Any], file: str, *, contender: str) -> list[Point]:
    """What a result says about ``contender``: every phase of every case the plan can describe.

    Left out: other distributions than :data:`ROUTINGS`, cases with a budget of multiprocessors, and layout "rank".
    """
    run = Run(
        file, document.get("commit"), document["date"], ", ".join(sorted(set(document["devices"]))), document["ranks"]
    )
    points = []
    for row in document["rows"]:
        case = document["cases"][row["case"]]["case"]
        if row["contender"] != contender or case["distribution"] not in ROUTINGS or case["num_sms"] is not None:
            continue
        if case.get("layout", "expert") != "expert":  # older results do not say
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
    """The points of several files.

    Raises:
        ConfigError: a file is refused, or nothing in them is about ``contender``.
    """
    points = [point for path in paths for point in points_of(load_result(path), path.name, contender=contender)]
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
    """The largest absolute error; None without any prediction."""
    errors = [abs(comparison.error) for comparison in comparisons if comparison.error is not None]
    return max(errors, default=None)


def to_document(comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """The JSON form: a row per point."""
    rows = list(comparisons)
    return {
        "schema_version": 1,
        "report": "moelink plan check",
        "largest_error": largest_error(rows),
        "rows": [{**_row(row.point), "predicted_us": row.predicted_us, "error": row.error} for row in rows],
    }


def _row(point: Point) -> dict[str, Any]:
    layer = point.layer
    return {
        **dataclasses.asdict(point.run), "tokens": layer.tokens, "format": layer.dispatch_format,
        "routing": point.routing, "phase": point.phase, "method": point.method, "measured_us": point.measured_us,
    }  # fmt: skip
