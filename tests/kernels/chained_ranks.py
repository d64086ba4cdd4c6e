"""Ranks whose dispatches and combines follow one another in one stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moelink
from moelink.testing import assert_bitwise_equal

STEPS = 24


def gpu_fields(world_size: int, tokens: int, **options: Any) -> dict[str, Any]:
    """Of the communicator: two slots of each token."""
    sizes = {"num_experts": 4 * world_size, "topk": 2, "hidden_size": 512, "max_tokens_per_rank": tokens}
    return {**sizes, "dispatch_format": "bf16", "transport": "symmetric", "timeout": 60.0, **options}


def on_gpu(rank: int, world_size: int, tokens: int, options: dict[str, Any]) -> bool:
    """Dispatch what the last combine returned, again and again; every token comes home once or twice as large.

    Each launch reads what the one before it stored, so one that did not wait would take rows of an earlier step. Also
    in replays of a graph.
    """
    torch.cuda.set_device(rank)
    device, fields = torch.device("cuda", rank), gpu_fields(world_size, tokens, **options)
    token = torch.arange(tokens, device=device)
    experts = fields["num_experts"]
    ids = torch.stack([token % experts, (token + 1 + token % 3) % experts], 1).int()
    owners = ids // (experts // world_size)
    by_rank = fields.get("layout") == "rank"  # where a row comes home for each rank, else for each slot
    factor = torch.where((owners[:, 0] != owners[:, 1]) | (not by_rank), 2.0, 1.0)[:, None]
    x = (torch.arange(512, device=device) % 7 + 1 + rank).bfloat16().expand(tokens, -1).contiguous()
    with moelink.init(**fields, device=device) as ep:

        def chain() -> Tensor:
            rows = x
            for _ in range(STEPS):
                recv = ep.dispatch(rows, ids)
                rows = ep.combine(recv.tokens.contiguous(), recv)  # rows in place lie in slots, so torch copies them
            return rows

        def compare(rows: Tensor, what: str) -> None:
            assert_bitwise_equal(rows, (x.float() * factor**STEPS).bfloat16(), what)

        for call in range(3):
            compare(chain(), f"eager {call}")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = chain()
        for replay in range(8):
            x.mul_(1.5 if replay % 2 else 2.0).clamp_(max=64)
            graph.replay()
            compare(rows, f"replay {replay}")
        ep.check()
    return True
