"""Run all ranks in one process: their calls advance together, and rows are copied from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from moelink.control.mismatch import Mismatch, odd_rank
from moelink.control.probe import Failure
from moelink.errors import PeerError, ProtocolError
from moelink.transports.base import Finished, Phase
from moelink.transports.collective.wire import CHOICES, Announce, BadMessageError, Learn, Steps, Transfer

R = TypeVar("R")


class LockstepWire:
    """Runs the calls of ranks 0 .. n-1 of this process. ``sent`` counts bytes that went from one rank to another."""

    shared = False

    def __init__(self) -> None:
        self.sent: dict[Phase, int] = {"dispatch": 0, "combine": 0}
        self._call = 0

    def start(self, phase: Phase, calls: Sequence[Steps[R]]) -> Finished[list[R]]:
        """Advance every call to its end; the results are by rank.

        Raises ProtocolError when the ranks do not make the same call (one passes weights, another does not).
        """
        self._call += len(calls) > 1  # a single rank has nobody to differ from
        replies: list[int | list[int] | Tensor | None] = [None] * len(calls)
        counts: list[list[int]] = []
        while True:
            requests, results = [], []
            for rank, (call, reply) in enumerate(zip(calls, replies, strict=True)):
                try:
                    requests.append(call.send(reply))  # type: ignore[arg-type]
                except StopIteration as stop:
                    results.append(stop.value)
                except BadMessageError as error:
                    raise error.protocol_error(rank=rank, phase=phase, call=0) from error
            if not requests:
                return Finished(results)
            self._agree(phase, requests, len(calls))
            if isinstance(requests[0], Announce):
                counts = [r.counts for r in requests if isinstance(r, Announce)]
                replies = [self._call] * len(calls)
            elif isinstance(requests[0], Learn):
                replies = [list(column) for column in zip(*counts, strict=True)]
            else:
                replies = list(self._move(phase, [r for r in requests if isinstance(r, Transfer)]))

    def refuse(self, phase: Phase) -> None:
        """Do nothing: the refused call has raised in this process, which runs every rank."""

    def abandon(self, failure: Failure) -> PeerError:
        """Return the error alone: no rank waits, and the next call overwrites the state of this one."""
        return failure.error(0)

    def check(self) -> None:
        """Do nothing: no call is ever under way."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _agree(self, phase: Phase, requests: Sequence[Announce | Learn | Transfer], world_size: int) -> None:
        announced = {rank: request for rank, request in enumerate(requests) if isinstance(request, Announce)}
        for field in CHOICES:
            mismatch = Mismatch.of(field, {rank: getattr(request, field) for rank, request in announced.items()})
            if mismatch is not None:
                raise mismatch.error(rank=0, phase=phase, call=self._call)
        odd = odd_rank({rank: type(request).__name__ for rank, request in enumerate(requests)})
        if odd is None and len(requests) != world_size:
            odd = (0, "a call that goes on", "one that has ended, as on other ranks")
        if odd is not None:
            rank, got, usual = odd
            raise ProtocolError(
                f"rank 0: rank {rank} makes another call in {phase}: expected {usual}, got {got}; pass the same "
                "options on every rank",
                rank=0,
                peer=rank,
                phase=phase,
                call=0,
            )

    def _move(self, phase: Phase, requests: Sequence[Transfer]) -> list[Tensor]:
        blocks = [request.rows.split(request.send_counts) for request in requests]
        replies = []
        for rank, request in enumerate(requests):
            start = 0
            for source, sent in enumerate(blocks):
                request.into[start : start + len(sent[rank])].copy_(sent[rank])
                start += len(sent[rank])
                self.sent[phase] += 0 if source == rank else sent[rank].numel()
            replies.append(request.into)
        return replies
