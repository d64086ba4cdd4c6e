"""Routers: which experts a token goes to, and with which weights.

Legend: ``T`` tokens, ``H`` hidden_size, ``E`` num_experts, ``K`` topk, ``N`` expert groups of E / N experts each.

Every router here is one formula with parts switched on or off::

    s = softmax(W x)  or  sigmoid(W x)                         scores, [E]
    c = s + b                                                  are compared; b is the correction bias, or zero
    c = -inf outside the best topk_groups of N groups          by the best, or the sum of the best two, c of the group
    ids = the K largest c                                      of equal ones the lower id first
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
from moelink.nn.parameters import ROUTER, KeepsBuffers, draw, part_of
from moelink.rows.choice import Choice
from moelink.rows.choose import choose
from moelink.rows.few_tokens import are_few, route_few
from moelink.rows.wide_product import wide_product

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


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
        batch_invariant: logits, and with them ids and the bits of weights, do not depend on other tokens, which are
            bf16, fp16 or fp32.
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
        for name in ("renormalize", "correction_bias", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, "True or False", getattr(self, name))
        for name in ("num_groups", "topk_groups"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, "an integer >= 1", value)
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ConfigError("topk_groups", f"between 1 and num_groups = {self.num_groups}", self.topk_groups)

    def validate_sizes(self, *, num_experts: int, topk: int) -> None:
        """Raise ConfigError when a layer of these sizes cannot be routed like this."""
        if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
            raise ConfigError("topk", "an integer >= 1", topk)
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

    ``correction_bias``: [E], where ``config`` has one, and nowhere else.

    Raises:
        ArgumentError, ConfigError: logits, bias and sizes do not fit one another, or ``config``.

    >>> logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).log()
    >>> route(logits, RouterConfig(), topk=2).topk_weights
    tensor([[0.6000, 0.4000]])
    >>> bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    >>> route(logits, RouterConfig(correction_bias=True), topk=2, correction_bias=bias).topk_ids
    tensor([[3, 1]], dtype=torch.int32)
    """
    config.validate_sizes(num_experts=logits.shape[1], topk=topk)
    if logits.dtype not in (torch.float32, torch.float64):
        raise ArgumentError("logits", "fp32 or fp64", logits.dtype)
    if config.correction_bias != (correction_bias is not None):
        expected = f"{'a tensor' if config.correction_bias else 'None'}, as config.correction_bias says"
        raise ArgumentError("correction_bias", expected, type(correction_bias).__name__)
    if correction_bias is not None and correction_bias.shape != logits.shape[1:]:
        raise ArgumentError("correction_bias", f"shape {list(logits.shape[1:])}", list(correction_bias.shape))
    _check_bias(correction_bias, logits)
    return _route(logits, config, topk, correction_bias)


def _check_bias(bias: Tensor | None, beside: Tensor) -> None:
    """Refuse a correction bias on another device than ``beside``, which a kernel would read as if it were there."""
    if bias is not None and bias.device != beside.device:
        raise ArgumentError(
            "correction_bias", f"a tensor on {beside.device}, as the logits are", f"one on {bias.device}"
        )


def _route(logits: Tensor, config: RouterConfig, topk: int, correction_bias: Tensor | None) -> Routing:
    """:func:`route` of sizes and a dtype that fit."""
    bias = correction_bias
    if bias is not None and bias.dtype != logits.dtype:
        bias = bias.to(logits.dtype)
    ids, weights = choose(logits, bias, _choice_of(config, topk))
    return Routing(topk_ids=ids, topk_weights=weights, logits=logits)


def _choice_of(config: RouterConfig, topk: int) -> Choice:
    return Choice(
        topk, config.scoring, config.renormalize, config.num_groups, config.topk_groups, config.group_score,
        config.scaling_factor,
    )  # fmt: skip


class Router(KeepsBuffers):
    """A linear map to logits, then :func:`route`.

    Logits have fp32 sums of exact products (fp64 for fp64 tokens), also under autocast. On NVIDIA GPUs bf16 tokens and
    a bf16 weight go to tensor cores as they are; all others are converted to fp32 first, so that an fp32 weight keeps
    its precision (:mod:`moelink.rows.wide_product`).

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
        weight, invariant = part_of(self, self._parameters, "weight"), self.config.batch_invariant
        if x.dim() != 2 or x.shape[1] != weight.shape[1]:
            raise ArgumentError("x", f"shape [num_tokens, {weight.shape[1]}]", list(x.shape))
        if invariant and x.dtype == torch.float64:
            raise ArgumentError("x", "bf16, fp16 or fp32 with batch_invariant=True", x.dtype)
        if invariant and torch.compiler.is_compiling():
            raise UnsupportedError(
                "batch_invariant: expected a router outside of compiled code, which adds in the compiler's order, got "
                "one inside; call torch.compile without fullgraph=True, which leaves it out"
            )
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):  # else it would round the scores that decide between experts
            return self._routed(x, weight)
        with torch.autocast(kind, enabled=False):
            return self._routed(x, weight)

    def _routed(self, x: Tensor, weight: Tensor) -> Routing:
        bias = part_of(self, self._buffers, "correction_bias")
        _check_bias(bias, weight)
        if self.config.batch_invariant:
            logits = grouped_matmul(x.float(), as_group(x), weight.float()[None], True)
        elif are_few(x, weight, bias):
            logits, ids, weights = route_few(x, weight, bias, _choice_of(self.config, self.topk))
            return Routing(ids, weights, logits)
        else:
            logits = wide_product(x, weight)
        return _route(logits, self.config, self.topk, bias)

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"{hidden}, {experts}, topk={self.topk}, {self.config}"
