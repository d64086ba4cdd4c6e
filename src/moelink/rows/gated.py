"""The gated activation between the two grouped products, for the rows that exist: an operator with its gradient.

Legend: ``R`` rows, ``I`` intermediate_size, ``G`` groups. On CUDA a kernel computes the rows that exist
(:mod:`moelink.rows.gated_kernel`, which states the formulas); rows behind ``row_offsets[-1]`` are not touched.
Elsewhere the same formulas run in torch on those rows.

The arithmetic is fp32 (fp64 for fp64 rows), rounded once at the end. Torch's ``silu(gate) * up`` in bf16 rounds twice.
Bounds of the clamped kind are those of :mod:`moelink.rows.activation`. Its exponential is not used here: it fixes the
bits, in fp32 alone, which a gradient does not need and a CPU pays for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from moelink.errors import ArgumentError
from moelink.rows import eager
from moelink.rows.activation import Clamp, bounded
from moelink.rows.batch_invariant import sigmoid
from moelink.rows.scale_rows import count_rows, without_tail

Kind = Literal["silu", "gelu", "gelu_tanh", "clamped"]


@dataclass(frozen=True)
class GatedActivation:
    """A gated activation that :func:`gated_activation` knows.

    Attributes:
        kind: "silu", "gelu" (by erf), "gelu_tanh" (its approximation), or "clamped": ``g sigmoid(alpha g) (u + 1)``
            with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.
        alpha, limit: of the clamped kind; 1 for the others, which have none.
        batch_invariant: the sigmoid, of rows narrower than fp64, has bits that do not depend on an element's place. In
            the kernel they never do.

    Raises:
        ArgumentError: there is no such kind.
    """

    kind: Kind
    alpha: float = 1.0
    limit: float = 1.0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ArgumentError("kind", f"one of {', '.join(get_args(Kind))}", repr(self.kind))


_PLAIN = MappingProxyType({kind: GatedActivation(kind) for kind in ("silu", "gelu", "gelu_tanh")})  # type: ignore[arg-type]


def known_activation(activation: Callable[[Tensor], Tensor] | Clamp) -> GatedActivation | None:
    """Return the kind of ``activation``, or None for an unknown function.

    Known are ``torch.nn.functional.silu`` and ``gelu`` (also as ``functools.partial(gelu, approximate="tanh")``), the
    modules ``torch.nn.SiLU`` and ``GELU``, but no class derived from them, and :class:`moelink.activation.Clamp`.

    >>> known_activation(torch.nn.GELU("tanh"))
    GatedActivation(kind='gelu_tanh', alpha=1.0, limit=1.0, batch_invariant=False)
    >>> known_activation(torch.relu) is None
    True
    """
    if isinstance(activation, Clamp):
        return GatedActivation("clamped", float(activation.alpha), float(activation.limit))
    if activation is functional.silu or type(activation) is torch.nn.SiLU:
        return _PLAIN["silu"]
    approximate = "none" if activation is functional.gelu else None
    if type(activation) is torch.nn.GELU:
        approximate = activation.approximate
    elif isinstance(activation, functools.partial) and activation.func is functional.gelu and not activation.args:
        approximate = activation.keywords.get("approximate", "none")
    return {"none": _PLAIN["gelu"], "tanh": _PLAIN["gelu_tanh"]}.get(approximate or "")


def gated_activation(
    gate_up: Tensor, row_offsets: Tensor, activation: Callable[[Tensor], Tensor] | Clamp, batch_invariant: bool = False
) -> Tensor:
    """``activation(gate) * up`` of rows [gate | up]: [R, 2 * I] to [R, I], differentiable once.

    Args:
        gate_up: [R, 2 * I] bf16, fp16, fp32 or fp64.
        row_offsets: [G + 1] int32 on the same device; rows from ``row_offsets[-1]`` on are undefined, in and out, and
            so are their gradients.
        activation: of gate. Functions that :func:`known_activation` knows compute only the rows that exist; torch's own
            operators apply any other function of each element to all R rows.
        batch_invariant: as of :class:`GatedActivation`, for silu and Clamp.

    Nothing synchronises with the host on CUDA.
    """
    known = known_activation(activation)
    if known is None:
        gate, up = gate_up.chunk(2, dim=1)
        return activation(gate) * up  # type: ignore[operator, no-any-return]
    operator, given = torch.ops.moelink.gated_activation, (known.kind, known.alpha, known.limit, batch_invariant)
    return eager.run(operator, activate, _Gated, gate_up, row_offsets, *given)  # type: ignore[no-any-return]


def twin(gate_up: Tensor, known: GatedActivation) -> Tensor:
    """The same of all rows with torch's operators: [R, 2 * I] to [R, I], of the same dtype.

    >>> twin(torch.tensor([[0.0, 32.0, 4.0, 2.0]]), GatedActivation("silu"))
    tensor([[ 0., 64.]])
    """
    gate, up, _, _ = _inputs(gate_up, known)
    return (_activated(gate, known)[0] * up).to(gate_up.dtype)


def gradient_twin(grad: Tensor, gate_up: Tensor, known: GatedActivation) -> Tensor:
    """The gradient of :func:`twin` for ``grad`` [R, I] with torch's operators: [R, 2 * I], of the dtype of ``gate_up``.

    >>> gradient_twin(torch.tensor([[3.0, 1.0]]), torch.tensor([[32.0, 0.0, 1.0, 6.0]]), GatedActivation("silu"))
    tensor([[ 3.,  3., 96.,  0.]])
    """
    gate, up, gate_passes, up_passes = _inputs(gate_up, known)
    activated, slope = _activated(gate, known)
    z = grad.to(gate.dtype)
    dgate, dup = z * up * slope, z * activated
    if gate_passes is not None and up_passes is not None:
        dgate, dup = dgate.where(gate_passes, 0), dup.where(up_passes, 0)
    return torch.cat([dgate, dup], dim=1).to(gate_up.dtype)


def _inputs(gate_up: Tensor, known: GatedActivation) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gate and the factor beside it in the dtype of the arithmetic, and where gradients pass (None: everywhere)."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=1)
    if known.kind != "clamped":
        return gate, up, None, None
    return *bounded(gate, up, known.limit), ~(gate > known.limit), ~(up.abs() > known.limit)


def _activated(gate: Tensor, known: GatedActivation) -> tuple[Tensor, Tensor]:
    """The activation and its derivative, by the table of :mod:`moelink.rows.gated_kernel`."""
    if known.kind == "gelu":
        inner = 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
        return gate * inner, inner + gate * torch.exp(-0.5 * gate * gate) / math.sqrt(2 * math.pi)
    if known.kind == "gelu_tanh":
        factor = math.sqrt(2 / math.pi)
        t = torch.tanh(factor * (gate + 0.044715 * gate**3))
        slope = factor * (1 + 3 * 0.044715 * gate * gate)
        return 0.5 * gate * (1 + t), 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * slope
    s = (sigmoid if known.batch_invariant else torch.sigmoid)(known.alpha * gate)
    return gate * s, s + known.alpha * gate * s * (1 - s)


def activate(
    gate_up: Tensor, row_offsets: Tensor, kind: str, alpha: float, limit: float, batch_invariant: bool = False
) -> Tensor:
    """Compute :func:`gated_activation` of the kind that a :class:`GatedActivation` has, without a gradient."""
    if eager.takes_kernels(gate_up):
        return eager.repeated((gate_up.contiguous(), row_offsets), _by_kernel, kind, alpha, limit)[0]
    out, known = _gated_fake(gate_up), GatedActivation(kind, alpha, limit, batch_invariant)  # type: ignore[arg-type]
    count = count_rows(row_offsets, len(out))
    out[:count] = twin(gate_up[:count], known)
    return out


def gradient(
    grad: Tensor, gate_up: Tensor, row_offsets: Tensor, kind: str, alpha: float, limit: float, batch_invariant: bool
) -> Tensor:
    """Compute the gradient of ``gate_up`` for ``grad``, that of :func:`activate`."""
    if eager.takes_kernels(gate_up):
        given = gate_up.contiguous(), row_offsets, grad.contiguous()
        return eager.repeated(given, _by_kernel, kind, alpha, limit)[0]
    out, known = _gradient_fake(grad, gate_up), GatedActivation(kind, alpha, limit, batch_invariant)  # type: ignore[arg-type]
    count = count_rows(row_offsets, len(out))
    out[:count] = gradient_twin(grad[:count], gate_up[:count], known)
    return out


def _by_kernel(gate_up: Tensor, row_offsets: Tensor, *given: Any) -> tuple[tuple[Tensor], tuple[()]]:
    """``given``: the gradient, if that of ``gate_up`` is to be computed, then kind, alpha and limit."""
    from moelink.rows.gated_kernel import launch

    grad, known = given[:-3], given[-3:]
    out = _gradient_fake(*grad, gate_up) if grad else _gated_fake(gate_up)
    launch(gate_up, row_offsets, out, *known, grad=grad[0] if grad else None)
    return (out,), ()


def _gated_fake(gate_up: Tensor, *_: Any) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _gradient_fake(grad: Tensor, gate_up: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, row_offsets, *ctx.rest = inputs
    ctx.save_for_backward(gate_up, row_offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, row_offsets = ctx.saved_tensors
    operator = torch.ops.moelink.gated_activation_gradient
    rows = eager.run(operator, gradient, None, grad, gate_up, row_offsets, *ctx.rest)
    return without_tail(rows, row_offsets), None, None, None, None, None


_Gated = eager.function_of(activate, _save, _backward)
_operator = torch.library.custom_op("moelink::gated_activation", activate, mutates_args=())
_operator.register_fake(_gated_fake)
_operator.register_autograd(_backward, setup_context=_save)
torch.library.custom_op("moelink::gated_activation_gradient", gradient, mutates_args=()).register_fake(_gradient_fake)
