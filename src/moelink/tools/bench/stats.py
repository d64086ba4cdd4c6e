"""Samples to figures: the slowest rank of each sample, its median and percentiles, and the skew between ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Figure:
    """Microseconds per call of the slowest rank.

    Attributes:
        median, p20, p80: over the samples.
        skew: median over the samples of (slowest rank - fastest rank).
        samples: how many there were.
    """

    median: float
    p20: float
    p80: float
    skew: float
    samples: int


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> Figure:
    """The figure of ``by_rank[rank][sample]``, microseconds. Sample i of all ranks is one and the same event.

    Example: ranks [10, 20, 30] and [12, 18, 60]: the slowest took 12, 20 and 60, so the median is 20, the 20th and 80th
    percentiles (interpolated) are 15.2 and 44, and the skew, the median of 2, 2 and 30, is 2.

    Raises:
        ValueError: there is no sample, or ranks have different numbers of them.
    """
    lengths = {len(samples) for samples in by_rank}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"every rank needs the same number of samples, at least one, got {sorted(lengths)}")
    columns = list(zip(*by_rank, strict=True))
    slowest = [max(column) for column in columns]
    low, middle, high = (float(value) for value in np.percentile(slowest, (20, 50, 80)))
    skew = statistics.median(max(column) - min(column) for column in columns)
    return Figure(median=middle, p20=low, p80=high, skew=float(skew), samples=len(slowest))
