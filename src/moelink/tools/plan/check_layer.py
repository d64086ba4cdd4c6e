"""Hold the plan's layer against ``moelink bench --preset layer``: the experts, and all of it.

The plan's layer has no routing, so the measured part of routing is taken off the whole. Dispatch and combine are not
compared alone: the benchmark's communicator is made for 4096 tokens in every case, on one rank there is no link, and on
several the part of combine has the wait for the rank whose experts took longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moelink.tools.plan.constants_file import Run
from moelink.tools.plan.experts import WEIGHT_BYTES, ExpertConstants, experts_time
from moelink.tools.plan.experts_fit import CONTENDERS, load_of_case, scaled_parts
from moelink.tools.plan.fit import Comparison, Point, compare
from moelink.tools.plan.model import Constants
from moelink.tools.plan.traffic import PHASES, Layer

EXPERT_PARTS = ("convert", "product 1", "activation", "product 2")


def compare_layer(
    document: Mapping[str, Any], file: str, *, constants: Constants, experts: Mapping[str, ExpertConstants]
) -> list[Comparison]:
    """Predict every case of moelink in a result of the benchmark of layers.

    Raises:
        ConfigError: a case has not all parts.
    """
    run, found = Run.of(document, file), []
    for row in document["rows"]:
        fmt = CONTENDERS.get(row["contender"])
        if fmt is None or not row["graph"] or not row["parts"]:
            continue
        case = document["cases"][row["case"]]
        parts, layer = scaled_parts(row), _layer_of(case, fmt)
        predictions = _predict(case, layer, run, constants, experts.get(fmt))
        measured = {
            "experts": sum(parts.get(part, 0.0) for part in EXPERT_PARTS),
            "layer": sum(us for part, us in parts.items() if part != "route"),
        }
        for part, us in measured.items():
            point = Point(run, layer, "uniform", f"{part} ({case['label'].split(',')[0]})", "graph", us)
            found.append(Comparison(point, predictions[part]))
    return found


def _layer_of(case: Mapping[str, Any], fmt: str) -> Layer:
    shape = case["shape"]
    return Layer(
        num_experts=shape["num_experts"], topk=shape["topk"], hidden_size=shape["hidden_size"], tokens=case["tokens"],
        dispatch_format=fmt, intermediate_size=shape["intermediate_size"], expert_format=fmt,
    )  # fmt: skip


def _predict(
    case: Mapping[str, Any], layer: Layer, run: Run, constants: Constants, experts: ExpertConstants | None
) -> dict[str, float | None]:
    points = [Point(run, layer, "uniform", phase, "graph", 1.0) for phase in PHASES]
    times = {compared.point.phase: compared.predicted_us for compared in compare(points, constants)}
    times["experts"] = None
    if experts is not None:
        shape = case["shape"]
        times["experts"] = experts_time(
            load_of_case(case, run.ranks), experts, hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"], weight_bytes=WEIGHT_BYTES[layer.expert_format],
        ).total_us  # fmt: skip
    known = [time for time in times.values() if time is not None]
    times["layer"] = sum(known) if len(known) == len(times) else None
    return times
