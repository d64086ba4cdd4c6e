"""Fit the constants of experts to results.

Results are those of ``moelink_bench.experts`` (products with given rows an expert) and of ``moelink bench
--preset layer`` (parts of layers with routed rows). A layer's parts are measured with events between them, which take
time, so that their sum is more than the layer: parts are scaled to the whole, as in its picture.

Which experts are limited by weights depends on the constants (:mod:`~moelink.tools.plan.experts`). Given that, time is
linear in the unknowns: the fit repeats least squares of relative errors, none below 0, until it no longer changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moelink.errors import ConfigError
from moelink.tools.documents import EXPERTS as NUM_EXPERTS
from moelink.tools.documents import INDEX, SIZE, TEXT, US, Kind, Maybe, printable
from moelink.tools.plan.constants_file import Run, rounded
from moelink.tools.plan.experts import (
    FILE,
    WEIGHT_BYTES,
    ExpertConstants,
    Load,
    activation_bytes,
    product_time,
    work_of,
)
from moelink.tools.plan.fit import GPU_RUN, nonnegative_least_squares
from moelink.tools.plan.routing import Uniform
from moelink.tools.results import LAYER_BENCHMARK, read_result, sizes_of

EXPERTS = "experts"
CONTENDERS = {"moelink bf16": "bf16", "moelink fp8_block128": "fp8_block128"}
PARTS = ("route", "product 1", "activation", "product 2")
"""Fields of each layer of these."""
FORMS = {
    LAYER_BENCHMARK: {
        **GPU_RUN,
        "cases": [{
            "label": TEXT, "tokens": SIZE,
            "shape": {"num_experts": NUM_EXPERTS, "topk": NUM_EXPERTS, "hidden_size": SIZE, "intermediate_size": SIZE},
        }],
        "rows": [{"case": INDEX, "contender": TEXT, "graph": Maybe({"median": US}), "parts": {"*": {"median": US}}}],
    },
    EXPERTS: {
        **GPU_RUN, "shape": {"experts": NUM_EXPERTS, "hidden": SIZE, "intermediate": SIZE}, "most_rows": SIZE,
        "rows": [{
            "product": TEXT, "bf16?": {"us": US}, "fp8?": {"us": US},
            "load": Kind(
                "rows an expert, or few, one, mixed or room",
                lambda load: isinstance(load, str) and bool(re.fullmatch("few|one|mixed|room|[0-9]{1,6}", load)),
            ),
        }],
    },
}  # fmt: skip
"""Of results of layers and of experts."""
STARTS = (50.0, 100.0, 200.0, 400.0)
"""Crossovers to begin with; the fit that describes the points best is taken."""
ROUNDS = 30


@dataclass(frozen=True)
class ExpertPoint:
    """One measured product, or an activation.

    Attributes:
        run, what: the run, and the measured part.
        format: of the experts.
        load: rows of the rank.
        columns, inner: of the product; of an activation 0, and the intermediate size.
        measured_us: microseconds a call.
    """

    run: Run
    what: str
    format: str
    load: Load
    columns: int
    inner: int
    measured_us: float

    @property
    def is_product(self) -> bool:
        """A product, not an activation."""
        return self.columns > 0


def expert_points(document: Mapping[str, Any], file: str) -> list[ExpertPoint]:
    """Return the products and activations in a result of :data:`FORMS`."""
    is_layer, run = document["benchmark"] == LAYER_BENCHMARK, Run.of(document, file)
    return _points_of_layer(document, run) if is_layer else _points_of_experts(document, run)


def _points_of_experts(document: Mapping[str, Any], run: Run) -> list[ExpertPoint]:
    shape, points = document["shape"], []
    hidden, inner = shape["hidden"], shape["intermediate"]
    sizes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    for row in document["rows"]:
        if row["product"] not in sizes or "tiles" in row:  # a sweep of launch settings; "experts": the sum of others
            continue
        load = Load.of_rows(sizes_of(row["load"], shape["experts"], document["most_rows"]))
        for fmt, key in (("bf16", "bf16"), ("fp8_block128", "fp8")):
            if key not in row:
                raise ConfigError("results", "times of products in bf16 and fp8", f"none in {key} in {run.file}")
            what = f"{row['product']}, {row['load']} rows an expert"
            points.append(ExpertPoint(run, what, fmt, load, *sizes[row["product"]], row[key]["us"]))
    return points


def _points_of_layer(document: Mapping[str, Any], run: Run) -> list[ExpertPoint]:
    points = []
    for row in document["rows"]:
        fmt = CONTENDERS.get(row["contender"])
        if fmt is None or not row["parts"] or not row["graph"]:
            continue
        case = document["cases"][row["case"]]
        shape = case["shape"]
        load = load_of_case(case, run.ranks)
        parts = scaled_parts(row)
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        sizes = {"product 1": (2 * inner, hidden), "product 2": (hidden, inner), "activation": (0, inner)}
        for part, (columns, width) in sizes.items():
            points.append(ExpertPoint(run, f"{case['label']}, {part}", fmt, load, columns, width, parts[part]))
    return points


def load_of_case(case: Mapping[str, Any], ranks: int) -> Load:
    """Return the expected rows of rank 0 in a case of the benchmark of layers."""
    shape = case["shape"]
    routing = Uniform(shape["num_experts"], shape["topk"])
    return Load.of_ranks(routing, num_experts=shape["num_experts"], ranks=ranks, tokens=case["tokens"])[0]


def scaled_parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the microseconds of a layer's parts, so that they sum up to the whole layer.

    Raises:
        ConfigError: not all :data:`PARTS` are there.
    """
    parts = {name: float(part["median"]) for name, part in row["parts"].items()}
    if not parts.keys() >= set(PARTS):
        raise ConfigError("results", f"layers with parts {', '.join(PARTS)}", ", ".join(parts))
    scale = row["graph"]["median"] / sum(parts.values())
    return {name: us * scale for name, us in parts.items()}


def load_expert_points(paths: Iterable[Path]) -> list[ExpertPoint]:
    """Read the points of several files.

    Raises:
        ConfigError: :func:`read_result` refuses a file.
    """
    return [point for path in paths for point in expert_points(read_result(path, FORMS), printable(path.name))]


def fit_format(points: Sequence[ExpertPoint], fmt: str) -> ExpertConstants:
    """Return the constants of one format.

    Raises:
        ConfigError: too few points, or times from which no rate follows.
    """
    products = [point for point in points if point.format == fmt and point.is_product]
    activations = [point for point in points if point.format == fmt and not point.is_product]
    if len(products) < 4 or len(activations) < 2:
        got = f"{len(products)} and {len(activations)} of {fmt}"
        raise ConfigError("results", "at least four products and two activations of each format", got)
    found = min(
        (solution for start in STARTS if (solution := _fit_products(products, start)) is not None),
        key=lambda pair: pair[0], default=None,
    )  # fmt: skip
    if found is None:
        raise ConfigError("results", "times that grow with weights and with arithmetic", f"times of {fmt} that don't")
    floor_us, weights, operations, rows = found[1]
    moved = np.array([[1.0, activation_bytes(point.load, point.inner) / 1e3] for point in activations])
    floor, slope = _solve(moved, np.array([point.measured_us for point in activations]))
    if slope == 0:
        raise ConfigError("results", "activations that grow with rows", f"times of {fmt} that don't")
    return ExpertConstants(
        product_floor_us=floor_us, weights_gb_per_s=1 / weights, tflop_per_s=1 / operations,
        rows_gb_per_s=1 / rows if rows else None, activation_floor_us=floor, activation_gb_per_s=1 / slope,
    )  # fmt: skip


def _fit_products(points: Sequence[ExpertPoint], start: float) -> tuple[float, list[float]] | None:
    """Return the distance and the solution (floor, and reciprocals of the rates of weights, arithmetic and rows) that
    the fit comes to from this crossover; None where a rate cannot be told."""
    weight_bytes = WEIGHT_BYTES[points[0].format]
    measured = np.array([point.measured_us for point in points])
    crossover, solution = start, np.zeros(4)
    for _ in range(ROUNDS):
        works = [
            work_of(p.load, columns=p.columns, inner=p.inner, weight_bytes=weight_bytes, crossover=crossover)
            for p in points
        ]
        columns = np.array([[1.0, work.weights / 1e3, work.operations / 1e6, work.rows / 1e3] for work in works])
        solution = _solve(columns, measured)
        if solution[1] == 0 or solution[2] == 0:
            return None
        crossover = 0.5 * (crossover + solution[1] / (2 * solution[2]) * 1e3)
    return float(np.linalg.norm(columns @ solution / measured - 1.0)), solution.tolist()


def _solve(columns: Any, measured: Any) -> Any:
    matrix = columns / measured[:, None]
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    return nonnegative_least_squares(matrix / scale, np.ones(len(measured))) / scale


def predicted(point: ExpertPoint, constants: ExpertConstants) -> float:
    """Predict a point, microseconds."""
    if point.is_product:
        weight_bytes = WEIGHT_BYTES[point.format]
        time = product_time(point.load, constants, columns=point.columns, inner=point.inner, weight_bytes=weight_bytes)
        return time.total_us
    moved = activation_bytes(point.load, point.inner) / constants.activation_gb_per_s / 1e3
    return constants.activation_floor_us + moved


def fit_experts(points: Sequence[ExpertPoint]) -> dict[str, Any]:
    """Return the file of constants (:mod:`~moelink.tools.plan.experts`) that describes ``points`` best.

    Raises:
        ConfigError: points of different devices, or :func:`fit_format` refuses those of a format.
    """
    devices = {point.run.device for point in points}
    if len(devices) != 1:
        raise ConfigError("results", "devices that are all the same", ", ".join(sorted(devices)) or "no result")
    found = {fmt: rounded(fit_format(points, fmt)) for fmt in dict.fromkeys(point.format for point in points)}
    formats = {fmt: ExpertConstants(**constants) for fmt, constants in found.items()}  # type: ignore[arg-type]
    errors = [abs(predicted(p, formats[p.format]) / p.measured_us - 1) for p in points if p.is_product]
    return {
        **FILE.head(devices.pop(), (point.run for point in points)),
        "largest_error": max(errors),
        "formats": found,
    }
