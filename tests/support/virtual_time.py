"""A clock that stands still until somebody waits: waits take no time, and exactly as long as they should."""

from __future__ import annotations

from collections.abc import Callable


class VirtualTime:
    """Stands for the module ``time`` in a module under test, one thread of which waits.

    Attributes:
        now: seconds since it was made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass, and let what is due happen."""
        self.now += seconds
        while self._due and self._due[0][0] <= self.now:
            self._due.pop(0)[1]()

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Let ``action`` happen at ``when``."""
        self._due.append((when, action))
        self._due.sort(key=lambda entry: entry[0])
