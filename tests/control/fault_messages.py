"""The collective transport's steps over a pretended network on which a rank stops between any two messages.

What a rank sends to another arrives as a whole or not at all, in order; a rank goes on as soon as it has heard from
all. So a rank that dies in the middle of an all-to-all has reached some peers and not others, and peers get apart by up
to one exchange, which is what gloo does. The steps, their plans and buffers are the real ones.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moelink.routing import absent_experts
from moelink.testing import assert_bitwise_equal
from moelink.transports.collective.combine import combine_steps
from moelink.transports.collective.dispatch import dispatch_steps
from moelink.transports.collective.outputs import Scratch
from moelink.transports.collective.wire import Announce, Learn
from tests.control.fault_schedules import WORLD, Oracle
from tests.support.cases import FIELDS, Case, check_rows
from tests.support.symmetric_ranks import combine_requests, dispatch_requests

SPAN = 160
"""Turns of a run without a fault, about."""
_PATIENCE = 80


@dataclass(frozen=True)
class MessageOutcome:
    """Whether anybody was left waiting, and the completed calls of each generation on all ranks together."""

    failed: bool
    calls: list[int]


@dataclass
class Ranks:
    """The ranks of one generation, and what has arrived where: messages[to, from] in the order they were sent."""

    world: int
    messages: dict[tuple[int, int], list[Any]] = field(default_factory=lambda: defaultdict(list))
    completed: list[tuple[int, Case, Any, Any]] = field(default_factory=list)

    def run(self, cases: Sequence[Case], choice: random.Random, *, victim: int = -1, when: int = -1) -> bool:
        """All ranks in random turns, without ``victim`` from turn ``when`` on. False when the others are left waiting.

        They are when they have had ``_PATIENCE`` turns without a message sent or a call completed.
        """
        programs = {rank: self._rank(rank, cases) for rank in range(self.world)}
        idle, turn, state = 0, 0, (0, 0)
        while programs and idle < _PATIENCE:
            if turn == when:
                programs.pop(victim, None)
            if programs:
                rank = choice.choice(sorted(programs))
                if next(programs[rank], "ended") == "ended":
                    del programs[rank]
            now = (sum(map(len, self.messages.values())), len(self.completed))
            idle, turn, state = (idle + 1 if now == state else 0), turn + 1, now
        return not programs

    def _rank(self, rank: int, cases: Sequence[Case]) -> Generator[None, None, None]:
        """One rank's program. It yields before every message it sends, and while it waits."""
        scratch = Scratch()
        for case in cases:
            config = case.setup.config(self.world, rank)
            (request,) = dispatch_requests(case, [rank])
            absent = absent_experts(config.num_experts, request.x.device)
            steps = dispatch_steps(config, request, scratch, identity="test", absent=absent)
            recv = yield from self._drive(rank, steps)
            self.completed.append((rank, case, recv, None))
            place = len(self.completed) - 1
            (request,) = combine_requests(case, [rank], [recv])
            out = yield from self._drive(rank, combine_steps(config, request, scratch))
            self.completed[place] = (rank, case, recv, out)

    def _drive(self, rank: int, steps: Any) -> Generator[None, None, Any]:
        reply: Any = None
        while True:
            try:
                request = steps.send(reply)
            except StopIteration as stop:
                return stop.value
            reply = None
            if isinstance(request, Announce):
                yield from self._send(rank, request.counts)
                reply = 1 + sum(who == rank for who, *_ in self.completed)
            elif isinstance(request, Learn):
                reply = yield from self._hear(rank)
            else:
                yield from self._send(rank, [rows.clone() for rows in request.rows.split(request.send_counts)])
                start = 0
                for rows in (yield from self._hear(rank)):
                    request.into[start : start + len(rows)].copy_(rows)
                    start += len(rows)
                reply = request.into

    def _send(self, rank: int, what: Sequence[Any]) -> Generator[None, None, None]:
        for step in range(self.world):
            to = (rank + step) % self.world
            yield
            self.messages[to, rank].append(what[to])

    def _hear(self, rank: int) -> Generator[None, None, list[Any]]:
        while not all(self.messages[rank, source] for source in range(self.world)):
            yield
        return [self.messages[rank, source].pop(0) for source in range(self.world)]

    def check(self, oracle: Oracle) -> int:
        """Every completed call returned what the oracle says. How many there were."""
        for rank, case, recv, out in self.completed:
            rows, outs = oracle.of(case, self.world)
            check_rows(f"rank {rank}", rows[rank], {name: getattr(recv, name) for name in FIELDS})
            if out is not None:
                assert_bitwise_equal(out, outs[rank], f"rank {rank}: combine")
        return sum(1 + (out is not None) for *_, out in self.completed)


def run_messages(seed: int, before: Sequence[Case], after: Sequence[Case], oracle: Oracle) -> MessageOutcome:
    """``before`` on three ranks, one of which stops after a random number of steps; ``after`` on the others."""
    choice = random.Random(seed)
    victim, when = choice.randrange(WORLD), choice.randrange(SPAN)
    old, new = Ranks(WORLD), Ranks(WORLD - 1)
    if old.run(before, choice, victim=victim, when=when):
        return MessageOutcome(False, [old.check(oracle)])
    assert new.run(after, choice)
    return MessageOutcome(True, [old.check(oracle), new.check(oracle)])
