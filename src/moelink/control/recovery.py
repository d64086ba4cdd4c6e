"""Let the surviving ranks agree on a new group without the dead ones: the first step of ``recover``.

The agreement asks no rank that may be dead. Every rank that takes part publishes a *proposal* at its own probe server
(:mod:`moelink.control.probe`), behind the token that ranks exchanged at init. A proposal holds the old numbers of the
ranks that go on, a random nonce of this attempt and, on the lowest of these ranks, the port of a store that it has just
opened. Each rank reads the proposals of all the ranks in its own list, again and again, until

* all proposals have the same list: the agreement. No rank decides for the others, so no death can spoil it, that of
  rank 0 or of the host of the old store included;
* the process of one is gone: PeerLostError;
* one has another list, for longer than ``_GRACE_SECONDS``: ConfigMismatchError (a shorter time may be left from an
  attempt that failed there too, and that the rank is about to repeat);
* one does not answer for ``timeout`` seconds, or has no proposal when every call of the old communicator must be over
  (twice ``timeout``, because ranks enter a call up to ``timeout`` apart): PeerTimeoutError, which names it.

Then the ranks meet in the new store, in a *corner*: a prefix that is a digest of all their nonces. Each publishes the
name of its corner, so an attempt meets only itself. Example: rank 1 gave up and calls ``recover`` again while rank 2
still waits in the corner of the first attempt. Rank 2 sees rank 1's new nonce, leaves that corner and agrees anew. From
there on everything is as at ``init``: new connections, a new identity, new workspaces.

Ranks leave a corner by its *verdict*, one key that is written once, by compare-and-set: "go" by a rank that has seen
all in the corner, or the rank at fault by one that finds its process gone or waits in vain. If a rank is about to
write it and finds another one, it obeys that. So either all that are in a corner go on to meet, where the meeting's
own rules let all name the same rank, or all give up and name the rank of the verdict. Without it, a rank that gives up
just when the others have gone on to meet would be missing there, and they would name it, or the store's host with
whose exception the store ends. The host keeps the store for ``LINGER_SECONDS`` more, so that the others read the
verdict. One that comes too late for that, or that a meeting fails for, looks at the proposal of the rank it would
name: a rank that lives and has begun again is not at fault, and both agree anew.

The last exchange of a set-up may succeed on one rank and fail on another, whose peer died in the middle of it. The one
has gone on and does not come back to the old group; the other must not take it for dead, and go on alone. So a rank
that has a new communicator publishes that at its old probe server (:func:`go_on`), which stays a while. Who reads it
knows that it has been left out: its error names itself, and it cannot recover any more. Whoever has gone on finds the
rank that was left out missing in the first call.

Late writes of the old generation cannot reach the new one. It has other memory (a file or an allocation made after the
agreement, which ranks outside it have never mapped), other connections, and other probe servers with other tokens. A
rank that was stopped and continues writes into the *old* blocks, which nobody reads; their memory stays until that rank
unmaps it. Ranks of the new generation are known by the agreement, not by their numbers.

Every rank of the list must call ``recover``. A rank whose list is refused, or that is in no list, keeps its old
communicator, on which every call raises.

Example: of ranks 0-3 rank 0 is killed. Ranks 1, 2, 3 call ``recover([1, 2, 3])``; rank 1 hosts the store; they become
ranks 0, 1, 2 of 3.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink.config import EPConfig
from moelink.control.group import World
from moelink.control.probe import GONE, GONE_IN_WORDS, NO_ANSWER
from moelink.control.stores import BoundedError, peek
from moelink.control.surroundings import Surroundings
from moelink.errors import ArgumentError, ConfigMismatchError, PeerLostError, PeerTimeoutError

PHASE = "recover"
"""Phase of the errors raised here; their call number is 0."""

_HEAD = struct.Struct("<16sH16s?I")
_GRACE_SECONDS = 2.0
LINGER_SECONDS = 1.0
"""How long a refused list stays published, so that every other rank sees it for longer than ``_GRACE_SECONDS``, and how
long the store of a rank that gave up answers those that are about to."""
_PAUSE_SECONDS = 0.02
_CALL_SPARE_SECONDS = 1.0
"""What a call may take beyond its timeout."""
_LAST_WORD_SECONDS = 0.5


_VERDICT, _GO = "verdict", b"go"
_END = struct.Struct("<q?")

NOTHING = 0
"""In place of a proposal: the rank answers and has none."""

_REASONS = ("it is stopped or unreachable", "it has not called recover", "it is still in an earlier attempt")
"""Why a rank is missing, in the order in which missing ranks are named."""


@dataclass(frozen=True)
class Proposal:
    """The data that a rank publishes to the others.

    Attributes:
        ranks: old numbers of the ranks that go on, ascending.
        nonce: 16 random bytes of this attempt.
        port: port of the lowest rank's store, 0 on the others.
        corner: 16 bytes, the name of the corner in which this rank waits for the others; zeros before it has agreed.
        finished: this rank has a new communicator of ``ranks``.
    """

    ranks: tuple[int, ...]
    nonce: bytes
    port: int
    corner: bytes = bytes(16)
    finished: bool = False

    def encode(self) -> bytes:
        """Encode as bytes, for the probe server."""
        head = _HEAD.pack(self.nonce, self.port, self.corner, self.finished, len(self.ranks))
        return head + struct.pack(f"<{len(self.ranks)}I", *self.ranks)

    @classmethod
    def decode(cls, data: bytes) -> Proposal:
        """Decode what :meth:`encode` returned. Raises ValueError or struct.error for anything else."""
        nonce, port, corner, finished, count = _HEAD.unpack_from(data)
        if len(data) != _HEAD.size + 4 * count:
            raise ValueError(f"expected {_HEAD.size + 4 * count} bytes for {count} ranks, got {len(data)}")
        return cls(struct.unpack_from(f"<{count}I", data, _HEAD.size), nonce, port, corner, finished)


def check_survivors(ranks: Iterable[int], config: EPConfig) -> tuple[int, ...]:
    """Return ``ranks`` ascending.

    Raises:
        ArgumentError: they are not distinct ranks of this communicator with this rank among them.
    """
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
    """Return ``config`` for this rank among ``survivors``.

    Sizes that depend on the number of ranks follow the new number. ``routing.ExpertMap`` spreads the experts over any
    number of survivors. ``ranks_per_node`` becomes None: nodes of which ranks are missing have no common size.
    """
    rank = survivors.index(config.rank)
    return replace(config, world_size=len(survivors), rank=rank, ranks_per_node=None, two_level=False)


def regroup(around: Surroundings, survivors: tuple[int, ...], timeout: float) -> World:
    """Agree with all ``survivors`` (old ranks, ascending, this one included), meet them, and return their world.

    New ranks are numbered in the order of the old ones.

    Raises:
        ConfigMismatchError: another rank called recover with another list.
        PeerLostError: the process of a rank in the list is gone.
        PeerTimeoutError: a rank in the list does not answer for ``timeout`` seconds, or has not called recover when any
            call of the old communicator must be over; or, naming this rank, another one has gone on without it.
        UnsupportedError: this rank's address is not there any more.
    """
    store, port = around.serve(timeout) if around.rank == survivors[0] else (None, 0)
    board = _Board(around, Proposal(survivors, secrets.token_bytes(16), port))
    begin = around.now()
    try:
        while True:
            agreed = _agree(board, begin, timeout)
            deadline = around.now() + timeout
            if store is None:
                store = _connect(board, agreed[survivors[0]], deadline, timeout)
            corner = PrefixStore(f"moelink/{board.corner(agreed).hex()}", store)
            if _bounded_arrival(board, agreed, corner, deadline):
                try:
                    with named_as_before(around, survivors):
                        return around.meet(corner, survivors.index(around.rank), len(survivors), timeout, deadline)
                except PeerTimeoutError as error:
                    if isinstance(error, PeerLostError) or not board.has_begun_again(error.peer, agreed):
                        raise
            store = store if around.rank == survivors[0] else None
    except ConfigMismatchError:
        board.withdraw(after=LINGER_SECONDS)
        raise
    except BaseException:
        board.withdraw()
        if around.rank == survivors[0]:  # the others may need the store to see who is missing
            around.later(LINGER_SECONDS, lambda: _hold(store))
        raise


def _hold(_store: Any) -> None:
    """Do nothing: the store that this rank serves lives as long as it waits for this."""


def go_on(around: Surroundings, survivors: tuple[int, ...]) -> None:
    """Publish that this rank has a new communicator of ``survivors``, so that no rank waits for it in vain.

    A rank that reads this in a recovery of its own has been left out: it raises PeerTimeoutError, which names itself.
    """
    try:
        mine = Proposal.decode(around.shown())
    except (ValueError, struct.error):
        mine = Proposal(survivors, secrets.token_bytes(16), 0)
    around.show(replace(mine, finished=True).encode())


class _Board:
    """This rank's proposal, published at its probe server, and those of the other survivors."""

    def __init__(self, around: Surroundings, mine: Proposal) -> None:
        self.rank, self.mine, self.around = around.rank, mine, around
        self.others = [rank for rank in mine.ranks if rank != around.rank]
        self.show(bytes(16))

    def show(self, corner: bytes) -> None:
        """Publish this rank's proposal with the corner in which it waits (zeros: it has not agreed)."""
        self.around.show(replace(self.mine, corner=corner).encode())

    def withdraw(self, after: float = 0.0) -> None:
        """Unpublish the proposal after ``after`` seconds, so that peers wait for the next attempt."""
        shown = self.around.shown()

        def clear() -> None:
            if self.around.shown() == shown:
                self.around.show(b"")

        if after == 0:
            clear()
        else:
            self.around.later(after, clear)

    def read(self) -> dict[int, Proposal | int]:
        """Read the other survivors' proposals, by rank: a Proposal, NOTHING (none yet), or NO_ANSWER (or malformed).

        Raises:
            PeerLostError: the process of one is gone.
            PeerTimeoutError: one has gone on without this rank, which the error names.
        """
        shown = {rank: _decode(answer) for rank, answer in self.around.read(self.others).items()}
        for peer, proposal in shown.items():
            if isinstance(proposal, Proposal) and proposal.finished:
                raise _late(
                    self.rank, self.rank,
                    f"rank {peer} has gone on with ranks {list(proposal.ranks)} without waiting for this rank any more",
                )  # fmt: skip
        for peer, proposal in shown.items():
            if proposal == GONE:
                raise PeerLostError(
                    rank=self.rank, peer=peer, phase=PHASE, call=0, expected=0, got=None, detail=GONE_IN_WORDS
                )
        return shown

    def has_begun_again(self, peer: int, agreed: Mapping[int, Proposal]) -> bool:
        """Return whether ``peer`` lives and has given up the attempt of ``agreed``, so is not who is missing in it."""
        shown = self.read().get(peer, NO_ANSWER)
        return shown == NOTHING or (isinstance(shown, Proposal) and shown.nonce != agreed[peer].nonce)

    def corner(self, agreed: Mapping[int, Proposal]) -> bytes:
        """Name the corner of this attempt: a digest of all nonces, so no other attempt has the same."""
        nonces = {self.rank: self.mine.nonce, **{rank: proposal.nonce for rank, proposal in agreed.items()}}
        text = b"".join(struct.pack("<I", rank) + nonces[rank] for rank in sorted(nonces))
        return blake2b(text, digest_size=16).digest()

    def agree(self, shown: Mapping[int, Proposal | int]) -> dict[int, Proposal] | None:
        """Return all proposals if they have the same list and no rank waits in another corner, else None."""
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


def _agree(board: _Board, begin: float, timeout: float) -> dict[int, Proposal]:
    """Wait until all survivors propose the same ranks; return the proposals of the others.

    A rank that answers may still be in a call of the old communicator, which it had begun up to ``timeout`` later than
    this rank and which waits for ``timeout``. So that one is waited for twice as long as one that does not answer.
    """
    deadline, last = begin + timeout, begin + 2 * timeout + _CALL_SPARE_SECONDS
    differs: dict[int, float] = {}
    seen: set[int] = set()
    board.show(bytes(16))
    while True:
        shown = board.read()
        seen |= {rank for rank, p in shown.items() if isinstance(p, Proposal) and p.ranks == board.mine.ranks}
        agreed = board.agree(shown)
        if agreed is not None:
            board.show(board.corner(agreed))
            return agreed
        now = board.around.now()
        # A rank that waits in a corner with another list is still in an earlier attempt.
        lists = {
            rank: p.ranks
            for rank, p in shown.items()
            if isinstance(p, Proposal) and p.ranks != board.mine.ranks and p.corner == bytes(16)
        }
        differs = {rank: differs.get(rank, now) for rank in lists}
        if any(now - since > _GRACE_SECONDS for since in differs.values()) or (lists and now > deadline):
            raise _mismatch({board.rank: board.mine.ranks, **lists})
        if now > last or (now > deadline and NO_ANSWER in shown.values()):
            # A rank whose proposal has been seen, and is gone now, gave up a moment ago because of a rank that is
            # missing here, too: name a rank that was never seen before it.
            peer = min(board.others, key=lambda rank: (_reason(shown[rank]), rank in seen))
            raise _late(board.rank, peer, _REASONS[_reason(shown[peer])])
        board.around.sleep(_PAUSE_SECONDS)


def _reason(shown: Proposal | int) -> int:
    """Index into ``_REASONS`` for a rank that published ``shown``."""
    return 2 if isinstance(shown, Proposal) else 1 if shown == NOTHING else 0


def _all_arrived(board: _Board, agreed: Mapping[int, Proposal], corner: Any, deadline: float) -> bool:
    """Wait until all survivors are in ``corner``: True; False when one of them has begun again with another nonce.

    Raises:
        PeerTimeoutError: the verdict of the corner, the same on every rank that reads it.
    """
    names = [str(rank) for rank in board.mine.ranks]
    try:
        corner.set(str(board.rank), b"1")
        while True:
            said = peek(corner, _VERDICT)
            if not said and corner.check(names):
                said = bytes(corner.compare_set(_VERDICT, "", _GO))
            if said:
                return _heed(board, said)
            try:
                shown = board.read()
                if board.around.now() > deadline:
                    absent = [rank for rank in board.mine.ranks if not corner.check([str(rank)])]
                    raise _late(
                        board.rank, absent[0] if absent else -1, "it agreed to the list and did not reach the new store"
                    )
            except PeerTimeoutError as error:
                if error.peer == board.rank:  # the others have gone on, in another corner
                    raise
                return _heed(board, bytes(corner.compare_set(_VERDICT, "", _end_of(error))))
            if any(isinstance(p, Proposal) and p.nonce != agreed[rank].nonce for rank, p in shown.items()):
                return False
            board.around.sleep(_PAUSE_SECONDS)
    except RuntimeError as error:
        if isinstance(error, PeerTimeoutError):
            raise
        host = board.mine.ranks[0]
        if host != board.rank and board.has_begun_again(host, agreed):  # raises PeerLostError if its process is gone
            return False
        raise _late(board.rank, host, "its store does not answer") from error


def _end_of(error: PeerTimeoutError) -> bytes:
    """Return the verdict that ends a corner for ``error``."""
    lost = isinstance(error, PeerLostError)
    return _END.pack(error.peer, lost) + (b"" if lost else b"it agreed to the list and did not reach the new store")


def _heed(board: _Board, verdict: bytes) -> bool:
    """Do as the verdict of a corner says: return True to meet there, or raise its error.

    False for one that names this rank: the others wait for it in vain here, and it agrees with them anew.
    """
    if verdict == _GO:
        return True
    peer, lost = _END.unpack_from(verdict)
    if peer == board.rank:
        board.around.sleep(_PAUSE_SECONDS)
        return False
    if lost:
        raise PeerLostError(rank=board.rank, peer=peer, phase=PHASE, call=0, expected=0, got=None, detail=GONE_IN_WORDS)
    raise _late(board.rank, peer, verdict[_END.size :].decode(errors="replace")[:200])


def _bounded_arrival(board: _Board, agreed: Mapping[int, Proposal], corner: Any, deadline: float) -> bool:
    """Do as :func:`_all_arrived`, also when the store's host is stopped, which keeps torch's client waiting."""
    try:
        return board.around.bounded(
            lambda: _all_arrived(board, agreed, corner, deadline), deadline + _LAST_WORD_SECONDS
        )
    except BoundedError:
        raise _late(board.rank, board.mine.ranks[0], "its store does not answer") from None


@contextmanager
def named_as_before(around: Surroundings | None, survivors: Sequence[int]) -> Iterator[None]:
    """Translate a PeerTimeoutError of the block, in which survivors meet, to the old numbers of the ranks.

    Where the error names no rank, the old probe servers are asked for one that does not answer.
    """
    try:
        yield
    except PeerTimeoutError as error:
        if around is None:
            raise
        if error.phase == PHASE:
            raise
        peer = survivors[error.peer] if 0 <= error.peer < len(survivors) else _silent(around, survivors)
        what = "ended" if isinstance(error, PeerLostError) else "stopped"
        raise type(error)(
            rank=around.rank, peer=peer, phase=PHASE, call=0, expected=0, got=None,
            detail=f"it agreed to the new group, and {what} while the group was set up",
        ) from error  # fmt: skip


def _silent(around: Surroundings, survivors: Sequence[int]) -> int:
    """Find the first survivor that does not answer; -1 when all do."""
    answers = around.read([rank for rank in survivors if rank != around.rank])
    return next((rank for rank, answer in answers.items() if not isinstance(answer, bytes)), -1)


def _connect(board: _Board, host: Proposal, deadline: float, timeout: float) -> Any:
    peer = board.mine.ranks[0]
    try:
        return board.around.reach(peer, host.port, deadline, timeout)
    except (RuntimeError, BoundedError) as error:
        board.read()
        raise _late(board.rank, peer, "its store does not answer") from error


def _mismatch(lists: Mapping[int, Sequence[int]]) -> ConfigMismatchError:
    said: dict[str, list[int]] = {}
    for rank, ranks in sorted(lists.items()):
        said.setdefault(str(list(ranks)), []).append(rank)
    return ConfigMismatchError("ranks", dict(said))


def _late(rank: int, peer: int, detail: str) -> PeerTimeoutError:
    return PeerTimeoutError(rank=rank, peer=peer, phase=PHASE, call=0, expected=0, got=None, detail=detail)
