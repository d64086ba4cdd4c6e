"""The judgement: the sharded layer's output against the same layer in one process, which uses no transport.

Each format is judged twice:

* **rounding**: against the unsharded layer whose input was quantised and dequantised the same way. Then only combine's
  roundings differ, and their largest effect is known: :func:`moelink.tools.demo.layer.allowed_rounding`.
* **precision**: against the unsharded layer in full precision, in units of what the format's tolerance allows:
  :func:`moelink.tools.demo.layer.allowed_relative_error`.

Both must be at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.formats import get_format
from moelink.routing import ExpertMap
from moelink.tools.demo.config import DemoConfig
from moelink.tools.demo.layer import (
    LayerOutput,
    Routing,
    allowed_relative_error,
    allowed_rounding,
    embed,
    route,
    unsharded_layer,
)
from moelink.tools.demo.ranks import RankOutput
from moelink.tools.demo.results import FormatResult


@dataclass(frozen=True)
class Truth:
    """What the run is judged by, computed in this process.

    Attributes:
        config: what runs.
        x: [T, H] bf16, all tokens.
        routing: of all tokens.
        full: the layer in full precision.
        owner: [T, K] rank of each chosen expert.
        home: [T] rank of each token.
    """

    config: DemoConfig
    x: Tensor
    routing: Routing
    full: LayerOutput
    owner: Tensor
    home: Tensor

    @classmethod
    def compute(cls, config: DemoConfig, text: bytes) -> Truth:
        """Embed, route and run the layer over ``text``."""
        x = embed(text, config.layer)
        routing = route(x, config.layer)
        return cls(
            config=config, x=x, routing=routing, full=unsharded_layer(x, routing, config.layer),
            owner=ExpertMap(config.layer.num_experts, config.ranks).owner(routing.topk_ids),
            home=torch.arange(len(text)) // config.tokens_per_rank,
        )  # fmt: skip

    @property
    def remote_copies(self) -> int:
        """(token, expert) pairs that cross ranks."""
        return int((self.owner != self.home[:, None]).sum())

    @property
    def remote_messages(self) -> int:
        """(token, rank) pairs that cross ranks."""
        ranks = torch.arange(self.config.ranks)
        present = (self.owner[:, :, None] == ranks).any(1)
        return int((present & (ranks != self.home[:, None])).sum())

    @property
    def tokens_by_rank_and_expert(self) -> tuple[tuple[int, ...], ...]:
        """[ranks][experts] tokens."""
        experts = self.config.layer.num_experts
        flat = torch.bincount(
            (self.home[:, None] * experts + self.routing.topk_ids).flatten(), minlength=self.config.ranks * experts
        )
        return tuple(tuple(row) for row in flat.view(self.config.ranks, experts).tolist())


def judge(name: str, out: Tensor, parts: Sequence[RankOutput], truth: Truth) -> FormatResult:
    """Compare one format's output [T, H] with both unsharded layers."""
    config, fmt = truth.config, get_format(name)
    ep_config = config.ep_config(name)
    routing = Routing(truth.routing.topk_ids, truth.routing.topk_weights.to(ep_config.weight_dtype))
    rows = fmt.quantize(truth.x.to(ep_config.combine_dtype))
    same_input = unsharded_layer(fmt.dequantize(rows.payload, rows.scales), routing, config.layer)
    allowed = allowed_rounding(
        same_input, topk=config.layer.topk, ranks=config.ranks,
        combine_dtype=ep_config.combine_dtype, accumulate_dtype=ep_config.accumulate_dtype,
    )  # fmt: skip
    difference = (out - same_input.out).abs()
    # 0 / 0 counts as equal; NaN stays NaN, which passes nothing.
    rounding = torch.where((difference == 0) & (allowed == 0), 0.0, difference / allowed)
    full = truth.full.out
    return FormatResult(
        format=name,
        combine_dtype=str(ep_config.combine_dtype).removeprefix("torch."),
        transport=parts[0].transport,
        bytes_per_token=fmt.bytes_per_token(config.layer.hidden_size),
        dispatch_bytes=sum(part.dispatch_bytes for part in parts),
        combine_bytes=sum(part.combine_bytes for part in parts),
        copies_dispatch_bytes=truth.remote_copies * fmt.bytes_per_token(config.layer.hidden_size),
        copies_combine_bytes=truth.remote_copies * ep_config.combine_row_bytes,
        rounding_error=float(rounding.max()),
        relative_error=float((out - full).norm() / full.norm()),
        allowed_error=allowed_relative_error(fmt.tolerance, ep_config.combine_dtype),
    )
