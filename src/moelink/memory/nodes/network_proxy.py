"""Simulate a network between nodes that are processes of one machine: a proxy thread of each rank carries its puts.

Kernels store work entries in a ring (``kernels.nodes.internode``), as they would for a network card. The proxy copies
the bytes to the peer's block and then stores the signal. It has the one guarantee of a network: **a put's signal
arrives after the put's own data**. Everything else arrives late and in any order. The proxy splits data into pieces;
puts overtake one another, also those to one peer and to one word; and data is read when it is carried, not when the
kernel asked for the put. With :class:`LinkFaults` it also loses puts, repeats parts of them, and has links that are
cut.

**No network may let a put arrive again after its signal.** The protocol relies on it, for two reasons. A signal is set,
not raised to a maximum, so one that arrives again after that of the next call would go backwards, and the receiver
would wait for ever. And if rows come home one by one, in the next call *another* rank may store at the same place, and
a late row would overwrite it; so a rank that waits for its own puts before the next call would not help. Any repair
costs one more round trip per call. ``tests/nodes/test_network_faults.py`` shows both harms. A put that arrives in part
twice *before* its signal does no harm: the bytes are the same, because a rank stages bytes anew only after every
receiver has granted credit, for which it needs the signal. ``moelink_testing.network`` describes real networks.

**Nothing crosses a change of memberships** (:meth:`NetworkProxy.without`). The proxy stops before this rank maps new
blocks over the old ones. It then has no puts any more, neither those under way nor those in the ring, and only after
that it goes on. So no put of before arrives in a new block. Puts to masked ranks end as they are taken: nobody waits
for them, and on a link that is cut they do not pile up. A real network has the same by closing its connections and
registrations of memory.

A work entry is int64 words (``protocol.RING_*``): destination, source, bytes, the signal's address and value, peer,
unused, and ticket + 1 once the entry is complete. Addresses point into the sender's own block, the source also into
memory of :meth:`NetworkProxy.carry_from`; the destination is the same offset in the peer's block.

Example: entry (own 0x1040, 0x1800, 32, own 0x1008, 7, peer 3, -, 1) of a rank whose block begins at 0x1000: 32 bytes go
to byte 0x40 of rank 3's block, in pieces, and then its word at byte 8 becomes 7.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moelink.errors import MoelinkError
from moelink.memory.blocks import SymmetricMemory
from moelink.memory.protocol import RING_ENTRY_WORDS, RING_HEADER_WORDS, RING_STAGED

_IDLE_SECONDS = 2e-4


class LinkFaults(Protocol):
    """Faults of the links of one rank: :class:`NetworkProxy` asks for each put, each piece and each link.

    The library has none; ``moelink_testing.network`` draws some. Times are seconds of the proxy's clock.
    """

    def take(self, peer: int, pieces: int, now: float) -> tuple[float, int | None]:
        """Note that a put of ``pieces`` pieces to ``peer`` is taken at ``now``. Return its delay, and the number of
        pieces left at which it is lost, None if it arrives."""
        return 0.0, None

    def is_cut(self, peer: int, now: float) -> bool:
        """Return whether nothing moves to ``peer`` at ``now``."""
        return False

    def is_gone(self, peer: int) -> bool:
        """Return whether nothing will ever move to ``peer`` again."""
        return False

    def repeat(self, peer: int, left: int) -> int | None:
        """Return the place in [0, ``left``], among the ``left`` pieces to come, at which the piece that has just
        arrived comes again; None: it does not."""
        return None


class SoundLinks(LinkFaults):
    """Links without faults."""


@dataclass(eq=False)
class _Put:
    """A put under way: ``pieces`` (offset, bytes) of its data that have not arrived, the next one last. ``target`` is a
    byte offset in the block of ``peer``, ``source`` the bytes of this rank, ``word`` the index of the signal's int64
    word in the block of ``peer``. The put is lost once ``lost_at`` pieces or fewer are left; None: it arrives."""

    peer: int
    target: int
    source: Any
    pieces: list[tuple[int, int]]
    word: int
    value: int
    due: float
    lost_at: int | None = None


class NetworkProxy:
    """Carry the puts of one rank to the blocks of others.

    Args:
        memory: this rank's view of all blocks, which must stay mapped until :meth:`close`.
        max_puts: most puts that may be under way at a time; the ring has that many entries.
        seed: seed of the random order in which data arrives.
        delay: most seconds by which a put is delayed, at random.
        faults: of this rank's links; None for none.

    Attributes:
        ring: [words] int64, in which kernels store work entries.
        failure: the error that stopped the proxy, or None. A stopped proxy carries nothing.
        lost: the peers of all puts that are lost, one each.
    """

    failure: MoelinkError | None = None

    def __init__(
        self,
        memory: SymmetricMemory,
        *,
        max_puts: int,
        seed: int = 0,
        delay: float = 2e-3,
        faults: LinkFaults | None = None,
    ) -> None:
        self._rank, self._nbytes = memory.rank, memory.nbytes
        self._begin = int(memory.pointers[memory.rank])
        # Copies by numpy keep the GIL. Copies by torch release it, and then wait for it behind a kernel that spins.
        self._blocks = [memory.peer(rank).numpy() for rank in range(memory.world_size)]
        self._entries = 1 << max(1, max_puts - 1).bit_length()
        self.ring = torch.zeros(RING_HEADER_WORDS + self._entries * RING_ENTRY_WORDS, dtype=torch.int64, device="cpu")
        self.ring[1] = self._entries
        self._words = self.ring.numpy()
        self._outside, self._outside_begin = self._words[:0], 0
        self._taken = 0
        self._under_way: list[_Put] = []
        self._random = random.Random(seed)
        self._delay = delay
        self._links = SoundLinks() if faults is None else faults
        self.lost: list[int] = []
        self._masked: frozenset[int] = frozenset()
        self._halted = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def carry_from(self, memory: Tensor) -> None:
        """Let kernels put from ``memory`` of the CPU outside the block, whose address they find in the ring."""
        self._outside, self._outside_begin = memory.view(-1).numpy(), memory.data_ptr()
        self.ring[RING_STAGED] = memory.data_ptr()

    def start(self) -> None:
        """Start carrying puts on a thread."""
        self._thread = threading.Thread(target=self._run, name="moelink-network-proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the puts under way, and stop. Safe to call twice. Puts under way on a link that is cut are lost.

        Raises:
            MoelinkError: a put could not be finished; raised once.
        """
        self._stop.set()
        if self._thread is threading.current_thread():
            return  # called by the garbage collector on this thread, which finishes the puts before it ends
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._carry(until=self._has_nothing)
        self._blocks, self._under_way = [], []  # a view of a block would keep it mapped
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def without(self, masked: Sequence[int]) -> Iterator[None]:
        """Carry nothing within the context, and after it only what is put later, to ranks other than ``masked``. No
        kernel of this rank runs meanwhile."""
        self._halted = True
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._under_way, self.lost, self._taken, self.failure = [], [], 0, None
        self._words[0], self._words[RING_HEADER_WORDS:] = 0, 0
        yield
        self._masked, self._halted = frozenset(masked), False
        self._stop.clear()
        self.start()

    def step(self) -> bool:
        """Deliver one piece of a put's data, or one signal. False when nothing is due."""
        self._take()
        now = self._now()
        stops = self._stop.is_set()
        cut = [put for put in self._under_way if self._links.is_cut(put.peer, now)]
        if stops and cut:
            self.lost += [put.peer for put in cut]
            self._under_way = [put for put in self._under_way if put not in cut]
        due = [put for put in self._under_way if (put.due <= now or stops) and put not in cut]
        if not due:
            return False
        self._advance(self._random.choice(due))
        return True

    @property
    def idle(self) -> bool:
        """Nothing is under way that will ever move."""
        self._take()
        return all(self._links.is_gone(put.peer) for put in self._under_way)

    @property
    def stuck(self) -> list[int]:
        """The peers of puts that are under way and will never move."""
        return [put.peer for put in self._under_way if self._links.is_gone(put.peer)]

    def _advance(self, put: _Put) -> None:
        """Deliver the next piece of ``put``, or its signal after the last piece; or lose the rest of it."""
        if put.lost_at is not None and len(put.pieces) <= put.lost_at:
            self._under_way.remove(put)
        elif put.pieces:
            at, nbytes = put.pieces.pop()
            self._blocks[put.peer][put.target + at : put.target + at + nbytes] = put.source[at : at + nbytes]
            again = self._links.repeat(put.peer, len(put.pieces))
            if again is not None:
                put.pieces.insert(again, (at, nbytes))
        else:
            self._blocks[put.peer][: self._nbytes // 8 * 8].view("int64")[put.word] = put.value
            self._under_way.remove(put)

    def _now(self) -> float:
        return time.monotonic()

    def _hold(self) -> float:
        """Seconds, by :meth:`_now`, by which the next put is delayed."""
        return self._random.random() * self._delay

    def _run(self) -> None:
        def stopped() -> bool:
            if not self.step():
                time.sleep(_IDLE_SECONDS)
            return self._stop.is_set()

        self._carry(until=stopped)
        self._carry(until=self._has_nothing)

    def _has_nothing(self) -> bool:
        return self._halted or not self._blocks or not self.step()

    def _carry(self, *, until: Callable[[], bool]) -> None:
        """Call ``until`` until it is true. An exception is kept in ``failure``, and then nothing is called any more."""
        try:
            while self.failure is None and not until():
                pass
        except Exception as error:  # noqa: BLE001 - a thread has no caller: the rank raises it
            self.failure = MoelinkError(
                f"the network proxy of rank {self._rank} stopped: {error}; close and init again"
            )
            self.failure.__cause__ = error

    def _take(self) -> None:
        """Take complete entries from the ring, in the order of their tickets."""
        while True:
            at = RING_HEADER_WORDS + self._taken % self._entries * RING_ENTRY_WORDS
            to, source, nbytes, word, value, peer, _, done = self._words[at : at + RING_ENTRY_WORDS].tolist()
            if done != self._taken + 1:
                return
            self._taken += 1
            if not 0 <= peer < len(self._blocks):
                raise ValueError(f"expected a put to a peer in [0, {len(self._blocks)}), got {peer}")
            if peer in self._masked:
                continue
            now = self._now()
            due = now + self._hold()
            target, signal = self._offset(to, nbytes), self._offset(word, 8)
            pieces = self._cut(nbytes)
            late, lost_at = self._links.take(peer, len(pieces), now)
            put = _Put(peer, target, self._bytes(source, nbytes), pieces, signal // 8, value, due + late, lost_at)
            if lost_at is not None:
                self.lost.append(peer)
            self._under_way.append(put)

    def _cut(self, nbytes: int) -> list[tuple[int, int]]:
        """Split ``nbytes`` bytes into up to three pieces, in random order."""
        cuts = sorted({0, nbytes, *(self._random.randrange(nbytes) for _ in range(2))})
        pieces = [(begin, end - begin) for begin, end in zip(cuts, cuts[1:], strict=False)]
        self._random.shuffle(pieces)
        return pieces

    def _bytes(self, address: int, nbytes: int) -> Any:
        """Return the ``nbytes`` bytes of this rank at ``address``, in its block or outside."""
        outside = address - self._outside_begin
        if 0 <= outside <= len(self._outside) - nbytes:
            return self._outside[outside : outside + nbytes]
        offset = self._offset(address, nbytes)
        return self._blocks[self._rank][offset : offset + nbytes]

    def _offset(self, address: int, nbytes: int) -> int:
        """Convert ``address`` in this rank's block to an offset; ``nbytes`` bytes from there must lie in the block."""
        offset = address - self._begin
        if nbytes < 1 or not 0 <= offset <= self._nbytes - nbytes:
            raise ValueError(f"expected a put of bytes in a block of {self._nbytes}, got {nbytes} at {offset}")
        return offset
