"""Ranks that make bound calls next to others."""

from __future__ import annotations

from typing import Any

import pytest

import moelink
from moelink.testing import assert_bitwise_equal
from tests.support.fault_ranks import FIELDS, data


def refused_beside_bound(rank: int, world_size: int, options: dict[str, Any]) -> bool:
    """A refusal of another kind of call meets bound ones, and the next bound call works."""
    with moelink.init(**FIELDS, **options) as ep:
        d = data(rank)
        dispatch = ep.bind(d.x, d.topk_ids, d.topk_weights)
        recv = dispatch()
        assert dispatch.recv is recv
        combine = dispatch.combine(recv.tokens)
        want = combine().clone()
        if rank == 1:
            with pytest.raises(moelink.ArgumentError):
                ep.dispatch(d.x[:, :3], d.topk_ids)
        else:
            with pytest.raises(moelink.PeerAbortedError) as refusal:
                dispatch()
            assert refusal.value.peer == 1
        dispatch()
        out = combine()
        assert_bitwise_equal(out, want, "after a refusal")
        assert combine() is out
    return True
