"""Constants from measured times.

The model is linear in what is unknown: with bytes L over NVLink, M in memory, Q to quantise, and W ranks of one node,

    time = floor + per_peer (W - 1) + L / NVLink rate + M / memory rate + Q / quantising rate

so floor, per_peer and the three reciprocals are found by least squares, not below 0. Errors are weighted by 1 /
measured time: one per cent counts the same at 10 us and at 1000. Results of one number of ranks cannot tell per_peer
from floor, nor, with uniform routing, memory from NVLink, nor those of one format quantising from either; columns that
say nothing new are then left out, the later ones first. NVLink is never left out, nor its part 0: without its rate no
other size could be predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from moelink.errors import ConfigError
from moelink.tools.plan.constants import KIND, SCHEMA_VERSION, Constants, PhaseConstants, read_constants
from moelink.tools.plan.measured import Point, compare, largest_error
from moelink.tools.plan.routing import Floats
from moelink.tools.plan.traffic import PHASES

COLUMNS = ("floor_us", "nvlink_gb_per_s", "quantising_gb_per_s", "memory_gb_per_s", "per_peer_us")
RESOLUTION = 1e-6
"""Columns (scaled to length 1) that differ from a combination of earlier ones by less say nothing new."""


def independent_columns(matrix: Floats) -> list[int]:
    """Columns that no combination of the earlier ones gives.

    Example: columns [1, 1], [1, 2], [2, 3]: the third is the sum of the others, ``[0, 1]``.
    """
    scaled = matrix / np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    chosen: list[int] = []
    for column in range(matrix.shape[1]):
        if np.linalg.svd(scaled[:, [*chosen, column]], compute_uv=False)[-1] > RESOLUTION and len(chosen) < len(matrix):
            chosen.append(column)
    return chosen


def nonnegative_least_squares(matrix: Floats, target: Floats, *, needed: int | None = None) -> Floats:
    """The x >= 0 with the smallest |matrix x - target|, by trying every set of columns that may be positive.

    With ``needed``, only sets with that column; x is 0 where none of them gives x >= 0.

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
    """|matrix x - target|."""
    return float(np.linalg.norm(matrix @ x - target))


def fit_phase(points: Sequence[Point]) -> PhaseConstants:
    """The constants of one phase.

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
    """A constants file (:mod:`~moelink.tools.plan.constants`) that describes ``points`` best.

    Raises:
        ConfigError: too few points, points of different devices or by different methods, or no rate in them.
    """
    devices, methods = {point.run.device for point in points}, {point.method for point in points}
    for name, values in (("devices", devices), ("methods", methods)):
        if len(values) > 1:
            raise ConfigError("results", f"{name} that are all the same", ", ".join(sorted(values)))
    phases = {phase: fit_phase([point for point in points if point.phase == phase]) for phase in PHASES}
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "machine": devices.pop(),
        "contender": contender,
        "method": methods.pop(),
        "fitted_to": [
            {"file": run.file, "commit": run.commit, "date": run.date, "ranks": run.ranks}
            for run in sorted({point.run for point in points}, key=lambda run: (run.ranks, run.file))
        ],
        "ranks": sorted({point.run.ranks for point in points}),
        "tokens": sorted({point.layer.tokens for point in points}),
        "formats": sorted({point.layer.dispatch_format for point in points}),
        "phases": {phase: _fields(phases[phase]) for phase in PHASES},
    }
    document["largest_error"] = largest_error(compare(points, constants_of(document)))
    return document


def _fields(constants: PhaseConstants) -> dict[str, float | None]:
    """Six digits: more would claim more than was measured."""
    return {name: None if value is None else float(f"{value:.6g}") for name, value in vars(constants).items()}


def constants_of(document: dict[str, Any]) -> Constants:
    """The constants of a document of :func:`fit`."""
    return read_constants(document, "the fit")
