"""Rendezvous of ranks through a store, at start and after a failure, with a timeout.

Ranks fail differently: one is late, one has given up, one is restarted by its launcher, and the store holds keys of
failed attempts. So the ranks do not count attempts; they agree on the name of one. All keys are under one prefix, which
the ranks of one group share.

===========  =======================  ======================================================================
key          written by               value
===========  =======================  ======================================================================
``entry/r``  rank r                   state, a random nonce of its attempt, the address of its probe server
``roster``   rank 0                   entries of all ranks; its digest is the name of the *room*. Or the reason why
                                      rank 0, as host of the store, gave up before there was a room
``failed``   any rank, last wins      a room, and the reason why it has failed
``room/..``  gloo, in that room       addresses of its sockets
``room/..``  any rank                 ``done/r``: rank r has set up; ``done``: number of ranks that have
===========  =======================  ======================================================================

One attempt, with the keys that each rank writes (w):

1. *Enter.* w ``entry/r`` = WAITING with a new nonce.
2. *Agree.* Rank 0 waits until every entry is WAITING and every probe server in them has answered, then w ``roster``.
   The others wait for a roster with their own nonce in their own place.
3. *Connect.* Ranks connect gloo's mesh in the room, in a thread. Rank 0 watches the entries: if one differs from the
   roster, its rank has begun again, so rank 0 w ``failed`` = room, VOID, and goes to step 1. Every rank that reads VOID
   of its own room goes to step 1.
4. *Set up.* w ``entry/r`` = ENTERED. The handshake and the exchanges of memory go over the mesh. Ranks watch
   ``failed`` and rank 0's process; rank 0 watches all processes. A rank that raises w ``failed`` = room, the rank at
   fault, and the others raise the same.
5. *Leave.* Each rank w ``done/r`` and counts itself; the last one deletes these keys. Each deletes its entry and gloo's
   address, rank 0 also the roster and ``failed``. After a failure the entry stays as LEFT until the rank's next
   attempt, so that a rank which gave up differs from one which never came.

A rank that is done may close its communicator and its probe server while others set up. So before a rank reports a
missing probe server in step 4, it reads ``done/r``, which is written before the server ends (:meth:`Meeting.finish`).

The store ends with the process of its host. So a rank 0 that is the host and gives up writes the reason, to ``failed``
if there is a room, else to ``roster`` with the nonces of the ranks that it concerns. Then it waits until they have
left, at most ``_HOST_SECONDS`` and not for the rank at fault. They raise the same error, about the same rank.

Why attempts do not mix:

* A room is a digest of the nonces of all ranks, and a rank joins only a room with its own current nonce. So all ranks
  in a room are in the same attempt, and keys of an earlier attempt have another name.
* A rank that has given up is in no later room: its entry is LEFT. If rank 0 had read the entry before, one of two reads
  finds out, because one comes after the other rank's write: the rank reads the roster after it has changed its entry,
  and voids the room; or rank 0 reads the entries after it has written the roster, and finds the entry changed.
* The first exchange of step 4 needs all ranks, so none leaves step 4 before all are in it, with ENTERED entries. So
  when rank 0 begins the next attempt, no WAITING entry is of a rank that is still in step 4 of this one.
* A mesh is connected only if all ranks of the room connect. So no rank is in step 4 of a room that is voided because a
  member never came.

Why it ends: all calls of the store and of gloo run in threads that the rank leaves behind at its deadline. Then it
names a rank, in this order: one whose process is gone, one that has not come, one whose probe server does not answer,
one that has given up. In steps 1 and 2 a rank without a process counts as not come, because a launcher may be starting
it again; in steps 3 and 4 it ends the attempt at once.

The last step of any agreement can fail on some ranks only: a rank that dies in step 4 may leave others with a
communicator. Their first call names it, and ``init`` works again on all ranks, because no step depends on the end of an
earlier attempt.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moelink.control import roster as rosters
from moelink.control.probe import Address, ProbeResult, gone_in_words, probe_all
from moelink.control.process import start_daemon
from moelink.control.roster import ENTERED, LEFT, NONCE_BYTES, WAITING, Entry, decode_roster, digest, encode_roster
from moelink.control.stores import peek
from moelink.errors import PeerLostError, PeerTimeoutError

_VOID, _FAILED = 0, 1
_NEWS = struct.Struct("<16sBq?")
_PAUSE_SECONDS = 0.01
_PROBE_EVERY_SECONDS = 0.5
_FIRST_LOOK_SECONDS = 0.1
_LAST_WORD_SECONDS = 0.3
"""Seconds after its deadline that a rank waits for its own threads, to name the rank at fault."""
_FINISH_SECONDS = 5.0
_HOST_SECONDS = 0.7
"""Seconds that the host of the store, when it has failed, waits for the others to read the reason."""


@dataclass(frozen=True)
class Setback:
    """The reason of a failed attempt: ``peer`` (-1: unknown) is at fault, its process gone if ``lost``; ``told`` by a
    peer."""

    peer: int
    detail: str
    lost: bool = False
    told: bool = False

    def error(self, rank: int) -> PeerTimeoutError:
        """Return the exception that ``rank`` raises."""
        kind = PeerLostError if self.lost else PeerTimeoutError
        return kind(rank=rank, peer=self.peer, phase="init", call=0, expected=0, got=None, detail=self.detail[:200])


class _VoidError(Exception):
    """A member of the room has begun again, so this rank does."""


class _SetbackError(Exception):
    def __init__(self, setback: Setback) -> None:
        self.setback = setback


class Meeting:
    """One rank's attempt, from its entry until :meth:`finish` or :meth:`abandon`.

    Attributes:
        rank, world_size: this rank, and the number of ranks.
        deadline: of the whole attempt, on the monotonic clock.
        room, addresses: after :meth:`wait`, the prefix of the store for these ranks and this attempt, and the ranks'
            probe servers.
    """

    def __init__(
        self,
        open_store: Callable[[], Any],
        connect: Callable[[Any, threading.Event], Any],
        *,
        rank: int,
        world_size: int,
        address: Address,
        deadline: float,
        has_group: bool = True,
        host_rank: int = -1,
        reopens: bool = False,
    ) -> None:
        """Begin.

        Args:
            open_store: returns the prefix that these ranks share. It may wait, and fail with torch's errors.
            connect: makes the mesh in the room, a prefix. If the event is set, the mesh is not wanted any more.
            rank, world_size, deadline: see above.
            address: this rank's probe server.
            has_group: this rank has torch's default group, or needs none; the same on all ranks.
            host_rank: the rank whose process hosts the store, -1 for none.
            reopens: whether ``open_store`` may succeed after an error of it or of the store.
        """
        self.rank, self.world_size, self.deadline = rank, world_size, deadline
        self.room: Any = None
        self.addresses: tuple[Address, ...] = ()
        self._open_store, self._connect, self._reopens = open_store, connect, reopens
        self._mine = Entry(WAITING, secrets.token_bytes(NONCE_BYTES), address, has_group)
        self._host_rank = host_rank
        self._store: Any = None
        self._seen: dict[int, Entry] = {}
        self._name = b""
        self._mesh: Any = None
        self._setback: Setback | None = None
        self._connected, self._closed, self._doubted = threading.Event(), threading.Event(), threading.Event()
        self._done: set[int] = set()
        self._farewell: Setback | None = None
        self._obstacle = ""
        self._thread = start_daemon(self._run, "moelink-meeting")

    def wait(self) -> Any:
        """Wait until all ranks have met and connected; return the mesh.

        Raises:
            PeerTimeoutError: a rank did not by the deadline, or (PeerLostError) its process is gone.
        """
        while not self._connected.wait(0.02):
            if self._setback is not None or time.monotonic() > self.deadline + _LAST_WORD_SECONDS:
                raise self.fail(self._obstacle or "the mesh was not connected")
        return self._mesh

    def failure(self) -> PeerTimeoutError | None:
        """Return the error that ends this attempt, once there is one."""
        if self._setback is not None:
            return self._setback.error(self.rank)
        return self.fail("it did not take part in the set-up") if time.monotonic() > self.deadline else None

    def fail(self, detail: str) -> PeerTimeoutError:
        """Return the error of this attempt, which has failed here: a peer's, or one that probes show."""
        suspect = None if self._setback is not None else self._suspect()
        end = min(time.monotonic() + _LAST_WORD_SECONDS, self.deadline)
        self._doubted.set()
        while self._setback is None and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)  # a peer that gave up first writes the reason, and ends then
        if suspect is not None and suspect.peer in self._done:
            suspect = None
        self._setback = self._setback or suspect or Setback(self._unheard(), detail)
        return self._setback.error(self.rank)

    def finish(self) -> None:
        """Leave with a communicator. Marks this rank as done and removes this attempt's keys.

        Waits for the store until the deadline, at most ``_FINISH_SECONDS`` and at least a second. All ranks have taken
        part in the last exchange, so a process that is gone since may have closed and ended, and the store with it.

        Raises:
            PeerTimeoutError: another rank has left without a communicator, and says so.
        """
        if self._setback is not None and self._setback.told:
            raise self._setback.error(self.rank)
        self._end(None, seconds=max(1.0, min(_FINISH_SECONDS, self.deadline - time.monotonic())))

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave without a communicator, because ``error`` was raised here. Peers in the room raise a moment later, so
        that every rank raises an error that every rank finds in the same exchange.
        """
        if isinstance(error, PeerTimeoutError):
            detail = f"rank {self.rank} says so: {error}"[:150]
            farewell = Setback(error.peer, detail, lost=isinstance(error, PeerLostError))
        else:
            why = f"it raised {type(error).__name__} in init" if error is not None else "it gave up"
            farewell = Setback(self.rank, why)
        self._end(farewell, seconds=_HOST_SECONDS + 0.1 if self._hosts else _LAST_WORD_SECONDS)

    @property
    def _hosts(self) -> bool:
        return self.rank == self._host_rank == 0

    def _end(self, farewell: Setback | None, *, seconds: float) -> None:
        if not self._closed.is_set():
            self._farewell = farewell
            self._closed.set()
            self._thread.join(seconds)

    def _unheard(self) -> int:
        """Return the rank to name if none is known: the store's host if the store keeps this thread waiting."""
        return -1 if self._connected.is_set() or self._host_rank == self.rank else self._host_rank

    # From here on everything runs in the meeting's own thread, except _suspect.

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                try:
                    self._attempt()
                    return
                except _VoidError:
                    continue
                except RuntimeError as error:  # torch's: the store's host is gone, or has not come yet
                    if not self._reopens or time.monotonic() + 0.1 > self.deadline or self._connected.is_set():
                        self._setback = self._setback or self._suspect() or self._store_failed(error)
                        return
                    self._store, self._obstacle = None, self._store_failed(error).detail
                    self._closed.wait(0.1)
        except _SetbackError as error:
            self._setback = self._setback or error.setback
        except Exception as error:  # noqa: BLE001 - this thread has no caller
            self._setback = Setback(self.rank, f"{type(error).__name__}: {error}")
        finally:
            with suppress(RuntimeError):
                self._clean_up()

    def _attempt(self) -> None:
        if self._store is None:
            self._obstacle = self._obstacle or "the store that ranks meet in was not reached"
            self._store = self._open_store()
        self._obstacle = ""
        self._mine = replace(self._mine, state=WAITING, nonce=secrets.token_bytes(NONCE_BYTES))
        self._name = b""
        if self._hosts:
            self._store.delete_key("roster")  # it may have the reason of an earlier attempt
        self._store.set(f"entry/{self.rank}", self._mine.encode())
        roster = self._publish() if self.rank == 0 else self._find()
        if roster is None:
            return  # closed meanwhile
        self._seen = dict(enumerate(roster))
        self._name = digest(roster)
        self.addresses = tuple(entry.address for entry in roster)
        without = [rank for rank, entry in enumerate(roster) if not entry.has_group]
        if 0 < len(without) < self.world_size:
            raise _SetbackError(Setback(without[0], "it has no default process group, and others do: destroy theirs"))
        room = PrefixStore(f"room/{self._name.hex()}", self._store)
        if self._join(room, roster):
            self.room = room
            self._store.set(f"entry/{self.rank}", replace(self._mine, state=ENTERED).encode())
            self._connected.set()
            self._attend()

    def _publish(self) -> list[Entry] | None:
        """Rank 0: wait until all have come and answer, and write the roster."""
        pause = max(_PAUSE_SECONDS, 0.0005 * self.world_size)
        while not self._closed.is_set():
            entries = self._read_entries()
            waiting = {rank: entry for rank, entry in entries.items() if entry.state == WAITING}
            if len(waiting) == self.world_size:
                roster = [waiting[rank] for rank in range(self.world_size)]
                results = self._probe(waiting)
                if all(result.reached >= 0 for result in results.values()):
                    self._store.set("roster", encode_roster(roster))
                    return roster
            self._give_up_late(entries)
            self._closed.wait(pause)
        return None

    def _find(self) -> list[Entry] | None:
        """Another rank: wait for a roster with this rank's entry."""
        while not self._closed.is_set():
            text = peek(self._store, "roster")
            if news := rosters.news_for(self._mine.nonce, text):
                raise _SetbackError(self._read_setback(news))
            roster = decode_roster(text)
            if len(roster) == self.world_size and roster[self.rank] == self._mine:
                return roster
            if time.monotonic() > self.deadline:
                self._give_up_late(self._read_entries())
            self._closed.wait(_PAUSE_SECONDS)
        return None

    def _give_up_late(self, everybody: dict[int, Entry]) -> None:
        """After the deadline: raise the setback that names a rank which has not come."""
        self._seen = entries = {rank: entry for rank, entry in everybody.items() if entry.state != LEFT}
        if time.monotonic() <= self.deadline:
            return
        results = self._probe(entries)
        lost = [rank for rank, result in results.items() if result.lost]
        if lost:  # a rank that has just given up changes its entry before its probe server ends
            everybody = self._read_entries()
            lost = [rank for rank in lost if everybody.get(rank) == entries[rank]]
        left = [rank for rank, entry in everybody.items() if entry.state == LEFT]
        missing = [rank for rank in range(self.world_size) if rank not in everybody]
        silent = [rank for rank, result in results.items() if result.reached < 0 and not result.lost]
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        if lost:
            raise _SetbackError(self._gone(lost[0]))
        if silent and not missing:
            raise _SetbackError(Setback(silent[0], _say(silent, "called init and", "do not answer", "does not answer")))
        # A rank that gave up a moment ago did so because of a rank that is also missing or silent here: name that one.
        if absent := missing or left:
            raise _SetbackError(Setback(absent[0], _say(absent, "", "have not called init", "has not called init")))
        raise _SetbackError(Setback(others[0] if others else -1, "the ranks came too late to meet"))

    def _join(self, room: Any, roster: Sequence[Entry]) -> bool:
        """Connect the mesh, in a thread; watch the others meanwhile. False if this rank has been closed."""
        outcome: list[Any] = []
        left = threading.Event()

        def connect() -> None:
            try:
                # gloo waits in the store for the others, and a client of torch's serves one thread at a time: this
                # rank's own client stays free to watch and to begin the next attempt.
                outcome.append(self._connect(room.clone(), left))
            except Exception as error:  # noqa: BLE001 - judged below
                outcome.append(error)
            finally:
                if left.is_set():
                    _forget_gloo(room, self.rank)

        start_daemon(connect, "moelink-connect")
        begin = time.monotonic()
        next_look, next_probe = begin + _FIRST_LOOK_SECONDS, begin + _PROBE_EVERY_SECONDS
        try:
            while not outcome:
                self._closed.wait(0.002)
                now = time.monotonic()
                if self._closed.is_set():
                    raise _SetbackError(Setback(self.rank, "it gave up"))
                if now > self.deadline:
                    suspect = self._suspect()
                    self._hear()  # a rank that gave up first writes the reason, and ends then
                    raise _SetbackError(suspect or Setback(-1, "gloo's mesh was not connected"))
                if now > next_look:
                    next_look = now + 5 * _PAUSE_SECONDS
                    self._hear()
                    if self.rank == 0 and self._read_entries(waiting=roster) != dict(enumerate(roster)):
                        self._tell(_VOID, Setback(-1, ""))
                        raise _VoidError
                if now > next_probe:
                    self._raise_lost()
                    next_probe = time.monotonic() + _PROBE_EVERY_SECONDS
        except BaseException:
            left.set()
            raise
        if isinstance(outcome[0], Exception):
            self._hear()
            self._raise_lost()
            setback = self._suspect() or Setback(-1, f"gloo's mesh was not connected: {outcome[0]}")
            raise _SetbackError(setback) from outcome[0]
        self._mesh = outcome[0]
        return True

    def _attend(self) -> None:
        """Watch the others while this rank sets up. :meth:`fail` has them probed at once."""
        next_probe = time.monotonic() + _PROBE_EVERY_SECONDS
        while not self._closed.wait(2 * _PAUSE_SECONDS):
            try:
                self._hear()
            except _VoidError:
                raise _SetbackError(Setback(0, "it has begun again", told=True)) from None
            if time.monotonic() > next_probe or self._doubted.is_set():
                self._doubted.clear()
                self._raise_lost()
                next_probe = time.monotonic() + _PROBE_EVERY_SECONDS

    def _hear(self) -> None:
        """Raise the error that a peer has written in this room."""
        news = peek(self._store, "failed")
        if len(news) < _NEWS.size:
            return
        name, kind, *_ = _NEWS.unpack_from(news)
        if name != self._name:
            return
        if kind == _VOID:
            raise _VoidError
        raise _SetbackError(self._read_setback(news))

    def _read_setback(self, news: bytes) -> Setback:
        if len(news) < _NEWS.size:
            return Setback(self._host_rank, "it gave up", told=True)
        _, _, peer, lost = _NEWS.unpack_from(news)
        known = peer if peer in range(self.world_size) else -1
        return Setback(known, news[_NEWS.size :].decode(errors="replace"), lost, told=True)

    def _tell(self, kind: int, setback: Setback) -> None:
        self._store.set("failed", self._news(kind, setback))

    def _news(self, kind: int, setback: Setback) -> bytes:
        name = self._name.ljust(NONCE_BYTES, b"\0")
        return _NEWS.pack(name, kind, setback.peer, setback.lost) + setback.detail.encode()[:200]

    def _read_entries(self, waiting: Sequence[Entry] = ()) -> dict[int, Entry]:
        """Read all entries. With ``waiting``, an entry that has ENTERED since reads as in ``waiting``."""
        entries = {}
        for rank in range(self.world_size):
            entry = Entry.decode(peek(self._store, f"entry/{rank}"))
            if entry is not None:
                same = waiting and entry.state != LEFT and replace(entry, state=WAITING) == waiting[rank]
                entries[rank] = waiting[rank] if same else entry
        return entries

    def _probe(self, entries: Mapping[int, Entry], ranks: Iterable[int] | None = None) -> dict[int, ProbeResult]:
        """Probe ``ranks`` of ``entries`` (None: all), except this one; results by rank."""
        places = [entries.get(rank, self._mine).address for rank in range(self.world_size)]
        others = [
            rank for rank in sorted(entries if ranks is None else ranks) if rank != self.rank and rank not in self._done
        ]
        return probe_all(places, others) if others else {}

    def _raise_lost(self) -> None:
        """Rank 0 probes all others, and the others probe rank 0: raise if the process of one is gone."""
        results = self._probe(self._seen, None if self.rank == 0 else [0])
        lost = [rank for rank, result in results.items() if result.lost]
        if lost:
            self._hear()  # a rank that gave up first writes the reason, and ends then
            if self.room is not None:
                self._done |= {rank for rank in lost if peek(self.room, f"done/{rank}")}
        lost = [rank for rank in lost if rank not in self._done]
        if lost:
            raise _SetbackError(self._gone(lost[0]))

    def _gone(self, rank: int) -> Setback:
        words, is_sure = gone_in_words(self._seen[rank].address, asked_from=self._mine.address)
        return Setback(rank, words, lost=is_sure)

    def _suspect(self) -> Setback | None:
        """Probe all ranks seen: name one whose process is gone, or else one that does not answer."""
        results = self._probe(dict(self._seen))
        for rank, result in results.items():
            if result.lost:
                return self._gone(rank)
        silent = [rank for rank, result in results.items() if result.reached < 0]
        words = _say(silent, "called init and", "do not answer", "does not answer")
        return Setback(silent[0], words) if silent else None

    def _store_failed(self, error: RuntimeError) -> Setback:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Setback(self._host_rank, f"the store that ranks meet in does not answer: {text}")

    def _clean_up(self) -> None:
        """Remove this rank's keys, and tell the room if this rank has failed."""
        if self._store is None:
            return
        failed = self._farewell if self._closed.is_set() else self._setback
        entry = Entry.decode(peek(self._store, f"entry/{self.rank}"))
        if entry is not None and entry.nonce == self._mine.nonce:
            if failed is None and self._connected.is_set():
                self._store.delete_key(f"entry/{self.rank}")
            else:
                self._store.set(f"entry/{self.rank}", replace(self._mine, state=LEFT).encode())
        if failed is None and self._connected.is_set():
            self._mark_done()
            _forget_gloo(self.room, self.rank)
            if self.rank == 0:
                self._store.delete_key("roster")
                self._store.delete_key("failed")
            return
        failed = failed or Setback(self.rank, "it gave up")
        if self._name:
            self._tell(_FAILED, failed)
            self._linger(failed)
            return
        if self._hosts and failed.peer != self.rank:  # the end of the store tells of its own fault
            meant = [entry.nonce for entry in self._read_entries().values()]
            self._store.set("roster", rosters.encode_end(meant, self._news(_FAILED, failed)))
            self._linger(failed)
            return
        roster = decode_roster(peek(self._store, "roster"))
        if self.rank < len(roster) and roster[self.rank].nonce == self._mine.nonce:
            self._name = digest(roster)
            self._tell(_VOID, Setback(-1, ""))

    def _mark_done(self) -> None:
        """Mark this rank as done in the room. The last rank removes the marks, which no rank reads any more."""
        self.room.set(f"done/{self.rank}", b"1")
        if self.room.add("done", 1) == self.world_size:
            for key in ("done", *(f"done/{rank}" for rank in range(self.world_size))):
                self.room.delete_key(key)

    def _linger(self, failed: Setback) -> None:
        """As host of the store, wait until the others have read the reason, at most ``_HOST_SECONDS``."""
        if not self._hosts:
            return
        end = time.monotonic() + _HOST_SECONDS
        others = {
            rank: entry
            for rank, entry in self._read_entries().items()
            if rank not in (self.rank, failed.peer) and entry.state != LEFT
        }
        while others and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)
            now = self._read_entries()
            still = {rank: (entry, replace(entry, state=ENTERED)) for rank, entry in others.items()}
            others = {rank: entry for rank, entry in others.items() if now.get(rank) in still[rank]}


def _say(ranks: Sequence[int], before: str, many: str, one: str) -> str:
    if len(ranks) == 1:
        return " ".join(f"it {before} {one}".split())
    return " ".join(f"ranks {', '.join(map(str, ranks))} {before} {many}".split())


def _forget_gloo(room: Any, rank: int) -> None:
    """Delete gloo's addresses of this rank's sockets."""
    with suppress(RuntimeError):
        room.delete_key(f"control/0/{rank}")
