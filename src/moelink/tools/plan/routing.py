"""Describe how tokens choose experts: the probability that a token has an expert in a block of experts.

Legend: ``E`` experts, ``K`` = topk. A block is a range of consecutive expert ids, such as a rank or a node owns
(:class:`~moelink.routing.ExpertMap`). ``bounds`` [n + 1] are ascending ids: block i is [bounds[i], bounds[i + 1]),
which may be empty. Sums over blocks give the reach of a token: with each rank's experts as a block,
``hits(bounds).sum()`` is the expected number of distinct ranks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moelink.errors import ConfigError
from moelink.levels import hit_probability
from moelink.routing import ExpertMap
from moelink.tools.documents import printable

Floats = NDArray[np.float64]
Bounds = Sequence[int] | NDArray[np.int64]

_MAGIC = re.compile(rb"\x93NUMPY([\1-\3])\0")
_HEADER = re.compile(
    rb"\{\s*'descr':\s*'([<>|](?:b1|[iu][1248]|f[248]))',\s*'fortran_order':\s*(True|False),\s*'shape':\s*"
    rb"\(((?:[0-9]{1,15}, ?)*[0-9]{0,15})\),?\s*\}\s*"
)
MOST_CLOCKS = 1 << 16
"""With Zipf's law: distributions of that size take half a gigabyte and a few seconds."""
STEP = 0.125
"""Distance of quadrature nodes in log time. The integrand is analytic in a strip of half width pi / 2, so the error of
the trapezoidal rule is of the order exp(-pi**2 / STEP), below double precision."""


class Routing(Protocol):
    """A distribution of the experts of one token; tokens are independent, and alike on all ranks."""

    @property
    def name(self) -> str:
        """In tables and files."""

    def hits(self, bounds: Bounds) -> Floats:
        """Return [n] the probability that at least one of a token's experts is in each block."""

    def slots(self, bounds: Bounds) -> Floats:
        """Return [n] the expected number of a token's top-k slots whose expert is in each block."""


@dataclass(frozen=True)
class Uniform:
    """Every set of K distinct experts is equally likely.

    A token misses a block of L experts when all K are among the other E - L::

        P(hit) = 1 - C(E - L, K) / C(E, K)

    Example: 4 experts, K = 2, a block of 2: of 6 pairs one misses it, ``hits([0, 2]) == [5/6]``.
    """

    num_experts: int
    topk: int

    @property
    def name(self) -> str:
        """``"uniform"``."""
        return "uniform"

    def hits(self, bounds: Bounds) -> Floats:
        sizes = {*np.diff(bounds).tolist()}
        by_size = {size: hit_probability(self.num_experts, self.topk, size) for size in sizes}
        return np.array([by_size[size] for size in np.diff(bounds).tolist()], dtype=np.float64)

    def slots(self, bounds: Bounds) -> Floats:
        """See :class:`Routing`: K L / E."""
        return np.diff(bounds) * (self.topk / self.num_experts)


@dataclass(frozen=True)
class Zipf:
    """K distinct experts drawn one after the other, expert e with probability proportional to 1 / (e + 1).

    The same as giving expert e an exponential clock of rate p[e] and taking the K clocks that ring first. A token hits
    a block S of total rate P when S rings before the K-th of the others does. With N(t) the number of others that have
    rung by t (independent, each with probability 1 - exp(-p[e] t))::

        P(hit) = integral over t of P exp(-P t) * P(N(t) < K)

    The distribution of N comes from those of the experts before and behind the block; the integral is a trapezoidal
    sum in log t. Slots: the sum of P(hit) over the block's experts, as no expert comes twice.

    Example: 2 experts, K = 1: probabilities 2/3 and 1/3, ``hits([0, 1, 2]) == [2/3, 1/3]``.
    """

    num_experts: int
    topk: int

    def __post_init__(self) -> None:
        if self.num_experts * self.topk > MOST_CLOCKS:
            raise ConfigError("routing", f"num_experts * topk of at most {MOST_CLOCKS} with zipf", self)

    @property
    def name(self) -> str:
        """``"zipf"``."""
        return "zipf"

    def hits(self, bounds: Bounds) -> Floats:
        rates = 1 / np.arange(1, self.num_experts + 1, dtype=np.float64)
        rates /= rates.sum()
        # Left of the first node a clock has rung with probability below 1e-17, right of the last all have.
        log_t = np.arange(np.log(1e-17), np.log(50 / rates.min()), STEP)
        rung = -np.expm1(-rates[:, None] * np.exp(log_t))
        before = _counts(rung, self.topk)
        behind = _counts(rung[::-1], self.topk)
        result = np.zeros(len(bounds) - 1)
        for index, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            left, right = before[first], behind[self.num_experts - last]
            at_most = np.cumsum(right, axis=0)[::-1]  # row i: P(count behind the block < K - i)
            total = rates[first:last].sum() * np.exp(log_t)
            result[index] = STEP * (total * np.exp(-total) * (left * at_most).sum(0)).sum()
        return result

    def slots(self, bounds: Bounds) -> Floats:
        each = self.hits(range(self.num_experts + 1))
        return np.diff(np.concatenate(([0.0], each.cumsum()))[np.asarray(bounds)])


def _counts(rung: Floats, topk: int) -> Floats:
    """Return [E + 1, K, T]: the probability that of the first e experts exactly k < K have rung, at every time."""
    result = np.zeros((len(rung) + 1, topk, rung.shape[1]))
    result[0, 0] = 1
    for index, q in enumerate(rung):
        result[index + 1] = result[index] * (1 - q)
        result[index + 1, 1:] += result[index, :-1] * q
    return result


@dataclass(frozen=True, eq=False)
class Trace:
    """The routes of a real model: every token of the trace is equally likely, on every rank.

    Attributes:
        topk_ids: [tokens, topk] expert ids, -1 where a slot is not routed; an expert may come twice.
        source: of the trace.

    Example: ids [[0, 1], [1, 2], [3, -1]], blocks [0, 2) and [2, 4): two of three tokens hit each,
    ``hits([0, 2, 4]) == [2/3, 2/3]`` and ``slots([0, 2, 4]) == [1, 2/3]``.
    """

    topk_ids: NDArray[np.int64]
    source: str = "trace"

    @classmethod
    def load(cls, path: Path, *, num_experts: int, topk: int) -> Trace:
        """Read [..., topk] integers from a .npy file; leading dimensions (layers, ranks, steps) count as tokens.

        Raises:
            ConfigError: not such a file, no token in it, another topk, or an id outside [-1, num_experts).
        """
        try:
            ids = read_array(path)
        except (OSError, ValueError) as error:
            raise ConfigError("routing", "a .npy file of topk_ids", f"{path} ({error})") from error
        if not np.issubdtype(ids.dtype, np.integer):
            raise ConfigError("routing", "integers, [tokens, topk]", f"{ids.dtype} in {path}")
        if ids.ndim < 2 or ids.size == 0:
            raise ConfigError("routing", "at least one token, [tokens, topk]", f"shape {list(ids.shape)} in {path}")
        if ids.shape[-1] != topk:
            raise ConfigError("routing", f"{topk} ids a token (topk)", f"{ids.shape[-1]} in {path}")
        low, high = int(ids.min()), int(ids.max())
        if low < -1 or high >= num_experts:
            raise ConfigError("routing", f"ids in [-1, {num_experts})", f"{low if low < -1 else high} in {path}")
        return cls(ids.reshape(-1, topk).astype(np.int64), source=printable(path.name))

    @property
    def name(self) -> str:
        """The file's name and the number of tokens."""
        return f"{self.source}, {len(self.topk_ids)} tokens"

    def hits(self, bounds: Bounds) -> Floats:
        blocks = np.sort(self._blocks(bounds), axis=1)
        first = np.ones(blocks.shape, dtype=bool)
        first[:, 1:] = blocks[:, 1:] != blocks[:, :-1]
        return self._shares(blocks[first], bounds)

    def slots(self, bounds: Bounds) -> Floats:
        return self._shares(self._blocks(bounds).ravel(), bounds)

    def _blocks(self, bounds: Bounds) -> NDArray[np.int64]:
        """Return the block of each id; -1 for ids before the first block, n for those after the last."""
        return np.searchsorted(np.asarray(bounds), self.topk_ids, side="right") - 1

    def _shares(self, blocks: NDArray[np.int64], bounds: Bounds) -> Floats:
        count = len(bounds) - 1
        inside = blocks[(blocks >= 0) & (blocks < count)]
        return np.bincount(inside, minlength=count) / len(self.topk_ids)


def read_array(path: Path) -> NDArray[Any]:
    """Read numbers from a .npy file as ``numpy.save`` writes it. Nothing of it is run: objects are refused, and the
    header, which is an expression of Python, is compared with the one form that it has for numbers.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none, or shorter than its header says.
    """
    with path.open("rb") as file:
        magic = _MAGIC.fullmatch(file.read(8))
        width = 2 if magic and magic[1] == b"\1" else 4
        header = _HEADER.fullmatch(file.read(min(int.from_bytes(file.read(width), "little"), 4096))) if magic else None
        if header is None:
            raise ValueError("it has no header of numbers")
        kind, order, sizes = (part.decode() for part in header.groups())
        dtype, shape = np.dtype(kind), tuple(int(size) for size in sizes.split(",") if size.strip())
        if math.prod(shape) * dtype.itemsize > path.stat().st_size - file.tell():
            raise ValueError(f"it is too short for shape {list(shape)}")
        values = np.fromfile(file, dtype, math.prod(shape))
    return values.reshape(shape, order="F" if order == "True" else "C")


def make_routing(text: str, *, num_experts: int, topk: int) -> Routing:
    """Make a routing from ``"uniform"``, ``"zipf"``, or the path of a .npy file of topk_ids.

    Raises:
        ConfigError: neither of these.
    """
    if text == "uniform":
        return Uniform(num_experts, topk)
    if text == "zipf":
        return Zipf(num_experts, topk)
    path = Path(text)
    if not os.path.isfile(path):  # which says no where Path.is_file raises: a name too long, a folder not to be read
        raise ConfigError("routing", "'uniform', 'zipf' or the path of a .npy file of topk_ids", text)
    return Trace.load(path, num_experts=num_experts, topk=topk)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Expectations of one token under a routing.

    Attributes:
        rank_hits: [ranks] probability that the token has an expert on each rank.
        node_hits: [nodes] the same for nodes.
        rank_slots: [ranks] expected number of its top-k slots on each rank.
    """

    rank_hits: Floats
    node_hits: Floats
    rank_slots: Floats

    @classmethod
    def of(cls, routing: Routing, *, num_experts: int, ranks: int, nodes: int) -> Statistics:
        """Compute the expectations for ``ranks`` in rank order on ``nodes`` of equal size."""
        experts = ExpertMap(num_experts, ranks)
        bounds = np.array([experts.first(rank) for rank in range(ranks + 1)])
        return cls(routing.hits(bounds), routing.hits(bounds[:: ranks // nodes]), routing.slots(bounds))

    @property
    def ranks_per_token(self) -> float:
        """Expected number of distinct ranks, a token's own included when it is hit."""
        return float(self.rank_hits.sum())

    @property
    def nodes_per_token(self) -> float:
        """Expected number of distinct nodes."""
        return float(self.node_hits.sum())
