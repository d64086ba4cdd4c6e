"""Layout "rank" on one node under seeded schedules: senders count messages alone, and words of experts come late.

As ``test_protocol`` does for the layout "expert". What only this layout has is taken away once, and the lack shows.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moelink.kernels.dispatch import receive, route
from moelink.kernels.launch.grid import Launch
from moelink.memory.workspace import Workspace
from moelink.transports.base import DispatchRequest
from moelink.transports.symmetric import plans as dispatching
from tests.support.cases import Setup
from tests.support.protocol_runs import Many, caught, run
from tests.support.symmetric_ranks import one_process
from tests.tiers import seeds

OPTIONS = (("max_tokens_per_rank", 10), ("hidden_size", 8), ("layout", "rank"))
RANK = Setup("bf16", OPTIONS, num_experts=3, topk=2)
VIEWS = Setup("bf16", (*OPTIONS, ("zero_copy", True)), num_experts=3, topk=2)
PLANTED = pytest.mark.quick("a planted fault must be caught")


def cases(setup: Setup, *tokens: tuple[int, int]) -> list[Many]:
    """Calls of so many tokens by rank."""
    return [Many(setup, "uniform", seed=seed, tokens=each) for seed, each in enumerate(tokens)]


SHARED, ALONE, FEW = cases(RANK, (5, 1)), cases(RANK, (1, 3)), cases(RANK, (1, 2))


@pytest.fixture
def senders(monkeypatch):
    """3 CTAs send 5 tokens, so that one waits for two others. 2 send 3 tokens, and each counts alone."""
    monkeypatch.setattr(
        dispatching, "dispatch_launch", lambda config, device, tokens, **options: Launch(3 if tokens > 3 else 2, 2)
    )


def late_words(name: str) -> float:
    """The counting CTA of rank 0 is slow, so that its words of experts come long after the header."""
    return 0.05 if name == "rank0:ep_fused_dispatch_kernel[3]" else 1.0


def slow_first(name: str) -> float:
    """The first sending CTA is slow, so that others count before it."""
    return 0.05 if name.endswith("kernel[0]") else 1.0


def slow_senders(name: str) -> float:
    """CTAs that send rows are slow, so that a receiver looks at a message as soon as its flag is there."""
    return 0.02 if name.endswith(("dispatch_kernel[0]", "dispatch_kernel[1]", "dispatch_kernel[2]")) else 1.0


SCENARIOS = {
    "shared": dict(cases=SHARED),
    "shared_split": dict(cases=SHARED, fused=False),
    "shared_after_alone": dict(cases=[*FEW, *ALONE, *SHARED], combine=False),
    "views": dict(cases=cases(VIEWS, (4, 5))),
    "views_of_slow_senders": dict(cases=cases(VIEWS, (6, 8)), speed=slow_senders),
    "late_words": dict(cases=SHARED, combine=False, speed=late_words),
}


@seeds(1, 10, why="each scenario takes another way through the protocol")
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_under_every_schedule(name, senders, seeds):
    assert not Workspace(RANK.config(2)).senders_count_pairs
    for seed in seeds:
        run(seed, **SCENARIOS[name])


@seeds(1, 3)
def test_call_numbers_of_more_bits_than_words_hold(senders, seeds):
    """Counts carry 31 bits of the call, 0 of call 2**31 here. Block counts carry 40: the sign of a word changes at call
    2**39, and call 2**40 has 0."""
    for seed in seeds:
        for calls in (2**31 - 1, 2**39 - 2, 2**39 - 1, 2**40 - 1):
            run(seed, SHARED, combine=False, calls=calls)


@pytest.mark.quick("each number of tokens is counted in another way")
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_ids_that_name_no_expert_are_noted_once(senders, layout, tokens):
    """Whoever counts: each CTA for itself, or many together."""
    transport = one_process({**RANK.fields, "layout": layout}, 2)
    ids = torch.arange(2 * tokens).reshape(tokens, 2) % 3
    ids[-1] = torch.tensor([3, -2])
    none = torch.empty(0, 2, dtype=torch.int64)
    x = torch.ones(tokens, 8, dtype=torch.bfloat16)
    transport.dispatch([DispatchRequest(x[: len(each)], each) for each in (ids, none)]).wait()
    assert [rank.errors.take_losses()[1] for rank in transport.ranks] == [2, 0]
    transport.close()


@pytest.mark.quick("each number of tokens is counted in another way")
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_rows_of_each_expert_are_told_by_source(senders, tokens):
    transport = one_process(RANK.fields, 2)
    each = [case.data(rank) for case in cases(RANK, (tokens, 5)) for rank in range(2)]
    recvs = transport.dispatch([DispatchRequest(data.x, data.topk_ids) for data in each]).wait()
    pairs = torch.stack([torch.bincount(data.topk_ids.flatten(), minlength=3) for data in each], 1)
    assert torch.cat([recv.handle.counts for recv in recvs]).tolist() == pairs.tolist()
    transport.close()


@triton.jit
def take_what_is_there(ctx, mine, p, programs, S: tl.constexpr):
    """As wait_for_messages, without a wait: CTAs that have not counted yet send none."""
    r = tl.arange(0, S.WORLD_SIZE_POW2)[None, :]
    mask = (p < programs)[:, None] & (r >= 0)
    word = tl.load(route.message_words(mine, p[:, None], r, S), mask=mask, other=0, volatile=True)
    return tl.full([], 1, tl.int32), tl.where((word >> 24) == ctx.call, word & 0xFFFFFF, 0).to(tl.int32)


@PLANTED
def test_messages_that_nobody_waited_for_are_caught(monkeypatch, senders):
    monkeypatch.setattr(route, "wait_for_messages", take_what_is_there)
    assert caught(SHARED, combine=False, speed=slow_first) is not None


@triton.jit
def wait_for_no_words(ctx, numbers, S: tl.constexpr):
    return tl.full([], 1, tl.int32)


@PLANTED
def test_offsets_written_before_the_words_of_experts_are_caught(monkeypatch, senders):
    monkeypatch.setattr(receive, "wait_for_expert_counts", wait_for_no_words)
    assert caught(SHARED, combine=False, speed=late_words) is not None
