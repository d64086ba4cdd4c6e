"""The two-level protocol between nodes under seeded schedules: forwarders, collectors and network proxies interleaved.

As in ``test_protocol_nodes``, plain stores become visible late and puts arrive in pieces and in any order. Every
scenario equals the oracle.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import moelink
from cases import Result, Setup
from interleaving import Scheduler
from protocol_runs import Small, SpitefulProxy, check, one_call, play, run, scenarios, transports, two_calls
from symmetric_ranks import combine_requests, dispatch_requests
from tiers import seeds

OPTIONS = (("max_tokens_per_rank", 4), ("hidden_size", 8), ("transport", "symmetric"), ("two_level", True))


def nodes_of(per_node: int, **options: object) -> Setup:
    """A setup of nodes of ``per_node`` ranks."""
    return Setup("bf16", (*OPTIONS, ("ranks_per_node", per_node), *options.items()), num_experts=7, topk=3)


def spread(case: Small, world: int) -> Small:
    """``case`` with numbers of tokens for ``world`` ranks: its own, over and over, each time one more."""
    tokens = tuple((n + i // len(case.tokens)) % 5 for i, n in zip(range(world), itertools.cycle(case.tokens)))
    return dataclasses.replace(case, tokens=tokens)


def spread_all(arguments: dict[str, object], world: int) -> dict[str, object]:
    return {**arguments, "world": world, "cases": [spread(case, world) for case in arguments["cases"]]}


NODES = nodes_of(2)
ONE, TWO = ([spread(case, 4) for case in cases] for cases in (one_call(NODES), two_calls(NODES)))
SCENARIOS = {
    **{name: spread_all(arguments, 4) for name, arguments in scenarios(NODES).items()},
    "layout_rank": dict(cases=[spread(Small(nodes_of(2, layout="rank"), "repeats", seed=6), 4)], world=4),
    "over_a_routing_layout_rank": dict(
        cases=[spread(Small(nodes_of(2, layout="rank"), "uniform", seed=6), 4)], world=4, again=1
    ),
    "every_token_to_one_expert": dict(cases=[spread(Small(NODES, "one_expert", seed=7), 4)], world=4),
    "holes": dict(cases=[spread(Small(NODES, "holes", seed=8, weights="none"), 4)], world=4),
}
SHAPES = [(4, 2), (8, 4), (8, 2), (9, 3)]


@seeds(1, 10, why="each scenario takes another way through the protocol")
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_under_every_schedule(name, seeds):
    for seed in seeds:
        run(seed, **SCENARIOS[name])


@seeds(1, 8)
@pytest.mark.parametrize("world, per_node", SHAPES, ids=lambda value: str(value))
def test_nodes_of_every_shape(world, per_node, seeds):
    for seed in seeds:
        cases = [spread(case, world) for case in one_call(nodes_of(per_node))]
        run(seed, cases, world=world, fused=seed % 2 == 0)


def both_phases(seed, refusing, phase, world=4, setup=NODES):
    """Rank ``refusing`` refuses a call that others send rows in; all then make the same call, which must be right."""
    case, results = spread(one_call(setup)[0], world), {}
    group = transports(setup, world, seed=seed, proxies=SpitefulProxy)

    def main(rank):
        def dispatch():
            return group[rank].dispatch(dispatch_requests(case, [rank]), fused=True).wait()

        def calls():
            recv = dispatch() if phase == "combine" else None

            def call():
                if phase == "dispatch":
                    return dispatch()
                return group[rank].combine(combine_requests(case, [rank], recv), fused=True).wait()

            if rank == refusing:
                group[rank].refuse(phase)
            else:
                with pytest.raises(moelink.PeerAbortedError):
                    call()
            (last,) = call()
            (row,) = recv or [last]
            results[rank] = Result.of(row, torch.empty(0) if phase == "dispatch" else last)

        return calls

    play(Scheduler(seed), group, [main(rank) for rank in range(world)])
    check([case], {id(case): results}, world=world, combine=phase == "combine")
    for transport in group:
        transport.check()
        transport.close()


@seeds(1, 10)
@pytest.mark.parametrize("phase", ["combine", "dispatch"])
def test_what_one_rank_refuses_is_forwarded_and_collected_to_the_end(phase, seeds):
    for seed in seeds:
        both_phases(seed, seed % 4, phase)


def other_dispatches(seed, odd, world=4):
    """Ranks ``odd`` combine the rows of another dispatch than the others; combines after it must be right."""
    few = spread(Small(NODES, "uniform", seed=9, tokens=(1, 1), weights="none"), world)
    more = dataclasses.replace(few, tokens=(4, 3, 4, 2)[:world])
    results = [{}, {}]
    group = transports(NODES, world, seed=seed, proxies=SpitefulProxy)

    def main(rank):
        transport = group[rank]

        def combine(case, recv):
            return transport.combine(combine_requests(case, [rank], recv), fused=True).wait()

        def calls():
            recvs = [transport.dispatch(dispatch_requests(case, [rank]), fused=True).wait() for case in (few, more)]
            with pytest.raises(moelink.ProtocolError, match="over the routing of another call"):
                combine(*((more, recvs[1]) if rank in odd else (few, recvs[0])))
            for number, case in ((1, more), (0, few)):
                (out,) = combine(case, recvs[number])
                results[number][rank] = Result.of(recvs[number][0], out)

        return calls

    play(Scheduler(seed), group, [main(rank) for rank in range(world)])
    for case, ranks in zip((few, more), results, strict=True):
        check([case], {id(case): ranks}, world=world)
    for transport in group:
        transport.check()
        transport.close()


@seeds(1, 5)
@pytest.mark.parametrize("odd", [(1,), (0,), (2, 3), (0, 3)], ids=str)
def test_after_combines_of_different_dispatches_nothing_of_them_is_under_way(odd, seeds):
    for seed in seeds:
        other_dispatches(seed, odd)


def other_options(seed, odd, phase, world=4):
    """Rank ``odd`` makes a call with other options (weights), which all see; the next call must be right."""
    case = spread(Small(NODES, "uniform", seed=2, weights="left"), world)
    results = {}
    group = transports(NODES, world, seed=seed, proxies=SpitefulProxy)

    def main(rank):
        transport = group[rank]

        def dispatch(case):
            return transport.dispatch(dispatch_requests(case, [rank]), fused=True).wait()

        def combine(case, recv):
            return transport.combine(combine_requests(case, [rank], recv), fused=True).wait()

        def calls():
            if phase == "dispatch":
                with pytest.raises(moelink.ProtocolError, match="with other options"):
                    dispatch(dataclasses.replace(case, weights="none") if rank == odd else case)
            recv = dispatch(case)
            if phase == "combine":
                with pytest.raises(moelink.ProtocolError, match="with other options"):
                    combine(dataclasses.replace(case, weights="dispatch") if rank == odd else case, recv)
            (out,) = combine(case, recv)
            results[rank] = Result.of(recv[0], out)

        return calls

    play(Scheduler(seed), group, [main(rank) for rank in range(world)])
    check([case], {id(case): results}, world=world)
    for transport in group:
        transport.check()
        transport.close()


@seeds(1, 5)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_calls_with_different_options_end_alike(phase, seeds):
    for seed in seeds:
        other_options(seed, (seed + 1) % 4, phase)
