"""Define the requests of one rank's call to a wire, and the wire, which runs calls to their end.

A call is a generator. It yields :class:`Announce` when it knows its counts, prepares rows while headers travel, yields
:class:`Learn` for the peers' counts and :class:`Transfer` for the rows, and returns the result. So the same code runs
over process groups and for all ranks of one process. No I/O is done here.

The reply to :class:`Announce` is the number of the call, the same on every rank. A dispatch keeps it in its plan, and a
combine of its rows announces it: without it, ranks that combine the rows of different dispatches would add numbers that
have nothing to do with each other, with counts that may well agree. In the same way a dispatch over an earlier routing
announces the dispatch that counted it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from moelink.control.probe import Failure
from moelink.errors import PeerError, ProtocolError
from moelink.transports.base import Pending, Phase

R = TypeVar("R")

CHOICES = ("options", "origin", "row_bytes")
"""Fields of an announcement that must agree on all ranks."""


@dataclass(frozen=True)
class Announce:
    """Announce to every rank how many rows will follow. It does not wait; the reply is the number of the call.

    Attributes:
        options: what the caller chose and peers must agree on (``memory.protocol.dispatch_options``,
            ``combine_options``).
        counts: rows for each rank.
        limit: most rows that one rank may legally send here; a larger announcement is refused.
        row_bytes: bytes of a row, which must also agree.
        origin: number of the earlier dispatch that the call is over: of a combine, the one that brought the rows; of a
            dispatch with ``routing``, the one that counted them; else 0. It must also agree.
    """

    options: int
    counts: list[int]
    limit: int
    row_bytes: int
    origin: int


@dataclass(frozen=True)
class Learn:
    """Wait for the peers' announcements. The reply is a list: rows that each rank will send here."""


@dataclass(frozen=True)
class Transfer:
    """Move rows. The reply is ``into``, whose first sum(recv_counts) rows have arrived, sources ascending.

    Attributes:
        rows: [sum(send_counts), row bytes] uint8, contiguous, by destination.
        send_counts, recv_counts: rows per rank.
        into: [at least sum(recv_counts), row bytes] uint8, contiguous, where received rows go.
    """

    rows: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    into: Tensor


Steps = Generator["Announce | Learn | Transfer", "int | list[int] | Tensor | None", R]
"""One rank's call. Replies: ``int`` to Announce, ``list[int]`` to Learn, ``Tensor`` to Transfer."""


class BadMessageError(Exception):
    """Rank ``source`` sent data that cannot be right. The wire turns it into a ProtocolError.

    ``expected`` and ``got`` describe the data, for the message.
    """

    def __init__(self, source: int, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.source = source

    def protocol_error(self, *, rank: int, phase: Phase, call: int) -> ProtocolError:
        """The error that ``rank`` raises for it; ``call`` is 0 where calls have no number."""
        where = f"{phase} (call {call})" if call else phase
        return ProtocolError(
            f"rank {rank}: rank {self.source} sent malformed data in {where}: {self}; run one moelink version on every "
            "rank, then close and init again",
            rank=rank,
            peer=self.source,
            phase=phase,
            call=call,
        )


class Wire(Protocol):
    """Moves the rows that :data:`Steps` ask for.

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

    def abandon(self, failure: Failure) -> PeerError:
        """Poison this rank and its peers at once (:meth:`moelink.transports.base.Transport.abandon`)."""

    def check(self) -> None:
        """Wait for all pending calls and raise the first error."""

    def close(self) -> None:
        """Release everything."""
