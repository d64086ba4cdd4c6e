"""Ranks that make bound calls, next to eager ones, and compare the two."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import moelink
from moelink.testing import assert_bitwise_equal
from tests.support.fault_ranks import FIELDS, data

COMPARED = ("row_offsets", "expert_ids", "num_recv_tokens", "overflow")


def bound_beside_eager(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Rows, ids and weights change between calls; each bound result equals the eager one. Returns the rows received."""
    rows = 0
    with moelink.init(**FIELDS, **options) as ep:
        d = data(rank, seed=0)
        x, ids, weights = d.x.clone(), d.topk_ids.clone(), d.topk_weights.clone()
        dispatch = ep.bind(x, ids, weights)
        combine, y = None, torch.empty(0)
        for seed in range(3):
            new = data(rank, seed=seed)
            for mine, other in ((x, new.x), (ids, new.topk_ids), (weights, new.topk_weights)):
                mine.copy_(other)
            recv = dispatch()
            assert recv.handle is not None
            assert dispatch.recv is recv
            count = int(recv.row_offsets[-1])
            rows += count
            want = ep.dispatch(new.x, new.topk_ids, new.topk_weights)
            for name in COMPARED:
                assert_bitwise_equal(getattr(recv, name), getattr(want, name), name)
            for name in ("tokens", "src_info", "weights"):
                assert_bitwise_equal(getattr(recv, name)[:count], getattr(want, name)[:count], name)
            if combine is None:
                y = recv.tokens.float().nan_to_num().to(ep.config.combine_dtype)
                combine = dispatch.combine(y)
            y.copy_(recv.tokens.to(y.dtype))
            out = combine()
            assert_bitwise_equal(out, ep.combine(want.tokens.to(y.dtype), want), "out")
            assert combine() is out
        if rank == 1:  # a refusal of another kind of call meets bound ones
            with contextlib.suppress(moelink.ArgumentError):
                ep.dispatch(x[:, :3], ids)
        else:
            with pytest.raises(moelink.PeerAbortedError) as refusal:
                dispatch()
            assert refusal.value.peer == 1
        assert_bitwise_equal(dispatch().row_offsets, want.row_offsets, "after a refusal")
    return rows
