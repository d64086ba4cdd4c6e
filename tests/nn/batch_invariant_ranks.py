"""A MoE layer over tokens of the whole world, divided among ranks and calls in several ways, for tests of its bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import moelink
from moelink.nn import GatedMLP, MoE, Placement, RouterConfig

EXPERTS, TOPK, INNER, TOKENS = 8, 3, 40, 64
ROUTERS = {
    "softmax": RouterConfig(),
    "deepseek": RouterConfig(
        scoring="sigmoid", correction_bias=True, num_groups=4, topk_groups=2, group_score="top2", scaling_factor=2.5
    ),
}
PERMUTED = Placement((5, 2, 7, 0, 3, 6, 1, 4))
REPLICAS = Placement((5, 2, 7, 0, 3, 6, 1, 4, 2, 2))


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        dtype: of tokens, parameters and rows on the way home.
        format: of dispatched rows.
        hidden: columns of a row.
        shared: "", "fused", or "dense" for a GatedMLP.
        placement: of the layer.
        options: further arguments of ``moelink.init``.
    """

    dtype: torch.dtype = torch.float32
    format: str = "fp32"
    hidden: int = 128
    router: str = "softmax"
    shared: str = ""
    placement: Placement | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def data(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return tokens of the world and the gradients of their results."""
        generator = torch.Generator().manual_seed(7)
        x, grad = torch.randn(2, tokens, self.hidden, generator=generator).to(self.dtype)
        return x, grad

    def run(self, mine: slice, tokens: int, size: int, calls: int, **changes: Any) -> tuple[Tensor, Tensor]:
        """Return results and gradients of tokens ``mine`` of ``tokens``, ``size`` a call, in ``calls`` calls."""
        placement, shared = self.placement, None
        sizes = {
            "num_experts": EXPERTS if placement is None else placement.num_physical, "topk": TOPK,
            "hidden_size": self.hidden, "max_tokens_per_rank": tokens, "dispatch_format": self.format,
            "combine_dtype": self.dtype, "fused_shared_expert": self.shared == "fused", "batch_invariant": True,
        }  # fmt: skip
        is_trained = placement is None or placement.num_physical == EXPERTS
        with moelink.init(**{**sizes, **self.options, **changes}) as ep:
            fixed = ep.config.batch_invariant
            if self.shared == "dense":
                shared = GatedMLP(self.hidden, 56, seed=1, batch_invariant=fixed, dtype=self.dtype)
            layer = MoE(ep, intermediate_size=INNER, seed=3, router=ROUTERS[self.router], shared_expert=shared,
                        placement=placement)  # fmt: skip
            if layer.router.correction_bias is not None:
                layer.router.correction_bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
            results, grads = [], []
            for x, grad in pieces(*(each[mine] for each in self.data(tokens)), size=size, calls=calls):
                x.requires_grad_(is_trained)
                with torch.set_grad_enabled(is_trained):
                    out = layer(x)
                if is_trained:
                    out.backward(grad)
                results.append(out.detach())
                grads.append(x.grad if is_trained else x)
            return torch.cat(results), torch.cat(grads)


def pieces(x: Tensor, grad: Tensor, *, size: int, calls: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of ``size`` tokens of both, the last ones without tokens, as all ranks make ``calls`` calls."""
    for start in range(0, size * calls, size):
        yield x[start : start + size].clone(), grad[start : start + size]


def run(rank: int, world_size: int, cases: list[Case], sizes: list[int], tokens: int, changes: dict[str, Any]) -> Any:
    """Entry point of a rank: results and gradients of its tokens, by case and size. Rank 0 has the fewest tokens."""
    torch.manual_seed(rank)  # which nothing may depend on
    ends = [tokens * (r + 1) ** 2 // world_size**2 for r in range(-1, world_size)]
    most = max(end - start for start, end in zip(ends[:-1], ends[1:], strict=True))
    mine = slice(ends[rank], ends[rank + 1])
    return [[case.run(mine, tokens, size, -(-most // size), **changes) for size in sizes] for case in cases]
