"""Which kernel multiplies rows by groups of weights, as far as the host knows, without importing triton."""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.tuning import FEW_ROWS


def takes_gluon(codes: Tensor) -> bool:
    """Return whether a kernel in Gluon multiplies ``codes``: on compute capability 9.0, compiled."""
    if not codes.is_cuda or torch.version.hip or torch.cuda.get_device_capability(codes.device)[0] != 9:
        return False
    from moelink.kernels.launch.device import is_interpreted

    return not is_interpreted()  # Gluon has no interpreted form


def few_rows(rows: int, groups: int) -> int | None:
    """Return the rows of a tile of :mod:`moelink.rows.grouped_gluon_few`, or for weights in mxfp4 of
    :mod:`moelink.rows.grouped_gluon_mxfp4`, for a buffer of ``rows`` and ``groups`` of weights, None if the kernel for
    many rows is faster.

    The host knows the buffer, which is the worst case of so many tokens on every rank, and no group's size. So the
    buffer chooses the tiles, and any division of its rows among the groups is right.

    >>> few_rows(64, 4), few_rows(65, 4), few_rows(4096, 4)
    (16, 32, None)
    """
    return next((tile for room, tile in FEW_ROWS if rows <= room * groups), None)
