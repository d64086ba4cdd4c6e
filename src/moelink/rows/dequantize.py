"""Dequantise received rows, with gradients that flow through them to the dispatched tokens (straight-through)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.errors import UnsupportedError
from moelink.formats import get_format
from moelink.formats.base import require_codes
from moelink.formats.plain import Plain
from moelink.output import DispatchOutput, carrier_of
from moelink.rows import eager
from moelink.rows.scale_rows import cast_rows, count_rows, without_tail


class Configured(Protocol):
    """An object with a configuration, such as a communicator."""

    @property
    def config(self) -> EPConfig:
        """The validated configuration."""


class _Straight(torch.autograd.Function):
    """Return ``value``; pass its gradient on to ``carrier``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, carrier: Tensor, row_offsets: Tensor) -> Tensor:
        ctx.dtype = carrier.dtype
        ctx.save_for_backward(row_offsets)
        return value.view_as(value)

    @staticmethod
    @eager.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, _carried(ctx, grad), None


class _Dequantize(torch.autograd.Function):
    """Return dequantised rows; pass their gradient on to ``carrier``."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, *given: Any) -> Tensor:
        ctx.dtype, ctx.given = carrier.dtype, len(given)
        ctx.save_for_backward(given[2])
        return _dequantize_rows(*given)

    @staticmethod
    @eager.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _carried(ctx, grad), *[None] * ctx.given


def _carried(ctx: Any, grad: Tensor) -> Tensor:
    (row_offsets,) = ctx.saved_tensors
    return without_tail(cast_rows(grad, row_offsets, ctx.dtype), row_offsets)


def dequantize(
    ep: Configured, recv: DispatchOutput, *, input_scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Dequantise ``recv.tokens`` of any format to [rows, hidden_size] of ``dtype`` (default: ``combine_dtype``).

    Gradients flow through the result to the dispatched tokens, as if without rounding (straight-through). Rows past
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

    Raises:
        UnsupportedError: the layout is "masked", or rows stay in the workspace (``zero_copy``).

    Rows that already have ``dtype`` in a format that carries numbers as they are (bf16, fp32, fp64) are not copied. Of
    others only those that exist are read and written; a kernel asks the device how many.
    """
    if config.layout == "masked":
        raise UnsupportedError(
            "dequantize: expected an output of layout 'expert' or 'rank', got one of 'masked', whose scales are for "
            "masked grouped matmuls; use one of these for the experts, or init(dispatch_format='bf16')"
        )
    if config.zero_copy:
        raise UnsupportedError(
            "dequantize: expected rows in tensors of their own, got rows in the workspace (zero_copy=True), which "
            "grouped matmuls read by recv.rows_by_expert(); leave zero_copy out"
        )
    fmt, scales = config.format, recv.scales
    dtype = dtype or config.combine_dtype
    if scales is None or fmt.scale_layout is None:
        if isinstance(fmt, Plain):
            return cast_rows(recv.tokens, recv.row_offsets, dtype)
        return fmt.dequantize(recv.tokens, None, input_scale).to(dtype)
    given = (
        recv.tokens, scales, recv.row_offsets, recv.scales_offsets, input_scale, fmt.name, config.hidden_size, dtype,
        config.layout == "rank",
    )  # fmt: skip
    carrier = carrier_of(recv)
    if eager.is_unseen((carrier, *given)):
        if carrier is not None and carrier.requires_grad and torch.is_grad_enabled():
            return eager.apply(_Dequantize, carrier, *given)  # type: ignore[no-any-return]
        return _dequantize_rows(*given)
    with torch.no_grad():
        value = torch.ops.moelink.dequantize_rows(*given)
    if carrier is None:
        return value  # type: ignore[no-any-return]
    return _Straight.apply(value, carrier, recv.row_offsets)  # type: ignore[no-any-return, no-untyped-call]


def _dequantize_rows(
    tokens: Tensor, scales: Tensor, row_offsets: Tensor, scales_offsets: Tensor | None, input_scale: Tensor | None,
    format: str, hidden_size: int, dtype: torch.dtype, by_row: bool = False,
) -> Tensor:  # fmt: skip
    """``by_row``: scales are row-major in any layout of the format, as in layout "rank"."""
    fmt = get_format(format)
    if eager.takes_kernels(tokens):
        from moelink.rows.dequantize_kernel import can_dequantize

        if can_dequantize(fmt):
            given = [each for each in (tokens, scales, row_offsets, scales_offsets, input_scale) if each is not None]
            has = scales_offsets is not None, input_scale is not None
            narrow = torch.float32 if dtype == torch.float64 else dtype
            (made,) = eager.repeated(tuple(given), _by_kernel, *has, format, hidden_size, narrow, by_row)
            return cast_rows(made, row_offsets, dtype)
    out = torch.empty(tokens.shape[0], hidden_size, dtype=dtype, device=tokens.device)
    # A CPU has the number of rows on the host. On other devices it would have to wait, so all rows are read.
    count = out.shape[0] if tokens.is_cuda else count_rows(row_offsets, out.shape[0])
    by_rows = scales[:count]
    if not by_row:
        rows = torch.arange(count, device=tokens.device)
        groups = torch.searchsorted(row_offsets[1:].contiguous(), rows, right=True)
        assert fmt.scale_layout is not None
        by_rows = fmt.scale_layout.gather(
            scales, rows=rows, groups=groups.clamp(max=row_offsets.shape[0] - 2), row_offsets=row_offsets,
            scale_width=fmt.scale_width(hidden_size),
        )  # fmt: skip
    out[:count] = fmt.dequantize(tokens[:count], by_rows, input_scale).to(dtype)
    return out


def _by_kernel(tokens: Tensor, scales: Tensor, row_offsets: Tensor, *given: Any) -> tuple[tuple[Tensor], tuple[()]]:
    """``given``: the offsets of scales and the input scale if there are such, whether there are, and what else
    ``moelink::dequantize_rows`` takes."""
    from moelink.rows.dequantize_kernel import launch

    *tensors, has_offsets, has_scale, format, hidden_size, dtype, by_row = given
    offsets, scale = tensors[0] if has_offsets else None, tensors[-1] if has_scale else None
    fmt = get_format(format)
    require_codes(fmt, tokens, scales)
    out = torch.empty(tokens.shape[0], hidden_size, dtype=dtype, device=tokens.device)
    launch(tokens, scales, row_offsets, offsets, scale, out, fmt, by_row=by_row)
    return (out,), ()


def _dequantize_rows_fake(tokens: Tensor, *others: Any) -> Tensor:
    hidden_size, dtype = others[5:7]
    return tokens.new_empty(tokens.shape[0], hidden_size, dtype=dtype)


torch.library.custom_op("moelink::dequantize_rows", _dequantize_rows, mutates_args=()).register_fake(
    _dequantize_rows_fake
)
