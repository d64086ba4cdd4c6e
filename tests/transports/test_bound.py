"""Calls that are bound to their tensors: the same results as eager calls, and what cannot be bound."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import moelink
from moelink.hooks import Hook
from moelink.testing import run_ranks
from moelink.transports.bound import BoundCombine, BoundDispatch
from tests.transports import bound_ranks

FIELDS = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 5}
TRANSPORTS = ("collective", "symmetric")


@pytest.mark.quick("the two transports bind in different ways")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bound_calls_equal_eager_ones(transport: str) -> None:
    assert sum(run_ranks(bound_ranks.bound_beside_eager, 3, {"transport": transport})) > 0


@pytest.mark.parametrize("options", [{"pre_reduce": False}, {"ranks_per_node": 1}, {"num_sms": 1}], ids=str)
def test_bound_calls_of_other_communicators(options: dict[str, Any]) -> None:
    run_ranks(bound_ranks.bound_beside_eager, 2, {"transport": "symmetric", **options})


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fmt", ["fp8_block128", "nvfp4"])
def test_scales_that_a_launch_of_their_own_lays_out(transport: str, fmt: str) -> None:
    with moelink.init(**FIELDS, transport=transport, dispatch_format=fmt) as ep:
        x, ids = torch.randn(5, 128).bfloat16(), torch.randint(4, (5, 2))
        bound, want = ep.bind(x, ids)(), ep.dispatch(x, ids)
        rows = int(want.row_offsets[-1])
        assert ep.config.format.scale_layout is not None
        for name in ("tokens", "src_info"):
            assert torch.equal(
                getattr(bound, name)[:rows].view(torch.uint8), getattr(want, name)[:rows].view(torch.uint8)
            )
        kept = torch.ops.moelink.dequantize_rows
        given = [(o.tokens, o.scales, o.row_offsets, o.scales_offsets) for o in (bound, want)]
        values = [kept(*each, None, fmt, 128, torch.float32)[:rows] for each in given]
        assert torch.equal(*values)


def test_arguments_that_cannot_be_bound() -> None:
    function = Hook(None, lambda *_: None)
    with moelink.init(**FIELDS, transport="symmetric") as ep:
        x, ids, weights = torch.randn(3, 128).bfloat16(), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
        for error, words, arguments, options in (
            (moelink.ArgumentError, "x: expected shape", (x[:, :7], ids), {}),
            (moelink.ArgumentError, "topk_ids: expected ids in", (x, ids + 4), {}),
            (moelink.ArgumentError, "topk_weights: expected dtype torch.float32", (x, ids, weights.half()), {}),
            (moelink.UnsupportedError, "topk_weights: expected a tensor in a bound call", (x, ids, function), {}),
            (moelink.UnsupportedError, "without gradients", (x.requires_grad_(), ids), {}),
        ):
            with pytest.raises(error, match=re.escape(words)):
                ep.bind(*arguments, **options)
        x = x.detach()
        odd = torch.empty(3 * 128 + 1, dtype=torch.bfloat16)[1:].view(3, 128)
        with pytest.raises(moelink.ArgumentError, match="memory that begins at a multiple of 16 bytes"):
            ep.bind(odd, ids)
        dispatch = ep.bind(x, ids, weights)
        with pytest.raises(moelink.StateError, match="call it first"):
            _ = dispatch.recv
        recv = dispatch()
        with pytest.raises(moelink.ArgumentError, match="y: expected shape"):
            dispatch.combine(recv.tokens[1:])
        with pytest.raises(moelink.UnsupportedError, match="a hook with a triton_fn"):
            dispatch.combine(recv.tokens, epilogue=function)


ENTRIES = {
    (BoundDispatch, "__call__"): lambda dispatch, combine: dispatch(),
    (BoundDispatch, "combine"): lambda dispatch, combine: dispatch.combine(dispatch.recv.tokens),
    (BoundCombine, "__call__"): lambda dispatch, combine: combine(),
}
"""Every function of a bound call. ``recv`` is none: an output is its caller's, and stays readable."""


@pytest.mark.quick("lanes have sessions of their own, and each transport binds in its own way")
@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_bound_call_outlives_its_communicator(transport: str, lane: int) -> None:
    for made in (BoundDispatch, BoundCombine):
        names = {name for name, value in vars(made).items() if callable(value)} - {"__init__"}
        assert {(made, name) for name in names} <= ENTRIES.keys()
    x, ids = torch.randn(3, 128).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    with moelink.init(**FIELDS, transport=transport, lanes=2) as ep:
        dispatch = ep.lane(lane).bind(x, ids)
        combine = dispatch.combine(dispatch().tokens)
        combine()
    with pytest.raises(moelink.ClosedError, match="bind: the communicator is closed"):
        ep.lane(lane).bind(x, ids)
    for call in ENTRIES.values():
        with pytest.raises(moelink.ClosedError, match=r"^(dispatch|combine): the communicator is closed"):
            call(dispatch, combine)
    assert int(dispatch.recv.num_recv_tokens) == 6


def test_a_pending_call_comes_first() -> None:
    with moelink.init(**FIELDS, transport="symmetric") as ep:
        x, ids = torch.randn(3, 128).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
        dispatch = ep.bind(x, ids)
        pending = ep.dispatch_async(x, ids)
        with pytest.raises(moelink.PendingError):
            dispatch()
        assert torch.equal(pending.wait().row_offsets, dispatch().row_offsets)
