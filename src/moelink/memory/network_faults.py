"""Say what goes wrong in a simulated network: puts that come late, in part twice, or never, and links that are cut.

A :class:`~moelink.memory.network_proxy.NetworkProxy` with :class:`NetworkFaults` behaves as a network card, cables and
switches do that are not in order. What can happen there, by the transports that NVSHMEM has:

==========  ============================================================================================================
late        A packet is lost and sent again, a path is busy, a link trains anew. Everything still arrives, and the
            signal of a put after its data.
twice       A card that places packets out of order may write bytes of a put again that a first packet has written, as
            long as the put is not complete: **before its signal**. The bytes are the same, because a rank stages bytes
            anew only after every receiver has granted credit, for which it needs the signal.
never       A connection gives up after its retries, a node's power fails. Part of the data may have arrived. **A signal
            never arrives without all data of its put.**
cut         Nothing moves from one rank to another for a time, in one direction; then all of it does, or nothing ever.
==========  ============================================================================================================

**What cannot happen: that a put arrives again after its signal.** A reliable connection of InfiniBand or RoCE numbers
its packets, and a receiver acknowledges a write that it has executed already without executing it again; libfabric's
reliable datagrams (EFA) arrive once. NVSHMEM itself posts no put a second time: an error of a connection ends the job.
The protocol relies on it, for two reasons. A signal is set, not raised to a maximum, so one that arrives again after
that of the next call would go backwards, and the receiver would wait for ever. And where rows come home one by one, in
the next call *another* rank may store at the same place, which a late row would overwrite; so it would not help if a
rank waited for its own puts before it makes the next call. Nothing that is cheaper than one more round trip per call
repairs that. A network that repeats finished puts cannot carry moelink; ``tests/nodes/test_network_faults.py`` shows
both harms.

Example: ``NetworkFaults(lose=0.01, cuts=(Cut(peer=2, after=5, lasts=0.5),))`` loses one put in a hundred; and when five
puts have gone to rank 2, nothing moves there for half a second.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A cut of the link from a rank to ``peer``.

    Attributes:
        peer: where the link leads.
        after: so many puts are taken to ``peer`` before. The link is cut when the next one is taken.
        lasts: for how long, in the proxy's time (seconds); infinity: for good, and what is under way never arrives.
    """

    peer: int
    after: int = 0
    lasts: float = math.inf


@dataclass(frozen=True)
class NetworkFaults:
    """What goes wrong with puts of one rank. All of it is drawn from the seed of its network proxy.

    Attributes:
        late: share of puts that are late.
        latest: by how much at most, in the proxy's time (seconds).
        repeat: share of the pieces of data that are written again later, before the put's signal.
        lose: share of puts of which the signal never arrives, and of the data only some pieces, or none.
        peers: the ranks whose puts are late, repeated and lost; None for all.
        cuts: links that are cut, at most one for each peer.
    """

    late: float = 0.0
    latest: float = 0.0
    repeat: float = 0.0
    lose: float = 0.0
    peers: frozenset[int] | None = None
    cuts: tuple[Cut, ...] = ()


class FaultyLinks:
    """The faults of one rank's links as they happen.

    Args:
        faults: what goes wrong.
        seed: of what is drawn, apart from what the proxy draws.

    Attributes:
        lost: the peer of each put that is lost.
    """

    def __init__(self, faults: NetworkFaults, seed: int) -> None:
        self._faults = faults
        self._random = random.Random(f"faults {seed}")
        self._taken: dict[int, int] = {}
        self._mended: dict[int, float] = {}
        self.lost: list[int] = []

    def take(self, peer: int, pieces: int, now: float) -> tuple[float, int | None]:
        """Note that a put of ``pieces`` pieces to ``peer`` is taken at ``now``.

        Returns by how much it is late, and after how many pieces it is lost, None if it arrives.
        """
        faults, number = self._faults, self._taken.get(peer, 0)
        self._taken[peer] = number + 1
        for cut in faults.cuts:
            if cut.peer == peer and cut.after == number:
                self._mended[peer] = now + cut.lasts
        if not self._concerns(peer):
            return 0.0, None
        late = self._random.random() * faults.latest if self._random.random() < faults.late else 0.0
        if self._random.random() >= faults.lose:
            return late, None
        self.lost.append(peer)
        return late, self._random.randrange(pieces + 1)

    def is_cut(self, peer: int, now: float) -> bool:
        """Return whether nothing moves to ``peer`` at ``now``."""
        return now < self._mended.get(peer, -math.inf)

    def is_gone(self, peer: int) -> bool:
        """Return whether nothing will ever move to ``peer`` again."""
        return self._mended.get(peer, 0.0) == math.inf

    def repeats(self, peer: int) -> bool:
        """Return whether the piece of data that has just arrived at ``peer`` is to arrive again."""
        return self._concerns(peer) and self._random.random() < self._faults.repeat

    def place(self, places: int) -> int:
        """Draw one of ``places`` places."""
        return self._random.randrange(places)

    def _concerns(self, peer: int) -> bool:
        return self._faults.peers is None or peer in self._faults.peers
