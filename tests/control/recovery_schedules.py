"""The agreement of :mod:`moelink.control.recovery` in virtual time, over a simulated network with seeded faults.

Every rank runs the real code in a thread of its own (:mod:`tests.support.simulated_ranks`). What the real surroundings
do is simulated here: probe servers, the store of the lowest survivor, and the set-up, whose last exchange a death can
leave half done.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import moelink
from moelink.control.group import World
from moelink.control.probe import GONE, NO_ANSWER
from moelink.control.recovery import go_on, regroup
from tests.support.simulated_ranks import LIMIT, Clock, DeadError, Life, Process, Store

TIMEOUT = 3.0


@dataclass
class Node(Life):
    """One rank's process: when it dies, or is stopped for a while; or the message of a set-up at which it dies."""

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
        self.ranks = [Rank(self, rank) for rank in range(self.world)]

    def reaches(self, one: int, other: int) -> bool:
        return self.side[one] == self.side[other] or not self.parted <= self.clock.now < self.healed

    def run(self) -> bool:
        """Run all ranks. False if one does not come to an end."""
        for rank in self.ranks:
            if rank.life.dies >= 0:
                rank.start(rank.main)
        return self.clock.run()


class Rank(Process):
    """One rank, and its surroundings (:class:`moelink.control.recovery.Surroundings`)."""

    phase = "recover"

    def __init__(self, simulation: Simulation, rank: int) -> None:
        super().__init__(simulation.clock, rank, simulation.nodes[rank], simulation.choice)
        self._all = simulation

    @property
    def _node(self) -> Node:
        return self._all.nodes[self.rank]

    def reaches(self, host: Process) -> bool:
        return self._all.reaches(self.rank, host.rank)

    def main(self) -> None:
        try:
            self.sleep(self._all.choice.choice((0.0, self._all.choice.uniform(0, 1.5 * TIMEOUT))))
            self._node.outcome = self._live()
        except DeadError:
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
        if self._all.ranks[peer].is_dead or (node.finished and not self._all.lingers):
            return GONE
        return NO_ANSWER if self._all.ranks[peer].is_stopped else node.board

    def serve(self, _timeout: float) -> tuple[Any, int]:
        port = len(self._all.ports) + 1
        self._all.ports[port] = Store(self)
        return (self, self._all.ports[port]), port

    def reach(self, _host: int, port: int, deadline: float, _timeout: float) -> Any:
        self.bounded(lambda: self.ask(self._all.ports[port].host), deadline)
        return self, self._all.ports[port]

    def meet(self, store: Any, rank: int, world_size: int, _timeout: float, deadline: float) -> World:
        """Stand for the set-up: in its last exchange each rank sends to each other, and waits for all."""
        sent = self._all.rooms.setdefault(store.prefix, set())
        survivors = self._all.nodes  # by old number; a room has the numbers of its survivors
        names = [key.rsplit("/", 1)[1] for key in store.store.values if key.startswith(store.prefix)]
        numbers = sorted(int(name) for name in names if name.isdigit())
        for peer in range(world_size):
            self.sleep(self._all.choice.uniform(0, 0.02))
            if self._node.falls == len({to for one, to in sent if one == rank}):
                self._node.dies = self.now()
                raise DeadError
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
