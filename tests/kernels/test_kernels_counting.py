"""Kernels' counting and their map of experts on their own, by the small integers of their docstrings."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import moelink
from moelink.kernels.dispatch import route as routes
from moelink.kernels.dispatch import row_offsets as offsets
from moelink.kernels.launch.constants import dispatch_spec, message_block
from moelink.kernels.records import CallContext, DispatchNumbers
from moelink.kernels.sync.signals import own_block
from moelink.memory import connect, create_all
from moelink.memory.protocol import CODE_TIMEOUT, COUNT_HEADER, PHASE_DISPATCH
from moelink.memory.workspace import Workspace
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
    p, m, invalid = routes.count_tokens(ids, 0, 2, 0, numbers, 1, True, S)
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
    p, m, invalid = routes.count_tokens(ids, 0, end, 1, numbers, 2, True, S)
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
def _messages(ids, messages, begin, end, BLOCK: tl.constexpr, S: tl.constexpr):
    numbers = DispatchNumbers(0, 0, 0, 0, 2, 2, 1, 1, 0, 0, 0, 0, 2, 0, 0, 0, 1)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    _, m, _ = routes.count_tokens(ids, begin, end, 0, numbers, BLOCK, False, S)
    tl.store(messages + r, m, mask=r < 2)


@pytest.mark.parametrize("ranks, block", [(2, 2), (64, 2), (2, 16)])
def test_messages_are_counted_without_pairs(ranks, block):
    """Of few tokens at a time ranks are looked for one by one, of many with a bit for each."""
    spec = SimpleNamespace(
        ALLREDUCE=False, FUSED_SHARED_EXPERT=0, EXPERTS_PER_RANK=2, EXTRA_EXPERTS=0, NUM_EXPERTS=4, TOPK=2, TOPK_POW2=2,
        WORLD_SIZE=ranks, WORLD_SIZE_POW2=ranks,
    )  # fmt: skip
    messages, ids = torch.zeros(2, dtype=torch.int32), torch.tensor([[0, 3], [1, 0], [-1, 9], [2, 3]])
    for begin, end, expected in ((0, 2, [2, 1]), (0, 4, [2, 2]), (1, 3, [1, 0]), (2, 2, [0, 0])):
        _messages[(1,)](ids, messages, begin, end, BLOCK=block, S=spec)
        assert messages.tolist() == expected


@triton.jit
def _own_messages(ids, messages, BLOCK: tl.constexpr, S: tl.constexpr):
    numbers = DispatchNumbers(0, 0, 0, 0, 2, 2, 1, 1, 2, 3, 0, 0, 2, 0, 0, 0, 1)
    _, m, _ = routes.count_tokens(ids, 0, 4, 1, numbers, BLOCK, False, S)
    tl.store(messages + tl.arange(0, 2), m)


@pytest.mark.parametrize("block", [2, 16])
def test_own_tokens_of_the_shared_expert_are_messages(block):
    """Rank 1's token 2 is its own shared expert's, whatever its ids."""
    spec = SimpleNamespace(
        ALLREDUCE=False, FUSED_SHARED_EXPERT=1, EXPERTS_PER_RANK=2, EXTRA_EXPERTS=0, NUM_EXPERTS=4, TOPK=2, TOPK_POW2=2,
        WORLD_SIZE=2, WORLD_SIZE_POW2=2,
    )  # fmt: skip
    messages = torch.zeros(2, dtype=torch.int32)
    _own_messages[(1,)](torch.tensor([[0, 1], [1, 0], [-1, 0], [2, 3]]), messages, BLOCK=block, S=spec)
    assert messages.tolist() == [3, 2]


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


SENDERS = dict(num_experts=4, topk=2, hidden_size=8, max_tokens_per_rank=8, layout="rank")
SOON, LATER = 5 * 10**9, 20_000_000  # ticks of the host's clock: of a wait that ends, and of one that must expire


class Counting:
    """Two ranks of layout "rank" on one node, of which rank 0 counts."""

    def __init__(self) -> None:
        self.workspace = Workspace(moelink.EPConfig(**SENDERS, world_size=2))
        self.memories = create_all(["cpu"] * 2, self.workspace.nbytes)
        self.peers = connect(self.memories[0], self.workspace, 0)
        self.record = torch.zeros(16, dtype=torch.int64)
        self.spec = dispatch_spec(
            self.workspace, torch.device("cpu"), input_dtype=torch.bfloat16, quantized=False, weights=False
        )

    def region(self, name: str, rank: int = 0) -> torch.Tensor:
        """Region ``name`` of ``rank``."""
        return self.workspace.regions[name].view(self.memories[rank].local)

    def run(self, kernel, *args, call=3, limit=SOON, **sizes):
        """Run a kernel as rank 0 in ``call``. Return the six numbers that it may write."""
        out = torch.zeros(6, dtype=torch.int32)
        spec = dataclasses.replace(self.spec, **sizes)
        kernel[(1,)](self.peers.table, self.record, self.region("control"), *args, out, call, limit, S=spec)
        return out.tolist()


@pytest.fixture
def counting():
    made = Counting()
    yield made
    made.peers.close()


@triton.jit
def _count_own_block(table, record, control, ids, begin, program, out, call, limit, S: tl.constexpr):
    ctx = CallContext(table, record, control, 0, limit, tl.cast(call, tl.int64))
    numbers = DispatchNumbers(0, 0, 0, 2, 2, 2, 1, 1, 0, 0, 0, 0, 2, 0, 0, 0, 1)
    routes.count_own_block(ctx, own_block(control, S), ids, begin, 3, numbers, program, S)


@pytest.mark.parametrize("call", [3, 2**38 + 1])
def test_messages_alone_are_a_word_for_each_rank(counting, call):
    """2 messages of call 3 are 3 * 2**24 + 2; no other CTA's words change."""
    ids, words = torch.tensor([[0, 3], [1, 0], [-1, 9]]), counting.region("block_counts")
    words[:] = -7
    counting.run(_count_own_block, ids, 0, 1, call=call)
    assert words[:3].tolist() == [[-7, -7], [call * 2**24 + 2, call * 2**24 + 1], [-7, -7]]
    counting.run(_count_own_block, ids, 1, 0, call=call)
    assert words[0].tolist() == [call * 2**24 + 1, call * 2**24]


@triton.jit
def _sum_block_counts(table, record, control, programs, out, call, limit, S: tl.constexpr):
    ctx = CallContext(table, record, control, 0, limit, tl.cast(call, tl.int64))
    ok, _, messages = routes.sum_block_counts(ctx, own_block(control, S), programs, S)
    tl.store(out, ok)
    tl.store(out + 1 + tl.arange(0, 2), messages)


@triton.jit
def _send_firsts(table, record, control, programs, out, call, limit, S: tl.constexpr):
    most = routes.send_firsts(table, own_block(control, S), 0, programs, S)
    tl.store(out + tl.arange(0, 2), most)


THREE_CTAS = torch.tensor([[2, 1], [0, 3], [1, 1]])


@pytest.mark.parametrize("step", [512, 2])
def test_a_cta_sums_the_messages_of_those_before_it(counting, step):
    """CTA 2 starts at slots [2, 4]. What no CTA has written in this call yet, from it on, is neither awaited nor
    counted."""
    words = counting.region("block_counts")
    words[:] = 2 * 2**24 + 5
    words[:2] = 3 * 2**24 + THREE_CTAS[:2]
    for programs, expected in ((0, [0, 0]), (1, [2, 1]), (2, [2, 4])):
        assert counting.run(_sum_block_counts, programs, SENDERS_PER_STEP=step)[:3] == [1, *expected]
    words[2:4] = 3 * 2**24 + THREE_CTAS[2]
    for programs, expected in ((2, [2, 4]), (3, [3, 5])):
        assert counting.run(_sum_block_counts, programs, SENDERS_PER_STEP=step)[:3] == [1, *expected]


@pytest.mark.parametrize("other", [2, 4])
def test_messages_of_another_call_are_waited_for(counting, other):
    words = counting.region("block_counts")
    words[:3] = 3 * 2**24 + THREE_CTAS
    words[1, 0] = other * 2**24
    assert counting.run(_sum_block_counts, 1, limit=LATER)[:3] == [1, 2, 1]
    assert counting.run(_sum_block_counts, 2, limit=LATER)[0] == 0
    assert counting.record[:7].tolist() == [CODE_TIMEOUT, 0, 0, PHASE_DISPATCH, 3, 3, 2]
    counting.region("poison")[0] = 1
    assert counting.run(_sum_block_counts, 2)[0] == -1


def test_every_rank_is_told_where_messages_of_each_cta_begin(counting):
    """[0, 2, 2, 3] to rank 0, and [0, 1, 4, 5] to rank 1; of one CTA no more than 2 and 3 messages."""
    counting.region("block_counts")[:3] = 3 * 2**24 + THREE_CTAS
    assert counting.run(_send_firsts, 3)[:2] == [2, 3]
    firsts = [counting.region("firsts", rank)[0, :4].tolist() for rank in range(2)]
    assert firsts == [[0, 2, 2, 3], [0, 1, 4, 5]]


@triton.jit
def _wait_for_counts(table, record, control, every, out, call, limit, S: tl.constexpr):
    ctx = CallContext(table, record, control, 0, limit, tl.cast(call, tl.int64))
    numbers = DispatchNumbers(0, 0, 0, 2, 2, 2, 1, 1, 0, 0, 0, 0, 2, 0, 0, 0, 1)
    if every:
        tl.store(out, offsets.wait_for_expert_counts(ctx, numbers, S))
    else:
        arrived, _, _, _ = offsets.wait_for_counts(ctx, 0, 1, numbers, S)
        tl.store(out, arrived)


def test_headers_are_waited_for_without_the_words_of_experts(counting):
    """Only who writes offsets and totals waits for all words of every source."""
    counts = counting.region("counts")
    counts[:] = 2 << 32
    counts[:, :COUNT_HEADER] = 3 << 32
    assert counting.run(_wait_for_counts, 0, limit=LATER)[0] == 1
    counts[0, COUNT_HEADER:] = 3 << 32
    counts[1, COUNT_HEADER] = 3 << 32
    assert counting.run(_wait_for_counts, 1, limit=LATER)[0] == 0
    assert counting.record[:7].tolist() == [CODE_TIMEOUT, 0, 1, PHASE_DISPATCH, 3, 3, 2]
    counts[1, COUNT_HEADER + 1] = 3 << 32
    assert counting.run(_wait_for_counts, 1)[0] == 1


@pytest.mark.parametrize("fields, pairs", [
    ({"layout": "expert"}, True), ({"layout": "rank"}, False), ({"layout": "rank", "zero_copy": True}, False),
    ({"layout": "rank", "ranks_per_node": 2}, True),
])  # fmt: skip
def test_which_senders_count_pairs(fields, pairs):
    workspace = Workspace(moelink.EPConfig(**{**SENDERS, **fields}, world_size=4))
    assert workspace.senders_count_pairs == pairs
    assert workspace.regions["block_counts"].shape[1] == (4 + 4 if pairs else 4)
    assert workspace.regions["block_counts"].dtype == (torch.int32 if pairs else torch.int64)


def test_tokens_counted_at_a_time_where_messages_are_counted_alone():
    """Of top-8, 256 for 8 ranks, 32 for 64 ranks, 2 for 2 tokens."""

    def block(ranks, topk=8, most=4096):
        fields = {**SENDERS, "num_experts": 64, "topk": topk, "max_tokens_per_rank": most}
        return message_block(moelink.EPConfig(**fields, world_size=ranks), ranks)

    assert [block(8), block(32), block(64), block(8, most=2)] == [256, 256, 32, 2]
    assert [block(8, topk=9), block(8, topk=1), block(64, topk=1)] == [128, 256, 256]


@pytest.mark.parametrize("zero_copy, sizes", [
    (False, [(2, 1), (2, 1), (4, 1), (4, 4)]), (True, [(2, 8), (2, 8), (8, 16), (4, 16)]),
])  # fmt: skip
def test_messages_at_a_time_in_layout_rank(zero_copy, sizes):
    """What a sender publishes and a receiver reads at a time on a GPU, of 64, 256, 1024 and 4096 tokens at most."""
    for most, expected in zip((64, 256, 1024, 4096), sizes, strict=True):
        fields = {**SENDERS, "max_tokens_per_rank": most, "zero_copy": zero_copy}
        workspace = Workspace(moelink.EPConfig(**fields, world_size=2))
        spec = dispatch_spec(
            workspace, torch.device("cuda"), input_dtype=torch.bfloat16, quantized=False, weights=False
        )
        assert tuple(int(getattr(n, "value", n)) for n in (spec.TOKENS_PER_BATCH, spec.MESSAGES_PER_STEP)) == expected
