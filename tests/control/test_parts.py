"""A rank's part in a communicator: how it ends, who may play it, and what becomes of a call that is dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelink.testing import run_ranks
from tests.control import part_ranks
from tests.support.patience import HANG

TRANSPORTS = ("collective", "symmetric")
both = pytest.mark.quick("the transports tell peers in ways of their own")


@both
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_leaves_by_an_exception_is_named_at_once(transport: str) -> None:
    first, second, third = run_ranks(part_ranks.leaves_by_an_exception, 3, transport)
    assert second[0] == "ZeroDivisionError: a user's mistake"
    for words, took in (first, third):
        assert words.startswith("PeerLeftError")
        assert "rank 1 left the communicator" in words
        assert took < HANG, "of a timeout of a minute"


def test_what_a_backward_met_ends_the_forward_calls() -> None:
    for peer, took in run_ranks(part_ranks.backward_meets_a_late_rank, 3):
        assert peer == "1"
        assert took < HANG, "of a timeout of a minute"


@both
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pending_call_that_is_dropped_is_finished(transport: str) -> None:
    for found in run_ranks(part_ranks.dropped_and_forgotten, 2, transport):
        assert "got one without wait(), call " in found[0]
        assert "part_ranks.py:" in found[0]


@both
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_child_is_refused_and_does_its_parent_no_harm(transport: str) -> None:
    words = run_ranks(part_ranks.forked, 2, transport)[0].split("\n")
    assert [line.split(":")[0] for line in words] == ["dispatch", "check", "recover", "close"]
    assert all("expected the process that made the communicator" in line for line in words)


def test_a_dead_rank_whose_child_holds_its_sockets_is_named_after_the_timeout(tmp_path: Path) -> None:
    """No connection breaks, but its probe server has ended with it."""
    told, none = run_ranks(part_ranks.outlived_by_a_child, 2, str(tmp_path), mortal={1})
    assert none is None
    assert (told.kind, told.peer) == ("PeerLostError", 1)
    assert told.took < HANG


@both
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_threads_in_one_communicator_are_refused(transport: str) -> None:
    found = run_ranks(part_ranks.two_threads, 2, transport)[0]
    assert sorted(line.split(":")[0] for line in found)[:2] == ["combine", "dispatch"]
