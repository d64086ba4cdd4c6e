"""One rank of the demonstration: dispatch, the rank's experts, combine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import moelink
from moelink.formats import Format, get_format
from moelink.output import DispatchOutput
from moelink.routing import ExpertMap
from moelink.tools.demo.config import DemoConfig
from moelink.tools.demo.layer import embed, make_expert, route
from moelink.transports.select import choose_transport


@dataclass(frozen=True)
class RankOutput:
    """One rank's part for one format. Plain arrays: they travel between processes."""

    out: np.ndarray
    dispatch_bytes: int
    combine_bytes: int
    transport: str


def run_experts(recv: DispatchOutput, config: DemoConfig, format_name: str, rank: int) -> Tensor:
    """A rank's experts over what dispatch delivered: rows back to numbers, then one expert after the other."""
    ep_config, fmt = config.ep_config(format_name, rank), get_format(format_name)
    starts = recv.row_offsets.tolist()
    x = dequantize_rows(recv, fmt, config.layer.hidden_size)
    y = torch.zeros(recv.tokens.shape[0], config.layer.hidden_size, dtype=ep_config.combine_dtype, device=x.device)
    first = ExpertMap(config.layer.num_experts, config.ranks).first(rank)
    for group in range(ep_config.num_local_experts):
        rows = slice(starts[group], starts[group + 1])
        y[rows] = make_expert(first + group, config.layer, x.device)(x[rows]).to(y.dtype)
    return y


def dequantize_rows(recv: DispatchOutput, fmt: Format, hidden_size: int) -> Tensor:
    """The received rows [row_offsets[-1], hidden_size] as fp32 or fp64: payload times scales, from their layout."""
    total = int(recv.row_offsets[-1])
    scales = None
    if recv.scales is not None and fmt.scale_layout is not None:
        sizes = (recv.row_offsets[1:] - recv.row_offsets[:-1]).long()
        groups = torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes)
        scales = fmt.scale_layout.gather(
            recv.scales, rows=torch.arange(total, device=sizes.device), groups=groups,
            row_offsets=recv.row_offsets, scale_width=fmt.scale_width(hidden_size),
        )  # fmt: skip
    return fmt.dequantize(recv.tokens[:total], scales)


def rank_main(rank: int, world_size: int, config: DemoConfig, text: bytes, progress_file: str) -> list[RankOutput]:
    """One rank of the demonstration: every format in turn."""
    torch.set_num_threads(1)
    if config.transport == "symmetric" and not config.uses_cuda:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if config.uses_cuda else torch.device("cpu")
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
