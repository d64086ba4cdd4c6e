"""Define the demonstration's layer (bytes of text, a router, SwiGLU experts), and run it in one process.

Nothing here communicates and nothing here uses moelink's transports: :func:`unsharded_layer` is the oracle of the
sharded run. Weights and embeddings are functions of (seed, expert) or (seed, byte), so every rank makes its own share.

Legend: ``T`` tokens, ``K`` = topk, ``H`` = hidden_size, ``I`` = intermediate_size, ``E`` = num_experts.

The router and the experts compute in fp64, so that the sharded and the unsharded layer differ only by the roundings of
moelink itself: the dispatch format's and combine's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SUMMATION_NOISE = 2.0**-40
"""The effect of the order of summation in fp64 matrix products, relative to the largest term of a token."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Sizes of the layer, and the seed that all its numbers follow from."""

    num_experts: int = 32
    topk: int = 8
    hidden_size: int = 384
    intermediate_size: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Routing:
    """The choice of the router.

    Attributes:
        topk_ids: [T, K] int64, distinct in each token.
        topk_weights: [T, K] fp64, the softmax of the chosen experts, normalised to sum to one.
    """

    topk_ids: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class Expert:
    """A SwiGLU expert: ``(silu(x @ gate) * (x @ up)) @ down``, in fp64.

    Attributes:
        gate, up: [H, I].
        down: [I, H].
    """

    gate: Tensor
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Run the expert over rows [n, H] of any float dtype; returns fp64 [n, H]."""
        x = x.to(torch.float64)
        hidden: Tensor = torch.nn.functional.silu(x @ self.gate) * (x @ self.up)
        return hidden @ self.down


@dataclass(frozen=True)
class LayerOutput:
    """The result of the unsharded layer.

    Attributes:
        out: [T, H] fp64, the weighted sum over experts.
        magnitude: [T, H] fp64, the same sum over absolute values: the reference of relative roundings.
    """

    out: Tensor
    magnitude: Tensor


def _random(seed: int, stream: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + stream)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def embed(text: bytes, config: LayerConfig) -> Tensor:
    """Embed bytes as bf16 activations [len(text), H] of unit root mean square.

    A token is the embedding of its byte plus half the embedding of the byte before it, so that equal letters in
    different places are routed differently.
    """
    table = _random(config.seed, 0, 256, config.hidden_size)
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else torch.empty(0, dtype=torch.long)
    before = torch.cat((codes[:1] * 0, codes[:-1]))
    x = table[codes] + 0.5 * table[before]
    return (x / x.pow(2).mean(-1, keepdim=True).sqrt()).to(torch.bfloat16)


def route(x: Tensor, config: LayerConfig) -> Routing:
    """Choose the best K by a normalised softmax over seeded logits, in fp64 so that no batch shape changes a choice."""
    router = _random(config.seed, 1, config.hidden_size, config.num_experts).to(x.device)
    logits = x.to(torch.float64) @ router / math.sqrt(config.hidden_size)
    weights, ids = logits.softmax(-1).topk(config.topk, dim=-1)
    return Routing(ids, weights / weights.sum(-1, keepdim=True))


def make_expert(expert: int, config: LayerConfig, device: torch.device | str = "cpu") -> Expert:
    """Draw the weights of one expert; entries have variance 1 / fan-in."""
    hidden, inner = config.hidden_size, config.intermediate_size
    weights = _random(config.seed, 2 + expert, 3, hidden, inner).to(device)
    gate, up = weights[0] / math.sqrt(hidden), weights[1] / math.sqrt(hidden)
    return Expert(gate=gate, up=up, down=weights[2].t() / math.sqrt(inner))


def unsharded_layer(x: Tensor, routing: Routing, config: LayerConfig) -> LayerOutput:
    """Run the whole layer in one process: a plain loop over all experts, fp64 throughout, no rounding on the way."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    magnitude = torch.zeros_like(out)
    for expert in range(config.num_experts):
        tokens, slots = (routing.topk_ids == expert).nonzero(as_tuple=True)
        y = make_expert(expert, config)(x[tokens])
        weights = routing.topk_weights[tokens, slots, None].to(torch.float64)
        out.index_add_(0, tokens, weights * y)
        magnitude.index_add_(0, tokens, weights * y.abs())
    return LayerOutput(out, magnitude)


def allowed_rounding(
    exact: LayerOutput, *, topk: int, ranks: int, combine_dtype: torch.dtype, accumulate_dtype: torch.dtype
) -> Tensor:
    """Return the largest difference [T, H] that combine's own roundings can make, given the same dequantised rows.

    An expert's row is rounded to ``combine_dtype`` (1), the sum of a token's rows on one rank is rounded again (2), and
    the sum over ranks once more (3). Each changes a term by at most the unit roundoff ``u = eps / 2`` of the dtype. In
    between the sums run in ``accumulate_dtype``: one product and at most ``topk + ranks`` additions. To first order::

        |out - exact| <= (3 u_combine + (topk + ranks + 1) u_accumulate) * sum over k of |w_k y_k|

    Two per cent cover the higher orders, ``SUMMATION_NOISE`` the order of summation inside the fp64 matrix products.
    """
    combine, accumulate = torch.finfo(combine_dtype).eps / 2, torch.finfo(accumulate_dtype).eps / 2
    relative = 1.02 * (3 * combine + (topk + ranks + 1) * accumulate)
    return relative * exact.magnitude + SUMMATION_NOISE * exact.magnitude.amax(-1, keepdim=True)


def allowed_relative_error(tolerance: float, combine_dtype: torch.dtype) -> float:
    """Return the relative error, in root mean square over the layer's output, that is accepted of a format.

    ``tolerance`` bounds one element's error relative to the largest of its group; the same number is demanded of the
    root mean square relative to the root mean square. (A criterion, not a theorem.) A SwiGLU expert is a product of two
    linear maps of its input, so a small relative error counts twice; three roundings to ``combine_dtype`` come on top,
    and ``SUMMATION_NOISE``.
    """
    return 2 * tolerance + 3 * torch.finfo(combine_dtype).eps / 2 + SUMMATION_NOISE
