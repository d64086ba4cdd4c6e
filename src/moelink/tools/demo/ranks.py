"""One rank of the demonstration: dispatch, the rank's experts, combine; as a process, or started by torchrun."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import moelink
from moelink.control.process import await_release
from moelink.errors import ConfigError
from moelink.output import DispatchOutput
from moelink.routing import ExpertMap
from moelink.tools.common import dequantize_rows, rank_device
from moelink.tools.demo.layer import embed, make_expert, route
from moelink.tools.demo.report import DemoConfig
from moelink.transports.build import choose_transport


@dataclass(frozen=True)
class RankOutput:
    """One rank's part for one format. Plain arrays: they travel between processes."""

    out: np.ndarray
    dispatch_bytes: int
    combine_bytes: int
    transport: str


def run_experts(recv: DispatchOutput, config: DemoConfig, format_name: str, rank: int) -> Tensor:
    """Run a rank's experts over the rows of dispatch: dequantise them, then one expert after the other."""
    ep_config = config.ep_config(format_name, rank)
    starts = recv.row_offsets.tolist()
    x = dequantize_rows(recv, format_name=format_name, hidden_size=config.layer.hidden_size)
    y = torch.zeros(recv.tokens.shape[0], config.layer.hidden_size, dtype=ep_config.combine_dtype, device=x.device)
    first = ExpertMap(config.layer.num_experts, config.ranks).first(rank)
    for group in range(ep_config.num_local_experts):
        rows = slice(starts[group], starts[group + 1])
        y[rows] = make_expert(first + group, config.layer, x.device)(x[rows]).to(y.dtype)
    return y


def rank_main(rank: int, world_size: int, config: DemoConfig, text: bytes, progress_file: str) -> list[RankOutput]:
    """Run one rank of the demonstration: every format in turn."""
    torch.set_num_threads(1)
    device = rank_device("cuda" if config.uses_cuda else "cpu", interprets=config.transport == "symmetric")
    x = embed(text, config.layer)[config.share(rank, len(text))].to(device)
    routing = route(x, config.layer)
    results = []
    for name in config.formats:
        wanted = config.ep_config(name, rank)
        with moelink.init(
            num_experts=wanted.num_experts, topk=wanted.topk, hidden_size=wanted.hidden_size,
            max_tokens_per_rank=wanted.max_tokens_per_rank, dispatch_format=name, combine_dtype=wanted.combine_dtype,
            transport=wanted.transport, device=device, timeout=config.timeout,
        ) as ep:  # fmt: skip
            rows = x.to(wanted.combine_dtype)
            recv = ep.dispatch(rows, routing.topk_ids, routing.topk_weights.to(wanted.weight_dtype))
            out = ep.combine(run_experts(recv, config, name, rank), recv)
            traffic = ep.traffic()
            chosen = choose_transport(ep.config, [device])
            results.append(RankOutput(out.double().cpu().numpy(), traffic.dispatch, traffic.combine, chosen))
        if rank == 0:
            with Path(progress_file).open("a") as stream:
                stream.write(f"{name}\n")
    return results


_COUNTS = ("dispatch_bytes", "combine_bytes")


def run_launched(config: DemoConfig, text: bytes, progress_file: str) -> list[list[RankOutput]] | None:
    """Run this process's rank of the demonstration. Collective over the launcher's world.

    Returns:
        the results of each rank, by rank, on rank 0; None on the others.

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
    """Gather every rank's ``outputs`` on rank 0, as tensors of sizes that all ranks know: nothing is unpickled."""
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
        await_release([padded, counts, *everyone, *all_counts])
        for peer in range(ranks):
            part = config.share(peer, num_tokens)
            out = np.ascontiguousarray(everyone[peer][: part.stop - part.start].numpy())
            counted = dict(zip(_COUNTS, all_counts[peer].tolist(), strict=True))
            by_rank[peer].append(dataclasses.replace(output, out=out, **counted))
    return by_rank if rank == 0 else None
