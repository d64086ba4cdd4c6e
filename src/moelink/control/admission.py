"""Let processes meet a running communicator, whose masked ranks they become: the first step of ``admit`` and ``join``.

They meet in a store that the caller names on both sides. A newcomer knows its own rank and nothing else, and the ranks
that go on, the *members*, know no newcomer. All keys are under one prefix:

==================  ============  ============================================================================
key                 written by    value
==================  ============  ============================================================================
``want/r``          newcomer r    a random nonce of its attempt
``call/a``          the host      the invitation of attempt ``a``, or the newcomer that did not come
``call/n``          the host      the same invitation, for the newcomer with nonce ``n``
``corner/a/..``     all           the meeting of this attempt (:mod:`moelink.control.meeting`)
==================  ============  ============================================================================

1. *Members agree* over their own connections: each shows the ranks that it admits and a nonce; the nonce of the lowest
   member, the *host*, names the attempt. A member that refuses its arguments says so, and all raise.
2. *Newcomers show* ``want``, and wait for the invitation with their own nonce. The host waits until all of them have,
   at most for the timeout, then deletes their ``want`` and writes the invitation: who takes part.
3. *All meet* in the corner of the attempt, as ranks do at ``init``. From there on newcomers open their sessions while
   members prepare a change of theirs, in the same exchanges, which compare versions, settings and layouts.

Nothing of a member has changed until the last of these exchanges is over on it. An attempt that fails leaves
nothing that a later one reads: its nonces are not shown again. A newcomer that has died after it showed ``want`` is
missing in the meeting, which names it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink.control.group import World, gather_bytes, meet
from moelink.control.handshake import compare
from moelink.control.recovery import late
from moelink.control.stores import BoundedError, bounded, peek
from moelink.errors import ArgumentError, PeerLostError, PeerTimeoutError, UnsupportedError

T = TypeVar("T")

PHASE = "admit"
"""Phase of the errors raised here; their call number is 0."""

_PREFIX = "moelink/admit"
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Invitation:
    """Who meets in attempt ``attempt``: ``members`` are all ranks that take part then, ``host`` wrote it. ``missing``:
    a newcomer that did not come, -1 for none."""

    attempt: str
    members: tuple[int, ...]
    host: int
    missing: int = -1

    def encode(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Invitation:
        """Decode the result of :meth:`encode`."""
        said = json.loads(data)
        return cls(
            str(said["attempt"]), tuple(int(r) for r in said["members"]), int(said["host"]), int(said["missing"])
        )


def receive(world: World, ranks: Sequence[int], store: Any, timeout: float) -> World:
    """Meet the newcomers ``ranks`` as a member, of ``world``. Return the world of all.

    Raises:
        ConfigMismatchError: another member admits other ranks.
        PeerAbortedError: another member refused its arguments.
        PeerTimeoutError: a newcomer or a member did not come in time, or (PeerLostError) is gone.
    """
    me, place = world.ranks[world.rank], PrefixStore(_PREFIX, store)
    mine = json.dumps([list(ranks), secrets.token_hex(8)]).encode()
    with named(world.ranks, me):
        said = [json.loads(text) for text in gather_bytes(world, mine, timeout, phase=PHASE)]
    compare([{"ranks": str(admitted)} for admitted, _ in said], world.ranks)
    attempt, host = str(said[0][1]), world.ranks[0]
    if me == host:
        members = tuple(sorted((*world.ranks, *ranks)))
        invitation = _within(timeout, me, me, lambda end: _invite(place, Invitation(attempt, members, me), ranks, end))
    else:
        found = _within(2 * timeout, me, host, lambda end: _await_key(place, f"call/{attempt}", end))
        invitation = Invitation.decode(found)
    if invitation.missing >= 0:
        raise late(PHASE, me, invitation.missing, "it has not called join, or admit of itself")
    return _meet(place, invitation, me, timeout)


def arrive(rank: int, store: Any, timeout: float) -> World:
    """Meet the members of a running communicator as its rank ``rank``. Return the world of all.

    Raises:
        PeerTimeoutError: no member invited this rank in time, or one did not come, or (PeerLostError) is gone.
    """
    place, nonce = PrefixStore(_PREFIX, store), secrets.token_hex(8)

    def ask(end: float) -> bytes:
        place.set(f"want/{rank}", nonce)
        return _await_key(place, f"call/{nonce}", end)

    invitation = Invitation.decode(_within(timeout, rank, -1, ask))
    place.delete_key(f"call/{nonce}")
    if rank not in invitation.members:
        raise ArgumentError("rank", f"one of the ranks that are admitted, {list(invitation.members)}", rank)
    return _meet(place, invitation, rank, timeout)


def applicants(store: Any, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return those of ``ranks`` that wait to be admitted. Waits for none."""
    place = PrefixStore(_PREFIX, store)
    return tuple(rank for rank in ranks if peek(place, f"want/{rank}"))


def _invite(place: Any, invitation: Invitation, ranks: Sequence[int], end: float) -> Invitation:
    """Wait for all newcomers, as the host, and write the invitation."""
    nonces: dict[int, str] = {}
    while len(nonces) < len(ranks) and time.monotonic() < end:
        nonces = {rank: nonce for rank in ranks if (nonce := peek(place, f"want/{rank}").decode())}
        time.sleep(_PAUSE_SECONDS if len(nonces) < len(ranks) else 0)
    missing = next((rank for rank in ranks if rank not in nonces), -1)
    invitation = replace(invitation, missing=missing)
    if missing < 0:
        for rank, nonce in nonces.items():
            place.delete_key(f"want/{rank}")
            place.set(f"call/{nonce}", invitation.encode())
    place.set(f"call/{invitation.attempt}", invitation.encode())
    return invitation


def _await_key(place: Any, key: str, end: float) -> bytes:
    while time.monotonic() < end:
        value = peek(place, key)
        if value:
            return value
        time.sleep(_PAUSE_SECONDS)
    raise BoundedError


def _within(timeout: float, rank: int, awaited: int, call: Callable[[float], T]) -> T:
    """Return the result of ``call`` of a deadline; if it does not come by then, raise the error that names
    ``awaited``."""
    end = time.monotonic() + timeout
    try:
        return bounded(lambda: call(end), end + 1.0)
    except (BoundedError, RuntimeError) as error:
        if isinstance(error, (PeerTimeoutError, UnsupportedError)):
            raise
        detail = "no rank admits this one" if awaited < 0 else "the store does not answer, or nothing came in it"
        raise late(PHASE, rank, awaited, detail) from error


def _meet(place: Any, invitation: Invitation, rank: int, timeout: float) -> World:
    members = invitation.members
    corner = PrefixStore(f"corner/{invitation.attempt}", place)
    with named(members, rank):
        world = meet(corner, members.index(rank), len(members), timeout)
    return replace(world, members=members)


@contextmanager
def named(members: Sequence[int], rank: int) -> Iterator[None]:
    """Translate a PeerTimeoutError of the block, in which ``members`` meet, to their numbers in the communicator."""
    try:
        yield
    except PeerTimeoutError as error:
        if error.phase == PHASE:
            raise
        peer = members[error.peer] if 0 <= error.peer < len(members) else -1
        raise late(
            PHASE, rank, peer, "it did not take part in the set-up", lost=isinstance(error, PeerLostError)
        ) from error
