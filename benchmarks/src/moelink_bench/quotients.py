"""Count the corrections that a quotient of a bf16 element by an fp32 scale needs, over all pairs of significands.

``kernels`` divide rows by one reciprocal a row, ``q = x * r`` with ``r = RN(1 / s)``, and correct it by the exact
remainder, ``q + r * (x - q * s)`` (``moelink.formats.device.divide_rows``): twice, which is right for every fp32,
or once where elements are bf16. These have 8 bits: all 128 x 2**23 pairs can be tried. And 448, by which an fp8 scale
is divided, is one divisor: all 2**23 significands of its dividends can be.

Signs and exponents do not matter as long as nothing over- or underflows, which ``divide_rows`` leaves out: every step
scales with them. A quotient is *right* when it is the fp32 nearest to the exact one.

Worked example: 1 / 3 with q = 0.5 and r = 0.25. The remainder is 1 - 1.5 = -0.5; corrected, q is 0.5 - 0.125 = 0.375.

    python -m moelink_bench.quotients
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moelink_bench.script import Save, Script

CHUNK = 1 << 15


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``a * b + c`` in fp32 with one rounding.

    The product of two fp32 is exact in fp64. The sum is rounded to odd there, its last bit set where it is inexact, so
    that rounding it to fp32 rounds the exact one (S. Boldo and G. Melquiond, IEEE Transactions on Computers 57 (2008)
    462).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # D. Knuth's TwoSum: what the sum lost
    bits = total.view(torch.int64)
    inexact_even = (error != 0) & (bits & 1 == 0)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_even, bits + away, bits).view(torch.float64).float()


def corrected(x: Tensor, s: Tensor, r: Tensor, q: Tensor) -> Tensor:
    """Correct ``q``, an approximation of ``x / s``, once; ``r`` approximates ``1 / s``."""
    return fma(fma(q, -s, x), r, q)


def significands(bits: int) -> Tensor:
    """Return fp32 [2**bits]: all significands in [1, 2) of so many bits behind the leading one."""
    return ((127 << 23) + (torch.arange(1 << bits, dtype=torch.int32) << (23 - bits))).view(torch.float32)


def chunks(values: Tensor) -> Iterator[Tensor]:
    """Split ``values`` [n] into columns [CHUNK, 1]."""
    return iter(values[:, None].split(CHUNK))


def wrong_quotients(x: Tensor, s: Tensor, corrections: int) -> list[int]:
    """Count pairs of ``x`` [n] and ``s`` [m, 1] whose quotient is not right after 0, 1, ... corrections."""
    exact, r = x / s, 1 / s
    q, found = x * r, []
    for i in range(corrections + 1):
        q = corrected(x, s, r, q) if i else q
        found.append(int((q != exact).sum()))
    return found


def measure(*, scale_bits: int = 23) -> dict[str, Any]:
    """Count wrong quotients of bf16 elements by scales of ``scale_bits``, and of fp32 by 448, by corrections."""
    x = significands(7)
    by_scale = [wrong_quotients(x, s, 2) for s in chunks(significands(scale_bits))]
    of_448 = [wrong_quotients(s, torch.full((1,), 448.0), 2) for s in chunks(significands(scale_bits))]
    return {
        "bf16_by_fp32": {
            "pairs": len(x) << scale_bits,
            "wrong": [sum(column) for column in zip(*by_scale, strict=True)],
        },
        "fp32_by_448": {"pairs": 1 << scale_bits, "wrong": [sum(column) for column in zip(*of_448, strict=True)]},
    }


def run(_: argparse.Namespace, save: Save) -> int:
    """Try all pairs, save the result, print it."""
    result = measure()
    unit = "pairs of significands whose quotient is not the nearest fp32, after 0, 1 and 2 corrections"
    save("quotients", {"unit": unit, **result})
    print(json.dumps(result, indent=2))
    return 0


main = Script("quotients", __doc__, lambda _: None, run, out="quotients.json").main

if __name__ == "__main__":
    raise SystemExit(main())
