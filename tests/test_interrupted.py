"""An exception that enters a call at any line leaves all ranks in step, or ends the communicator on all at once."""

from __future__ import annotations

import pytest

import interrupted_ranks
from moelink.testing import run_ranks


@pytest.mark.quick("what is half done differs between the transports")
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_an_exception_at_some_lines_of_a_call(transport: str) -> None:
    some_lines(transport, 23, 5)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_an_exception_at_every_line_of_a_call(transport: str, part: int) -> None:
    some_lines(transport, 4, part)


def some_lines(transport: str, every: int, first: int) -> None:
    ends, *others = run_ranks(interrupted_ranks.interrupted, 3, transport, every, first, timeout=900)
    assert all(len(other) == len(ends) for other in others)
    assert any("PeerAbortedError" in end for end in ends), ends
    assert any("PeerLeftError" in end for end in ends), ends
