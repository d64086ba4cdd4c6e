"""The time of the experts of a rank: two grouped products and the activation between them.

    product = floor + sum over experts of max(P(has rows) x weights / weight rate, operations / arithmetic rate)
            + rows read and written / row rate
    experts = product (gate and up) + activation + product (down),   activation = floor + bytes / rate

* An expert's weights are read once however many rows it has, so with few rows the weights are the time: ``n k b`` bytes
  of a product with n columns, k columns of its rows, and b bytes a number. ``P(has rows)`` is expected over routing.
* With many rows arithmetic is the time: ``2 r n k`` operations for r rows, in whole tiles of 128 rows, of which an
  expert's last one is half full on average. Both overlap, so the larger one counts, for each expert alone: beside an
  expert of many rows others may have few.
* All experts of a rank are one launch, so there is one floor a product.

Constants were fitted to ``moelink bench --preset layer`` and ``moelink_bench.experts`` (``experts_fit``). They
hold for the products that these time: in bf16 by torch, in fp8_block128 by moelink's kernel. docs/plan.md says how far
off they are.

The file ``experts.json`` beside this module, or one of ``moelink plan fit-experts``
(:mod:`~moelink.tools.plan.constants_file` has the fields of all such files)::

    {"schema_version": 1, "kind": "moelink plan expert constants", "machine": "...", "fitted_to": [...],
     "largest_error": ..., "formats": {"bf16": {...}, "fp8_block128": {...}}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from moelink.errors import ConfigError
from moelink.routing import ExpertMap
from moelink.tools.documents import Maybe
from moelink.tools.plan.constants_file import RATE, US, ConstantsFile, check_fields, runs_text
from moelink.tools.plan.routing import Floats, Routing

ExpertFormat = Literal["bf16", "fp8_block128"]
EXPERT_FORMATS: tuple[ExpertFormat, ...] = get_args(ExpertFormat)
WEIGHT_BYTES = {"bf16": 2.0, "fp8_block128": 1.0}
"""Of a number of the weights, and of a row of the first product. (Scales are 4 bytes a block of 128 x 128.)"""

TILE = 128
"""Rows that the kernels of both formats compute at a time."""

FIELD_FORMS = {
    "product_floor_us": US, "weights_gb_per_s": RATE, "tflop_per_s": RATE, "rows_gb_per_s": Maybe(RATE),
    "activation_floor_us": US, "activation_gb_per_s": RATE,
}  # fmt: skip
FIELDS = tuple(FIELD_FORMS)
FILE = ConstantsFile(
    kind="moelink plan expert constants", command="moelink plan fit-experts", packaged="experts.json",
    form={"formats": {"*": FIELD_FORMS}},
)  # fmt: skip

Limit = Literal["latency", "weights", "arithmetic", "rows", "activation"]


@dataclass(frozen=True)
class ExpertConstants:
    """Of experts in one format.

    Attributes:
        product_floor_us, activation_floor_us: microseconds of a product, and of the activation, without rows.
        weights_gb_per_s: 10**9 bytes of weights read a second.
        tflop_per_s: 10**12 operations a second.
        rows_gb_per_s: 10**9 bytes of rows read and written a second by products; None leaves this out.
        activation_gb_per_s: the same by the activation.
    """

    product_floor_us: float
    weights_gb_per_s: float
    tflop_per_s: float
    rows_gb_per_s: float | None
    activation_floor_us: float
    activation_gb_per_s: float

    def __post_init__(self) -> None:
        check_fields(self, FIELD_FORMS)

    @property
    def crossover(self) -> float:
        """Rows of an expert at which its arithmetic takes as long as its weights, for weights of one byte."""
        return self.tflop_per_s * 1e3 / (2 * self.weights_gb_per_s)


@dataclass(frozen=True)
class Load:
    """Rows of the experts of a rank.

    Attributes:
        active: [experts] how probable it is that an expert has rows.
        rows: [experts] how many it is expected to have.
        tiled: [experts] the same with the last tile filled.
    """

    active: Floats
    rows: Floats
    tiled: Floats

    @classmethod
    def of_rows(cls, rows: Sequence[float]) -> Load:
        """The load of experts with exactly these rows."""
        counts = np.array(rows, dtype=np.float64)
        return cls((counts > 0).astype(np.float64), counts, np.ceil(counts / TILE) * TILE)

    @classmethod
    def of_ranks(cls, routing: Routing, *, num_experts: int, ranks: int, tokens: int) -> list[Load]:
        """The loads of all ranks that own experts, when ``ranks`` ranks have ``tokens`` tokens each.

        Example: 2 experts, top-1, uniform, 2 ranks of 1 token: each expert has 1 row on average, and any with
        probability 1 - 1/2 * 1/2 = 0.75.
        """
        share: Floats = np.asarray(routing.slots(range(num_experts + 1)), dtype=np.float64)
        active = 1.0 - (1.0 - np.minimum(share, 1.0)) ** (ranks * tokens)
        rows = ranks * tokens * share
        tiled = rows + active * TILE / 2
        experts = ExpertMap(num_experts, ranks)
        bounds = [experts.first(rank) for rank in range(ranks + 1)]
        return [
            cls(active[begin:end], rows[begin:end], tiled[begin:end])
            for begin, end in zip(bounds, bounds[1:], strict=False)
            if end > begin
        ]


@dataclass(frozen=True)
class Work:
    """The work of a product: bytes of weights of the experts whose time these are, operations of the others', and
    bytes of all rows."""

    weights: float
    operations: float
    rows: float


def work_of(load: Load, *, columns: int, inner: int, weight_bytes: float, crossover: float) -> Work:
    """Return the work of a product of rows of ``inner`` columns that makes ``columns``.

    ``crossover``: rows at which arithmetic takes as long as weights, for weights of one byte.

    Example: experts of 1 and of 500 rows, 1000 x 1000, one byte, crossover 200: 1e6 bytes of weights, 2 x 512 x 1e6
    operations, because 500 rows fill four tiles.
    """
    many = load.tiled >= crossover * weight_bytes * np.maximum(load.active, 1e-300)
    weights = float(load.active[~many].sum()) * columns * inner * weight_bytes
    operations = 2.0 * float(load.tiled[many].sum()) * columns * inner
    return Work(weights, operations, float(load.rows.sum()) * (inner * weight_bytes + 2 * columns))


@dataclass(frozen=True)
class ExpertTime:
    """The predicted time of the experts of a rank, microseconds, and its parts."""

    latency_us: float
    weights_us: float
    arithmetic_us: float
    rows_us: float
    activation_us: float

    @property
    def total_us(self) -> float:
        """The sum of the parts."""
        return self.latency_us + self.weights_us + self.arithmetic_us + self.rows_us + self.activation_us

    @property
    def limit(self) -> Limit:
        """The largest part."""
        parts: dict[Limit, float] = {
            "latency": self.latency_us, "weights": self.weights_us, "arithmetic": self.arithmetic_us,
            "rows": self.rows_us, "activation": self.activation_us,
        }  # fmt: skip
        return max(parts, key=parts.__getitem__)


def product_time(
    load: Load, constants: ExpertConstants, *, columns: int, inner: int, weight_bytes: float
) -> ExpertTime:
    """Predict one product."""
    crossover = constants.crossover
    work = work_of(load, columns=columns, inner=inner, weight_bytes=weight_bytes, crossover=crossover)
    rate = constants.rows_gb_per_s
    return ExpertTime(
        constants.product_floor_us, work.weights / constants.weights_gb_per_s / 1e3,
        work.operations / constants.tflop_per_s / 1e6, 0.0 if rate is None else work.rows / rate / 1e3, 0.0,
    )  # fmt: skip


def activation_bytes(load: Load, intermediate_size: int) -> float:
    """Bytes of gate and up, read, and of their product, written, both counted in bf16."""
    return float(load.rows.sum()) * 6 * intermediate_size


def experts_time(
    load: Load, constants: ExpertConstants, *, hidden_size: int, intermediate_size: int, weight_bytes: float
) -> ExpertTime:
    """Predict the experts of a rank: gate and up, activation, down."""
    both = [
        product_time(load, constants, columns=columns, inner=inner, weight_bytes=weight_bytes)
        for columns, inner in ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
    ]
    moved = activation_bytes(load, intermediate_size) / constants.activation_gb_per_s / 1e3
    return ExpertTime(
        sum(time.latency_us for time in both) + constants.activation_floor_us,
        sum(time.weights_us for time in both), sum(time.arithmetic_us for time in both),
        sum(time.rows_us for time in both), moved,
    )  # fmt: skip


def slowest(loads: Sequence[Load], constants: ExpertConstants, **shape: Any) -> tuple[Load, ExpertTime]:
    """Return the load of the rank whose experts take longest, and their time; ``shape`` as of :func:`experts_time`."""
    times = [(load, experts_time(load, constants, **shape)) for load in loads]
    return max(times, key=lambda pair: pair[1].total_us)


@dataclass(frozen=True)
class MachineExperts:
    """Constants of a machine by format, and their source ("" without any)."""

    formats: Mapping[str, ExpertConstants] = field(default_factory=dict)
    source: str = ""
    description: str = ""


def read_expert_constants(document: object, name: str) -> MachineExperts:
    """Read constants from a file's content; messages call the file ``name``.

    Raises:
        ConfigError: it is no file of expert constants of this version, or a value is not acceptable.
    """
    content = FILE.checked(document, name)
    formats: dict[str, ExpertConstants] = {}
    for fmt, entry in content["formats"].items():
        if fmt not in EXPERT_FORMATS:
            raise ConfigError("constants", f"formats {' and '.join(EXPERT_FORMATS)}", f"{fmt} in {name}")
        formats[fmt] = ExpertConstants(**{f: entry[f] for f in FIELDS})
    description = f"{content['machine']}, fitted to {runs_text(content)}"
    return MachineExperts(formats, f"fitted: {name}", description)


def load_expert_constants(path: Path) -> MachineExperts:
    """Read a file of expert constants.

    Raises:
        ConfigError: it cannot be read, or :func:`read_expert_constants` refuses it.
    """
    return read_expert_constants(*FILE.load(path))


def packaged_expert_constants() -> MachineExperts:
    """Return the measured constants that come with the package; none when it holds no file of them."""
    found = FILE.load_packaged()
    return MachineExperts() if found is None else read_expert_constants(*found)
