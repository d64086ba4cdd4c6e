"""Exchanges over a caller's group have a deadline and name the rank that is missing; there is one way to make them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moelink
from moelink.testing import run_ranks
from tests.control.exchange_ranks import exchanges, missing

ROOT = Path(moelink.__file__).parent
EXCHANGES = frozenset({
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "allgather", "allreduce", "alltoall", "alltoall_base", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
})  # fmt: skip
OWN_DEADLINE = {
    "control/exchange.py": "the one way over a caller's group",
    "control/group.py": "moelink's own group, polled until the deadline of the set-up",
    "transports/collective/group_wire.py": "moelink's own groups, polled until the deadline of the call",
    "tools/doctor/pairs.py": "a group of the doctor, whose timeout is that of its steps",
    "tools/demo/ranks.py": "ends with the demonstration, whose ranks its launcher ends together",
}
"""Files, and folders, that exchange with torch's own calls, and what ends their waits."""
_GROUPS = ("dist", "control", "data", "own", "group")


def exchanges_in(source: str) -> list[int]:
    """The lines on which ``source`` calls an exchange of torch's on ``dist`` or on a group."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in EXCHANGES
        and ast.unparse(node.func.value).rpartition(".")[2].lstrip("_") in _GROUPS
    ]


@pytest.mark.quick("milliseconds")
def test_exchanges_are_made_where_they_have_a_deadline() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in ROOT.rglob("*.py")
        if (lines := exchanges_in(path.read_text()))
    }
    allowed = tuple(OWN_DEADLINE)
    wrong = {name: lines for name, lines in found.items() if not name.startswith(allowed)}
    assert not wrong, f"expected exchanges by moelink.control.exchange, got torch's own in {wrong}"
    assert all(any(name.startswith(each) for name in found) for each in allowed)


@pytest.mark.quick("milliseconds")
@pytest.mark.parametrize(
    "source", ["dist.all_reduce(x, group=g)", "self._group.allreduce([x])", "torch.distributed.dist.recv(x, 1)"]
)
def test_the_search_for_exchanges_finds(source: str) -> None:
    assert exchanges_in(source) == [1]


def test_exchanges_of_all_ranks() -> None:
    assert run_ranks(exchanges, 3) == [[[6.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]] * 3


@pytest.mark.parametrize("how", ["late", pytest.param("killed", marks=pytest.mark.quick("another path: gloo's error"))])
def test_every_rank_names_the_one_that_is_missing(tmp_path: Path, how: str) -> None:
    killed = {2} if how == "killed" else set()
    said = run_ranks(missing, 3, str(tmp_path), how, mortal=killed)
    assert [each[1] for rank, each in enumerate(said) if rank not in killed] == [2] * (3 - len(killed))
