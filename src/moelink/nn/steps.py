"""Bring weights from rank to rank in steps that happen on all ranks or on none.

In a step each rank *packs* the weights it sends and allocates room for those it receives, *exchanges* them, *unpacks*
them, and *uses* them. After packing and after unpacking all ranks vote on their success, and nothing of the model
changes before the second vote. If one rank's part raised, it raises that and the others PeerAbortedError; the step is
still to do. If a vote does not end on a rank, that rank cannot know whether the others have continued. So it ends the
layers' communicators and reports that to its peers: from then on every call of every rank raises the error of the rank
at fault. An exception in the exchange or in the use after the second vote has the same effect: the other ranks are in
that exchange, and would mistake a vote of this rank for its part of it.

:class:`moelink.nn.Balancer` moves experts by such steps, :mod:`moelink.nn.host_copies` copies them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.communicator import Communicator
from moelink.control.exchange import Peers, all_to_all
from moelink.control.handshake import compare
from moelink.control.values import gather_values
from moelink.errors import ArgumentError, PeerAbortedError, PeerError, PeerTimeoutError
from moelink.lifetime import end_outside_calls, require_running
from moelink.routing import ExpertMap

T = TypeVar("T")
M = TypeVar("M")

MAX_BYTES = 1 << 28
"""Bytes of weights that a rank receives in a step by default."""


@dataclass(frozen=True)
class Route(Generic[M]):
    """The way of the weights of one move.

    Attributes:
        move: of the step.
        source, target: ranks; they may be the same.
        sent: returns the weights, on ``source``.
        room: returns, on ``target``, the tensors of the same sizes that take them; they are written when all ranks have
            all weights of the step.
    """

    move: M
    source: int
    target: int
    sent: Callable[[], list[Tensor]]
    room: Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Packed(Generic[M]):
    """The bytes that one rank sends to each rank, and the moves and old weights of those that it receives from each.

    Attributes:
        sent: all that is sent. room: for all that is received.
        to: bytes to each rank. counts: bytes from each.
    """

    sent: Tensor
    room: Tensor
    to: list[int]
    counts: list[int]
    incoming: list[list[tuple[M, list[Tensor]]]]

    @classmethod
    def of(
        cls, outgoing: list[list[Tensor]], incoming: list[list[tuple[M, list[Tensor]]]], device: torch.device
    ) -> Packed[M]:
        """Allocate all that the exchange needs, so that nothing can fail in it."""
        counts = [sum(t.nbytes for _, tensors in moves for t in tensors) for moves in incoming]
        none = torch.empty(0, dtype=torch.uint8, device=device)
        sent = torch.cat([none, *(t.to(device) for parts in outgoing for t in parts)])
        room = torch.empty(sum(counts), dtype=torch.uint8, device=device)
        return cls(sent, room, [sum(t.nbytes for t in parts) for parts in outgoing], counts, incoming)


class Steps(ABC, Generic[M]):
    """Steps of the ranks of some communicators. All methods are collective over the ranks.

    Args:
        eps: which end if ranks may differ.
        peers: the ranks.
        what: of which peers hear if it raised on this rank.
    """

    def __init__(self, eps: Iterable[Communicator], peers: Peers, what: str) -> None:
        self._eps = list(dict.fromkeys(eps))
        config = self._eps[0].config
        self._rank, self._world_size = config.rank, config.world_size
        self._peers, self._what = peers, what

    @abstractmethod
    def _routes(self, moves: Sequence[M]) -> Iterator[Route[M]]:
        """Yield the way of each move's weights, the same on all ranks."""

    @abstractmethod
    def _commit(self, moves: Sequence[M]) -> None:
        """Let the weights that were written count."""

    @torch.no_grad()
    def _make(self, moves: Sequence[M]) -> None:
        """Make one step. Raises as :meth:`moelink.nn.Balancer.step`."""
        for ep in self._eps:
            require_running(ep)
        try:
            packed, problem = self._vote(lambda: self._pack(moves))
            if problem is None:
                self._exchange(packed)
                arrived, problem = self._vote(lambda: self._unpack(packed))
            if problem is None:
                self._use(moves, arrived)
        except BaseException as error:
            ended = self._end(error)
            if ended is None:
                raise
            raise ended from error
        if problem is not None:
            raise problem

    def _pack(self, moves: Sequence[M]) -> Packed[M]:
        """Collect the weights that this rank sends to each rank and receives from each, in the order of ``moves``."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self._world_size)]
        incoming: list[list[tuple[M, list[Tensor]]]] = [[] for _ in range(self._world_size)]
        for route in self._routes(moves):
            if self._rank == route.source:
                outgoing[route.target] += [t.contiguous().view(-1).view(torch.uint8) for t in route.sent()]
            if self._rank == route.target:
                incoming[route.source].append((route.move, route.room()))
        return Packed.of(outgoing, incoming, self._between())

    def _between(self) -> torch.device:
        """Return the device of exchanges: that of the layers if the group has a backend for it, else the CPU."""
        device = self._eps[0].device
        serves = self._world_size == 1 or device.type in dist.get_backend_config(self._peers.own)
        return device if serves else torch.device("cpu")

    def _exchange(self, packed: Packed[M]) -> None:
        """Receive the new weights of this rank."""
        if self._world_size > 1:
            all_to_all(packed.room, packed.sent, packed.counts, packed.to, self._peers)
        else:
            packed.room.copy_(packed.sent)

    def _unpack(self, packed: Packed[M]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return old weights and the bytes of the new ones. Old weights are not written yet."""
        arrived, first = [], 0
        for _, tensors in (each for moves in packed.incoming for each in moves):
            parts = []
            for tensor in tensors:
                parts.append(packed.room[first : first + tensor.nbytes].clone())
                first += tensor.nbytes
            arrived.append((tensors, parts))
        return arrived

    def _use(self, moves: Sequence[M], arrived: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
        """Change weights, and all that depends on them, on which all ranks have agreed."""
        for tensors, parts in arrived:
            for old, new in zip(tensors, parts, strict=True):
                old.copy_(new.view(old.dtype).view_as(old))
        self._commit(moves)
        device = self._eps[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _vote(self, act: Callable[[], T]) -> tuple[T, BaseException | None]:
        """Return the result of ``act`` and None if it succeeded on all ranks; else the error to raise on this rank.

        A rank whose ``act`` raised reports it in the exchange in which the others wait for it.
        """
        result: Any = None
        problem: BaseException | None = None
        try:
            result = act()
        except PeerTimeoutError:
            raise
        except BaseException as error:  # noqa: BLE001 - the peers wait for this rank's word, after any error
            problem = error
        if self._world_size > 1:
            for rank, failed in enumerate(gather_values(problem is not None, self._peers)):
                if failed and problem is None:
                    problem = PeerAbortedError(rank=self._rank, peer=rank, phase=self._what, call=0)
        return result, problem

    def _end(self, error: BaseException) -> PeerError | None:
        """End the communicators, because ranks may differ from now on; return the error about a peer, if ``error`` is
        one."""
        cause = error if isinstance(error, PeerTimeoutError) else None
        ended = [end_outside_calls(ep, cause) for ep in self._eps]
        return ended[0] if cause is not None else None

    def _ask(self, exchange: Callable[[], T]) -> T:
        """Return the result of an exchange in which nothing changes."""
        try:
            return exchange()
        except PeerTimeoutError as error:
            raise (self._end(error) or error) from error

    def _all(self, act: Callable[[], T]) -> T:
        """Return the result of ``act``, which changes nothing that a model uses, once it has succeeded on all ranks.

        Raises its error on the rank where it did not, and PeerAbortedError on the others.
        """
        result, problem = self._ask(lambda: self._vote(act))
        if problem is not None:
            raise problem
        return result

    def _gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank."""
        return [value] if self._world_size == 1 else self._ask(lambda: gather_values(value, self._peers))

    def _compare(self, mine: str, name: str) -> None:
        """Refuse ranks whose text differs."""
        compare([{name: said} for said in self._gather(mine)])


def check_max_bytes(max_bytes: int) -> None:
    """Raise ArgumentError for a number of bytes that no step can have."""
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ArgumentError("max_bytes", "a positive number of bytes", max_bytes)


def divide(items: Iterable[tuple[M, Mapping[int, int]]], max_bytes: int) -> list[list[M]]:
    """Divide ``items``, of each the bytes that ranks receive, into steps in which no rank receives more than
    ``max_bytes``, an item that is larger aside.

    >>> divide([("a", {0: 3}), ("b", {1: 5}), ("c", {0: 3})], 5)
    [['a', 'b'], ['c']]
    """
    steps: list[list[M]] = []
    received: Counter[int] = Counter()
    for item, more in items:
        if not steps or max((received + Counter(more)).values(), default=0) > max_bytes:
            steps.append([])
            received = Counter()
        received += Counter(more)
        steps[-1].append(item)
    return steps


def owners(num_physical: int, world_size: int) -> list[int]:
    """Return the rank of each physical expert.

    >>> owners(5, 2)
    [0, 0, 0, 1, 1]
    """
    return ExpertMap(num_physical, world_size).owner(torch.arange(num_physical)).tolist()


def digest(value: object) -> str:
    """Return a short text that differs for other values."""
    return hashlib.sha256(str(value).encode()).hexdigest()[:8]
