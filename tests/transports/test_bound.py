"""Calls that are bound to their tensors: what cannot be bound, and what comes between them."""

from __future__ import annotations

import re

import pytest
import torch

import moelink
from moelink.hooks import Hook
from moelink.testing import run_ranks
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
        combine = dispatch.combine(recv.tokens)
    with pytest.raises(moelink.ClosedError):
        ep.bind(x, ids)
    for call in (dispatch, combine):
        with pytest.raises(moelink.ClosedError):
            call()


def test_a_pending_call_comes_first() -> None:
    with moelink.init(**FIELDS, transport="symmetric") as ep:
        x, ids = torch.randn(3, 128).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
        dispatch = ep.bind(x, ids)
        pending = ep.dispatch_async(x, ids)
        with pytest.raises(moelink.PendingError):
            dispatch()
        assert torch.equal(pending.wait().row_offsets, dispatch().row_offsets)
