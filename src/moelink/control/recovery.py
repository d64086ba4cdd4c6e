"""How survivors agree to go on without the dead: what ``recover`` does before anything is built.

Nobody is asked that may be dead. Every rank that takes part shows a *proposal* at its own beacon
(:mod:`moelink.control.probe`), in its own process and behind the token that ranks exchanged at init: the old ranks that
are to go on, a random number of its own, and, on the lowest of these ranks, the port of a store that it has just
opened. Each rank reads the proposals of all the ranks in its own list until

* all show the same list: the agreement. Nobody decides for the others, so no rank's death can spoil it, the first's
  and that of the host of the old store included;
* one's process is gone: PeerLostError;
* one shows another list, for ``_GRACE_SECONDS``: ConfigMismatchError (a shorter time may be an attempt that has failed
  there, too, and is about to be repeated);
* ``timeout`` seconds have passed: PeerTimeoutError, naming who has shown nothing.

Then they meet in the new store, in a *corner* named after the random numbers of all, and show which one. So an attempt
meets only itself: a rank that is still in an attempt which others have given up is waited for, and as soon as it sees
that another rank's number has changed it agrees anew. From there on everything is as at ``init``: new connections, a
new identity, new workspaces.

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
import threading
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
from moelink.control.failure_detector import Watch
from moelink.control.group import World, meet
from moelink.control.probe import GONE, GONE_IN_WORDS, NO_ANSWER, read_proposal
from moelink.errors import ArgumentError, ConfigMismatchError, PeerLostError, PeerTimeoutError

PHASE = "recover"
"""The phase that errors name; their call number is 0."""

_HEAD = struct.Struct("<16sH16sI")
_GRACE_SECONDS = 2.0
_LINGER_SECONDS = 1.0
"""A refused list stays on show for so long, for ranks that have not seen it long enough."""
_PAUSE_SECONDS = 0.02


NOTHING = 0
"""What stands for the proposal of a rank that answers and has none."""

_EXCUSES = ("it does not answer", "it has not called recover", "it is still in an earlier attempt")


@dataclass(frozen=True)
class Proposal:
    """What a rank shows to the others.

    Attributes:
        ranks: old ranks that are to go on, ascending.
        nonce: 16 random bytes of this attempt.
        port: where the lowest rank's store listens, 0 on the others.
        corner: 16 bytes, the name of the corner where this rank waits for the others; zeros before it has agreed.
    """

    ranks: tuple[int, ...]
    nonce: bytes
    port: int
    corner: bytes = bytes(16)

    def encode(self) -> bytes:
        """As bytes, for the beacon."""
        head = _HEAD.pack(self.nonce, self.port, self.corner, len(self.ranks))
        return head + struct.pack(f"<{len(self.ranks)}I", *self.ranks)

    @classmethod
    def decode(cls, data: bytes) -> Proposal:
        """The inverse of :meth:`encode`. Raises ValueError or struct.error for anything else."""
        nonce, port, corner, count = _HEAD.unpack_from(data)
        if len(data) != _HEAD.size + 4 * count:
            raise ValueError(f"{len(data)} bytes for {count} ranks")
        return cls(struct.unpack_from(f"<{count}I", data, _HEAD.size), nonce, port, corner)


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
    server = _serve(watch.addresses[survivors[0]].host, timeout) if watch.rank == survivors[0] else None
    mine = Proposal(survivors, secrets.token_bytes(16), 0 if server is None else server.port)
    board = _Board(watch, mine)
    try:
        while True:
            agreed = _agree(board, deadline)
            store = server or _connect(board, agreed[survivors[0]], deadline)
            corner = PrefixStore(f"moelink/{board.corner(agreed).hex()}", store)
            if _all_arrived(board, agreed, corner, deadline):
                break
        with named_as_before(watch, survivors):
            left = max(deadline - time.monotonic(), 1.0)
            return meet(corner, survivors.index(watch.rank), len(survivors), left)
    except ConfigMismatchError:
        board.withdraw(after=_LINGER_SECONDS)
        raise
    except BaseException:
        board.withdraw()
        raise


class _Board:
    """What this rank shows, and what the other survivors do."""

    def __init__(self, watch: Watch, mine: Proposal) -> None:
        self.rank, self.mine, self._watch = watch.rank, mine, watch
        self.others = [rank for rank in mine.ranks if rank != watch.rank]
        self.host = watch.addresses[mine.ranks[0]].host
        self.show(bytes(16))

    def show(self, corner: bytes) -> None:
        """Show this rank's proposal, and the corner where it waits (zeros: it has not agreed)."""
        self._watch.beacon.proposal = replace(self.mine, corner=corner).encode()

    def withdraw(self, after: float = 0.0) -> None:
        """Show nothing any more, so that who asks waits for the next attempt."""
        shown = self._watch.beacon.proposal

        def clear() -> None:
            if self._watch.beacon.proposal == shown:
                self._watch.beacon.proposal = b""

        timer = threading.Timer(after, clear)
        timer.daemon = True
        timer.start()
        if after == 0:
            timer.join()

    def read(self) -> dict[int, Proposal | int]:
        """By survivor: its proposal, or NO_ANSWER, also where there is none yet, or nonsense.

        Raises PeerLostError for one that is gone.
        """
        if not self.others:
            return {}
        addresses = [self._watch.addresses[rank] for rank in self.others]
        with ThreadPoolExecutor(max_workers=min(64, len(self.others))) as pool:
            answers = dict(zip(self.others, pool.map(read_proposal, addresses), strict=True))
        if GONE in answers.values():
            peer = next(rank for rank, answer in answers.items() if answer == GONE)
            raise PeerLostError(
                rank=self.rank, peer=peer, phase=PHASE, call=0, expected=0, got=None, detail=GONE_IN_WORDS
            )
        return {rank: _decode(answer) for rank, answer in answers.items()}

    def corner(self, agreed: Mapping[int, Proposal]) -> bytes:
        """A name that only those know who read all proposals, and that no other attempt has."""
        nonces = {self.rank: self.mine.nonce, **{rank: proposal.nonce for rank, proposal in agreed.items()}}
        text = b"".join(struct.pack("<I", rank) + nonces[rank] for rank in sorted(nonces))
        return blake2b(text, digest_size=16).digest()

    def agree(self, shown: Mapping[int, Proposal | int]) -> dict[int, Proposal] | None:
        """All proposals, if they list the same ranks and nobody waits somewhere else, else None."""
        agreed = {rank: p for rank, p in shown.items() if isinstance(p, Proposal) and p.ranks == self.mine.ranks}
        if len(agreed) < len(self.others):
            return None
        places = {bytes(16), self.corner(agreed)}
        return agreed if all(proposal.corner in places for proposal in agreed.values()) else None


def _decode(answer: bytes | int) -> Proposal | int:
    if not isinstance(answer, bytes):
        return answer
    try:
        return Proposal.decode(answer) if answer else NOTHING
    except (ValueError, struct.error):
        return NO_ANSWER  # the time-out names the rank


def _agree(board: _Board, deadline: float) -> dict[int, Proposal]:
    """The proposals of the other survivors, once all of them list the same ranks."""
    differs: dict[int, float] = {}
    came: set[int] = set()
    board.show(bytes(16))
    while True:
        shown = board.read()
        came |= {rank for rank, p in shown.items() if isinstance(p, Proposal) and p.ranks == board.mine.ranks}
        agreed = board.agree(shown)
        if agreed is not None:
            board.show(board.corner(agreed))
            return agreed
        now = time.monotonic()
        # Who waits in a corner with other ranks is in an attempt of before.
        lists = {
            rank: p.ranks
            for rank, p in shown.items()
            if isinstance(p, Proposal) and p.ranks != board.mine.ranks and p.corner == bytes(16)
        }
        differs = {rank: differs.get(rank, now) for rank in lists}
        if any(now - since > _GRACE_SECONDS for since in differs.values()) or (lists and now > deadline):
            raise _mismatch({board.rank: board.mine.ranks, **lists})
        if now > deadline:
            # Who came and shows nothing any more gave up a moment ago, over somebody that this rank waits for, too.
            peer = min(board.others, key=lambda rank: (_urgency(shown[rank]), rank in came))
            said = shown[peer]
            raise _late(board.rank, peer, _EXCUSES[_urgency(said)])
        time.sleep(_PAUSE_SECONDS)


def _urgency(shown: Proposal | int) -> int:
    """Whom to name first of several that are not there: an index into the reasons."""
    return 2 if isinstance(shown, Proposal) else 1 if shown == NOTHING else 0


def _all_arrived(board: _Board, agreed: Mapping[int, Proposal], corner: Any, deadline: float) -> bool:
    """True once everybody is in ``corner``; False when another rank began again, with another random number."""
    names = [str(rank) for rank in board.mine.ranks]
    try:
        corner.set(str(board.rank), b"1")
        while not corner.check(names):
            shown = board.read()
            if any(isinstance(p, Proposal) and p.nonce != agreed[rank].nonce for rank, p in shown.items()):
                return False
            if time.monotonic() > deadline:
                absent = [rank for rank in board.mine.ranks if not corner.check([str(rank)])]
                raise _late(board.rank, absent[0] if absent else -1, "it agreed, and did not come")
            time.sleep(_PAUSE_SECONDS)
    except RuntimeError as error:
        if isinstance(error, PeerTimeoutError):
            raise
        board.read()  # says so if the store's host is gone
        raise _late(board.rank, board.mine.ranks[0], "its store does not answer") from error
    return True


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


def _connect(board: _Board, host: Proposal, deadline: float) -> Any:
    peer = board.mine.ranks[0]
    left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    try:
        return dist.TCPStore(board.host, host.port, is_master=False, wait_for_workers=False, timeout=left)  # type: ignore[attr-defined]
    except RuntimeError as error:
        board.read()
        raise _late(board.rank, peer, "its store does not answer") from error


def _mismatch(lists: Mapping[int, Sequence[int]]) -> ConfigMismatchError:
    said: dict[str, list[int]] = {}
    for rank, ranks in sorted(lists.items()):
        said.setdefault(str(list(ranks)), []).append(rank)
    return ConfigMismatchError("ranks", dict(said))


def _late(rank: int, peer: int, detail: str) -> PeerTimeoutError:
    return PeerTimeoutError(rank=rank, peer=peer, phase=PHASE, call=0, expected=0, got=None, detail=detail)
