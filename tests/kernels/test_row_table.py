"""The row table of dispatch's receivers, on four ranks: when there is one, its example, who waits for it, and calls in
which nothing is unpacked."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

import moelink
from moelink.kernels.dispatch import receive_planned, row_table
from moelink.memory.protocol import TABLE_GO, TABLE_NOTHING
from moelink.memory.workspace import Workspace
from moelink.transports.base import DispatchRequest
from moelink.tuning import ROW_TABLE_TOKENS
from moelink_testing import Deadlock, Scheduler
from tests.support.cases import Packed, Setup
from tests.support.protocol_runs import Small, caught, run, transports
from tests.support.symmetric_ranks import dispatch_requests, one_process, over
from tests.tiers import seeds

WORLD = 4
SMALL = dict(num_experts=8, topk=2, hidden_size=8, max_tokens_per_rank=4)
FORMAT = Setup("bf16", (("max_tokens_per_rank", 4), ("hidden_size", 8)), num_experts=5, topk=2)
PADDED = dataclasses.replace(FORMAT, options=(*FORMAT.options, ("expert_alignment", 4)))
MASKED = dataclasses.replace(FORMAT, options=(*FORMAT.options, ("layout", "masked"), ("rows_per_expert", 16)))
PLANTED = pytest.mark.quick("a planted fault must be caught")


def calls_of(setup, *tokens):
    return [Small(setup, "uniform", seed=seed, tokens=each) for seed, each in enumerate(tokens, 2)]


def table_of(transport, rank=0):
    """The table of a rank: call of every word, and its value, by row."""
    member = transport.ranks[rank]
    words = Workspace(member.config).regions["row_table"].view(member.memory.local)
    return (words >> 32).tolist(), (words & 0xFFFFFFFF).tolist()


@pytest.mark.parametrize("more, there", [
    ({}, True), ({"layout": "masked", "rows_per_expert": 8}, True), ({"world_size": 8}, True),
    ({"world_size": 3}, False),
    ({"world_size": 2}, False), ({"max_tokens_per_rank": ROW_TABLE_TOKENS}, True),
    ({"max_tokens_per_rank": ROW_TABLE_TOKENS + 1}, False), ({"layout": "rank"}, False), ({"mode": "allreduce"}, False),
    ({"ranks_per_node": 2}, False),
])  # fmt: skip
@pytest.mark.quick("each takes milliseconds, and is another reason")
def test_who_plans_for_all(more, there):
    """Where nobody does, the workspace has no region for it, and no other region moves."""
    fields = {**SMALL, "world_size": WORLD, "rank": 0, **more}
    config = moelink.EPConfig(**fields, **({"transport": "symmetric"} if "ranks_per_node" in more else {}))
    workspace = Workspace(config)
    names = [region.name for region in workspace.regions]
    assert workspace.row_table == there == ("row_table" in names)
    if there:
        ranks = workspace.world_size
        assert workspace.regions["row_table"].shape == (ranks + 3, 8 // ranks)
        assert config.memory_report().block == workspace.nbytes


def test_the_example_of_the_docstrings():
    """Counts [[2, 1], [1, 0], [0, 2], [0, 0]] in groups of 4 rows; then a call over the routing. The last row of the
    table is for scales in tiles, and so is not written by a planner here."""
    transport = one_process({**SMALL, "expert_alignment": 4}, WORLD)
    chosen = ([0, 0, 1], [0], [1, 1], [2])
    ids = [torch.tensor([[expert, -1] for expert in experts]) for experts in chosen]
    requests = [DispatchRequest(torch.ones(len(i), 8, dtype=torch.bfloat16), i) for i in ids]
    recv = transport.dispatch(requests).wait()
    calls, values = table_of(transport)
    assert values[:-1] == [[4 * 3 + TABLE_GO] * 2, [0, 4], [2, 5], [3, 5], [3, 7], [3, 7]]
    assert {c for row in calls[:-1] for c in row} == {1}
    assert recv[0].row_offsets.tolist() == [0, 4, 8]
    assert recv[0].handle.routing.parts.rows_of_message[2, :2, 0].tolist() == [5, 6]
    transport.dispatch(over(recv, requests)).wait()
    assert {c for row in table_of(transport)[0] for c in row} == {2}, "else 2**31 calls later the table looks new"


SCENARIOS = {
    "in_a_row": dict(cases=calls_of(FORMAT, (1, 2, 0, 1), (2, 1, 1, 1)), combine=False),
    "fused": dict(cases=calls_of(FORMAT, (3, 2, 1, 4))),
    "split": dict(cases=calls_of(FORMAT, (1, 4, 2, 0)), fused=False),
    "padded": dict(cases=calls_of(PADDED, (2, 3, 1, 4), (1, 1, 4, 2)), combine=False),
    "masked": dict(cases=calls_of(MASKED, (2, 3, 1, 4), (1, 1, 4, 2)), combine=False),
    "over_a_routing": dict(cases=calls_of(FORMAT, (2, 1, 3, 1), (1, 3, 2, 2)), again=1, combine=False),
    "large_call_numbers": dict(cases=calls_of(FORMAT, (2, 1, 3, 1), (1, 3, 2, 2)), calls=2**31 - 2, combine=False),
}


@seeds(1, 8)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_under_every_schedule(name, seeds):
    for seed in seeds:
        run(seed, world=WORLD, **SCENARIOS[name])


def slow_planner(name):
    """The planner takes long, so that all others wait for its table and still have that of the call before."""
    return 0.2 if name.endswith("dispatch_kernel[3]") else 1.0


LATE = ((1, 1, 1, 1), (2, 1, 0, 1))


@seeds(1, 4)
@pytest.mark.parametrize("setup", [FORMAT, PADDED], ids=["rows", "padding"])
def test_a_slow_planner(setup, seeds):
    """Messages are there long before the table, and the table of the call before is there all the time."""
    assert (setup is PADDED) == (setup.config(WORLD).row_alignment > 1)
    for seed in seeds:
        run(seed, calls_of(setup, *LATE), world=WORLD, combine=False, speed=slow_planner, drain=0.3)


def refused_between(seed, *, cached=False, fused=True, **options):
    """A dispatch, one that rank 0 refuses, and another one, which is checked; ``cached``: over the first one's routing.
    Returns calls and values of the table of every rank in the second."""
    ranks, results, said = transports(FORMAT, WORLD), {}, {}
    (case,) = calls_of(FORMAT, (1, 2, 1, 1))

    def rank_of(rank):
        transport = ranks[rank]

        def main():
            requests = dispatch_requests(case, [rank])
            first = transport.dispatch(requests, fused=fused).wait()
            again = over(first, requests) if cached else requests
            if rank == 0:
                transport.refuse("dispatch")
                transport.ranks[0].synchronize()
            else:
                (out,) = first
                before = Packed.of(out.tokens[: int(out.num_recv_tokens)]).tensor()
                if not cached:  # what is unpacked would overwrite these rows
                    again = [dataclasses.replace(request, x=request.x + 1, out=out) for request in requests]
                with pytest.raises(moelink.PeerAbortedError) as error:
                    transport.dispatch(again, fused=fused).wait()
                assert error.value.peer == 0
                assert len(before) > 0
                assert torch.equal(out.tokens[: len(before)], before)
                again = over(first, requests) if cached else requests
            said[rank] = table_of(transport)
            (recv,) = transport.dispatch(again, fused=fused).wait()
            results[rank] = Packed.of(recv.tokens), recv.num_recv_tokens.item()

        return main

    Scheduler(seed, **options).run([rank_of(rank) for rank in range(WORLD)])
    fresh = one_process(FORMAT.fields, WORLD).dispatch(dispatch_requests(case, range(WORLD))).wait()
    for rank, recv in enumerate(fresh):
        rows = int(recv.num_recv_tokens)
        assert results[rank][1] == rows
        assert torch.equal(results[rank][0].tensor()[:rows], recv.tokens[:rows])
    return said


@seeds(1, 4)
@pytest.mark.parametrize("cached", [False, True], ids=["counted", "over a routing"])
def test_a_refused_call_unpacks_nothing_and_ends(cached, seeds):
    """Ranks 1 to 3 have messages of their own to wait for, and see in the table that they are not to be unpacked."""
    for seed in seeds:
        said = refused_between(seed, cached=cached, fused=seed % 2 == 0)
        if not cached:
            assert {c for rank in range(1, WORLD) for row in said[rank][0][:-1] for c in row} == {2}
            assert [said[rank][1][0][0] % 4 for rank in range(1, WORLD)] == [TABLE_NOTHING] * 3


@triton.jit
def take_any_table(ctx, S: tl.constexpr):
    head = row_table.value_at(row_table._words(ctx.control, 0, 0, S), ctx.call > 0)
    return tl.full([], 1, tl.int32), tl.full([], TABLE_GO, tl.int32), head // 4


@PLANTED
@pytest.mark.parametrize("setup", [FORMAT, PADDED], ids=["rows", "padding"])
def test_a_table_that_nobody_waited_for_is_caught(monkeypatch, setup):
    monkeypatch.setattr(receive_planned, "wait_for_table", take_any_table)
    found = caught(calls_of(setup, *LATE), world=WORLD, combine=False, speed=slow_planner, drain=0.3)
    assert found is not None


@triton.jit
def publish_nothing(ctx, rows, starts, bases, most, state, S: tl.constexpr):
    pass


@PLANTED
def test_a_table_that_never_comes_is_a_deadlock(monkeypatch):
    monkeypatch.setattr(receive_planned, "publish_table", publish_nothing)
    with pytest.raises((Deadlock, moelink.PeerTimeoutError)) as error:
        run(0, calls_of(FORMAT, (1, 1, 1, 1)), world=WORLD, combine=False)
    assert "wait_ll_words" in str(error.value)


def positions_spoilt(value):
    """What rank 0 received, and what it says, where rank 1's pair in row 0 of expert 0 says position ``value``."""
    ranks = transports(Setup("bf16", tuple(SMALL.items()), num_experts=8, topk=2), WORLD)
    x, ids = torch.arange(32.0).view(4, 8).bfloat16(), torch.tensor([[0, -1]])
    pending = [transport.dispatch([DispatchRequest(x[rank : rank + 1], ids)]) for rank, transport in enumerate(ranks)]
    member = ranks[0].ranks[0]
    workspace = Workspace(member.config)
    part = workspace.message["positions"]
    messages = workspace.regions["messages"].view(member.memory.local)
    messages[1, 0, part.offset : part.end].view(torch.int32)[0] = value
    (recv,) = pending[0].wait()
    return ranks[0], recv.handle.routing.parts.rows_of_message[1, 0].tolist()


def test_a_position_is_checked_against_the_rows_of_its_source():
    """Rank 1 has one row of expert 0, row 1; position 1 would be rank 2's, or no row at all."""
    transport, noted = positions_spoilt(0)
    assert noted == [1, -1]
    transport.check()
    for value in (1, -1, 2**31 - 1):
        transport, noted = positions_spoilt(value)
        assert noted == [-2, -1]
        with pytest.raises(moelink.errors.ProtocolError) as error:
            transport.check()
        assert error.value.peer == 1
