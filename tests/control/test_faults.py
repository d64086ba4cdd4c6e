"""Ranks that really die, stop or come late, on CPU ranks of both transports, the symmetric one within a node and
between nodes; and what is left goes on.

Nothing here is measured that a busy machine makes longer (``support/patience.py``): what is told at once is told long
before a timeout of a minute. That a survivor raises within its timeout is checked in virtual time, for steps of the
collective transport in ``test_slow_link.py`` and for kernels in ``test_fault_schedules.py``.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moelink
from moelink.control import process
from moelink.control.process import await_release
from moelink.control.recovery import NOTHING, Proposal, _agree
from moelink.testing import run_ranks
from tests.control import recover_ranks
from tests.support import fault_ranks
from tests.support.patience import HANG, ROOMY
from tests.support.virtual_time import VirtualTime
from tests.tiers import seeds

TRANSPORTS = ("collective", "symmetric")
KILLS = [  # the victim, the phase, and how far it gets: a moment of the collective call, or stores of the kernel
    ("collective", 0, "dispatch", 0),
    ("collective", 2, "dispatch", 1),
    ("collective", 2, "combine", 0),
    ("collective", 0, "combine", 1),
    ("symmetric", 0, "dispatch", 14),
    ("symmetric", 2, "combine", 5),
    ("nodes", 0, "dispatch", 14),
    ("nodes", 2, "combine", 5),
]


@pytest.mark.parametrize("transport, victim, phase, number", KILLS)
def test_a_rank_killed_in_the_middle_of_a_call(transport: str, victim: int, phase: str, number: int) -> None:
    results = run_ranks(fault_ranks.killed, 3, transport, victim, phase, number, mortal={victim})
    assert results[victim] is None
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        told = result["told"]
        assert (told.kind, told.rank, told.peer) == ("PeerLostError", rank, victim)
        assert told.phase in ("dispatch", "combine")
        assert told.call >= 3
        assert told.took < HANG
        assert told.after < HANG
        assert result["left"] == []
    one, other = (result["told"] for result in results if result)
    # What the victim had sent before it died may have completed the call of one survivor and not of the other.
    assert abs(one.call - other.call) <= 1
    assert (one.phase == other.phase) == (one.call == other.call)


@pytest.mark.parametrize("transport, number", [("collective", 0), ("collective", 1), ("symmetric", 14), ("nodes", 14)])
def test_a_rank_stopped_past_the_timeout_and_then_continued(transport: str, number: int) -> None:
    first, stopped, last = run_ranks(fault_ranks.stopped, 3, transport, "dispatch", number)
    for rank, result in ((0, first), (2, last)):
        told = result["told"]
        assert (told.kind, told.rank, told.peer) == ("PeerTimeoutError", rank, 1)
        assert told.took < HANG
        assert told.after < HANG
        assert result["calls"] >= 3
        assert result["left"] == []
    assert stopped["told"].peer == 1, "the rank that was stopped learns that it was the one"


@pytest.mark.parametrize("first", [(1,), (0, 2)], ids=["it_waits_first", "the_others_wait_first"])
def test_a_rank_that_leaves_out_a_call_is_the_one_that_is_named(first: tuple[int, ...]) -> None:
    """Closes over: the rank that gives up first and names whom it waits for."""
    told = run_ranks(fault_ranks.combine_left_out, 3, first)
    assert [(kind, peer) for kind, peer, _ in told] == [("PeerTimeoutError", 1)] * 3, told
    assert "this rank itself" in told[1][2]


def test_a_rank_that_waits_raises_at_once_what_a_peer_has_found_out(tmp_path: Path) -> None:
    for told in run_ranks(fault_ranks.told_while_waiting, 3, str(tmp_path), mortal={2})[:2]:
        assert (told.kind, told.peer) == ("PeerTimeoutError", 2)
        assert told.took < HANG


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_one_rank_refuses_where_nothing_travels_concerns_no_other(transport: str) -> None:
    for seconds in run_ranks(fault_ranks.refused_where_nothing_travels, 2, transport):
        assert max(seconds) < HANG, seconds


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_go_on_after_a_rank_was_only_late(transport: str) -> None:
    assert [told.peer for told in run_ranks(fault_ranks.late, 3, transport)] == [1, 1, 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_recover_after_recover_down_to_one(transport: str, tmp_path: Path) -> None:
    results = run_ranks(recover_ranks.one_after_the_other, 4, transport, str(tmp_path), mortal={0, 1, 3})
    assert results == [None, None, [2, 4, 7], None]  # of 7 experts


def test_lists_that_cannot_be_are_refused_and_lists_that_differ_named() -> None:
    assert run_ranks(recover_ranks.wrong_lists, 3) == [True] * 3


def test_who_gave_up_first_is_not_named_for_who_never_came() -> None:
    """Ranks 0 and 1 wait for rank 2. Rank 0's time is up a moment earlier, so that it shows nothing any more either."""
    answers = [{0: Proposal((0, 1, 2), bytes(16), 0), 2: NOTHING}] + [{0: NOTHING, 2: NOTHING}] * 1000
    clock = VirtualTime()
    board: Any = SimpleNamespace(
        rank=1, mine=Proposal((0, 1, 2), bytes(16), 0), others=[0, 2], show=lambda corner: None,
        agree=lambda shown: None, read=lambda: answers.pop(0),
        around=SimpleNamespace(now=clock.monotonic, sleep=clock.sleep, phase="recover"),
    )  # fmt: skip
    with pytest.raises(moelink.PeerTimeoutError, match="rank 2 did not arrive in recover.*has not called") as told:
        _agree(board, begin=0.0, timeout=2.0)
    assert told.value.peer == 2
    assert 5.0 <= clock.now < 5.1, "twice the timeout, as a call of before may last so long, and a second"


@pytest.mark.parametrize("moment", ["at once", "meeting", "building"])
def test_a_death_in_recover_is_named_and_recover_works_again(moment: str, tmp_path: Path) -> None:
    for result in run_ranks(recover_ranks.death_in_recover, 4, moment, str(tmp_path), mortal={0, 3})[1:3]:
        kind, peer = result
        assert peer == 0
        assert kind == "PeerLostError" or (kind == "PeerTimeoutError" and moment != "at once")


def test_a_recovered_communicator_waits_as_long_as_the_old_one() -> None:
    """Closes over: a new communicator whose timeout is what recover had left of it."""
    assert run_ranks(recover_ranks.late_to_recover, 3, mortal={0})[1:] == [{timedelta(seconds=ROOMY)}] * 2


def test_who_is_left_out_does_not_go_on_alone(tmp_path: Path) -> None:
    """Rank 2 has gone on from the last exchange, in which rank 0 died; rank 1 has not."""
    assert run_ranks(recover_ranks.left_out, 3, str(tmp_path), mortal={0}) == [None, True, True]


@pytest.mark.full("waits for a meeting's deadline; the quick schedules of test_recovery_schedules meet the same code")
def test_survivors_do_not_part_over_a_rank_that_dies_as_they_meet(tmp_path: Path) -> None:
    told = run_ranks(recover_ranks.host_of_recover_gives_up, 3, str(tmp_path), mortal={2})
    assert told == [(2, (0, 1)), (2, (0, 1)), None]


def test_a_recovered_communicator_trains() -> None:
    assert run_ranks(recover_ranks.gradients, 3, mortal={0}) == [None, True, True]


@seeds(1, 4)
def test_a_process_may_end_right_after_close(seeds: Any) -> None:
    """gloo's threads free tensors a moment after an exchange; one that did so in a dying interpreter would abort it."""
    for _ in seeds:
        assert run_ranks(fault_ranks.held_after_close, 3) == [[1, 1, 1, 1]] * 3
        assert run_ranks(fault_ranks.held_after_gathers, 3) == [[1] * 16] * 3


def test_released_tensors_are_waited_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    product = [torch.ones(2, requires_grad=True) * (held := torch.ones(2))]  # autograd holds the factor
    clock = VirtualTime()
    monkeypatch.setattr(process, "time", clock)
    await_release([held], seconds=0.05)
    assert 0.05 <= clock.now < 0.06
    clock.at(0.2, product.clear)
    await_release([held], seconds=20)
    assert held._use_count() == 1  # type: ignore[attr-defined]
    assert 0.2 <= clock.now < 0.21
