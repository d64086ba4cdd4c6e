"""Routers: which experts a token goes to, and with which weights.

Legend: ``T`` tokens, ``H`` hidden_size, ``E`` num_experts, ``K`` topk, ``N`` expert groups of E / N experts each.

Every router here is one formula with parts switched on or off::

    s = softmax(W x)  or  sigmoid(W x)                         scores, [E]
    c = s + b                                                  are compared; b is the correction bias, or zero
    c = -inf outside the best topk_groups of N groups          by the best, or the sum of the best two, c of the group
    ids = the K largest c                                      ties: as torch.topk breaks them
    w = s[ids], then / sum(w) if renormalize, then * scaling_factor

=================  ============================================================================================
model              RouterConfig
=================  ============================================================================================
Mixtral, Qwen3     ``RouterConfig()``: softmax, renormalised
OLMoE              ``RouterConfig(renormalize=False)``
DeepSeek-V2        ``RouterConfig(renormalize=False, num_groups=8, topk_groups=3, scaling_factor=16.0)``
DeepSeek-V3        ``RouterConfig(scoring="sigmoid", correction_bias=True, num_groups=8, topk_groups=4,``
                   ``group_score="top2", scaling_factor=2.5)``
=================  ============================================================================================

The bias takes part in choosing and not in the weights (DeepSeek-V3 technical report, arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moelink.arguments import describe
from moelink.errors import ArgumentError, ConfigError, UnsupportedError
from moelink.nn.experts import as_group, grouped_matmul
from moelink.nn.parameters import ROUTER, KeepsBuffers, draw
from moelink.rows.batch_invariant import sigmoid

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]

_TINY = 1e-20


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Which of the formula's parts are used; see the module.

    Attributes:
        scoring: how logits become scores.
        renormalize: divide the chosen scores by their sum.
        correction_bias: add a bias per expert when choosing. It is a buffer, not a parameter: gradients do not reach
            it; balancing schemes set it.
        num_groups: groups of consecutive experts; 1 for none. Must divide the number of experts.
        topk_groups: groups that a token may choose from.
        group_score: the score of a group: its best expert's, or the sum of its best two.
        scaling_factor: factor of the weights, applied last.
        batch_invariant: ids and the bits of weights do not depend on other tokens. Of equal scores the lower id comes
            first; tokens are bf16, fp16 or fp32.
    """

    scoring: Scoring = "softmax"
    renormalize: bool = True
    correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: GroupScore = "max"
    scaling_factor: float = 1.0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("scoring", get_args(Scoring)), ("group_score", get_args(GroupScore))):
            if getattr(self, name) not in choices:
                raise ConfigError(name, f"one of {', '.join(map(repr, choices))}", getattr(self, name))
        if self.num_groups < 1:
            raise ConfigError("num_groups", "an integer >= 1", self.num_groups)
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ConfigError("topk_groups", f"between 1 and num_groups = {self.num_groups}", self.topk_groups)

    def validate_sizes(self, *, num_experts: int, topk: int) -> None:
        """Raise ConfigError when a layer of these sizes cannot be routed like this."""
        if num_experts % self.num_groups:
            raise ConfigError("num_groups", f"a divisor of num_experts = {num_experts}", self.num_groups)
        reachable = num_experts // self.num_groups * self.topk_groups
        if topk > reachable:
            raise ConfigError("topk", f"at most the {reachable} experts that a token may choose from", topk)
        if self.group_score == "top2" and self.num_groups > 1 and num_experts // self.num_groups < 2:
            raise ConfigError("num_groups", "groups of two experts or more with group_score='top2'", self.num_groups)


@dataclass(frozen=True)
class Routing:
    """The choice of a router.

    Attributes:
        topk_ids: [T, K] int32, distinct in each token, best first.
        topk_weights: [T, K] fp32 (fp64 for fp64 tokens).
        logits: [T, E] of the same dtype, for auxiliary losses.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    logits: Tensor

    def __repr__(self) -> str:
        """Dtypes and shapes."""
        return describe(self, ("topk_ids", "topk_weights", "logits"))


def route(logits: Tensor, config: RouterConfig, *, topk: int, correction_bias: Tensor | None = None) -> Routing:
    """Choose ``topk`` experts for every row of ``logits`` [T, E] (fp32 or fp64). Differentiable in ``logits``.

    >>> logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).log()
    >>> route(logits, RouterConfig(), topk=2).topk_weights
    tensor([[0.6000, 0.4000]])
    >>> bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    >>> route(logits, RouterConfig(correction_bias=True), topk=2, correction_bias=bias).topk_ids
    tensor([[3, 1]], dtype=torch.int32)
    """
    to_scores = sigmoid if config.batch_invariant else torch.sigmoid
    scores = logits.softmax(-1) if config.scoring == "softmax" else to_scores(logits)
    compared = scores.detach()
    if correction_bias is not None:
        compared = compared + correction_bias
    if config.num_groups > 1:
        compared = _limit_groups(compared, config)
    ids = _largest(compared, topk, config)
    weights = scores.gather(1, ids)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return Routing(topk_ids=ids.int(), topk_weights=weights * config.scaling_factor, logits=logits)


def _largest(values: Tensor, count: int, config: RouterConfig) -> Tensor:
    """Indices [T, count] of the largest ``values`` of each row."""
    if config.batch_invariant:  # torch.topk does not say which of equal values it takes
        return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return values.topk(count, dim=-1).indices


def _limit_groups(compared: Tensor, config: RouterConfig) -> Tensor:
    """``compared`` with -inf in the groups that a token may not choose from."""
    tokens, experts = compared.shape
    grouped = compared.view(tokens, config.num_groups, experts // config.num_groups)
    if config.group_score == "top2":
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    else:
        group_scores = grouped.amax(-1)
    best = _largest(group_scores, config.topk_groups, config)
    barred = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(barred[:, :, None], float("-inf")).view(tokens, experts)


class Router(KeepsBuffers):
    """A linear map to logits in fp32 (fp64 for fp64 tokens), also under autocast, then :func:`route`.

    Args:
        hidden_size, num_experts, topk: H, E, K.
        config: the kind of router.
        seed: of :meth:`reset_parameters`.
        device, dtype: of ``weight``.

    Attributes:
        weight: [E, H] parameter.
        correction_bias: [E] fp32 buffer, zero at first, or None. It stays fp32 when the module is cast.
    """

    kept = ("correction_bias",)
    correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        topk: int,
        config: RouterConfig | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config or RouterConfig()
        self.config.validate_sizes(num_experts=num_experts, topk=topk)
        self.topk, self.seed = topk, seed
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if self.config.correction_bias else None
        self.register_buffer("correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weights that ``seed`` gives, and no bias."""
        draw(self.weight, seed=self.seed, stream=ROUTER)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """No correction bias."""
        if self.correction_bias is not None:
            torch.nn.init.zeros_(self.correction_bias)

    def forward(self, x: Tensor) -> Routing:
        """Route tokens [T, H]."""
        if x.dim() != 2 or x.shape[1] != self.weight.shape[1]:
            raise ArgumentError("x", f"shape [num_tokens, {self.weight.shape[1]}]", list(x.shape))
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if self.config.batch_invariant and dtype == torch.float64:
            raise ArgumentError("x", "bf16, fp16 or fp32 with batch_invariant=True", x.dtype)
        if self.config.batch_invariant and torch.compiler.is_compiling():
            raise UnsupportedError(
                "batch_invariant: expected a router outside of compiled code, which adds in the compiler's order, got "
                "one inside; call torch.compile without fullgraph=True, which leaves it out"
            )
        with torch.autocast(x.device.type, enabled=False):  # which would round the scores that decide between experts
            x, weight = x.to(dtype), self.weight.to(dtype)
            if self.config.batch_invariant:
                logits = grouped_matmul(x, as_group(x), weight[None], True)
            else:
                logits = torch.nn.functional.linear(x, weight)
            return route(logits, self.config, topk=self.topk, correction_bias=self.correction_bias)

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"{hidden}, {experts}, topk={self.topk}, {self.config}"
