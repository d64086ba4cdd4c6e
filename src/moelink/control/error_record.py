"""Read the reports of a rank's kernels: the error record on the host, and the counts of lost rows on the device.

:class:`moelink.Communicator` and the contract's ``EPBuffers`` raise the same errors because both read them here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from moelink.control.failure_detector import FailureDetector
from moelink.control.mismatch import Mismatch
from moelink.control.probe import INTERRUPTED, LEFT, MISMATCHED, UNDELIVERED, Failure
from moelink.errors import CapacityError, MoelinkError, PeerAbortedError, PeerError, ProtocolError, RoutingError
from moelink.memory.protocol import (
    ABORT_RECORD,
    CALL_SHIFT,
    CODE_OPTIONS,
    CODE_ROUTING,
    DISPATCH_RECEIVED,
    INVALID_IDS,
    MALFORMED,
    OVERFLOW,
    PHASES,
)

_FIELDS = {CODE_OPTIONS: "options", CODE_ROUTING: "origin"}
"""The field in which ranks differ, by the code of a mismatch."""


class Choices(Protocol):
    """Reads what ranks chose in a call (:func:`moelink.memory.choices.choices_in`)."""

    def __call__(self, *, phase: int, call: int, origin: bool) -> Mapping[int, int]:
        """Return by rank the options of a call of ``phase``, or with ``origin`` the dispatch that it is over; empty if
        they are not known."""


class ErrorRecord:
    """The errors of one rank, as its kernels describe them.

    Attributes:
        words: [RECORD_WORDS] int64 on the host, written by the rank's kernels.
        control: [CONTROL_WORDS] int64, the rank's counters.
        rank: its number, which errors name.
        me, world_size: its place among the ranks that exchange, and their number.
        ranks_per_node: ranks of a node if there are several nodes; else None.
        choices: reads the values of a mismatch, which the record does not hold; None: they are not known.
        taken: the sums of the results of :meth:`take_losses`.
    """

    def __init__(
        self,
        words: Tensor,
        control: Tensor,
        *,
        rank: int,
        me: int,
        world_size: int,
        detector: FailureDetector | None = None,
        ranks_per_node: int | None = None,
        choices: Choices | None = None,
    ) -> None:
        """``detector`` knows the ranks that live; None: it is not asked."""
        self.words, self.control, self.rank, self.me, self.world_size = words, control, rank, me, world_size
        self._detector, self.ranks_per_node = detector, ranks_per_node
        self._array = memoryview(words.numpy())  # type: ignore[arg-type]
        self.choices = choices
        self._failure: PeerError | None = None
        self.taken = 0, 0

    def error(self) -> MoelinkError | None:
        """Return the error to raise, or None: (once) a mismatch, the first failure that has poisoned this rank, or
        (once) a peer's refusal. Waits for no rank.

        A mismatch comes first: a peer that has read its own record poisons this rank because of it.
        """
        if not (self._array[0] or self._array[ABORT_RECORD]):
            return None
        words = self.words.tolist()
        if words[0] and (self._failure is not None or words[ABORT_RECORD] not in _FIELDS):
            if self._failure is None:
                self._failure = self._find_fault(words[1:7])
            return self._failure.with_traceback(None)
        self.words[ABORT_RECORD:] = 0
        return self._refusal(*words[ABORT_RECORD : ABORT_RECORD + 5])

    @property
    def has_mismatch(self) -> bool:
        """Whether :meth:`error` would return a mismatch that this rank's kernels have noted."""
        return self._failure is None and self._array[ABORT_RECORD] in _FIELDS

    def keep(self, error: PeerError) -> None:
        """Raise ``error`` for the kernels' record, unless it has an error already."""
        self._failure = self._failure or error

    def _find_fault(self, words: list[int]) -> PeerError:
        """Return the error of a failure. A peer may have written its words, so none of them is trusted."""
        told_by, peer, phase, call, expected, got = words
        ranks = range(self.world_size)
        got = got if got in (LEFT, INTERRUPTED, UNDELIVERED, MISMATCHED) else max(got, 0)
        suspicion = Failure(
            peer if peer in ranks else told_by if told_by in ranks else self.me,
            PHASES[phase % len(PHASES)], max(call, 0), max(expected, 0), got,
        )  # fmt: skip
        detail = "" if told_by == self.rank else f"reported by rank {told_by}"
        if self._detector is not None and got != MISMATCHED:  # of which the words say all
            suspicion = self._detector.confirm(suspicion)
            if suspicion.peer == self.rank:
                detail = "this rank itself: it came late, or makes another call than its peers"
                if self.ranks_per_node is not None:
                    detail += ", or the network has lost what it waits for"
        return self.of(suspicion, detail)

    def of(self, failure: Failure, detail: str = "") -> PeerError:
        """Return the error that this rank raises for ``failure``."""
        error = failure.error(self.rank, detail, ranks_per_node=self.ranks_per_node)
        return error if self._detector is None else self._detector.about(error)

    @property
    def reported(self) -> PeerError | None:
        """The error of a failure that a peer has reported, of which this rank's kernels may not know; or None."""
        failure = None if self._detector is None else self._detector.reported
        if failure is None:
            return None
        self._failure = self._failure or self.of(failure)
        return self._failure

    def _refusal(self, code: int, _me: int, peer: int, phase: int, call: int) -> PeerAbortedError | ProtocolError:
        """Return the error about a peer that refused a call, or is mismatched in it."""
        field = _FIELDS.get(code)
        if field is None:
            return PeerAbortedError(rank=self.rank, peer=peer, phase=PHASES[phase], call=call)
        values = {} if self.choices is None else self.choices(phase=phase, call=call, origin=field == "origin")
        # Kernels name a rank out of range if no rank sent the rows that this one's receiving half expects.
        named = Mismatch(peer if peer in range(self.world_size) else self.rank, field)
        return (Mismatch.of(field, values) or named).error(rank=self.rank, phase=PHASES[phase], call=call)

    def malformed(self) -> ProtocolError | None:
        """Return the error about a count, an id or a position out of range that a peer sent, or None. Synchronises."""
        bits = int(self.control[MALFORMED])
        if bits == 0:
            return None
        peer = (bits & -bits).bit_length() - 1
        call = max(int(self.control[DISPATCH_RECEIVED]) >> CALL_SHIFT, 0)
        return ProtocolError(
            f"rank {self.rank}: rank {peer} sent malformed data in dispatch, up to call {call}: expected counts "
            "and indices in range, got others, whose rows were dropped; run one moelink version on every rank, then "
            "close and init again",
            rank=self.rank, peer=peer, phase="dispatch", call=call,
        )  # fmt: skip

    def take_losses(self) -> tuple[int, int]:
        """Return the rows dropped for the capacity and the ids out of range since the last call. Synchronises."""
        dropped, invalid = int(self.control[OVERFLOW]), int(self.control[INVALID_IDS])
        if dropped or invalid:
            self.control[INVALID_IDS : OVERFLOW + 1] = 0
            self.taken = self.taken[0] + dropped, self.taken[1] + invalid
        return dropped, invalid


class Losses(NamedTuple):
    """Losses of one rank since the last check: rows that did not fit its output, sized by the field ``bound``, and ids
    out of range."""

    rank: int
    dropped: int
    capacity: int
    invalid: int
    num_experts: int
    bound: str = "capacity"


def raise_losses(losses: Iterable[Losses], **remedy: str) -> None:
    """Raise CapacityError for the first rank that dropped rows, or RoutingError for the first with ids out of range.

    ``remedy`` is that of :class:`~moelink.errors.CapacityError`.
    """
    losses = list(losses)
    for each in losses:
        if each.dropped:
            raise CapacityError(each.rank, each.dropped, each.capacity, bound=each.bound, **remedy)
    for each in losses:
        if each.invalid:
            raise RoutingError(each.rank, each.invalid, each.num_experts)
