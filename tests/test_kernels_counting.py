"""Kernels' counting and their map of experts on their own, by the small integers of their docstrings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from moelink.kernels.dispatch import route as routes
from moelink.kernels.records import DispatchNumbers
from moelink.routing import ExpertMap

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")


@triton.jit
def _route(ids, owner, first, S: tl.constexpr):
    i = tl.arange(0, 16)
    e = tl.load(ids + i)
    tl.store(owner + i, routes.owner_of(e, 0, 0, S))
    tl.store(first + i, routes.first_of(i, 0, S))


@pytest.mark.parametrize(("num_experts", "world_size"), [(7, 3), (8, 2), (2, 5), (16, 16), (5, 1)])
def test_device_expert_map_equals_the_table(num_experts, world_size):
    experts = ExpertMap(num_experts, world_size)
    per, extra = divmod(num_experts, world_size)
    ids = torch.arange(16, dtype=torch.int32) % (num_experts + 1) - 1
    owner, first = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    _route[(1,)](ids, owner, first, S=SimpleNamespace(ALLREDUCE=False, EXPERTS_PER_RANK=per, EXTRA_EXPERTS=extra))
    assert torch.equal(owner, experts.owner(ids).int())
    assert first[:world_size].tolist() == [experts.first(rank) for rank in range(world_size)]


@triton.jit
def _tally(ids, pairs, messages, S: tl.constexpr):
    numbers = DispatchNumbers(0, 0, 0, 0, 2, 2, 1, 1, 0, 0, 0, 0, 2, 0, 0, 0, 1)
    p, m, invalid = routes.count_block(ids, 0, 2, 0, numbers, 1, S)
    tl.store(pairs + tl.arange(0, 4), p)
    tl.store(messages + tl.arange(0, 2), m)
    tl.store(messages + 2, invalid)


def test_tally_counts_pairs_and_messages():
    spec = SimpleNamespace(
        ALLREDUCE=False,
        FUSED_SHARED_EXPERT=0,
        EXPERTS_PER_RANK=2,
        EXTRA_EXPERTS=0,
        NUM_EXPERTS=4,
        NUM_EXPERTS_POW2=4,
        TOPK=2,
        TOPK_POW2=2,
        WORLD_SIZE=2,
        WORLD_SIZE_POW2=2,
        COUNT_BLOCK_ALL=1,
    )
    pairs, messages = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    _tally[(1,)](torch.tensor([[0, 3], [1, 0]]), pairs, messages, S=spec)
    assert pairs.tolist() == [2, 1, 0, 1]
    assert messages.tolist() == [2, 1, 0]
    _tally[(1,)](torch.tensor([[0, 4], [-1, -2]]), pairs, messages, S=spec)
    assert pairs.tolist() == [1, 0, 0, 0]
    assert messages.tolist() == [1, 0, 2]


@triton.jit
def _tally_all(ids, pairs, messages, end, S: tl.constexpr):
    numbers = DispatchNumbers(0, 0, 0, 0, 2, 2, 1, 1, 1, 2, 0, 0, 2, 0, 0, 0, 1)
    p, m, invalid = routes.count_all(ids, end, 1, numbers, 2, S)
    tl.store(pairs + tl.arange(0, 4), p)
    tl.store(messages + tl.arange(0, S.WORLD_SIZE_POW2), m, mask=tl.arange(0, S.WORLD_SIZE_POW2) < 2)
    tl.store(messages + 2, invalid)


@pytest.mark.parametrize("ranks, shared", [(2, 0), (2, 1), (64, 0), (64, 1)])
def test_counting_all_tokens_is_the_tally_of_all(ranks, shared):
    """Also where ranks are more than an integer has bits, and where rank 1's token 1 is its own shared expert's."""
    spec = SimpleNamespace(
        ALLREDUCE=False, FUSED_SHARED_EXPERT=shared, EXPERTS_PER_RANK=2, EXTRA_EXPERTS=0, NUM_EXPERTS=4,
        NUM_EXPERTS_POW2=4, TOPK=2, TOPK_POW2=2, WORLD_SIZE=ranks, WORLD_SIZE_POW2=ranks, COUNT_BLOCK=1
    )  # fmt: skip
    pairs, messages = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    _tally_all[(1,)](torch.tensor([[0, 3], [1, 0], [2, 2]]), pairs, messages, 2, S=spec)
    assert pairs.tolist() == [2, 1, 0, 1]
    assert messages.tolist() == [2, 1 + shared, 0]
    _tally_all[(1,)](torch.tensor([[0, 4], [-1, -2], [2, 9]]), pairs, messages, 3, S=spec)
    assert pairs.tolist() == [1, 0, 1, 0]
    assert messages.tolist() == [1, 1 + shared, 3]


@triton.jit
def _messages(ids, messages, begin, end, S: tl.constexpr):
    numbers = DispatchNumbers(0, 0, 0, 0, 2, 2, 1, 1, 0, 0, 0, 0, 2, 0, 0, 0, 1)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    tl.store(messages + r, routes.count_messages(ids, begin, end, 0, numbers, 2, S), mask=r < 2)


@pytest.mark.parametrize("ranks", [2, 64])
def test_messages_are_counted_without_pairs(ranks):
    spec = SimpleNamespace(
        ALLREDUCE=False, FUSED_SHARED_EXPERT=0, EXPERTS_PER_RANK=2, EXTRA_EXPERTS=0, NUM_EXPERTS=4, TOPK=2, TOPK_POW2=2,
        WORLD_SIZE=ranks, WORLD_SIZE_POW2=ranks,
    )  # fmt: skip
    messages, ids = torch.zeros(2, dtype=torch.int32), torch.tensor([[0, 3], [1, 0], [-1, 9], [2, 3]])
    for begin, end, expected in ((0, 2, [2, 1]), (0, 4, [2, 2]), (1, 3, [1, 0]), (2, 2, [0, 0])):
        _messages[(1,)](ids, messages, begin, end, S=spec)
        assert messages.tolist() == expected


@triton.jit
def _sums_before(out, SCAN: tl.constexpr):
    i = tl.arange(0, 4)
    goes = ((i == 0) | (i == 1))[:, None] & (tl.arange(0, 2) == 0)[None, :]
    goes = goes | (((i == 1) | (i == 2))[:, None] & (tl.arange(0, 2) == 1)[None, :])
    tl.store(out + 2 * i[:, None] + tl.arange(0, 2)[None, :], routes.sums_before(goes.to(tl.int32), SCAN))


@pytest.mark.parametrize("scan", [False, True])
def test_sums_of_the_rows_before(scan):
    out = torch.zeros(4, 2, dtype=torch.int32)
    _sums_before[(1,)](out, SCAN=scan)
    assert out.tolist() == [[0, 0], [1, 0], [2, 1], [2, 2]]


@triton.jit
def _count_before(ids, pairs, messages, S: tl.constexpr):
    k = tl.arange(0, 2)
    expert = tl.load(ids + 2 + k).to(tl.int32)
    numbers = DispatchNumbers(0, 0, 0, 0, 2, 2, 1, 1, 0, 0, 0, 0, 2, 0, 0, 0, 1)
    before, sent = routes.count_before(ids, 1, expert, 0, numbers, S)
    tl.store(pairs + k, before)
    tl.store(messages + k, sent)


def test_a_token_counts_what_is_before_it():
    spec = SimpleNamespace(
        ALLREDUCE=False,
        FUSED_SHARED_EXPERT=0,
        EXPERTS_PER_RANK=2,
        EXTRA_EXPERTS=0,
        NUM_EXPERTS=4,
        NUM_EXPERTS_POW2=4,
        TOPK=2,
        TOPK_POW2=2,
        WORLD_SIZE=2,
        WORLD_SIZE_POW2=2,
        COUNT_BLOCK_ALL=1,
    )
    pairs, messages = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    _count_before[(1,)](torch.tensor([[0, 3], [1, 0]]), pairs, messages, S=spec)
    assert (pairs.tolist(), messages.tolist()) == ([0, 1], [1, 1])
    _count_before[(1,)](torch.tensor([[2, -1], [2, 2]]), pairs, messages, S=spec)
    assert (pairs.tolist(), messages.tolist()) == ([1, 2], [0, 1])
