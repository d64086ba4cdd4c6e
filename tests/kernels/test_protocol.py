"""The protocol under seeded schedules: every program of every rank interleaved, stores held back until a release.

Scenarios pass under every seed, equal to the oracle; planted faults are each caught.
"""

from __future__ import annotations

import dataclasses

import pytest
import triton
import triton.language as tl

import moelink
import moelink.memory.workspace as workspaces
from moelink.kernels.combine import arrivals, heads
from moelink.kernels.combine import send as send_back
from moelink.kernels.dispatch import counts, receive, send, send_cached
from moelink.kernels.launch.constants import combine_spec
from moelink.kernels.sync import credit, lamport_slots, signals
from moelink_testing import Deadlock, Scheduler
from tests.support.cases import FIELDS, Packed, Result, Setup, check_case
from tests.support.protocol_runs import FORMAT, Small, caught, one_call, run, scenarios, transports, two_calls
from tests.support.symmetric_ranks import combine_requests, dispatch_requests, one_process, run_case
from tests.tiers import seeds

WORLD = 2
PLANTED = pytest.mark.quick("a planted fault must be caught")

ONE, TWO, SCENARIOS = one_call(FORMAT), two_calls(FORMAT), scenarios(FORMAT)


@pytest.fixture(params=["rows", "flags"])
def form(request, monkeypatch):
    """Sums go home as rows that are their own signal, as those of small calls do, or with flags behind them."""
    if request.param == "flags":
        monkeypatch.setattr(workspaces, "LAMPORT_BYTES", 0)
    combine_spec.cache_clear()
    yield request.param
    combine_spec.cache_clear()


@seeds(1, 10, why="each scenario takes another way through the protocol")
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_under_every_schedule(name, form, seeds):
    for seed in seeds:
        run(2 * seed + (form == "flags"), **SCENARIOS[name])


@seeds(1, 2)
@pytest.mark.parametrize("phase", ["combine", "dispatch"])
def test_the_next_call_waits_for_the_slowest_reader(phase, form, seeds):
    """One program of rank 0 reads long after all others have ended, and reads nothing of the call after."""
    slow = {"dispatch": "rank0:ep_fused_dispatch_kernel[4]", "combine": "rank0:ep_fused_combine_kernel[5]"}[phase]
    calls = {
        "dispatch": dict(cases=[*TWO, Small(FORMAT, "uniform", seed=6, tokens=(1, 4))], combine=False),
        "combine": dict(cases=[dataclasses.replace(ONE[0], salt=salt) for salt in range(2)], one_dispatch=True),
    }[phase]
    for seed in seeds:
        run(seed, **calls, speed=lambda name: 0.03 if name == slow else 1.0, drain=0.3)


@seeds(1, 3)
def test_call_numbers_of_more_than_31_bits(seeds):
    """Counts carry 31 bits of the call: 2**31 - 1, 0 and 1 here, few tokens and many in turn."""
    for seed in seeds:
        run(seed, [*TWO, *ONE], combine=False, calls=2**31 - 2)


def test_a_row_that_does_not_fit_is_not_the_one_of_the_call_before():
    """Rank 1's two rows of expert 2 fit until rank 0's two come before them."""
    setup = Setup("bf16", (*FORMAT.options, ("pre_reduce", False), ("capacity", 2)), num_experts=3, topk=2)
    transport = one_process(setup.fields, WORLD)
    for tokens in ((0, 1), (1, 1)):
        case = Small(setup, "one_expert", tokens=tokens)
        check_case(case, WORLD, run_case(transport, case, [0, 1]))
    with pytest.raises(moelink.CapacityError):
        transport.check()


FEW = Setup("bf16", (("max_tokens_per_rank", 4), ("hidden_size", 8)), num_experts=5, topk=3)
ROWS = Setup("bf16", (("max_tokens_per_rank", 4), ("hidden_size", 8), ("pre_reduce", False)), num_experts=2, topk=1)


def refused_combine(seed, dispatches, refused, last, **options):
    """Dispatches, a combine that rank 0 refuses, and one that it does not: both of an earlier dispatch, with their
    numbers. Checks the last."""
    ranks, results = transports(refused.setup), {}
    number = {case.seed: i for i, case in enumerate(dispatches)}

    def rank_of(rank):
        transport = ranks[rank]

        def combine(case):
            recv = recvs[number[case.seed]]
            return transport.combine(combine_requests(case, [rank], [recv]), fused=True).wait()[0]

        recvs = []

        def main():
            recvs.extend(transport.dispatch(dispatch_requests(c, [rank]), fused=True).wait()[0] for c in dispatches)
            if rank == 0:
                transport.refuse("combine")
            else:
                with pytest.raises(moelink.PeerAbortedError):
                    combine(refused)
            out = combine(last)
            fields = {name: Packed.of(getattr(recvs[number[last.seed]], name)) for name in FIELDS}
            results[rank] = Result(fields, Packed.of(out))

        return main

    Scheduler(seed, **options).run([rank_of(rank) for rank in range(WORLD)])
    check_case(last, WORLD, [results[rank] for rank in range(WORLD)])


@seeds(1, 3)
def test_a_refused_combine_of_several_passes_is_one_call(seeds):
    case = Small(FEW, "uniform", seed=3, weights="none", reduce=False)
    assert FEW.config(WORLD).topk > WORLD  # or the workspace would hold all rows at once
    for seed in seeds:
        refused_combine(seed, [case], case, dataclasses.replace(case, salt=1))


@seeds(1, 2)
def test_rows_of_a_refused_combine_land_before_the_next_one(seeds):
    """Without pre-reduction other ranks may store the same rows in the next combine; who refused waits for nothing."""
    first, second = (
        next(
            case
            for case in (Small(ROWS, "uniform", seed=seed) for seed in range(100))
            if case.data(0).topk_ids.flatten().tolist() == [expert] * 3
        )
        for expert in (1, 0)
    )

    def speed(name):
        return 0.01 if name in ("rank1:ep_fused_combine_kernel[1]", "rank1:ep_fused_combine_kernel[2]") else 1.0

    for seed in seeds:
        refused_combine(seed, [first, second], first, second, speed=speed, drain=0.0)


def around_refusals(seed, refused, calls=6, taking_turns=False, **options):
    """Combines of one dispatch, of which rank 0 refuses those numbered ``refused``, or (``taking_turns``) the two ranks
    in turn; the others are checked."""
    ranks, results = transports(FORMAT), {}
    cases = [dataclasses.replace(ONE[0], salt=salt) for salt in range(calls)]

    def rank_of(rank):
        transport = ranks[rank]

        def main():
            (recv,) = transport.dispatch(dispatch_requests(cases[0], [rank]), fused=True).wait()
            for number, case in enumerate(cases):
                requests = combine_requests(case, [rank], [recv])
                if number not in refused:
                    (out,) = transport.combine(requests, fused=True).wait()
                    results.setdefault(number, {})[rank] = Result.of(recv, out)
                elif rank == (number % WORLD if taking_turns else 0):
                    transport.refuse("combine")
                else:
                    with pytest.raises(moelink.PeerAbortedError):
                        transport.combine(requests, fused=True).wait()

        return main

    Scheduler(seed, **options).run([rank_of(rank) for rank in range(WORLD)])
    for number, by_rank in results.items():
        check_case(cases[number], WORLD, [by_rank[rank] for rank in range(WORLD)])


REFUSALS = [(1,), (0,), (1, 2), (1, 3), (0, 1, 2), (2, 3, 5)]


@seeds(1, 4)
@pytest.mark.parametrize("refused", REFUSALS, ids=str)
def test_rows_of_a_refused_small_call_are_not_those_of_a_later_one(refused, seeds):
    for seed in seeds:
        around_refusals(seed, refused, calls=max(refused) + 3)
        around_refusals(seed, refused, calls=max(refused) + 3, taking_turns=True, speed=slow_senders, drain=0.01)


@seeds(1, 2)
@pytest.mark.parametrize("refused", REFUSALS[2::3], ids=str)
def test_whole_rows_of_several_blocks_outlive_refusals(blocks, refused, seeds):
    """As of 257 to 1024 tokens, which are not few: no parts, and a row has two blocks."""
    blocks(4, few=2)
    workspace = workspaces.Workspace(FORMAT.config(WORLD))
    assert (workspace.combine_parts, workspace.lamport_tokens) == (1, 4)
    for seed in seeds:
        around_refusals(seed, refused, calls=max(refused) + 3)
        around_refusals(seed, refused, calls=max(refused) + 3, taking_turns=True, speed=slow_senders, drain=0.01)


def test_slow_senders_around_refused_combines():
    """The schedule in which rows of a refused call outlive it, if nobody sees to them."""
    around_refusals(0, (1, 2), speed=slow_senders, drain=0.01)


@triton.jit
def note_nothing(control, call):
    pass


@triton.jit
def clear_nothing(mine, S: tl.constexpr):
    pass


@PLANTED
@pytest.mark.parametrize("name, fault, first", [("note_refused", note_nothing, 3), ("clear_rows", clear_nothing, 0)])
def test_rows_left_by_a_refused_call_are_caught(monkeypatch, name, fault, first):
    monkeypatch.setattr(heads, name, fault)
    found = None
    for seed in range(first, first + 10):
        try:
            around_refusals(seed, (1, 2), speed=slow_senders, drain=0.01)
        except (AssertionError, moelink.MoelinkError) as error:
            found = error
            break
    assert found is not None


@triton.jit
def publish_without_release(words, mask, value):
    tl.atomic_xchg(words, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def wait_for_the_call_before(words, mask, target, poison, limit, CLOCK: tl.constexpr):
    return signals.wait_all(words, mask, target - 1, poison, limit, CLOCK)


@triton.jit
def wait_any_of_the_call_before(words, mask, target, poison, limit, CLOCK: tl.constexpr):
    state, got = signals.wait_any(words, mask, target - 1, poison, limit, CLOCK)
    return state, got + 1


def slow_senders(name):
    """Programs that send rows are slow, so that others see what they do one thing after the other."""
    return 0.05 if name.endswith(("kernel[0]", "kernel[1]", "kernel[2]")) else 1.0


@triton.jit
def wait_for_nobody(looked, ctx, phase, S: tl.constexpr):
    return tl.full([], 1, tl.int32)


@triton.jit
def wait_for_the_call_after(words, mask, target, poison, limit, CLOCK: tl.constexpr):
    return signals.wait_any(words, mask, target + 1, poison, limit, CLOCK)


@PLANTED
@pytest.mark.parametrize("form", ["flags"], indirect=True)
@pytest.mark.parametrize("modules", [(send,), (send_back,)], ids=["dispatch", "combine"])
def test_missing_release_is_caught(monkeypatch, modules, form):
    for module in modules:
        monkeypatch.setattr(module, "publish", publish_without_release)
    assert caught(ONE, drain=0.01, speed=slow_senders) is not None


@PLANTED
def test_missing_release_over_a_routing_is_caught(monkeypatch):
    monkeypatch.setattr(send, "publish", publish_without_release)
    assert caught(ONE, again=1, first=3, drain=0.01, speed=slow_senders) is not None


@PLANTED
@pytest.mark.parametrize("form", ["flags"], indirect=True)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_wrong_wait_is_caught(monkeypatch, phase, form):
    if phase == "dispatch":
        monkeypatch.setattr(receive, "wait_any", wait_any_of_the_call_before)
    else:
        monkeypatch.setattr(arrivals, "wait_all", wait_for_the_call_before)
    assert caught(ONE, first=4 if phase == "dispatch" else 0, drain=0.01, speed=slow_senders) is not None


@triton.jit
def nothing_is_missing(words, S: tl.constexpr):
    return words != words


@triton.jit
def leave_rows(mine, me, slots, token, n, mask, S: tl.constexpr):
    pass


@PLANTED
@pytest.mark.parametrize("name, fault", [("is_missing", nothing_is_missing), ("leave_zeros", leave_rows)])
def test_rows_that_have_not_come_are_caught(monkeypatch, name, fault):
    """Rows that nobody waited for, and rows of the call before."""
    monkeypatch.setattr(lamport_slots, name, fault)
    combines = [dataclasses.replace(ONE[0], salt=salt) for salt in range(2)]
    assert caught(combines, one_dispatch=True, speed=slow_senders) is not None


@PLANTED
@pytest.mark.parametrize("modules", [(counts, send), (send_back,)], ids=["dispatch", "combine"])
def test_reuse_of_a_buffer_too_early_is_caught(monkeypatch, modules, form):
    for module in modules:
        monkeypatch.setattr(module, "wait_for_credits", wait_for_nobody)
    # One phase alone: a call of the other in between holds fast ranks back. Many dispatches, as a rank waits for the
    # others' rows, too, and so is a call ahead only while another one has sent but not yet read.
    tokens = ((3, 2), (1, 4), (3, 1), (4, 4), (2, 3), (4, 1), (1, 1), (4, 4))
    dispatches = [Small(FORMAT, "uniform", seed=seed, tokens=each) for seed, each in enumerate(tokens, 1)]
    combines = [dataclasses.replace(ONE[0], salt=salt) for salt in range(4)]
    if send_back in modules:
        found = caught(combines, first={"rows": 2, "flags": 7}[form], one_dispatch=True)
    else:
        found = caught(dispatches, combine=False)
    assert found is not None


@PLANTED
def test_reuse_of_a_buffer_over_a_routing_is_caught(monkeypatch):
    monkeypatch.setattr(send_cached, "wait_for_credits", wait_for_nobody)
    dispatches = [Small(FORMAT, "uniform", seed=seed, tokens=(1 + seed % 4, 4 - seed % 3)) for seed in range(4)]
    assert caught(dispatches, combine=False, again=4) is not None


@triton.jit
def tell_what_is_not_read(table, control, me, S: tl.constexpr):
    """As grant_credits, but one call too many of each phase."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    base = tl.load(table + r, mask=r < S.WORLD_SIZE, other=0)
    for phase in tl.static_range(2):
        words = credit.credit_at(base, phase, me, S)
        read = tl.zeros([S.WORLD_SIZE_POW2], tl.int64) + signals.calls_made(control, 1 + 2 * phase) + 1
        tl.atomic_max(words, read, mask=r < S.WORLD_SIZE, sem="relaxed", scope="sys")


@triton.jit
def tell_nobody(table, control, me, S: tl.constexpr):
    pass


@PLANTED
@pytest.mark.parametrize("module", [send, send_cached, send_back], ids=["dispatch", "over a routing", "combine"])
def test_telling_too_early_is_caught(monkeypatch, module):
    monkeypatch.setattr(module, "grant_credits", tell_what_is_not_read)
    dispatches = [Small(FORMAT, "uniform", seed=seed, tokens=(1 + seed % 4, 4 - seed % 3)) for seed in range(8)]
    combines = [dataclasses.replace(ONE[0], salt=salt) for salt in range(4)]
    found = {
        send: lambda: caught(dispatches, combine=False),
        send_cached: lambda: caught(dispatches[:2], first=7, combine=False, again=4),
        send_back: lambda: caught(combines, first=2, one_dispatch=True),
    }
    assert found[module]() is not None


@PLANTED
@pytest.mark.parametrize("module", [send, send_cached, send_back], ids=["dispatch", "over a routing", "combine"])
def test_telling_nobody_is_caught(monkeypatch, module):
    monkeypatch.setattr(module, "grant_credits", tell_nobody)
    dispatches = [Small(FORMAT, "uniform", seed=seed) for seed in range(2)]
    combines = [dataclasses.replace(ONE[0], salt=salt) for salt in range(2)]
    calls = dict(cases=dispatches, combine=False) if module is send else dict(cases=combines, one_dispatch=True)
    calls |= dict(cases=dispatches, combine=False, one_dispatch=False, again=3) if module is send_cached else {}
    with pytest.raises((Deadlock, moelink.PeerTimeoutError)) as caught_error:
        run(0, **calls)
    assert "wait_for_credits" in str(caught_error.value) or "wait_all" in str(caught_error.value)


@PLANTED
def test_wait_for_what_never_comes_is_a_deadlock(monkeypatch):
    monkeypatch.setattr(receive, "wait_any", wait_for_the_call_after)
    with pytest.raises((Deadlock, moelink.PeerTimeoutError)) as caught_error:
        run(0, ONE)
    assert "wait_any" in str(caught_error.value)
