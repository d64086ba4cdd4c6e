"""Ranks whose endpoints are scraped over loopback: what they count, whom they await, and what is left after faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

import moelink
from tests.support.fault_ranks import EXPIRY, FIELDS, WIRES, check_round_trip, data
from tests.support.patience import hurry, join, meet, until

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> Samples:
    """Return all samples of an endpoint by name and labels."""
    text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float | None:
    """Return the sample ``moelink_<name>`` with these labels and any others."""
    found = [v for (key, given), v in samples.items() if key == f"moelink_{name}" and labels.items() <= set(given)]
    assert len(found) < 2, (name, labels, found)
    return found[0] if found else None


def counted(rank: int, world_size: int, wire: str, base: int) -> Any:
    """Round trips, a refusal, a late rank and one that never comes, as scrapes of both ranks tell them."""
    ep = join(**FIELDS, **WIRES[wire])
    meet()
    d = data(rank)
    recv = ep.dispatch(d.x, d.topk_ids)
    ep.combine(recv.tokens, recv)
    messages = [int((recv.src_info[: int(recv.row_offsets[-1]), 0] == s).any()) for s in range(world_size)]
    tokens = {(int(s), int(t)) for s, t, _ in recv.src_info[: int(recv.row_offsets[-1])].tolist() if s >= 0}
    rows = recv.handle.counts.sum(1).tolist()
    meet()
    seen = scrape(base + rank)
    assert {labels for name, labels in seen if name == "moelink_world_size"} == {
        frozenset({("communicator", "0"), ("rank", str(rank)), ("lane", "0")})
    }
    for phase in ("dispatch", "combine"):
        assert of(seen, "calls_total", phase=phase) == 1
        assert of(seen, "sent_bytes_total", phase=phase) == getattr(ep.traffic(), phase) > 0
    assert of(seen, "dispatch_tokens") == 3
    assert sum(messages) > 0
    for source in range(world_size):
        came = of(seen, "dispatch_messages", peer=str(source))
        assert came == sum(s == source for s, _ in tokens)
    assert of(seen, "dispatch_rows") == sum(rows) > 0
    assert of(seen, "expert_imbalance") == pytest.approx(max(rows) * len(rows) / sum(rows))
    assert (of(seen, "dropped_rows_total"), of(seen, "invalid_ids_total")) == (0, 0)
    assert (of(seen, "recoveries_total"), of(seen, "poisoned"), of(seen, "world_size")) == (0, 0, world_size)
    assert (of(seen, "workspace_bytes") > 0) == (wire != "collective")
    assert not [key for key in seen if key[0] == "moelink_failures_total"]

    with pytest.raises(moelink.ArgumentError if rank else moelink.PeerAbortedError):
        ep.dispatch(d.x[:, : 8 if rank else 16].contiguous(), d.topk_ids)
    kind, peer = ("ArgumentError", "none") if rank else ("PeerAbortedError", "1")
    seen = scrape(base + rank)
    assert of(seen, "failures_total", phase="dispatch") == 1
    assert of(seen, "failures_total", kind=kind, peer=peer) == 1
    check_round_trip(ep, rank)
    meet()
    if rank and wire != "collective":  # rank 0 is in its dispatch, or will be

        def is_awaited() -> bool:
            seen = scrape(base)
            assert of(seen, "awaited", phase="combine", peer="1") == 0
            assert of(seen, "awaited", phase="dispatch", peer="0") == 0
            return of(seen, "awaited", phase="dispatch", peer="1") == 1

        until(is_awaited)
    check_round_trip(ep, rank)
    meet()
    assert of(scrape(base), "awaited", phase="dispatch", peer="1") == (None if wire == "collective" else 0)
    meet()

    hurry(ep, EXPIRY[wire], recover=True)
    if rank:
        meet()
        ep.close()
        return
    for _ in range(2):
        with pytest.raises(moelink.PeerTimeoutError):
            ep.dispatch(d.x, d.topk_ids)
    seen = scrape(base)
    assert of(seen, "poisoned") == 1
    assert of(seen, "failures_total", kind="PeerTimeoutError", phase="dispatch", peer="1") == 1
    meet()
    alone = ep.recover([0])
    check_round_trip(alone, 0)
    seen = scrape(base)
    assert (of(seen, "recoveries_total"), of(seen, "poisoned"), of(seen, "world_size")) == (1, 0, 1)
    assert of(seen, "calls_total", phase="combine") == 1
    assert of(seen, "failures_total", kind="PeerTimeoutError") == 1
    alone.close()
    seen = scrape(base)
    assert of(seen, "world_size") is None
    assert of(seen, "failures_total", kind="PeerTimeoutError") == 1


def refused(rank: int, world_size: int) -> str:
    """Return the name of the error that ``init`` raises."""
    with pytest.raises(moelink.MoelinkError) as error:
        join(**FIELDS, **WIRES["collective"])
    return type(error.value).__name__
