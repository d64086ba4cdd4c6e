"""Hold the counters of a rank, as a thread beside its calls reads them, and count the failures of calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moelink.errors import MoelinkError, PeerError


@dataclass(frozen=True)
class LatestDispatch:
    """The latest dispatch that every rank has entered.

    Attributes:
        tokens: of this rank.
        messages: [world_size] that came from each rank: its tokens with an expert here. Of this rank alone, one number.
        rows: [num_local_experts] that were routed to each expert, before ``capacity``; None if the dispatch counted
            none, or they are not known.
    """

    tokens: int
    messages: tuple[int, ...]
    rows: tuple[int, ...] | None


@dataclass(frozen=True)
class Counters:
    """The counters of one local rank since ``init``.

    Attributes:
        calls: by phase, those that are over, refused ones included.
        sent: by phase, bytes of rows and their metadata for other ranks.
        dropped: rows that did not fit the output, or None if they are not known.
        invalid: expert ids out of range, or None likewise.
        latest: the latest dispatch, or None before the first one.
        awaited: by phase, [world_size]: whether this rank is in a call that that rank has not entered. Empty if that is
            not known.
        workspace_bytes: of symmetric memory.
        poisoned: whether a wait of a kernel has expired, here or at a peer.
    """

    calls: Mapping[str, int]
    sent: Mapping[str, int]
    dropped: int | None
    invalid: int | None
    latest: LatestDispatch | None
    awaited: Mapping[str, tuple[bool, ...]]
    workspace_bytes: int = 0
    poisoned: bool = False


class Failures:
    """Counts the errors of calls.

    Attributes:
        counts: by phase, class of the error ("other" if it is not moelink's), and peer (-1: no peer).
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, int], int] = {}

    def add(self, phase: str, error: BaseException) -> None:
        """Count ``error``: once, even if it passes several calls, or ends a communicator and later calls raise it."""
        if "_moelink_counted" in vars(error):
            return
        vars(error)["_moelink_counted"] = True
        kind = type(error).__name__ if isinstance(error, MoelinkError) else "other"
        key = (phase, kind, error.peer if isinstance(error, PeerError) else -1)
        self.counts[key] = self.counts.get(key, 0) + 1
