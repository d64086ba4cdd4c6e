"""In-kernel traces: every moment is stamped, in the order of the protocol, and read, summarised and written right."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

import moelink
from moelink.errors import ArgumentError, StateError, UnsupportedError
from moelink.kernels.launch import grid
from moelink.kernels.launch.constants import combine_spec
from moelink.memory.protocol import TRACE_AT
from moelink.memory.workspace import Workspace
from moelink.testing import run_ranks
from moelink.tools.trace.timeline import draw_trace
from moelink.tracing.device.buffer import require_traceable
from moelink.tracing.device.clocks import ClockNumbers, ep_compare_clocks_kernel
from moelink.tracing.device.layout import FIRST_FROM, ROLES, TRACE_CALLS, buffer_shape
from moelink.tracing.records import CtaRecord, read_rows, rows_of
from moelink.tracing.summary import summarise
from moelink.tracing.trace import Trace
from moelink_testing import Scheduler
from tests.kernels.test_kernels_aot import output_of
from tests.support.protocol_runs import FORMAT as SETUP
from tests.support.protocol_runs import Small, play, rank_main, scenarios, transports
from tests.tracing import trace_ranks

FEW = dict(num_experts=6, topk=2, hidden_size=72, max_tokens_per_rank=4)
MANY = dict(num_experts=6, topk=2, hidden_size=72, max_tokens_per_rank=10, pre_reduce=False)
"""Where rows come home with flags, and CTAs share what they count."""


@functools.cache
def traced(few: bool) -> list[dict[str, Any]]:
    """What two ranks made of a pair, and of one over its routing."""
    return run_ranks(trace_ranks.traced_pairs, 2, 2, FEW if few else MANY)  # type: ignore[no-any-return]


@pytest.mark.parametrize("few", [True, False])
def test_every_rank_stamps_every_moment(few):
    results = traced(few)
    assert all(result["same"] for result in results), "a traced call has another result"
    assert results[0]["table"] == results[1]["table"]
    records = results[0]["records"]
    trace_ranks.check_order(records)
    calls = sorted({record.call for record in records})
    for rank, role in itertools.product(range(2), ROLES):
        of_role = [record for record in records if record.rank == rank and record.role == role]
        assert {record.call for record in of_role} == set(calls), "a pair over cached routing, too"
        stamped = {name for record in of_role for name in record.times}
        assert stamped == {moment.name for moment in role.moments}
        for moment in role.per_peer[len(role.per_peer) // 2 :] if role.name != "send" else ():
            peers = [record.peers[moment.name] for record in of_role]
            assert all(any(times[peer] is not None for times in peers) for peer in range(2)), moment
        # Over an earlier routing nothing is counted.
        if (role.phase, role.name) == ("dispatch", "send"):
            assert {r.call for r in of_role if "counted" in r.times} == {calls[0]}


@pytest.mark.parametrize("few", [True, False])
def test_every_cta_has_a_record_of_its_own(few):
    """The stamps of interpreted CTAs say which CTA of its launch made them, and no step occurs in two records."""
    records = traced(few)[0]["records"]
    steps: dict[int, CtaRecord] = {}
    for record in records:
        for time in record.times.values():
            assert steps.setdefault(time, record) is record, (record, steps[time])
    for key, group in itertools.groupby(records, lambda r: (r.rank, r.call, r.role.phase)):
        launch = {(record.role.name == "send", record.cta): record.sm for record in group}
        if len({sends for sends, _ in launch}) == 2:
            senders = sum(sends for sends, _ in launch)
            assert all(sm == cta + (0 if sends else senders) for (sends, cta), sm in launch.items()), key


def test_json_has_a_track_for_each_rank_and_sm():
    result = traced(True)[0]
    events, records = result["json"]["traceEvents"], result["records"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    # CTAs of one SM may overlap; the first track of each has its plain name.
    plain = {(pid, int(name.split()[1])) for (pid, _), name in named.items() if "(" not in name}
    assert plain == {(record.rank, record.sm) for record in records}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} == named.keys()
    for track in named:
        ctas = [e for e in slices if (e["pid"], e["tid"]) == track and e["name"].startswith(("dispatch", "combine"))]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(ctas)), "CTAs overlap"
        inner = [e for e in slices if (e["pid"], e["tid"]) == track and e not in ctas]
        assert inner
        assert all(any(c["ts"] <= e["ts"] and e["ts"] + e["dur"] <= c["ts"] + c["dur"] for c in ctas) for e in inner)
    assert result["json"]["otherData"]["unit"] == "steps"
    assert {each["phase"] for each in result["json"]["summary"]["moments"]} == {"dispatch", "combine"}
    assert sum(e["ph"] == "X" and "cta" in e["args"] for e in events) == len(slices)


def small_transports(setup: Any = SETUP, calls: int = 0, world: int = 2) -> list[Any]:
    group = transports(setup, world, calls=calls)
    for transport in group:
        transport.open_trace()
    return group


def close(group: list[Any]) -> list[CtaRecord]:
    """The records of all ranks, in the order of the steps at which they begin."""
    buffers = [transport.close_trace()[0].numpy() for transport in group]
    records = [record for rank, buffer in enumerate(buffers) for record in read_rows(rows_of(buffer), rank)]
    for transport in group:
        transport.check()
        transport.close()
    return sorted(records, key=lambda record: record.begin)


@pytest.mark.parametrize("name, seed", [
    ("fused_pair", 0), ("over_a_routing", 1), ("counted_alone", 2), ("split_pair", 3), ("a_rank_with_nothing", 4),
    *itertools.product(("fused_pair", "counted_alone", "two_calls_other_token_counts"), range(5, 10)),
])  # fmt: skip
def test_order_under_schedules(name, seed):
    """All CTAs of both ranks in any order, with a store buffer: nothing is seen before it was stored."""
    scenario = scenarios(SETUP)[name]
    group = small_transports(scenario["cases"][0].setup)
    results: dict[Any, Any] = {}
    rest = {key: value for key, value in scenario.items() if key != "cases"}
    mains = [
        rank_main(transport, rank, scenario["cases"], results, **{"fused": True, **rest})
        for rank, transport in enumerate(group)
    ]
    play(Scheduler(seed), group, mains)
    records = close(group)
    trace_ranks.check_order(records)
    assert {(record.rank, record.role) for record in records} == set(itertools.product(range(2), ROLES))


@pytest.mark.parametrize("alignment", [1, 4], ids=["rows", "padding"])
def test_order_where_one_receiver_plans(alignment):
    """Four ranks: receivers see the table behind their first message, or before it where they write padding."""
    setup = dataclasses.replace(SETUP, options=(*SETUP.options, ("expert_alignment", alignment)))
    cases = [Small(setup, "uniform", seed=2, tokens=(1, 2, 1, 1))]
    group = small_transports(setup, world=4)
    results: dict[Any, Any] = {}
    mains = [rank_main(t, rank, cases, results, fused=True, combine=False) for rank, t in enumerate(group)]
    play(Scheduler(alignment), group, mains)
    records = close(group)
    trace_ranks.check_order(records, planned=True)
    receivers = [record for record in records if (record.role.phase, record.role.name) == ("dispatch", "receive")]
    assert {record.rank for record in receivers if "base known" in record.times} == {0, 1, 2, 3}


def test_a_closed_trace_stamps_nothing():
    """Kernels that stamp, as a captured graph has them, find no address after the trace."""
    group = small_transports()
    for transport in group:
        transport.ranks[0].control[TRACE_AT] = 0
    case = Small(SETUP, "uniform", seed=1)
    play(Scheduler(0), group, [rank_main(t, rank, [case], {}, fused=True) for rank, t in enumerate(group)])
    assert close(group) == []


def test_a_trace_that_is_over_is_not_written():
    """Closing it takes the address away, so that a kernel that a graph keeps does not store into memory of others."""
    group = small_transports()
    assert all(int(t.ranks[0].control[TRACE_AT]) == t.ranks[0].trace.words.data_ptr() for t in group)
    controls = [transport.ranks[0].control for transport in group]
    for transport in group:
        transport.close_trace()
    assert [int(control[TRACE_AT]) for control in controls] == [0, 0]
    for transport in group:
        transport.close()


def planted(ctas: int = 2) -> Any:
    return np.zeros(buffer_shape(2, ctas), dtype=np.int64)


def plant(buffer: Any, role: int, cta: int, call: int, words: dict[int, int], sm: int = 7) -> None:
    """Store a record: ``words`` by their numbers in it."""
    record = buffer[call % TRACE_CALLS, role, cta]
    record[0], record[1] = call, sm + 1
    for word, value in words.items():
        record[word] = value


def test_records_are_read_from_their_words():
    """The numbers of the example in ``tracing.device.layout``."""
    buffer = planted(3)
    plant(buffer, role=3, cta=1, call=18, words={2: 100, 2 + 4: FIRST_FROM - 130, 2 + 8 + 2 + 1: FIRST_FROM - 125})
    assert buffer.reshape(-1)[489] == FIRST_FROM - 125
    assert buffer.reshape(-1)[476] == 18
    (record,) = read_rows(rows_of(buffer), rank=1, ahead=40)
    assert (record.rank, record.call, record.cta, record.sm, record.name) == (1, 18, 1, 7, "combine home 1")
    assert record.times == {"begun": 60, "row seen": 90}
    assert record.peers == {"head from": (None, None), "row from": (None, 85)}
    # What an earlier launch with more CTAs left behind is older than the last calls.
    plant(buffer, role=3, cta=2, call=18 - TRACE_CALLS, words={2: 10})
    assert len(list(read_rows(rows_of(buffer), rank=1))) == 1


def test_summary_of_planted_stamps():
    """Three CTAs of dispatch's receivers on two ranks: what each took, and which peer was last."""
    role = ROLES.index(next(role for role in ROLES if (role.phase, role.name) == ("dispatch", "receive")))
    records = []
    for rank, cta, begun, seen, known, peers in (
        (0, 0, 100, 110, 112, (104, 109)),
        (0, 1, 101, 131, 141, (105, 120)),
        (1, 0, 150, 170, 171, (155, 169)),
    ):
        buffer = planted()
        words = {2: begun, 4: FIRST_FROM - seen, 5: FIRST_FROM - known}
        words |= {10 + peer: FIRST_FROM - time for peer, time in enumerate(peers)}
        plant(buffer, role, cta, 5, words)
        records += read_rows(rows_of(buffer), rank)
    found = summarise(records, unit="ns", clock_error=3)
    begun, seen, known = found.moments
    assert [moment.moment for moment in found.moments] == ["begun", "counts seen", "base known"]
    assert (seen.count, seen.at_median, seen.at_worst) == (3, 20, 31), "10, 31 and 20 after their rank's first begin"
    assert (seen.took_median, seen.took_worst) == (20, 30), "10, 30 and 20"
    assert (seen.worst_rank, seen.worst_cta, seen.worst_call) == (0, 1, 5)
    assert (seen.slowest_peer, seen.slowest_share) == (1, 1.0)
    assert (known.took_median, known.took_worst, known.slowest_peer) == (2, 10, None)
    assert (begun.at_median, begun.took_worst) == (0, 0)
    assert found.skew == {"dispatch": 50}
    assert (found.clock_error, found.clock_step) == (3, 1)
    assert "0.02" in str(found)
    assert "rank 1 (100%)" in str(found)
    assert str(summarise([], unit="ns", clock_error=0)) == "no call was traced"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clocks_are_compared_within_the_stated_error(seed):
    """Clocks that count the scheduler's switches, each ahead by another number; twice, as two traces do it."""
    ahead = (0, 5_000_000, -3_000)
    group = transports(SETUP, len(ahead))
    scheduler = Scheduler(seed, patience=3000)
    outs = [torch.zeros(len(ahead), 2, dtype=torch.int64) for _ in ahead]
    found = []
    for first in (0, 4):

        def main(rank: int, first: int = first) -> None:
            spec = combine_spec(group[rank].ranks[0].workspace, torch.device("cpu"), row_weights=False,
                                home_weights=False)  # fmt: skip
            spec = dataclasses.replace(spec, CLOCK=lambda: 10_000 + scheduler.switches + ahead[rank])
            ep_compare_clocks_kernel[(1,)](
                *[group[rank].ranks[0].launcher.peers], outs[rank], ClockNumbers(rank, first, 4, 1 << 40, 1), S=spec
            )

        play(scheduler, group, [functools.partial(main, rank) for rank in range(len(ahead))])
        found.append(outs[0].tolist())
        assert [int(out[0, 0]) for out in outs] == [1, 1, 1]
    for rows in found:
        for rank in (1, 2):
            told, error = rows[rank]
            assert 0 < error < 2000
            assert abs(told - ahead[rank]) <= error, (told, error)
    for transport in group:
        transport.close()


def test_a_trace_is_read_after_its_block():
    trace = Trace("steps", {})
    for read in (trace.summary, trace.to_json, lambda: trace.records):
        with pytest.raises(StateError, match="use the trace after the block"):
            read()


def test_one_rank_alone(tmp_path):
    with moelink.init(**FEW, transport="symmetric", device="cpu") as ep:
        with ep.trace() as trace:
            trace_ranks.pair(ep, 3, seed=1)
            with pytest.raises(StateError, match="got one; leave"), ep.trace():
                pass
        trace.save(tmp_path / "trace.json")
        assert {record.role for record in trace.records} == set(ROLES)
        trace_ranks.check_order(trace.records)
        assert [sum(record.role is role for record in trace.records) for role in ROLES] == [3, 2, 3, 3]
        with pytest.raises(ZeroDivisionError), ep.trace() as broken:
            trace_ranks.pair(ep, 1 // 0, seed=1)
        with pytest.raises(StateError):
            broken.summary()
        with ep.trace() as empty:
            pass
        assert empty.records == ()
    assert (tmp_path / "trace.json").read_text().startswith('{"traceEvents":[')


@pytest.mark.parametrize("fields, wanted", [
    ({"transport": "collective"}, "expected transport='symmetric', got 'collective'"),
    ({"transport": "symmetric", "mode": "allreduce"}, "expected mode 'alltoall'.*got 'allreduce'"),
])  # fmt: skip
def test_refuses_what_has_nothing_to_trace(fields, wanted):
    with moelink.init(**FEW, **fields, device="cpu") as ep:
        with pytest.raises(UnsupportedError, match=wanted), ep.trace():
            pass
        trace_ranks.pair(ep, 2, seed=1)


def test_refuses_several_nodes_and_many_ranks():
    nodes = moelink.EPConfig(**FEW, world_size=4, ranks_per_node=2, rank=0)
    with pytest.raises(UnsupportedError, match="ranks of one node"):
        require_traceable(nodes, Workspace(nodes), torch.device("cpu"))
    many = moelink.EPConfig(**{**FEW, "num_experts": 72}, world_size=72, rank=0)
    with pytest.raises(UnsupportedError, match="at most 64 ranks, got 72"):
        require_traceable(many, Workspace(many), torch.device("cpu"))


@pytest.mark.quick("cheap")
@pytest.mark.parametrize("tokens", [1, 64, 300, 4096])
@pytest.mark.parametrize("num_sms", [None, 1, 24])
def test_no_role_has_more_ctas_than_records(monkeypatch, tokens, num_sms):
    monkeypatch.setattr(grid, "sm_count", lambda device: 108 if device.type == "cuda" else 1)
    for device, options in (("cuda", {"num_sms": num_sms}), ("cpu", {})):
        config = moelink.EPConfig(
            num_experts=256, topk=8, hidden_size=7168, max_tokens_per_rank=tokens, world_size=8, rank=0, **options
        )  # fmt: skip
        workspace, place = Workspace(config), torch.device(device)
        most = grid.most_ctas(place)
        for encodes, sums in itertools.product((False, True), repeat=2):
            dispatch = grid.dispatch_launch(config, place, tokens, encodes=encodes)
            cut = grid.TokenSplit.of(tokens, programs=dispatch.send, world_size=8)
            combine = grid.combine_launch(workspace, place, tokens, sums=sums)
            assert max(1 + cut.programs, dispatch.receive, combine.send, combine.receive) <= most


@pytest.mark.parametrize("kinds", [
    ("combine",), ("dispatch", "cached", "planned", "in place"), ("sender", "receiver", "home"),
    ("without flags", "own rows", "own copies"),
], ids=", ".join)  # fmt: skip
def test_without_a_trace_kernels_are_those_without_stamps(kinds):
    """Not an instruction is added. With a trace there are stamps."""
    found = [json.loads(line) for line in output_of("tracing.trace_forms", *kinds) if line.startswith("{")]
    assert len(found) == len(kinds)
    for form in found:
        assert form["same"], form
        assert form["stamps"] > 0, form
        assert form["left"] == 0, form


def test_command_line(tmp_path):
    """The command, on one rank: a table, a file for Perfetto, a picture."""
    pytest.importorskip("matplotlib", reason="a picture needs the extra moelink[plot]")
    from typer.testing import CliRunner

    from moelink.tools.cli.app import app

    out, plot = tmp_path / "new" / "trace.json", tmp_path / "trace.png"
    options = ["--ranks", "1", "--device", "cpu", "--tokens", "3", "--pairs", "2", "--hidden", "64"]
    done = CliRunner().invoke(app, ["trace", *options, "--out", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert "times in steps" in done.output
    slices = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["call"] for event in slices} == {3, 4}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_an_empty_trace_is_not_drawn(tmp_path):
    with pytest.raises(ArgumentError, match="at least one call"):
        draw_trace({"traceEvents": []}, tmp_path / "trace.png")
