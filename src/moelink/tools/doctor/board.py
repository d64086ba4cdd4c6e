"""Let ranks share their findings over a store, in bounded time, even if a rank is missing or stopped.

An examination cannot rely on its subject. A process group hangs if a port is closed. A store needs one connection from
each rank to its host, and its calls do not return while the host is stopped. So a thread makes them, which can be left
behind. The store has no password: a stranger who reaches its port can write there, and ranks of another version write
other fields. So a rank takes an answer only in the form of this version, and makes its text printable.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from moelink.control.probe import Address
from moelink.control.stores import BoundedError, bounded, peek
from moelink.tools.documents import FLAG, Kind, Maybe, number, take

LONGEST_TEXT = 2000
"""Characters of a text in an answer; the rest is cut off."""
_PAUSE_SECONDS = 0.01
_GRACE_SECONDS = 0.5
"""How long after a wait is over its last call of the store may take."""
_MOST_BYTES = 1 << 20
"""Of an answer."""


def printable(text: str) -> str:
    """Return ``text``, cut to LONGEST_TEXT, with a question mark for each character that a terminal may act on."""
    return "".join(each if each.isprintable() else "?" for each in text[:LONGEST_TEXT])


def address(text: str) -> Address:
    """Read the address of a probe server from its hexadecimal text. Raises ValueError."""
    return Address.decode(bytes.fromhex(printable(text)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


WORDS = Kind("a text", _is_text, printable)
NUMBER = number("a number", -1e18, 1e18)
"""Bytes, seconds and rates are within these bounds."""
RANK = Kind("the number of a rank", lambda value: isinstance(value, (int, str)), int)
FORMS: Mapping[str, Any] = {
    "facts": {
        "versions": {WORDS: Maybe(WORDS)}, "host": WORDS, "time?": NUMBER, "nvshmem": FLAG, "network": [WORDS, ...],
        "variables?": {WORDS: WORDS},
        "device": {
            "kind": WORDS, "name": WORDS, "free": NUMBER, "total": NUMBER, "driver": {WORDS: WORDS},
            "nvlinked?": [NUMBER, ...],
        },
    },
    "times": NUMBER,
    "addresses": Kind("an address", _is_text, address),
    "reached": {RANK: WORDS},
    "mesh": WORDS,
    "pairs": Maybe((WORDS, {"latency_us": NUMBER, "gb_per_s": NUMBER})),
    "seconds": NUMBER,
    "formats": {WORDS: WORDS},
    "done": FLAG,
}  # fmt: skip
"""The form of each step's answer. A rank that is in no pair answers None."""


class Board:
    """One rank's view of the answers of all ranks.

    Args:
        store: shared by the ranks, for this examination alone.
        rank, world_size: this rank, and how many there are.
        deadline: on the monotonic clock, of all waiting together.

    Attributes:
        odd: by rank, the first step in which it wrote something of another form.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, deadline: float) -> None:
        self.rank, self.world_size, self.deadline = rank, world_size, deadline
        self.odd: dict[int, str] = {}
        self._store = store
        self._is_lost = False

    def share(self, step: str, value: Any, seconds: float | None = None) -> list[Any]:
        """Write ``value`` and wait for the values of all ranks.

        Args:
            step: name of the exchange; each name is used once. Its first word is one of
                :data:`FORMS`.
            value: of this rank, of that form.
            seconds: how long to wait for the others; None until the deadline.

        Returns:
            the values by rank; None for a rank whose value is late, has another form (then ``odd`` has the rank), or is
            unreachable because the store's host is gone or stopped.
        """
        until = self.deadline if seconds is None else min(self.deadline, time.monotonic() + seconds)
        texts: dict[int, bytes] = {self.rank: json.dumps(value).encode()}
        self._call(lambda: self._exchange(step, texts, until), until)
        return [self._read(step, rank, texts.get(rank)) for rank in range(self.world_size)]

    def write(self, step: str, value: Any) -> None:
        """Write ``value`` and wait for nobody."""
        self._call(lambda: self._store.set(f"{step}/{self.rank}", json.dumps(value)), time.monotonic())

    def _call(self, call: Callable[[], Any], until: float) -> None:
        """Make calls of the store, until its host is gone; none more once one of them did not return."""
        if self._is_lost:
            return
        try:
            with suppress(RuntimeError):  # torch's: the store's host is gone
                bounded(call, until + _GRACE_SECONDS)
        except BoundedError:
            self._is_lost = True

    def _exchange(self, step: str, texts: dict[int, bytes], until: float) -> None:
        self._store.set(f"{step}/{self.rank}", texts[self.rank])
        while len(texts) < self.world_size:
            for rank in set(range(self.world_size)) - set(texts):
                text = peek(self._store, f"{step}/{rank}")
                if text:
                    texts[rank] = text
            if time.monotonic() > until:
                return
            time.sleep(_PAUSE_SECONDS)

    def _read(self, step: str, rank: int, text: bytes | None) -> Any:
        if text is None:
            return None
        try:
            if len(text) > _MOST_BYTES:
                raise ValueError(f"expected at most {_MOST_BYTES} bytes, got {len(text)}")
            return take(json.loads(text), FORMS[step.split()[0]])
        except (ValueError, RecursionError):  # no JSON, no UTF-8, numbers of many digits, or nested too deep
            self.odd.setdefault(rank, step)
            return None
