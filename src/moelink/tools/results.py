"""Results of benchmarks as the plan and the pictures read them; ``moelink-bench`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from moelink.errors import ArgumentError, ConfigError
from moelink.tools import documents
from moelink.tools.documents import EXPERTS, RANKS, SIZE, TEXT, Kind, Maybe, printable

BENCHMARK = "moelink bench"
LAYER_BENCHMARK = "moelink bench layer"
ROLES_BENCHMARK = "moelink bench roles"
SCHEMA_VERSION = 1
COLLECTIVE, SYMMETRIC = "moelink collective", "moelink symmetric"
"""Contenders that are moelink."""
Method = Literal["graph", "pairs", "eager"]
METHODS: tuple[Method, ...] = ("graph", "pairs", "eager")
"""Methods of measurement, the one with the least influence of the host first."""
ALIGNMENT = 4
"""Dispatch pads groups of rows to multiples of it."""

RUN = {
    "schema_version": documents.VERSION,
    "gate": Kind(
        "that of a run whose correctness gate passed",
        lambda gate: gate == "passed" or (isinstance(gate, dict) and gate.get("passed") is True),
    ),
    "date": TEXT, "commit?": Maybe(TEXT), "devices": [TEXT], "ranks?": RANKS,
}  # fmt: skip
"""Fields that forms of results have in common. Results of one rank may lack "ranks"."""
CASE = {
    "tokens": SIZE, "hidden_size": SIZE, "num_experts": EXPERTS, "topk": EXPERTS, "format": TEXT, "distribution": TEXT,
    "num_sms": Maybe(SIZE), "layout?": TEXT,
}  # fmt: skip
"""Of dispatch and combine. Older results lack the layout."""


def read_result(path: Path, forms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Read a result of one of the benchmarks that ``forms`` has, each with its form.

    Raises:
        ConfigError: it is none of these, or has not that form: of another schema, or its correctness gate failed, so
            that it has no figures.
    """
    expected, file = f"JSON files of {' or '.join(forms)}", printable(path.name)
    document: Any = documents.read(path, "results", expected)
    documents.check(document, {"benchmark": documents.one_of(*forms)}, "results", expected, file)
    form = forms[document["benchmark"]]
    documents.check(document, form, "results", expected, file)
    if "cases" in form and (last := max(row["case"] for row in document["rows"])) >= len(document["cases"]):
        raise ConfigError("results", f"rows of its {len(document['cases'])} cases", f"case {last} in {file}")
    return document  # type: ignore[no-any-return]


def sizes_of(load: str, experts: int, most: int) -> list[int]:
    """Rows of each expert, multiples of 4 as dispatch pads groups; ``most`` bounds the largest.

    >>> sizes_of("5", 3, 64), sizes_of("one", 3, 64), sizes_of("mixed", 3, 64)
    ([8, 8, 8], [0, 64, 0], [64, 32, 24])
    """
    if load == "few":
        sizes = [min(64, most) if i % 8 == 0 else 0 for i in range(experts)]
    elif load == "one":
        sizes = [most if i == experts // 2 else 0 for i in range(experts)]
    elif load == "mixed":
        sizes = [max(1, min(most, 2048) // (i + 1)) for i in range(experts)]
    elif load == "room":
        sizes = [4] * experts
    elif load.isdigit():
        sizes = [int(load)] * experts
    else:
        raise ArgumentError("load", "rows an expert, or one of few, one, mixed, room", repr(load))
    return [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
