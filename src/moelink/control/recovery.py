"""Let the surviving ranks agree on a new group without the dead ones: the first step of ``recover``.

No step needs an answer of a rank that may be dead. Every rank publishes a *proposal* at its own probe server
(:mod:`moelink.control.probe`), behind the token that ranks exchanged at init: the old numbers of the survivors, a
random nonce of this attempt and, on the lowest survivor, the port of a store that it has just opened. Each rank reads
the proposals of all ranks in its own list until

* all proposals have the same list: the agreement. No rank decides for the others, so no death can spoil it;
* the process of one is gone: PeerLostError;
* one has another list for longer than ``_GRACE_SECONDS``: ConfigMismatchError (a shorter time may be left from an
  attempt that failed there and that the rank is about to repeat);
* one does not answer for ``timeout`` seconds, or has no proposal when every call of the old communicator must be over
  (twice ``timeout``, because ranks enter a call up to ``timeout`` apart): PeerTimeoutError, which names it.

Then the ranks meet in the new store, in a *corner*: a prefix that is a digest of all their nonces. Each publishes the
name of its corner, so an attempt meets only itself. Example: rank 1 gives up and calls ``recover`` again while rank 2
waits in the corner of the first attempt. Rank 2 sees rank 1's new nonce, leaves that corner and agrees anew. From there
on everything is as at ``init`` (:mod:`moelink.control.meeting`): new connections, a new identity, new workspaces.

A corner has one *verdict*, a key that is written once, by compare-and-set: "go" by a rank that has seen all in the
corner, or the rank at fault by one that finds its process gone or waits in vain. A rank that finds a verdict obeys it.
So either all in a corner go on to a meeting, which makes all name the same rank, or all give up and name the rank of
the verdict. Without it, a rank that gives up just when the others have gone on would be missing in the meeting,
and they would name it, or the store's host, whose exception ends the store. The host keeps the store for
``LINGER_SECONDS`` more, so that the others read the verdict. A rank that comes too late for that, or whose meeting
fails, looks at the proposal of the rank it would name: a rank that lives and has begun again is not at fault, and both
agree anew.

The last exchange of a set-up may succeed on one rank and fail on another, whose peer died in the middle of it. The
other must not take the first for dead and go on alone. So a rank with a new communicator publishes that at its old
probe server (:func:`go_on`), which stays a while. A rank that reads it has been left out: its error names itself, and
it cannot recover any more. The ranks that went on miss it in their first call.

Late writes of the old generation cannot reach the new one, which has other memory (made after the agreement, never
mapped by ranks outside it), other connections, and other probe servers with other tokens. A rank that was stopped and
continues writes into the *old* blocks, which no rank reads and which stay until that rank unmaps them.

Every rank of the list must call ``recover``. A rank whose list is refused, or that is in no list, keeps its old
communicator, on which every call raises. Example: of ranks 0-3 rank 0 is killed. Ranks 1, 2, 3 call
``recover([1, 2, 3])``; rank 1 hosts the store; they become ranks 0, 1, 2 of 3.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink.config import EPConfig
from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World, meet
from moelink.control.probe import GONE, GONE_IN_WORDS, NO_ANSWER, read_proposal
from moelink.control.stores import BoundedError, bounded, peek, reach, serve
from moelink.errors import ArgumentError, ConfigMismatchError, PeerLostError, PeerTimeoutError

T = TypeVar("T")

PHASE = "recover"
"""Phase of the errors raised here, unless it is "mask"; their call number is 0."""

_HEAD = struct.Struct("<16sH16s?I")
_GRACE_SECONDS = 2.0
LINGER_SECONDS = 1.0
"""Seconds that a refused list stays published, so that every other rank sees it for longer than ``_GRACE_SECONDS``,
and that the store of a rank which gave up answers the others."""
_PAUSE_SECONDS = 0.02
_CALL_SPARE_SECONDS = 1.0
"""Seconds of a call beyond its timeout."""
_LAST_WORD_SECONDS = 0.5


_VERDICT, _GO = "verdict", b"go"
_END = struct.Struct("<q?")

NOTHING = 0
"""In place of a proposal: the rank answers and has none."""

_REASONS = ("it is stopped or unreachable", "it has not called {}", "it is still in an earlier attempt")
"""Why a rank is missing, in the order in which missing ranks are named."""


class Surroundings:
    """The clock, probe servers and stores of ``rank`` of the old communicator, which tests simulate.

    ``phase`` is that of the errors: "recover", or "mask".
    """

    phase = PHASE

    def __init__(self, detector: FailureDetector, phase: str = PHASE) -> None:
        """``detector`` is that of the old communicator."""
        self.rank, self.phase = detector.rank, phase
        self._detector = detector

    def now(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` in a thread that does not keep the process alive."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    def show(self, proposal: bytes) -> None:
        """Publish ``proposal`` at this rank's own probe server."""
        self._detector.probe_server.proposal = proposal

    def shown(self) -> bytes:
        """Return the data that this rank's probe server publishes."""
        return self._detector.probe_server.proposal

    def read(self, ranks: Sequence[int]) -> dict[int, bytes | int]:
        """Ask the probe servers of ``ranks``, all at once. Takes at most about half a second."""
        if not ranks:
            return {}
        addresses = [self._detector.address_of(rank) for rank in ranks]
        with ThreadPoolExecutor(max_workers=min(64, len(ranks))) as pool:
            return dict(zip(ranks, pool.map(read_proposal, addresses), strict=True))

    def serve(self, timeout: float) -> tuple[Any, int]:
        """Open a store on the interface of this rank's probe server."""
        store = serve(self._detector.address_of(self.rank).host, timeout)
        return store, store.port

    def reach(self, host: int, port: int, deadline: float, timeout: float) -> Any:
        """Connect to the store that rank ``host`` serves."""
        return bounded(lambda: reach(self._detector.address_of(host).host, port, deadline, timeout), deadline)

    def bounded(self, call: Callable[[], T], deadline: float) -> T:
        """Return the result of ``call``, which runs in a thread that can be left behind."""
        return bounded(call, deadline)

    def meet(self, store: Any, rank: int, world_size: int, timeout: float, deadline: float) -> World:
        """Meet as at ``init``. The lowest rank hosts the store."""
        return meet(store, rank, world_size, timeout, deadline=deadline, host_rank=0)


@dataclass(frozen=True)
class Proposal:
    """The data that a rank publishes.

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
        """Decode the result of :meth:`encode`. Raises ValueError or struct.error for other bytes."""
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

    ``ranks_per_node`` becomes None: nodes with missing ranks have no common size.
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
        UnsupportedError: this machine has lost this rank's address.
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
        if around.rank == survivors[0]:  # the others may need the store to find the missing rank
            around.later(LINGER_SECONDS, lambda: _hold(store))
        raise


def _hold(_store: Any) -> None:
    """Do nothing: the store that this rank serves lives as long as it waits for this."""


def go_on(around: Surroundings, survivors: tuple[int, ...]) -> None:
    """Publish that this rank has a new communicator of ``survivors``, so that no rank waits for it in vain."""
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
                raise late(
                    self.around.phase, self.rank, self.rank,
                    f"rank {peer} has gone on with ranks {list(proposal.ranks)} without waiting for this rank any more",
                )  # fmt: skip
        for peer, proposal in shown.items():
            if proposal == GONE:
                raise late(self.around.phase, self.rank, peer, GONE_IN_WORDS, lost=True)
        return shown

    def has_begun_again(self, peer: int, agreed: Mapping[int, Proposal]) -> bool:
        """Return whether ``peer`` lives and has given up the attempt of ``agreed``, so is not missing in it."""
        shown = self.read().get(peer, NO_ANSWER)
        return shown == NOTHING or (isinstance(shown, Proposal) and shown.nonce != agreed[peer].nonce)

    def corner(self, agreed: Mapping[int, Proposal]) -> bytes:
        """Return the name of this attempt's corner: a digest of all nonces, so no other attempt has the same."""
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
        return NO_ANSWER  # the timeout names the rank


def _agree(board: _Board, begin: float, timeout: float) -> dict[int, Proposal]:
    """Wait until all survivors propose the same ranks; return the proposals of the others.

    A rank that answers may be in a call of the old communicator, which it began up to ``timeout`` later than this rank
    and which waits for ``timeout``. So it has twice as long as a rank that does not answer.
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
            # A rank that has withdrawn its proposal gave up a moment ago, because of a rank that is also missing here:
            # name a rank without any proposal first.
            peer = min(board.others, key=lambda rank: (_reason(shown[rank]), rank in seen))
            raise late(board.around.phase, board.rank, peer, _REASONS[_reason(shown[peer])].format(board.around.phase))
        board.around.sleep(_PAUSE_SECONDS)


def _reason(shown: Proposal | int) -> int:
    """Index into ``_REASONS`` for a rank that published ``shown``."""
    return 2 if isinstance(shown, Proposal) else 1 if shown == NOTHING else 0


def _all_arrived(board: _Board, agreed: Mapping[int, Proposal], corner: Any, deadline: float) -> bool:
    """Wait until all survivors are in ``corner``: True; False if one of them has begun again with another nonce.

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
                    raise late(
                        board.around.phase,
                        board.rank,
                        absent[0] if absent else -1,
                        "it agreed to the list and did not reach the new store",
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
        raise late(board.around.phase, board.rank, host, "its store does not answer") from error


def _end_of(error: PeerTimeoutError) -> bytes:
    """Return the verdict that ends a corner for ``error``."""
    lost = isinstance(error, PeerLostError)
    return _END.pack(error.peer, lost) + (b"" if lost else b"it agreed to the list and did not reach the new store")


def _heed(board: _Board, verdict: bytes) -> bool:
    """Obey the verdict of a corner: return True to meet there, or raise its error.

    False for a verdict that names this rank: the others wait for it in vain here, and it agrees with them anew.
    """
    if verdict == _GO:
        return True
    peer, lost = _END.unpack_from(verdict)
    if peer == board.rank:
        board.around.sleep(_PAUSE_SECONDS)
        return False
    detail = GONE_IN_WORDS if lost else verdict[_END.size :].decode(errors="replace")[:200]
    raise late(board.around.phase, board.rank, peer, detail, lost=lost)


def _bounded_arrival(board: _Board, agreed: Mapping[int, Proposal], corner: Any, deadline: float) -> bool:
    """Call :func:`_all_arrived`; bounded also if the store's host is stopped, which keeps torch's client waiting."""
    try:
        return board.around.bounded(
            lambda: _all_arrived(board, agreed, corner, deadline), deadline + _LAST_WORD_SECONDS
        )
    except BoundedError:
        raise late(board.around.phase, board.rank, board.mine.ranks[0], "its store does not answer") from None


@contextmanager
def named_as_before(around: Surroundings | None, survivors: Sequence[int]) -> Iterator[None]:
    """Translate a PeerTimeoutError of the block, in which survivors meet, to the old numbers of the ranks.

    If the error names no rank, it names one whose old probe server does not answer.
    """
    try:
        yield
    except PeerTimeoutError as error:
        if around is None or error.phase == around.phase:
            raise
        peer = survivors[error.peer] if 0 <= error.peer < len(survivors) else _silent(around, survivors)
        what = "ended" if isinstance(error, PeerLostError) else "stopped"
        raise type(error)(
            rank=around.rank, peer=peer, phase=around.phase, call=0, expected=0, got=None,
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
        raise late(board.around.phase, board.rank, peer, "its store does not answer") from error


def _mismatch(lists: Mapping[int, Sequence[int]]) -> ConfigMismatchError:
    said: dict[str, list[int]] = {}
    for rank, ranks in sorted(lists.items()):
        said.setdefault(str(list(ranks)), []).append(rank)
    return ConfigMismatchError("ranks", dict(said))


def late(phase: str, rank: int, peer: int, detail: str, *, lost: bool = False) -> PeerTimeoutError:
    """Return the error of a change of ranks, in ``phase``, about ``peer``; ``lost``: its process is gone."""
    facts: dict[str, Any] = {"rank": rank, "peer": peer, "phase": phase, "call": 0, "expected": 0, "got": None}
    return PeerLostError(**facts, detail=detail) if lost else PeerTimeoutError(**facts, detail=detail)
