"""Ranks that make every kind of call with ``zero_copy``, next to the same call of layout "rank" that copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fast_interpreter  # noqa: F401 - ranks are processes of their own
import moelink
from fault_ranks import FIELDS, data
from moelink.testing import assert_bitwise_equal

BY_ROW = ("tokens", "scales", "src_info", "topk_ids", "topk_weights")


def present(recv: moelink.DispatchOutput, field: Tensor) -> Tensor:
    """The rows of a field that hold a token, one source after the other."""
    return field[torch.arange(field.shape[1])[None, :] < recv.num_recv_per_rank[:, None]]


def same(got: moelink.DispatchOutput, want: moelink.DispatchOutput) -> None:
    """Compare an output whose rows stay where they arrived with one that was copied."""
    for name in ("num_recv_per_rank", "num_recv_per_expert", "num_recv_tokens", "overflow"):
        assert_bitwise_equal(getattr(got, name), getattr(want, name), name)
    rows = int(want.row_offsets[-1])
    for name in BY_ROW:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if b is not None:
            assert_bitwise_equal(present(got, a), b[:rows], name)
    assert int((got.topk_ids >= 0).any(2).sum()) == rows
    # Both indices name the same rows, in the same order.
    (pairs, offsets), (pairs_of_copy, offsets_of_copy) = got.rows_by_expert(), want.rows_by_expert()
    assert_bitwise_equal(offsets, offsets_of_copy, "offsets")
    total, topk = int(offsets[-1]), got.topk_ids.shape[-1]
    rows_in_place, rows_of_copy = pairs[:total] // topk, pairs_of_copy[:total] // topk
    assert_bitwise_equal(pairs[:total] % topk, pairs_of_copy[:total] % topk, "slots")
    size = got.tokens.shape[1]
    taken = got.tokens[rows_in_place // size, rows_in_place % size]
    assert_bitwise_equal(taken, want.tokens[rows_of_copy.long()], "by expert")


def doubled(recv: moelink.DispatchOutput) -> Tensor:
    """What the experts make of the rows. What they make of the others is NaN."""
    y = torch.full(recv.tokens.shape, torch.nan, dtype=torch.bfloat16)
    if y.dim() == 2:
        return y.copy_(recv.tokens * 2)
    used = torch.arange(y.shape[1])[None, :] < recv.num_recv_per_rank[:, None]
    y[used] = (recv.tokens[used] * 2).bfloat16()
    return y


def calls(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Dispatches and combines in every form. Returns the rows received."""
    fields = {**FIELDS, "layout": "rank", **options, "lanes": 2, "timeout": 60}
    limit: dict[str, Any] = {"num_sms": 1} if options["transport"] == "symmetric" else {}
    copying = {**fields, "transport": "collective"}
    with moelink.init(**copying) as plain, moelink.init(**fields, zero_copy=True) as ep:
        d, home = data(rank, seed=1, tokens=3 - rank % 2), data(rank + 5, tokens=3 - rank % 2).x
        given = d.x, d.topk_ids, d.topk_weights
        want = plain.dispatch(*given)
        first = ep.dispatch(*given)
        assert first.tokens.shape == (world_size, 3, 16)
        same(first, want)
        same(ep.dispatch(*given), want)  # of a known kind
        same(ep.dispatch_async(*given).wait(), want)
        same(ep.lane(1).dispatch(*given, **limit), want)
        small = ep.dispatch(d.x[:2], d.topk_ids[:2], d.topk_weights[:2], max_tokens=2)
        assert small.tokens.shape == (world_size, 2, 16)
        same(small, plain.dispatch(d.x[:2], d.topk_ids[:2], d.topk_weights[:2]))
        exact, list_of = ep.dispatch(*given, host_counts=True), plain.dispatch(*given, host_counts=True)
        assert exact.host_counts == list_of.host_counts
        same(exact, want)
        again = ep.dispatch(d.x * 3, None, d.topk_weights, routing=exact)
        same(again, plain.dispatch(d.x * 3, None, d.topk_weights, routing=want))
        nothing = ep.dispatch(d.x[:0], d.topk_ids[:0], d.topk_weights[:0])
        same(nothing, plain.dispatch(d.x[:0], d.topk_ids[:0], d.topk_weights[:0]))
        assert ep.combine(doubled(nothing), nothing).shape == (0, 16)
        recv = ep.dispatch(*given)
        y, z = doubled(recv), doubled(want)
        forms: list[dict[str, Any]] = [{}, {}, {"shared": home, "weigh": False}]
        for form in forms:
            assert_bitwise_equal(ep.combine(y, recv, **form, **limit), plain.combine(z, want, **form), str(form))
            limit = {}  # for the second one, which the quick lane learns from, and all others
        assert_bitwise_equal(ep.combine_async(y, recv).wait(), plain.combine(z, want), "combine_async")
        for name in ("tokens", "scales"):
            with pytest.raises(moelink.ExpiredRowsError, match=f"recv.{name}: expected rows to be read before"):
                getattr(recv, name)
        _bound(ep, given, want, plain)
        _two_lanes(ep, given, want)
        return int(want.row_offsets[-1])


def _bound(ep: moelink.Communicator, given: Any, want: moelink.DispatchOutput, plain: moelink.Communicator) -> None:
    """Rows of a bound dispatch live from each of its calls to the next call."""
    dispatch = ep.bind(*given)
    y, out = doubled(want), plain.combine(doubled(want), want)
    combine = None
    for _ in range(2):
        recv = dispatch()
        same(recv, want)
        y = doubled(recv)
        combine = combine or dispatch.combine(y)
        assert_bitwise_equal(combine(), out, "bound")
        with pytest.raises(moelink.ExpiredRowsError):
            recv.tokens  # noqa: B018 - to look at it is what is refused
    dispatch()
    ep.dispatch(*given)
    with pytest.raises(moelink.ExpiredRowsError, match="recv: expected the rows of the lane's latest dispatch"):
        combine()  # type: ignore[misc]
    dispatch()
    assert_bitwise_equal(combine(), out, "after a refusal")  # type: ignore[misc]


def _two_lanes(ep: moelink.Communicator, given: Any, want: moelink.DispatchOutput) -> None:
    """A second lane is the second buffer: its calls do not end the rows of the first."""
    one, two = ep.dispatch(*given), ep.lane(1).dispatch(*given)
    out = ep.lane(1).combine(doubled(two), two)
    same(one, want)
    assert_bitwise_equal(ep.combine(doubled(one), one), out, "lanes")
