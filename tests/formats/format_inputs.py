"""fp32 inputs that meet every case of the formats' casts, for test_formats and test_formats_device."""

import functools

import numpy as np
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes", reason="the oracle of the formats is ml_dtypes")

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CORNERS = np.array([0x00000001, 0x00400000, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000,
                    0x7FFFFFFF], np.uint32).view(np.float32)  # fmt: skip


def e4m3_values():
    """The 127 finite magnitudes of e4m3."""
    return np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def around(values):
    """Values, the midpoints between neighbours, and everything one ulp away from either."""
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    return np.concatenate([points] + [np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf)])


@functools.cache
def fp32_inputs():
    """All bf16, all fp16, every value and tie of e4m3, e2m1 and E8M0 +-1 ulp, NaNs, infs, subnormals, random bits."""
    with np.errstate(all="ignore"):
        bits = np.arange(1 << 16, dtype=np.uint16)
        powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
        near = np.concatenate([around(e4m3_values()), around(E2M1_VALUES), around(powers), CORNERS])
        rng = np.random.default_rng(0)
        parts = [bits.view(ml_dtypes.bfloat16), bits.view(np.float16), near, -near,
                 rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)]  # fmt: skip
        return np.concatenate([part.astype(np.float32) for part in parts])


@functools.cache
def rows(hidden=384):
    """[n, hidden] fp32: the same inputs sorted by magnitude (alike within a group) and shuffled, and ordinary data.

    NaN is left out of the shuffled rows but for a few, since it would fill every group.
    """
    x = fp32_inputs()
    rng = np.random.default_rng(1)
    finite = rng.permutation(x[~np.isnan(x)])
    for start in range(0, len(finite), 4999):
        finite[start] = np.nan
    normal = (rng.standard_normal(1 << 15) * np.exp2(rng.integers(-12, 12, 1 << 15))).astype(np.float32)
    groups = (rng.standard_normal((512, 384)) * np.exp2(rng.integers(-126, 127, (512, 1)))).astype(np.float32)
    blocks = [x[np.argsort(np.abs(x), kind="stable")], finite, normal, np.zeros(384, np.float32), groups.ravel()]
    padded = np.concatenate(blocks)
    return np.concatenate([padded, np.zeros(-len(padded) % hidden, np.float32)]).reshape(-1, hidden)
