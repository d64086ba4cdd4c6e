"""Calls that are bound to their tensors: what cannot be bound, and what comes between them."""

from __future__ import annotations

import re

import pytest
import torch

import moelink
from moelink.hooks import Hook
from moelink.testing import run_ranks
from moelink.transports.bound import BoundCombine, BoundDispatch
from tests.transports import bound_ranks

FIELDS = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 5}


@pytest.mark.quick("the two transports bind in different ways")
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_a_refusal_meets_bound_calls(transport: str) -> None:
    assert run_ranks(bound_ranks.refused_beside_bound, 3, {"transport": transport}) == [True] * 3


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
        y = torch.empty(recv.tokens.numel() + 1, dtype=torch.bfloat16)[1:].view_as(recv.tokens).copy_(recv.tokens)
        with pytest.raises(moelink.ArgumentError, match="y: expected memory that begins at a multiple of 4 bytes"):
            dispatch.combine(y)
        sums = ep.combine(y, recv)  # copies it
        assert torch.equal(sums, ep.combine(recv.tokens, recv))


ENTRIES = {
    (BoundDispatch, "__call__"): lambda dispatch, combine: dispatch(),
    (BoundDispatch, "combine"): lambda dispatch, combine: dispatch.combine(dispatch.recv.tokens),
    (BoundCombine, "__call__"): lambda dispatch, combine: combine(),
}
"""Every function of a bound call. ``recv`` is none: an output is its caller's, and stays readable."""


@pytest.mark.quick("lanes have sessions of their own, and each transport binds in its own way")
@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
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
