"""moelink.metrics: what a scrape returns, how many labels it may have, and that calls do nothing for it."""

import json
import re
import socket
import sys
from collections import Counter

import pytest
import torch
from prometheus_client import CollectorRegistry

import moelink
from moelink import metrics
from moelink.metrics import METRICS_TABLE, MOST_PEERS, Collector
from moelink.testing import free_port, rank_data, run_ranks
from moelink.transports.counters import Counters, LatestDispatch
from tests.support.fault_ranks import FIELDS, check_round_trip
from tests.support.paths import ROOT
from tests.transports import metrics_ranks

LANE = {"communicator": "0", "rank": "0", "lane": "0"}


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.mark.parametrize(
    "wire", ["symmetric", pytest.param("collective", marks=pytest.mark.quick("its counters are other code"))]
)
def test_scrapes_of_two_ranks_tell_their_calls_waits_and_faults(monkeypatch, wire):
    base = free_port()
    monkeypatch.setenv("MOELINK_METRICS", str(base))
    run_ranks(metrics_ranks.counted, 2, wire, base, timeout=240)


def test_peers_learn_of_a_port_that_is_not_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        monkeypatch.setenv("MOELINK_METRICS", f"127.0.0.1:{taken.getsockname()[1] - 1}")
        assert run_ranks(metrics_ranks.refused, 2) == ["PeerAbortedError", "ConfigError"]


@pytest.mark.parametrize("wire", ["collective", "symmetric"])
def test_losses_stay_counted_after_check(registry, wire):
    collector = Collector()
    registry.register(collector)
    with moelink.init(**{**FIELDS, "capacity": 2}, transport=wire) as ep:
        collector.add(ep)
        x, ids = torch.ones(3, 16, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32)
        for dropped in (4, 8):
            ep.dispatch(x, ids)
            assert registry.get_sample_value("moelink_dropped_rows_total", LANE) == dropped
            with pytest.raises(moelink.CapacityError):
                ep.check()
            assert registry.get_sample_value("moelink_dropped_rows_total", LANE) == dropped
        labels = {"phase": "check", "kind": "CapacityError", "peer": "none"}
        assert registry.get_sample_value("moelink_failures_total", labels) == 2


def test_labels_are_bounded(registry):
    collector = Collector()
    registry.register(collector)
    every = tuple(range(1000))
    counters = Counters(
        {"dispatch": 1}, {"dispatch": 0}, 0, 0, LatestDispatch(1, every, (1,)),
        {"dispatch": (True,) * 1000, "combine": (False,) * 1000},
    )  # fmt: skip
    with moelink.init(**FIELDS) as ep:
        collector.add(ep)
        lanes = metrics.lanes_of(ep)
        lanes.counters = lambda: [counters]
        lanes.contexts[0].session.fate.failures.counts.update(
            {("dispatch", "PeerLostError", peer): 1 for peer in every}
        )
        samples = [sample for family in registry.collect() for sample in family.samples]
    found = Counter(sample.name for sample in samples)
    assert found["moelink_dispatch_messages"] == found["moelink_failures_total"] == MOST_PEERS + 1
    assert found["moelink_awaited"] == 2 * (MOST_PEERS + 1)
    for name, total in (("dispatch_messages", sum(every)), ("failures_total", 1000), ("awaited", 1000)):
        assert sum(sample.value for sample in samples if sample.name == f"moelink_{name}") == total
    allowed = {label for each in METRICS_TABLE for label in each.labels}
    assert {label for sample in samples for label in sample.labels} <= allowed


def test_every_metric_of_the_table_and_of_the_dashboard_exists(registry):
    with moelink.init(**FIELDS, transport="symmetric") as ep:
        registry.register(Collector(ep))
        check_round_trip(ep, 0)
        with pytest.raises(moelink.ArgumentError):
            ep.dispatch(torch.ones(3, 8), torch.zeros(3, 2, dtype=torch.int32))
        samples = {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}
    assert samples == {each.name: set(each.labels) for each in METRICS_TABLE}
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 5
    for query in queries:
        names = re.findall(r"\bmoelink_\w+", query)
        assert names
        assert set(names) <= samples.keys(), query
        used = {label for group in re.findall(r"\bby \(([^)]*)\)", query) for label in re.split(r",\s*", group)}
        labels = set().union(*(samples[name] for name in names)) | {"instance", "job"}
        assert used <= labels, query


def test_the_page_has_the_table():
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.meaning} |"
        for each in METRICS_TABLE
    ]
    assert "\n".join(rows).replace("|  |", "| |") in (ROOT / "docs" / "metrics.md").read_text()


def test_a_call_does_nothing_for_metrics(registry):
    entered = set()
    with moelink.init(**FIELDS, transport="symmetric") as ep:
        registry.register(Collector(ep))
        check_round_trip(ep, 0)
        d = rank_data(seed=3, rank=0, num_tokens=3, hidden_size=16, num_experts=7, topk=2)
        sys.setprofile(lambda frame, event, _: entered.add((frame.f_code.co_filename, frame.f_code.co_name)))
        try:
            recv = ep.dispatch(d.x, d.topk_ids)
            ep.combine(recv.tokens, recv)
        finally:
            sys.setprofile(None)
        assert any(name == "begin" for _, name in entered)
        assert not [
            name for file, name in entered if file.endswith(("moelink/metrics.py", "counters.py")) or name == "count"
        ]
        assert registry.get_sample_value("moelink_calls_total", {**LANE, "phase": "combine"}) == 2


def test_communicators_have_the_least_free_number(registry):
    collector = Collector()
    registry.register(collector)
    first, second = (moelink.init(**{**FIELDS, "lanes": lanes}) for lanes in (1, 2))
    for ep in (first, second):
        collector.add(ep)

    def open_ones():
        return {
            (sample.labels["communicator"], sample.labels["lane"])
            for family in registry.collect() for sample in family.samples if sample.name == "moelink_world_size"
        }  # fmt: skip

    assert open_ones() == {("0", "0"), ("1", "0"), ("1", "1")}
    first.close()
    assert open_ones() == {("1", "0"), ("1", "1")}
    with pytest.raises(moelink.ClosedError):
        first.dispatch(torch.ones(3, 16), torch.zeros(3, 2, dtype=torch.int32))
    with moelink.init(**FIELDS) as third:
        collector.add(third)
        assert open_ones() == {("0", "0"), ("1", "0"), ("1", "1")}
    second.close()
    assert not open_ones()


def test_what_is_refused(monkeypatch, registry):
    with moelink.init(**{**FIELDS, "lanes": 2}) as ep:
        registry.register(Collector(ep))
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(Collector(ep))
        with pytest.raises(moelink.StateError, match="got its lane 1"):
            Collector(ep.lane(1))
        endpoint = metrics.serve(ep, port=0)
        for port in (endpoint.port, 70000, -5, "9400"):
            with pytest.raises(moelink.ConfigError, match="port: expected"):
                metrics.serve(ep, port=port)
        endpoint.close()
        monkeypatch.setattr(metrics, "find_spec", lambda name: None)
        with pytest.raises(moelink.UnsupportedError, match=re.escape("run pip install prometheus_client")):
            metrics.serve(ep)
    with (
        moelink.init_devices(devices=["cpu"], **FIELDS) as group,
        pytest.raises(moelink.ArgumentError, match="a Communicator"),
    ):
        metrics.serve(group)
    for value, error, match in (
        ("on", moelink.ConfigError, "MOELINK_METRICS: expected a port"),
        ("localhost:", moelink.ConfigError, "MOELINK_METRICS: expected a port"),
        ("0", moelink.ConfigError, "MOELINK_METRICS: expected a port"),
        ("9400", moelink.UnsupportedError, "prometheus_client"),
    ):
        monkeypatch.setenv("MOELINK_METRICS", value)
        with pytest.raises(error, match=match):
            moelink.init(**FIELDS)
