"""Run pairs of dispatch and combine, trace them, and return the trace of all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.config import EPConfig
from moelink.control.group import is_launched
from moelink.output import DispatchOutput
from moelink.testing import rank_data, run_ranks
from moelink.tools.common import Progress, Steps, followed, rank_device

WARM_PAIRS = 2


@dataclass(frozen=True)
class TraceConfig:
    """The calls to trace.

    Attributes:
        ranks: number of ranks; the world size of a launcher, if one started this process.
        device: "cpu" or "cuda".
        tokens: of each rank.
        pairs: pairs of dispatch and combine; the trace keeps the last 16.
        experts, topk, hidden, format: as in :func:`moelink.init`.
        graph: replay a CUDA graph of the pair, so that no host holds up a rank; on CUDA only.
        timeout: seconds, as in :func:`moelink.init`.
    """

    ranks: int
    device: str
    tokens: int
    pairs: int
    experts: int
    topk: int
    hidden: int
    format: str
    graph: bool = True
    timeout: float = 60.0

    def __post_init__(self) -> None:
        self.ep_config()

    def ep_config(self) -> EPConfig:
        """Return the configuration of rank 0. Raises ConfigError for settings that are not acceptable."""
        return EPConfig(
            num_experts=self.experts, topk=self.topk, hidden_size=self.hidden, max_tokens_per_rank=self.tokens,
            dispatch_format=self.format, transport="symmetric", timeout=self.timeout, world_size=self.ranks,
        )  # fmt: skip


@dataclass(frozen=True)
class TraceRun:
    """A trace.

    Attributes:
        document: in Chrome's trace format.
        table: its summary, as text.
    """

    document: dict[str, Any]
    table: str


def run_trace(config: TraceConfig, progress: Progress = lambda message: None) -> TraceRun | None:
    """Trace the ranks of a launcher, or ``config.ranks`` processes started here. None on a launcher's ranks but the
    first. ``progress`` gets the steps of the ranks that were started here.

    Raises:
        UnsupportedError: this device's kernels cannot be traced.
    """
    progress(f"tracing {config.pairs} pairs on {config.ranks} ranks")
    if not is_launched():
        with followed(progress) as path:
            return run_ranks(rank_main, config.ranks, config, path, timeout=2 * config.timeout + 300)[0]  # type: ignore[no-any-return]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        found = rank_main(rank, world_size, config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return found if rank == 0 else None


def rank_main(rank: int, world_size: int, config: TraceConfig, path: str | None = None) -> TraceRun:
    """Run one rank, as torchrun's variables number it. Every rank returns the same. Rank 0 writes steps to ``path``."""
    steps = Steps(path if rank == 0 else None, WARM_PAIRS + config.pairs)
    device = rank_device(config.device, interprets=True)
    with moelink.init(
        num_experts=config.experts, topk=config.topk, hidden_size=config.hidden, max_tokens_per_rank=config.tokens,
        dispatch_format=config.format, transport="symmetric", device=device, timeout=config.timeout,
    ) as ep:  # fmt: skip
        pair = _pair_of(ep, config)
        with ep.trace():  # compiles the kernels that stamp; its records are dropped
            for _ in range(WARM_PAIRS):
                pair()
                steps.end("pairs that compile")
        with ep.trace() as trace:
            again = _captured(pair) if config.graph else pair
            for _ in range(config.pairs):
                again()
                steps.end("pairs")
        return TraceRun(trace.to_json(), str(trace.summary()))


def _pair_of(ep: moelink.Communicator, config: TraceConfig) -> Callable[[], object]:
    """Return a dispatch of random rows and ids and its combine, of the rows' values as far as they are numbers."""
    wanted = ep.config
    data = rank_data(
        seed=1, rank=wanted.rank, num_tokens=config.tokens, hidden_size=config.hidden, num_experts=config.experts,
        topk=config.topk,
    )  # fmt: skip
    x, ids, weights = (tensor.to(ep.device) for tensor in (data.x, data.topk_ids, data.topk_weights))
    y: list[torch.Tensor] = []

    def pair() -> tuple[DispatchOutput, torch.Tensor]:
        recv = ep.dispatch(x, ids, weights)
        if not y:  # outputs of experts are no part of the trace
            y.append(torch.zeros(len(recv.tokens), config.hidden, dtype=wanted.combine_dtype, device=ep.device))
        return recv, ep.combine(y[0], recv)

    return pair


def _captured(pair: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays ``pair`` from a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = pair()

    def replay() -> object:
        graph.replay()
        return kept

    return replay
