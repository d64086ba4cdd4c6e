"""``init`` can be repeated after any exception, also one that is none of moelink's."""

from __future__ import annotations

import pytest

from moelink.testing import run_ranks
from tests.control import again_ranks


@pytest.mark.parametrize("kind", ["ctrl-c", "handler"])
def test_init_works_again_after_a_signal_came_while_it_made_the_default_group(kind: str) -> None:
    """Closes over: a default group that is finished behind the exception and that the next attempt trips over."""
    struck, peer = run_ranks(again_ranks.interrupted, 2, kind, timeout=120)
    assert struck[0] == ({"ctrl-c": "KeyboardInterrupt", "handler": "HandlerError"}[kind], False), struck
    assert struck[-1] == peer[-1] == ("", True), (struck, peer)


@pytest.mark.parametrize("late", [1.0, 0.0])
def test_the_rank_that_never_came_is_named_when_the_host_of_the_store_gives_up_first(late: float) -> None:
    """Closes over: a store that ends with its host's exception, so that the others blame the host."""
    _, told, _ = run_ranks(again_ranks.given_up, 3, late, mortal={0})
    assert told[:2] == ("PeerTimeoutError", 2), told


@pytest.mark.parametrize("mode", ["alltoall", "allreduce"])
def test_a_rank_that_has_set_up_and_closed_is_not_gone_for_one_that_still_sets_up(mode: str) -> None:
    """Closes over: an ended probe server, which a rank that is done and one that is dead have alike."""
    assert run_ranks(again_ranks.closed_by_one, 3, mode) == [["made", "made"]] * 3


def test_a_rank_that_has_set_up_has_a_communicator_although_another_has_ended() -> None:
    """Closes over: a store and a probe server that end with rank 0's program, which was shorter than an exchange."""
    assert all("closed" not in said for said in run_ranks(again_ranks.ended_by_one, 2))
