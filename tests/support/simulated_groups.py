"""Process groups, communicators and probe servers of ranks in virtual time, one of which a fault hits at a place.

The real code runs: exchanges over a caller's group (:mod:`moelink.control.exchange`), the wire of the collective
transport, failure detectors, sessions, lanes, layers. Replaced is what lies below: the collectives that torch starts,
its store, threads, probes and the clock (:func:`simulated`).

A collective is a message from each rank to each. Messages arrive after a while, in order, whole or not at all. A rank
that dies has reached some peers and not others; where a rank still waits for its message, that rank's connection is
broken, which is what gloo does. A rank that is stopped sends nothing, and answers as its responder does for it.

*Places* are where a fault can hit: a collective is about to start, a message is about to leave, a store or a probe is
about to be asked.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ReduceOp, distributed_c10d

import moelink
from moelink.communicator import Communicator
from moelink.control import exchange, failure_detector
from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World
from moelink.control.probe import ProbeResult
from moelink.ops.context import OperatorContext
from moelink.ops.lanes import Lanes
from moelink.transports.collective import CollectiveTransport, group_wire
from moelink.transports.collective.group_wire import GroupWire
from moelink.transports.endings import Fate
from moelink.transports.session import Session
from tests.control.fault_schedules import PretendedAddress, PretendedProbeServer
from tests.support.simulated_ranks import Clock, DeadError, Life, Process, Store, StoreClient, here

TIMEOUT = 3.0
"""Seconds for a rank that does not come."""
PATIENCE = TIMEOUT + 5.0
"""Seconds in which a rank that waits for a missing one ends: the timeout, and what it takes to agree who that is."""
AT_ONCE = 0.5
"""Seconds in which a call ends that needs nobody."""
KINDS = ("killed", "stopped", "late", "raises")
"""Faults: a process dies; is stopped until the end; is stopped for a while; an exception comes as from a handler."""
_PAUSE_SECONDS = 0.02
"""How often a wait of the exchange looks, in place of thousands of times a second."""


_LOOK_SECONDS = 0.01
_MESSAGE_SECONDS = 0.003
_NOTICED_SECONDS = 0.05
"""When a broken connection shows."""


class OddError(Exception):
    """What a handler of the victim raises."""


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and at which place of it, counted from when it is armed."""

    kind: str
    victim: int
    place: int
    seconds: float

    @property
    def is_harmless(self) -> bool:
        """Whether the rank goes on well before the timeout, so that nobody may give up."""
        return self.kind == "late" and self.seconds < TIMEOUT - 0.5

    @classmethod
    def draw(cls, seed: int, world: int, span: int, kinds: Sequence[str] = KINDS) -> Fault:
        """Draw the fault of ``seed``; consecutive seeds have all ``kinds`` in turn. ``span``: places of a rank."""
        choice = random.Random(f"fault {seed}")
        late = choice.choice((choice.uniform(0, TIMEOUT), choice.uniform(TIMEOUT, 4 * TIMEOUT)))
        return cls(kinds[seed % len(kinds)], choice.randrange(world), choice.randrange(span), late)


class Rank(Process):
    """The process of one rank, which its fault may hit.

    Attributes:
        error: what its main thread ended with, if it should not have.
        has_ended: its main thread has ended.
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        super().__init__(ranks.clock, rank, Life(), ranks.choice)
        self._all, self._left, self._raises, self._main = ranks, 0, False, 0
        self.error: BaseException | None = None
        self.has_ended = False

    def begin(self, main: Callable[[Rank], None]) -> None:
        """Run ``main``, after whose end nothing hits this rank any more. What it raises is a finding."""

        def run() -> None:
            self._main = threading.get_ident()
            try:
                self.sleep(self.choice.uniform(0, 0.02))
                main(self)
            except BaseException as error:  # noqa: BLE001 - the test judges it
                self.error = None if isinstance(error, DeadError) else error
            self.has_ended, self._left = True, 0
            self._all.end_who_is_stopped()

        self.start(run)

    def exit(self) -> None:
        """End the process, as a program does that an error ends."""
        self.life.dies = self.now()

    def arm(self) -> None:
        """Count places from here on."""
        fault = self._all.fault
        self._left = 1 + fault.place if fault.victim == self.rank else 0

    def place(self) -> None:
        """Pass a place, on any thread or none."""
        if self._left == 0:
            return
        self._left -= 1
        fault, self._all.hit = self._all.fault, self._left == 0
        if self._left:
            return
        if fault.kind == "raises":
            self._raises = True
        elif fault.kind == "killed":
            self.life.dies = self.now()
        elif fault.kind in ("stopped", "late"):
            self.life.stops = self.now()
            self.life.stopped_for = fault.seconds if fault.kind == "late" else math.inf

    def come_by(self) -> None:
        """Pass a place on a thread of this process."""
        self.place()
        if self.is_stopped or self.is_dead or self._raises:
            self.sleep(0.0)

    def ask(self, host: Process | None) -> None:
        """Pass a place, then as any process."""
        self.come_by()
        super().ask(host)

    def woken(self) -> None:
        """Raise DeadError if the process has died; on its main thread, what a handler raised."""
        super().woken()
        if self._raises and threading.get_ident() == self._main:
            self._raises = False
            raise OddError


class Work:
    """A collective under way on one rank, as torch returns it."""

    def __init__(self, process: Rank, missing: Callable[[], list[Rank]], end: Callable[[], None]) -> None:
        self._process, self._missing, self._end = process, missing, end
        self._completed, self._error = False, ""

    def is_completed(self) -> bool:
        """Whether it is over, or has failed."""
        if not self._completed:
            missing = self._missing()
            if not missing:
                self._end()
            elif any(peer.life.is_dead(peer.now() - _NOTICED_SECONDS) for peer in missing):
                self._error = "Connection closed by peer"
            self._completed = not missing or bool(self._error)
        return self._completed

    def wait(self, limit: timedelta | None = None) -> bool:
        """Wait. Raises RuntimeError when it has failed, or after ``limit``."""
        end = math.inf if limit is None else self._process.now() + limit.total_seconds()
        while not self.is_completed():
            left = end - self._process.now()
            if left <= 0:
                raise RuntimeError("Timed out waiting for operation")
            self._process.sleep(min(left, _LOOK_SECONDS))
        if self._error:
            raise RuntimeError(self._error)
        return True


class Group:
    """A process group as one rank has it: what moelink calls of torch's."""

    def __init__(self, exchanges: Exchanges, process: Rank) -> None:
        self._all, self._process, self._number = exchanges, process, 0

    def rank(self) -> int:
        """This rank."""
        return self._process.rank

    def size(self) -> int:
        """All ranks."""
        return len(self._all.processes)

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        """Sum the tensor, or take the largest elements, in the order of the ranks."""
        (tensor,) = tensors
        largest = options is not None and options.reduceOp == ReduceOp.MAX

        def end(received: list[Tensor]) -> None:
            total = received[0]
            for each in received[1:]:
                total = torch.maximum(total, each) if largest else total + each
            tensor.copy_(total)

        return self._start([tensor] * self.size(), [tensor.numel()] * self.size(), end)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Work:
        """Gather the tensor."""
        (parts,), (mine,) = outputs, inputs

        def end(received: list[Tensor]) -> None:
            for part, each in zip(parts, received, strict=True):
                part.copy_(each)

        return self._start([mine] * self.size(), [mine.numel()] * self.size(), end)

    def alltoall_base(
        self, received: Tensor, sent: Tensor, counts: list[int], to: list[int], options: Any = None
    ) -> Work:
        """Send leading elements to each rank. Of a rank that sends nothing, nothing is waited for."""
        counts = counts or [len(received) // self.size()] * self.size()
        to = to or [len(sent) // self.size()] * self.size()

        def end(arrived: list[Tensor]) -> None:
            for into, each in zip(received.split(counts), arrived, strict=True):
                into.copy_(each)

        return self._start(list(sent.split(to)), [each.numel() for each in received.split(counts)], end)

    def _start(self, parts: Sequence[Tensor], sizes: list[int], end: Callable[[list[Tensor]], None]) -> Work:
        """Send ``parts``; call ``end`` with what came, of which ``sizes`` elements from each are expected."""
        process, room = self._process, self._all
        process.come_by()
        self._number += 1
        number, ranks = self._number, range(self.size())
        room.send(process, number, [part.clone() for part in parts])

        def missing() -> list[Rank]:
            return [room.processes[r] for r in ranks if sizes[r] and (number, r, process.rank) not in room.arrived]

        def ended() -> None:
            nothing = torch.empty(0, dtype=parts[0].dtype)
            got = [room.arrived.pop((number, r, process.rank)) if sizes[r] else nothing for r in ranks]
            if [each.numel() for each in got] != sizes:
                room.findings.append(f"rank {process.rank}, exchange {number}: {sizes} elements, {got} arrived")
            end([each.view(-1, *parts[0].shape[1:]) if not sizes[r] else each for r, each in enumerate(got)])

        return Work(process, missing, ended)


class Exchanges:
    """One process group: what its ranks have sent, and not received yet.

    Attributes:
        processes, members: by rank the process, and the group as it has it.
        arrived: by number of the exchange, source and destination.
        findings: what would have aborted a process.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.processes = ranks.processes
        self.arrived: dict[tuple[int, int, int], Tensor] = {}
        self.findings = ranks.findings
        self.members = [Group(self, process) for process in ranks.processes]

    def send(self, process: Rank, number: int, parts: Sequence[Tensor]) -> None:
        """Send ``parts`` one after the other, as gloo's threads do beside the program."""
        when, first = process.now(), process.choice.randrange(len(parts))
        for step in range(len(parts)):
            to = (first + step) % len(parts)
            when += process.choice.uniform(0, _MESSAGE_SECONDS)
            process.clock.at(when, partial(self._leave, process, (number, process.rank, to), parts[to]))

    def _leave(self, process: Rank, key: tuple[int, int, int], part: Tensor) -> None:
        if key[1] != key[2] and not process.is_stopped:
            process.place()
        if process.is_stopped:
            process.clock.at(process.now() + _MESSAGE_SECONDS * 10, partial(self._leave, process, key, part))
        elif not process.is_dead:
            self.arrived[key] = part


class Lane:
    """What the ranks of one lane share: a group, and probe servers."""

    def __init__(self, ranks: Ranks) -> None:
        self.group = Exchanges(ranks)
        self.addresses = [PretendedAddress(r, PretendedProbeServer((0, "dispatch")), ranks) for r in range(ranks.world)]


class Ranks:
    """Ranks of one schedule, their caller's process group, and what hits one of them.

    Attributes:
        hit: the fault has happened.
        group: of the caller, by rank.
        findings: what went wrong below moelink.
    """

    def __init__(self, seed: int, fault: Fault, world: int = 3) -> None:
        self.choice, self.clock, self.fault, self.world = random.Random(f"ranks {seed}"), Clock(), fault, world
        self.hit = False
        self.findings: list[str] = []
        self.processes = [Rank(self, rank) for rank in range(world)]
        self.store = Store(self.choice.choice((None, self.processes[0])))
        self.is_named = self.choice.random() < 0.5
        self.group = Exchanges(self)
        self._lanes: dict[int, Lane] = {}

    def state(self, rank: int) -> str:
        """ "" for a rank that lives, "stopped" or "gone"."""
        process = self.processes[rank]
        return "gone" if process.is_dead else "stopped" if process.is_stopped else ""

    def end_who_is_stopped(self) -> None:
        """End a rank that is stopped for good, once all others have ended."""
        for process in self.processes:
            if process.life.stopped_for == math.inf and all(p.has_ended for p in self.processes if p is not process):
                process.life.dies = self.clock.now

    def communicator(self, **fields: Any) -> Communicator:
        """Return the communicator of the rank that calls, as :func:`moelink.communicator.open_communicator` does."""
        rank, device, fate, contexts = here().rank, torch.device("cpu"), Fate(), []
        config = moelink.EPConfig(**fields, world_size=self.world, rank=rank, timeout=TIMEOUT)
        for number in range(config.lanes):
            lane = self._lanes.get(number) or self._open(number)
            identity, server = f"lane {number}", lane.addresses[rank].probe_server
            detector = FailureDetector(rank=rank, probe_server=server, addresses=lane.addresses)  # type: ignore[arg-type]
            group = lane.group.members[rank]
            world = World(rank, self.world, control=group, data=group, group=self.group.members[rank])  # type: ignore[arg-type]
            own = config if number == 0 else dataclasses.replace(config, lanes=1)
            wire = GroupWire(world, device=device, identity=identity, timeout=TIMEOUT, detector=detector)
            transport = CollectiveTransport([own], wire, identity=identity)
            contexts.append(OperatorContext(Session([own], [device], transport, identity, detector, fate), world))
        further = [Communicator(Lanes([each]), number=number) for number, each in enumerate(contexts) if number]
        return Communicator(Lanes(contexts), further)

    def _open(self, number: int) -> Lane:
        self._lanes[number] = Lane(self)
        return self._lanes[number]

    def run(self, main: Callable[[Rank], None]) -> None:
        """Run ``main`` as every rank. Fails if one does not end, or raises."""
        with _simulated(self):
            for process in self.processes:
                process.begin(main)
            ended = self.clock.run()
        left = [process.rank for process in self.processes if not process.has_ended]
        assert ended, f"{self.fault}: ranks {left} hang"
        assert not left, f"{self.fault}: ranks {left} wait for nothing"
        assert not self.findings, f"{self.fault}: {self.findings}"
        for process in self.processes:
            if process.error is not None:
                raise AssertionError(f"{self.fault}: rank {process.rank} ended with it") from process.error


class _Time:
    """Stands for the module ``time``."""

    def monotonic(self) -> float:
        return here().now()

    def sleep(self, seconds: float) -> None:
        here().sleep(seconds)


class _SimulatedThread:
    """Stands for ``threading.Thread``: a thread of the process that starts it."""

    def __init__(self, target: Callable[..., object], args: Sequence[Any] = (), daemon: bool = False) -> None:
        self._run, self._over = partial(target, *args), False

    def start(self) -> None:
        def run() -> None:
            self._run()
            self._over = True

        here().start(run)

    def join(self, seconds: float) -> None:
        end = here().now() + seconds
        while not self._over and here().now() < end:
            here().sleep(_LOOK_SECONDS)


class _Call:
    """Stands for a call on a background thread."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.over, self._run = False, run
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._run()
        except Exception as error:  # noqa: BLE001 - raised again by who waits
            self._error = error
        self.over = True

    def result(self) -> Any:
        while not self.over:
            here().sleep(_LOOK_SECONDS)
        if self._error is not None:
            raise self._error
        return self._result


class _Background:
    """Stands for :class:`moelink.transports.collective.background.Background`."""

    def __init__(self, name: str) -> None:
        self._calls: deque[_Call] = deque()
        self._process, self._works = here(), False

    def submit(self, run: Callable[[], Any]) -> _Call:
        call = _Call(run)
        self._calls.append(call)
        if not self._works:
            self._works = True
            self._process.start(self._work)
        return call

    def close(self, *, wait: bool) -> None:
        """Nothing is left when all calls have ended."""

    def _work(self) -> None:
        while self._calls:
            self._calls.popleft().run()
        self._works = False


def _probe_all(
    addresses: Sequence[PretendedAddress], ranks: Sequence[int], report: Any = None
) -> dict[int, ProbeResult]:
    """Stands for :func:`moelink.control.probe.probe_all`."""
    me, results = here(), {}
    for rank in ranks:
        me.come_by()  # type: ignore[attr-defined]
        results[rank] = addresses[rank].probe(report)
    me.sleep(me.choice.uniform(0, 0.01))
    return results


@contextmanager
def _simulated(ranks: Ranks) -> Iterator[None]:
    """Replace what lies below moelink's own code."""

    class Launcher:
        """Stands for the launcher's store, which rank 0 hosts, if one is named."""

        host_rank = 0 if ranks.store.host is not None else -1

        @staticmethod
        def is_named() -> bool:
            return ranks.is_named

        def root_of(self, store: Any) -> Any:
            return store

    changes: list[tuple[Any, str, Any]] = [
        (exchange, "time", _Time()), (exchange, "bounded", lambda call, deadline: here().bounded(call, deadline)),
        (exchange, "LauncherStore", Launcher), (exchange, "_PAUSE_SECONDS", _PAUSE_SECONDS),
        (group_wire, "time", _Time()), (group_wire, "Background", _Background),
        (failure_detector, "probe_all", _probe_all),
        (failure_detector, "threading", SimpleNamespace(Thread=_SimulatedThread)),
    ]  # fmt: skip
    known = distributed_c10d._world
    with ExitStack() as stack:
        for module, name, stand_in in changes:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        for process, group in zip(ranks.processes, ranks.group.members, strict=True):
            client = StoreClient("group", process, ranks.store)
            entries = ((known.pg_map, ("gloo", client)), (known.pg_backend_config, "cpu:gloo"))
            for table, entry in (*entries, (known.pg_group_ranks, {rank: rank for rank in range(ranks.world)})):
                table[group] = entry  # type: ignore[index]
                stack.callback(table.pop, group)  # type: ignore[arg-type]
        yield
