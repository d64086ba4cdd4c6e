"""An SM limit: which programs work, under seeded schedules; and calls with one equal the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

import moelink
from moelink.kernels.launch import grid as cut
from moelink.kernels.launch.grid import Launch, TokenSplit
from moelink.memory.protocol import SM_LIMIT_WORDS
from moelink.memory.workspace import Workspace
from moelink.transports.symmetric import combine as combining
from moelink.transports.symmetric import plans as dispatching
from moelink.transports.symmetric import rank as ranks
from moelink_testing import Scheduler
from tests.kernels.turn_kernels import Budget, note
from tests.support.protocol_runs import FORMAT, run, scenarios
from tests.tiers import seeds

SPREAD = [3, 0, 1, 2] * 3
"""Multiprocessors that get programs 0 to 11: each one, then each a second, and a third."""
CROWDED = [3, 0, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]
"""Two of them have room for one program only."""


def launched(
    seed: int, where: list[int], *, programs: int, budget: int, launches: int = 2, in_turn: bool = False
) -> list[int]:
    """Where each number's work was done, in the last of some launches; each was done once in each of them. With
    ``in_turn`` a CTA takes one number after the other."""

    def sm_id() -> int:
        return where[interpreter_builder.grid_idx[0]]

    words = torch.zeros(SM_LIMIT_WORDS, dtype=torch.int32)
    places = torch.full((programs,), -1, dtype=torch.int32)
    for _ in range(launches):
        times = torch.zeros(max(programs, len(where)), dtype=torch.int32)

        def main(times: torch.Tensor = times) -> None:
            note[(len(where),)](words, times, places, programs, S=Budget(budget, sm_id, in_turn))

        Scheduler(seed).run([main])
        assert times.tolist() == [1] * programs + [0] * (len(times) - programs)
        assert words.count_nonzero() == 0
    return places.tolist()


@pytest.mark.quick("one schedule in some shows it, and each takes milliseconds")
@pytest.mark.parametrize("seed", range(40))
def test_example(seed):
    """Six numbers on two of four SMs, which ones is up to the schedule."""
    assert len(set(launched(seed, SPREAD, programs=6, budget=2))) == 2


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("programs", [1, 2, 5, 11, 12])
def test_every_number_is_taken_once_wherever_there_is_room(programs, budget):
    for seed in range(4):
        places = launched(seed, SPREAD, programs=programs, budget=budget)
        assert len(set(places)) <= budget or programs > 3 * budget
        launched(seed, CROWDED, programs=programs, budget=budget)
        launched(seed, [0] * 12, programs=programs, budget=budget)


@pytest.mark.quick("tenths of a second, and a fault shows in some of them")
@pytest.mark.parametrize("budget", [1, 2, 4])
@pytest.mark.parametrize("programs", [1, 5, 12, 30])
def test_numbers_in_turn_are_taken_once_and_within_the_limit(programs, budget):
    """Also where there are more numbers than CTAs. However few CTAs find room there, as many as SMs do the work."""
    for seed in range(4):
        for where in (SPREAD, CROWDED):
            places = launched(seed, where, programs=programs, budget=budget, in_turn=True)
            assert len(set(places)) <= budget
        launched(seed, [0] * 12, programs=programs, budget=budget, in_turn=True)


def test_the_grid_of_a_budget():
    assert cut.grid(71, 24, resident=3, available=132) == 396
    assert cut.grid(72, 24, resident=5, available=132) == 396
    assert cut.grid(20, 24, resident=3, available=132) == 20
    assert cut.grid(73, 24, resident=3, available=132) == 396
    assert cut.grid(395, 0, resident=3, available=132) == 395


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize("most", [1, 32, 256, 1024, 4096])
@pytest.mark.parametrize("num_sms", [1, 2, 24, 131])
@pytest.mark.parametrize("layout", [{"expert_alignment": 64}, {"layout": "rank"}], ids=str)
@pytest.mark.parametrize("world_size", [2, 8])
def test_a_budget_holds_all_programs_of_a_launch(world_size, layout, num_sms, most):
    fields = {"num_experts": 256, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": most, "num_sms": num_sms}
    config = moelink.EPConfig(**fields, **layout, world_size=world_size)
    device = torch.device("cuda", 0)
    for tokens in {0, 1, most // 2, most}:
        for encodes in (False, True):
            launch = cut.dispatch_launch(config, device, tokens, encodes=encodes)
            senders = 1 + TokenSplit.of(tokens, programs=launch.send, world_size=world_size).programs
            in_turn = cut.takes_numbers_in_turn(config)
            room = 2 * launch.resident * num_sms if in_turn else launch.resident * num_sms - senders
            assert 0 < launch.receive <= room
        launch = cut.combine_launch(Workspace(config), device, tokens, sums=True)
        present = cut.sums_present_rows(Workspace(config), device, sums=True)
        assert 0 < launch.receive <= launch.resident * num_sms - (0 if present else launch.send)
        launch = cut.layout_launch(config, device)
        assert 0 < launch.receive <= launch.resident * num_sms


def test_the_ctas_of_a_whole_device(monkeypatch):
    """As docs/lab says that they are best."""
    monkeypatch.setattr(cut, "sm_count", lambda device: 132)
    device, fields = torch.device("cuda", 0), {"num_experts": 256, "topk": 8, "hidden_size": 7168, "world_size": 2}

    def ctas(most, **more):
        config = moelink.EPConfig(**fields, **more, max_tokens_per_rank=most)
        dispatch = cut.dispatch_launch(config, device, most, encodes=False)
        combine = cut.combine_launch(Workspace(config), device, most, sums=True)
        return (dispatch.send, dispatch.receive), (combine.send, combine.receive)

    assert ctas(4096) == ((79, 316), (528, 132))
    assert ctas(512) == ((79, 316), (396, 264))
    assert ctas(512, layout="rank") == ((79, 316), (264, 396))
    assert ctas(4096, layout="rank", zero_copy=True) == ((264, 131), (264, 396))
    assert ctas(4096, layout="rank", zero_copy=True, num_sms=24)[0] == (48, 23)
    assert ctas(8192, layout="rank", zero_copy=True) == ((264, 131), (528, 132))
    assert ctas(1024, layout="rank", zero_copy=True) == ((132, 132), (264, 396))
    assert [ctas(most)[0][0] for most in (132, 133, 256)] == [132, 264, 264]
    assert ctas(256, layout="rank", zero_copy=True)[0] == (132, 65)


@pytest.mark.parametrize("ranks, tokens, encodes, senders", [
    (4, 4096, True, 57), (4, 4096, False, 38), (2, 4096, True, 85), (2, 4096, False, 50), (4, 1024, True, 85),
    (4, 256, False, 85),
])  # fmt: skip
def test_senders_within_an_sm_limit(monkeypatch, ranks, tokens, encodes, senders):
    """Of 64 SMs, as docs/lab/sm-limit.md has them."""
    monkeypatch.setattr(cut, "sm_count", lambda device: 132)
    config = moelink.EPConfig(
        num_experts=256, topk=8, hidden_size=7168, world_size=ranks, max_tokens_per_rank=tokens, num_sms=64
    )
    launch = cut.dispatch_launch(config, torch.device("cuda", 0), tokens, encodes=encodes)
    assert (launch.send, launch.receive) == (senders, 3 * 64 - senders - 1)


@pytest.fixture
def budget(monkeypatch):
    """Two of three SMs, for all ranks, each of which holds three programs."""
    monkeypatch.setattr(ranks, "sm_limit_of", lambda config, device: 2)
    monkeypatch.setattr(ranks, "sm_count", lambda device: 3)
    monkeypatch.setattr(dispatching, "dispatch_launch", lambda *args, **options: Launch(2, 2, resident=3))
    monkeypatch.setattr(dispatching, "layout_launch", lambda *args: Launch(0, 4, resident=3))
    monkeypatch.setattr(combining, "combine_launch", lambda *args, **options: Launch(2, 2, resident=3))
    for module, name in ((dispatching, "dispatch_spec"), (combining, "combine_spec")):
        make = getattr(module, name)

        def limited(*args, make=make, **options):
            return dataclasses.replace(
                make(*args, **options), NUM_SMS=2, SM_ID=lambda: interpreter_builder.grid_idx[0] % 3
            )

        monkeypatch.setattr(module, name, limited)


@seeds(1, 5)
@pytest.mark.parametrize("name", scenarios(FORMAT))
def test_scenario_with_a_budget_under_every_schedule(name, budget, seeds):
    for seed in seeds:
        run(2 * seed, **scenarios(FORMAT)[name])
