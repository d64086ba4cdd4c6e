"""Declare the wire of the collective transport: it runs calls to their end, here or in the background."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from moelink.control.probe import Failure
from moelink.errors import PeerTimeoutError
from moelink.transports.base import Pending, Phase
from moelink.transports.collective.steps import Steps

R = TypeVar("R")
V = TypeVar("V")


def odd_rank(values: Mapping[int, V]) -> tuple[int, V, V] | None:
    """Return the first rank whose value differs from that of most ranks, its value, and theirs; None if all are equal.

    Of several values that are equally common, the one of the lowest rank counts, as in the kernels
    (``kernels.sync.signals.first_mismatched``). All ranks that compare the same values come to the same result.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    usual = max(counts, key=lambda value: counts[value])  # the first of several
    return next((rank, value, usual) for rank, value in values.items() if value != usual)


class Wire(Protocol):
    """Moves what :mod:`steps` asks for.

    Attributes:
        sent: bytes of rows that left for another rank, by phase.
        shared: peers in other processes take part in each call, so that it can be left half done.
    """

    sent: dict[Phase, int]
    shared: bool

    def start(self, phase: Phase, calls: Sequence[Steps[R]]) -> Pending[list[R]]:
        """Run one call per local rank; may return before they end."""

    def refuse(self, phase: Phase) -> None:
        """Report to the peers that this rank refuses its call. Returns at once."""

    def abandon(self, failure: Failure) -> PeerTimeoutError:
        """Poison this rank and its peers at once (:meth:`moelink.transports.base.Transport.abandon`)."""

    def check(self) -> None:
        """Wait for all pending calls and raise the first error."""

    def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True)
class Finished(Generic[R]):
    """A pending operation that is already over."""

    result: R
    over = True

    def wait(self) -> R:
        """The result."""
        return self.result
