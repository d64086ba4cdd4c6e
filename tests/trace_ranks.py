"""What a rank does in the tests of traces."""

from __future__ import annotations

import json
from typing import Any

import torch

import moelink
from moelink.testing import rank_data


def pair(ep: moelink.Communicator, tokens: int, seed: int, routing: Any = None) -> Any:
    """A dispatch, over ``routing`` if there is one, and its combine."""
    config = ep.config
    data = rank_data(
        seed=seed, rank=config.rank, num_tokens=tokens, hidden_size=config.hidden_size,
        num_experts=config.num_experts, topk=config.topk,
    )  # fmt: skip
    recv = ep.dispatch(data.x, data.topk_ids, data.topk_weights) if routing is None else ep.dispatch(
        data.x, None, data.topk_weights, routing=routing
    )  # fmt: skip
    y = recv.tokens.to(config.combine_dtype)
    return recv, ep.combine(y, recv)


def traced_pairs(rank: int, world_size: int, calls: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The JSON, the summary and the records of ``calls`` pairs, of which the second goes over the first's routing, and
    whether results are those of untraced calls."""
    with moelink.init(**fields, transport="symmetric", device="cpu") as ep:
        tokens = ep.config.max_tokens_per_rank - 1 - rank % 2
        _, before = pair(ep, tokens, seed=1)
        with ep.trace() as trace:
            recv, out = pair(ep, tokens, seed=1)
            for _ in range(calls - 1):
                pair(ep, tokens, seed=1, routing=recv)
        _, after = pair(ep, tokens, seed=1)
        same = torch.equal(before, out) and torch.equal(before, after)
        return {"json": json.loads(json.dumps(trace.to_json())), "table": str(trace.summary()), "same": same,
                "records": trace.records, "errors": trace.clock_errors}  # fmt: skip
