"""Move rows over process groups: one rank per process, gloo on CPU, NCCL on CUDA.

Protocol of one call (call numbers count dispatches and combines together, from 1):

1. When a rank knows its row counts it sends every rank a header of fixed size over the gloo control group: magic, call
   number, phase, status, configuration digest, options, the number of the earlier dispatch that the call is over
   (a combine, or a dispatch with ``routing``), the bytes of a row, and the number of rows that will follow. It prepares
   its rows while headers travel. A rank that refuses its arguments sends status REFUSED, so peers learn it in the same
   exchange.
2. All headers are checked before any row moves. Headers differ between receivers only in the row count, so every rank
   reaches the same verdict: all go on; or all raise, because a rank refused the call, and the next call starts clean;
   or the call is mismatched, and the session of each rank ends the communicator. Gloo aborts a receiver that expects
   fewer bytes than arrive, so only checked counts size a transfer.
3. Rows move in one all-to-all of uint8.

One deadline covers the whole call, from the moment it was issued. When it passes, or a connection breaks, this rank
probes its peers for the one at fault (:mod:`moelink.control.probe`), poisons the communicator and reports the failure.

Every wait is cut into slices, and after each slice this rank looks at what peers have reported. That is needed because
gloo's connections are pairs: a rank that dies between its messages may have sent all that one peer needs, so the peer
waits for a third rank, and only that third rank has a broken connection. A reporting rank writes at the probe server of
every peer, which keeps the first report; a waiting rank only reads. So all ranks raise the first report that reached
them, and a report that comes while a call ends is raised in the next one.

In mode "allreduce" no peer takes part in a call, so nothing is sent, not even a refusal (``exchanges`` is False).

Calls run on one background thread in the order in which they were issued, so an asynchronous call returns at once even
while a peer is late. A signal's handler may check or close meanwhile (:mod:`moelink.transports.collective.background`).
On CUDA they run on a stream of their own, forked from the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World, release
from moelink.control.mismatch import Mismatch
from moelink.control.probe import Failure
from moelink.control.process import await_release, start_daemon
from moelink.errors import PeerAbortedError, PeerError, ProtocolError
from moelink.transports.base import Phase
from moelink.transports.collective.background import Background, BackgroundCall
from moelink.transports.collective.wire import CHOICES, Announce, BadMessageError, Learn, Steps, Transfer

R = TypeVar("R")

_MAGIC = 0x6D6F656C696E6B
_PHASE_CODES: dict[Phase, int] = {"dispatch": 1, "combine": 2}
_OK, _REFUSED = 0, 1
_SLICE_SECONDS = 0.05
_ROW_SLICE_SECONDS = 20e-6
HEADER_FIELDS = ("magic", "call", "phase", "status", "config", "options", "origin", "row_bytes", "count")
"""int64 words of a header, in this order."""
_OF_EVERY_CALL = ("magic", "config", "call", "phase")
"""Fields that agree even if a rank refuses the call; ``CHOICES`` are those of ranks that do not."""


def digest(text: str) -> int:
    """A 63-bit digest of ``text``, equal on every rank and machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class GroupPending(Generic[R]):
    """A call on the background thread."""

    call: BackgroundCall[R]
    finished: torch.cuda.Event | None
    device: torch.device

    @property
    def over(self) -> bool:
        """Whether the background thread has ended the call, so that an exception here leaves nothing half done."""
        return self.call.over

    def wait(self) -> R:
        """Wait for the call on the host (its transfers need host counts), then make the current stream wait for it."""
        result = self.call.result()
        if self.finished is not None:
            torch.cuda.current_stream(self.device).wait_event(self.finished)
        return result


@dataclass(frozen=True)
class _Headers:
    """An exchange of headers under way; ``sent`` is kept alive until it is over."""

    call: int
    phase: Phase
    announce: Announce | None
    sent: Tensor
    received: Tensor
    work: Any


def _outlive(world: World, work: Any) -> None:
    """Keep ``world`` until ``work`` has ended, which its own timeout bounds."""
    while not work.is_completed():
        time.sleep(_SLICE_SECONDS)


class GroupWire:
    """The wire of one rank.

    ``identity`` enters every header's configuration digest. ``exchanges``: peers take part in each call.
    """

    def __init__(
        self,
        world: World,
        *,
        device: torch.device,
        identity: str,
        timeout: float,
        detector: FailureDetector,
        exchanges: bool = True,
    ) -> None:
        self.sent: dict[Phase, int] = {"dispatch": 0, "combine": 0}
        self._world, self._device, self._timeout = world, device, timeout
        self._identity = digest(identity)
        self._ranks = world.ranks
        self._rank = self._ranks[world.rank]
        self._detector, self.shared = detector, exchanges
        self._error: PeerError | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = Background("moelink-wire")
        self._lent: tuple[Tensor, ...] = ()
        self._complete = True
        self._work: Any = None

    def start(self, phase: Phase, calls: Sequence[Steps[R]]) -> GroupPending[list[R]]:
        """Run this rank's call on the background thread."""
        (call,) = calls
        return self._submit(phase, call)

    def refuse(self, phase: Phase) -> None:
        """Take part in the call with status REFUSED."""
        if self.shared:
            self._submit(phase, None)

    def abandon(self, failure: Failure) -> PeerError:
        """Report ``failure`` to the peers, which look at reports while they wait, and poison this rank."""
        error = self._named(self._detector.declare(failure) if self.shared else failure)
        self._poison(error)
        return error

    def check(self) -> None:
        """Wait for the calls under way; raise the error that poisoned this communicator, if any."""
        if self._error is None:
            self._thread.submit(lambda: None).result()
        self._raise_poison()
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Finish pending calls and release the groups; after an error, wait for no rank and leave the groups."""
        poisoned = self._error is not None or self._detector.reported is not None
        self._thread.close(wait=not poisoned)
        if not poisoned:
            await_release(self._lent)
            release(self._world)
        elif self._work is not None and not self._work.is_completed():
            # Destroying a group of gloo waits for its exchanges, up to their timeout. A thread keeps it until then.
            world, work = self._world, self._work
            start_daemon(lambda: _outlive(world, work), "moelink-outlive")
        self._lent = ()

    def _raise_poison(self) -> None:
        if self._error is None and self._detector.masked:
            self._error = self._named(Failure(self._rank, "dispatch", 0, expected=0, got=0))
        if self._error is None and self._detector.reported is not None:
            self._error = self._named(self._detector.reported)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _submit(self, phase: Phase, steps: Steps[R] | None) -> GroupPending[list[R]]:
        self._raise_poison()
        call = self._detector.enter(phase)
        started = finished = None
        if self._stream is not None:
            started, finished = torch.cuda.Event(), torch.cuda.Event()
            started.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + self._timeout
        inference = torch.is_inference_mode_enabled()

        def run() -> list[R]:
            with torch.inference_mode(inference):  # that of the caller, whose tensors may allow writes in it alone
                return self._run(call, phase, steps, deadline, started, finished)

        handed = self._thread.submit(run)
        return GroupPending(handed, finished, self._device)

    def _run(
        self,
        call: int,
        phase: Phase,
        steps: Steps[R] | None,
        deadline: float,
        started: torch.cuda.Event | None,
        finished: torch.cuda.Event | None,
    ) -> list[R]:
        """Run one call on the background thread. An exception before it is complete ends this rank's part."""
        try:
            self._complete = not self.shared
            self._raise_poison()
            if self._stream is not None:
                torch.cuda.set_device(self._device)
            with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                if self._stream is not None and started is not None:
                    self._stream.wait_event(started)
                result = self._drive(call, phase, steps, deadline)
                if self._stream is not None and finished is not None:
                    finished.record(self._stream)
            return result
        except BadMessageError as error:
            raise self._poison(error.protocol_error(rank=self._rank, phase=phase, call=call)) from error
        except PeerError:
            raise
        except BaseException:
            if not self._complete:
                self._poison(self._named(self._detector.admit(phase, call)))
            raise

    def _drive(self, call: int, phase: Phase, steps: Steps[R] | None, deadline: float) -> list[R]:
        """Run one call to its end.

        A failure before the first exchange is reported to the peers as a refusal. After it the peers wait for this
        rank's rows, so a failure poisons the communicator, and peers hear of it while they wait. Rows move in the last
        exchange, which settles the call: a failure after that is this rank's alone.
        """
        if steps is None:
            self._tell_refusal(call, phase, deadline)
            return []
        request: Announce | Learn | Transfer
        try:
            request = next(steps)
        except StopIteration as stop:
            return [stop.value]
        except Exception:
            if self.shared:
                self._tell_refusal(call, phase, deadline)
            raise
        while True:
            reply: Any = None
            if isinstance(request, Announce):
                headers, reply = self._announce(call, phase, request), call
            elif isinstance(request, Learn):
                reply = self._learn(headers, deadline)
            else:
                reply = self._exchange_rows(call, phase, request, deadline)
            try:
                request = steps.send(reply)
            except StopIteration as stop:
                return [stop.value]

    def _tell_refusal(self, call: int, phase: Phase, deadline: float) -> None:
        """Exchange headers with status REFUSED. Peers that make another call report that."""
        with suppress(ProtocolError):
            self._learn(self._announce(call, phase, None), deadline)
        self._complete = True

    def _announce(self, call: int, phase: Phase, announce: Announce | None) -> _Headers:
        """Start the exchange of headers with every rank; ``announce`` None refuses the call."""
        status = _REFUSED if announce is None else _OK
        chosen, counts = (0, 0, 0), [0] * self._world.world_size
        if announce is not None:
            chosen = announce.options, announce.origin, announce.row_bytes
            counts = self._of_members(announce.counts)
        mine = (_MAGIC, call, _PHASE_CODES[phase], status, self._identity, *chosen)
        headers = torch.tensor([(*mine, count) for count in counts], device="cpu")
        received = torch.empty_like(headers)
        work = self._work = self._world.control.alltoall_base(received, headers, [], [])
        return _Headers(call, phase, announce, headers, received, work)

    def _learn(self, headers: _Headers, deadline: float) -> list[int]:
        """Wait for the peers' headers, compare them all, and return the row counts."""
        announce = headers.announce
        self._lent = (headers.sent, headers.received)
        self._finish(headers.work, headers.call, headers.phase, deadline, on_device=False)
        words = [dict(zip(HEADER_FIELDS, row, strict=True)) for row in headers.received.tolist()]
        rows = dict(zip(self._ranks, words, strict=True))
        self._verdict(headers.call, headers.phase, rows, refused=announce is None)
        if announce is None:
            return []
        got = [0] * len(announce.counts)
        for source, row in rows.items():
            if not 0 <= row["count"] <= announce.limit:
                raise BadMessageError(source, f"an announcement of at most {announce.limit} rows", f"{row['count']}")
            got[source] = row["count"]
        return got

    def _of_members(self, counts: list[int]) -> list[int]:
        """Return those of ``counts``, one for each rank of the communicator, that are of ranks that take part."""
        return [counts[rank] for rank in self._ranks]

    def _verdict(self, call: int, phase: Phase, headers: dict[int, dict[str, int]], *, refused: bool) -> None:
        """Compare all headers. Every rank sees the same ones, so all ranks raise together, or all go on."""

        def compare(fields: Sequence[str]) -> None:
            for field in fields:
                mismatch = Mismatch.of(field, {peer: header[field] for peer, header in headers.items()})
                if mismatch is not None:
                    raise mismatch.error(rank=self._rank, phase=phase, call=call)

        compare(_OF_EVERY_CALL)
        if refused:
            return
        for peer, header in headers.items():
            if header["status"] != _OK:
                raise PeerAbortedError(rank=self._rank, peer=peer, phase=phase, call=call)
        compare(CHOICES)

    def _exchange_rows(self, call: int, phase: Phase, transfer: Transfer, deadline: float) -> Tensor:
        rows, received = transfer.rows, transfer.into[: sum(transfer.recv_counts)]
        counts = self._of_members(transfer.recv_counts), self._of_members(transfer.send_counts)
        work = self._work = self._world.data.alltoall_base(received, rows, *counts)
        if self._stream is None:
            self._lent += (rows, received)
        self._finish(work, call, phase, deadline, on_device=True)
        self._complete = True
        remote = len(rows) - transfer.send_counts[self._rank]
        self.sent[phase] += remote * rows.shape[1]
        return transfer.into

    def _finish(self, work: Any, call: int, phase: Phase, deadline: float, *, on_device: bool) -> None:
        """Wait for ``work`` until the deadline; raise the error that names the rank at fault if it fails.

        A failure that a peer has reported meanwhile is raised at once.
        """
        try:
            if self._stream is None or not on_device:
                while not self._has_ended(work, min(deadline - time.monotonic(), _SLICE_SECONDS)):
                    self._look_up(deadline)
                self._work = None  # it holds the exchange's tensors
                return
            work.wait()
            event = torch.cuda.Event()
            event.record(self._stream)
            while not event.query():
                self._look_up(deadline)
                time.sleep(_ROW_SLICE_SECONDS)
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise self._blame(call, phase) from error

    @staticmethod
    def _has_ended(work: Any, seconds: float) -> bool:
        """Wait for ``work`` for so long. Raises RuntimeError when it has failed."""
        limit = timedelta(seconds=max(seconds, 1e-3))
        try:
            work.wait(limit)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait(limit)  # raises why it failed, unless it ended after the slice
        return True

    def _look_up(self, deadline: float) -> None:
        """Raise a peer's report, or RuntimeError when the deadline has passed."""
        self._raise_poison()
        if time.monotonic() > deadline:
            raise RuntimeError("the deadline passed")

    def _blame(self, call: int, phase: Phase) -> PeerError:
        """Find the rank at fault, report it to the peers and poison this communicator."""
        return self._poison(self._named(self._detector.blame(phase, call)))

    def _named(self, failure: Failure) -> PeerError:
        """Return the error that this rank raises for ``failure``."""
        return self._detector.about(failure.error(self._rank, ranks_per_node=self._detector.ranks_per_node))

    def _poison(self, error: PeerError) -> PeerError:
        self._error = self._error or error
        return error
