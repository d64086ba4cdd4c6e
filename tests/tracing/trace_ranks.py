"""What a rank does in the tests of traces."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

import moelink
from moelink.testing import rank_data
from moelink.tracing.records import CtaRecord


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


def check_order(records: Iterable[CtaRecord], slack: int = 0, planned: bool = False) -> None:
    """Moments of a CTA are in the order of the protocol; what a rank has seen of a peer, that peer stored before.

    ``slack``: by how much clocks may be wrong. ``planned``: one receiver plans for all of dispatch. The others then
    await counts source by source, and learn where rows go before messages or behind the first one."""
    records = list(records)
    stored: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for record in records:
        times = record.times
        by_plan = planned and (record.role.phase, record.role.name) == ("dispatch", "receive") and record.cta > 0
        free = ("last", "base known") if by_plan else ("last",)
        firsts = [time for name, time in times.items() if not name.startswith(free)]
        assert firsts == sorted(firsts), record
        assert times.get("base known", 0) <= times.get("row stored", times.get("told", 0)) + slack, record
        assert max(times.values()) == times.get("told", 0), record
        for name, time in times.items():
            if name.startswith("last"):
                assert time >= times[name.removeprefix("last ")], record
        if record.role.name == "send":
            stored[record.role.phase, record.call, record.rank].append(times.get("first store", times["begun"]))
    for record in records:
        seen = {"dispatch": "message from", "combine": "row from"}[record.role.phase]
        for peer, time in enumerate(record.peers.get(seen, ())):
            assert time is None or min(stored[record.role.phase, record.call, peer]) <= time + slack, record
            assert time is None or record.begin <= time <= record.end + slack, record
        for moment in record.role.moments:  # of messages and rows the first one suffices, else all peers must come
            came = [time for time in record.peers.get(moment.awaits, ()) if time is not None]
            if came and moment.name in record.times:
                by_source = planned and moment.awaits == "counts from" and record.cta > 0
                awaited = min(came) if moment.awaits == seen or by_source else max(came)
                assert awaited <= record.times[moment.name] + slack, (record, moment)
        for peer, time in enumerate(record.peers[record.role.per_peer[0].name]):
            assert time is None or record.begin <= time <= record.end + slack, (record, peer)


REPLAYED: dict[str, Any] = dict(num_experts=32, topk=4, hidden_size=512, max_tokens_per_rank=64)
"""Of the communicators of :func:`traced_replays`."""


def traced_replays(rank: int, world_size: int) -> Any:
    """The records of replays of a CUDA graph in a trace, their clocks' errors, and whether later replays have the same
    result."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with moelink.init(**REPLAYED, transport="symmetric", device=device) as ep:
        data = rank_data(seed=1, rank=rank, num_tokens=64, hidden_size=512, num_experts=32, topk=4)
        x, ids, weights = (tensor.to(device) for tensor in (data.x, data.topk_ids, data.topk_weights))
        y = ep.dispatch(x, ids, weights).tokens.clone()
        graph = torch.cuda.CUDAGraph()
        with ep.trace() as trace:
            ep.combine(y, ep.dispatch(x, ids, weights))
            with torch.cuda.graph(graph):
                out = ep.combine(y, ep.dispatch(x, ids, weights))
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            inside = out.clone()
        for _ in range(3):
            graph.replay()
        ep.check()
        return trace.records, trace.clock_errors, torch.equal(inside, out)
