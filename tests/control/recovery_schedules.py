"""The agreement of :mod:`moelink.control.recovery` in virtual time, over a simulated network with seeded faults.

Every rank runs the real code in a thread of its own; one runs at a time, and gives way where it sleeps, reads or uses a
store. Time passes only then, so a timeout of seconds costs nothing. What the real surroundings do is simulated here:
probe servers, the store of the lowest survivor, and the set-up, whose last exchange a death can leave half done.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import moelink
from moelink.control.group import World
from moelink.control.probe import GONE, NO_ANSWER
from moelink.control.recovery import go_on, regroup
from moelink.control.stores import BoundedError

TIMEOUT = 3.0
LIMIT = 400.0
"""Seconds after which a schedule counts as hanging."""


class _DeadError(BaseException):
    """The process of this rank is gone."""


class Clock:
    """Virtual time. Threads run one at a time, in the order in which they wake."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._back = threading.Semaphore(0)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call ``action`` at ``when``."""
        heapq.heappush(self._queue, (when, next(self._count), action))

    def start(self, main: Callable[[], None]) -> Callable[[float], None]:
        """Run ``main`` in a thread; return what it sleeps with."""
        turn = threading.Semaphore(0)

        def resume() -> None:
            turn.release()
            self._back.acquire()

        def sleep(seconds: float) -> None:
            self.at(self.now + seconds, resume)
            self._back.release()
            turn.acquire()

        def run() -> None:
            turn.acquire()
            try:
                main()
            finally:
                self._back.release()

        threading.Thread(target=run, daemon=True).start()
        self.at(self.now, resume)
        return sleep

    def run(self) -> bool:
        """Run until nothing is left to do: True; False if that takes longer than LIMIT."""
        while self._queue and self.now < LIMIT:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return not self._queue


@dataclass
class Store:
    """A store in the process of rank ``host``."""

    host: int
    values: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Node:
    """One rank's process: when it dies, or is stopped for a while; or the message of a set-up at which it dies."""

    dies: float = LIMIT * 2
    stops: float = LIMIT * 2
    stopped_for: float = 0.0
    falls: int = -1
    board: bytes = b""
    finished: tuple[int, ...] = ()
    name: str = ""
    outcome: str = ""


class Simulation:
    """Ranks, their faults, and the network, which is parted for a while."""

    def __init__(self, seed: int, *, lingers: bool = True) -> None:
        """``lingers``: a probe server stays after its rank has finished."""
        self.choice = choice = random.Random(seed)
        self.lingers, self.clock = lingers, Clock()
        self.world = choice.randint(2, 5)
        self.nodes = [Node() for _ in range(self.world)]
        for victim in choice.sample(range(self.world), choice.randint(0, self.world - 1)):
            if choice.random() < 0.5:
                self.nodes[victim].falls = choice.randrange(self.world)
            elif choice.random() < 0.6:
                self.nodes[victim].dies = choice.choice((-1.0, choice.uniform(0, 2.5), choice.uniform(0, 12)))
            else:
                self.nodes[victim].stops = choice.uniform(0, 3)
                self.nodes[victim].stopped_for = choice.uniform(0.1, 3 * TIMEOUT)
        self.parted = choice.uniform(0, 4) if choice.random() < 0.4 else LIMIT * 2
        self.healed = self.parted + choice.uniform(0.1, 2 * TIMEOUT)
        self.side = [choice.random() < 0.5 for _ in range(self.world)]
        self.rooms: dict[str, set[tuple[int, int]]] = {}
        self.ports: dict[int, Store] = {}

    def dead(self, rank: int) -> bool:
        return self.clock.now >= self.nodes[rank].dies

    def stopped(self, rank: int) -> bool:
        node = self.nodes[rank]
        return node.stops <= self.clock.now < node.stops + node.stopped_for

    def reaches(self, one: int, other: int) -> bool:
        return self.side[one] == self.side[other] or not self.parted <= self.clock.now < self.healed

    def run(self) -> bool:
        """Run all ranks. False if one does not come to an end."""
        for rank, node in enumerate(self.nodes):
            if node.dies >= 0:
                Rank(self, rank)
        return self.clock.run()


class _Prefixed:
    """What a rank sees of a store. ``PrefixStore`` of torch is replaced by :func:`prefixed`."""

    def __init__(self, prefix: str, rank: Rank, store: Store) -> None:
        self.prefix, self._rank, self._store = prefix, rank, store

    def set(self, key: str, value: bytes) -> None:
        self._rank.call(self._store)
        self._store.values[f"{self.prefix}/{key}"] = value

    def compare_set(self, key: str, expected: str | bytes, desired: bytes) -> bytes:
        self._rank.call(self._store)
        if not expected:
            return self._store.values.setdefault(f"{self.prefix}/{key}", desired)
        return self._store.values.get(
            f"{self.prefix}/{key}", bytes(expected, "ascii") if isinstance(expected, str) else expected
        )

    def check(self, keys: Sequence[str]) -> bool:
        self._rank.call(self._store)
        return all(f"{self.prefix}/{key}" in self._store.values for key in keys)


def prefixed(prefix: str, bound: tuple[Rank, Store]) -> _Prefixed:
    """Stand for torch's PrefixStore."""
    return _Prefixed(prefix, *bound)


class Rank:
    """One rank, and its surroundings (:class:`moelink.control.surroundings.Surroundings`)."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank, self._all = rank, simulation
        self._deadlines: list[float] = []
        self._sleep = simulation.clock.start(self._main)

    @property
    def _node(self) -> Node:
        return self._all.nodes[self.rank]

    def _main(self) -> None:
        try:
            self.sleep(self._all.choice.choice((0.0, self._all.choice.uniform(0, 1.5 * TIMEOUT))))
            self._node.outcome = self._live()
        except _DeadError:
            self._node.outcome = "dead"

    def _live(self) -> str:
        """Do as docs/faults.md says: leave out who is gone, try again with who is late or silent."""
        ranks, patience = list(range(self._all.world)), [0] * self._all.world
        for _ in range(40):
            ended = self._once(ranks, patience)
            if ended:
                return ended
        return "gave up"

    def _once(self, ranks: list[int], patience: list[int]) -> str:
        survivors = tuple(ranks)
        try:
            if len(survivors) > 1:
                regroup(self, survivors, TIMEOUT)
            self.sleep(0.0)  # dead or not, from here on it has a communicator
            self._node.finished = survivors
            go_on(self, survivors)
            return "finished"
        except moelink.ConfigMismatchError as error:
            lists = [{int(rank) for rank in text.strip("[]").split(",")} for text in error.values]
            left = set.intersection(*lists)
            if self.rank not in left:
                return "left out"
            ranks[:] = sorted(left)
        except moelink.PeerTimeoutError as error:
            if error.peer == self.rank:
                return "left out"
            patience[error.peer] += 1
            if isinstance(error, moelink.PeerLostError) or patience[error.peer] > 8:
                ranks.remove(error.peer)
        return ""

    # What regroup uses.

    def now(self) -> float:
        return self._all.clock.now

    def sleep(self, seconds: float) -> None:
        end = self.now() + seconds
        if self._deadlines and end > self._deadlines[-1]:
            self._pass(max(self._deadlines[-1] - self.now(), 0.0))
            raise BoundedError
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self._sleep(seconds)
        while self._all.stopped(self.rank) and not self._all.dead(self.rank):
            self._sleep(0.1)
        if self._all.dead(self.rank):
            raise _DeadError

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._all.clock.at(self.now() + seconds, action)

    def show(self, proposal: bytes) -> None:
        self._node.board = proposal

    def shown(self) -> bytes:
        return self._node.board

    def read(self, ranks: Sequence[int]) -> dict[int, bytes | int]:
        answers = {}
        for peer in ranks:
            self.sleep(self._all.choice.uniform(0, 0.01))
            answers[peer] = self._answer(peer)
        if NO_ANSWER in answers.values():
            self.sleep(0.4)
        return answers

    def _answer(self, peer: int) -> bytes | int:
        node = self._all.nodes[peer]
        if not self._all.reaches(self.rank, peer):
            return NO_ANSWER
        if self._all.dead(peer) or (node.finished and not self._all.lingers):
            return GONE
        return NO_ANSWER if self._all.stopped(peer) else node.board

    def serve(self, _timeout: float) -> tuple[Any, int]:
        port = len(self._all.ports) + 1
        self._all.ports[port] = Store(self.rank)
        return (self, self._all.ports[port]), port

    def reach(self, _host: int, port: int, deadline: float, _timeout: float) -> Any:
        self.bounded(lambda: self.call(self._all.ports[port]), deadline)
        return self, self._all.ports[port]

    def call(self, store: Store) -> None:
        """Wait for an answer of ``store``, without end if its host is stopped or cut off."""
        self.sleep(self._all.choice.uniform(0, 0.003))
        while self._all.stopped(store.host) or not self._all.reaches(self.rank, store.host):
            self.sleep(0.2)
        if self._all.dead(store.host):
            raise RuntimeError("connection reset")

    def bounded(self, call: Callable[[], Any], deadline: float) -> Any:
        self._deadlines.append(deadline)
        try:
            return call()
        finally:
            self._deadlines.pop()

    def meet(self, store: Any, rank: int, world_size: int, _timeout: float, deadline: float) -> World:
        """Stand for the set-up: in its last exchange each rank sends to each other, and waits for all."""
        sent = self._all.rooms.setdefault(store.prefix, set())
        survivors = self._all.nodes  # by old number; a room has the numbers of its survivors
        names = [key.rsplit("/", 1)[1] for key in store._store.values if key.startswith(store.prefix)]
        numbers = sorted(int(name) for name in names if name.isdigit())
        for peer in range(world_size):
            self.sleep(self._all.choice.uniform(0, 0.02))
            if self._node.falls == len({to for one, to in sent if one == rank}):
                self._node.dies = self.now()
                raise _DeadError
            sent.add((rank, peer))
        while not all((peer, rank) in sent for peer in range(world_size)):
            missing = next(peer for peer in range(world_size) if (peer, rank) not in sent)
            lost = survivors[numbers[missing]].dies <= self.now()
            if lost or self.now() > deadline:
                kind = moelink.PeerLostError if lost else moelink.PeerTimeoutError
                raise kind(rank=rank, peer=missing, phase="init", call=0, expected=0, got=None)
            self.sleep(0.02)
        self._node.name = store.prefix
        return World(rank, world_size)
