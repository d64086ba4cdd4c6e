"""The gated activation of experts and its gradients, for the rows that exist: ``moelink.rows.gated`` as kernels.

Input rows are [gate | up], 2 I elements; an output row is ``activation(gate) * up``, I elements, computed in fp32 (fp64
for fp64 rows) and rounded once. How many rows exist is read on the device, from the last of ``row_offsets``, so a fixed
number of programs serves any number of rows, and a call costs what its rows cost, not what its buffers could hold.
Nothing waits for anything; there is no protocol.

The output rows are one list of pieces of PIECE elements: piece f is columns [f % W * PIECE, f % W * PIECE + PIECE) of
row f // W, with W = I / PIECE. Step s handles pieces [s * N, s * N + N), and program p the steps p, p + P, p + 2 P, ...

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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moelink.formats.device.casts import f32_to_bf16
from moelink.kernels.launch.cache_keys import Constants, settle_cache_key
from moelink.rows.activation_kernel import native_conversions


@dataclass(frozen=True, repr=False, eq=False)
class GatedConstants(Constants):
    """What the kernels are compiled for.

    Attributes:
        INTERMEDIATE_SIZE: columns of an output row. PIECE: elements of a piece. PIECES: pieces of a step.
        NUM_GROUPS: groups of rows; the last of ``row_offsets`` is the number of rows.
        KIND: as in the module's table. ALPHA, LIMIT: of the clamped kind.
        DOUBLE: rows are fp64, and so is the arithmetic. TO_BF16: results are bf16, stored as their bits.
        NATIVE_CASTS: the device's narrow conversions.
    """

    INTERMEDIATE_SIZE: int
    PIECE: int
    PIECES: int
    NUM_GROUPS: int
    KIND: str
    ALPHA: float
    LIMIT: float
    DOUBLE: bool
    TO_BF16: bool
    NATIVE_CASTS: bool


@triton.jit
def _number(value, DOUBLE: tl.constexpr):
    """``value`` in the dtype of the arithmetic."""
    return value.to(tl.float64) if DOUBLE else value.to(tl.float32)


@triton.jit
def _store(to, value, mask, S: tl.constexpr):
    """Round ``value`` to the dtype of the rows, and store it."""
    if S.TO_BF16:
        tl.store(to, f32_to_bf16(value, S.NATIVE_CASTS), mask=mask)
    else:
        tl.store(to, value.to(to.dtype.element_ty), mask=mask)


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
def place(step, total, S: tl.constexpr):
    """Of a step's pieces: the row [PIECES], the first column [PIECES], and whether it exists [PIECES, 1]."""
    W: tl.constexpr = S.INTERMEDIATE_SIZE // S.PIECE
    first = tl.cast(step, tl.int64) * S.PIECES
    ahead = (first % W).to(tl.int32) + tl.arange(0, S.PIECES)
    row = first // W + ahead // W
    return row, ahead % W * S.PIECE, (row < total)[:, None]


@triton.jit(do_not_specialize=["rows"])
def gated_activation_kernel(gate_up, row_offsets, out, rows, S: tl.constexpr):
    """See the module: ``out`` of ``gate_up``."""
    W: tl.constexpr = S.INTERMEDIATE_SIZE // S.PIECE
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    steps = tl.cdiv(total.to(tl.int64) * W, S.PIECES).to(tl.int32)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        row, first, here = place(step, total, S)
        column = tl.arange(0, S.PIECE)[None, :]
        source = gate_up + (row * (2 * S.INTERMEDIATE_SIZE) + first)[:, None] + column
        gate = _number(tl.load(source, mask=here, other=0.0), S.DOUBLE)
        up = _number(tl.load(source + S.INTERMEDIATE_SIZE, mask=here, other=0.0), S.DOUBLE)
        if S.KIND == "clamped":
            gate = tl.where(gate > S.LIMIT, S.LIMIT, gate)
            up = tl.where(up > S.LIMIT, S.LIMIT, tl.where(up < -S.LIMIT, -S.LIMIT, up)) + 1.0
        activated, _ = activation_and_derivative(gate, S.KIND, S.ALPHA)
        to = out + (row * S.INTERMEDIATE_SIZE + first)[:, None] + column
        _store(to, activated * up, here, S)


@triton.jit(do_not_specialize=["rows"])
def gated_gradient_kernel(grad, gate_up, row_offsets, dgate_up, rows, S: tl.constexpr):
    """See the module: ``dgate_up`` of the gradient that comes and the rows that went in."""
    W: tl.constexpr = S.INTERMEDIATE_SIZE // S.PIECE
    total = tl.minimum(tl.load(row_offsets + S.NUM_GROUPS), rows)
    steps = tl.cdiv(total.to(tl.int64) * W, S.PIECES).to(tl.int32)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        row, first, here = place(step, total, S)
        column = tl.arange(0, S.PIECE)[None, :]
        here_in = (row * (2 * S.INTERMEDIATE_SIZE) + first)[:, None] + column
        gate = _number(tl.load(gate_up + here_in, mask=here, other=0.0), S.DOUBLE)
        up = _number(tl.load(gate_up + here_in + S.INTERMEDIATE_SIZE, mask=here, other=0.0), S.DOUBLE)
        come = grad + (row * S.INTERMEDIATE_SIZE + first)[:, None] + column
        z = _number(tl.load(come, mask=here, other=0.0), S.DOUBLE)
        if S.KIND == "clamped":
            inside = tl.where(gate > S.LIMIT, 0.0, 1.0)
            open_up = tl.where((up > S.LIMIT) | (up < -S.LIMIT), 0.0, 1.0)
            gate = tl.where(gate > S.LIMIT, S.LIMIT, gate)
            up = tl.where(up > S.LIMIT, S.LIMIT, tl.where(up < -S.LIMIT, -S.LIMIT, up)) + 1.0
            activated, slope = activation_and_derivative(gate, S.KIND, S.ALPHA)
            dgate, dup = z * up * slope * inside, z * activated * open_up
        else:
            activated, slope = activation_and_derivative(gate, S.KIND, S.ALPHA)
            dgate, dup = z * up * slope, z * activated
        _store(dgate_up + here_in, dgate, here, S)
        _store(dgate_up + here_in + S.INTERMEDIATE_SIZE, dup, here, S)


def _constants(
    gate_up: torch.Tensor, row_offsets: torch.Tensor, kind: str, alpha: float, limit: float
) -> GatedConstants:
    inner = gate_up.shape[1] // 2
    piece = min(128, inner & -inner)
    block = 2048 if gate_up.is_cuda else 16384
    return GatedConstants(
        INTERMEDIATE_SIZE=inner,
        PIECE=piece,
        PIECES=max(1, block // piece),
        NUM_GROUPS=row_offsets.shape[0] - 1,
        KIND=kind,
        ALPHA=alpha,
        LIMIT=limit,
        DOUBLE=gate_up.dtype == torch.float64,
        TO_BF16=gate_up.dtype == torch.bfloat16,
        NATIVE_CASTS=native_conversions(gate_up.device),
    )


def _bits(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.uint16) if out.dtype == torch.bfloat16 else out


def _num_programs(gate_up: torch.Tensor, constants: GatedConstants) -> int:
    """At most 8 for each SM: they read how many rows there are, and share them."""
    most = 8 * torch.cuda.get_device_properties(gate_up.device).multi_processor_count if gate_up.is_cuda else 2
    return max(
        1, min(most, triton.cdiv(gate_up.shape[0] * (gate_up.shape[1] // 2), constants.PIECE * constants.PIECES))
    )


_FUSED = {"enable_fp_fusion": True}
"""FMAs are used with every Triton, not only with those up to 3.9, whose default that is. No bits are promised."""


def launch_forward(
    gate_up: torch.Tensor, row_offsets: torch.Tensor, out: torch.Tensor, kind: str, alpha: float, limit: float
) -> None:
    """Fill ``out`` [rows, I] from ``gate_up`` [rows, 2 I], both contiguous, as far as there are rows."""
    constants = _constants(gate_up, row_offsets, kind, alpha, limit)
    settle_cache_key(gated_activation_kernel)[(_num_programs(gate_up, constants),)](
        gate_up, row_offsets, _bits(out), gate_up.shape[0], S=constants, **_FUSED
    )


def launch_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    row_offsets: torch.Tensor,
    dgate_up: torch.Tensor,
    kind: str,
    alpha: float,
    limit: float,
) -> None:
    """Fill ``dgate_up`` [rows, 2 I] from ``grad`` [rows, I] and ``gate_up``, all contiguous, for the rows there are."""
    constants = _constants(gate_up, row_offsets, kind, alpha, limit)
    settle_cache_key(gated_gradient_kernel)[(_num_programs(gate_up, constants),)](
        grad, gate_up, row_offsets, _bits(dgate_up), gate_up.shape[0], S=constants, **_FUSED
    )
