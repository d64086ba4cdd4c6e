"""The symmetric transport as users meet it: faults in processes over shared memory, and the debug mode."""

import multiprocessing
import time

import pytest
from triton.runtime.errors import InterpreterError

import moelink
from moelink.testing import rank_data, run_ranks
from tests.support.mismatches import after_mismatch
from tests.support.patience import HANG, ROOMY, hurry, join, meet

SETUP = {"num_experts": 6, "topk": 2, "hidden_size": 32, "max_tokens_per_rank": 2, "transport": "symmetric"}


def faults(rank, world_size):
    """A refusal, ranks that pass other options, and a rank that never calls, one after the other."""
    d = rank_data(seed=3, rank=rank, num_tokens=2, hidden_size=32, num_experts=6, topk=2)
    ep = join(**SETUP)
    if rank == 1:
        with pytest.raises(moelink.ArgumentError, match="x: expected"):
            ep.dispatch(d.x[:, :31].contiguous(), d.topk_ids)
    else:
        with pytest.raises(moelink.PeerAbortedError, match="rank 1 refused its arguments in dispatch"):
            ep.dispatch(d.x, d.topk_ids)
    recv = ep.dispatch(d.x, d.topk_ids)
    assert (ep.combine(recv.tokens, recv) == d.x * 2).all()
    # Two exchanges: the workspace holds two rows a token, and not all three.
    with join(**{**SETUP, "topk": 3}) as wide:
        more = rank_data(seed=3, rank=rank, num_tokens=2, hidden_size=32, num_experts=6, topk=3)
        recv = wide.dispatch(more.x, more.topk_ids)
        error, y = (moelink.ArgumentError, recv.tokens[:-1]) if rank == 1 else (moelink.PeerAbortedError, recv.tokens)
        with pytest.raises(error):
            wide.combine(y, recv, reduce=False)
        assert (wide.combine(recv.tokens, recv) == more.x * 3).all()
    recv = ep.dispatch(d.x, d.topk_ids)
    ep = after_mismatch(
        ep, lambda: ep.dispatch(d.x, d.topk_ids, d.topk_weights if rank == 1 else None),
        "rank 1 calls dispatch .* with other options .* expected no topk_weights, .* got topk_weights, ",
    )  # fmt: skip
    recv = ep.dispatch(d.x, d.topk_ids)
    assert (ep.combine(recv.tokens, recv) == d.x * 2).all()
    meet()
    hurry(ep)
    if rank == 1:
        meet()
        with pytest.raises(moelink.PeerTimeoutError) as told:
            ep.dispatch(d.x, d.topk_ids)
        ep.close()
        return told.value.peer, 0.0, 0.0
    start = time.monotonic()
    with pytest.raises(moelink.PeerTimeoutError, match="rank 1 did not arrive in dispatch") as caught:
        ep.dispatch(d.x, d.topk_ids)
    took = time.monotonic() - start
    meet()
    hurry(ep, ROOMY)
    start = time.monotonic()
    for call in (lambda: ep.dispatch(d.x, d.topk_ids), ep.check):
        with pytest.raises(moelink.PeerTimeoutError, match="rank 1"):
            call()
    ep.close()
    return caught.value.peer, took, time.monotonic() - start


def test_refusals_other_options_and_absent_ranks():
    for peer, took, later in run_ranks(faults, 2, timeout=120):
        assert peer == 1
        assert took < HANG
        assert later < HANG


def outside(rank, world_size):
    """With MOELINK_DEBUG=1 a kernel that leaves its region is stopped."""
    ep = moelink.init(**SETUP, timeout=ROOMY)
    transport = ep._session.transport
    d = rank_data(seed=3, rank=rank, num_tokens=2, hidden_size=32, num_experts=6, topk=2)
    recv = ep.dispatch(d.x, d.topk_ids)
    assert (ep.combine(recv.tokens, recv) == d.x * 2).all()
    launcher = transport.ranks[0].launcher
    launcher.peers = launcher.peers._replace(table=launcher.peers.table + (1 << 40))
    try:
        ep.dispatch(d.x, d.topk_ids)
    except (moelink.MoelinkError, InterpreterError) as error:
        return "outside every known range" in str(error)
    return False


def test_debug_mode_stops_accesses_outside_a_region(monkeypatch):
    monkeypatch.setenv("MOELINK_DEBUG", "1")
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(outside, (0, 1))
