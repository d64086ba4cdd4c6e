"""Share the common part of the quantised formats: rows split into groups of elements, and a group's largest
magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from moelink.errors import ArgumentError
from moelink.formats.base import Format
from moelink.formats.casts import F32_MAX


def check_rows(fmt: Format, x: Tensor, input_scale: Tensor | None) -> None:
    """Refuse what ``fmt.quantize`` does not take: a wrong shape or dtype, a group that does not divide, an unused
    scale."""
    if x.dim() != 2:
        raise ArgumentError("x", "a tensor [n, hidden]", f"shape {list(x.shape)}")
    if x.dtype not in fmt.input_dtypes:
        raise ArgumentError("x", f"one of {', '.join(map(str, fmt.input_dtypes))} (format {fmt.name!r})", x.dtype)
    fmt.validate_hidden(x.shape[1])
    if input_scale is not None and not fmt.uses_input_scale:
        raise ArgumentError("input_scale", f"None (format {fmt.name!r} has no global scale)", "a tensor")


def split(fmt: Format, x: Tensor, input_scale: Tensor | None = None) -> Tensor:
    """Check [n, hidden] and split it into fp32 [n, g, elements], g parts that share a scale each."""
    check_rows(fmt, x, input_scale)
    return _parts(fmt, x.to(torch.float32))


def _parts(fmt: Format, x: Tensor) -> Tensor:
    elements = fmt.elements_per_scale(x.shape[1])
    return x.reshape(x.shape[0], x.shape[1] // elements, elements)


def amax(groups: Tensor) -> Tensor:
    """Return the largest magnitude of each group, [n, g, group] to [n, g]. An inf counts as the largest fp32; a NaN
    gives NaN."""
    return groups.abs().amax(dim=-1).clamp(max=F32_MAX)


def join(fmt: Format, values: Tensor, scales: Tensor) -> Tensor:
    """Undo :func:`split`: fp32 [n, hidden] of codes as fp32 [n, hidden] times scales [n, g]."""
    return (_parts(fmt, values) * scales[..., None]).view(values.shape)


def require_scales(fmt: Format, scales: Tensor | None) -> Tensor:
    """Return the scales, which ``fmt.dequantize`` needs; refuse None."""
    if scales is None:
        raise ArgumentError("scales", f"the scales of format {fmt.name!r}", None)
    return scales
