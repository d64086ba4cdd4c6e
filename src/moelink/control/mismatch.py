"""Describe a mismatched call: ranks make it with different choices, over different dispatches, or make another one.

A mismatched call ends the communicator on every rank.

* **Who reads.** Each rank compares the same words of all ranks: headers on the collective transport; counts and heads
  in its own block on the symmetric one, where its kernels note the mismatch in the error record. The host reads the
  record in its next call, ``wait()`` or ``check()``.
* **Who ends.** Each rank that reads a mismatch raises ProtocolError, keeps it as the error of all later calls, and
  tells its peers, as after any error that ends a communicator (``transports.endings``): their probe servers, and on the
  symmetric transport their blocks. Both carry the rank, the field and the two values. So a rank that hears of the
  mismatch before it reads its own record, or whose kernels noted none, raises the same error.
* **Why no rank waits.** The kernels of a mismatched call end without an answer of a host, and on the collective
  transport all headers have come. A rank that has begun its next call already may wait for ranks that make no other
  one: the first report ends this wait.
* **A refused call** is not affected: a refusal of the same call is looked for before the choices are compared, so all
  ranks see it, and none of them reads a mismatch.

Example: of ranks 0, 1, 2, rank 1 dispatches without ``topk_weights``. Options are 2, 1, 2, so :meth:`Mismatch.of`
returns peer 1, usual 2, value 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from moelink.errors import ProtocolError
from moelink.memory.protocol import (
    OPTIONS_BY_ROW,
    OPTIONS_BY_ROW_SUMMED,
    OPTIONS_SUMS,
    OPTIONS_WEIGHED_SUMS,
)

V = TypeVar("V")

_VALUE_BITS = 30
_LARGEST = (1 << _VALUE_BITS) - 1


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


_HOW = {
    "options": "calls {} (call {}) with other options than most ranks",
    "origin": "calls {} (call {}) over the routing of another call than most ranks",
    "row_bytes": "calls {} (call {}) with other rows than most ranks",
    **dict.fromkeys(("call", "phase", "config", "magic"), "makes another call in {} (call {})"),
}
"""By what ranks differ in: how the mismatched rank calls."""
_FIELDS = tuple(_HOW)
_RESULTS = {
    OPTIONS_BY_ROW: "every row (reduce=False)",
    OPTIONS_BY_ROW_SUMMED: "every row (reduce=True)",
    OPTIONS_SUMS: "sums of rows (reduce=True)",
    OPTIONS_WEIGHED_SUMS: "sums of rows times router weights (reduce=True)",
}


def _in_words(field: str, phase: str, value: int) -> str:
    """Return the ``value`` of ``field`` in a call of ``phase`` in words.

    >>> _in_words("options", "dispatch", 2), _in_words("options", "combine", 2), _in_words("origin", "combine", 7)
    ('topk_weights, no routing', 'sums of rows (reduce=True)', 'dispatch 7')
    """
    if field == "options" and phase == "dispatch":
        weights, cached = (value - 1) & 1, (value - 1) & 2
        return f"{'' if weights else 'no '}topk_weights, {'' if cached else 'no '}routing"
    if field == "options" and value in _RESULTS:
        return _RESULTS[value]
    if field == "phase":
        return {1: "a dispatch", 2: "a combine"}.get(value, f"phase {value}")
    return {"origin": f"dispatch {value}", "row_bytes": f"rows of {value} bytes"}.get(field, f"{field} {value}")


@dataclass(frozen=True)
class Mismatch:
    """The first rank that differs from most ranks in a call.

    Attributes:
        peer: this rank.
        field: what it differs in: "options", "origin" (the dispatch that the call is over), "row_bytes", "call",
            "phase", "config" or "magic".
        usual, value: that of most ranks, and that of ``peer``; equal if they are not known.
    """

    peer: int
    field: str
    usual: int = 0
    value: int = 0

    @classmethod
    def of(cls, field: str, values: Mapping[int, int]) -> Mismatch | None:
        """Return the mismatch of ``values``, by rank, or None if all are equal."""
        odd = odd_rank(values)
        return None if odd is None else cls(odd[0], field, odd[2] & _LARGEST, odd[1] & _LARGEST)

    @property
    def packed(self) -> int:
        """Field and values as one number, at least 0 and below 2**63, for reports to peers."""
        return (_FIELDS.index(self.field) << 2 * _VALUE_BITS) + (self.usual << _VALUE_BITS) + self.value

    @classmethod
    def unpacked(cls, peer: int, word: int) -> Mismatch:
        """Return the mismatch of ``peer`` whose :attr:`packed` is ``word``, of which any number is one."""
        number = (word >> 2 * _VALUE_BITS) % len(_FIELDS)
        return cls(peer, _FIELDS[number], word >> _VALUE_BITS & _LARGEST, word & _LARGEST)

    def error(self, *, rank: int, phase: str, call: int) -> ProtocolError:
        """Return the error that ``rank`` raises for it."""
        expected = f"{_in_words(self.field, phase, self.usual)} as on most ranks"
        got = _in_words(self.field, phase, self.value)
        if self.usual == self.value:
            expected, got = "the same on all ranks", "different ones"
        return ProtocolError(
            f"rank {rank}: rank {self.peer} {_HOW[self.field].format(phase, call)}: expected {expected}, got {got}; "
            "make the same calls on every rank, and recover with all ranks, or close and init again",
            rank=rank, peer=self.peer, phase=phase, call=call, mismatch=self,
        )  # fmt: skip
