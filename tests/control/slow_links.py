"""Ranks of the collective transport in one process, over links of a given speed, in virtual time.

What waits is real: the steps of a call, the wire with its deadline, its slices and its blame. gloo's exchanges are
simulated: a message takes as long as its bytes at the rate of the link, one after the other, and an exchange has ended
on a rank when all that others sent it has come. Every rank runs in a thread of its own, one at a time, and gives way
where it waits (:class:`tests.support.simulated_ranks.Clock`). So nothing depends on how busy the machine is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moelink
from moelink.control import failure_detector
from moelink.control.failure_detector import FailureDetector
from moelink.control.group import World
from moelink.testing import assert_bitwise_equal, rank_data
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.collective import group_wire
from moelink.transports.collective.group_wire import GroupWire
from moelink.transports.collective.transport import CollectiveTransport
from tests.control import fault_schedules
from tests.control.fault_schedules import PretendedAddress, PretendedProbeServer, Silence
from tests.support.simulated_ranks import Clock, Life, Process

FAST = 1e12
"""Bytes per second."""
_STEP = 0.001
"""Seconds after which a wait looks again."""


@dataclass
class Link:
    """From one rank to another: when it is free again, and what it carries, as (arrival, data)."""

    free: float = 0.0
    messages: list[tuple[float, Tensor]] = field(default_factory=list)


class Network:
    """All links. ``rate``: bytes per second of what is sent from now on."""

    def __init__(self, world_size: int, clock: Clock) -> None:
        self.world_size, self.clock, self.rate = world_size, clock, FAST
        self.links = {(one, other): Link() for one in range(world_size) for other in range(world_size)}

    def send(self, source: int, to: int, data: Tensor) -> None:
        """Send ``data``, behind what was sent before."""
        link = self.links[source, to]
        link.free = max(link.free, self.clock.now) + (0.0 if source == to else data.nbytes / self.rate)
        link.messages.append((link.free, data.clone()))


class Group:
    """A process group as one rank sees it: the part that a wire needs."""

    def __init__(self, network: Network, rank: int, sleep: Callable[[float], None]) -> None:
        self._network, self._rank, self._sleep = network, rank, sleep
        self._exchanges = 0

    def alltoall_base(self, into: Tensor, data: Tensor, counts: list[int], sent_counts: list[int]) -> Exchange:
        """Begin an exchange."""
        world = self._network.world_size
        for to, part in enumerate(data.split(sent_counts or [len(data) // world] * world)):
            self._network.send(self._rank, to, part)
        parts = into.split(counts or [len(into) // world] * world)
        self._exchanges += 1
        return Exchange(self._network, self._rank, self._exchanges, list(parts), self._sleep)


class Exchange:
    """One all-to-all of one rank, the ``number``-th."""

    def __init__(
        self, network: Network, rank: int, number: int, into: list[Tensor], sleep: Callable[[float], None]
    ) -> None:
        self._network, self._number, self._into, self._sleep = network, number, into, sleep
        self._links = [network.links[source, rank] for source in range(network.world_size)]

    def is_completed(self) -> bool:
        """Whether all of it has come."""
        sent = all(len(link.messages) >= self._number for link in self._links)
        return sent and all(link.messages[self._number - 1][0] <= self._network.clock.now for link in self._links)

    def wait(self, limit: timedelta) -> None:
        """Wait for it at most so long. Raises RuntimeError, as gloo does."""
        end = self._network.clock.now + limit.total_seconds()
        while not self.is_completed():
            if self._network.clock.now >= end:
                raise RuntimeError("timed out")
            self._sleep(_STEP)
        for part, link in zip(self._into, self._links, strict=True):
            part.copy_(link.messages[self._number - 1][1])


class Inline:
    """An executor whose calls are over when they have been submitted."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Make the call."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Ended:
    """A call of one rank: when it began and how long it took, and what it raised."""

    began: float
    took: float
    error: moelink.PeerTimeoutError | None = None


class Ranks:
    """All ranks of one communicator, which give up after ``timeout`` seconds.

    Attributes:
        network: its links.
        clock: its time.
        ended: what the calls of each rank came to.
    """

    def __init__(self, patch: pytest.MonkeyPatch, world_size: int, timeout: float, fields: dict[str, Any]) -> None:
        self.clock = Clock()
        self.network = Network(world_size, self.clock)
        self.ended: list[list[Ended]] = [[] for _ in range(world_size)]
        self._timeout, self._fields, self._silence = timeout, fields, Silence()
        self._servers = [PretendedProbeServer() for _ in range(world_size)]
        patch.setattr(failure_detector, "probe_all", fault_schedules.probe_all)
        patch.setattr(group_wire, "time", SimpleNamespace(monotonic=lambda: self.clock.now))

    def stop(self, rank: int | None) -> None:
        """From now on the kernel says that ``rank`` is stopped, or (None) that none is."""
        self._silence.rank = rank

    def run(self, plans: Sequence[Sequence[tuple[float, int]]]) -> None:
        """Run all ranks to their end. ``plans``: of each, how long it waits before each call, and its tokens."""
        for rank, plan in enumerate(plans):
            process = Process(self.clock, rank, Life(), random.Random(rank))
            self.clock.start(process, lambda rank=rank, plan=plan: self._main(rank, plan, self.clock.sleep))  # type: ignore[misc]
        assert self.clock.run(), "a rank hangs"

    def _main(self, rank: int, plan: Sequence[tuple[float, int]], sleep: Callable[[float], None]) -> None:
        group = Group(self.network, rank, sleep)
        world = World(rank, self.network.world_size, control=group, data=group)
        addresses = [PretendedAddress(peer, server, self._silence) for peer, server in enumerate(self._servers)]
        detector = FailureDetector(rank=rank, probe_server=self._servers[rank], addresses=addresses)  # type: ignore[arg-type]
        device = torch.device("cpu")
        wire = GroupWire(world, device=device, identity="test", timeout=self._timeout, detector=detector)
        wire._thread = Inline()  # type: ignore[assignment]
        config = moelink.EPConfig(**self._fields, world_size=self.network.world_size, rank=rank)
        transport = CollectiveTransport([config], wire, identity="test")
        sizes = {name: self._fields[name] for name in ("num_experts", "topk", "hidden_size")}
        for pause, tokens in plan:
            data = rank_data(seed=1, rank=rank, num_tokens=tokens, **sizes)
            sleep(pause)
            x, ids, began = data.x, data.topk_ids, self.clock.now
            try:
                (recv,) = transport.dispatch([DispatchRequest(x, ids)]).wait()
                self.ended[rank].append(Ended(began, self.clock.now - began))
                began = self.clock.now
                (out,) = transport.combine([CombineRequest(recv.tokens, recv)]).wait()
            except moelink.PeerTimeoutError as error:
                self.ended[rank].append(Ended(began, self.clock.now - began, error))
                return
            self.ended[rank].append(Ended(began, self.clock.now - began))
            assert_bitwise_equal(out, (x.float() * config.topk + 0.0).to(out.dtype), f"rank {rank}")
