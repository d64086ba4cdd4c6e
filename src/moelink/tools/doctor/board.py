"""Let ranks share their findings over a store, in bounded time, even if a rank is missing or stopped.

An examination cannot rely on what it examines. A process group hangs where a port is closed; a store needs one
connection from each rank to its host, and its calls do not return while the host is stopped. So they are made in a
thread that can be left behind. Values are JSON, and are taken only in the form that is expected (:mod:`.answers`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from moelink.control.stores import BoundedError, bounded, peek
from moelink.tools.doctor.answers import FORMS, read

_PAUSE_SECONDS = 0.01
_GRACE_SECONDS = 0.5
"""How long after a wait is over its last call of the store may take."""
_MOST_BYTES = 1 << 20
"""Of an answer."""


class Board:
    """One rank's view of what all ranks have written.

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
        """Write ``value`` and wait for those of all ranks.

        Args:
            step: name of the exchange; each name is used once. Its first word is one of
                :data:`moelink.tools.doctor.answers.FORMS`.
            value: of this rank, of that form.
            seconds: how long to wait for the others; None until the deadline.

        Returns:
            the values by rank; None for a rank that wrote none in time, or one of another form (``odd`` says so), or
            none before the store's host was gone or stopped.
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
            return read(json.loads(text), FORMS[step.split()[0]])
        except (ValueError, RecursionError):  # no JSON, no UTF-8, numbers of many digits, or nested too deep
            self.odd.setdefault(rank, step)
            return None
