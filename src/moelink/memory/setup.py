"""Agree on a block of memory: two bounded exchanges of small records, after which all ranks succeed or all raise.

A record is a few lines of ASCII, ``moelink-memory 1 <kind>`` and one ``name=value`` line per field. Records come from
other processes, so they are checked: the length is bounded, every field must be there, in order, and match its own
pattern in full, and nothing is unpickled or evaluated.

A rank that failed takes part in both exchanges and sends the reason, so that its peers neither wait nor guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from moelink.errors import ConfigMismatchError, MoelinkError, ProtocolError, UnsupportedError

Exchange = Callable[[bytes], list[bytes]]
"""An all-gather of small byte strings (at most :data:`MAX_RECORD_BYTES`), ordered by rank, this rank's own included.

The caller supplies it and bounds it in time: it raises when a rank does not answer.
"""

Schema = Mapping[str, re.Pattern[str]]
"""The fields of a record in order, each with the pattern that its whole value must match."""

MAX_RECORD_BYTES = 1024
"""No record is longer; a longer one is refused."""

NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
"""A non-negative decimal integer, below 10**20, written in one way only."""

_Accepted = TypeVar("_Accepted")
_ERROR: Schema = {"rank": NUMBER, "error": re.compile(r"[ -~]{1,600}")}
_VERDICT: Schema = {"rank": NUMBER, "ready": re.compile(r"yes")}
_PHASE = "memory setup"


def set_up(
    exchange: Exchange,
    *,
    kind: str,
    rank: int,
    world_size: int,
    schema: Schema,
    prepare: Callable[[], dict[str, str]],
    accept: Callable[[list[dict[str, str]]], _Accepted],
    members: Sequence[int] | None = None,
) -> _Accepted:
    """Prepare on every rank, exchange the records, accept them, and return only if all ranks accepted.

    Args:
        exchange: the all-gather; called exactly twice, also after an error.
        kind: names the record; ranks that set up another kind are refused.
        rank: this rank.
        world_size: number of ranks.
        schema: fields that ``prepare`` returns, without ``rank``, which is added here.
        prepare: makes this rank's part and describes it.
        accept: receives the checked fields of all ranks, by rank; its result is returned.
        members: the ranks that take part, ascending, if not all of ``world_size``.

    Raises:
        MoelinkError: of ``prepare`` or ``accept`` on this rank.
        UnsupportedError: another rank failed; the message has its rank and its reason.
        ProtocolError: a record is malformed.
    """
    ranks = range(world_size) if members is None else members
    failure: MoelinkError | None = None
    accepted: list[_Accepted] = []
    try:
        record = encode(kind, {"rank": str(rank), **prepare()})
    except MoelinkError as error:
        failure, record = error, _encode_error(kind, rank, error)
    replies = exchange(record)
    if failure is None:
        try:
            full = {"rank": NUMBER, **schema}
            accepted.append(accept(_decode_all(replies, kind=kind, rank=rank, ranks=ranks, schema=full)))
        except MoelinkError as error:
            failure = error
    ready = encode(kind, {"rank": str(rank), "ready": "yes"})
    verdicts = exchange(ready if failure is None else _encode_error(kind, rank, failure))
    if failure is not None:
        raise failure
    _decode_all(verdicts, kind=kind, rank=rank, ranks=ranks, schema=_VERDICT)
    return accepted[0]


def encode(kind: str, fields: Mapping[str, str]) -> bytes:
    """Return one record. ``encode("posix", {"rank": "0"}) == b"moelink-memory 1 posix\\nrank=0\\n"``."""
    lines = [f"moelink-memory 1 {kind}", *(f"{name}={value}" for name, value in fields.items()), ""]
    return "\n".join(lines).encode("ascii")


def decode(record: object, kind: str, schema: Schema) -> dict[str, str]:
    """Return the fields of a record, the inverse of :func:`encode`. Raises ValueError for a malformed one."""
    if not isinstance(record, bytes):
        raise ValueError(f"expected bytes, got {type(record).__name__}")
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"expected at most {MAX_RECORD_BYTES} bytes, got {len(record)}")
    if not record.isascii():
        raise ValueError("expected ASCII, got other bytes")
    head, *lines, rest = record.decode("ascii").split("\n") if b"\n" in record else ["", ""]
    if head != f"moelink-memory 1 {kind}" or rest:
        raise ValueError(f"expected a {kind!r} record of this version, got {head!r}")
    if len(lines) != len(schema):
        raise ValueError(f"expected {len(schema)} fields, got {len(lines)}")
    fields = {}
    for line, (name, pattern) in zip(lines, schema.items(), strict=True):
        key, equals, value = line.partition("=")
        if key != name or not equals or not pattern.fullmatch(value):
            raise ValueError(f"expected field {name!r} to match {pattern.pattern!r}, got {line[:80]!r}")
        fields[name] = value
    return fields


def machine_id() -> str:
    """Return an id that only processes of one running machine share (36 characters, lower-case hex)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise UnsupportedError(
            f"expected Linux with /proc for memory between processes, got this error: {error}; use "
            "transport='collective'"
        ) from error


MACHINE = re.compile(r"[0-9a-f-]{36}")
"""The form of :func:`machine_id`."""


def refuse_other_places(peers: Sequence[Mapping[str, str]]) -> None:
    """Raise UnsupportedError naming two ranks whose ``machine`` fields differ, or as :func:`refuse_other_sizes`."""
    for peer, fields in enumerate(peers):
        if fields["machine"] != peers[0]["machine"]:
            raise UnsupportedError(
                f"rank {peer} is not on the machine of rank 0: expected one machine, within which memory is shared, "
                "got several; use transport='collective'"
            )
    refuse_other_sizes(peers)


def refuse_other_sizes(peers: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigMismatchError unless the ``nbytes`` fields of all ranks are equal."""
    said = [fields["nbytes"] for fields in peers]
    if len(set(said)) > 1:
        raise ConfigMismatchError("nbytes", {size: [r for r, s in enumerate(said) if s == size] for size in said})


def _encode_error(kind: str, rank: int, error: MoelinkError) -> bytes:
    text = "".join(c if " " <= c <= "~" else "?" for c in str(error)[:600]) or type(error).__name__
    return encode(kind, {"rank": str(rank), "error": text})


def _decode_all(replies: object, *, kind: str, rank: int, ranks: Sequence[int], schema: Schema) -> list[dict[str, str]]:
    """Return every rank's fields, by rank. Raises for the first rank whose record is malformed or has an error."""
    if not isinstance(replies, list) or len(replies) != len(ranks):
        got = f"{len(replies)} records" if isinstance(replies, list) else type(replies).__name__
        raise MoelinkError(
            f"{_PHASE}: expected a list of {len(ranks)} records from the exchange, got {got}; correct the exchange "
            "function"
        )
    peers = []
    for peer, reply in zip(ranks, replies, strict=True):
        try:
            said = decode(reply, kind, _ERROR)
        except ValueError:
            said = {}
        try:
            fields = said or decode(reply, kind, schema)
            if fields["rank"] != str(peer):
                raise ValueError(f"expected rank {peer}, got {fields['rank']}")
        except ValueError as error:
            raise ProtocolError(
                f"rank {rank}: the record of rank {peer} in {_PHASE} is refused: {error}; run one moelink version on "
                "every rank",
                rank=rank, peer=peer, phase=_PHASE, call=0,
            ) from None  # fmt: skip
        if said:
            raise UnsupportedError(f"rank {peer} could not set up its memory: {said['error']}")
        peers.append(fields)
    return peers
