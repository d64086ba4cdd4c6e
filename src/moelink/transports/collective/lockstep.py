"""Run all ranks in one process: their calls advance together, and rows are copied from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from moelink.errors import ProtocolError
from moelink.transports.base import Phase
from moelink.transports.collective.steps import Announce, BadMessageError, Learn, Steps, Transfer
from moelink.transports.collective.wire import Finished

R = TypeVar("R")


class LockstepWire:
    """Runs the calls of ranks 0 .. n-1 of this process. ``sent`` counts bytes that went from one rank to another."""

    def __init__(self) -> None:
        self.sent: dict[Phase, int] = {"dispatch": 0, "combine": 0}

    def start(self, phase: Phase, calls: Sequence[Steps[R]]) -> Finished[list[R]]:
        """Advance every call to its end; the results are by rank.

        Raises ProtocolError when the ranks do not make the same call (one passes weights, another does not).
        """
        replies: list[list[int] | Tensor | None] = [None] * len(calls)
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
                replies = [None] * len(calls)
            elif isinstance(requests[0], Learn):
                replies = [list(column) for column in zip(*counts, strict=True)]
            else:
                replies = list(self._move(phase, [r for r in requests if isinstance(r, Transfer)]))

    def refuse(self, phase: Phase) -> None:
        """Do nothing: the refused call has raised in this process, which runs every rank."""

    def check(self) -> None:
        """Do nothing: no call is ever under way."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    @staticmethod
    def _agree(phase: Phase, requests: Sequence[Announce | Learn | Transfer], world_size: int) -> None:
        first = requests[0]
        for rank, request in enumerate(requests):
            same = type(request) is type(first)
            if isinstance(request, Announce) and isinstance(first, Announce):
                same = request.options == first.options
            if not same or len(requests) != world_size:
                raise ProtocolError(
                    f"rank 0: rank {rank} makes another call in {phase}: expected {_what(first)}, got "
                    f"{_what(request)}; pass the same options on every rank",
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


def _what(request: Announce | Learn | Transfer) -> str:
    """A request in a message: options say what the call is."""
    return repr(request.options) if isinstance(request, Announce) else type(request).__name__
