"""The demonstration's ranks when a launcher (torchrun) started them, on one host or several."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import torch
import torch.distributed as dist

from moelink.errors import ConfigError
from moelink.tools.demo.config import DemoConfig
from moelink.tools.demo.ranks import RankOutput, rank_main

_COUNTS = ("dispatch_bytes", "combine_bytes")


def run_launched(config: DemoConfig, text: bytes, progress_file: str) -> list[list[RankOutput]] | None:
    """This process's rank of the demonstration. Collective over the launcher's world.

    Returns:
        what each rank returned, by rank, on rank 0; None on the others.

    Raises:
        ConfigError: the launcher started another number of ranks.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks != config.ranks:
        raise ConfigError("ranks", f"the launcher's WORLD_SIZE {ranks}", config.ranks)
    outputs = rank_main(rank, ranks, config, text, progress_file)
    if not dist.is_initialized():  # one rank needs no group
        return [outputs]
    try:
        return gather_outputs(outputs, config, len(text))
    finally:
        dist.destroy_process_group()


def gather_outputs(outputs: list[RankOutput], config: DemoConfig, num_tokens: int) -> list[list[RankOutput]] | None:
    """Every rank's ``outputs`` on rank 0, as tensors of sizes that all ranks know, so that nothing is unpickled."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    by_rank: list[list[RankOutput]] = [[] for _ in range(ranks)]
    for output in outputs:
        padded = torch.zeros(config.tokens_per_rank, config.layer.hidden_size, dtype=torch.float64)
        padded[: len(output.out)] = torch.from_numpy(output.out)
        counts = torch.tensor([getattr(output, name) for name in _COUNTS])
        everyone = [torch.empty_like(padded) for _ in range(ranks)]
        all_counts = [torch.empty_like(counts) for _ in range(ranks)]
        dist.gather(padded, everyone if rank == 0 else None)
        dist.gather(counts, all_counts if rank == 0 else None)
        for peer in range(ranks):
            part = config.share(peer, num_tokens)
            out = np.ascontiguousarray(everyone[peer][: part.stop - part.start].numpy())
            counted = dict(zip(_COUNTS, all_counts[peer].tolist(), strict=True))
            by_rank[peer].append(dataclasses.replace(output, out=out, **counted))
    return by_rank if rank == 0 else None
