"""Ranks may say anything to ``moelink doctor``: another version wrote it, or a stranger who reached the port."""

from __future__ import annotations

import copy
import io
import json
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

from moelink.control.probe import TOKEN_BYTES, ProbeServer
from moelink.tools.cli.doctor import doctor_view, to_document
from moelink.tools.doctor import Examination, diagnose
from moelink.tools.doctor.board import LONGEST_TEXT, WORDS, Board, address
from moelink.tools.doctor.facts import facts_of
from moelink.tools.documents import take

TITLE, BELL = "\x1b]0;owned\x07", "\x07"
"""What sets the title of a terminal, and what rings it."""


@pytest.fixture(scope="module")
def honest() -> dict[str, Any]:
    return facts_of(torch.device("cpu"))


def changed(facts: dict[str, Any], value: Any, *path: str) -> dict[str, Any]:
    """A copy of ``facts`` with ``value`` at a place."""
    facts = copy.deepcopy(facts)
    node = facts
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return facts


def seen(found: Examination) -> tuple[str, list[str]]:
    """What a terminal gets, and where something is wrong. The JSON form is one, too."""
    console = Console(file=(out := io.StringIO()), force_terminal=True, width=200)
    problems = diagnose(found)
    console.print(doctor_view(console, found, problems))
    json.dumps(to_document(found, problems), allow_nan=False)
    return out.getvalue(), [problem.where for problem in problems]


TEXTS = ("[/red]", "[link=file:///x]a[/link]", "[bold", f"a{TITLE}b", "\u202egnp.exe", "\r\nroot@host#", "\x9b2J")


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize("path", [("host",), ("device", "name"), ("versions", "torch"), ("device", "driver", "index")])
def test_texts_reach_the_terminal_as_they_are_or_not_at_all(
    honest: dict[str, Any], text: str, path: tuple[str, ...]
) -> None:
    shown, _ = seen(Examination(facts=[honest, changed(honest, text, *path)], mesh=["ok", text]))
    for forbidden in ("\x1b]", BELL, "\x9b", "\r", "\u202e", "file:///x\x1b"):
        assert forbidden not in shown
    if text.isprintable():
        assert text in shown, "markup is no markup here"


OTHER_FORMS: dict[str, tuple[tuple[str, ...], Any]] = {
    "versions a list": (("versions",), [1]),
    "a version an object": (("versions", "torch"), {}),
    "the host a number": (("host",), 5),
    "free memory a text": (("device", "free"), "x"),
    "free memory not finite": (("device", "free"), float("nan")),
    "free memory beyond all": (("device", "free"), 10**400),
    "free memory a truth": (("device", "free"), True),
    "no device": (("device",), None),
    "a driver's value a list": (("device", "driver"), {"index": [0]}),
    "adapters numbers": (("network",), [1, 2]),
    "NVSHMEM a text": (("nvshmem",), "yes"),
}


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize("path, value", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_facts_of_another_form_are_not_taken(honest: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    shown, where = seen(Examination(facts=[honest, changed(honest, value, *path)]))
    assert where == ["rank 1"]
    assert "expected its facts in the form of this version, got another" in shown


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    "step, answers",
    [
        ("facts", [5]), ("facts", [{}]), ("facts", [[]]), ("times", ["x"]), ("times", [float("inf")]),
        ("reached", [{1: "answers"}, {0: 5}]), ("reached", [{"first": "answers"}]), ("formats", [{"bf16": "ok"}, "x"]),
        ("formats", [{"bf16": None}]), ("mesh", [{}]),
    ],
    ids=str,
)  # fmt: skip
def test_each_step_takes_its_own_form_alone(honest: dict[str, Any], step: str, answers: list[Any]) -> None:
    found = Examination(**{"facts": [honest] * len(answers), step: answers})
    shown, where = seen(found)
    rank = len(answers) - 1
    assert where[0] == f"rank {rank}"
    assert found.odd == {rank: step}
    assert f"expected its {step} in the form" in shown


BYTES = {
    "not JSON": b"{",
    "nested deep": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe",
    "a long number": b"1" * 5000,
    "large": b'"' + b"x" * (2 << 20) + b'"',
    "a list": b"[]",
    "not a number": b"NaN",
}


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize("answer", BYTES.values(), ids=BYTES)
def test_whatever_is_written_is_read_or_the_writer_is_odd(answer: bytes) -> None:
    store = dist.HashStore()
    board = Board(store, rank=0, world_size=3, deadline=time.monotonic() + 60)
    store.set("seconds/1", answer)
    store.set("seconds/2", b"2.5")
    assert board.share("seconds", 1.0) == [1.0, None, 2.5]
    assert board.odd == {1: "seconds"}


def test_long_texts_are_cut() -> None:
    assert take("x" * 10_000, WORDS) == "x" * LONGEST_TEXT


class StoppedStore:
    """Whose host is stopped: no call returns, until the end of the test."""

    def __init__(self) -> None:
        self.over, self.calls = threading.Event(), 0

    def set(self, key: str, value: Any) -> None:
        self.calls += 1
        self.over.wait()

    compare_set: Any = None


def test_a_store_that_does_not_return_is_left_behind() -> None:
    store = StoppedStore()
    board = Board(store, rank=1, world_size=2, deadline=time.monotonic() + 0.2)
    try:
        assert board.share("seconds", 1.0) == [None, 1.0]
        assert board.share("times", 2.0) == [None, 2.0]
        board.write("done", True)
    finally:
        store.over.set()
    assert store.calls == 1, "a call that did not return is the last one"


@pytest.mark.quick("microseconds each")
@pytest.mark.parametrize("host", [b"a..b", b"x" * 64, b"a\0b", b"a\n", b"\xff"], ids=ascii)
def test_no_address_has_a_host_that_cannot_be_looked_up(host: bytes) -> None:
    good = ProbeServer()
    data = good.address.encode()
    good.close()
    assert address(data.hex()) == good.address
    with pytest.raises(ValueError, match=r"host|idna|ascii"):
        address((data[: TOKEN_BYTES + 2] + host).hex())
