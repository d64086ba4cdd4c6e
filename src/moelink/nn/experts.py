"""Feed-forward blocks: of experts over received rows, by grouped matrix products; and dense, for shared experts.

Legend: ``R`` rows, ``H`` hidden_size, ``I`` intermediate_size, ``G`` groups. ``row_offsets`` [G + 1] int32 are
exclusive starts; group g is rows ``row_offsets[g]`` to ``row_offsets[g + 1]``; rows from ``row_offsets[-1]`` on are
undefined, in and out.

``torch._grouped_mm`` is used if it runs (:func:`has_grouped_mm`), else a plain loop over groups. Rows of quantised
formats become numbers first (:func:`moelink.nn.dequantized`): torch has no grouped product for rows with the scales of
``fp8_block128``, and its products for other formats need quantised weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moelink.arith import ceil_div
from moelink.config import EPConfig
from moelink.errors import ArgumentError, UnsupportedError
from moelink.nn.parameters import SHARED, draw
from moelink.rows import eager
from moelink.rows.activation import Clamp
from moelink.rows.batch_invariant import multiply, refuse_weight
from moelink.rows.gated import GatedActivation, activate, gated_activation, gradient, known_activation
from moelink.rows.scale_rows import looks_for_nan, without_tail

Activation = Callable[[Tensor], Tensor]
"""A function of each element, such as ``torch.nn.functional.silu``."""

_ALIGNMENT = 16
_MAX_GROUPS = 1023


def known_max_tokens(config: EPConfig, num_tokens: int) -> int | None:
    """Return ``max_tokens`` of a dispatch of this rank's ``num_tokens`` if only own tokens arrive here (one rank, or
    mode "allreduce"), else None: other ranks would have to be asked."""
    return num_tokens if config.world_size == 1 or config.mode == "allreduce" else None


def likely_rows(config: EPConfig, max_tokens: int | None) -> int:
    """Return how many rows a dispatch with this ``max_tokens`` (None: ``max_tokens_per_rank``) is likely to give, in
    layout "expert" and without padding: as many as uniform routing of so many tokens on every rank sends here, or
    ``capacity`` where that is smaller. Of symbols, as tracers have them, it asks nothing.

    Example: of 2 ranks, topk 2: 16 tokens of each are 64 rows, of which each rank is likely to have 32.
    """
    tokens = config.max_tokens_per_rank if max_tokens is None else max_tokens
    rows = tokens * (config.topk + int(config.fused_shared_expert))
    if config.mode == "allreduce":
        rows = ceil_div(rows, config.world_size)
    return torch.sym_min(config.output_rows(max_tokens), rows)  # type: ignore[no-any-return]


def grouped_experts(
    tokens: Tensor, row_offsets: Tensor, gate_up: Tensor, down: Tensor, *, activation: Activation,
    batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """``down[g] (activation(gate) * up)`` with ``[gate | up] = gate_up[g] row`` for every row of every group g.

    Args:
        tokens: [R, H], bf16, fp16, fp32 or fp64.
        row_offsets: [G + 1] int32 on the device of ``tokens``.
        gate_up: [G, 2 * I, H] of the dtype of ``tokens``: in each group I rows of gate, then I rows of up.
        down: [G, H, I] of the same dtype.
        activation: of gate: a function, or a :class:`moelink.activation.Clamp`. Functions that
            :func:`moelink.rows.gated.known_activation` knows compute only the rows that exist.
        batch_invariant: the bits of a row, and of its gradient, do not depend on other rows
            (:mod:`moelink.rows.batch_invariant`). Group sizes are then read on the host.

    Returns:
        [R, H] of the same dtype, differentiable in ``tokens``, ``gate_up`` and ``down``. Groups without rows give
        zero gradients.

    With :func:`has_grouped_mm` on CUDA nothing synchronises with the host and a CUDA graph may capture it; without it
    group sizes are read on the host.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.
        UnsupportedError: a CUDA graph is being captured and group sizes would have to be read on the host; or with
            ``batch_invariant`` as :func:`refuse_experts`.

    Example:
        >>> import torch
        >>> gate_up, down = torch.tensor([[[1.0], [2.0]], [[1.0], [3.0]]]), torch.ones(2, 1, 1)
        >>> rows, row_offsets = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 2], dtype=torch.int32)
        >>> grouped_experts(rows, row_offsets, gate_up, down, activation=torch.relu).tolist()
        [[2.0], [12.0]]
    """
    if gate_up.dim() != 3 or gate_up.shape[1] % 2:
        raise ArgumentError("gate_up", "shape [G, 2 * intermediate_size, H]", list(gate_up.shape))
    groups, doubled, hidden = gate_up.shape
    if down.shape != (groups, hidden, doubled // 2):
        raise ArgumentError("down", f"shape {[groups, hidden, doubled // 2]}, as gate_up has it", list(down.shape))
    if batch_invariant:
        refuse_experts(activation, gate_up, down, gate_up.device)
    known = None if batch_invariant else known_activation(activation)
    if known is not None and _fits_node(tokens, row_offsets, gate_up, down):
        given = tokens, gate_up, down, row_offsets, known
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in given[:3])
        return eager.apply(_GroupedExperts, *given) if recorded else _products(*given)[-1]  # type: ignore[no-any-return]
    inner = grouped_matmul(tokens, row_offsets, gate_up, batch_invariant)
    inner = gated_activation(inner, row_offsets, activation, batch_invariant)
    return grouped_matmul(inner, row_offsets, down, batch_invariant)


def refuse_experts(activation: Activation | Clamp | None, gate_up: Tensor, down: Tensor, device: torch.device) -> None:
    """Raise UnsupportedError for experts on ``device`` that cannot be batch-invariant: another activation than silu or
    a Clamp (None: no gate, or a norm), fp64, or sizes of which products are not."""
    known = None if activation is None else known_activation(activation)
    if known is None or known.kind not in ("silu", "clamped") or down.dtype == torch.float64:
        raise UnsupportedError(
            "batch_invariant: expected experts with a gate, without a norm, of the activation silu or a "
            f"moelink.activation.Clamp and of at most 32 bits, got {activation!r} and {down.dtype}; change them, or "
            "leave batch_invariant out"
        )
    for weight in (gate_up, down):
        refuse_weight(weight.shape[1:], weight.dtype, device)


def as_group(rows: Tensor) -> Tensor:
    """Return the offsets [2] int32 of one group of all ``rows``."""
    return torch.tensor([0, rows.shape[0]], dtype=torch.int32, device=rows.device)


def grouped_matmul(rows: Tensor, row_offsets: Tensor, weight: Tensor, batch_invariant: bool = False) -> Tensor:
    """``rows @ weight[g].T`` for the rows of each group g: [R, K] and [G, N, K] give [R, N].

    Raises: as :func:`grouped_experts`.
    """
    _check(rows, row_offsets, weight)
    if batch_invariant:
        return torch.ops.moelink.matmul_by_group(rows, row_offsets, weight, True)  # type: ignore[no-any-return]
    # The plain loop makes zeros of the rows that do not exist, and of their gradients.
    if _fits_grouped_mm(rows, weight) and not looks_for_nan():
        if torch.is_grad_enabled() and _leaves_empty_groups(rows.device):
            weight = _ZeroGradWithoutRows.apply(weight, row_offsets)  # type: ignore[no-untyped-call]
        out = torch._grouped_mm(rows.contiguous(), weight.transpose(1, 2), offs=row_offsets[1:])
        return out if not out.requires_grad else _ContiguousGrad.apply(out)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.moelink.matmul_by_group(rows, row_offsets, weight)  # type: ignore[no-any-return]


def group_of_rows(row_offsets: Tensor, rows: int) -> Tensor:
    """[rows] int32: the group of each row, -1 for rows that do not exist.

    >>> group_of_rows(torch.tensor([0, 2, 2, 3]), 4).tolist()
    [0, 0, 2, -1]
    """
    row = torch.arange(rows, dtype=row_offsets.dtype, device=row_offsets.device)
    group = torch.searchsorted(row_offsets[1:].contiguous(), row, right=True, out_int32=True)
    return group.where(row < row_offsets[-1], -1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch._grouped_mm`` runs for this device and dtype, on CUDA without a host synchronisation.

    bf16 on CUDA of compute capability 9.0 and 10.x, and on CPU. Other devices take a path inside torch that reads the
    offsets on the host, and other dtypes have no shape rule there, without which nothing can be traced.
    """
    return _has_grouped_mm(torch.device(device), dtype)


@cache
def _has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype != torch.bfloat16:
        return False
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device)[0] in (9, 10)
    return device.type == "cpu"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _leaves_empty_groups(device: torch.device) -> bool:
    """Whether ``torch._grouped_mm`` leaves the weight gradient of groups without rows unwritten.

    It does on compute capability 10.x (pytorch issue 172439), and writes zeros on 9.0 and on CPU.
    """
    return device.type == "cuda" and _is_10(device)


@cache  # torch looks at the driver's state at each question
def _is_10(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 10


def _fits_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """Besides device and dtype: rows of 16 bytes for the memory loads, groups that its kernel can count."""
    groups, columns, inner = weight.shape
    aligned = columns * rows.element_size() % _ALIGNMENT == 0 and inner * rows.element_size() % _ALIGNMENT == 0
    if not aligned or rows.shape[0] == 0 or not 0 < groups <= _MAX_GROUPS or not columns * inner:
        return False
    by_row_or_column = weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()
    return by_row_or_column and bool(has_grouped_mm(rows.device, rows.dtype))


def _check(rows: Tensor, row_offsets: Tensor, weight: Tensor) -> None:
    if weight.dim() != 3:
        raise ArgumentError("weight", "shape [G, N, K]", list(weight.shape))
    if rows.dim() != 2 or rows.shape[1] != weight.shape[2]:
        raise ArgumentError("tokens", f"shape [R, {weight.shape[2]}]", list(rows.shape))
    if rows.dtype != weight.dtype or not rows.is_floating_point():
        raise ArgumentError("tokens", f"dtype {weight.dtype}, that of the weights", rows.dtype)
    if row_offsets.shape != (weight.shape[0] + 1,) or row_offsets.dtype != torch.int32:
        got = f"{row_offsets.dtype} {list(row_offsets.shape)}"
        raise ArgumentError("row_offsets", f"int32 [{weight.shape[0] + 1}], one more than groups", got)
    for name, tensor in (("row_offsets", row_offsets), ("weight", weight)):
        if tensor.device != rows.device:
            raise ArgumentError(name, f"device {rows.device}", tensor.device)


def _fits_node(tokens: Tensor, row_offsets: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Return whether :class:`_GroupedExperts` computes these experts: nothing traces, and torch's grouped product takes
    its tensors as they are and writes all that it returns. Checks them first."""
    if not eager.is_unseen((tokens, row_offsets, gate_up, down)) or looks_for_nan():
        return False
    _check(tokens, row_offsets, gate_up)
    if not (tokens.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()):
        return False
    # down has the sizes that belong to gate_up's, so its dtype and device are left.
    same = down.dtype == gate_up.dtype and down.device == gate_up.device
    aligned = gate_up.shape[1] // 2 * gate_up.element_size() % _ALIGNMENT == 0
    return same and aligned and _fits_grouped_mm(tokens, gate_up) and not _leaves_empty_groups(tokens.device)


def _products(
    tokens: Tensor, gate_up: Tensor, down: Tensor, row_offsets: Tensor, known: GatedActivation
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of the first product, of the activation, and of the second product."""
    ends = row_offsets[1:]
    between = torch._grouped_mm(tokens, gate_up.transpose(1, 2), offs=ends)
    inner = activate(between, row_offsets, known.kind, known.alpha, known.limit)
    return between, inner, torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)


class _GroupedExperts(torch.autograd.Function):
    """:func:`grouped_experts` as one function, with the products that torch makes of the gradient of each part. Torch's
    own functions of each part take more host time than to launch them."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, gate_up: Tensor, down: Tensor, row_offsets: Tensor, known: GatedActivation
    ) -> Tensor:
        between, inner, out = _products(tokens, gate_up, down, row_offsets, known)
        ctx.known = known
        ctx.save_for_backward(tokens, gate_up, down, row_offsets, between, inner)
        return out

    @staticmethod
    @eager.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, gate_up, down, row_offsets, between, inner = ctx.saved_tensors
        wants_tokens, wants_gate_up, wants_down = ctx.needs_input_grad[:3]
        known, ends, grad = ctx.known, row_offsets[1:], grad.contiguous()  # a broadcast one is not
        dtokens = dgate_up = ddown = None
        if wants_down:
            ddown = torch._grouped_mm(grad.t(), inner, offs=ends)
        if wants_tokens or wants_gate_up:
            dinner = torch._grouped_mm(grad, down, offs=ends)
            d = gradient(dinner, between, row_offsets, known.kind, known.alpha, known.limit, False)
            if wants_tokens:
                dtokens = without_tail(torch._grouped_mm(d, gate_up, offs=ends), row_offsets)
            if wants_gate_up:
                dgate_up = torch._grouped_mm(d.t(), tokens, offs=ends)
        return dtokens, dgate_up, ddown, None, None


class _ContiguousGrad(torch.autograd.Function):
    """The identity; its gradient is contiguous, as ``torch._grouped_mm`` needs it and a broadcast one is not."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _ZeroGradWithoutRows(torch.autograd.Function):
    """The identity on weights; its gradient is zero for groups without rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, row_offsets: Tensor) -> Tensor:
        ctx.save_for_backward(row_offsets)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (row_offsets,) = ctx.saved_tensors
        return grad.where((row_offsets[1:] > row_offsets[:-1])[:, None, None], 0), None


class GatedMLP(torch.nn.Module):
    """``down (activation(gate x) * (up x))`` with ``[gate | up] = gate_up_proj``; no biases.

    Args:
        hidden_size, intermediate_size: elements of a token, and of a row between the two products.
        activation: of the gate.
        seed: of :meth:`reset_parameters`.
        batch_invariant: the bits of a row do not depend on other rows, as of :func:`grouped_experts`.
        device, dtype: of the parameters.

    Attributes:
        gate_up_proj: [2 * intermediate_size, hidden_size], rows of gate before rows of up.
        down_proj: [hidden_size, intermediate_size].
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = torch.nn.functional.silu,
        seed: int = 0,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.seed, self.batch_invariant = activation, seed, batch_invariant
        new = {"device": device, "dtype": dtype}
        self.gate_up_proj = torch.nn.Parameter(torch.empty(2 * intermediate_size, hidden_size, **new))  # type: ignore[arg-type]
        self.down_proj = torch.nn.Parameter(torch.empty(hidden_size, intermediate_size, **new))  # type: ignore[arg-type]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weights that ``seed`` gives, on any number of ranks."""
        draw(self.gate_up_proj, seed=self.seed, stream=SHARED)
        draw(self.down_proj, seed=self.seed, stream=SHARED + 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] to the same."""
        if self.batch_invariant:
            rows, stacked = x.reshape(-1, x.shape[-1]), (self.gate_up_proj[None], self.down_proj[None])
            return grouped_experts(
                rows, as_group(rows), *stacked, activation=self.activation, batch_invariant=True
            ).view(x.shape)
        gate, up = torch.nn.functional.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.nn.functional.linear(self.activation(gate) * up, self.down_proj)


# --- the plain loop: operators, so that a compiler need not follow sizes that only the host knows ---------------------


def _bounds(row_offsets: Tensor) -> list[tuple[int, int]]:
    """(start, end) of each group, on the host."""
    if row_offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "experts: expected a grouped matmul that a CUDA graph can capture, got one whose group sizes are read on "
            "the host; use bf16 weights with hidden_size and intermediate_size multiples of 8, on compute capability "
            "9.0 or 10.x, without batch_invariant"
        )
    offsets = row_offsets.tolist()
    return list(zip(offsets[:-1], offsets[1:], strict=True))


@torch.library.custom_op("moelink::matmul_by_group", mutates_args=())
def _matmul_by_group(rows: Tensor, row_offsets: Tensor, weight: Tensor, batch_invariant: bool = False) -> Tensor:
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for group, (start, end) in enumerate(_bounds(row_offsets)):
        if start < end and batch_invariant:
            multiply(rows[start:end], weight[group].t(), out[start:end])
        elif start < end:
            torch.mm(rows[start:end], weight[group].t(), out=out[start:end])
    return out


@torch.library.custom_op("moelink::outer_by_group", mutates_args=())
def _outer_by_group(left: Tensor, right: Tensor, row_offsets: Tensor) -> Tensor:
    """[R, M] and [R, N] to [G, M, N]: the sum of ``outer(left[r], right[r])`` over the rows of each group."""
    bounds = _bounds(row_offsets)
    out = left.new_zeros(len(bounds), left.shape[1], right.shape[1])
    for group, (start, end) in enumerate(bounds):
        if start < end:
            torch.mm(left[start:end].t(), right[start:end], out=out[group])
    return out


@_matmul_by_group.register_fake
def _matmul_by_group_fake(rows: Tensor, row_offsets: Tensor, weight: Tensor, batch_invariant: bool = False) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_outer_by_group.register_fake
def _outer_by_group_fake(left: Tensor, right: Tensor, row_offsets: Tensor) -> Tensor:
    return left.new_empty(row_offsets.shape[0] - 1, left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    *tensors, ctx.batch_invariant = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
    rows, row_offsets, weight = ctx.saved_tensors
    drows = dweight = None
    if ctx.needs_input_grad[0]:
        drows = torch.ops.moelink.matmul_by_group(grad, row_offsets, weight.transpose(1, 2), ctx.batch_invariant)
    if ctx.needs_input_grad[2]:
        dweight = torch.ops.moelink.outer_by_group(grad, rows, row_offsets)
    return drows, None, dweight, None


_matmul_by_group.register_autograd(_backward, setup_context=_save)
