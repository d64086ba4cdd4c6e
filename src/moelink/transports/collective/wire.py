"""Declare what the collective transport needs of a wire: run calls to their end, here or in the background."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from moelink.transports.base import Pending, Phase
from moelink.transports.collective.steps import Steps

R = TypeVar("R")


class Wire(Protocol):
    """Moves what :mod:`steps` asks for. ``sent`` counts the bytes of rows that left for another rank, by phase."""

    sent: dict[Phase, int]

    def start(self, phase: Phase, calls: Sequence[Steps[R]]) -> Pending[list[R]]:
        """Run one call per local rank; may return before they end."""

    def refuse(self, phase: Phase) -> None:
        """Report to the peers that this rank refuses its call. Returns at once."""

    def check(self) -> None:
        """Wait for what is under way and raise the first error."""

    def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True)
class Finished(Generic[R]):
    """A pending operation that is already over."""

    result: R

    def wait(self) -> R:
        """The result."""
        return self.result
