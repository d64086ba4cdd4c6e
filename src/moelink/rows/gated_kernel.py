"""The gated activation of experts and its gradients, for the rows that exist: ``moelink.rows.gated`` as kernels.

Input rows are [gate | up], 2 I elements; an output row is ``activation(gate) * up``, I elements, computed in fp32 (fp64
for fp64 rows) and rounded once. Output rows are cut into groups and steps as :mod:`moelink.rows.common_kernel` says.

With s = 1 / (1 + exp(-g)), and z the gradient that comes:

=============  ====================================  ==================================================
kind           activation a(g)                       its derivative
=============  ====================================  ==================================================
silu           g s                                   s (1 + g (1 - s))
gelu           g F,  F = (1 + erf(g / sqrt 2)) / 2   F + g exp(-g**2 / 2) / sqrt(2 pi)
gelu_tanh      g (1 + t) / 2,                        (1 + t) / 2 + g (1 - t**2) k (1 + 3 c g**2) / 2
               t = tanh(k (g + c g**3))              k = sqrt(2 / pi), c = 0.044715
clamped        g s(alpha g), g = min(gate, limit)    s + alpha g s (1 - s); 0 where gate is above limit
=============  ====================================  ==================================================

The gradient of gate is ``z up a'(gate)``, that of up is ``z a(gate)``. The clamped kind multiplies with
clamp(up, -limit, limit) + 1 in place of up, and passes no gradient to an up outside of the bounds.

Example: fp32 rows, I = 2, row_offsets [0, 1, 2], 3 rows of capacity, kind silu. Silu of 0 and 32 is 0 and 32, its
derivative there 1/2 and 1:

=====  ========  =======  ========  ==========  ============  ==========
row    gate      up       out       z           dgate         dup
=====  ========  =======  ========  ==========  ============  ==========
0      [0, 32]   [4, 2]   [0, 64]   [1, 1]      [2, 2]        [0, 32]
1      [32, 0]   [1, 6]   [32, 0]   [3, 1]      [3, 3]        [96, 0]
2      anything  any      as it was anything    as it was     as it was
=====  ========  =======  ========  ==========  ============  ==========
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from moelink.arith import ceil_div
from moelink.kernels.launch.device import has_native_casts
from moelink.kernels.sync.dependent_launch import follow_previous_launch
from moelink.rows import common_kernel as common
from moelink.rows.common_kernel import RowConstants, bounded, number, place, rounded


@triton.jit
def activation_and_derivative(g, KIND: tl.constexpr, ALPHA: tl.constexpr):
    """``(a(g), a'(g))``; for the clamped kind of a gate inside the limit. silu of 0 -> (0, 1/2)."""
    if KIND == "gelu":
        inner = 0.5 * (1.0 + tl.math.erf(g * 0.7071067811865476))
        return g * inner, inner + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif KIND == "gelu_tanh":
        u = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        t = 2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0
        slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g)
        return 0.5 * g * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * slope
    else:
        s = 1.0 / (1.0 + tl.exp(-(g * ALPHA)))
        return g * s, s + ALPHA * g * s * (1.0 - s)


@triton.jit
def gate_and_up(source, here, S: tl.constexpr):
    """Gate, and up behind it, of the groups at ``source``, as numbers of the arithmetic."""
    gate = number(tl.load(source, mask=here, other=0.0), S.DOUBLE)
    return gate, number(tl.load(source + S.HIDDEN_SIZE, mask=here, other=0.0), S.DOUBLE)


@triton.jit(do_not_specialize=["rows"])
def gated_activation_kernel(gate_up, row_offsets, out, rows, S: tl.constexpr):
    """See the module: ``out`` of ``gate_up``."""
    follow_previous_launch(S)
    W: tl.constexpr = S.HIDDEN_SIZE // S.GROUP_SIZE
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    steps = tl.cdiv(total.to(tl.int64) * W, S.GROUPS_PER_STEP).to(tl.int32)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        _, row, group = place(step, W, S.GROUPS_PER_STEP)
        first, here = group * S.GROUP_SIZE, (row < total)[:, None]
        column = tl.arange(0, S.GROUP_SIZE)[None, :]
        gate, up = gate_and_up(gate_up + (row * (2 * S.HIDDEN_SIZE) + first)[:, None] + column, here, S)
        if S.KIND == "clamped":
            gate, up = bounded(gate, up, S.LIMIT)
        activated, _ = activation_and_derivative(gate, S.KIND, S.ALPHA)
        to = out + (row * S.HIDDEN_SIZE + first)[:, None] + column
        tl.store(to, rounded(activated * up, to.dtype.element_ty, S), mask=here)


@triton.jit(do_not_specialize=["rows"])
def gated_gradient_kernel(grad, gate_up, row_offsets, dgate_up, rows, S: tl.constexpr):
    """See the module: ``dgate_up`` of the gradient that comes and the rows that went in."""
    follow_previous_launch(S)
    W: tl.constexpr = S.HIDDEN_SIZE // S.GROUP_SIZE
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    steps = tl.cdiv(total.to(tl.int64) * W, S.GROUPS_PER_STEP).to(tl.int32)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        _, row, group = place(step, W, S.GROUPS_PER_STEP)
        first, here = group * S.GROUP_SIZE, (row < total)[:, None]
        column = tl.arange(0, S.GROUP_SIZE)[None, :]
        here_in = (row * (2 * S.HIDDEN_SIZE) + first)[:, None] + column
        gate, up = gate_and_up(gate_up + here_in, here, S)
        come = grad + (row * S.HIDDEN_SIZE + first)[:, None] + column
        z = number(tl.load(come, mask=here, other=0.0), S.DOUBLE)
        if S.KIND == "clamped":
            inside = tl.where(gate > S.LIMIT, 0.0, 1.0)
            open_up = tl.where((up > S.LIMIT) | (up < -S.LIMIT), 0.0, 1.0)
            gate, up = bounded(gate, up, S.LIMIT)
            activated, slope = activation_and_derivative(gate, S.KIND, S.ALPHA)
            dgate, dup = z * up * slope * inside, z * activated * open_up
        else:
            activated, slope = activation_and_derivative(gate, S.KIND, S.ALPHA)
            dgate, dup = z * up * slope, z * activated
        to = dgate_up + here_in
        tl.store(to, rounded(dgate, to.dtype.element_ty, S), mask=here)
        tl.store(to + S.HIDDEN_SIZE, rounded(dup, to.dtype.element_ty, S), mask=here)


def launch(
    gate_up: torch.Tensor, row_offsets: torch.Tensor, out: torch.Tensor, kind: str, alpha: float, limit: float, *,
    grad: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [rows, I] from ``gate_up`` [rows, 2 I], for the rows there are; with ``grad`` [rows, I], fill
    ``out`` [rows, 2 I] with the gradient. All are contiguous.

    No bits are promised, so FMAs are used.
    """
    if not out.numel():
        return
    (rows, columns), device = gate_up.shape, out.device
    constants, per_step = _constants(
        columns // 2, row_offsets.shape[0] - 1, kind, alpha, limit, gate_up.dtype == torch.float64,
        common.step_elements(device), has_native_casts(device),
    )  # fmt: skip
    steps, given = ceil_div(rows * columns // 2, per_step), (gate_up, row_offsets, common.bits(out), rows)
    if grad is None:
        common.launch(gated_activation_kernel, given, constants, steps, absent=row_offsets, fused=True)
    else:
        common.launch(gated_gradient_kernel, (grad, *given), constants, steps, absent=row_offsets, fused=True)


@lru_cache(maxsize=256)
def _constants(
    inner: int, num_groups: int, kind: str, alpha: float, limit: float, double: bool, elements: int, native: bool
) -> tuple[RowConstants, int]:
    """Return the launch constants, and the elements of a step."""
    group = min(128, inner & -inner)
    per_step = max(1, elements // group)
    return RowConstants(
        HIDDEN_SIZE=inner, NUM_GROUPS=num_groups, NATIVE_CASTS=native, DOUBLE=double, GROUP_SIZE=group,
        GROUPS_PER_STEP=per_step, KIND=kind, ALPHA=alpha, LIMIT=limit,
    ), group * per_step  # fmt: skip
