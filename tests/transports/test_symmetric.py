"""The symmetric transport, its kernels interpreted: single options, and when things go wrong."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

import moelink
from moelink.hooks import Hook
from moelink.memory import create_all
from moelink.memory.workspace import Workspace
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric import SymmetricTransport
from tests.support.cases import (
    Case,
    Result,
    Setup,
    by_setup,
    check_case,
)
from tests.support.patience import HANG
from tests.support.symmetric_ranks import combine_requests, dispatch_requests, note_launches, one_process, run_case

BF16 = Setup("bf16")


def check_all(cases, world_size):
    for setup, group in by_setup(cases):
        transport = one_process(setup.fields, world_size)
        for case in group:
            check_case(case, world_size, run_case(transport, case, list(range(world_size))))
        transport.close()


@pytest.mark.quick("a sender rounds a row up, or fills a word up")
@pytest.mark.parametrize("fmt", ["fp8_token", "fp8_block128_e8m0"])
def test_a_scale_of_a_row_and_of_a_word(fmt, filled_memory):
    """Past the end of a row, and in the rest of a row's last word, nothing is left of other data."""
    check_all(
        [Case(Setup(fmt), "uniform", small=True), Case(Setup(fmt, (("layout", "rank"),)), "holes", small=True)], 2
    )


def test_debug_mode_where_nothing_travels(monkeypatch):
    monkeypatch.setenv("MOELINK_DEBUG", "1")
    check_all([Case(Setup("bf16", (("mode", "allreduce"),)), "uniform", small=True)], 2)


def test_ranks_of_one_gpu_take_turns_in_the_current_stream(monkeypatch):
    """As on a GPU with several ranks, except that kernels are interpreted."""
    case, world_size = Case(Setup("bf16"), "uniform"), 3
    transport = one_process(case.setup.fields, world_size)
    for rank in transport.ranks:
        rank.stream, rank.launcher._stream_of = object(), lambda _: 7  # to use this stream is an error
        rank._latest_handle, rank._index = 7, 0
    transport._on_cpu = False
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launched = note_launches(monkeypatch)
    for _ in range(2):
        check_case(case, world_size, run_case(transport, case, list(range(world_size)), fused=True))
    call = [
        [f"ep_{phase}_async_kernel"] * world_size + [f"ep_{phase}_wait_kernel", "ep_grant_credits_kernel"] * world_size
        for phase in ("dispatch", "combine")
    ]
    assert launched == (call[0] + call[1]) * 2
    transport.raise_error()
    for rank in transport.ranks:
        rank.stream = None
    transport.close()


def one_rank(rank, world_size=2, *, memories, timeout=0.3, **options):
    setup = Setup("bf16", tuple(options.items()))
    config = dataclasses.replace(setup.config(world_size, rank), timeout=timeout)
    return SymmetricTransport([config], [memories[rank]], "test")


def memories_of(world_size=2):
    return create_all(["cpu"] * world_size, Workspace(BF16.config(world_size)).nbytes)


def test_missing_peer_times_out_names_it_and_poisons_everyone():
    memories = memories_of()
    alone, other = (one_rank(rank, memories=memories) for rank in range(2))
    request = dispatch_requests(Case(BF16, "uniform"), [0])
    begin = time.monotonic()
    with pytest.raises(moelink.PeerTimeoutError) as error:
        alone.dispatch(request).wait()
    assert time.monotonic() - begin < HANG
    assert (error.value.rank, error.value.peer, error.value.phase, error.value.call) == (0, 1, "dispatch", 1)
    assert (error.value.expected, error.value.got) == (1, 0)
    for call in (lambda: alone.dispatch(request), alone.check):
        with pytest.raises(moelink.PeerTimeoutError):
            call()
    # The peer hears of it in its next kernel, without waiting for anything.
    with pytest.raises(moelink.PeerTimeoutError) as told:
        other.dispatch(dispatch_requests(Case(BF16, "uniform"), [1])).wait()
    assert (told.value.rank, told.value.peer) == (1, 1)
    assert "reported by rank 0" in str(told.value)
    alone.close()
    other.close()


def test_poisoned_kernels_return_zero_row_offsets():
    memories = memories_of()
    alone, other = (one_rank(rank, memories=memories) for rank in range(2))
    with pytest.raises(moelink.PeerTimeoutError):
        alone.dispatch(dispatch_requests(Case(BF16, "uniform"), [0])).wait()
    pending = other.dispatch(dispatch_requests(Case(BF16, "uniform"), [1]))
    output = pending._finish.__closure__[0].cell_contents[0].output  # what a graph replay would leave to its consumers
    output.row_offsets.fill_(99)
    with pytest.raises(moelink.PeerTimeoutError):
        pending.wait()
    assert output.row_offsets.tolist() == [0] * len(output.row_offsets)


def test_who_sent_is_not_blamed():
    memories = memories_of(3)
    ranks = [one_rank(rank, 3, memories=memories) for rank in range(3)]
    case = Case(BF16, "uniform")
    ranks[1].dispatch(dispatch_requests(case, [1]))
    with pytest.raises(moelink.PeerTimeoutError) as error:
        ranks[0].dispatch(dispatch_requests(case, [0])).wait()
    assert error.value.peer == 2


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_refusal_reaches_the_peers_and_the_next_call_works(phase):
    memories = memories_of()
    ranks = [one_rank(rank, memories=memories, timeout=10) for rank in range(2)]
    case = Case(BF16, "uniform")

    def dispatch_all():
        pending = [ranks[rank].dispatch(dispatch_requests(case, [rank])) for rank in range(2)]
        return [p.wait()[0] for p in pending]

    recvs = dispatch_all()
    ranks[0].refuse(phase)
    if phase == "dispatch":
        started = ranks[1].dispatch(dispatch_requests(case, [1]))
    else:
        started = ranks[1].combine(combine_requests(case, [1], recvs[1:]))
    with pytest.raises(moelink.PeerAbortedError) as error:
        started.wait()
    assert (error.value.rank, error.value.peer, error.value.phase) == (1, 0, phase)
    recvs = dispatch_all()
    pending = [ranks[rank].combine(combine_requests(case, [rank], [recvs[rank]])) for rank in range(2)]
    for p in pending:
        p.wait()
    for rank in ranks:
        rank.check()


def test_losses_are_counted_and_raised_by_check_once():
    transport = one_process(Setup("bf16", (("capacity", 3),)).fields, 2)
    run_case(transport, Case(Setup("bf16", (("capacity", 3),)), "one_expert"), [0, 1])
    with pytest.raises(moelink.CapacityError, match="did not fit capacity 3"):
        transport.check()
    transport.check()


def test_ids_out_of_range_act_as_minus_one_and_are_counted():
    transport = one_process(BF16.fields, 1)
    x = torch.ones(2, 40, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 7, -2], [6, 2**40, -1]])
    (recv,) = transport.dispatch([DispatchRequest(x, ids)]).wait()
    assert int(recv.num_recv_tokens) == 2
    with pytest.raises(moelink.RoutingError, match="3 expert ids"):
        transport.check()


def test_traffic_counts_what_left_the_rank():
    transport = one_process(BF16.fields, 2)
    x = torch.ones(2, 40, dtype=torch.bfloat16)
    ids = [torch.tensor([[0, 1, 6], [6, 5, 4]]), torch.tensor([[-1, -1, -1], [0, 0, 0]])]  # experts 0-3 and 4-6
    recvs = transport.dispatch([DispatchRequest(x, i) for i in ids]).wait()
    transport.combine([CombineRequest(torch.ones(len(r.tokens), 40, dtype=torch.bfloat16), r) for r in recvs]).wait()
    workspace = Workspace(BF16.config(2))
    assert transport.traffic().dispatch == 3 * workspace.message_bytes
    assert transport.traffic().combine == 3 * workspace.row_bytes


def test_bias_and_residual_and_torch_hook_go_in_before_rounding():
    case = Case(BF16, "uniform")
    transport = one_process(BF16.fields, 2)
    recvs = transport.dispatch(dispatch_requests(case, [0, 1])).wait()
    requests = combine_requests(case, [0, 1], recvs)
    sums = [torch.empty(len(r.recv.handle.topk_ids), 40) for r in requests]

    def keep(tensors, token, columns, block, mask):
        tensors[0][token, columns] = block

    hooked = [dataclasses.replace(r, epilogue=Hook(None, keep, (s,))) for r, s in zip(requests, sums, strict=True)]
    outs = transport.combine(hooked).wait()
    assert outs[0] is sums[0]
    bias = torch.randn(40)
    got = transport.combine([dataclasses.replace(r, epilogue=bias) for r in requests]).wait()
    for out, total in zip(got, sums, strict=True):
        assert torch.equal(out, (total + bias).bfloat16())
    residuals = [torch.randn(len(s), 40).bfloat16() for s in sums]
    got = transport.combine(
        [dataclasses.replace(r, epilogue=x) for r, x in zip(requests, residuals, strict=True)]
    ).wait()
    for out, total, residual in zip(got, sums, residuals, strict=True):
        assert torch.equal(out, (total + residual.float()).bfloat16())


@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128"])
def test_rows_may_begin_anywhere(fmt):
    """A view that begins in the middle of a word is read as well as one that begins at its start."""
    setup = Setup(fmt)
    case = Case(setup, "uniform", seed=3)
    requests = dispatch_requests(case, range(2))
    moved = []
    for request in requests:
        room = torch.empty(request.x.numel() + 1, dtype=request.x.dtype)
        room[1:] = request.x.flatten()
        moved.append(dataclasses.replace(request, x=room[1:].view(request.x.shape)))
        assert moved[-1].x.data_ptr() % 4 == 2
    transport = one_process(setup.fields, 2)
    recvs = transport.dispatch(moved).wait()
    outs = transport.combine(combine_requests(case, range(2), recvs)).wait()
    check_case(case, 2, [Result.of(recv, out) for recv, out in zip(recvs, outs, strict=True)])
    transport.close()


def test_slots_are_summed_in_ascending_order():
    """In fp32 2**24 + 1 is 2**24, so the order of three terms shows."""
    options = dict(num_experts=3, topk=3, hidden_size=8, max_tokens_per_rank=2, combine_dtype=torch.float32)
    with moelink.init(**options, transport="symmetric") as ep:
        recv = ep.dispatch(torch.ones(2, 8, dtype=torch.bfloat16), torch.tensor([[0, 1, 2], [2, 1, 0]]))
        by_slot = torch.tensor([2.0**24, 1.0, 1.0])
        rows = by_slot[recv.src_info[:, 2].long()][:, None].expand(-1, 8).contiguous()
        assert ep.combine(rows, recv).eq(2.0**24).all()
