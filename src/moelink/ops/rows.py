"""Dequantise received rows, with gradients that flow through them to what was dispatched (straight-through)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moelink.config import EPConfig
from moelink.formats import get_format
from moelink.formats.plain import Plain
from moelink.output import DispatchOutput


class Configured(Protocol):
    """An object with a configuration, such as a communicator."""

    @property
    def config(self) -> EPConfig:
        """The validated configuration."""


class _Straight(torch.autograd.Function):
    """Return ``value``; pass its gradient on to ``carrier``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, carrier: Tensor) -> Tensor:
        ctx.dtype = carrier.dtype
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.to(ctx.dtype)


def dequantize(
    ep: Configured, recv: DispatchOutput, *, input_scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Dequantise ``recv.tokens`` of any format to [rows, hidden_size] of ``dtype`` (default: ``combine_dtype``).

    Gradients flow through the result to what was dispatched as if it had not been rounded (straight-through). Rows past
    the last offset are undefined. ``input_scale`` is the one that was passed to dispatch (format nvfp4).

    Example:
        >>> import torch, moelink
        >>> from moelink.ops import dequantize
        >>> x = torch.randn(3, 128, requires_grad=True)
        >>> with moelink.init(num_experts=2, topk=1, hidden_size=128, max_tokens_per_rank=3,
        ...                   dispatch_format="fp8_block128", combine_dtype=torch.float32) as ep:
        ...     recv = ep.dispatch(x, torch.tensor([[0], [1], [0]]))
        ...     out = ep.combine(2 * dequantize(ep, recv), recv)
        ...     out.sum().backward()
        >>> bool((out - 2 * x).abs().max() < 0.5), x.grad.unique().tolist()
        (True, [2.0])
    """
    return dequantized(recv, ep.config, input_scale=input_scale, dtype=dtype)


def dequantized(
    recv: DispatchOutput, config: EPConfig, *, input_scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Dequantise as :func:`dequantize`, from the configuration alone. Does not synchronise with the host.

    Rows that already have ``dtype`` in a format that carries numbers as they are (bf16, fp32, fp64) are not copied. Of
    quantised rows in layout "expert" only those that exist are read and written; a kernel asks the device how many.
    """
    fmt, scales = config.format, recv.scales
    dtype = dtype or config.combine_dtype
    if scales is None or fmt.scale_layout is None:
        if isinstance(fmt, Plain):
            return recv.tokens.to(dtype)
        return fmt.dequantize(recv.tokens, None, input_scale).to(dtype)
    with torch.no_grad():
        if config.layout == "expert":
            value = torch.ops.moelink.dequantize_rows(
                recv.tokens, scales, recv.row_offsets, recv.scales_offsets, input_scale, fmt.name, config.hidden_size,
                dtype,
            )  # fmt: skip
        else:
            value = fmt.dequantize(recv.tokens, scales, input_scale).to(dtype)
    carrier = recv.handle.carrier
    return value if carrier is None else _Straight.apply(value, carrier)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("moelink::dequantize_rows", mutates_args=())
def _dequantize_rows(
    tokens: Tensor,
    scales: Tensor,
    row_offsets: Tensor,
    scales_offsets: Tensor | None,
    input_scale: Tensor | None,
    format: str,
    hidden_size: int,
    dtype: torch.dtype,
) -> Tensor:
    fmt = get_format(format)
    out = torch.empty(tokens.shape[0], hidden_size, dtype=dtype, device=tokens.device)
    if tokens.is_cuda and dtype != torch.float64:
        from moelink.kernels import dequantize as kernel

        if kernel.can_dequantize(fmt):
            kernel.launch(tokens, scales, row_offsets, scales_offsets, input_scale, out, fmt)
            return out
    # Nobody waits for a device here on CPUs; elsewhere all rows are read, as the host does not know how many there are.
    count = out.shape[0] if tokens.is_cuda else min(int(row_offsets[-1]), out.shape[0])
    rows = torch.arange(count, device=tokens.device)
    groups = torch.searchsorted(row_offsets[1:].contiguous(), rows, right=True)
    assert fmt.scale_layout is not None
    by_row = fmt.scale_layout.gather(
        scales,
        rows=rows,
        groups=groups.clamp(max=row_offsets.shape[0] - 2),
        row_offsets=row_offsets,
        scale_width=fmt.scale_width(hidden_size),
    )
    out[:count] = fmt.dequantize(tokens[:count], by_row, input_scale).to(dtype)
    return out


@_dequantize_rows.register_fake
def _dequantize_rows_fake(
    tokens: Tensor,
    scales: Tensor,
    row_offsets: Tensor,
    scales_offsets: Tensor | None,
    input_scale: Tensor | None,
    format: str,
    hidden_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return tokens.new_empty(tokens.shape[0], hidden_size, dtype=dtype)
