"""Hold the plan's layer against ``moelink bench --preset layer``: the experts, and all of it.

The plan's layer has no routing, so the measured part of routing is taken off the whole. Dispatch and combine are not
compared alone: the benchmark's communicator is made for 4096 tokens in every case, on one rank there is no link, and on
several the part of combine has the wait for the rank whose experts took longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moelink.tools.plan.constants_file import Run
from moelink.tools.plan.experts import WEIGHT_BYTES, ExpertConstants, experts_time
from moelink.tools.plan.experts_fit import CONTENDERS, load_of_case, scaled_parts
from moelink.tools.plan.fit import Point, compare
from moelink.tools.plan.model import Constants
from moelink.tools.plan.traffic import PHASES, Layer

EXPERT_PARTS = ("convert", "product 1", "activation", "product 2")


@dataclass(frozen=True)
class LayerComparison:
    """One part of one case, measured and predicted.

    Attributes:
        run, label: where, and which case.
        tokens, format: of the case; of dispatch and of the experts.
        part: "experts" or "layer".
        measured_us, predicted_us: microseconds a call; None where a constant is missing.
    """

    run: Run
    label: str
    tokens: int
    format: str
    part: str
    measured_us: float
    predicted_us: float | None

    @property
    def error(self) -> float | None:
        """predicted / measured - 1: 0.1 is 10 % too slow."""
        return None if self.predicted_us is None else self.predicted_us / self.measured_us - 1

    @property
    def row(self) -> dict[str, Any]:
        """The JSON form, as :attr:`moelink.tools.plan.fit.Comparison.row`."""
        return {
            **dataclasses.asdict(self.run), "tokens": self.tokens, "format": self.format, "routing": "uniform",
            "phase": f"{self.part} ({self.label.split(',')[0]})", "method": "graph", "measured_us": self.measured_us,
            "predicted_us": self.predicted_us, "error": self.error,
        }  # fmt: skip


def compare_layer(
    document: Mapping[str, Any], file: str, *, constants: Constants, experts: Mapping[str, ExpertConstants]
) -> list[LayerComparison]:
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
        parts = scaled_parts(row)
        predictions = _predict(case, fmt, run, constants, experts.get(fmt))
        measured = {
            "experts": sum(parts.get(part, 0.0) for part in EXPERT_PARTS),
            "layer": sum(us for part, us in parts.items() if part != "route"),
        }
        for part, us in measured.items():
            found.append(LayerComparison(run, case["label"], case["tokens"], fmt, part, us, predictions[part]))
    return found


def _predict(
    case: Mapping[str, Any], fmt: str, run: Run, constants: Constants, experts: ExpertConstants | None
) -> dict[str, float | None]:
    shape = case["shape"]
    layer = Layer(
        num_experts=shape["num_experts"], topk=shape["topk"], hidden_size=shape["hidden_size"], tokens=case["tokens"],
        dispatch_format=fmt, intermediate_size=shape["intermediate_size"], expert_format=fmt,
    )  # fmt: skip
    points = [Point(run, layer, "uniform", phase, "graph", 1.0) for phase in PHASES]
    times: dict[str, float | None] = {
        compared.point.phase: compared.predicted_us for compared in compare(points, constants)
    }
    times["experts"] = None
    if experts is not None:
        times["experts"] = experts_time(
            load_of_case(case, run.ranks), experts, hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"], weight_bytes=WEIGHT_BYTES[fmt],
        ).total_us  # fmt: skip
    known = [time for time in times.values() if time is not None]
    times["layer"] = sum(known) if len(known) == len(times) else None
    return times
