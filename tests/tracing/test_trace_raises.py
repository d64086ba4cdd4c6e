"""An exception that leaves one rank's trace block ends that trace on all ranks, and nothing else."""

from __future__ import annotations

from pathlib import Path

from moelink.testing import run_ranks
from tests.tracing import raising_ranks


def test_peers_hear_who_raised_in_its_trace_block_and_later_traces_work() -> None:
    """Closes over: an exchange that the raising rank leaves out, so that the next one meets the peers' last one."""
    peer, struck = run_ranks(raising_ranks.raising, 2, 1)
    assert struck == ["ZeroDivisionError", "ZeroDivisionError", "2 ranks"]
    assert peer == ["PeerAbortedError 1", "PeerAbortedError 1", "2 ranks"]


def test_a_rank_that_stays_in_its_block_is_late_in_trace(tmp_path: Path) -> None:
    _, told = run_ranks(raising_ranks.staying, 2, str(tmp_path))
    assert told.startswith("rank 1: a rank did not arrive in trace: expected it within the timeout, got nothing; close")
