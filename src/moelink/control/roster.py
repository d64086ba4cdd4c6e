"""Encode the entries of a meeting: one of each rank, and the roster of all that rank 0 writes.

Decoding trusts nothing: a malformed entry is None, a malformed roster is empty.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from moelink.control.probe import Address

WAITING, ENTERED, LEFT = b"W", b"E", b"L"
"""States of an entry: the rank waits for the others, sets up with them, has given up."""

NONCE_BYTES = 16
_FLAG = 1 + NONCE_BYTES
_END = struct.Struct("<H8sH")
_MARK = 0xFFFF, b"gave up:"
"""Begins an end. No roster begins with the length 65535."""


@dataclass(frozen=True)
class Entry:
    """The data that one rank shows in a meeting. ``has_group``: it has torch's default group."""

    state: bytes
    nonce: bytes
    address: Address
    has_group: bool = False

    def encode(self) -> bytes:
        """Encode as bytes, for the store."""
        return self.state + self.nonce + bytes([self.has_group]) + self.address.encode()

    @classmethod
    def decode(cls, data: bytes) -> Entry | None:
        """Decode the result of :meth:`encode`; None for other bytes."""
        if data[:1] not in (WAITING, ENTERED, LEFT):
            return None
        try:
            return cls(
                data[:1], data[1:_FLAG], Address.decode(data[_FLAG + 1 :]), has_group=data[_FLAG : _FLAG + 1] == b"\1"
            )
        except (ValueError, struct.error):
            return None


def encode_roster(entries: Sequence[Entry]) -> bytes:
    """Encode the entries of all ranks, by rank."""
    parts = [entry.encode() for entry in entries]
    return b"".join(struct.pack("<H", len(part)) + part for part in parts)


def decode_roster(data: bytes) -> list[Entry]:
    """Decode the result of :func:`encode_roster`; empty for other bytes."""
    entries: list[Entry] = []
    while data:
        if len(data) < 2:
            return []
        (size,) = struct.unpack_from("<H", data)
        entry = Entry.decode(data[2 : 2 + size])
        if entry is None:
            return []
        entries.append(entry)
        data = data[2 + size :]
    return entries


def encode_end(nonces: Sequence[bytes], news: bytes) -> bytes:
    """Encode the reason for a missing roster, ``news``, for the ranks with these nonces."""
    return _END.pack(*_MARK, len(nonces)) + b"".join(nonces) + news


def news_for(nonce: bytes, data: bytes) -> bytes:
    """Return the news of an :func:`encode_end` for ``nonce``; empty for other bytes.

    >>> news_for(b"b" * 16, encode_end([b"a" * 16, b"b" * 16], b"why"))
    b'why'
    >>> news_for(b"c" * 16, encode_end([b"a" * 16, b"b" * 16], b"why"))
    b''
    """
    if len(data) < _END.size or _END.unpack_from(data)[:2] != _MARK:
        return b""
    begin = _END.size
    end = begin + _END.unpack_from(data)[2] * NONCE_BYTES
    nonces = [data[i : i + NONCE_BYTES] for i in range(begin, end, NONCE_BYTES)]
    return data[end:] if nonce in nonces else b""


def digest(roster: Sequence[Entry]) -> bytes:
    """Return the name of the room of these ranks."""
    return blake2b(encode_roster(roster), digest_size=16).digest()
