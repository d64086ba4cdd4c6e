"""The product of few bf16 rows and a bf16 weight with fp32 sums: :mod:`moelink.rows.wide_product` as one kernel.

A program has one column of the output at a time, for all rows: it multiplies the weight's row by each of them, CHUNK
elements at a time, and adds up in fp32. A product of two bf16 numbers is exact in fp32. A library lets several CTAs
share a sum of so few rows, and a second launch adds their parts up.

Example: x = [[1, 2], [3, 4]] and weight = [[1, 1], [1, 0], [0, 2]] give out = [[3, 1, 4], [7, 3, 8]] in three steps,
one for each column.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from moelink.kernels.launch.cache_keys import Constants
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import common_kernel as common


@dataclass(frozen=True, repr=False, eq=False)
class WideConstants(Constants):
    """Launch constants of the kernel.

    Attributes:
        K, N: columns of a row and of the output.
        ROWS: places for rows. CHUNK: columns of a row at a time. Powers of two.
        DEPENDENT_LAUNCH: as of ``rows.common_kernel``.
    """

    K: int
    N: int
    ROWS: int
    CHUNK: int
    DEPENDENT_LAUNCH: bool = False


@triton.jit(do_not_specialize=["rows"])
def wide_product_kernel(x, weight, out, rows, S: tl.constexpr):
    """See the module. ``rows`` is at most ROWS."""
    follow_previous_launch(S)
    row = tl.arange(0, S.ROWS)[:, None]
    place = tl.arange(0, S.CHUNK)[None, :]
    for column in range(tl.program_id(0), S.N, tl.num_programs(0)):
        sums = tl.zeros([S.ROWS, S.CHUNK], tl.float32)
        for first in tl.static_range(0, S.K, S.CHUNK):
            exists = first + place < S.K
            by = tl.load(weight + column * S.K + first + place, mask=exists, other=0.0).to(tl.float32)
            mine = tl.load(x + row * S.K + first + place, mask=exists & (row < rows), other=0.0).to(tl.float32)
            sums += mine * by
        tl.store(out + row * S.N + column, tl.sum(sums, 1)[:, None], mask=row < rows)


@lru_cache(maxsize=256)
def _constants(rows: int, columns: int, inner: int) -> WideConstants:
    places = triton.next_power_of_2(rows)
    return WideConstants(K=inner, N=columns, ROWS=places, CHUNK=min(1024, triton.next_power_of_2(inner)))


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` [R, N] fp32 with few rows ``x`` [R, K] times ``weight`` [N, K] transposed, both bf16. All are
    contiguous."""
    (rows, inner), columns = x.shape, weight.shape[0]
    S = _constants(rows, columns, inner)
    # Products are exact, so FMAs change no bit.
    common.launch(wide_product_kernel, (x, weight, out, rows), S, columns, absent=out, fused=True, num_warps=4)
