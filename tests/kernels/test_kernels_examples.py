"""The small integers in the kernels' docstrings, and the pieces of kernels on their own."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import moelink
from moelink.formats import get_format
from moelink.kernels import scale_tiles
from moelink.kernels.combine import finish
from moelink.kernels.dispatch import padding, pieces, receive_cached, unpack
from moelink.kernels.launch.constants import dispatch_spec
from moelink.kernels.launch.device import host_clock
from moelink.kernels.launch.grid import TokenSplit
from moelink.kernels.nodes import internode as network
from moelink.kernels.nodes import past
from moelink.kernels.numeric import round_bf16
from moelink.kernels.records import (
    CallContext,
    CombineInputs,
    CombineNumbers,
    CombineOutputs,
    DispatchOutputs,
    Groups,
)
from moelink.kernels.sync import ll_words as tagged
from moelink.kernels.sync import quiesce, signals
from moelink.memory import connect, create_all
from moelink.memory.protocol import CODE_TIMEOUT, PHASE_DISPATCH, SOME_MASKED, STATUS_OF_NOBODY
from moelink.memory.workspace import Workspace
from moelink.transports.base import DispatchRequest
from tests.support.patience import HANG
from tests.support.symmetric_ranks import one_process

SMALL = dict(num_experts=4, topk=2, hidden_size=8, max_tokens_per_rank=4)


@triton.jit
def _wait(words, poison, out, target, limit, CLOCK: tl.constexpr):
    r = tl.arange(0, 4)
    ok, lane, got = signals.wait_all(words + r, r < 3, target, poison, limit, CLOCK)
    tl.store(out, ok.to(tl.int64))
    tl.store(out + 1, lane.to(tl.int64))
    tl.store(out + 2, got)


def wait(words, target, limit=20_000_000, poison=0):
    out = torch.zeros(3, dtype=torch.int64)
    state = torch.tensor([poison])
    _wait[(1,)](torch.tensor([*words, -9]), state, out, target, limit, CLOCK=host_clock)
    return out.tolist()


def test_wait_blames_the_one_furthest_behind():
    assert wait([4, 7, 3], 4) == [0, 2, 3]
    assert wait([4, 7, 5], 4)[0] == 1


def test_wait_is_bounded_and_ends_at_poison():
    begin = time.monotonic()
    assert wait([4, 7, 3], 4, limit=10**11, poison=1)[0] == -1
    assert time.monotonic() - begin < HANG, "of a limit of 100 s"


@triton.jit
def _number_far_ranks(near, numbers, me, S: tl.constexpr):
    r = tl.arange(0, 8)
    tl.store(near + r, network.is_intra_node(r, me, S).to(tl.int32))
    tl.store(numbers + r, network.inter_node_number(r, me, S))


def test_ranks_of_other_nodes_are_numbered_from_the_next_node_on():
    near, numbers = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    for me, far in ((2, [4, 5, 0, 1]), (3, [4, 5, 0, 1]), (0, [2, 3, 4, 5]), (5, [0, 1, 2, 3])):
        _number_far_ranks[(1,)](near, numbers, me, S=SimpleNamespace(WORLD_SIZE=6, NODE_SIZE=2))
        assert [rank for rank in range(6) if not near[rank]] == sorted(far)
        assert [int(numbers[rank]) for rank in far] == [0, 1, 2, 3]
        assert set(numbers[:6].tolist()) <= {0, 1, 2, 3}, "in range for near ranks, too"


@triton.jit
def _quiesce(table, record, control, messages, out, limit, S: tl.constexpr):
    counts = tl.load(messages + tl.arange(0, 4))
    tl.store(out, quiesce.quiesce_dispatch(CallContext(table, record, control, 0, limit, 1), counts, counts * 0, S))


def test_what_is_refused_is_waited_for():
    workspace = Workspace(moelink.EPConfig(**SMALL, world_size=4, ranks_per_node=2))
    memory = create_all(["cpu"] * 4, workspace.nbytes)[0]
    spec = dispatch_spec(workspace, memory.local.device, input_dtype=torch.bfloat16, quantized=False, weights=False)
    regions = {region.name: region.view(memory.local) for region in workspace.regions}
    flags, control = regions["message_flag"], regions["control"]
    carrier = connect(memory, workspace, 0)
    messages, out = torch.tensor([3, 3, 3, 0], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    record = torch.zeros(16, dtype=torch.int64)
    flags[2, :3] = 1
    _quiesce[(1,)](carrier.table, record, control, messages, out, 10**11, S=spec)
    assert out.item() == 1, "neither near ranks nor slots past the count are waited for"
    flags[2, 2] = 0
    _quiesce[(1,)](carrier.table, record, control, messages, out, 20_000_000, S=spec)
    assert out.item() == 0
    assert record[:7].tolist() == [CODE_TIMEOUT, 0, 2, PHASE_DISPATCH, 1, 1, 0]
    carrier.close()


@triton.jit
def _tagged(words, value, out, call, limit, CLOCK: tl.constexpr):
    i = tl.arange(0, 2)
    tl.store(words + i, tagged.ll_word(call, tl.load(value + i)))
    rows = words + 2 * i[:, None] + i[None, :]
    every = (i >= 0)[:, None] & (i >= 0)[None, :]
    ok, row = tagged.wait_ll_words(rows, every, call, words + 4, limit, CLOCK)
    tl.store(out, ok)
    tl.store(out + 1, row)
    tl.store(out + 2 + 2 * i[:, None] + i[None, :], tagged.value_at(rows, every))


def test_tagged_words_wait_for_their_call():
    words = torch.tensor([0, 0, (3 << 32) + 7, (3 << 32) + 8, 0])
    value, out = torch.tensor([5, 6]).int(), torch.zeros(6, dtype=torch.int32)
    _tagged[(1,)](words, value, out, 3, 20_000_000, CLOCK=host_clock)
    assert words[0] == 3 * 2**32 + 5
    assert out.tolist() == [1, 0, 5, 6, 7, 8]
    words[3] -= 1 << 32
    _tagged[(1,)](words, value, out, 3, 20_000_000, CLOCK=host_clock)
    assert out[:2].tolist() == [0, 1], "the second row misses a word"


@triton.jit
def _wait_any(words, poison, out, target, limit, CLOCK: tl.constexpr):
    r = tl.arange(0, 4)
    ok, got = signals.wait_any(words + r, r < 3, target, poison, limit, CLOCK)
    tl.store(out + r, got)
    tl.store(out + 4, ok.to(tl.int64))


def test_wait_any_returns_with_the_first():
    for words, expected in (([4, 7, 3], [4, 7, 3, -1, 1]), ([1, 2, 3], [1, 2, 3, -1, 0])):
        out = torch.zeros(5, dtype=torch.int64)
        _wait_any[(1,)](torch.tensor([*words, 99]), torch.zeros(1).long(), out, 4, 20_000_000, CLOCK=host_clock)
        assert out.tolist() == expected


def test_messages_of_the_send_example():
    """Rank 0's ids [[0, 3], [1, 0], [-1, 2]]: slots, local ids, positions and counts as the docstring says."""
    transport = one_process(SMALL, 2)
    x = torch.arange(24.0).view(3, 8).bfloat16()
    ids = [torch.tensor([[0, 3], [1, 0], [-1, 2]]), torch.empty(0, 2, dtype=torch.int64)]
    recvs = transport.dispatch([DispatchRequest(x[: len(i)], i) for i in ids]).wait()
    workspace = Workspace(moelink.EPConfig(**SMALL, world_size=2))
    regions, message = workspace.regions, workspace.message

    def parts(destination, n):
        block = transport.ranks[destination].memory.local
        rows = regions["messages"].view(block)[0, :n]
        read = {p.name: rows[:, p.offset : p.end].contiguous().view(p.dtype).tolist() for p in message if p.nbytes}
        words = regions["counts"].view(block)[0]
        assert (words[: 8 + 2] >> 32).eq(1).all()
        counts = (words & 0xFFFFFFFF).tolist()
        return read["token"], read["ids"], read["positions"], counts[8:10], counts[1]

    assert parts(0, 2) == ([[0], [1]], [[0, -1], [1, 0]], [[0, 0], [0, 1]], [2, 1], 2)
    assert parts(1, 2) == ([[0], [2]], [[-1, 1], [-1, 0]], [[0, 0], [0, 0]], [1, 1], 2)
    assert recvs[0].src_info[:3].tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 0]]
    assert recvs[0].handle.routing.parts.slot_of.tolist() == [[0, 0], [1, -1], [-1, 1]]


@triton.jit
def _order(out, me, S: tl.constexpr):
    for i in tl.static_range(S.WORLD_SIZE):
        tl.store(out + i, pieces.nth_rank(i, me, S))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_no_two_ranks_store_to_one_at_a_time(world):
    orders = torch.zeros(world, world, dtype=torch.int32)
    for me in range(world):
        _order[(1,)](orders[me], me, S=SimpleNamespace(WORLD_SIZE=world))
    assert world != 4 or orders[2].tolist() == [3, 0, 1, 2]
    every = torch.arange(world, dtype=torch.int32)
    assert orders[:, -1].equal(every), "itself last"
    assert orders.sort(1).values.eq(every).all()
    assert orders.sort(0).values.eq(every[:, None]).all()


def test_rows_of_the_receive_example():
    """Counts [[2, 1], [1, 0]] with ALIGN 4: row_offsets [0, 4, 8], and rank 1's first pair of expert 0 in row 2."""
    fields = {**SMALL, "expert_alignment": 4}
    transport = one_process(fields, 2)
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    ids = [torch.tensor([[0, 1], [0, -1]]), torch.tensor([[0, -1]])]
    recvs = transport.dispatch([DispatchRequest(x[: len(i)], i) for i in ids]).wait()
    assert recvs[0].row_offsets.tolist() == [0, 4, 8]
    assert recvs[0].handle.counts.tolist() == [[2, 1], [1, 0]]
    assert recvs[0].src_info[2].tolist() == [1, 0, 0]
    assert recvs[0].src_info[[3, 5, 6, 7]].eq(-1).all()


def test_rows_of_the_masked_examples():
    """Counts [[2, 1], [1, 0]] with 2 rows a group: row_offsets [0, 2, 4], 3 rows are kept, 1 is lost. With 4 rows a
    group, and 3 and 2 rows for expert 0, rank 1's first one goes to row 3, its second one is dropped."""
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    for size, ids, rows in (
        (2, ([[0, 1], [0, -1]], [[0, -1]]), [[0, 2], [1, -1], [-2, -1]]),
        (4, ([[0, -1], [0, -1], [0, 1]], [[0, -1], [0, -1]]), [[0, -1], [1, -1], [2, 4], [3, -1], [-2, -1]]),
    ):
        transport = one_process({**SMALL, "layout": "masked", "rows_per_expert": size}, 2)
        given = [torch.tensor(each) for each in ids]
        recv = transport.dispatch([DispatchRequest(x[: len(i)], i) for i in given]).wait()[0]
        assert recv.row_offsets.tolist() == [0, size, 2 * size]
        assert (int(recv.num_recv_tokens), int(recv.overflow)) == (len(rows), 1)
        noted = recv.handle.routing.parts.rows_of_message
        assert [noted[rank, m].tolist() for rank in range(2) for m in range(len(ids[rank]))] == rows


@triton.jit
def _places(out, S: tl.constexpr):
    c = tl.arange(0, 4)
    tl.store(out + c, unpack.scale_places(tl.full([1], 5, tl.int32), tl.full([1], 1, tl.int32), 0, c, 4, S))


def test_places_of_scales_in_columns_of_each_group():
    out = torch.zeros(4, dtype=torch.int64)
    _places[(1,)](out, S=SimpleNamespace(SCALE_LAYOUT=1, MASKED=True, SCALE_WIDTH=3))
    assert out[:3].tolist() == [13, 17, 12 + 2 * 4 + 1]


@triton.jit
def _first_mismatched(values, out, N: tl.constexpr):
    r = tl.arange(0, N)
    tl.store(out, signals.first_mismatched(tl.load(values + r), r < N - 1))


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    ("values", "blamed"),
    [([3, 3, 5], 2), ([5, 6, 7], 1), ([5, 6, 6], 0), ([3, 5, 3], 1), ([0, 0, 0], 4), ([2**31 - 1, 2**31 - 1, 0], 2)],
)
def test_the_first_mismatched_rank_is_the_same_for_all(values, blamed):
    out = torch.zeros(1, dtype=torch.int32)
    _first_mismatched[(1,)](torch.tensor([*values, 9], dtype=torch.int32), out, N=4)
    assert out.item() == blamed


@triton.jit
def _noted(rows, sizes, starts, out, capacity, S: tl.constexpr):
    i = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    e = tl.arange(0, 4)
    found = receive_cached._noted_rows(
        rows + i, i >= 0, tl.load(sizes + e), tl.load(starts + e), tl.load(starts + e) * 2, capacity, S
    )
    for n in tl.static_range(4):
        tl.store(out + n * 8 + i, found[n].to(tl.int32))


def test_noted_rows_are_in_their_groups():
    """Groups of 3, 0 and 5 rows that start at 2, 6 and 6; what is in no group, or past capacity 10, is no row."""
    sizes, starts = (torch.tensor(v, dtype=torch.int32) for v in ([3, 0, 5, 0], [2, 6, 6, 12]))
    rows = torch.tensor([[2, 4, 6, -1], [5, -2, 10, 1]], dtype=torch.int32)
    out = torch.zeros(4, 2, 4, dtype=torch.int32)
    _noted[(1,)](rows, sizes, starts, out, 10, S=SimpleNamespace(SCALE_LAYOUT=2, MASKED=False, ROWS_PER_MESSAGE_POW2=4))
    _, keep, inner, block = out.tolist()
    assert keep == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert (inner[0][:3], block[0][:3]) == ([0, 2, 0], [4, 4, 12])


def test_noted_rows_are_in_their_masked_groups():
    """Groups of 4 rows, of which 3, 0 and 4 are filled. Row 3 is none, nor is any in group 1 or past the last group."""
    sizes, starts = (torch.tensor(v, dtype=torch.int32) for v in ([3, 0, 4, 0], [0, 4, 8, 12]))
    rows = torch.tensor([[2, 3, 4, -1], [11, -2, 12, 99]], dtype=torch.int32)
    out = torch.zeros(4, 2, 4, dtype=torch.int32)
    _noted[(1,)](rows, sizes, starts, out, 4, S=SimpleNamespace(MASKED=True, ROWS_PER_MESSAGE_POW2=4))
    _, keep, inner, block = out.tolist()
    assert keep == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert (inner[0][0], block[0][0]) == (2, 0)
    assert (inner[1][0], block[1][0]) == (3, 16)


def test_what_a_call_sent_is_noted_for_calls_over_its_routing():
    """The example of ``kernels.dispatch.send_cached``, for rank 0 of 2, whose seventh call it is."""
    transport = one_process(SMALL, 2)
    ids = torch.tensor([[0, 3], [1, 0], [-1, 2]])
    requests = [DispatchRequest(torch.ones(3, 8, dtype=torch.bfloat16), ids) for _ in range(2)]
    for _ in range(7):
        recv = transport.dispatch(requests).wait()[0]
    transport.dispatch(requests).wait()
    again = transport.dispatch([dataclasses.replace(r, routing=recv, topk_ids=ids) for r in requests]).wait()[0]
    for plan in (recv.handle.routing, again.handle.routing):
        assert plan.parts.slot_of.tolist() == [[0, 0], [1, -1], [-1, 1]]
        assert plan.parts.sent.tolist() == [2, 2, 7]
    words = Workspace(transport.ranks[0].config).regions["counts"].view(transport.ranks[1].memory.local)[0]
    assert [int(word) >> 32 for word in words] == [9] * 8 + [9] * 2
    assert [int(word) & 0xFFFFFFFF for word in words[:8]] == [0, 2, 3, 0, 0, 3, 7, 0]


@triton.jit
def _who(out, num_programs, most, num_local, S: tl.constexpr):
    pad, pads = padding.who_pads(tl.program_id(0), num_programs, most, num_local, S)
    tl.store(out + 2 * tl.program_id(0), pad)
    tl.store(out + 2 * tl.program_id(0) + 1, pads)


def test_padding_is_for_programs_without_messages():
    out = torch.zeros(133, 2, dtype=torch.int32)
    _who[(133,)](out, 133, 32, 128, S=SimpleNamespace(WORLD_SIZE=2, FUSED_SHARED_EXPERT=0))
    assert out[:, 0].tolist() == [-1] * 65 + list(range(68))
    assert set(out[:, 1].tolist()) == {68}
    _who[(133,)](out, 133, 35, 128, S=SimpleNamespace(WORLD_SIZE=2, FUSED_SHARED_EXPERT=0))
    assert out.tolist() == [[program, 133] for program in range(133)]
    _who[(1,)](out, 1, 0, 0, S=SimpleNamespace(WORLD_SIZE=2, FUSED_SHARED_EXPERT=0))
    assert out[0].tolist() == [0, 1], "a rank without experts marks rows of no token"


@triton.jit
def _pad_tiles(scales, sizes, starts, aligned, bases, num_programs, S: tl.constexpr):
    g = tl.arange(0, 4)
    groups = Groups(tl.load(sizes + g), tl.load(starts + g), tl.load(aligned + g), tl.load(bases + g), 2, 8)
    padding.pad_tiles(scales, groups, _Numbers(3, 400), tl.program_id(0), num_programs, S)


class _Numbers(NamedTuple):
    num_local_experts: Any
    capacity: Any
    scale_rows: Any = None
    first_expert: Any = None


@triton.jit
def _ids_past_a_relay(out, ids, expert, numbers, S: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(ids, past.ids_for_all(expert))
    tl.store(out + i, past.own_ids(tl.load(ids + i), numbers, S))


@pytest.mark.parametrize("first, local", [(6, 0), (4, -1), (0, -1)])
def test_ids_past_a_masked_relay_count_over_all_ranks(first, local):
    """Expert 6, of two a rank, has local id 0 at rank 3. Local ids, and -1, stay."""
    spec = SimpleNamespace(TWO_LEVEL=True, NETWORK="ring")
    ids, out = torch.tensor([0, -1, 1, 0], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    _ids_past_a_relay[(1,)](out, ids, 6, _Numbers(2, 0, first_expert=first), S=spec)
    assert ids[0] == -8
    assert out.tolist() == [local, -1, 1, 0]


@triton.jit
def _beside_status(out, received, control, status, S: tl.constexpr):
    tl.store(out + tl.arange(0, 4), quiesce.beside_status(received, control, 3, 1, status, S))


@pytest.mark.parametrize("status, told", [(0, [3, 2, 0, 4]), (1, [5, 5, 5, 5])])
def test_heads_tell_of_rows_past_a_masked_relay(status, told):
    """Of nodes of two, rank 2 is masked. Rank 3 tells rank 0 of the rows that go there directly, and its peer, rank 1,
    of those of its node."""
    block, received = torch.zeros(64, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
    block[SOME_MASKED], block[40 + 2] = 1, STATUS_OF_NOBODY
    received[0:8:2], received[10] = torch.tensor([3, 1, 0, 4], dtype=torch.int32), 2
    spec = SimpleNamespace(
        TWO_LEVEL=True, NETWORK="ring", WORLD_SIZE=4, WORLD_SIZE_POW2=4, NODE_SIZE=2, NODES=2, MAX_TOKENS=5,
        OFFSET_CONTROL=0, OFFSET_COMBINE_STATUS=320, SENDS_SUMS=True, LAMPORT_TOKENS=0,
    )  # fmt: skip
    out = torch.zeros(4, dtype=torch.int64)
    _beside_status[(1,)](out, received, block, status, S=spec)
    assert (out // 16).tolist() == told


@pytest.mark.parametrize("programs", [1, 3, 4, 9, 50])
def test_the_rest_of_each_tile_is_zeroed_by_however_many_ctas(programs):
    """A shared group of 2 rows and groups of 120, 0 and 250, aligned to 8 and of 18 words: 18 steps for each tile."""
    layout, sizes = get_format("nvfp4").scale_layout, torch.tensor([2, 120, 0, 250], dtype=torch.int32)
    aligned = (sizes + 7) // 8 * 8
    offsets = torch.cat((aligned.new_zeros(1), aligned.cumsum(0, dtype=torch.int32)))
    padded = torch.full(layout.shape(400, 70, 4), 7, dtype=torch.uint8)
    expected = padded.clone()
    layout.clear_padding(expected, row_offsets=offsets, group_sizes=sizes)

    def routed(of_groups):
        return torch.nn.functional.pad(of_groups[1:], (0, 1))

    spec = SimpleNamespace(SCALE_WIDTH=70, ROW_ALIGNMENT=8, FUSED_SHARED_EXPERT=1, MAX_LOCAL_EXPERTS_POW2=4)
    given = map(routed, (sizes, offsets[:-1], aligned, layout.bases(offsets)))
    _pad_tiles[(programs,)](padded, *given, programs, S=spec)
    assert (expected == 0).any()
    assert (expected == 7).any()
    assert torch.equal(padded, expected)


def test_words_of_a_tile_are_zeroed_by_their_rows():
    """The example of ``pad_tiles``: 121 real rows of 144."""
    scales, none = torch.full((2, 128), 7, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    sizes, aligned = (torch.tensor([rows, 0, 0, 0], dtype=torch.int32) for rows in (121, 144))
    spec = SimpleNamespace(SCALE_WIDTH=4, ROW_ALIGNMENT=24, FUSED_SHARED_EXPERT=0, MAX_LOCAL_EXPERTS_POW2=4)
    _pad_tiles[(1,)](scales, sizes, none, aligned, none, 1, S=spec)
    assert scales[0].eq(0).nonzero().flatten().tolist() == list(range(103, 128, 4))
    assert scales[0, :125:4].eq(7).all()
    assert scales[1].eq(0).all()


@triton.jit
def _tile_places(rows, words, places):
    word = tl.arange(0, 128)
    row = scale_tiles.row_of_word(word)
    tl.store(rows + word, row)
    tl.store(words + word, scale_tiles.word_in_tiles(0, row))
    tl.store(places + word, scale_tiles.place_in_tiles(1, word, 2))


def test_words_and_scales_are_found_in_tiles():
    """The example of ``scale_tiles``, and the layout's own order."""
    rows, words, places = torch.empty(3, 128, dtype=torch.int32)
    _tile_places[(1,)](rows, words, places)
    assert rows[:6].tolist() == [0, 32, 64, 96, 1, 33]
    assert words.tolist() == list(range(128))
    layout, row = get_format("mxfp8").scale_layout, torch.arange(128)
    tiles, scales = torch.zeros(layout.shape(128, 8, 1), dtype=torch.uint8), torch.zeros(128, 8, dtype=torch.uint8)
    scales[:, 6] = row
    layout.scatter(tiles, scales, rows=row, groups=row * 0, row_offsets=torch.tensor([0, 128]))
    assert places[33] == 512 + 22
    assert torch.equal(tiles.flatten()[places.long()], row.to(torch.uint8))


@triton.jit
def _pad_rows(tokens, scales, info, weights, shared, capacity, program, num_programs, S: tl.constexpr):
    e = tl.arange(0, 4)
    size = tl.where(e == 0, 3, tl.where(e == 2, 1, 0))
    starts = shared * 4 + tl.where(e > 0, 4, 0)
    groups = Groups(size, starts, (size + 3) // 4 * 4, starts, shared, shared * 4)
    outputs = DispatchOutputs(tokens, scales, None, None, info, None, weights, None, None, None, None)
    padding.pad_rows(outputs, groups, _Numbers(3, capacity, 12), program, num_programs, S)


def _padded(programs, of, shared, capacity):
    """Groups of 3, 0 and 1 rows behind ``shared``, aligned to 4: rows of 6 words, scales in columns."""
    outputs = [torch.full(shape, 7, dtype=torch.int32) for shape in ((12, 6), (3, 12), (12, 3), (12,))]
    spec = SimpleNamespace(
        MAX_LOCAL_EXPERTS_POW2=4, FUSED_SHARED_EXPERT=shared, ROW_ALIGNMENT=4, ROW_WORDS=6, BLOCK_SIZE=4, SCALE_WIDTH=3,
        SCALE_WIDTH_POW2=4, SCALE_LAYOUT=1, MASKED=False, SCALES_LATER=False, HAS_WEIGHTS=True, SCALE_DTYPE=tl.int32,
        **{f"{name}_POINTER": tl.pointer_type(tl.int32) for name in ("WORD", "SCALE", "WEIGHT")},
    )  # fmt: skip
    for program in programs:
        _pad_rows[(1,)](*outputs, shared, capacity, program, of, S=spec)
    return outputs


def test_ctas_share_the_groups_that_have_padding():
    """The example of ``pad_rows``: groups of 3, 0 and 1 rows that start at 0, 4 and 4."""
    zeroed = [_padded([program], 5, 0, 12)[0].eq(0).all(1).nonzero().flatten().tolist() for program in range(5)]
    assert zeroed == [[3], [5, 7], [], [6], []]


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_padding_rows_are_zeroed_by_however_many_ctas(count):
    """A shared group of 1 row, and row 11, past the capacity, which stays."""
    tokens, scales, info, weights = _padded(range(count), count, 1, 11)
    padded = torch.zeros(12, dtype=torch.bool)
    padded[[1, 2, 3, 7, 9, 10]] = True
    assert tokens.eq(0).all(1).tolist() == scales.eq(0).all(0).tolist() == weights.eq(0).tolist() == padded.tolist()
    assert info.eq(-1).all(1).tolist() == padded.tolist()
    assert all(out[~padded].eq(7).all() for out in (tokens, scales.T, info, weights))


@triton.jit
def _count(control, seen):
    program = tl.program_id(0)
    tl.store(seen + program, signals.calls_made(control, 1))
    signals.count_arrival(control, 1, program, 3, "relaxed")


def test_a_call_is_counted_by_all_its_programs():
    control, seen = torch.tensor([0, 4 << 20]), torch.zeros(3, dtype=torch.int64)
    _count[(3,)](control, seen)
    assert seen.tolist() == [4, 4, 4]
    assert control.tolist() == [0, 5 << 20]


@triton.jit
def _finish(y, out, shared, bias, S: tl.constexpr):
    c = tl.arange(0, 2)
    numbers = CombineNumbers(0, 0, 0, 4, 1, 3, 4, 0, 1, 0, 0, 0, 1)
    inputs = CombineInputs(y, y, y, y, shared, bias)
    finish.finish(c * 0 + 1.5, CombineOutputs(out, (bias,)), inputs, 3, c, numbers, S)


def test_a_result_is_its_rows_and_what_is_added():
    y, out = torch.full((1, 2), 0.25), torch.zeros(4, 2)
    spec = SimpleNamespace(
        HIDDEN_SIZE=2,
        SUM_DTYPE=tl.float32,
        OUT_DTYPE=tl.float32,
        NATIVE_CASTS=False,
        FUSED_SHARED_EXPERT=1,
        HAS_SHARED=True,
        EPILOGUE="bias",
        HOOK=None,
    )
    _finish[(1,)](y, out, torch.full((4, 2), 2.0), torch.ones(2), S=spec)
    assert out.tolist() == [[0.0, 0.0]] * 3 + [[4.75, 4.75]]


def test_cut():
    assert TokenSplit.of(3, programs=8, world_size=4) == TokenSplit(1, 2, 6)
    assert TokenSplit.of(20, programs=8, world_size=4) == TokenSplit(3, 1, 7)
    assert TokenSplit.of(0, programs=2, world_size=4).programs == 0
    for tokens in range(40):
        for programs in (1, 3, 7):
            for ranks in (1, 2, 8):
                cut = TokenSplit.of(tokens, programs=programs, world_size=ranks)
                assert cut.programs <= programs
                assert cut.programs * cut.tokens_per_program >= tokens * cut.split
                assert (cut.programs - cut.split) * cut.tokens_per_program < tokens * cut.split or tokens == 0
                assert cut.split == 1 or cut.tokens_per_program == 1


@triton.jit
def _round(x, out):
    i = tl.arange(0, 1024)
    tl.store(out + i, round_bf16(tl.load(x + i), False))


def test_bf16_rounding_equals_torch():
    bits = torch.randint(-(2**31), 2**31 - 1, (1024,), generator=torch.Generator().manual_seed(0)).int()
    x = bits.view(torch.float32)
    x[:3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("inf")])
    out = torch.empty(1024, dtype=torch.bfloat16)
    _round[(1,)](x, out)
    same = (out == x.bfloat16()) | (out.isnan() & x.isnan())
    assert same.all()
    assert out[:2].tolist() == [1.0, 1 + 2**-6]


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("options", [
    {}, {"pre_reduce": False}, {"dispatch_format": "fp8_block128"}, {"layout": "rank"},
])  # fmt: skip
@pytest.mark.parametrize("most", [1, 129, 4096, 4681, 8192])
def test_workspace_is_within_its_bound(ranks, options, most):
    fields = {**dict(num_experts=256, topk=8, hidden_size=7168, max_tokens_per_rank=most), **options}
    config = moelink.EPConfig(**fields, world_size=ranks)
    rows = ranks if config.pre_reduce else max(ranks, config.topk)
    bound = 1.1 * most * (ranks * config.dispatch_message.nbytes + rows * config.combine_row_bytes) + 64 * 2**20
    assert Workspace(config).nbytes <= bound


def test_workspace_does_not_depend_on_the_rank():
    for more in ({}, {"pre_reduce": False, "ranks_per_node": 1}):
        fields = {**SMALL, "num_experts": 7, **more}
        configs = [moelink.EPConfig(**fields, world_size=3, rank=rank) for rank in range(3)]
        assert len({Workspace(config).regions for config in configs}) == 1


@triton.jit
def _fill_unused(ids, S: tl.constexpr):
    padding.fill_unused_ids(ids, 2, 4, 0, 1, S)


def test_unused_ids_of_the_example():
    ids = torch.zeros(15, dtype=torch.int32)
    _fill_unused[(1,)](ids, S=SimpleNamespace(TOPK=3, TOPK_POW2=4))
    assert ids.tolist() == [0] * 6 + [-1] * 6 + [0] * 3
