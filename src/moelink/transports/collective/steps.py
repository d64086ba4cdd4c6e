"""Define the requests of one rank's call to a wire: announce counts, learn the peers', move rows. No I/O is done here.

A call is a generator. It yields :class:`Announce` when it knows its counts, prepares rows while headers travel, yields
:class:`Learn` for the peers' counts and :class:`Transfer` for the rows, and returns the result. So the same code runs
over process groups and for all ranks of one process.

The reply to :class:`Announce` is the number of the call, the same on every rank. A dispatch keeps it in its plan, and a
combine of its rows announces it: ranks that combine the rows of different dispatches would otherwise add numbers that
have nothing to do with each other, with counts that may well agree. In the same way a dispatch over an earlier routing
announces the dispatch that counted it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from moelink.errors import ProtocolError
from moelink.transports.base import Phase

R = TypeVar("R")


@dataclass(frozen=True)
class Announce:
    """Announce to every rank how many rows will follow. It does not wait; the reply is the number of the call.

    Attributes:
        options: everything peers must agree on for this call, as text.
        counts: rows for each rank.
        limit: most rows that one rank may legally send here; a larger announcement is refused.
        row_bytes: bytes of a row, which must also agree.
        origin: number of the earlier dispatch that the call is over: of a combine, the one that brought the rows; of a
            dispatch with ``routing``, the one that counted them; else 0. It must also agree.
    """

    options: str
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
