"""The two-level protocol between nodes under seeded schedules: forwarders, collectors and network proxies interleaved.

As in ``test_protocol_nodes``, plain stores become visible late and puts arrive in pieces and in any order. Every
scenario equals the oracle.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import triton
import triton.language as tl

import moelink
from moelink.kernels.dispatch import send
from moelink.kernels.launch import constants, device
from moelink.kernels.nodes import collect, forward, relay
from moelink_testing import Scheduler
from tests.support.cases import Result, Setup
from tests.support.protocol_runs import (
    Calls,
    ScheduledProxy,
    Small,
    caught,
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
from tests.tiers import seeds

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
SCENARIOS = {
    **{name: spread_all(arguments, 4) for name, arguments in scenarios(NODES).items()},
    "layout_rank": dict(cases=[spread(Small(nodes_of(2, layout="rank"), "repeats", seed=6), 4)], world=4),
    "over_a_routing_layout_rank": dict(
        cases=[spread(Small(nodes_of(2, layout="rank"), "uniform", seed=6), 4)], world=4, again=1
    ),
    "every_token_to_one_expert": dict(cases=[spread(Small(NODES, "one_expert", seed=7), 4)], world=4),
    "holes": dict(cases=[spread(Small(NODES, "holes", seed=8, weights="none"), 4)], world=4),
}
SCENARIOS |= {
    f"nodes_{world // node}x{node}": dict(cases=[spread(one_call(nodes_of(node))[0], world)], world=world)
    for world, node in ((8, 4), (8, 2), (9, 3))
}
SCENARIOS["combine_format"] = dict(
    cases=[spread(Small(nodes_of(2, combine_format="mxfp8", hidden_size=32), "uniform", seed=9), 4)], world=4
)


@seeds(1, 10)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_under_every_schedule(name, seeds):
    for seed in seeds:
        run(seed, **SCENARIOS[name])


ONE = spread(one_call(NODES)[0], 4)
FEW = spread(Small(NODES, "uniform", seed=9, tokens=(1, 1), weights="none"), 4)
MORE = dataclasses.replace(FEW, tokens=(4, 3, 4, 2))


def other_options(seed, odd, phase):
    """Rank ``odd`` makes a call with other options (weights), which all see; the next call must be right."""
    case = spread(Small(NODES, "uniform", seed=2, weights="left"), 4)
    results = {}

    def main(calls):
        if phase == "dispatch":
            with pytest.raises(moelink.ProtocolError, match="with other options"):
                calls.dispatch(dataclasses.replace(case, weights="none") if calls.rank == odd else case)
        recv = calls.dispatch(case)
        if phase == "combine":
            with pytest.raises(moelink.ProtocolError, match="with other options"):
                calls.combine(dataclasses.replace(case, weights="dispatch") if calls.rank == odd else case, recv)
        results[calls.rank] = Result.of(recv, calls.combine(case, recv))

    play_calls(seed, NODES, 4, main)
    check([case], {id(case): results}, world=4)


def refused(seed, phase, **options):
    """One rank after the other refuses."""
    run_refused(seed, ONE, phase, refusing=seed % 4, world=4, **options)


WRONG = {
    "refused_combine_fast_network": lambda seed: refused(seed, "combine", proxies=ScheduledProxy),
    "refused_combine": lambda seed: refused(seed, "combine"),
    "refused_dispatch": lambda seed: refused(seed, "dispatch"),
    **{
        f"other_dispatch_{odd}": functools.partial(run_another, few=FEW, more=MORE, odd=odd, world=4)
        for odd in ((1,), (0,), (2, 3), (0, 3))
    },
    "other_options_dispatch": lambda seed: other_options(seed, (seed + 1) % 4, "dispatch"),
    "other_options_combine": lambda seed: other_options(seed, (seed + 1) % 4, "combine"),
}


@seeds(1, 8)
@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_forwarded_and_collected_to_the_end(name, seeds):
    """Nothing of a call that a rank refused, or that ranks made differently, is under way in the next one."""
    for seed in seeds:
        WRONG[name](seed)


@triton.jit
def no_fence(control):
    """Nothing."""


@pytest.mark.parametrize("module", [collect, relay], ids=["sum", "relay"])
def test_a_put_of_what_is_not_stored_yet_is_caught(monkeypatch, module):
    monkeypatch.setattr(module, "fence", no_fence)
    # The network is fast, and stores stay in their program until a release, of which there are others.
    few = [Small(NODES, "uniform", seed=1, tokens=(2, 1, 1, 2))]
    fast = {"drain": 0.0, "speed": lambda name: 0.05 if "kernel" in name else 1.0}
    assert caught(few, world=4, **fast) is not None


class TimedScheduler(Scheduler):
    """A schedule with a clock, which runs faster while nobody makes progress."""

    now = 0

    def pause(self, progress):
        self.now += 1 if progress or self._idle < 12 * len(self._live) else 50
        super().pause(progress)


LIMIT, FAULTY = 40_000, tl.constexpr(2)
forward_from, collect_for, put_relays = forward.forward_from, collect.collect_for, send.put_relays


@triton.jit
def forward_nothing(ctx, number, lane, lanes, notes, numbers, S: tl.constexpr):
    """The forwarder of rank 2 is dead."""
    ok = tl.full([], 0, tl.int32)
    if ctx.me != FAULTY:
        ok = forward_from(ctx, number, lane, lanes, notes, numbers, S)
    return ok


@triton.jit
def collect_nothing(ctx, number, lane, lanes, notes, S: tl.constexpr):
    """The collector of rank 2 is dead."""
    ok = tl.full([], 0, tl.int32)
    if ctx.me != FAULTY:
        ok = collect_for(ctx, number, lane, lanes, notes, S)
    return ok


@triton.jit
def lose_relays(ctx, mine, own, token, S: tl.constexpr):
    """The network loses the relays of rank 2."""
    if ctx.me != FAULTY:
        put_relays(ctx, mine, own, token, S)


FAULTS = {
    "forwarder": (forward, "forward_from", forward_nothing),
    "collector": (collect, "collect_for", collect_nothing),
    "home": (send, "put_relays", lose_relays),
}


@pytest.fixture
def no_constants():
    """Launch constants hold the clock: none is kept from before, or for later."""
    kept = (constants.dispatch_spec, constants.combine_spec)
    for specs in kept:
        specs.cache_clear()
    yield
    for specs in kept:
        specs.cache_clear()


@seeds(1, 6)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_error_names_the_rank_that_did_not_pass_on(fault, seeds, monkeypatch, no_constants):
    """A dead forwarder or collector and not the home ranks whose tokens it had; where relays are lost, their sender."""
    module, name, function = FAULTS[fault]
    monkeypatch.setattr(module, name, function)
    schedulers = []
    monkeypatch.setattr(device, "host_clock", lambda: schedulers[-1].now)
    case = Small(NODES, "uniform", seed=1, tokens=(3, 2, 3, 2))
    for seed in seeds:
        schedulers.append(TimedScheduler(seed, patience=10**5))
        told = names_of(case, schedulers[-1], seed, fault == "collector")
        assert set(told.values()) == {FAULTY.value}, told


def names_of(case, scheduler, seed, combine, world=4):
    """Whom each rank's error names, of those that cannot finish a dispatch, or one and its combine."""
    group = transports(NODES, world, seed=seed)
    told = {}

    def main(calls):
        calls.transport.ranks[0].limit = LIMIT
        try:
            recv = calls.dispatch(case)
            if combine:
                calls.combine(case, recv)
        except moelink.PeerTimeoutError as error:
            told[calls.rank] = error.peer

    play(scheduler, group, [functools.partial(main, Calls(*each)) for each in zip(group, range(world), strict=True)])
    for transport in group:
        transport.close()
    return told
