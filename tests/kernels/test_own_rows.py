"""Combines in which a rank's own rows stay where they are: which they are, under seeded schedules, and by example."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

import moelink
import moelink.memory.workspace as workspaces
from moelink.kernels.combine import reduce
from moelink.kernels.combine.arrivals import find_own_rows
from moelink.kernels.launch import grid
from moelink.kernels.launch.constants import combine_spec
from moelink.kernels.launch.own_rows import own_rows_stay, with_own_rows
from moelink.kernels.records import RoutingNotes
from moelink.kernels.sync import lamport_slots
from moelink.tracing.device.layout import ROLES
from moelink.tracing.records import read_rows, rows_of
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric import combine as combining
from moelink.transports.symmetric import refusal
from moelink_testing import Scheduler
from tests.support.cases import Result, Setup
from tests.support.protocol_runs import (
    Calls,
    ScheduledProxy,
    Small,
    check,
    one_call,
    play,
    play_calls,
    run,
    run_another,
    run_refused,
    scenarios,
    transports,
)
from tests.support.symmetric_ranks import combine_requests, dispatch_requests
from tests.tiers import seeds

WORLD = 2
SIZES = (("max_tokens_per_rank", 5), ("hidden_size", 8))
EXPERT = Setup("bf16", SIZES, num_experts=4, topk=3)
RANK = Setup("bf16", (*SIZES, ("layout", "rank")), num_experts=4, topk=3)
KINDS = {
    "expert": EXPERT,
    "rank": RANK,
    "shared_expert": Setup("bf16", (*SIZES, ("fused_shared_expert", True)), num_experts=3, topk=2),
    "fp32": Setup("bf16", (*SIZES, ("combine_dtype", torch.float32)), num_experts=4, topk=2),
    "fp64": Setup("fp64", SIZES, num_experts=4, topk=1),
}
SETUPS = {"flags": EXPERT, "copies": RANK, "copies_with_flags": RANK}
SCENARIOS = {
    name: scenarios(EXPERT)[name]
    for name in (
        "split_pair",
        "combines_in_a_row",
        "two_calls_other_token_counts",
        "a_rank_with_nothing",
        "two_communicators",
    )
}


def forget_specs() -> None:
    """What was chosen for equal configurations depends on the limits that fixtures change."""
    combine_spec.cache_clear()
    with_own_rows.cache_clear()


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums have flags behind them, as those of many tokens on a GPU have."""
    monkeypatch.setattr(workspaces, "LAMPORT_BYTES", 0)
    monkeypatch.setattr(workspaces, "FEW_TOKENS", 2)
    forget_specs()
    yield
    forget_specs()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layout "rank" of more than two tokens: own rows stay, sums have no flags, and rows of 8 columns travel in two
    parts, as those of 129 to 256 tokens on a GPU do."""
    monkeypatch.setattr(workspaces, "MANY_COPIES", 2)
    monkeypatch.setattr(workspaces, "COMBINE_BLOCK", 2)
    forget_specs()
    yield
    forget_specs()


@pytest.fixture
def copies_with_flags(monkeypatch: pytest.MonkeyPatch, copies: None) -> None:
    """The same with more tokens than slots have room for: rows travel whole, and home sums them in two parts."""
    monkeypatch.setattr(workspaces, "LAMPORT_BYTES_OF_COPIES", 0)
    monkeypatch.setattr(workspaces, "FEW_TOKENS", 2)


with_flags = pytest.mark.usefixtures("flags")
without_flags = pytest.mark.usefixtures("copies")


FIELDS: dict[str, Any] = {"num_experts": 256, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": 4096}


@pytest.mark.quick("each choice takes milliseconds")
@pytest.mark.parametrize("fields, device, stay", [
    ({}, "cuda", True), ({"max_tokens_per_rank": 1024}, "cuda", False), ({"max_tokens_per_rank": 1025}, "cuda", True),
    ({"layout": "rank"}, "cuda", True), ({"world_size": 1}, "cuda", False), ({"world_size": 4}, "cuda", False),
    ({"ranks_per_node": 1}, "cuda", False), ({"mode": "allreduce"}, "cuda", False),
    ({"combine_format": "fp8_block128"}, "cuda", False), ({"pre_reduce": False}, "cuda", False),
    ({}, "cpu", True), ({"max_tokens_per_rank": 5}, "cpu", False),
    ({"layout": "rank", "max_tokens_per_rank": 128}, "cuda", False),
    ({"layout": "rank", "max_tokens_per_rank": 129}, "cuda", True),
    ({"layout": "rank", "max_tokens_per_rank": 129}, "cpu", True),
    ({"layout": "rank", "max_tokens_per_rank": 512, "world_size": 4}, "cuda", False),
    ({"layout": "rank", "ranks_per_node": 1}, "cuda", False), ({"layout": "rank", "mode": "allreduce"}, "cuda", False),
    ({"layout": "rank", "combine_format": "fp8_block128"}, "cuda", False),
], ids=str)  # fmt: skip
def test_own_rows_stay_where_it_is_predicted_to_win(fields: dict[str, Any], device: str, stay: bool) -> None:
    workspace = workspaces.Workspace(moelink.EPConfig(**{**FIELDS, "world_size": 2, **fields}))
    place = torch.device(device)
    spec = combine_spec(workspace, torch.device("cpu"), row_weights=False, home_weights=False)
    assert spec.OWN_ROWS_STAY == 0, "as the contract sends them in split calls"
    assert own_rows_stay(workspace, place, sums=bool(spec.SENDS_SUMS)) == stay
    chosen = with_own_rows(spec, workspace, place)
    assert int(stay) == chosen.OWN_ROWS_STAY
    assert stay or chosen is spec
    assert not own_rows_stay(workspace, place, sums=False)


@pytest.mark.quick("all choices take a second")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_rank_has_slots_for_itself_unless_its_own_rows_stay(device: str) -> None:
    """What the workspace and the launches decide apart."""
    found = set()
    for layout, most, world, more, lamport, sums in itertools.product(
        ("rank", "expert"), (1, 4, 5, 128, 129, 1024, 1025, 4096, 8192), (1, 2, 3),
        ({}, {"mode": "allreduce"}, {"ranks_per_node": 1}, {"pre_reduce": False}, {"combine_format": "mxfp8"},
        {"combine_dtype": torch.float32}), (True, False), (True, False),
    ):  # fmt: skip
        if layout == "rank" and "pre_reduce" in more:
            continue  # no configuration has both
        fields = {**FIELDS, "layout": layout, "max_tokens_per_rank": most, "world_size": world, **more}
        workspace = workspaces.Workspace(moelink.EPConfig(**fields), lamport=lamport)
        kind = {"row_weights": False, "home_weights": False, "reduce": sums}
        spec = combine_spec(workspace, torch.device("cpu"), **kind)
        spec = with_own_rows(spec, workspace, torch.device(device))
        if spec.SENDS_SUMS and spec.LAMPORT_TOKENS:
            assert world - spec.OWN_ROWS_STAY == spec.LAMPORT_RANKS, fields
            slots = workspace.regions["lamport_slots"]
            assert slots.shape[:2] == (spec.LAMPORT_RANKS, spec.LAMPORT_TOKENS)
            found.add((world, int(spec.LAMPORT_RANKS)))
    assert found == {(1, 1), (2, 1), (2, 2), (3, 3)}


@pytest.mark.quick("each choice takes milliseconds")
@pytest.mark.parametrize("layout, most, columns", [
    ("rank", 128, 2048), ("rank", 129, 4096), ("rank", 8192, 4096), ("expert", 8192, 2048),
])  # fmt: skip
def test_columns_that_a_cta_handles_at_a_time(layout: str, most: int, columns: int) -> None:
    fields = {**FIELDS, "world_size": 2, "layout": layout, "max_tokens_per_rank": most}
    workspace = workspaces.Workspace(moelink.EPConfig(**fields))
    assert workspace.combine_block == columns
    assert workspace.combine_parts == (-(-7168 // columns) if most <= workspaces.FEW_TOKENS else 1)
    assert workspaces.Workspace(moelink.EPConfig(**fields, combine_dtype=torch.float32)).combine_block == 2048


@pytest.mark.parametrize("layout, most, travel, stay", [
    ("rank", 8192, (528, 132), (264, 396)), ("expert", 4096, (528, 132), (264, 396)),
    ("rank", 4096, (264, 396), (165, 495)), ("rank", 1024, (264, 396), (165, 495)),
    ("rank", 256, (513, 513), (257, 513)), ("rank", 192, (385, 385), (385, 385)),
    ("rank", 129, (517, 259), (259, 259)),
])  # fmt: skip
def test_what_would_send_own_rows_sums(
    monkeypatch: pytest.MonkeyPatch, layout: str, most: int, travel: tuple[int, int], stay: tuple[int, int]
) -> None:
    monkeypatch.setattr(grid, "sm_count", lambda device: 132)
    fields = {**FIELDS, "world_size": 2, "layout": layout, "max_tokens_per_rank": most}
    workspace = workspaces.Workspace(moelink.EPConfig(**fields))
    for own, want in ((False, travel), (True, stay)):
        launch = grid.combine_launch(workspace, torch.device("cuda", 0), most, sums=True, own_rows_stay=own)
        assert (launch.send, launch.receive) == want


@with_flags
@seeds(1, 12)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_equal_oracle(kind: str, seeds: range) -> None:
    for seed in seeds:
        weights = "none" if kind == "rank" else "dispatch"
        run(2 * seed, [Small(KINDS[kind], "uniform", weights=weights, seed=1 + seed)])


@with_flags
@seeds(1, 8)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_under_every_schedule(name: str, seeds: range) -> None:
    for seed in seeds:
        run(2 * seed, **SCENARIOS[name])


def blocks_of(group: Any) -> list[dict[str, torch.Tensor]]:
    """The regions of each rank's block."""
    workspace = workspaces.Workspace(group[0].ranks[0].config)
    return [
        {region.name: region.view(transport.ranks[0].memory.local) for region in workspace.regions}
        for transport in group
    ]


def pair_of(setup: Setup) -> Small:
    return Small(setup, "uniform", weights="none", seed=1, tokens=(5, 4))


def play_pair(case: Small, group: Any, *, fused: bool = True) -> None:
    """A dispatch and combine of ``group``, against the oracle."""
    results: dict[int, Result] = {}

    def main_of(rank: int) -> Any:
        calls = Calls(group[rank], rank)

        def main() -> None:
            recv = calls.dispatch(case)
            (out,) = calls.transport.combine(combine_requests(case, [rank], [recv]), fused=fused).wait()
            results[rank] = Result.of(recv, out)

        return main

    play(Scheduler(3), group, [main_of(rank) for rank in range(WORLD)])
    check([case], {id(case): results}, world=WORLD)


@without_flags
@seeds(1, 8)
@pytest.mark.parametrize("name", ["fused_pair", *SCENARIOS])
def test_scenario_of_copies_under_every_schedule(name: str, seeds: range) -> None:
    workspace = workspaces.Workspace(RANK.config(WORLD))
    assert workspace.two_copies
    assert (workspace.lamport_tokens, workspace.combine_parts) == (5, 2)
    for seed in seeds:
        run(2 * seed, **scenarios(RANK)[name])


@pytest.mark.usefixtures("copies_with_flags")
@seeds(1, 8)
@pytest.mark.parametrize("name", ["fused_pair", *SCENARIOS])
def test_scenario_of_copies_with_flags_under_every_schedule(name: str, seeds: range) -> None:
    workspace = workspaces.Workspace(RANK.config(WORLD))
    assert workspace.two_copies
    assert (workspace.lamport_tokens, workspace.combine_parts) == (0, 1)
    for seed in seeds:
        run(2 * seed, **scenarios(RANK)[name])


both = pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])


@without_flags
@pytest.mark.quick("one call")
@both
def test_own_rows_need_no_slots(fused: bool) -> None:
    """A block holds slots for the other rank's rows, which are clear afterwards, and ``rows`` stay as they are."""
    group = transports(RANK, WORLD)
    blocks = blocks_of(group)
    for block in blocks:
        block["rows"].fill_(7)
        assert block["lamport_slots"].shape[:2] == (1, 5)
    play_pair(pair_of(RANK), group, fused=fused)
    for block in blocks:
        assert (block["lamport_slots"] == 0).all()
        assert (block["rows"] == 7).all()
        assert int(block["combine_flag"].max()) == 0


@without_flags
def test_a_launch_that_sends_own_rows_without_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be stored in slots of the other rank's rows. No home role gets as far as to notice that."""
    monkeypatch.setattr(combining, "with_own_rows", lambda spec, workspace, device: spec)
    monkeypatch.setattr(reduce, "sum_rows", None)
    with pytest.raises(InterpreterError, match="AssertionError"):
        play_pair(pair_of(RANK), transports(RANK, WORLD), fused=False)


@without_flags
def test_launches_of_a_refusal_have_a_slot_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler asks for it where a refusal sends and awaits none."""
    rank, made = transports(RANK, WORLD)[0].ranks[0], {}
    compiled = rank.launcher.kernel

    def kernel(function: Any, *args: Any, **options: Any) -> Any:
        made[function] = options["S"]
        return compiled(function, *args, **options)

    monkeypatch.setattr(rank.launcher, "kernel", kernel)
    monkeypatch.setattr(rank.launcher, "launch", lambda *args: None)
    refusal.refuse_combine(rank)
    for function in (combining.kernels.ep_combine_async_kernel, combining.kernels.ep_combine_wait_kernel):
        assert made[function].LAMPORT_TOKENS > 0
        assert made[function].LAMPORT_RANKS == WORLD - made[function].OWN_ROWS_STAY


@triton.jit
def _sum(out, S: tl.constexpr):
    lamport_slots.sum_rows(out, 0, out, 0, 0, 0, 0, S)


def test_a_launch_that_awaits_own_rows_without_slots_is_refused() -> None:
    """It would take the other rank's row for its own."""
    with pytest.raises(InterpreterError, match="AssertionError"):
        _sum[(1,)](torch.zeros(2), S=SimpleNamespace(WORLD_SIZE=2, LAMPORT_RANKS=1, OWN_ROWS_STAY=0))


@triton.jit
def _find(notes, slots, out, S: tl.constexpr):
    rows, there = find_own_rows(notes, tl.load(slots + tl.arange(0, 2)), 1, S)
    tl.store(out, tl.load(rows))
    tl.store(out + 1, there.to(tl.int32))


@pytest.mark.quick("each form has another place")
@pytest.mark.parametrize("slots_per_message", [3, 1])
def test_own_rows_are_those_of_their_message(slots_per_message: int) -> None:
    """The example of ``own_rows``: of three slots those of message (1, 0) begin at word 15."""
    rows = torch.arange(2 * 5 * slots_per_message, dtype=torch.int32)
    notes, out = RoutingNotes(rows, None, None, None, None), torch.zeros(2, dtype=torch.int32)
    spec = SimpleNamespace(WORLD_SIZE_POW2=2, MAX_TOKENS=5, SLOTS_PER_MESSAGE=slots_per_message)
    _find[(1,)](notes, torch.tensor([3, 0], dtype=torch.int32), out, S=spec)
    assert out.tolist() == [5 * slots_per_message, 1]
    _find[(1,)](notes, torch.tensor([3, -1], dtype=torch.int32), out, S=spec)
    assert out.tolist()[1] == 0


@without_flags
def test_copies_are_summed_whole_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of more than 1024 tokens, and of fewer."""
    for most in (0, 5):
        monkeypatch.setattr(reduce, "_MANY_TOKENS", tl.constexpr(most))
        for fused in (True, False):
            play_pair(pair_of(RANK), transports(RANK, WORLD), fused=fused)


@triton.jit
def _parts(out, num_programs, S: tl.constexpr):
    for i in range(2):
        tl.store(out + i, reduce.parts_of_token(1024 + i, num_programs, S))


@pytest.mark.quick("two forms")
@pytest.mark.parametrize("most, programs, parts", [
    (2048, 495, [2, 1]), (0, 495, [1, 1]), (0, 2049, [2, 1]), (2048, 2050, [2, 2])
])  # fmt: skip
def test_parts_of_tokens(most: int, programs: int, parts: list[int]) -> None:
    """1024 and 1025 tokens, of two blocks of columns, where up to ``most`` come without flags."""
    spec = SimpleNamespace(HIDDEN_SIZE=7168, BLOCK_SIZE=4096, LAMPORT_TOKENS=most)
    out = torch.zeros(2, dtype=torch.int32)
    _parts[(1,)](out, programs, S=spec)
    assert out.tolist() == parts


@pytest.mark.quick("one call")
@both
@pytest.mark.parametrize("form", ["flags", "copies_with_flags"])
def test_a_rank_stores_nothing_in_its_own_block(form: str, fused: bool, request: pytest.FixtureRequest) -> None:
    """Neither rows nor flags, by expert or by rank; the other rank stores both."""
    request.getfixturevalue(form)
    setup = SETUPS[form]
    group = transports(setup, WORLD)
    blocks = blocks_of(group)
    rows = [block["rows"].clone() for block in blocks]
    play_pair(pair_of(setup), group, fused=fused)
    for rank, block in enumerate(blocks):
        assert torch.equal(block["rows"][rank], rows[rank][rank])
        assert not torch.equal(block["rows"][1 - rank], rows[rank][1 - rank])
        assert int(block["combine_flag"][rank].max()) == 0
        assert int(block["combine_flag"][1 - rank].max()) == 1


@pytest.mark.quick("one call")
@both
@pytest.mark.parametrize("form", SETUPS)
def test_no_row_is_seen_where_none_is_awaited(form: str, fused: bool, request: pytest.FixtureRequest) -> None:
    """The only token of either rank chose an expert of rank 0, whose row rank 1 awaits, and rank 0 does not."""
    request.getfixturevalue(form)
    setup = dataclasses.replace(SETUPS[form], topk=1)
    cases = (Small(setup, "uniform", weights="none", seed=seed, tokens=(1, 1)) for seed in range(50))
    case = next(case for case in cases if all(int(case.data(rank).topk_ids[0, 0]) < 2 for rank in range(WORLD)))
    group = transports(setup, WORLD)
    for transport in group:
        transport.open_trace()
    play_pair(case, group, fused=fused)
    for rank, transport in enumerate(group):
        rows = rows_of(transport.close_trace()[0].numpy())
        home = [record.times for record in read_rows(rows, rank) if record.role is ROLES[3]]
        assert any("result stored" in times for times in home)
        for name in ("row seen", "last row seen"):
            assert any(name in times for times in home) == (rank == 1), name


@pytest.mark.quick("two forms of the expert role")
@pytest.mark.parametrize("stay", [False, True])
def test_no_message_is_sent_where_there_is_none(stay: bool, request: pytest.FixtureRequest) -> None:
    """With few tokens a CTA looks for a message before it knows how many there are."""
    request.getfixturevalue("copies")
    setup = dataclasses.replace(RANK, options=(*RANK.options, ("zero_copy", stay)))
    group = transports(setup, WORLD)
    for transport in group:
        transport.open_trace()
    case = Small(setup, "uniform", weights="none", seed=3, tokens=(0, 0))

    def main_of(rank: int) -> Callable[[], None]:
        def main() -> None:
            recvs = group[rank].dispatch(dispatch_requests(case, [rank])).wait()
            group[rank].combine(combine_requests(case, [rank], recvs)).wait()

        return main

    play(Scheduler(3), group, [main_of(rank) for rank in range(WORLD)])
    for rank, transport in enumerate(group):
        rows = rows_of(transport.close_trace()[0].numpy())
        senders = [record.times for record in read_rows(rows, rank) if record.role is ROLES[2]]
        assert {name for times in senders for name in times} == {"begun", "credit seen", "told"}


@with_flags
def test_launches_of_a_split_call_have_the_grid_of_a_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs share a message as ``spread`` says; were it that of another grid, half of them would have nothing to do."""
    grids = {True: grid.Launch(4, 5, spread=2), False: grid.Launch(7, 1)}
    monkeypatch.setattr(combining, "combine_launch", lambda *args, own_rows_stay, **kind: grids[own_rows_stay])
    rank = transports(EXPERT, WORLD)[0].ranks[0]
    plan = combining.LaunchPlan.of(
        rank, num_tokens=5, reduce=True, row_weights=False, home_weights=False, shared=False, epilogue="", hook=None,
        raw_sums=False, num_sms=None,
    )  # fmt: skip
    assert (plan.send.programs, plan.receive.programs, plan.both.programs) == (4, 5, 9)
    assert [numbers.spread for numbers in (plan.sending, plan.receiving, plan.fused)] == [2, 2, 2]
    assert plan.fused.senders == 4
    assert plan.send.S is plan.receive.S is plan.both.S
    assert plan.send.S.OWN_ROWS_STAY == 1


@with_flags
def test_a_token_may_have_no_own_row() -> None:
    """Of rank 0's tokens, each of one expert, some stay and some go to rank 1 alone."""
    setup = dataclasses.replace(KINDS["fp64"], topk=1)
    owners = [[int(ids) // 2 for ids in Small(setup, "uniform", seed=s).data(0).topk_ids] for s in range(20)]
    seed = next(seed for seed, of in enumerate(owners) if of[0] == 0 and 1 in of)
    run(0, [Small(setup, "uniform", seed=seed)])


@seeds(1, 6)
@pytest.mark.parametrize("form", SETUPS)
def test_fused_and_split_calls_follow_each_other_and_meet(
    form: str, seeds: range, request: pytest.FixtureRequest
) -> None:
    """What one rank chooses does not concern the other."""
    request.getfixturevalue(form)
    setup = SETUPS[form]
    cases = [dataclasses.replace(one_call(setup)[0], salt=salt) for salt in range(4)]
    ways = ((True, False, True, False), (False, True, True, False))
    for seed in seeds:
        results: list[dict[int, Result]] = [{} for _ in cases]

        def main(calls: Calls, results: list[dict[int, Result]] = results) -> None:
            transport, rank = calls.transport, calls.rank
            (recv,) = transport.dispatch(dispatch_requests(cases[0], [rank]), fused=True).wait()
            for number, (case, fused) in enumerate(zip(cases, ways[rank], strict=True)):
                (out,) = transport.combine(combine_requests(case, [rank], [recv]), fused=fused).wait()
                results[number][rank] = Result.of(recv, out)

        play_calls(seed, setup, WORLD, main, proxies=ScheduledProxy)
        for case, ranks in zip(cases, results, strict=True):
            check([case], {id(case): ranks}, world=WORLD)


@seeds(1, 8)
@pytest.mark.parametrize("form", SETUPS)
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refused_call_leaves_nothing_behind(
    refusing: int, form: str, seeds: range, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(form)
    for seed in seeds:
        run_refused(seed, one_call(SETUPS[form])[0], "combine", refusing=refusing)


@seeds(1, 4)
@pytest.mark.parametrize("form", SETUPS)
def test_ranks_that_combine_different_dispatches_end_with_an_error(
    form: str, seeds: range, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(form)
    calls = ((1, (2, 1)), (2, (4, 3)))
    few, more = (Small(SETUPS[form], "uniform", seed=seed, tokens=tokens) for seed, tokens in calls)
    for seed in seeds:
        run_another(seed, few, more, [1])


@with_flags
def test_the_example_of_the_docstring() -> None:
    """Rank 0's token chose experts 0 and 1 of its own rank and expert 2 of rank 1; rank 1 has no tokens."""
    group, outs = transports(EXPERT, WORLD), {}
    ids = [torch.tensor([[0, 2, 1]]), torch.empty(0, 3, dtype=torch.int64)]
    weights = [torch.tensor([[0.5, 1.0, 1.0]]), torch.empty(0, 3)]
    rows = [(2.0, 2.0**-8), (2.0**-8,)]

    def main_of(rank: int) -> Any:
        def main() -> None:
            x = torch.ones(len(ids[rank]), 8, dtype=torch.bfloat16)
            request = DispatchRequest(x, ids[rank], weights[rank])
            (recv,) = group[rank].dispatch([request], fused=True).wait()
            y = torch.full((EXPERT.config(WORLD, rank).row_capacity, 8), torch.nan, dtype=torch.bfloat16)
            y[: len(rows[rank])] = torch.tensor(rows[rank], dtype=torch.bfloat16)[:, None]
            notes = recv.handle.routing.parts
            if rank == 0:
                assert notes.rows_of_message.view(-1)[:3].tolist() == [0, -1, 1]
            (outs[rank],) = group[rank].combine([CombineRequest(y, recv)], fused=True).wait()

        return main

    Scheduler(0).run([main_of(rank) for rank in range(WORLD)])
    assert outs[0].tolist() == [[1.0] * 8]
    assert torch.tensor(1 + 2.0**-7).bfloat16() != 1
