"""Lay out the records of an in-kernel trace: the moments of a call that a CTA stamps, and the places of the stamps.

A trace buffer belongs to one rank. It has one record for each of the last TRACE_CALLS calls, each role of a phase, and
each CTA of that role. A record is int64 words: the number of the call (0: no record), the number of the SM + 1, then
NUM_MOMENTS moments, then for each of PEER_MOMENTS moments a word for each peer. A word without a stamp is 0.

A moment that happens several times in a CTA has two words, the first time and the last. A first time is stored as
FIRST_FROM - time by an atomic maximum, so that the earliest stays; a last time is a plain store, so that the latest
stays.

Example: 2 ranks, 3 CTAs: a record has 2 + 8 + 2 * 2 = 14 words. The record of CTA 1 in the home role of combine
(role 3), call 18, begins at word ((18 % 16) * 4 + 3) * 3 * 14 + 1 * 14 = 476; its stamp of peer 1's rows is word
476 + 2 + 8 + 1 * 2 + 1 = 489.
"""

from __future__ import annotations

from typing import NamedTuple

TRACE_CALLS = 16
"""Calls of each role whose records are kept: the last ones."""
TRACE_ROLES = 4
"""Roles, numbered as in ``protocol``: DISPATCH_SENT, DISPATCH_RECEIVED, COMBINE_SENT, COMBINE_RECEIVED."""
TRACE_HEADER = 2
"""Words before the moments: call, SM + 1."""
NUM_MOMENTS, PEER_MOMENTS = 8, 2
FIRST_FROM = 1 << 62

BEGUN, TOLD = 0, 1
IDS_READ, COUNTED, CREDIT_SEEN, FIRST_STORE, PUBLISHED, LAST_PUBLISHED = 2, 3, 4, 5, 6, 7
"""Of a role that sends."""
COUNTS_SEEN, BASE_KNOWN, MESSAGE_SEEN, LAST_MESSAGE, ROW_STORED, LAST_STORED = 2, 3, 4, 5, 6, 7
"""Of a role that receives. In combine's home role: heads seen, (unused), row seen, last row, result stored, last."""
WAITED, ARRIVED = 8, 9
"""With a word for each peer: its credit, its counts or its head seen; its first message or row seen."""


class Moment(NamedTuple):
    """A moment of a role.

    Attributes:
        name: in tables and pictures.
        number: its number in a record.
        first: whether the word holds the first of several times (FIRST_FROM - time).
        awaits: the moment per peer that this one follows once the last awaited peer has come, or "".
    """

    name: str
    number: int
    first: bool = False
    awaits: str = ""


class Role(NamedTuple):
    """A role of a phase and its moments, in the order of the protocol.

    Attributes:
        phase: "dispatch" or "combine".
        name: the work of its CTAs.
        moments: with one word each.
        per_peer: with a word for each peer.
    """

    phase: str
    name: str
    moments: tuple[Moment, ...]
    per_peer: tuple[Moment, ...]


def _first(name: str, number: int, awaits: str = "") -> Moment:
    return Moment(name, number, first=True, awaits=awaits)


_BEGUN, _TOLD = Moment("begun", BEGUN), Moment("told", TOLD)
_CREDIT, _CREDITED = _first("credit from", WAITED), Moment("credit seen", CREDIT_SEEN, awaits="credit from")
_STORES = (
    _first("first store", FIRST_STORE), _first("published", PUBLISHED), Moment("last published", LAST_PUBLISHED), _TOLD
)  # fmt: skip
"""The last moments of every role that sends."""

ROLES = (
    Role(
        "dispatch", "send",
        (_BEGUN, _first("ids read", IDS_READ), _first("counted", COUNTED), _CREDITED, *_STORES),
        (_CREDIT,),
    ),
    Role(
        "dispatch", "receive",
        (
            _BEGUN,
            _first("counts seen", COUNTS_SEEN, awaits="counts from"), _first("base known", BASE_KNOWN),
            _first("message seen", MESSAGE_SEEN, awaits="message from"), _first("row stored", ROW_STORED),
            Moment("last message seen", LAST_MESSAGE), Moment("last row stored", LAST_STORED),
            _TOLD,
        ),
        (_first("counts from", WAITED), _first("message from", ARRIVED)),
    ),
    Role("combine", "send", (_BEGUN, _CREDITED, _first("rows known", IDS_READ), *_STORES), (_CREDIT,)),
    Role(
        "combine", "home",
        (
            _BEGUN,
            _first("heads seen", COUNTS_SEEN, awaits="head from"),
            _first("row seen", MESSAGE_SEEN, awaits="row from"), _first("result stored", ROW_STORED),
            Moment("last row seen", LAST_MESSAGE), Moment("last result stored", LAST_STORED),
            _TOLD,
        ),
        (_first("head from", WAITED), _first("row from", ARRIVED)),
    ),
)  # fmt: skip
"""By the number of the role."""


def record_words(world_size: int) -> int:
    """Return the words of a record."""
    return TRACE_HEADER + NUM_MOMENTS + PEER_MOMENTS * world_size


def buffer_shape(world_size: int, ctas: int) -> tuple[int, int, int, int]:
    """Return the shape of a trace buffer, int64, for roles of at most ``ctas`` CTAs: calls, roles, CTAs, words.

    >>> buffer_shape(2, 3)
    (16, 4, 3, 14)
    """
    return TRACE_CALLS, TRACE_ROLES, ctas, record_words(world_size)
