"""The routed experts of one rank, stacked: in the layer's dtype, and in fp8 for rows that travelled in fp8.

Legend: ``R`` rows, ``H`` hidden_size, ``I`` intermediate_size, ``G`` groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.errors import UnsupportedError
from moelink.formats import get_format
from moelink.nn.block_quantized import Weight, check_product, weight_of
from moelink.nn.checkpoint import refuse_plain_checkpoints
from moelink.nn.expert_backends import multiply, quantize_for
from moelink.nn.experts import Activation, grouped_experts
from moelink.nn.owned import Ownership, Wrapping, share_of_gradient
from moelink.nn.parameters import EXPERTS, SHARED, KeepsBuffers, KnowsRows, draw, part_of
from moelink.nn.placement import Placement
from moelink.routing import ExpertMap
from moelink.rows import eager
from moelink.rows.activation import Clamp, quantize_activation
from moelink.rows.gated import known_activation

INNER_FORMAT = "fp8_block128"


class PlacedExperts(torch.nn.Module):
    """Stacked experts of one rank; attributes as in :class:`Experts`. ``stacked``: the tensors with groups first."""

    stacked: tuple[str, ...]
    ranks: tuple[int, int]
    placement: Placement
    first: int
    num_shared: int
    gate_up_proj: Tensor
    down_proj: Tensor

    @property
    def num_experts(self) -> int:
        """Experts of the layer, each counted once."""
        return self.placement.num_experts

    @property
    def num_local_experts(self) -> int:
        """Routed physical experts here."""
        return self.gate_up_proj.shape[0] - self.num_shared

    @property
    def ownership(self) -> Ownership:
        """The experts here, as functions on whole models ask for them (:mod:`moelink.nn.owned`)."""
        placed = self.placement.experts
        return Ownership.of(*self.ranks, self.first, self.num_local_experts, placed, self.num_shared)

    @property
    def sizes(self) -> tuple[int, ...]:
        """(groups, hidden_size, intermediate_size)."""
        return tuple(self.down_proj.shape)

    @property
    def weights(self) -> list[Tensor]:
        """The stacked tensors, in the order of ``stacked``."""
        return [getattr(self, name).detach() for name in self.stacked]

    def take(self, config: EPConfig, placement: Placement, weights: Sequence[Tensor]) -> None:
        """Hold ``weights``, in the order of ``stacked``, as the rank of ``config``. Parameters stay the same objects,
        without gradients."""
        for name, tensor in zip(self.stacked, weights, strict=True):
            old = getattr(self, name)
            old.data, old.grad = tensor, None
        self.ranks, self.placement = (config.rank, config.world_size), placement
        self.first = ExpertMap(config.num_experts, config.world_size).first(config.rank)

    def extra_repr(self) -> str:
        groups, hidden, inner = self.sizes
        last = self.first + groups - self.num_shared - 1
        shared = ", shared expert in group 0" if self.num_shared else ""
        return f"{hidden}, {inner}, experts {self.first} to {last} of {self.placement.num_physical}{shared}"


class Experts(PlacedExperts, KnowsRows):
    """The gated feed-forward experts of one rank, stacked.

    Args:
        config: of the communicator: sizes, and which experts this rank owns.
        intermediate_size: rows of gate, and of up, of each expert.
        activation: of the gate.
        seed: of :meth:`reset_parameters`.
        placement: the expert of each of the communicator's experts; None for the same number.
        device, dtype: of the parameters.

    Attributes:
        gate_up_proj: [num_groups, 2 * intermediate_size, hidden_size], rows of gate before rows of up.
        down_proj: [num_groups, hidden_size, intermediate_size].
        ranks: (rank, world_size) of the communicator.
        first: id of the first physical expert here; group g is physical expert ``first + g - num_shared``.
        num_experts: experts of the layer, each counted once.
        num_shared: 1 if group 0 of both parameters is the fused shared expert, the same on every rank; else 0.
    """

    stacked = ("gate_up_proj", "down_proj")

    def __init__(
        self,
        config: EPConfig,
        *,
        intermediate_size: int,
        activation: Activation = torch.nn.functional.silu,
        seed: int = 0,
        placement: Placement | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.seed = activation, seed
        self.placement = placement or Placement.identity(config.num_experts)
        self.ranks = config.rank, config.world_size
        self.wrapping, self.row_dtype = Wrapping(), config.combine_dtype
        self.batch_invariant = config.batch_invariant
        self.first = ExpertMap(config.num_experts, config.world_size).first(config.rank)
        self.num_shared = int(config.fused_shared_expert)
        groups, hidden = config.num_groups, config.hidden_size
        up, down = (groups, 2 * intermediate_size, hidden), (groups, hidden, intermediate_size)
        self.gate_up_proj = torch.nn.Parameter(torch.empty(up, device=device, dtype=dtype))
        self.down_proj = torch.nn.Parameter(torch.empty(down, device=device, dtype=dtype))
        refuse_plain_checkpoints(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights that ``seed`` gives each expert, on any rank."""
        for group in range(self.gate_up_proj.shape[0]):
            place = self.first + group - self.num_shared
            stream = SHARED if group < self.num_shared else EXPERTS + 2 * self.placement.experts[place]
            draw(self.gate_up_proj[group], seed=self.seed, stream=stream)
            draw(self.down_proj[group], seed=self.seed, stream=stream + 1)

    def forward(self, rows: Tensor, row_offsets: Tensor) -> Tensor:
        """Rows by group, as :func:`moelink.nn.grouped_experts` takes them."""
        ranks = self.wrapping.ranks()
        gate_up, down = (share_of_gradient(weight, ranks) for weight in (self.gate_up_proj, self.down_proj))
        return grouped_experts(
            rows, row_offsets, gate_up, down, activation=self.activation, batch_invariant=self.batch_invariant
        )

    def quantized(self, backend: str) -> QuantizedExperts:
        """Experts of these weights in fp8 (:func:`moelink.nn.quantize_weight`), multiplied by ``backend``, one of
        "triton", "torch", "flashinfer", or in mxfp4 (:func:`moelink.nn.quantize_mxfp4`) for "mxfp4".
        :meth:`MoE.quantize_experts` checks that it can run."""
        return QuantizedExperts(
            quantize_for(backend, self.gate_up_proj), quantize_for(backend, self.down_proj), backend=backend,
            activation=self.activation, experts=(self.first, self.num_shared), placement=self.placement,
            dtype=self.down_proj.dtype, ranks=self.ranks,
        )  # fmt: skip


class QuantizedExperts(PlacedExperts, KeepsBuffers):
    """The gated experts of one rank in fp8 or mxfp4, stacked; made by :meth:`moelink.nn.Experts.quantized`.

    Rows in format fp8_block128 are multiplied as they are. Between the two products
    :func:`moelink.activation.silu_and_quantize` quantises again. For inference: there are no gradients.

    Args:
        gate_up: of shape [G, 2 * I, H], rows of gate before rows of up.
        down: of shape [G, H, I].
        backend: one of "triton", "torch", "flashinfer" (:mod:`moelink.nn.expert_backends`), or "mxfp4" for weights in
            mxfp4.
        activation: silu or a :class:`moelink.activation.Clamp`.
        experts: (id of the first physical expert here, 1 if group 0 is the fused shared expert).
        placement: the expert of each physical expert.
        dtype: of the output.
        ranks: (rank, world_size) of the communicator.

    Attributes:
        gate_up_proj, gate_up_scales, down_proj, down_scales: codes and scales, buffers of the state_dict, whose dtypes
            stay when the module is cast. Each has the groups as its first dimension. Scales in mxfp4 have a bias
            behind them if the weights have one.
        first, num_experts, num_shared, placement: as in :class:`moelink.nn.Experts`.
    """

    stacked = ("gate_up_proj", "gate_up_scales", "down_proj", "down_scales")
    kept = stacked
    gate_up_scales: Tensor
    down_scales: Tensor

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        *,
        backend: str,
        activation: Activation | Clamp,
        experts: tuple[int, int],
        placement: Placement,
        dtype: torch.dtype,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.backend, self.activation, self.dtype = backend, activation, dtype
        self.first, self.num_shared = experts
        self.placement = placement
        known = known_activation(activation)
        assert known is not None, "expert_backends has refused the others"
        self._clamp = [known.alpha, known.limit] if known.kind == "clamped" else []
        tensors = (gate_up.codes, gate_up.scales, down.codes, down.scales)
        for name, tensor in zip(self.stacked, tensors, strict=True):
            self.register_buffer(name, tensor)
        refuse_plain_checkpoints(self)

    def forward(self, codes: Tensor, scales: Tensor, row_offsets: Tensor, *, likely_rows: int | None = None) -> Tensor:
        """Rows by group, ``codes`` [R, H] and ``scales`` [H / 128, R] as dispatch gives them: [R, H] of ``dtype``.

        Args:
            likely_rows: rows that there are likely to be, by which the kernels are chosen; default R.

        Raises:
            ArgumentError: a shape, dtype or device does not fit.
            UnsupportedError: backend "torch" inside of a CUDA graph's capture.
        """
        gate_up, gate_up_scales, down, down_scales = [part_of(self, self._buffers, name) for name in self.stacked]
        if torch.compiler.is_compiling():  # else the operator checks them, once for tensors of a kind
            check_product(codes, scales, row_offsets, weight_of(gate_up, gate_up_scales), self.dtype)
        return eager.run(  # type: ignore[no-any-return]
            torch.ops.moelink.quantized_experts, _quantized_experts, None, codes, scales, row_offsets, gate_up,
            gate_up_scales, down, down_scales, self.backend, self._clamp, self.dtype,
            likely_rows=codes.shape[0] if likely_rows is None else likely_rows,
        )  # fmt: skip

    @property
    def _down(self) -> Weight:
        """The weights of the second product."""
        return weight_of(self.down_proj, self.down_scales)

    @property
    def sizes(self) -> tuple[int, ...]:
        """(groups, hidden_size, intermediate_size)."""
        return tuple(self._down.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._down.kind}, backend {self.backend!r}"


def refuse_gradients(
    x: Tensor,
    module: torch.nn.Module,
    *,
    name: str = "experts_backend",
    why: str = "quantised experts have none",
    instead: str = "experts_backend='dequantize'",
) -> None:
    """Refuse a call that records gradients, of ``x`` or of the parameters of ``module``, because of the setting
    ``name``.

    Raises:
        UnsupportedError: gradients are recorded.
    """
    if torch.is_grad_enabled() and (x.requires_grad or any(each.requires_grad for each in module.parameters())):
        raise UnsupportedError(
            f"{name}: expected a call without gradients, as {why}, got one that records them; call the layer under "
            f"torch.no_grad(), or train with {instead}"
        )


class _How(NamedTuple):
    """How experts are computed: the clamp of their activation, or (), the dtype of the output, and the rows that there
    are likely to be."""

    backend: str
    clamp: tuple[float, ...]
    dtype: torch.dtype
    likely_rows: int


def _quantized_experts(
    codes: Tensor,
    scales: Tensor,
    row_offsets: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    backend: str,
    clamp: list[float],
    dtype: torch.dtype,
    *,
    likely_rows: int,
) -> Tensor:
    given = codes, scales, row_offsets, gate_up, gate_up_scales, down, down_scales
    if not codes.shape[0]:
        return _quantized_experts_fake(*given, backend, clamp, dtype, likely_rows=likely_rows)
    how = _How(backend, tuple(clamp), dtype, likely_rows)
    if backend in ("triton", "mxfp4") and eager.takes_kernels(codes):
        return eager.repeated(given, _compute, how)[0]
    return _compute(*given, how)[0][0]


def _compute(
    codes: Tensor,
    scales: Tensor,
    row_offsets: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    how: _How,
) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    """Return the output, and the tensors between, of tensors that fit together."""
    first, second = weight_of(gate_up, gate_up_scales), weight_of(down, down_scales)
    check_product(codes, scales, row_offsets, first, how.dtype)
    between = codes.new_empty(codes.shape[0], first.shape[1], dtype=how.dtype)
    out = codes.new_empty(codes.shape[0], second.shape[1], dtype=how.dtype)
    product = partial(multiply, how.backend, likely_rows=how.likely_rows)
    product(codes, scales, row_offsets, first, between)
    bounds = Clamp(*how.clamp) if how.clamp else None
    inner, inner_scales = quantize_activation(
        between, row_offsets, get_format(INNER_FORMAT), bounds, likely_rows=how.likely_rows
    )
    product(inner, inner_scales, row_offsets, second, out, follows_product=True)
    return (out,), (between, inner, inner_scales)


def _quantized_experts_fake(codes: Tensor, *given: Any, likely_rows: int) -> Tensor:
    scales, row_offsets, gate_up, gate_up_scales, down, down_scales, *_, dtype = given
    check_product(codes, scales, row_offsets, weight_of(gate_up, gate_up_scales), dtype)
    return codes.new_empty(codes.shape[0], weight_of(down, down_scales).shape[1], dtype=dtype)


torch.library.custom_op("moelink::quantized_experts", _quantized_experts, mutates_args=()).register_fake(
    _quantized_experts_fake
)
