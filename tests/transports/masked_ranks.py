"""Ranks that make every kind of call in layout "masked", next to the same call in layout "expert"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moelink
from moelink.testing import assert_bitwise_equal
from tests.support.fault_ranks import FIELDS, data

ROWS = ("tokens", "src_info", "weights")


def counted(field: Tensor, recv: moelink.DispatchOutput) -> Tensor:
    """The defined rows of a field of layout "masked", one group after the other."""
    used = torch.arange(field.shape[1])[None, :] < recv.num_recv_per_expert[:, None]
    return field[used]


def same(got: moelink.DispatchOutput, want: moelink.DispatchOutput) -> None:
    """Compare an output of layout "masked" with one of layout "expert"."""
    assert_bitwise_equal(got.num_recv_per_expert, want.num_recv_per_expert, "counts")
    assert_bitwise_equal(got.num_recv_tokens, want.num_recv_tokens, "num_recv_tokens")
    for name in ROWS:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if b is not None:
            assert_bitwise_equal(counted(a, got), b[: int(want.row_offsets[-1])], name)
    size = got.tokens.shape[1]
    assert got.row_offsets.tolist() == [size * group for group in range(len(got.row_offsets))]


def doubled(recv: moelink.DispatchOutput) -> Tensor:
    """What the experts make of the rows. What they make of the others is NaN."""
    y = torch.full_like(recv.tokens, torch.nan)
    if y.dim() == 2:
        return y.copy_(recv.tokens * 2)
    used = torch.arange(y.shape[1])[None, :] < recv.num_recv_per_expert[:, None]
    y[used] = recv.tokens[used] * 2
    return y


def calls(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Dispatches and combines in every form. Returns the rows received."""
    fields = {**FIELDS, **options, "lanes": 2, "timeout": 60}
    limit: dict[str, Any] = {"num_sms": 1} if options["transport"] == "symmetric" else {}
    late = not options.get("pre_reduce", True)
    expert = {**fields, "transport": "collective"}
    with moelink.init(**expert) as plain, moelink.init(**fields, layout="masked", rows_per_expert=12) as ep:
        d, home = data(rank, seed=1, tokens=3 - rank % 2), data(rank + 5, tokens=3 - rank % 2).x
        given = d.x, d.topk_ids, d.topk_weights
        want = plain.dispatch(*given)
        first = ep.dispatch(*given)
        experts = ep.config.num_local_experts
        assert first.tokens.shape == (experts, 12, 16)
        same(first, want)
        same(ep.dispatch(*given), want)  # of a known kind
        same(ep.dispatch_async(*given).wait(), want)
        same(ep.lane(1).dispatch(*given, **limit), want)
        small = ep.dispatch(*given, max_tokens=3)
        assert small.tokens.shape == (experts, min(12, 6 * world_size), 16)
        same(small, want)
        exact, list_of = ep.dispatch(*given, host_counts=True), plain.dispatch(*given, host_counts=True)
        assert exact.host_counts == list_of.host_counts
        assert exact.tokens.shape == first.tokens.shape
        same(exact, want)
        again = ep.dispatch(d.x * 3, None, d.topk_weights, routing=exact)
        same(again, plain.dispatch(d.x * 3, None, d.topk_weights, routing=want))
        same(ep.dispatch(*given, out=again), want)
        y, z = doubled(first), doubled(want)
        forms: list[dict[str, Any]] = [{}, {}, {"shared": home}, {"epilogue": torch.ones(16)}, {"weigh": False}]
        forms += [{"reduce": False}] if late else []
        for form in forms:
            assert_bitwise_equal(ep.combine(y, first, **form, **limit), plain.combine(z, want, **form), str(form))
            limit = {}  # for the second one, which the quick lane learns from, and all others
        assert_bitwise_equal(ep.combine_async(y, first).wait(), plain.combine(z, want), "combine_async")
        bound = ep.bind(*given)
        recv = bound()
        same(recv, want)
        combine = bound.combine(doubled(recv))
        for _ in range(2):
            same(bound(), want)
            assert_bitwise_equal(combine(), plain.combine(z, want), "bound combine")
        unweighted = ep.dispatch(*given[:2]), plain.dispatch(*given[:2])
        same(*unweighted)
        weights = (d.topk_weights,) if late else ()
        outs = [c.combine(doubled(r), r, *weights) for c, r in zip((ep, plain), unweighted, strict=True)]
        assert_bitwise_equal(*outs, "weights of combine")
        ep.check()
        return int(first.num_recv_tokens)
