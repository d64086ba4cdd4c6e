"""A mismatched call ends the communicator on every rank, by an error with both values; a refused call does not."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import moelink
from moelink.control import probe as probing
from moelink.control.mismatch import Mismatch, odd_rank
from moelink.control.probe import MISMATCHED, Failure, ProbeServer, probe
from moelink.memory.choices import choices_in
from moelink.memory.protocol import ABORT_RECORD, CALL_SHIFT, CODE_OPTIONS, CODE_TIMEOUT, DISPATCH_SENT
from moelink.testing import run_ranks
from tests.support.cases import Case, Setup
from tests.support.fault_ranks import FIELDS, check_round_trip, data
from tests.support.mismatches import after_mismatch, no_host_ends_it, same_again
from tests.support.patience import HANG, join, meet
from tests.support.symmetric_ranks import apart, dispatch_requests

BF16 = Setup("bf16")
TRANSPORTS = pytest.mark.parametrize("transport", ["collective", "symmetric"])

WITHOUT = (
    "with other options than most ranks: expected topk_weights, no routing as on most ranks, got no topk_weights, "
)


def waited(ep: moelink.Communicator, *arguments: Any) -> Any:
    return ep.dispatch_async(*arguments).wait()


def bound(ep: moelink.Communicator, *arguments: Any) -> Any:
    return ep.bind(*arguments)()


def dropped(ep: moelink.Communicator, *arguments: Any) -> Any:
    ep.dispatch_async(*arguments)
    ep.check()


def dropped_before_another(ep: moelink.Communicator, *arguments: Any) -> Any:
    ep.dispatch_async(*arguments)
    ep.dispatch(*arguments)


def through_operators(ep: moelink.Communicator, x: torch.Tensor, *arguments: Any) -> Any:
    return ep.dispatch(x.clone().requires_grad_(), *arguments)


FORMS: tuple[Callable[..., Any], ...] = (
    moelink.Communicator.dispatch, waited, bound, dropped, dropped_before_another, through_operators,
)  # fmt: skip


def every_form(rank: int, world_size: int, transport: str) -> bool:
    """Rank 1 dispatches without weights, in each form of a call; then all ranks recover, and have refused calls."""
    ep = join(**FIELDS, transport=transport)
    d = data(rank)
    for form in FORMS:
        call = partial(form, ep, d.x, d.topk_ids, *(() if rank == 1 else (d.topk_weights,)))
        ep = after_mismatch(ep, call, f"^rank {rank}: rank 1 calls .* {WITHOUT}")
        refused = moelink.ArgumentError if rank == 1 else moelink.PeerAbortedError
        with pytest.raises(refused):
            ep.dispatch(d.x.int() if rank == 1 else d.x, d.topk_ids)
        check_round_trip(ep, rank)
    ep.close()
    return True


@pytest.mark.quick("the two transports end in ways of their own")
@TRANSPORTS
def test_every_form_of_a_mismatched_call_ends_the_communicator(transport: str) -> None:
    assert run_ranks(every_form, 3, transport, timeout=200) == [True] * 3


@contextlib.contextmanager
def begun_together(ep: moelink.Communicator) -> Iterator[None]:
    """Let calls of this block begin behind it, where a thread makes them: else the first may end before another is
    started, which raises then."""
    if ep._session.transport.name == "collective":
        go = threading.Event()
        ep._session.transport._wire._thread.submit(go.wait)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            go.set()
    else:
        yield


def under_way(rank: int, world_size: int, transport: str) -> bool:
    """A combine of an earlier dispatch is started behind the mismatched dispatch: both raise the same, and so does a
    call of another lane. No rank is masked."""
    ep = join(**FIELDS, transport=transport, lanes=2, on_failure="mask")
    d = data(rank)
    recv = ep.dispatch(d.x, d.topk_ids)
    with begun_together(ep):
        first = ep.dispatch_async(d.x, d.topk_ids, None if rank == 1 else d.topk_weights)
        behind = ep.combine_async(recv.tokens, recv)
    words = set()
    for pending in (first, behind, first):
        with pytest.raises(moelink.ProtocolError, match=WITHOUT) as told:
            pending.wait()
        words.add(str(told.value))
    assert len(words) == 1
    same_again(ep.lane(1), told.value)
    assert ep.present == (0, 1, 2)
    ep.close()
    return True


@pytest.mark.quick("calls behind it are on a thread here, and in kernels there")
@TRANSPORTS
def test_calls_under_way_and_other_lanes_end_with_it(transport: str) -> None:
    assert run_ranks(under_way, 3, transport) == [True] * 3


def heard(rank: int, world_size: int, transport: str) -> tuple[str, float]:
    """Rank 0 alone reads a mismatch, of an earlier call, while its peers wait in the next call."""
    ep = join(**FIELDS, transport=transport)
    check_round_trip(ep, rank)
    d = data(rank)

    def read(_: object) -> None:
        raise Mismatch(2, "options", 1, 2).error(rank=rank, phase="dispatch", call=1)

    meet()
    start = time.monotonic()
    with pytest.raises(moelink.ProtocolError) as told:
        ep._session.within("dispatch", read, None) if rank == 0 else ep.dispatch(d.x, d.topk_ids)
    took = time.monotonic() - start
    same_again(ep, told.value)
    meet()
    ep.close()
    return str(told.value), took


@pytest.mark.quick("peers wait on a wire here, and in kernels there")
@TRANSPORTS
def test_peers_that_read_nothing_hear_of_it_at_once(transport: str) -> None:
    for rank, (words, took) in enumerate(run_ranks(heard, 3, transport)):
        assert words.startswith(
            f"rank {rank}: rank 2 calls dispatch (call 1) with other options than most ranks: expected no "
            "topk_weights, no routing as on most ranks, got topk_weights, no routing; "
        )
        assert took < HANG


def other_phase_refused(rank: int, world_size: int) -> bool:
    """Rank 1 refuses a combine while the others dispatch: it raises its own error, and the mismatch from then on."""
    ep = join(**FIELDS, transport="collective")
    d = data(rank)
    recv = ep.dispatch(d.x, d.topk_ids)
    words = "rank 1 makes another call .* expected a dispatch as on most ranks, got a combine;"
    if rank == 1:
        with pytest.raises(moelink.ArgumentError):
            ep.combine(recv.tokens.double(), recv)
        with pytest.raises(moelink.ProtocolError, match=words):
            ep.dispatch(d.x, d.topk_ids)
    else:
        with pytest.raises(moelink.ProtocolError, match=words):
            ep.dispatch(d.x, d.topk_ids)
    ep.close()
    return True


def test_a_rank_that_refuses_another_call_ends_as_well() -> None:
    assert run_ranks(other_phase_refused, 3) == [True] * 3


def test_a_refused_call_after_an_unread_mismatch_is_no_call() -> None:
    """As on a device, whose host has not read the record of the call before."""
    with moelink.init(num_experts=2, topk=2, hidden_size=16, max_tokens_per_rank=4, transport="symmetric") as ep:
        x, ids = torch.ones(1, 16, dtype=torch.bfloat16), torch.tensor([[0, 1]], dtype=torch.int32)
        ep.dispatch(x, ids)
        (rank,) = ep._session.transport.ranks  # type: ignore[attr-defined]
        rank.record[ABORT_RECORD : ABORT_RECORD + 5] = torch.tensor([CODE_OPTIONS, 0, 0, 0, 1])
        with pytest.raises(moelink.ArgumentError):
            ep.dispatch(x.int(), ids)
        assert rank.control[DISPATCH_SENT] == 1 << CALL_SHIFT, "no refusal is sent"
        with pytest.raises(moelink.ProtocolError, match="expected the same on all ranks, got different ones") as told:
            ep.dispatch(x, ids)
        same_again(ep, told.value)


def test_the_own_record_counts_before_a_peers_word() -> None:
    """A peer's poison, of the same mismatch or of its death just after, does not hide the note of this rank's
    kernels."""
    with moelink.init(num_experts=2, topk=2, hidden_size=16, max_tokens_per_rank=4, transport="symmetric") as ep:
        (rank,) = ep._session.transport.ranks  # type: ignore[attr-defined]
        rank.record[:7] = torch.tensor([CODE_TIMEOUT, 0, 0, 0, 1, 1, -1])
        rank.record[ABORT_RECORD : ABORT_RECORD + 5] = torch.tensor([CODE_OPTIONS, 0, 0, 0, 1])
        with pytest.raises(moelink.ProtocolError) as told:
            ep.check()
        same_again(ep, told.value)


def test_a_report_carries_field_and_values() -> None:
    for field in ("options", "origin", "row_bytes", "call", "phase", "config", "magic"):
        mismatch = Mismatch.of(field, {0: 2**62 + 3, 1: 5, 2: 2**62 + 3})
        assert mismatch == Mismatch(1, field, 3, 5)
        assert Mismatch.unpacked(1, mismatch.packed) == mismatch
        assert 0 <= mismatch.packed < 2**63
        assert mismatch.packed >= 2**31, "kernels that carry it have a number of 64 bits"
        told = mismatch.error(rank=2, phase="combine", call=7)
        assert Failure.of(told).error(2).args == told.args
    assert Mismatch.of("origin", {0: 1, 2: 1}) is None
    assert odd_rank({0: 5, 1: 6, 2: 7, 3: 6}) == (0, 5, 6)
    largest = Mismatch.unpacked(0, 2**63 - 1)
    assert largest.usual == largest.value


def test_a_probe_server_keeps_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_PROBE_SECONDS", HANG)  # its process may need long to start
    server = ProbeServer(3)
    try:
        report = Failure(1, "dispatch", 4, expected=Mismatch(1, "options", 2, 1).packed, got=MISMATCHED)
        probe(server.address, report)
        assert server.failure == report
    finally:
        server.close()


def test_values_are_those_of_the_call_alone() -> None:
    """The example of ``choices_in``, and a look at another call."""
    ranks, case = apart(BF16, 2), Case(BF16, "uniform", small=True)
    requests = dispatch_requests(case, [0, 1])
    requests[1].topk_weights = None
    pending = [transport.dispatch([request]) for transport, request in zip(ranks, requests, strict=True)]
    with no_host_ends_it():
        for number, one in enumerate(pending):
            with pytest.raises(
                moelink.ProtocolError, match=re.escape(f"rank {number}: rank 1 calls dispatch (call 1)")
            ):
                one.wait()
    member = ranks[0].ranks[0]
    block, workspace = member.memory.local, member.workspace
    assert choices_in(block, workspace, phase=0, call=1, origin=False) == {0: 2, 1: 1}
    assert choices_in(block, workspace, phase=0, call=1, origin=True) == {0: 0, 1: 0}
    assert choices_in(block, workspace, phase=0, call=2, origin=False) == {}
    assert choices_in(block, workspace, phase=1, call=1, origin=False) == {}
