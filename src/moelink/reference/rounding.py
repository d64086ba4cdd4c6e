"""The oracle's formats: rounding by search in tables of all representable values.

Arithmetic is fp32, every operation rounded on its own, divisions IEEE. Exact steps (searching a table, scaling by a
power of two) run in fp64, which holds every value and every midpoint exactly.
NaN policy: a NaN in a group makes the whole group NaN. An inf counts as the largest fp32 in amax, and saturates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 codes 0..7; codes 8..15 are their negatives."""

E4M3_VALUES = tuple(
    math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10) for code in range(127)
)
"""Magnitudes of e4m3 codes 0..126 (0 .. 448); code 127 is NaN, codes 128..255 are the negatives."""

E8M0_VALUES = tuple(math.ldexp(1.0, code - 127) for code in range(255))
"""E8M0 codes 0..254; code 255 is NaN."""

_F32_MAX = math.ldexp(2 - math.ldexp(1.0, -23), 127)


@dataclass(frozen=True)
class FormatFacts:
    """The facts of a format.

    Attributes:
        payload_dtype: dtype of the payload; uint8 holds two 4-bit codes, the even element in the low nibble.
        scale_dtype: dtype of one scale, or None for rows that travel unchanged.
        group: elements that share a scale; None for all of a row.
        row_multiple: group sizes of the "expert" layout are rounded up to this.
        scale_layout: arrangement of scales in the "expert" layout.
    """

    payload_dtype: torch.dtype
    scale_dtype: torch.dtype | None = None
    group: int | None = 1
    row_multiple: int = 1
    scale_layout: Literal["none", "row_major", "transposed", "tiles"] = "none"


_FACTS = {
    "bf16": FormatFacts(torch.bfloat16),
    "fp32": FormatFacts(torch.float32),
    "fp64": FormatFacts(torch.float64),
    "fp8_block128": FormatFacts(torch.float8_e4m3fn, torch.float32, 128, 4, "transposed"),
    "fp8_block128_e8m0": FormatFacts(torch.float8_e4m3fn, torch.int32, 128, 4, "transposed"),
    "fp8_token": FormatFacts(torch.float8_e4m3fn, torch.float32, None, 1, "row_major"),
    "mxfp8": FormatFacts(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32, 1, "tiles"),
    "nvfp4": FormatFacts(torch.uint8, torch.float8_e4m3fn, 16, 1, "tiles"),
    "mxfp4": FormatFacts(torch.uint8, torch.float8_e8m0fnu, 32, 1, "row_major"),
}


_FLOORED = ("fp8_block128", "fp8_block128_e8m0", "fp8_token")
"""Formats that count an amax below 1e-4 as 1e-4."""


def format_facts(name: str) -> FormatFacts:
    """Return the facts of a built-in format. Raises ValueError for one that the oracle does not know."""
    if name not in _FACTS:
        raise ValueError(f"format: expected one of {', '.join(_FACTS)}, got {name!r}; pass one of them")
    return _FACTS[name]


def nearest_code(x: Tensor, values: tuple[float, ...]) -> Tensor:
    """Return the index (int64) of the entry of the ascending table nearest to |x|; a tie goes to the even index.

    Larger values saturate at the last index; NaN gives no meaningful index.

    Example: values (0, .5, 1, 1.5): 0.25 -> 0, 0.75 -> 2, 0.76 -> 2, 100 -> 3.
    """
    table = torch.tensor(values, dtype=torch.float64, device=x.device)
    midpoints = (table[:-1] + table[1:]) / 2
    magnitude = x.abs().to(torch.float64)
    lower = torch.bucketize(magnitude, midpoints)
    upper = torch.bucketize(magnitude, midpoints, right=True)
    return torch.where(lower % 2 == 0, lower, upper)


def e4m3_codes(x: Tensor) -> Tensor:
    """Round to e4m3 codes (uint8): nearest even, saturating at 448; a negative result 0 is 0x80; NaN is 0x7f."""
    code = nearest_code(x, E4M3_VALUES) + 128 * torch.signbit(x)
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def e2m1_codes(x: Tensor) -> Tensor:
    """Round to e2m1 codes (uint8, one a byte): nearest even, saturating at 6; a negative result 0 is 8; NaN is 7."""
    code = nearest_code(x, E2M1_VALUES) + 8 * torch.signbit(x)
    return torch.where(x.isnan(), 7, code).to(torch.uint8)


def e8m0_codes_up(x: Tensor) -> Tensor:
    """Round up to the code (uint8) of the smallest E8M0 value not below ``x``; past 2**127 -> 254; NaN -> 255."""
    table = torch.tensor(E8M0_VALUES, dtype=torch.float64, device=x.device)
    code = torch.bucketize(x.to(torch.float64), table).clamp(max=254)
    return torch.where(x.isnan(), 255, code).to(torch.uint8)


def mxfp4_scale_codes(amax: Tensor) -> Tensor:
    """Return the E8M0 codes (uint8) of MXFP4: the number of c >= 1 with 1.75 * 2**(c + 1 - 127) <= amax; NaN -> 255.

    So a mantissa of 1.75 or more counts as the next power of two; then less 2, the exponent of e2m1's 4.
    1.6 -> 125 (2**-2), 1.75 -> 126 (2**-1); 0 -> 0.
    """
    steps = torch.tensor([math.ldexp(1.75, c - 126) for c in range(1, 255)], dtype=torch.float64, device=amax.device)
    code = torch.bucketize(amax.to(torch.float64), steps, right=True)
    return torch.where(amax.isnan(), 255, code).to(torch.uint8)


def _decode(codes: Tensor, table: tuple[float, ...]) -> Tensor:
    """Return the entries of ``table`` for integer codes as fp32, in which all tables are exact."""
    return torch.tensor(table, dtype=torch.float64, device=codes.device).to(torch.float32)[codes.long()]


def e4m3_floats(codes: Tensor) -> Tensor:
    """Convert e4m3 codes (uint8) to fp32, exactly."""
    half = (*E4M3_VALUES, math.nan)
    return _decode(codes, (*half, *(-value for value in half)))


def e2m1_floats(codes: Tensor) -> Tensor:
    """Convert e2m1 codes (uint8, one a byte) to fp32, exactly."""
    return _decode(codes, (*E2M1_VALUES, *(-value for value in E2M1_VALUES)))


def e8m0_floats(codes: Tensor) -> Tensor:
    """Convert E8M0 codes (uint8) to fp32, exactly."""
    return _decode(codes, (*E8M0_VALUES, math.nan))


def _constant(like: Tensor, value: float) -> Tensor:
    """Return a scalar tensor, because dividing by a Python number may multiply by its reciprocal."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _pack(codes: Tensor) -> Tensor:
    """Pack [n, hidden] 4-bit codes into [n, hidden / 2] bytes, the even element in the low nibble."""
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def _unpack(packed: Tensor) -> Tensor:
    """Undo :func:`_pack`."""
    return torch.stack((packed % 16, packed // 16), dim=2).reshape(packed.shape[0], -1)


def reference_quantize(name: str, x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Encode rows in a format.

    Args:
        name: a built-in format.
        x: [n, hidden] float.
        input_scale: fp32, one element, or None for 1; only nvfp4 uses it.

    Returns:
        Payload [n, width] of the format's payload dtype and row-major scales [n, hidden / group], or None. An int32
        of fp8_block128_e8m0 holds four codes, the first in the lowest byte; zero bytes fill a row's last one.

    Formulas, per group (amax: largest magnitude)::

        fp8_block128       scale = max(amax, 1e-4) / 448        q = e4m3(x / scale)
        fp8_token          the same, a row being the group
        fp8_block128_e8m0  scale = e8m0 not below that scale    q = e4m3(x / scale)
        mxfp8              scale = e8m0 not below amax / 448    q = e4m3(x / scale), 0 if the scale's code is 0
        nvfp4              sf = e4m3(s * (amax / 6))            q = e2m1(x / (sf / s)), 0 if sf is 0
        mxfp4              scale by mxfp4_scale_codes(amax)     q = e2m1(x / scale), 0 if the scale's code is 0
    """
    facts = format_facts(name)
    if facts.scale_dtype is None:
        return _plain(x, facts.payload_dtype), None
    groups = _groups(facts, x.to(torch.float32))
    amax = groups.abs().amax(dim=2)
    amax = torch.where(amax.isinf(), _F32_MAX, amax)
    if name in _FLOORED:
        scale = torch.maximum(amax, _constant(x, 1e-4)) / _constant(x, 448.0)
        scale = torch.where(scale.isnan(), math.nan, scale)
        stored = scale
        if facts.scale_dtype == torch.int32:
            stored = _pack_words(e8m0_codes_up(scale))
            scale = e8m0_floats(e8m0_codes_up(scale)).to(torch.float64)
        return e4m3_codes(groups / scale[:, :, None]).reshape(x.shape).view(facts.payload_dtype), stored
    if name == "nvfp4":
        s = _constant(x, 1.0) if input_scale is None else input_scale.to(torch.float32).reshape(())
        scale_codes = e4m3_codes(s * (amax / _constant(x, 6.0)))
        scaled = groups / (e4m3_floats(scale_codes) / s)[:, :, None]
    else:
        scale_codes = e8m0_codes_up(amax / _constant(x, 448.0)) if name == "mxfp8" else mxfp4_scale_codes(amax)
        scaled = groups.to(torch.float64) / e8m0_floats(scale_codes)[:, :, None]
    scaled = torch.where((scale_codes == 0)[:, :, None], 0.0, scaled)
    codes = (e4m3_codes if name == "mxfp8" else e2m1_codes)(scaled).reshape(x.shape)
    payload = codes.view(facts.payload_dtype) if name == "mxfp8" else _pack(codes)
    return payload, scale_codes.view(facts.scale_dtype)


def _groups(facts: FormatFacts, x: Tensor) -> Tensor:
    """Return [n, hidden] as [n, groups, elements of a group]."""
    group = facts.group or x.shape[1]
    return x.reshape(x.shape[0], x.shape[1] // group, group)


def _pack_words(codes: Tensor) -> Tensor:
    """Pack [n, g] bytes into [n, ceil(g / 4)] int32, the lowest byte first: 1, 2, 0, 128, 3 -> 513 - 2**31, 3."""
    words = torch.zeros(codes.shape[0], math.ceil(codes.shape[1] / 4), dtype=torch.int64, device=codes.device)
    for column in range(codes.shape[1]):
        words[:, column // 4] += codes[:, column].long() * 256 ** (column % 4)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _unpack_words(words: Tensor, count: int) -> Tensor:
    """Undo :func:`_pack_words` for rows of ``count`` codes."""
    unsigned = words.long() % 2**32
    return torch.stack([unsigned[:, c // 4] // 256 ** (c % 4) % 256 for c in range(count)], dim=1)


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in ``dtype``: the same bits if it has it, else nearest even; a NaN becomes bf16 0x7fff."""
    if dtype != torch.bfloat16 or x.dtype == dtype:
        return x.to(dtype)
    bits = x.to(dtype).view(torch.int16)
    return torch.where(x.isnan(), 0x7FFF, bits).to(torch.int16).view(dtype)


def reference_dequantize(
    name: str, payload: Tensor, scales: Tensor | None, input_scale: Tensor | None = None
) -> Tensor:
    """Return [n, hidden] fp32 (fp64 for format fp64) of payload rows and row-major scales.

    ``input_scale`` is fp32, one element or one per row [n]; None is 1. A product is rounded once; for nvfp4 the
    quotient sf / s is rounded before it.
    """
    facts = format_facts(name)
    if scales is None:
        return payload.to(torch.float64 if name == "fp64" else torch.float32)
    if facts.payload_dtype == torch.uint8:
        values = e2m1_floats(_unpack(payload))
    else:
        values = e4m3_floats(payload.view(torch.uint8))
    if facts.scale_dtype == torch.float32:
        steps = scales
    elif facts.scale_dtype == torch.int32:
        steps = e8m0_floats(_unpack_words(scales, _groups(facts, values).shape[1]))
    elif name == "nvfp4":
        s = _constant(payload, 1.0) if input_scale is None else input_scale.to(torch.float32)
        steps = e4m3_floats(scales.view(torch.uint8)) / s.reshape(-1, 1)
    else:
        steps = e8m0_floats(scales.view(torch.uint8))
    return (_groups(facts, values) * steps[:, :, None]).reshape(values.shape)
