"""An exception that enters a call at any line leaves all ranks in step, or ends the communicator on all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moelink
from moelink.testing import run_ranks
from tests.control import interrupted_ranks
from tests.support.fault_ranks import FIELDS


@pytest.mark.quick("what is half done differs between the transports")
@pytest.mark.parametrize("transport, every", [("collective", 31), ("symmetric", 62)], ids=["collective", "symmetric"])
def test_an_exception_at_some_lines_of_a_call(transport: str, every: int) -> None:
    some_lines(transport, every, 5)


@pytest.mark.full("test_an_exception_at_some_lines_of_a_call enters every 31st line, or 62nd")
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_an_exception_at_every_line_of_a_call(transport: str, part: int) -> None:
    some_lines(transport, 16, part)


@pytest.mark.quick("each phase has its own path")
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_an_exception_leaves_gradients_as_they_were(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes between the end of a block under no_grad and its exit keeps that exit from running."""

    def interrupted(*_: Any, **__: Any) -> None:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    x = torch.ones(2, FIELDS["hidden_size"], dtype=torch.bfloat16)
    try:
        with moelink.init(**FIELDS, transport="collective") as ep:
            recv = ep.dispatch(x, torch.ones(2, 2, dtype=torch.int32))
            monkeypatch.setattr(ep._session.transport, phase, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ep.dispatch(x, None, routing=recv) if phase == "dispatch" else ep.combine(recv.tokens, recv)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def some_lines(transport: str, every: int, first: int) -> None:
    ends, *others = run_ranks(interrupted_ranks.interrupted, 3, transport, every, first, timeout=900)
    assert all(len(other) == len(ends) for other in others)
    assert any("PeerAbortedError" in end for end in ends), ends
    assert any("PeerLeftError" in end for end in ends), ends
