"""The encoder of few SMs: codes of products with a reciprocal in two parts are those of quotients, for all bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

POSITIVE = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float().numpy()
"""All positive finite numbers of bf16."""
F32 = np.float32


def codes(quotients: np.ndarray) -> np.ndarray:
    """e4m3 codes, saturating, of fp32 numbers."""
    values = torch.from_numpy(np.clip(quotients, F32(-448), F32(448)))
    found: np.ndarray = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return found


def scale_of(largest: np.ndarray) -> np.ndarray:
    """What ``encode_fp32_scale`` divides by, fp32."""
    found: np.ndarray = np.maximum(largest, F32(1e-4)) / F32(448.0)
    return found


def parts_of(divisor: np.ndarray, off: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The two parts, as ``formats.device.multiply_rows`` makes them, where the rough reciprocal is ``off`` by so many
    ulps. Wide numbers are exact where it has an FMA."""
    rough = ((F32(1.0) / divisor).view(np.int32) + off).astype(np.int32).view(np.float32)
    below = (rough.view(np.int32) - 3).view(np.float32)
    rest = (1 - below.astype(np.longdouble) * divisor.astype(np.longdouble)).astype(np.float32) * rough
    return below, rest


def products(x: np.ndarray, below: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """``fma(x, below, x * rest)``: 64 bits of significand hold the sum exactly."""
    found: np.ndarray = (x.astype(np.longdouble) * below + x * rest).astype(np.float32)
    return found


@pytest.mark.parametrize("off", range(-2, 3))
def test_every_code_of_bf16_is_that_of_the_quotient(off: int) -> None:
    """Every largest element with every element that is not larger, but those whose quotient is below 2**-11 and so has
    code 0 either way. Their number is 20 powers of two for each pair of significands and each power of two."""
    assert np.finfo(np.longdouble).nmant >= 63
    scales = scale_of(POSITIVE)
    below, rest = parts_of(scales, off)
    assert (below > 0).all()
    assert (rest > 0).all()
    at, seen = np.arange(len(POSITIVE)), 0
    for down in range(20 * 128 + 128):  # so many numbers of bf16 before the largest
        i = at[max(down, 0) :]
        x = POSITIVE[i - down]
        wrong = codes(products(x, below[i], rest[i])) != codes(x / scales[i])
        assert not wrong.any(), (POSITIVE[i][wrong][:3], x[wrong][:3])
        seen += len(i)
    assert seen > 80_000_000
    least = F32(2.0**-11) * scales[20 * 128 + 128 :]
    assert (POSITIVE[: -20 * 128 - 128] < least).all(), "the others have code 0"


def test_a_reciprocal_of_one_part_gives_other_codes() -> None:
    """What the second part is for."""
    scales, wrong = scale_of(POSITIVE), 0
    for down in range(0, 20 * 128, 16):
        i = np.arange(down, len(POSITIVE))
        x = POSITIVE[i - down]
        wrong += int((codes(x * (F32(1.0) / scales[i])) != codes(x / scales[i])).sum())
    assert wrong > 0


def test_infinite_elements_and_zeros() -> None:
    """Beside inf the largest element counts as the largest fp32. Neither part may be 0 there, or inf would give NaN."""
    largest = np.array([np.finfo(F32).max], F32)
    below, rest = parts_of(scale_of(largest))
    assert rest > 0
    infinite = np.array([np.inf, -np.inf], F32)
    assert (infinite * rest).tolist() == infinite.tolist()
    assert codes(products(infinite, below, rest)).tolist() == [0x7E, 0xFE]
    finite = np.concatenate([POSITIVE, -POSITIVE, np.array([0.0, -0.0], F32)])
    assert (codes(products(finite, below, rest)) == codes(finite / scale_of(largest))).all()
    assert np.signbit(F32(-0.0) * below + F32(-0.0) * rest).all()
