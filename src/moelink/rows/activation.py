"""The gated activation between the two grouped matmuls, quantised for the second one.

The first matmul of an expert gives rows [gate | up]; ``silu_and_quantize`` gives ``silu(gate) * up`` in a format, laid
out as dispatch lays out its rows. How many rows there are is read on the device: the host never knows.

The arithmetic, each operation rounded once in fp32, none fused::

    z = gate / (1 + exp(-gate)) * up                                    silu
    z = g / (1 + exp(-(alpha * g))) * (u + 1)                           clamped: g = min(gate, limit),
                                                                                 u = clamp(up, -limit, limit)
    exp(x) = 2**n * P(r), n = round(x / ln 2), r = x - n ln 2           P of degree 6; x held in [-80, 89]

Guarantees:

* Torch twin and kernel agree **bit for bit**, interpreted and compiled, on CPU and CUDA, z included. (A NaN in format
  fp32 has unspecified bits.)
* Payload and scales are those of ``format.quantize(z)``; z is the result of format fp32.
* z is within 4 ulp of the exact value, clamped within 4 + abs(alpha * g), the cost of rounding alpha * g; as
  long as -gate (or -alpha * g) is below 88 and no step leaves the normal range of fp32. From 88.4 on, z is zero, where
  the exact silu is below 4e-37 * abs(up).
* NaN stays NaN, and gate = -inf gives NaN, as the formula does. The clamped variant takes inf for the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moelink.arguments import check_tensor
from moelink.errors import ArgumentError, UnsupportedError
from moelink.formats import Format, get_format
from moelink.rows import eager

Implementation = Literal["auto", "torch", "triton"]

_MOST = 3.0e38
_LEAST = 2.0**-126


@dataclass(frozen=True)
class Clamp:
    """The clamped variant ("SwiGLU-OAI"). Both numbers are positive and in the normal range of fp32.

    Attributes:
        alpha: factor of the gate inside the sigmoid.
        limit: upper bound of the gate, and bound of the magnitude of up.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        for name in ("alpha", "limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST <= value <= _MOST:
                raise ArgumentError(f"clamp.{name}", "a positive number in the normal range of fp32", value)


@dataclass(frozen=True)
class ActivationOutput:
    """Rows for the second grouped matmul, laid out as dispatch lays out ``tokens``, ``scales`` and ``scales_offsets``.

    Attributes:
        tokens: [rows, width] of the format's payload dtype.
        scales: in the format's layout, or None.
        scales_offsets: [num_groups] int32 for the 128x4 scale-tile layout, else None.
    """

    tokens: Tensor
    scales: Tensor | None
    scales_offsets: Tensor | None


def exp(x: Tensor) -> Tensor:
    """e**x of fp32 as the kernel computes it: 1.2 ulp for x in [-80, 88.3], inf above 88.38, e**-80 below -80."""
    x = x.clamp(-80.0, 89.0)
    shifted = x * 1.4426950216293335 + 12582912.0
    n = shifted - 12582912.0
    r = (x - n * 0.693359375) - n * -0.00021219444170128554
    p = r * 0.001381459878757596 + 0.008368716575205326
    for coefficient in (0.04166838899254799, 0.1666652113199234, 0.4999999403953552, 1.0, 1.0):
        p = p * r + coefficient
    return p * ((shifted.view(torch.int32) - 0x4B400000 + 127) << 23).view(torch.float32)


def gated_silu(x: Tensor, clamp: Clamp | None = None) -> Tensor:
    """z, fp32 [n, H], of rows [gate | up] [n, 2 H].

    >>> gated_silu(torch.tensor([[32.0, 0.0, 64.0, 1.0, 5.0, 2.0]]))
    tensor([[ 32.,   0., 128.]])
    >>> gated_silu(torch.tensor([[64.0, 32.0, 2.0, -9.0]]), Clamp(alpha=32.0, limit=7.0))
    tensor([[ 21., -42.]])
    """
    gate, up = x.to(torch.float32).chunk(2, dim=1)
    power = -gate
    if clamp is not None:
        gate, up = bounded(gate, up, clamp.limit)
        power = -(gate * clamp.alpha)
    return gate / (exp(power) + 1.0) * up


def bounded(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The gate of the clamped variant, at most ``limit``, and the factor beside it: up, held in its bounds, plus 1."""
    return gate.clamp(max=limit), up.clamp(-limit, limit) + 1.0


def silu_and_quantize(
    x: Tensor,
    row_offsets: Tensor,
    *,
    format: str,
    input_scales: Tensor | None = None,
    clamp: Clamp | None = None,
    scales_offsets: Tensor | None = None,
    out: ActivationOutput | None = None,
    implementation: Implementation = "auto",
) -> ActivationOutput:
    """``silu(gate) * up`` of the rows of a grouped matmul, in a format, for the next one.

    Only the ``row_offsets[-1]`` rows that exist are computed, padding rows inside groups like any other (zero rows give
    zero codes); later rows of the output are not touched. In 128x4 scale tiles, the scales of the rows behind each
    group, up to the next multiple of 128, are set to zero. Nothing synchronises with the host, except the torch twin
    on CUDA, which reads the row count. No autograd.

    Args:
        x: [rows, 2 H] bf16, fp16 or fp32, contiguous: gate in columns [0, H), up in [H, 2 H).
        row_offsets: [num_groups + 1] int32, as in :class:`moelink.DispatchOutput`.
        format: a format's name, except fp64. Its group must divide H.
        input_scales: fp32 [num_groups], one global scale a group, for formats that use one (nvfp4). None for 1.
        clamp: the clamped variant, or None.
        scales_offsets: those of the dispatch, for formats with 128x4 tiles. None to compute them from ``row_offsets``.
        out: an earlier output of the same sizes, to write into.
        implementation: "triton", the kernel (on CPU tensors only in Triton's interpreter: TRITON_INTERPRET=1 before
            triton is imported); "torch", the twin; "auto": "triton" on CUDA, "torch" elsewhere.

    Raises:
        ArgumentError: an argument is not as above.
        ConfigError: the format is not known, or its group does not divide H.
        UnsupportedError: the kernel cannot run here, or a registered format lacks device functions or has a layout of
            its own.
    """
    fmt = _check(x, row_offsets, format, input_scales, clamp, implementation)
    x, row_offsets, num_groups, layout = x.detach(), row_offsets.detach(), row_offsets.shape[0] - 1, fmt.scale_layout
    if scales_offsets is not None:
        if layout is None or layout.scales_offsets(row_offsets) is None:
            raise ArgumentError("scales_offsets", f"None (format {fmt.name!r} has no scale tiles)", "a tensor")
        check_tensor("scales_offsets", scales_offsets, shape=(num_groups,), dtypes=(torch.int32,), device=x.device)
    elif layout is not None:
        scales_offsets = layout.scales_offsets(row_offsets)
    tokens, scales = _outputs(fmt, x, num_groups, out)
    result = ActivationOutput(tokens, scales, scales_offsets)
    if implementation == "triton" or (implementation == "auto" and eager.takes_kernels(x)):
        _check_kernel(fmt, x.device)
        _launch(x, row_offsets, result, input_scales, fmt, clamp)
    else:
        _run_twin(x, row_offsets, tokens, scales, input_scales, fmt, clamp)
    return result


def quantize_activation(
    x: Tensor, row_offsets: Tensor, fmt: Format, clamp: Clamp | None, *, likely_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`silu_and_quantize` to a built-in format with scales and without tiles, of arguments that fit.
    ``likely_rows``: as of :func:`moelink.rows.grouped_choice.tile_rows`."""
    tokens, scales = _outputs(fmt, x, row_offsets.shape[0] - 1, None)
    assert scales is not None
    if eager.takes_kernels(x):
        _launch(x, row_offsets, ActivationOutput(tokens, scales, None), None, fmt, clamp, likely_rows)
    else:
        _run_twin(x, row_offsets, tokens, scales, None, fmt, clamp)
    return tokens, scales


def _launch(
    x: Tensor, row_offsets: Tensor, out: ActivationOutput, input_scales: Tensor | None, fmt: Format,
    clamp: Clamp | None, likely_rows: int | None = None,
) -> None:  # fmt: skip
    from moelink.rows import activation_kernel as kernel

    pair = None if clamp is None else (float(clamp.alpha), float(clamp.limit))
    kernel.launch(
        x, row_offsets, out.tokens, out.scales, out.scales_offsets, input_scales, fmt, pair, likely_rows=likely_rows
    )


def _check(
    x: Tensor, row_offsets: Tensor, format: str, input_scales: Tensor | None, clamp: Clamp | None, implementation: str
) -> Format:
    fmt = get_format(format)
    if fmt.payload_dtype == torch.float64:
        raise ArgumentError("format", "a format of at most 32 bits an element (the arithmetic is fp32)", repr(format))
    if implementation not in get_args(Implementation):
        raise ArgumentError("implementation", f"one of {', '.join(get_args(Implementation))}", repr(implementation))
    if not isinstance(x, Tensor):
        raise ArgumentError("x", "a tensor", type(x).__name__)
    check_tensor("x", x, shape=(None, None), dtypes=(torch.bfloat16, torch.float16, torch.float32), device=x.device)
    if x.shape[1] % 2 or not x.shape[1]:
        raise ArgumentError("x", "an even number of columns, [gate | up]", x.shape[1])
    fmt.validate_hidden(x.shape[1] // 2)
    check_tensor("row_offsets", row_offsets, shape=(None,), dtypes=(torch.int32,), device=x.device)
    if not len(row_offsets):
        raise ArgumentError("row_offsets", "num_groups + 1 offsets", "none")
    if input_scales is not None:
        if not fmt.uses_input_scale:
            raise ArgumentError("input_scales", f"None (format {fmt.name!r} has no global scale)", "a tensor")
        shape = (len(row_offsets) - 1,)
        check_tensor("input_scales", input_scales, shape=shape, dtypes=(torch.float32,), device=x.device)
    if clamp is not None and not isinstance(clamp, Clamp):
        raise ArgumentError("clamp", "a Clamp or None", type(clamp).__name__)
    return fmt


def _outputs(fmt: Format, x: Tensor, num_groups: int, out: ActivationOutput | None) -> tuple[Tensor, Tensor | None]:
    """``tokens`` and ``scales`` to fill for rows ``x``: those of ``out``, or new ones."""
    rows, hidden, layout = x.shape[0], x.shape[1] // 2, fmt.scale_layout
    tokens = (rows, fmt.payload_width(hidden)), fmt.payload_dtype
    scales = None
    if layout is not None and fmt.scale_dtype is not None:
        scales = layout.shape(rows, fmt.scale_width(hidden), num_groups), fmt.scale_dtype
    if out is None:
        made = x.new_empty(tokens[0], dtype=tokens[1])
        return made, None if scales is None else x.new_empty(scales[0], dtype=scales[1])
    if not isinstance(out, ActivationOutput):
        raise ArgumentError("out", "an ActivationOutput", type(out).__name__)
    for name, kind in (("tokens", tokens), ("scales", scales)):
        if kind is not None:
            check_tensor(f"out.{name}", getattr(out, name), shape=kind[0], dtypes=(kind[1],), device=x.device)
    return out.tokens, None if scales is None else out.scales


def _check_kernel(fmt: Format, device: torch.device) -> None:
    from moelink.kernels.launch.device import is_interpreted
    from moelink.rows.common_kernel import LAYOUTS

    if device.type != "cuda" and not is_interpreted():
        raise UnsupportedError(
            "implementation: expected CUDA tensors for the kernel, or Triton's interpreter (TRITON_INTERPRET=1, set "
            f"before triton is imported), got tensors on {device}; use implementation='torch'"
        )
    if fmt.scale_layout is not None and fmt.scale_layout.name not in LAYOUTS:
        raise UnsupportedError(
            f"implementation: expected one of the scale layouts {', '.join(LAYOUTS)} for the kernel, got "
            f"{fmt.scale_layout.name!r} of format {fmt.name!r}; use implementation='torch'"
        )


def _run_twin(
    x: Tensor, row_offsets: Tensor, tokens: Tensor, scales: Tensor | None, input_scales: Tensor | None, fmt: Format,
    clamp: Clamp | None,
) -> None:  # fmt: skip
    offsets = [min(offset, len(x)) for offset in row_offsets.tolist()]
    for group, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if start == end:
            continue
        quantized = fmt.quantize(gated_silu(x[start:end], clamp), None if input_scales is None else input_scales[group])
        tokens[start:end] = quantized.payload
        if scales is not None and quantized.scales is not None and fmt.scale_layout is not None:
            rows = torch.arange(start, end, device=x.device)
            where = {"rows": rows, "groups": torch.full_like(rows, group), "row_offsets": row_offsets}
            fmt.scale_layout.scatter(scales, quantized.scales, **where)
    if scales is not None and fmt.scale_layout is not None:
        sizes = row_offsets[1:] - row_offsets[:-1]
        fmt.scale_layout.clear_padding(scales, row_offsets=row_offsets, group_sizes=sizes)
