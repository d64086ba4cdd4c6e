"""``zero_copy``: rows that stay in the workspace live until the next call, and no longer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import moelink
from moelink import ops
from moelink.config import EPConfig
from moelink.kernels.dispatch import receive
from moelink.kernels.sync import credit
from moelink.memory.layout import REGION_ALIGNMENT
from moelink.output import OutputShape
from moelink.testing import assert_bitwise_equal
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric.rank import Rank
from tests.support.cases import Setup
from tests.support.protocol_runs import Small, caught, run
from tests.support.symmetric_ranks import one_process, over
from tests.tiers import seeds

TRANSPORTS = ("collective", "symmetric")
TURNS = 40
"""Turns of a schedule after which rows are read, long after they have come."""
SMALL: dict[str, Any] = dict(
    num_experts=4, topk=2, hidden_size=128, max_tokens_per_rank=4, layout="rank", zero_copy=True
)
X, IDS = torch.arange(1.0, 4)[:, None].expand(3, 128).bfloat16().contiguous(), torch.tensor([[0, 1], [2, 3], [0, -1]])


def zero_copy(fmt: str, *, num_experts: int = 7, topk: int = 3, **options: Any) -> Setup:
    return Setup(fmt, (("layout", "rank"), ("zero_copy", True), *options.items()), num_experts=num_experts, topk=topk)


def transport_of(name: str, setup: Setup, world: int) -> Any:
    """The transport of all ranks in this process."""
    if name == "symmetric":
        return one_process(setup.fields, world)
    return moelink.init_devices(["cpu"] * world, **setup.fields, transport="collective")._session.transport


def test_rows_are_views_of_the_workspace():
    """Rows begin on cache lines of the block, at the distance of messages; everything else is a tensor of its own."""
    with moelink.init(**SMALL, transport="symmetric", device="cpu", dispatch_format="fp8_block128") as ep:
        recv, memory = ep.dispatch(X, IDS), ep._session.transport.ranks[0].memory.local
        inside = range(memory.data_ptr(), memory.data_ptr() + memory.numel())
        at = {name: getattr(recv, name).data_ptr() for name in ("tokens", "scales")}
        for name, address in at.items():
            view = getattr(recv, name)
            assert address in inside, name
            assert view.stride(1) * view.element_size() % REGION_ALIGNMENT == 0, name
        assert (at["tokens"] - memory.data_ptr()) % REGION_ALIGNMENT == 0
        assert recv.tokens.flatten(0, 1).data_ptr() == at["tokens"]
        for name in ("row_offsets", "src_info", "topk_ids", "num_recv_tokens"):
            assert getattr(recv, name).data_ptr() not in inside, name
        recv = ep.dispatch(X, IDS)
        assert {name: getattr(recv, name).data_ptr() for name in at} == at  # which a CUDA graph relies on


@pytest.mark.quick("the two transports drop rows in ways of their own")
@pytest.mark.parametrize("name", TRANSPORTS)
def test_rows_that_do_not_fit_max_tokens_are_dropped_and_counted(name):
    """Rank 0 sends 3 rows to rank 1, whose output has room for 2 rows of a source; rank 1 sends one to each."""
    transport = transport_of(name, zero_copy("bf16", num_experts=2, topk=1, hidden_size=8), 2)
    ids = [torch.full((3, 1), 1), torch.tensor([[0], [1]])]
    xs = [torch.arange(1.0, 1 + len(i))[:, None].expand(-1, 8).bfloat16() * (1 + 9 * r) for r, i in enumerate(ids)]
    requests = [DispatchRequest(x.contiguous(), i, max_tokens=len(i)) for x, i in zip(xs, ids, strict=True)]
    recvs = transport.dispatch(requests).wait()
    assert [recv.tokens.shape for recv in recvs] == [(2, 3, 8), (2, 2, 8)]
    assert recvs[1].tokens[:, :, 0].tolist()[0] == [1, 2]
    assert recvs[1].topk_ids.tolist() == [[[0], [0]], [[0], [-1]]]
    assert [recv.num_recv_per_rank.tolist() for recv in recvs] == [[0, 1], [2, 1]]
    assert [int(recv.num_recv_tokens) for recv in recvs] == [1, 3]
    assert [int(recv.overflow) for recv in recvs] == [0, 1]
    assert [recv.row_offsets.tolist() for recv in recvs] == [[0, 3, 6], [0, 2, 4]]
    ys = [torch.where(recv.topk_ids >= 0, recv.tokens, torch.nan) for recv in recvs]
    again = transport.dispatch(over(recvs, [dataclasses.replace(r, max_tokens=None) for r in requests])).wait()
    assert [recv.tokens.shape for recv in again] == [(2, 3, 8), (2, 2, 8)]
    outs = transport.combine([CombineRequest(y, recv) for y, recv in zip(ys, again, strict=True)]).wait()
    assert [out[:, 0].tolist() for out in outs] == [[1, 2, 0], [10, 20]]
    with pytest.raises(moelink.CapacityError):
        transport.check()
    transport.close()


@pytest.mark.quick("each transport counts calls for itself")
@pytest.mark.parametrize("name", TRANSPORTS)
def test_rows_end_with_the_next_call(name):
    """Also where it is refused, or the communicator is closed. What is no row of the workspace lives on."""
    with moelink.init(**SMALL, transport=name, device="cpu") as ep:
        first = ep.dispatch(X, IDS)
        y = first.tokens.clone()
        second = ep.dispatch(X, IDS)
        with pytest.raises(
            moelink.ExpiredRowsError, match="recv.tokens: expected rows to be read before the next call"
        ):
            first.tokens  # noqa: B018 - to look at it is what is refused
        assert "(tokens=" not in repr(first)
        assert "(tokens=" in repr(second)
        with pytest.raises(moelink.ExpiredRowsError, match="the lane's latest dispatch, got those of an earlier one"):
            ep.combine(y, first)
        with pytest.raises(moelink.ExpiredRowsError):
            second.tokens  # noqa: B018 - a refused call is one, too
        with pytest.raises(moelink.ArgumentError, match="y: expected shape"):
            ep.combine(y[0], second)
        out = ep.combine(y, second)
        assert out[:, 0].tolist() == [1, 2, 3]
        assert_bitwise_equal(ep.combine(y, second), out)
        assert second.topk_ids[0, :3].tolist() == first.topk_ids[0, :3].tolist() == IDS.tolist()
        pending = ep.dispatch_async(X, IDS)
        with pytest.raises(moelink.ExpiredRowsError):
            ep.combine_async(y, second)
        last = pending.wait()
        assert last.tokens[0, :3, 0].tolist() == [1, 2, 3]
    with pytest.raises(moelink.ExpiredRowsError, match="got a closed communicator"):
        last.tokens  # noqa: B018 - to look at it is what is refused


@pytest.mark.quick("each transport counts calls for itself")
@pytest.mark.parametrize("name", TRANSPORTS)
def test_rows_of_a_bound_dispatch_end_with_the_next_call(name):
    """They live again after each of its calls; a second lane is a second buffer."""
    with moelink.init(**SMALL, transport=name, device="cpu", lanes=2) as ep:
        dispatch = ep.bind(X, IDS)
        combine = None
        for _ in range(2):
            recv = dispatch()
            assert recv.tokens[0, :3, 0].tolist() == [1, 2, 3]
            combine = combine or dispatch.combine(recv.tokens.clone())
            ep.lane(1).dispatch(X, IDS)
            assert recv.tokens[0, :3, 0].tolist() == [1, 2, 3]
            assert combine()[:, 0].tolist() == [1, 2, 3]
            with pytest.raises(moelink.ExpiredRowsError):
                recv.tokens  # noqa: B018 - to look at it is what is refused
        dispatch()
        ep.dispatch(X, IDS)
        with pytest.raises(moelink.ExpiredRowsError, match="recv: expected the rows of the lane's latest dispatch"):
            combine()
        dispatch()
        assert combine()[:, 0].tolist() == [1, 2, 3]


def test_a_closed_communicator_unmaps_its_block():
    ep = moelink.init(**SMALL, transport="symmetric", device="cpu")
    recv = ep.dispatch(X, IDS)
    ep.close()
    assert recv.rows_in_place.views == {}
    assert recv.num_recv_tokens == 3


def test_autograd_notices_rows_that_have_ended():
    with moelink.init(**SMALL, transport="symmetric", device="cpu") as ep:
        with torch.inference_mode():  # views that are made here are those of later calls, too
            ep.dispatch(X, IDS)
        weight = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
        for ends in (False, True):
            loss = (ep.dispatch(X, IDS).tokens[0, :3] * weight).sum()
            if not ends:
                loss.backward()
                assert weight.grad[0] == 6
                continue
            ep.dispatch(X, IDS)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_debug_mode_overwrites_rows_that_have_ended(monkeypatch):
    """Once, before the call that ends them sends; so the rows of the next dispatch are as they came."""
    monkeypatch.setenv("MOELINK_DEBUG", "1")
    with moelink.init_devices(["cpu"] * 2, **{**SMALL, "transport": "symmetric"}) as ep:
        given = [X, 2 * X], [IDS, IDS]
        rows, recvs = [[[1, 3], [2, 6]], [[2], [4]]], []
        for combines in (True, True, False, False):
            first = not recvs
            recvs = ep.dispatch(*given)
            views = [recv.tokens for recv in recvs]
            for view, recv, want in zip(views, recvs, rows, strict=True):
                used = (recv.topk_ids >= 0).any(2)
                assert [view[source][used[source]][:, 0].tolist() for source in range(2)] == want
                assert view[~used].isnan().all() == (not first)
            if combines:
                ep.combine([torch.zeros(2, 4, 128, dtype=torch.bfloat16)] * 2, recvs)
                assert all(view.isnan().all() for view in views)


@pytest.mark.quick("each field in milliseconds")
@pytest.mark.parametrize(
    "field, value, expectation",
    [
        ("zero_copy", 1, "True or False"), ("layout", "expert", "zero_copy: expected False with layout='expert'"),
        ("layout", "masked", "zero_copy: expected False with layout='masked'"), ("capacity", 3, "None with zero_copy"),
        ("mode", "allreduce", "'alltoall' with zero_copy"), ("ranks_per_node", 1, "None or 2 with zero_copy"),
    ],
)  # fmt: skip
def test_settings_that_move_rows_are_refused(field, value, expectation):
    with pytest.raises(moelink.ConfigError, match=expectation):
        EPConfig(**{**SMALL, "world_size": 2, field: value})


@pytest.mark.quick("each transport refuses for itself")
@pytest.mark.parametrize("name", TRANSPORTS)
def test_refusals(name):
    """What needs tensors of its own is refused by name, and the next call works."""
    with moelink.init(**SMALL, transport=name, device="cpu") as ep:
        recv = ep.dispatch(X, IDS)
        y = recv.tokens.clone()
        with pytest.raises(moelink.ArgumentError, match="out: expected None with zero_copy=True"):
            ep.dispatch(X, IDS, out=recv)
        with pytest.raises(moelink.ArgumentError, match="out: expected None with zero_copy=True"):
            ep.bind(X, IDS, out=recv)
        with pytest.raises(moelink.UnsupportedError, match="zero_copy: expected False for a call with gradients"):
            ep.dispatch(X.clone().requires_grad_(), IDS)
        with pytest.raises(moelink.UnsupportedError, match="zero_copy: expected False for a call with gradients"):
            ep.combine(y.clone().requires_grad_(), recv)
        with pytest.raises(moelink.UnsupportedError, match="dequantize: expected rows in tensors of their own"):
            ops.dequantize(ep, ep.dispatch(X, IDS))
        with pytest.raises(moelink.ArgumentError, match=r"y: expected shape \[1, 4, 128\], got \[4, 128\]"):
            ep.combine(y.flatten(0, 1), ep.dispatch(X, IDS))
        assert ep.combine(y, ep.dispatch(X, IDS))[:, 0].tolist() == [1, 2, 3]
    with moelink.init(**{**SMALL, "layout": "expert", "zero_copy": False}, device="cpu") as ep:
        recv = ep.dispatch(X, IDS)
        for ask in (recv.rows_by_expert, lambda: recv.num_recv_per_rank):
            with pytest.raises(moelink.UnsupportedError, match="expected an output of layout 'rank'"):
                ask()


def test_the_memory_report_leaves_out_what_is_not_allocated():
    config = zero_copy("fp8_block128").config(2)
    copying = dataclasses.replace(config, zero_copy=False)
    a, b = config.memory_report(), copying.memory_report()
    rows = 2 * config.max_tokens_per_rank
    assert a.in_place == rows * (config.hidden_size + 4 * config.hidden_size // 128)
    assert (a.block, a.outputs) == (b.block, b.outputs - a.in_place)
    assert a.total == b.total
    assert b.in_place == 0
    assert "in_place" in str(a)
    shapes = {name: blank.shape for name, blank in OutputShape.of(config, rows=5, weighted=True).present}
    assert shapes["tokens"] == (2, 5, config.hidden_size)
    assert shapes["topk_ids"] == shapes["topk_weights"] == (2, 5, config.topk)
    assert config.most_total_rows == rows


def two_calls() -> list[Small]:
    """Two dispatches with other token counts."""
    setup = zero_copy("bf16", num_experts=3, topk=2, max_tokens_per_rank=4, hidden_size=8)
    return [Small(setup, "uniform", seed=seed, tokens=tokens) for seed, tokens in ((1, (3, 2)), (2, (1, 4)))]


@seeds(1, 10, why="rows are read while peers make the next call")
@pytest.mark.parametrize(
    "options",
    [{}, {"combine": False}, {"fused": False}, {"fused": False, "combine": False}, {"again": 1, "combine": False}],
    ids=str,
)
def test_rows_outlive_peers_that_are_ahead(options, seeds):
    for seed in seeds:
        run(seed, two_calls(), turns=TURNS, **options)


@seeds(1, 10, why="a receiver reads a message of each sender at a time")
def test_one_sender_is_slow(seeds):
    setup = zero_copy("bf16", num_experts=3, topk=2, max_tokens_per_rank=6, hidden_size=8)
    for seed in seeds:
        case = Small(setup, "uniform", seed=1, tokens=(6, 5))
        run(seed, [case], speed=lambda name: 0.02 if name.endswith("kernel[1]") else 1.0)


@triton.jit
def grant_with_the_last_read(ctx, phase, program, num_programs, S: tl.constexpr, sem: tl.constexpr):
    """As count_read, but the receiving launch grants credit, as if it had copied the rows."""
    credit.count_read(ctx, phase, program, num_programs, S, sem)
    credit.grant_credits(ctx.table, ctx.control, ctx.me, S)


PLANTED = pytest.mark.quick("a planted fault must be caught")


@PLANTED
def test_credit_of_the_receiving_launch_is_caught(monkeypatch):
    monkeypatch.setattr(receive, "count_read", grant_with_the_last_read)
    assert caught(two_calls(), turns=TURNS, first=2, combine=False) is not None


@PLANTED
def test_credit_after_a_receiving_half_is_caught(monkeypatch):
    monkeypatch.setattr(Rank, "has_received", Rank.grant_credits)
    assert caught(two_calls(), turns=TURNS, combine=False, fused=False) is not None
