"""Rank programs of the tests of the training benchmark."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moelink_bench.exchange import Exchange
from moelink_bench.layer.plan import LayerPlan
from moelink_bench.training import training_main

NAMES = ("moelink fp8_block128", "sort + all-to-all", "transformers grouped_mm")


def few_main(rank: int, world_size: int, plan: LayerPlan) -> list[list[dict[str, Any]]]:
    """The benchmark's ranks with a few contenders."""
    return training_main(rank, world_size, plan, names=NAMES)


def broken_main(rank: int, world_size: int, plan: LayerPlan) -> list[list[dict[str, Any]]]:
    """The same, but the last rank's gradients of tokens leave out a copy."""
    sum_copies = Exchange._sum_copies

    def wrong(self: Exchange, order: Tensor, grad: Tensor) -> Tensor:
        out = sum_copies(self, order, grad)
        return out / 2 if rank == world_size - 1 else out

    Exchange._sum_copies = wrong  # type: ignore[method-assign]
    return training_main(rank, world_size, plan, names=("sort + all-to-all",))
