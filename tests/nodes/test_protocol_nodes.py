"""The protocol between nodes under seeded schedules: programs of all ranks and network proxies interleaved.

Plain stores become visible late, puts arrive in pieces and in any order (``memory.nodes.network_proxy``), and every
scenario still equals the oracle. Each thing that the protocol does against that is taken away once, and the lack shows.
"""

from __future__ import annotations

import dataclasses

import pytest
import triton
import triton.language as tl

import moelink
from moelink.kernels.combine import arrivals, heads
from moelink.kernels.combine import send as send_back
from moelink.kernels.dispatch import counts, receive, send
from moelink.kernels.dispatch import row_offsets as plan
from moelink.kernels.nodes import put_messages, put_rows
from moelink_testing import Deadlock
from tests.support.cases import Setup
from tests.support.protocol_runs import (
    Small,
    caught,
    one_call,
    run,
    run_another,
    run_refused,
    run_wrong_combine,
    scenarios,
    two_calls,
)
from tests.tiers import seeds

NODES = Setup("bf16", (("max_tokens_per_rank", 4), ("hidden_size", 8), ("ranks_per_node", 1)), num_experts=3, topk=2)
ROWS = Setup("bf16", (*NODES.options, ("pre_reduce", False)), num_experts=3, topk=2)
MIXED = Setup("fp8_block128", (("max_tokens_per_rank", 4), ("ranks_per_node", 2)), num_experts=5, topk=3)

PLANTED = pytest.mark.quick("a planted fault must be caught")

ONE, TWO = one_call(NODES), two_calls(NODES)

SCENARIOS = {
    **scenarios(NODES),
    "every_row": dict(cases=[Small(ROWS, "uniform", seed=6), Small(ROWS, "repeats", seed=7, weights="combine")]),
    "unreduced": dict(cases=[Small(NODES, "repeats", seed=8, weights="none", reduce=False)]),
}


@seeds(1, 10, why="each scenario takes another way through the protocol")
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_under_every_schedule(name, seeds):
    for seed in seeds:
        run(seed, **SCENARIOS[name])


@seeds(1, 3)
def test_near_and_far_ranks_together(seeds):
    for seed in seeds:
        run(seed, [Small(MIXED, "uniform", seed=seed, tokens=(2, 1, 3, 2))], world=4)


@seeds(1, 8)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_after_a_refusal_nothing_of_it_is_under_way(phase, seeds):
    for seed in seeds:
        run_refused(seed, ONE[0], phase)


MORE = Small(NODES, "uniform", seed=9, tokens=(4, 4), weights="none")
FEW = dataclasses.replace(MORE, tokens=(1, 1))
UNREDUCED = dataclasses.replace(FEW, reduce=False)


def run_disagreement(seed, *, reduce, refusing=None, before=(), few=FEW, more=MORE, **options):
    """After combines of ``before``, one with ``reduce[rank]`` that ``refusing`` refuses; all after it must be right."""

    def wrong(calls, recvs):
        for case in before:
            calls.combine(case, recvs[0])
        if calls.rank == refusing:
            calls.transport.refuse("combine")
        else:
            with pytest.raises(moelink.ProtocolError if refusing is None else moelink.PeerAbortedError):
                calls.combine(dataclasses.replace(few, reduce=reduce[calls.rank]), recvs[0])

    run_wrong_combine(seed, few, more, wrong, world=len(reduce), **options)


@seeds(1, 2)
@pytest.mark.parametrize(
    "options",
    [
        dict(reduce=(True, True), refusing=0),
        dict(reduce=(False, False), refusing=0),
        dict(reduce=(False, True), before=[UNREDUCED]),
        dict(reduce=(True, False), before=[UNREDUCED]),
        dict(reduce=(True, False), refusing=0),
        dict(reduce=(False, True), refusing=0),
    ],
    ids=["refused", "rows refused", "rows at first", "rows at second", "sums refused, rows", "rows refused, sums"],
)
def test_after_a_combine_in_which_ranks_disagree_nothing_of_it_is_under_way(options, seeds):
    for seed in seeds:
        run_disagreement(seed, **options)


EVERY_ROW = dataclasses.replace(FEW, setup=ROWS)


@seeds(1, 4)
@pytest.mark.parametrize("few", [FEW, UNREDUCED, EVERY_ROW], ids=["sums", "unreduced", "rows"])
@pytest.mark.parametrize("odd", [0, 1])
def test_after_combines_of_different_dispatches_nothing_of_them_is_under_way(odd, few, seeds):
    for seed in seeds:
        run_another(seed, few, dataclasses.replace(few, tokens=(4, 4)), (odd,))


@pytest.mark.full("seldom: the schedules of test_after_combines_of_different_dispatches see the rule in another order")
@pytest.mark.parametrize("slow_to", [0.02, 0.002], ids=["slow", "slowest"])
def test_rows_of_a_refused_combine_land_before_the_next_one(slow_to):
    """Without sums another rank of the node may store the same rows in the next combine."""
    options = (("max_tokens_per_rank", 4), ("hidden_size", 8), ("ranks_per_node", 2), ("pre_reduce", False))
    setup = Setup("bf16", options, num_experts=4, topk=1)
    slow, other = (
        next(
            case
            for case in (Small(setup, "uniform", seed=seed, tokens=(3, 0, 0, 0)) for seed in range(1000))
            if case.data(0).topk_ids.flatten().tolist() == [expert] * 3
        )
        for expert in (1, 0)
    )

    def speed(name):
        if name == "rank1:ep_fused_combine_kernel[2]":  # which sends to rank 0
            return 2 * slow_to
        home = [f"rank0:ep_fused_combine_kernel[{program}]" for program in (3, 4, 5)]
        return slow_to if name in home else 1.0

    run_disagreement(0, reduce=[True] * 4, refusing=0, few=slow, more=other, speed=speed, drain=0.0)


@triton.jit
def no_fence(control):
    pass


@triton.jit
def here_at_once(mine, offset, mask, ctx, S: tl.constexpr):
    return tl.full([], 1, tl.int32), ctx.me, tl.full([], 0, tl.int64)


@triton.jit
def no_rows_to_wait_for(ctx, ids, slots, token, numbers, S: tl.constexpr):
    return tl.full([], 1, tl.int32)


@triton.jit
def wait_for_nobody(looked, ctx, phase, S: tl.constexpr):
    return tl.full([], 1, tl.int32)


@triton.jit
def quiesce_nothing(ctx, messages, programs, S: tl.constexpr):
    return tl.full([], 1, tl.int32)


@triton.jit
def quiesce_no_rows(ok, needed, ctx, S: tl.constexpr):
    return ok


@PLANTED
@pytest.mark.parametrize("modules", [(counts, put_messages), (put_rows,)], ids=["dispatch", "combine"])
def test_a_put_of_what_is_not_stored_yet_is_caught(monkeypatch, modules):
    for module in modules:
        monkeypatch.setattr(module, "fence", no_fence)
    # Couriers are fast, and stores stay in their program until a release, of which there are others.
    assert caught(ONE, drain=0.0, speed=lambda name: 0.05 if "kernel" in name else 1.0) is not None


@PLANTED
def test_counts_that_are_taken_to_arrive_in_one_piece_are_caught(monkeypatch):
    monkeypatch.setattr(plan, "wait_for_inter_node", here_at_once)
    # Couriers are slow, so that programs look at counts of which a part is here.
    fast = {"speed": lambda name: 1.0 if "kernel" in name else 0.1}
    assert caught([*TWO, *ONE], first=6, combine=False, **fast) is not None


@PLANTED
def test_firsts_that_are_taken_to_arrive_before_counts_are_caught(monkeypatch):
    monkeypatch.setattr(receive, "wait_for_inter_node", here_at_once)
    assert caught([*TWO, *ONE], first=7, combine=False) is not None


@PLANTED
def test_rows_that_are_taken_to_arrive_before_their_flag_are_caught(monkeypatch):
    monkeypatch.setattr(arrivals, "wait_for_inter_node_rows", no_rows_to_wait_for)
    assert caught(SCENARIOS["every_row"]["cases"]) is not None


@PLANTED
@pytest.mark.parametrize("modules", [(counts, send), (send_back,)], ids=["dispatch", "combine"])
def test_staging_anew_what_is_still_under_way_is_caught(monkeypatch, modules):
    for module in modules:
        monkeypatch.setattr(module, "wait_for_credits", wait_for_nobody)
    dispatches = [Small(NODES, "uniform", seed=seed, tokens=(4 - seed % 3, 1 + seed % 4)) for seed in range(4)]
    combines = [dataclasses.replace(ONE[0], salt=salt) for salt in range(4)]
    found = caught(combines, one_dispatch=True) if send_back in modules else caught(dispatches, combine=False)
    assert found is not None


@PLANTED
@pytest.mark.parametrize("phase, first", [("dispatch", 14), ("combine", 0)])
def test_an_answer_before_what_was_refused_has_arrived_is_caught(monkeypatch, phase, first):
    monkeypatch.setattr(receive, "quiesce_dispatch", quiesce_nothing)
    monkeypatch.setattr(heads, "quiesce_combine", quiesce_no_rows)

    def run_all():
        for seed in range(first, first + 30):
            run_refused(seed, ONE[0], phase)

    with pytest.raises((Deadlock, moelink.MoelinkError, AssertionError)):
        run_all()
