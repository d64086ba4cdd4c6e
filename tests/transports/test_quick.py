"""The fast path: calls of a known kind equal ordinary ones, and what is not of a known kind goes the ordinary way."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

import moelink
from moelink.testing import assert_bitwise_equal
from moelink.transports.session import Session

FIELDS = {"num_experts": 4, "topk": 2, "hidden_size": 128, "max_tokens_per_rank": 5, "transport": "symmetric"}
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"layout": "rank"}, {"pre_reduce": False}, {"mode": "allreduce"}, {"fused_shared_expert": True},
    {"capacity": 3},
)  # fmt: skip


def given(seed: int, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(tokens, 128).bfloat16(), torch.randint(-1, 4, (tokens, 2)), torch.rand(tokens, 2)


class Ordinary:
    """Counts the calls that went the ordinary way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        start = Session.start

        def counting(session: Session, requests: Any, *, fused: bool) -> Any:
            self.calls.append(requests[0].phase)
            return start(session, requests, fused=fused)

        monkeypatch.setattr(Session, "start", counting)

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Ordinary:
    return Ordinary(monkeypatch)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=pytest.mark.quick("other addresses")) for o in OPTIONS[:3]] + [*OPTIONS[3:]],
    ids=str,
)
def test_quick_calls_equal_ordinary_ones(options: dict[str, Any], weighted: bool, ordinary: Ordinary) -> None:
    with moelink.init(**FIELDS, **options) as ep, moelink.init(**FIELDS, **options) as other:
        other._fast_path = None
        for seed in range(3):
            x, ids, weights = given(seed)
            mine = weights if weighted else None
            recv, want = ep.dispatch(x, ids, mine), other.dispatch(x, ids, mine)
            rows = int(want.row_offsets[-1])
            for field in dataclasses.fields(recv):
                got, expected = getattr(recv, field.name), getattr(want, field.name)
                if isinstance(expected, torch.Tensor) and field.name != "scales":
                    cut = slice(rows) if expected.dim() and len(expected) == len(want.tokens) else ...
                    assert_bitwise_equal(got[cut], expected[cut], field.name)
                else:
                    assert (got is None) == (expected is None), field.name
            y = torch.randn(len(recv.tokens), 128).bfloat16()
            assert_bitwise_equal(ep.combine(y, recv), other.combine(y, want), "out")
            assert ordinary.taken() == ["dispatch", "dispatch", "combine", "combine"][:: 1 if seed == 0 else 2]


def test_other_calls_go_the_ordinary_way(ordinary: Ordinary) -> None:
    with moelink.init(**FIELDS, dispatch_format="mxfp8") as ep:
        for _ in range(2):  # scales are laid out by a launch of their own
            ep.dispatch(*given(0))
            assert ordinary.taken() == ["dispatch"]
    with moelink.init(**FIELDS) as ep:
        x, ids, weights = given(0)
        first = ep.dispatch(x, ids, weights)
        y = torch.randn(len(first.tokens), 128).bfloat16()
        out = ep.combine(y, first)
        ordinary.taken()
        odd = torch.empty(5 * 128 + 1, dtype=torch.bfloat16)[1:].view(5, 128).copy_(x)
        for arguments, options in (
            ((x[:3], ids[:3], weights[:3]), {}),
            ((odd, ids, weights), {}),
            ((x, ids.int(), weights), {}),
            ((x, ids, weights.bfloat16()), {}),
            ((x, ids, weights), {"out": ep.dispatch(x, ids, weights)}),
            ((x[:4], ids[:4], weights[:4]), {"max_tokens": 4}),
            ((x, ids, weights), {"host_counts": True}),
        ):
            recv = ep.dispatch(*arguments, **options)
            assert ordinary.taken() == ["dispatch"], options
            rows = int(recv.row_offsets[-1])
            if len(arguments[0]) == 5:
                assert_bitwise_equal(recv.tokens[:rows], first.tokens[:rows], "tokens")
        for options in ({"reduce": False}, {"weigh": False}, {"shared": x}, {"epilogue": x}, {"out": out}):
            if options != {"reduce": False}:
                ep.combine(y, first, **options)
                assert ordinary.taken() == ["combine"], options
        learning = x.clone().requires_grad_()
        assert ep.dispatch(learning, ids, weights).tokens.requires_grad
        assert ep.combine(y.requires_grad_(), first).requires_grad
        assert ordinary.taken() == [], "calls of known kinds, of which autograd functions record gradients"


@pytest.mark.quick("each in milliseconds, and another check")
@pytest.mark.parametrize("late", ["ids", "owner", "shape"])
def test_what_a_quick_call_must_refuse(late: str) -> None:
    with moelink.init(**FIELDS) as ep, moelink.init(**FIELDS) as other:
        x, ids, weights = given(0)
        recv = ep.dispatch(x, ids, weights)
        y = torch.randn(len(recv.tokens), 128).bfloat16()
        ep.combine(y, recv)
        recv = ep.dispatch(x, ids, weights)
        if late == "ids":
            with pytest.raises(moelink.ArgumentError, match="ids in"):
                ep.dispatch(x, ids + 4, weights)
            ids.add_(0)
            with pytest.raises(moelink.ArgumentError, match="topk_ids were overwritten"):
                ep.combine(y, recv)
        elif late == "owner":
            with pytest.raises(moelink.ForeignHandleError):
                ep.combine(y, other.dispatch(x, ids, weights))
        else:
            with pytest.raises(moelink.ArgumentError, match="y: expected shape"):
                ep.combine(y[1:], recv)
            with pytest.raises(moelink.ArgumentError, match="topk_ids: expected shape"):
                ep.dispatch(x, ids[:, :1], weights)


def test_a_quick_call_without_memory_is_told_to_the_peers_and_the_next_works() -> None:
    with moelink.init(**FIELDS) as ep:
        x, ids, weights = given(0)
        want = ep.dispatch(x, ids, weights)
        with (
            mock.patch(
                "moelink.transports.symmetric.plans.Received.output", side_effect=torch.OutOfMemoryError("none left")
            ),
            pytest.raises(torch.OutOfMemoryError),
        ):
            ep.dispatch(x, ids, weights)
        recv = ep.dispatch(x, ids, weights)
        assert_bitwise_equal(recv.row_offsets, want.row_offsets, "row_offsets")
    with pytest.raises(moelink.ClosedError):
        ep.dispatch(x, ids, weights)
