"""Read the words of trace buffers (``tracing.device.layout``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moelink.tracing.device.layout import (
    FIRST_FROM,
    NUM_MOMENTS,
    PEER_MOMENTS,
    ROLES,
    TRACE_CALLS,
    TRACE_HEADER,
    Moment,
    Role,
)

Rows = NDArray[np.int64]
"""[n, 2 + words] of a record: role, CTA, then the record's words."""


@dataclass(frozen=True)
class CtaRecord:
    """The stamps of one CTA in one call.

    Attributes:
        rank, call: the rank, and the number of the call of this phase there.
        role: of dispatch or of combine.
        cta: the CTA's number in its role.
        sm: the SM that ran it; interpreted, its number in the launch.
        times: time of each stamped moment, in the order of the protocol, on rank 0's clock.
        peers: of each moment with a word for each peer, the time by peer; None without a stamp.
    """

    rank: int
    call: int
    role: Role
    cta: int
    sm: int
    times: dict[str, int]
    peers: dict[str, tuple[int | None, ...]]

    @property
    def name(self) -> str:
        """The CTA's name in pictures."""
        return f"{self.role.phase} {self.role.name} {self.cta}"

    @property
    def begin(self) -> int:
        """Its first stamp."""
        return self.times["begun"]

    @property
    def end(self) -> int:
        """Its last stamp."""
        return max(self.times.values())


def rows_of(buffer: NDArray[np.int64]) -> Rows:
    """Return the records of a trace buffer [calls, roles, CTAs, words] that were written by the last TRACE_CALLS calls
    of each role."""
    calls = buffer[..., 0]
    latest = calls.max(axis=(0, 2), keepdims=True)
    at = np.argwhere((calls > 0) & (calls > latest - TRACE_CALLS))
    return np.concatenate([at[:, 1:], buffer[tuple(at.T)]], axis=1)


def read_rows(rows: Rows, rank: int, ahead: int = 0) -> Iterator[CtaRecord]:
    """Read the records of ``rank``, whose clock is ``ahead`` of rank 0's."""
    world_size = (rows.shape[1] - 2 - TRACE_HEADER - NUM_MOMENTS) // PEER_MOMENTS
    for number, cta, *words in rows.tolist():
        role = ROLES[number]
        own, peers = words[TRACE_HEADER : TRACE_HEADER + NUM_MOMENTS], words[TRACE_HEADER + NUM_MOMENTS :]

        def time(moment: Moment, word: int) -> int | None:
            return None if word == 0 else (FIRST_FROM - word if moment.first else word) - ahead

        def by_peer(moment: Moment, peers: list[int] = peers) -> tuple[int | None, ...]:
            begin = (moment.number - NUM_MOMENTS) * world_size
            return tuple(time(moment, word) for word in peers[begin : begin + world_size])

        found = {moment.name: time(moment, own[moment.number]) for moment in role.moments}
        yield CtaRecord(
            rank=rank, call=words[0], role=role, cta=cta, sm=words[1] - 1,
            times={name: at for name, at in found.items() if at is not None},
            peers={moment.name: by_peer(moment) for moment in role.per_peer},
        )  # fmt: skip
