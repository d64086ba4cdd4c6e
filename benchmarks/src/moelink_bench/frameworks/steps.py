"""What is compared and timed of a layer: forward, and forward with backward, on all ranks of a torchrun job."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moelink_bench.timing import everyone, slowest_rank

Parts = dict[str, Tensor]
PASSES = ("forward", "forward and backward")


@dataclass(frozen=True)
class Case:
    """Sizes of the layer.

    Attributes:
        tokens: of each rank.
        hidden_size, intermediate_size, num_experts, topk: of the layer.
        device: "cuda" or "cpu".
        room: rows that moelink's outputs have, over the expected ones; None for the worst case.
    """

    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    device: str
    room: float | None

    @property
    def capacity(self) -> int | None:
        """Rows of moelink's outputs, in all experts of a rank; uniform routing expects tokens x topk of them."""
        return None if self.room is None else int(self.room * self.tokens * self.topk)


@dataclass(frozen=True)
class Step:
    """One dispatcher in the layer.

    Attributes:
        name: whose it is.
        forward: runs the layer without gradients, and returns its output.
        both: runs it forward and backward, and returns the output and all gradients, by name.
        check: raises where a call since the last check lost rows or failed.
    """

    name: str
    forward: Callable[[], Tensor]
    both: Callable[[], Parts]
    check: Callable[[], None] = lambda: None


def differences(theirs: Parts, ours: Parts) -> dict[str, float]:
    """Return |ours - theirs| / |theirs| of each part; infinite where one is missing or not finite.

    >>> differences({"out": torch.tensor([3.0, 4.0])}, {"out": torch.tensor([3.0, 4.5])})
    {'out': 0.1}
    """
    found = {}
    for name, expected in theirs.items():
        made = ours.get(name)
        if made is None or made.shape != expected.shape:
            found[name] = float("inf")
            continue
        length = float(expected.double().norm())
        off = float((made.double() - expected.double()).norm())
        ratio = off / length if length else off
        found[name] = ratio if ratio < float("inf") else float("inf")
    return found


def largest_over_ranks(found: Mapping[str, float]) -> dict[str, float]:
    """Return the largest of all ranks for each name, which all ranks have. Collective."""
    values = torch.tensor([found[name] for name in sorted(found)], dtype=torch.float64)  # over gloo
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(sorted(found), values.tolist(), strict=True))


def microseconds(action: Callable[[], object], device: str, calls: int) -> float:
    """Return what a call takes on this rank, by events on CUDA, else by the clock. Collective."""
    dist.barrier()
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            action()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) * 1e6 / calls


def time_steps(
    steps: Sequence[Step], device: str, *, samples: int, calls: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of both passes of every step, as :class:`moelink_bench.timing.Figure`. Collective.

    Samples of the steps alternate, so that a clock that falls meets all of them.
    """
    taken: dict[str, dict[str, list[float]]] = {step.name: {name: [] for name in PASSES} for step in steps}
    for name in PASSES:
        for sample in range(samples + 1):
            for step in steps:
                us = microseconds(step.forward if name == PASSES[0] else step.both, device, calls)
                if sample:  # the first one warms up
                    taken[step.name][name].append(us)
    return {
        who: {name: dataclasses.asdict(slowest_rank(everyone(values))) for name, values in passes.items()}
        for who, passes in taken.items()
    }
