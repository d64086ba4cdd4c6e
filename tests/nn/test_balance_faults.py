"""A step of the balancer happens on all ranks or on none, or their communicators end with one named error."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelink.testing import run_ranks
from tests.nn.balance_fault_ranks import faulty


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("how", ["_pack:OddError", "_unpack:OddError", "_pack:KeyboardInterrupt"])
def test_a_step_that_raises_on_one_rank_changes_none(tmp_path: Path, how: str, transport: str) -> None:
    said = run_ranks(faulty, 3, str(tmp_path), how, transport)
    first, second = zip(*said, strict=True)
    kind = "KeyboardInterrupt" if "Keyboard" in how else "OddError"
    assert [each[:2] for each in first] == [("PeerAbortedError", 1), (kind, -1), ("PeerAbortedError", 1)]
    assert {each[2] for each in first} == {(0, 1, 2, 3, 4, 5, 0, 1)}
    assert all(each[0] == "" for each in second)
    assert len({each[2] for each in second}) == 1
    assert all(each[3] is True for each in (*first, *second))


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("how", ["late", "killed", "_use:after", "_exchange:OddError"])
def test_a_step_that_some_may_have_made_ends_the_communicator(tmp_path: Path, how: str, transport: str) -> None:
    mortal = {1} if how == "killed" else set()
    said = [each for each in run_ranks(faulty, 3, str(tmp_path), how, transport, mortal=mortal) if each is not None]
    assert len(said) == 3 - len(mortal)
    for first, second in said:
        assert first[3] == second[3] == "1"
        if how in ("late", "killed"):
            assert first[1] == second[1] == 1
