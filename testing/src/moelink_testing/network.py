"""Draw what goes wrong in a simulated network: puts that come late, in part twice, or never, and links that are cut.

A *put* copies bytes into another rank's memory and then sets a signal there. A program that simulates a network on a
CPU, as moelink's ``NetworkProxy`` does, asks a :class:`FaultyLinks` about each put, each piece of its data and each
link. What can happen between nodes, by the transports that NVSHMEM has:

==========  ============================================================================================================
late        A packet is lost and sent again, a path is busy, a link trains anew. Everything still arrives, and the
            signal of a put after its data.
twice       A card that places packets out of order may write bytes of a put again that a first packet has written, as
            long as the put is not complete: **before its signal**. The bytes are the same if a rank stages bytes anew
            only after it has heard that the put arrived.
never       A connection gives up after its retries, a node's power fails. Part of the data may have arrived. **A signal
            never arrives without all data of its put.**
cut         Nothing moves from one rank to another for a time, in one direction; then all of it does, or nothing ever.
==========  ============================================================================================================

**What cannot happen: that a put arrives again after its signal.** A reliable connection of InfiniBand or RoCE numbers
its packets, and a receiver acknowledges a write that it has executed already without executing it again; libfabric's
reliable datagrams (EFA) arrive once. NVSHMEM itself posts no put a second time: an error of a connection ends the job.

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
        lasts: for how long, in the network's time (seconds); infinity: for good, and what is under way never arrives.
    """

    peer: int
    after: int = 0
    lasts: float = math.inf


@dataclass(frozen=True)
class NetworkFaults:
    """What goes wrong with the puts of one rank.

    Attributes:
        late: share of puts that are late.
        latest: by how much at most, in the network's time (seconds).
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

    def links(self, seed: int) -> FaultyLinks:
        """Draw these faults from ``seed``."""
        return FaultyLinks(self, seed)


class FaultyLinks:
    """The faults of one rank's links as they happen.

    Args:
        faults: what goes wrong.
        seed: of all that is drawn.
    """

    def __init__(self, faults: NetworkFaults, seed: int) -> None:
        self._faults = faults
        self._random = random.Random(f"faults {seed}")
        self._taken: dict[int, int] = {}
        self._mended: dict[int, float] = {}

    def take(self, peer: int, pieces: int, now: float) -> tuple[float, int | None]:
        """Note that a put of ``pieces`` pieces to ``peer`` is taken at ``now``.

        Returns by how much it is late (seconds), and at how many pieces left it is lost, None if it arrives.
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
        return late, self._random.randrange(pieces + 1)

    def is_cut(self, peer: int, now: float) -> bool:
        """Return whether nothing moves to ``peer`` at ``now``."""
        return now < self._mended.get(peer, -math.inf)

    def is_gone(self, peer: int) -> bool:
        """Return whether nothing will ever move to ``peer`` again."""
        return self._mended.get(peer, 0.0) == math.inf

    def repeat(self, peer: int, left: int) -> int | None:
        """Draw when a piece of data that has just arrived at ``peer`` arrives again.

        Returns its place among the ``left`` pieces of its put that have not arrived and itself, 0 for the last of them
        to come; None if it does not arrive again.
        """
        if not self._concerns(peer) or self._random.random() >= self._faults.repeat:
            return None
        return self._random.randrange(left + 1)

    def _concerns(self, peer: int) -> bool:
        return self._faults.peers is None or peer in self._faults.peers
