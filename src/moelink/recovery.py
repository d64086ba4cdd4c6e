"""How survivors agree to go on without the dead: what ``recover`` does before anything is built.

Nobody is asked that may be dead. Every rank that takes part shows a *proposal* at its own beacon
(:mod:`moelink.liveness`), in its own process and behind the token that ranks exchanged at init: the old ranks that are
to go on, a random number for this attempt, and, for the lowest of these ranks, the port of a store that it has just
opened. Each rank reads the proposals of all the ranks in its own list until

* all show the same list: the agreement. Nobody decides for the others, so no rank's death can spoil it, the first's
  and that of the host of the old store included;
* one's process is gone: PeerLostError;
* one shows another list, for ``_GRACE_SECONDS``: ConfigMismatchError (a shorter time may be an attempt that has failed
  there, too, and is about to be repeated);
* ``timeout`` seconds have passed: PeerTimeoutError, naming who has shown nothing.

Then they meet in the new store, in a corner named after the random numbers of all. So an attempt meets only itself: a
rank that sees the leftovers of another rank's failed attempt waits in an empty corner, its time runs out, and both may
try again. From there on everything is as at ``init``: new connections, a new identity, new workspaces.

Why late writes of the old generation cannot reach the new one: it has other memory (a file or an allocation made
after the agreement, which the left out have never mapped), other connections and other beacons with other tokens. A
rank that was stopped and continues still holds its mappings of the *old* blocks, whose memory stays until it lets go:
it writes where nobody reads. A rank of the new generation knows every other one by the agreement, not by its number.

Whom it needs: every rank of the list. A rank whose list is refused, or that is left out, keeps its old communicator, on
which every call raises.

Example: of ranks 0-3 rank 0 is killed. Ranks 1, 2, 3 call ``recover([1, 2, 3])``; rank 1 hosts the store; they become
ranks 0, 1, 2 of 3.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink.config import EPConfig
from moelink.errors import ArgumentError, ConfigMismatchError, PeerLostError, PeerTimeoutError
from moelink.group import World, meet
from moelink.liveness import GONE, GONE_IN_WORDS, read_proposal
from moelink.watch import Watch

PHASE = "recover"
"""The phase that errors name; their call number is 0."""

_HEAD = struct.Struct("<16sHI")
_GRACE_SECONDS = 2.0
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Proposal:
    """What a rank shows to the others.

    Attributes:
        ranks: old ranks that are to go on, ascending.
        nonce: 16 random bytes of this attempt.
        port: where the lowest rank's store listens, 0 on the others.
    """

    ranks: tuple[int, ...]
    nonce: bytes
    port: int

    def encode(self) -> bytes:
        """As bytes, for the beacon."""
        return _HEAD.pack(self.nonce, self.port, len(self.ranks)) + struct.pack(f"<{len(self.ranks)}I", *self.ranks)

    @classmethod
    def decode(cls, data: bytes) -> Proposal:
        """The inverse of :meth:`encode`. Raises ValueError or struct.error for anything else."""
        nonce, port, count = _HEAD.unpack_from(data)
        if len(data) != _HEAD.size + 4 * count:
            raise ValueError(f"{len(data)} bytes for {count} ranks")
        return cls(struct.unpack_from(f"<{count}I", data, _HEAD.size), nonce, port)


def check_survivors(ranks: Iterable[int], config: EPConfig) -> tuple[int, ...]:
    """``ranks`` ascending, or ArgumentError: whole numbers, once each, of this communicator, this rank among them."""
    expected = f"distinct ranks in [0, {config.world_size}) with this rank, {config.rank}, among them"
    try:
        given = list(ranks)
    except TypeError:
        raise ArgumentError("ranks", expected, repr(ranks)) from None
    whole = all(isinstance(rank, int) and not isinstance(rank, bool) for rank in given)
    known = whole and all(0 <= rank < config.world_size for rank in given)
    if not known or len(set(given)) != len(given) or config.rank not in given:
        raise ArgumentError("ranks", expected, given)
    return tuple(sorted(given))


def config_of_survivors(config: EPConfig, survivors: Sequence[int]) -> EPConfig:
    """``config`` for this rank among the survivors. What follows from the number of ranks follows from the new one.

    Experts are dealt out anew, over fewer ranks, by the one rule there is (``routing.ExpertMap``), so any number of
    survivors will do. ``ranks_per_node`` says nothing any more about ranks of which some are missing.
    """
    return replace(config, world_size=len(survivors), rank=survivors.index(config.rank), ranks_per_node=None)


def regroup(watch: Watch, survivors: tuple[int, ...], timeout: float) -> World:
    """Agree with all ``survivors`` (old ranks, ascending, this one included) and meet them: their world.

    The old ranks become the new ones in ascending order.

    Raises:
        ConfigMismatchError: another rank recovers with other ranks.
        PeerLostError: a rank in the list is gone.
        PeerTimeoutError: a rank in the list has not called recover within ``timeout``.
    """
    deadline = time.monotonic() + timeout
    host = watch.addresses[survivors[0]].host
    server = _serve(host, timeout) if watch.rank == survivors[0] else None
    mine = Proposal(survivors, secrets.token_bytes(16), 0 if server is None else server.port)
    watch.beacon.proposal = mine.encode()
    try:
        agreed = {**_agree(watch, survivors, deadline), watch.rank: mine}
        left = max(deadline - time.monotonic(), 1.0)
        store = server or _connect(host, agreed[survivors[0]].port, left, watch, survivors)
        corner = PrefixStore(f"moelink/{_corner(agreed)}", store)
        with named_as_before(watch, survivors):
            return meet(corner, survivors.index(watch.rank), len(survivors), left)
    except PeerTimeoutError:
        watch.beacon.proposal = b""  # who asks is to wait for the next attempt
        raise


@contextmanager
def named_as_before(watch: Watch | None, survivors: Sequence[int]) -> Iterator[None]:
    """A block in which survivors meet: a PeerTimeoutError leaves it with the old numbers of the ranks.

    Where nobody could tell who is missing, the old beacons are asked.
    """
    try:
        yield
    except PeerTimeoutError as error:
        if watch is None:
            raise
        peer = survivors[error.peer] if 0 <= error.peer < len(survivors) else _silent(watch, survivors)
        raise _late(watch.rank, peer, "it came, and went while ranks met again") from error


def _silent(watch: Watch, survivors: Sequence[int]) -> int:
    """The first survivor that does not answer, -1 when all do."""
    for rank in survivors:
        if rank != watch.rank and not isinstance(read_proposal(watch.addresses[rank]), bytes):
            return rank
    return -1


def _serve(host: str, timeout: float) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def _connect(host: str, port: int, left: float, watch: Watch, survivors: Sequence[int]) -> Any:
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=left)
        )
    except RuntimeError as error:
        raise _late(watch.rank, survivors[0], "its store does not answer") from error


def _corner(agreed: Mapping[int, Proposal]) -> str:
    """A name that only those know who read all proposals, and that no other attempt has."""
    text = b"".join(struct.pack("<I", rank) + agreed[rank].nonce for rank in sorted(agreed))
    return blake2b(text, digest_size=16).hexdigest()


def _agree(watch: Watch, survivors: tuple[int, ...], deadline: float) -> dict[int, Proposal]:
    """The proposals of the other survivors, once all of them list the same ranks."""
    missing = [rank for rank in survivors if rank != watch.rank]
    agreed: dict[int, Proposal] = {}
    differs: dict[int, float] = {}
    if not missing:
        return agreed
    with ThreadPoolExecutor(max_workers=min(64, len(missing))) as pool:
        while True:
            answers = dict(zip(missing, pool.map(lambda r: read_proposal(watch.addresses[r]), missing), strict=True))
            shown = {rank: _decode(answer) for rank, answer in answers.items()}
            gone = [rank for rank, answer in answers.items() if answer == GONE]
            if gone:
                raise PeerLostError(
                    rank=watch.rank, peer=gone[0], phase=PHASE, call=0, expected=0, got=None, detail=GONE_IN_WORDS
                )
            agreed |= {rank: proposal for rank, proposal in shown.items() if proposal and proposal.ranks == survivors}
            missing = [rank for rank in missing if rank not in agreed]
            if not missing:
                return agreed
            now = time.monotonic()
            others = {rank: shown[rank] for rank in missing if shown[rank] is not None}
            differs = {rank: differs.get(rank, now) for rank in others}
            if any(now - since > _GRACE_SECONDS for since in differs.values()) or (others and now > deadline):
                lists = {watch.rank: survivors, **{rank: other.ranks for rank, other in others.items() if other}}
                raise _mismatch(lists)
            if now > deadline:
                silent = [rank for rank in missing if not isinstance(answers[rank], bytes)]
                detail = "it does not answer" if silent else "it has not called recover"
                raise _late(watch.rank, (silent or missing)[0], detail)
            time.sleep(_PAUSE_SECONDS)


def _decode(answer: bytes | int) -> Proposal | None:
    if not isinstance(answer, bytes) or not answer:
        return None
    try:
        return Proposal.decode(answer)
    except (ValueError, struct.error):
        return None  # as good as nothing; the time-out names the rank


def _mismatch(lists: Mapping[int, Sequence[int]]) -> ConfigMismatchError:
    said: dict[str, list[int]] = {}
    for rank, ranks in sorted(lists.items()):
        said.setdefault(str(list(ranks)), []).append(rank)
    return ConfigMismatchError("ranks", dict(said))


def _late(rank: int, peer: int, detail: str) -> PeerTimeoutError:
    return PeerTimeoutError(rank=rank, peer=peer, phase=PHASE, call=0, expected=0, got=None, detail=detail)
