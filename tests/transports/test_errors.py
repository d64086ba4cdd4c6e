"""Every way a call can be refused or fail: the right error on the right rank, in time, and what works afterwards."""

import os
import re
import signal
import time
from unittest import mock

import pytest
import torch

import moelink
import moelink.memory.workspace as workspaces
from moelink.testing import assert_bitwise_equal, rank_data, run_ranks
from tests.support.mismatches import after_mismatch, no_host_ends_it
from tests.support.patience import HANG, ROOMY, SHORT, all_pids, be_patient, hurry, join, meet, resume, stop

SETUP = {"num_experts": 6, "topk": 2, "hidden_size": 32, "max_tokens_per_rank": 4}


def data(rank):
    return rank_data(seed=3, rank=rank, num_tokens=3, hidden_size=32, num_experts=6, topk=2)


def round_trip(ep, rank):
    """One correct dispatch and combine: two identity experts give twice the input."""
    d = data(rank)
    recv = ep.dispatch(d.x, d.topk_ids)
    out = ep.combine(recv.tokens, recv)
    expected = (d.x.float() * 2).to(out.dtype)
    assert_bitwise_equal(out, expected, "round trip")


BAD_DISPATCH = {
    "x not a tensor": ("x", lambda d: {"x": d.x.tolist()}),
    "x of wrong width": ("x", lambda d: {"x": d.x[:, :31].contiguous()}),
    "x of wrong rank": ("x", lambda d: {"x": d.x[0]}),
    "x of wrong dtype": ("x", lambda d: {"x": d.x.int()}),
    "x on another device": ("x", lambda d: {"x": d.x.to("meta")}),
    "x not contiguous": ("x", lambda d: {"x": d.x.t().contiguous().t()}),
    "too many tokens": ("x", lambda d: {"x": d.x.repeat(2, 1), "topk_ids": d.topk_ids.repeat(2, 1)}),
    "ids of wrong shape": ("topk_ids", lambda d: {"topk_ids": d.topk_ids[:, :1].contiguous()}),
    "ids of wrong length": ("topk_ids", lambda d: {"topk_ids": d.topk_ids[:2]}),
    "ids of wrong dtype": ("topk_ids", lambda d: {"topk_ids": d.topk_ids.float()}),
    "ids missing": ("topk_ids", lambda d: {"topk_ids": None}),
    "id too large": ("topk_ids", lambda d: {"topk_ids": d.topk_ids + 6}),
    "id below -1": ("topk_ids", lambda d: {"topk_ids": d.topk_ids - 7}),
    "weights of wrong shape": ("topk_weights", lambda d: {"topk_weights": d.topk_weights[:1]}),
    "weights of wrong dtype": ("topk_weights", lambda d: {"topk_weights": d.topk_ids}),
    "scales for bf16": ("scales", lambda d: {"scales": d.topk_weights}),
    "input scale for bf16": ("input_scale", lambda d: {"input_scale": torch.ones(1)}),
    "out of another type": ("out", lambda d: {"out": d.x}),
}

BAD_COMBINE = {
    "y of wrong rows": ("y", lambda y: {"y": y[:-1]}),
    "y of wrong dtype": ("y", lambda y: {"y": y.float()}),
    "recv of another type": ("recv", lambda y: {"recv": None}),
    "weights with pre_reduce": ("topk_weights", lambda y: {"topk_weights": torch.ones(3, 2)}),
    "shared of wrong shape": ("shared", lambda y: {"shared": y}),
    "out of wrong dtype": ("out", lambda y: {"out": torch.empty(3, 32)}),
    "epilogue of wrong shape": ("epilogue", lambda y: {"epilogue": torch.ones(31)}),
    "epilogue with reduce=False": ("epilogue", lambda y: {"epilogue": torch.ones(32), "reduce": False}),
}


def refusals(rank, world_size):
    with moelink.init(**SETUP, timeout=ROOMY) as ep:
        d = data(rank)
        for label, (name, mutate) in BAD_DISPATCH.items():
            arguments = {"x": d.x, "topk_ids": d.topk_ids}
            if rank == 1:
                with pytest.raises(moelink.ArgumentError) as caught:
                    ep.dispatch(**(arguments | mutate(d)))
                assert caught.value.name == name, f"{label}: {caught.value}"
                assert str(caught.value).startswith(f"{name}: expected "), label
                assert ", got " in str(caught.value), label
            else:
                with pytest.raises(
                    moelink.PeerAbortedError, match="rank 1 refused its arguments in dispatch"
                ) as aborted:
                    ep.dispatch(**arguments)
                assert (aborted.value.peer, aborted.value.rank, aborted.value.phase) == (1, rank, "dispatch")
            round_trip(ep, rank)
        for label, (name, mutate) in BAD_COMBINE.items():
            recv = ep.dispatch(d.x, d.topk_ids)
            arguments = {"y": recv.tokens, "recv": recv}
            if rank == 1:
                with pytest.raises(moelink.ArgumentError) as caught:
                    ep.combine(**(arguments | mutate(recv.tokens)))
                assert caught.value.name == name, f"{label}: {caught.value}"
            else:
                with pytest.raises(moelink.PeerAbortedError, match="rank 1 refused"):
                    ep.combine(**arguments)
            round_trip(ep, rank)
        ep.check()
    with pytest.raises(moelink.ClosedError, match="dispatch: the communicator is closed"):
        ep.dispatch(d.x, d.topk_ids)
    ep.close()
    return True


def test_bad_arguments_are_refused_on_their_rank_and_told_to_peers():
    assert run_ranks(refusals, 3) == [True] * 3


def foreign(rank, world_size):
    d = data(rank)
    with moelink.init(**SETUP, timeout=ROOMY) as one, moelink.init(**SETUP, timeout=ROOMY) as other:
        recv = other.dispatch(d.x, d.topk_ids)
        with pytest.raises(moelink.ForeignHandleError, match="recv: expected an output of this communicator"):
            one.combine(recv.tokens, recv)
        with pytest.raises(moelink.ForeignHandleError):
            one.dispatch(d.x, None, routing=recv)
        assert other.combine(recv.tokens, recv).shape == (3, 32)
        round_trip(one, rank)
        with pytest.raises(moelink.ForeignHandleError, match="recv: expected an output of this communicator"):
            one.combine(recv.tokens.clone().requires_grad_(), recv)
    return True


def test_what_was_checked_before_is_refused_when_it_is_not_the_same():
    """A call like an earlier good one is not checked again; one that differs in anything is."""
    x, ids, weights = torch.ones(2, 8, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    wide = torch.ones(2, 16, dtype=torch.bfloat16)
    fields = dict(num_experts=4, topk=2, hidden_size=8, max_tokens_per_rank=2)
    bad = [
        ("x", (wide, ids, weights)), ("x", (x.float().double(), ids, weights)), ("x", (wide[:, ::2], ids, weights)),
        ("x", (x.tolist(), ids, weights)), ("x", (torch.ones(3, 8).bfloat16(), ids, weights)),
        ("topk_ids", (x, ids[:1], weights)), ("topk_ids", (x, ids.T, weights)), ("topk_ids", (x, ids + 1, weights)),
        ("topk_ids", (x, None, weights)), ("topk_weights", (x, ids, weights.int())), ("topk_weights", (x, ids, 1.0)),
    ]  # fmt: skip
    with moelink.init(**fields, device="cpu") as ep:
        ep.dispatch(x, ids, weights)
        ep.dispatch(torch.nn.Parameter(x, requires_grad=False), ids, weights)
        for name, arguments in bad:
            with pytest.raises(moelink.ArgumentError, match=f"^{name}: "):
                ep.dispatch(*arguments)
            with pytest.raises(moelink.ArgumentError, match=f"^{name}: "):
                ep.dispatch(*arguments)
        with pytest.raises(moelink.ArgumentError, match="^x: "):
            ep.dispatch(torch.nn.Parameter(wide, requires_grad=False), ids, weights)
        ep.dispatch(x, ids, weights)


def test_foreign_recv_is_refused():
    assert run_ranks(foreign, 2) == [True] * 2


def delayed(rank, world_size):
    """Rank 1 makes each call when rank 0 has issued it: an asynchronous call that waited for a peer would end here."""
    d = data(rank)
    with join(**SETUP) as ep:
        if rank == 1:
            meet()
        pending = ep.dispatch_async(d.x, d.topk_ids)
        with pytest.raises(moelink.PendingError, match="dispatch"):
            ep.dispatch_async(d.x, d.topk_ids)
        if rank == 0:
            meet()
        recv = pending.wait()
        if rank == 1:
            meet()
        pending = ep.combine_async(recv.tokens, recv)
        if rank == 0:
            meet()
        out = pending.wait()
        assert_bitwise_equal(out, pending.wait(), "a second wait")
        assert_bitwise_equal(out, (d.x.float() * 2).to(out.dtype), "combine")
    return True


def test_async_calls_return_at_once_while_a_peer_is_late():
    assert run_ranks(delayed, 2) == [True] * 2


def absent(rank, world_size, how):
    """Rank 2 does not arrive before the others have given up: it waits for that, dies, or is stopped."""
    d = data(rank)
    ep = join(**SETUP)
    round_trip(ep, rank)
    pids = all_pids(world_size)
    if rank == 2:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        stop() if how == "stopped" else meet()
        with pytest.raises(moelink.PeerTimeoutError) as told:
            ep.dispatch(d.x, d.topk_ids)
        assert told.value.peer == 2, "the late rank learns that it was the late one"
        ep.close()
        return None
    if how != "killed":
        hurry(ep)
    start = time.monotonic()
    with pytest.raises(moelink.PeerTimeoutError) as caught:
        ep.dispatch(d.x, d.topk_ids)
    took = time.monotonic() - start
    if how == "late":
        meet()
    elif how == "stopped" and rank == 0:
        resume(pids[2])
    hurry(ep, ROOMY)
    start = time.monotonic()
    for call in (lambda: ep.dispatch(d.x, d.topk_ids), ep.check):
        with pytest.raises(moelink.PeerTimeoutError, match="rank 2"):
            call()
    ep.close()
    later = time.monotonic() - start
    error = caught.value
    return type(error).__name__, error.peer, error.phase, error.call, error.expected, error.got, took, later


@pytest.mark.parametrize("how", ["late", "stopped"])
def test_a_rank_that_does_not_arrive_is_named_in_time(how):
    for name, peer, phase, call, expected, got, took, later in run_ranks(absent, 4, how)[:2]:
        assert (name, peer, phase, call, expected) == ("PeerTimeoutError", 2, "dispatch", 3, 3)
        assert got == (2 if how == "late" else None)
        assert took < HANG
        assert later < HANG


def test_a_killed_rank_is_named_at_once():
    results = run_ranks(absent, 4, "killed", mortal={2})
    for rank in (0, 1, 3):
        name, peer, *_, got, took, later = results[rank]
        assert (name, peer, got) == ("PeerLostError", 2, None)
        assert took < HANG, "of a timeout of a minute"
        assert later < HANG


def dies(rank, world_size):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_without_leave_fails_the_test():
    with pytest.raises(moelink.testing.RankFailedError, match="rank 2:\nthe process ended without an answer") as failed:
        run_ranks(dies, 4)
    assert "rank 0" not in str(failed.value)
    assert "rank 3" not in str(failed.value)


def mismatched(rank, world_size):
    fields = SETUP | ({"topk": 3} if rank == 1 else {})
    with pytest.raises(moelink.ConfigMismatchError, match="topk.*2 on ranks 0, 2.*3 on rank 1") as caught:
        moelink.init(**fields, timeout=ROOMY)
    assert caught.value.field == "topk"
    if rank == 2:
        with pytest.raises(moelink.ConfigError, match="hidden_size: expected a multiple of 128"):
            moelink.init(**SETUP, dispatch_format="fp8_block128", timeout=ROOMY)
    else:
        with pytest.raises(moelink.PeerAbortedError, match="rank 2 refused its arguments in init"):
            moelink.init(**SETUP, timeout=ROOMY)
    with moelink.init(**SETUP, timeout=ROOMY) as ep:
        round_trip(ep, rank)
    return True


def test_different_configurations_are_named_on_every_rank():
    assert run_ranks(mismatched, 3) == [True] * 3


def skipped(rank, world_size):
    d = data(rank)
    with moelink.init(**SETUP, timeout=ROOMY) as ep:
        recv = ep.dispatch(d.x, d.topk_ids)
        call = (lambda: ep.dispatch(d.x, d.topk_ids)) if rank == 1 else (lambda: ep.combine(recv.tokens, recv))
        ep = after_mismatch(
            ep, call, "rank 1 makes another call .* expected a combine as on most ranks, got a dispatch;"
        )
        weights = d.topk_weights if rank == 2 else None
        words = "rank 2 calls dispatch .* with other options .* expected no topk_weights, .* got topk_weights, "
        ep = after_mismatch(ep, lambda: ep.dispatch(d.x, d.topk_ids, weights), words)
        round_trip(ep, rank)
        ep.close()
    return True


def test_a_rank_that_makes_another_call_is_named():
    assert run_ranks(skipped, 3) == [True] * 3


SUMS_OR_ROWS = {**SETUP, "transport": "symmetric", "timeout": ROOMY}


def sums_or_rows(rank, world_size, without, named, most):
    """Ranks ``without`` combine without reduction; sums of a small call have no flags, or (``most`` 0) have them."""
    with mock.patch.object(workspaces, "LAMPORT_BYTES", most), moelink.init(**SUMS_OR_ROWS) as ep:
        d = data(rank)
        for turn in range(2):
            recv = ep.dispatch(d.x, d.topk_ids)
            words = f"rank {named} calls combine .* with other options .* every row"
            with no_host_ends_it(), pytest.raises(moelink.ProtocolError, match=words):
                ep.combine(recv.tokens, recv, reduce=rank not in without)
            for reduce in (turn > 0, True, turn == 0):
                ep.combine(recv.tokens, recv, reduce=reduce)
            round_trip(ep, rank)
    return True


@pytest.mark.parametrize("most", [1 << 25, 0], ids=["small", "flags"])
@pytest.mark.parametrize("without", [(1,), (0, 2)], ids=str)
def test_ranks_that_combine_with_and_without_sums_are_named(without, most):
    """Rows that none awaits are waited for, those that none sends are not; what comes after is right."""
    assert run_ranks(sums_or_rows, 3, without, 1, most) == [True] * 3


def calls_over_another(rank, world_size, fields):
    """Rank 1 goes over another dispatch, to which every token went alike: all rows come, and mean nothing."""
    with no_host_ends_it(), moelink.init(**SUMS_OR_ROWS | fields) as ep:
        d = data(rank)
        recvs = [ep.dispatch(d.x, d.topk_ids) for _ in range(2)]
        again = [ep.dispatch(d.x, None, routing=recvs[0]) for _ in range(2)]
        for odd, usual in ((recvs[1], recvs[0]), (again[0], recvs[0]), (again[1], again[0])):
            recv = odd if rank == 1 else usual
            with pytest.raises(moelink.ProtocolError, match="rank 1 calls combine .* over the routing of another call"):
                ep.combine(recv.tokens, recv)
            round_trip(ep, rank)
        mine = recvs[rank == 1]
        with pytest.raises(moelink.ProtocolError, match="rank 1 calls dispatch .* over the routing of another call"):
            ep.dispatch(d.x, None, routing=mine)
        # One that reuses a routing is as good as the call that counted it, and x may be as before.
        recv = ep.dispatch(d.x, None, routing=again[0] if rank == 1 else recvs[0])
        expected = (d.x.float() * 2).bfloat16()
        assert_bitwise_equal(ep.combine(recv.tokens, recv), expected, "over a routing")
        # Operators carry the same numbers.
        x = d.x.clone().requires_grad_()
        first, second = (ep.dispatch(x, None, routing=recvs[0]) for _ in range(2))
        recv = second if rank == 1 else first
        with pytest.raises(moelink.ProtocolError, match="rank 1 calls combine .* over the routing of another call"):
            ep.combine(recv.tokens, recv)
        out = ep.combine(second.tokens, second)
        assert_bitwise_equal(out.detach(), expected, "through operators")
        out.sum().backward()
        assert_bitwise_equal(x.grad, torch.full_like(d.x, 2.0), "gradient")
    return True


@pytest.mark.quick("the two transports tell it in ways of their own, and the symmetric one between nodes in another")
@pytest.mark.parametrize(
    "fields", [{"transport": "collective"}, {}, {"ranks_per_node": 1}], ids=["collective", "symmetric", "nodes"]
)
def test_a_rank_that_goes_over_another_dispatch_is_named(fields):
    assert run_ranks(calls_over_another, 3, fields, timeout=200) == [True] * 3


def rows_of_another(rank, world_size, most, fields):
    """Rank 1 combines another dispatch, of fewer tokens, to other ranks: rows are awaited that nobody sends."""
    with mock.patch.object(workspaces, "LAMPORT_BYTES", most), moelink.init(**SUMS_OR_ROWS | fields) as ep, \
            no_host_ends_it():  # fmt: skip
        d = data(rank)
        full = ep.dispatch(d.x, d.topk_ids)
        few = ep.dispatch(d.x[:1], torch.full((1, 2), 2 * rank, dtype=torch.int32))
        for usual, odd in ((full, few), (few, full)):
            recv = odd if rank == 1 else usual
            for reduce in (True, False):
                with pytest.raises(moelink.ProtocolError, match="rank 1 calls combine .* over the routing of another"):
                    ep.combine(recv.tokens, recv, reduce=reduce)
                round_trip(ep, rank)
            error = moelink.ArgumentError if rank == 2 else moelink.PeerAbortedError
            with pytest.raises(error):  # rank 2 refuses the same call
                ep.combine(recv.tokens.float() if rank == 2 else recv.tokens, recv)
            round_trip(ep, rank)
            with pytest.raises(moelink.ProtocolError):  # rank 0 chooses other options in the same call
                ep.combine(recv.tokens, recv, reduce=rank != 0)
            round_trip(ep, rank)
    return True


ROWS_OF_ANOTHER = {
    "small": (1 << 25, {}), "flags": (0, {}), "nodes": (0, {"ranks_per_node": 1}),
    "every row, nodes": (0, {"pre_reduce": False, "ranks_per_node": 1}),
}  # fmt: skip


@pytest.mark.parametrize("most, fields", [
    pytest.param(*fields, id=name, marks=[] if name == "nodes" else pytest.mark.quick("ends its waits in its own way"))
    for name, fields in ROWS_OF_ANOTHER.items()
])  # fmt: skip
def test_rows_of_another_dispatch_are_not_waited_for(most, fields):
    assert run_ranks(rows_of_another, 3, most, fields, timeout=200) == [True] * 3


@pytest.mark.quick("the two transports tell it in ways of their own")
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_devices_of_one_process_go_over_one_dispatch(transport):
    datas = [data(rank) for rank in range(3)]
    xs, ids = [d.x for d in datas], [d.topk_ids for d in datas]
    with moelink.init_devices(["cpu"] * 3, **SETUP, transport=transport) as ep:
        first, second = ep.dispatch(xs, ids), ep.dispatch(xs, ids)
        mixed = [first[0], second[1], first[2]]
        for call in (
            lambda: ep.dispatch(xs, None, routing=mixed), lambda: ep.combine([recv.tokens for recv in mixed], mixed)
        ):  # fmt: skip
            with (
                no_host_ends_it(),
                pytest.raises(moelink.ProtocolError, match="expected dispatch 1 .* got dispatch 2;") as told,
            ):
                call()
            assert told.value.peer == 1
        for got, d in zip(ep.combine([recv.tokens for recv in first], first), datas, strict=True):
            assert_bitwise_equal(got, (d.x.float() * 2).bfloat16())
        with pytest.raises(moelink.ProtocolError) as told:
            call()
        with pytest.raises(moelink.ProtocolError, match=re.escape(str(told.value))):
            ep.dispatch(xs, ids)


def never_at_init(rank, world_size):
    be_patient()
    torch.distributed.init_process_group("gloo")
    meet()
    took = 0.0
    if rank != 1:  # which hosts nothing, but must not end before the others have given up
        start = time.monotonic()
        with pytest.raises(moelink.PeerTimeoutError, match="rank 1 did not arrive in init"):
            moelink.init(**SETUP, timeout=SHORT)
        took = time.monotonic() - start
    meet()  # rank 0 hosts the store that the others ask who is missing
    return took


def test_a_rank_that_never_calls_init_is_named():
    assert max(run_ranks(never_at_init, 3)) < HANG


def test_capacity_and_bad_device_ids_are_counted():
    ep = moelink.init(num_experts=2, topk=2, hidden_size=8, max_tokens_per_rank=4, capacity=3)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    recv = ep.dispatch(x, torch.tensor([[0, 1], [0, 1]]))
    assert int(recv.overflow) == 1
    assert int(recv.num_recv_tokens) == 3
    assert recv.row_offsets.tolist() == [0, 2, 3]
    assert ep.combine(recv.tokens, recv)[:, 0].tolist() == [2.0, 1.0]
    with pytest.raises(moelink.CapacityError, match="rank 0: 1 rows did not fit capacity 3"):
        ep.check()
    ep.check()


def test_every_error_is_in_the_tree_and_says_how_to_recover():
    public = [getattr(moelink, name) for name in moelink.__all__]
    errors = [value for value in public if isinstance(value, type) and issubclass(value, Exception)]
    assert len(errors) >= 14
    for error in errors:
        assert issubclass(error, moelink.MoelinkError)
        assert error.__doc__


def variable(rank: int, world_size: int) -> str | None:
    return os.environ.get("MOELINK_TESTS_SAY")


def test_ranks_have_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the server they come from, which was started earlier."""
    assert run_ranks(variable, 1) == [None]
    monkeypatch.setenv("MOELINK_TESTS_SAY", "now")
    assert run_ranks(variable, 1) == ["now"]
    monkeypatch.delenv("MOELINK_TESTS_SAY")
    assert run_ranks(variable, 1) == [None]
