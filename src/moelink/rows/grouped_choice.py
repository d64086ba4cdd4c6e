"""Which kernel multiplies rows by groups of weights, as far as the host knows, without importing triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moelink.tuning import FEW_ROWS


def takes_gluon(codes: Tensor) -> bool:
    """Return whether a kernel in Gluon multiplies ``codes``: on compute capability 9.0, compiled."""
    if not codes.is_cuda or torch.version.hip or torch.cuda.get_device_capability(codes.device)[0] != 9:
        return False
    from moelink.kernels.launch.device import is_interpreted

    return not is_interpreted()  # Gluon has no interpreted form


def tile_rows(likely_rows: int, groups: int, *, by_mean: Sequence[tuple[int, int]] = FEW_ROWS) -> int | None:
    """Return the rows of a tile of :mod:`moelink.rows.grouped_gluon_few`, or with ``by_mean=ROWS_OF_MXFP4`` of
    :mod:`moelink.rows.grouped_gluon_mxfp4`, by the mean rows of ``groups``; None if that is above all of ``by_mean``.

    The host knows no group's size. It knows how many rows there are likely to be
    (:func:`moelink.nn.experts.likely_rows`), of which uniform routing gives each group as many. The result is right for
    any division of any rows.

    >>> tile_rows(40, 4), tile_rows(41, 4), tile_rows(4096, 4)
    (16, 32, None)
    """
    return next((tile for mean, tile in by_mean if likely_rows <= mean * groups), None)
