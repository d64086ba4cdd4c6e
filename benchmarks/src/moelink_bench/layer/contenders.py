"""Contenders of the layer: their interface, and moelink's own.

A contender computes the layer of :class:`~moelink_bench.layer.data.LayerInput` whole, and, where it can be taken
apart, as a chain of named parts. All with experts in bf16, but for the layer of transformers, compute the grouped
products and the activation with the same functions, so that they differ in how tokens come to experts and home.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import moelink
from moelink.activation import silu_and_quantize
from moelink.arith import ceil_div
from moelink.errors import UnsupportedError
from moelink.nn import MoE
from moelink.nn.block_quantized import BlockQuantized
from moelink.nn.expert_backends import ExpertsBackend, multiply
from moelink.nn.experts import grouped_matmul
from moelink.nn.placed_experts import INNER_FORMAT, Experts, QuantizedExperts
from moelink.nn.router import Routing
from moelink.rows.dequantize import dequantized
from moelink.rows.gated import gated_activation
from moelink_bench.contenders import Call, Contender
from moelink_bench.layer.data import LayerInput, Weights, choose
from moelink_bench.layer.plan import LayerPlan, Shape

PARTS = ("route", "dispatch", "convert", "product 1", "activation", "product 2", "combine")
"""Parts of the layer, in order. Not every contender has all of them."""
LAYER = "layer"
"""Name of the whole, in samples."""


class Part(NamedTuple):
    """A step of the layer: takes what the part before it returned, the first one a LayerInput."""

    name: str
    run: Callable[[Any], Any]


ROUNDINGS = 2.0**-6
"""Tolerance for outputs whose tokens, products and sums are rounded to bf16 and computed in fp32 otherwise."""
FP8_ROUNDINGS = 2.0**-5
"""The same where what goes into the second product is rounded to bf16 and then to fp8: the former moves some of the
latter's roundings to the next code."""
PEER_ROUNDINGS = 1.5 * FP8_ROUNDINGS
"""The same for libraries that also round rows times their weights, and the sums of a rank's rows, to bf16."""


class LayerContender(ABC):
    """A way to compute the layer, set up for one shape on one rank. By default it computes it by its parts.

    Attributes:
        name: in tables and files.
        note: its differences from others, or "".
        fmt: the format that tokens are rounded to on their way to the experts.
        fp8_experts: weights, and what goes into the second product, are rounded to fp8 as well.
        tolerance: most that :func:`~moelink_bench.layer.data.worst_error` may be.
        capturable: calls do not synchronise with the host, so that a CUDA graph can hold them.
    """

    name: str
    note: str
    fmt: str = "bf16"
    fp8_experts: bool = False
    tolerance: float = ROUNDINGS
    capturable: bool = True

    def layer(self, given: LayerInput) -> Tensor:
        """Compute the layer."""
        return run_parts(self.parts(), given)

    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Return the layer as a chain whose last part returns the output; () where it cannot be taken apart."""

    def check(self) -> str:
        """Return the fault of the calls so far, or "", or raise it. Synchronises."""
        return ""

    def close(self) -> None:  # noqa: B027 - most have nothing else
        """Release everything that does not go with the process. Collective."""


class Given(Contender):
    """A layer with its inputs."""

    alternates = True

    def __init__(self, contender: LayerContender, inputs: Sequence[LayerInput]) -> None:
        self._contender, self._inputs = contender, inputs
        self.name, self.note, self.capturable = contender.name, contender.note, contender.capturable

    def repeats(self, copy: int) -> Mapping[str, Call]:
        """The layer as a whole."""
        return {LAYER: functools.partial(self._contender.layer, self._inputs[copy])}

    def chain(self, copy: int) -> Sequence[tuple[str, Call]]:
        """The parts of the layer."""
        return chained(self._contender.parts(), self._inputs[copy])


@dataclass(frozen=True)
class Routed:
    """Tokens and where they go."""

    x: Tensor
    routing: Routing


@dataclass(frozen=True)
class Rows:
    """Rows grouped by expert, and what brings them home.

    Attributes:
        rows: [R, n]. Rows from ``offsets[-1]`` on are undefined.
        offsets: [G + 1] int32, exclusive starts of the groups.
        home: the other input of the contender's combine.
        scales: of ``rows``, where these were quantised after the first product; else None.
    """

    rows: Tensor
    offsets: Tensor
    home: Any
    scales: Tensor | None = None


def run_parts(parts: Sequence[Part], given: LayerInput) -> Tensor:
    """Run the chain."""
    value: Any = given
    for part in parts:
        value = part.run(value)
    return value  # type: ignore[no-any-return]


def chained(parts: Sequence[Part], given: LayerInput) -> list[tuple[str, Call]]:
    """Return by name calls without arguments that run the chain when they are made one after the other, again and
    again."""
    held: list[Any] = [None]

    def run(index: int, part: Part) -> Any:
        held[0] = part.run(held[0] if index else given)
        return held[0]

    return [(part.name, functools.partial(run, index, part)) for index, part in enumerate(parts)]


ROUTE = Part("route", lambda given: Routed(given.x, choose(given)))
"""Choose experts."""


def expert_parts(weights: Weights) -> tuple[Part, ...]:
    """The experts, from bf16 rows to bf16 rows: what all contenders but transformers compute alike."""

    def product(name: str, weight: Tensor) -> Part:
        return Part(name, lambda at: replace(at, rows=grouped_matmul(at.rows, at.offsets, weight)))

    def activate(at: Rows) -> Rows:
        return replace(at, rows=gated_activation(at.rows, at.offsets, functional.silu))

    return (
        product("product 1", weights.gate_up),
        Part("activation", activate),
        product("product 2", weights.down),
    )


def quantized_weights(experts: QuantizedExperts) -> tuple[BlockQuantized, BlockQuantized]:
    """The weights of both products."""
    return (
        BlockQuantized(experts.gate_up_proj, experts.gate_up_scales),
        BlockQuantized(experts.down_proj, experts.down_scales),
    )


def moelink_expert_parts(
    ep: moelink.Communicator, experts: Experts | QuantizedExperts, weights: Weights
) -> tuple[Part, ...]:
    """The experts as :class:`moelink.nn.MoE` computes them, from what dispatch returned to what combine takes.

    Rows of formats with scales are multiplied as they are where ``experts`` are in fp8, and converted to bf16 before
    the products otherwise; other rows need no conversion.
    """
    if isinstance(experts, QuantizedExperts):

        def multiplied(rows: Tensor, *given: Any) -> None:
            config, align = ep.config, ep.config.row_alignment
            room = max(len(rows) // align, len(rows) - config.num_groups * (align - 1))  # without padding
            multiply(experts.backend, rows, *given, likely_rows=ceil_div(room, config.world_size))

        return fp8_expert_parts(multiplied, *quantized_weights(experts), experts.dtype)

    def convert(at: Rows) -> Rows:
        return replace(at, rows=dequantized(at.home, ep.config, dtype=weights.down.dtype))

    converted = ep.config.format.scale_layout is not None
    return (*((Part("convert", convert),) if converted else ()), *expert_parts(weights))


def fp8_expert_parts(
    multiplied: Callable[..., None], gate_up: BlockQuantized, down: BlockQuantized, dtype: torch.dtype = torch.bfloat16
) -> tuple[Part, ...]:
    """The experts in fp8, as the layer's operator computes them.

    ``multiplied``: fills its last argument with a product; the others are codes and scales of rows, offsets, a weight.
    """

    def product(name: str, weight: BlockQuantized) -> Part:
        def run(at: Rows) -> Rows:
            rows, row_scales = (at.home.tokens, at.home.scales) if at.scales is None else (at.rows, at.scales)
            out = torch.empty(len(rows), weight.codes.shape[1], dtype=dtype, device=rows.device)
            multiplied(rows, row_scales, at.offsets, weight, out)
            return replace(at, rows=out)

        return Part(name, run)

    def activate(at: Rows) -> Rows:
        inner = silu_and_quantize(at.rows, at.offsets, format=INNER_FORMAT)
        return replace(at, rows=inner.tokens, scales=inner.scales)

    return (
        product("product 1", gate_up),
        Part("activation", activate),
        product("product 2", down),
    )


class MoelinkLayer(LayerContender):
    """:class:`moelink.nn.MoE` on a communicator that is sized for the most tokens of the run.

    As a whole it is that module. Its parts are the calls that the module makes.
    """

    def __init__(
        self, shape: Shape, weights: Weights, *, fmt: str, max_tokens: int, device: torch.device, timeout: float,
        experts_backend: ExpertsBackend = "auto", expert_alignment: int = 1,
    ) -> None:  # fmt: skip
        """Open a communicator. Collective over the default group.

        Raises:
            UnsupportedError: the transport cannot run here; the message says why.
        """
        on_cpu = device.type == "cpu"
        transport = "collective" if on_cpu and os.environ.get("TRITON_INTERPRET") != "1" else "symmetric"
        self.name, self.fmt = f"moelink {fmt}", fmt
        self.capturable = not on_cpu
        self.ep = moelink.init(
            num_experts=shape.num_experts, topk=shape.topk, hidden_size=shape.hidden_size,
            max_tokens_per_rank=max_tokens, dispatch_format=fmt, transport=transport, device=device, timeout=timeout,  # type: ignore[arg-type]
            expert_alignment=expert_alignment,
        )  # fmt: skip
        self._weights = weights
        self.moe = MoE(self.ep, intermediate_size=shape.intermediate_size, load_steps=0, device="meta")
        experts = self.moe.experts
        experts.gate_up_proj = torch.nn.Parameter(weights.gate_up, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(weights.down, requires_grad=False)
        self.moe.quantize_experts(experts_backend)
        self.fp8_experts = isinstance(self.moe.experts, QuantizedExperts)
        self.tolerance = FP8_ROUNDINGS if self.fp8_experts else ROUNDINGS
        how = f"experts in fp8 by {self.moe.experts_backend}" if self.fp8_experts else "experts in bf16"
        self.note = f"{transport} transport, sized for {max_tokens} tokens, {how}"

    def layer(self, given: LayerInput) -> Tensor:
        if self.moe.router is not given.router:
            self.moe.router = given.router
        return self.moe(given.x, max_tokens=len(given.x))  # type: ignore[no-any-return]

    def parts(self) -> tuple[Part, ...]:
        return (
            ROUTE,
            Part("dispatch", self._dispatch),
            *self._expert_parts(),
            Part("combine", self._combine),
        )

    def _expert_parts(self) -> tuple[Part, ...]:
        return moelink_expert_parts(self.ep, self.moe.experts, self._weights)

    def _dispatch(self, at: Routed) -> Rows:
        recv = self.ep.dispatch(at.x, at.routing.topk_ids, at.routing.topk_weights, max_tokens=len(at.x))
        return Rows(recv.tokens, recv.row_offsets, recv)

    def _combine(self, at: Rows) -> Tensor:
        return self.ep.combine(at.rows, at.home)

    def check(self) -> str:
        self.ep.check()
        return ""

    def close(self) -> None:
        self.moe.close()
        self.ep.close()


@dataclass(frozen=True)
class Setting:
    """Where contenders are made: one shape on one rank.

    Attributes:
        max_tokens: of a rank, over all cases of the shape.
        timeout: seconds after which a call gives up on a peer.
    """

    plan: LayerPlan
    shape: Shape
    weights: Weights
    max_tokens: int
    rank: int
    device: torch.device
    timeout: float


def moelink_maker(fmt: str) -> Callable[[Setting], LayerContender]:
    """Return the maker of moelink's contender of a format."""

    def make(at: Setting) -> LayerContender:
        return MoelinkLayer(
            at.shape, at.weights, fmt=fmt, max_tokens=at.max_tokens, device=at.device, timeout=at.timeout
        )

    return make


def require(condition: bool, reason: str) -> None:
    """Raise UnsupportedError with ``reason`` unless ``condition`` holds."""
    if not condition:
        raise UnsupportedError(reason)
