"""Launches that start while the one before them ends: who allows it, and that every launch waits."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from moelink.kernels.combine import reduce
from moelink.kernels.dispatch import receive
from moelink.kernels.launch import constants, device, own_rows, roles
from moelink.memory.workspace import COMBINE_BLOCK
from moelink.testing import run_ranks
from tests.gpu.gpu_compile import kernels_of
from tests.kernels import chained_ranks
from tests.support.cases import Setup
from tests.tiers import seeds

GPUS = min(8, torch.cuda.device_count())
PLANTED = pytest.mark.quick("a planted fault must be caught")
EXPERT = Setup("bf16", (("max_tokens_per_rank", 6), ("hidden_size", 8)), num_experts=5, topk=2)
IN_PLACE = dataclasses.replace(EXPERT, options=(*EXPERT.options, ("layout", "rank"), ("zero_copy", True)))
BY_ROW = dataclasses.replace(EXPERT, options=(*EXPERT.options, ("pre_reduce", False)))
STEPS = dataclasses.replace(
    EXPERT, options=(("max_tokens_per_rank", 16), ("hidden_size", 2 * COMBINE_BLOCK + 8), ("num_sms", 1))
)
SETUPS = {
    "steps": (STEPS, 2),
    "whole tokens": (STEPS, 2),
    "expert": (EXPERT, 2),
    "in place": (IN_PLACE, 3),
    "flags": (BY_ROW, 3),
    "one plans for all": (EXPERT, 4),
}
CACHES = (constants.dispatch_spec, constants.combine_spec, own_rows.with_own_rows)


class Watch:
    """Who has allowed the next launch, and which programs waited for another rank after that.

    Attributes:
        early, at_the_end: names of programs, by where they allowed it.
        late: for each of these waits, the functions that were running.
    """

    def __init__(self, getcurrent):
        self._current = getcurrent
        self.early, self.at_the_end, self.late = set(), set(), []
        self._allowed, self._clock = [], device.host_clock

    def allow(self, S):  # noqa: N803 - as kernels call it
        self._allowed.append(self._current())
        self.early.add(self._current().name)

    def end(self, S):  # noqa: N803
        self.at_the_end.add(self._current().name)

    def clock(self):
        """What a wait asks that is not over at its first look."""
        if any(self._current() is program for program in self._allowed):
            callers = [frame.function for frame in inspect.stack(0)]
            if "wait_for_table" not in callers:  # what a CTA of the same launch writes
                self.late.append(callers)
        return self._clock()


@pytest.fixture
def watch(monkeypatch):
    if not isinstance(receive.receive, interpreter.InterpretedFunction):
        pytest.skip("kernels are compiled here, and schedules are of interpreted ones")
    from greenlet import getcurrent

    watch = Watch(getcurrent)
    monkeypatch.setattr(device, "host_clock", watch.clock)
    for module in (receive, reduce):
        monkeypatch.setattr(module, "allow_next_launch", watch.allow)
    monkeypatch.setattr(roles, "allow_next_launch", watch.end)
    for cached in CACHES:
        cached.cache_clear()
    yield watch
    for cached in CACHES:
        cached.cache_clear()


def play(name, seeds):
    from tests.support.protocol_runs import Many, run

    setup, world = SETUPS[name]
    tokens = dict(setup.options)["max_tokens_per_rank"] // 2
    counts = (tokens, tokens + 1, tokens + 2, 1)[:world]
    calls = [Many(setup, "uniform", seed=seed, tokens=counts) for seed in (1, 2)]
    for seed in seeds:
        # One sender is slow, so that receivers wait for messages and not only for counts.
        run(seed, calls, world=world, speed=lambda name: 0.05 if name.endswith("kernel[1]") else 1.0)


def is_late(name, seeds, watch):
    """Whether a program waits too late under one of these seeds."""
    for seed in seeds:
        play(name, [seed])
        if watch.late:
            return True
    return False


@seeds(1, 10, why="each setup has other roles")
@pytest.mark.parametrize("name", SETUPS)
def test_a_program_waits_for_no_rank_once_it_has_allowed_the_next_launch(name, seeds, watch, monkeypatch):
    if name == "whole tokens":  # as of more than MANY_TOKENS: home takes one block of columns after the other
        monkeypatch.setattr(reduce, "_MANY_TOKENS", tl.constexpr(0))
    play(name, seeds)
    assert not watch.late
    for phase in ("dispatch", "combine"):
        assert any(f"ep_fused_{phase}" in program for program in watch.early), phase
    assert watch.early <= watch.at_the_end


@PLANTED
def test_a_program_with_more_sources_to_wait_for_is_caught(watch, monkeypatch):
    source = receive.Source
    monkeypatch.setattr(receive, "Source", lambda *fields: source(*fields[:-1], fields[-1] | True))
    assert is_late("in place", range(4), watch)


@PLANTED
def test_a_program_with_more_tokens_to_wait_for_is_caught(watch, monkeypatch):
    piece = reduce.Piece
    monkeypatch.setattr(reduce, "Piece", lambda *fields: piece(*fields[:-1], fields[-1] | True))
    assert is_late("expert", range(4), watch)


CHAINS = {"expert": {}, "in place": {"layout": "rank", "zero_copy": True}}


def kernels(name, tokens):
    return kernels_of(chained_ranks.gpu_fields(GPUS, tokens, **CHAINS[name]), GPUS, weights="none")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")
@pytest.mark.kernels(of=kernels)
@pytest.mark.parametrize("tokens", [1, 64, 300, 2048], ids=lambda tokens: f"{tokens} tokens")
@pytest.mark.parametrize("name", CHAINS)
def test_each_launch_sees_what_the_one_before_it_stored(name, tokens):
    assert run_ranks(chained_ranks.on_gpu, GPUS, tokens, CHAINS[name], timeout=400) == [True] * GPUS
