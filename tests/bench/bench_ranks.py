"""Rank programs of the bench's tests."""

from __future__ import annotations

import torch

import moelink
from moelink_bench.layer.plan import LayerPlan
from moelink_bench.layer.run import layer_main
from moelink_bench.presets import Plan
from moelink_bench.report import RankReport
from moelink_bench.run import moelink_main


def broken_combine_main(rank: int, world_size: int, plan: Plan, progress: str = "") -> list[RankReport]:
    """The bench's ranks, but the last one's combine returns one wrong element."""
    combine = moelink.Communicator.combine

    def wrong(self: moelink.Communicator, *args: object, **options: object) -> torch.Tensor:
        out = combine(self, *args, **options)
        if rank == world_size - 1:
            out[0, 3] += 1
        return out

    moelink.Communicator.combine = wrong
    return moelink_main(rank, world_size, plan, progress)


def broken_layer_main(rank: int, world_size: int, plan: LayerPlan, progress: str = "") -> list[RankReport]:
    """The ranks of the layer's benchmark, but the last one's combine loses a token's rows."""
    combine = moelink.Communicator.combine

    def wrong(self: moelink.Communicator, *args: object, **options: object) -> torch.Tensor:
        out = combine(self, *args, **options)
        if rank == world_size - 1:
            out[-1] *= 0.9
        return out

    moelink.Communicator.combine = wrong
    return layer_main(rank, world_size, plan, progress)


def interpreted_layer_main(rank: int, world_size: int, plan: LayerPlan, progress: str = "") -> list[RankReport]:
    """The ranks of the layer's benchmark, with the tests' fast interpreter."""
    return layer_main(rank, world_size, plan, progress)
