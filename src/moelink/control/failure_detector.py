"""One rank's view of who is alive: its own beacon, where its peers' are, and whom to blame when a call fails."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from moelink.control.probe import Address, Beacon, Failure, Sighting, furthest_behind, probe_all

_REPORT_SECONDS = 0.3


class Watch:
    """The beacons of one communicator's ranks, as rank ``rank`` of them uses them. It outlives the transport.

    Attributes:
        rank: this rank.
        beacon: this rank's own.
        addresses: of every rank's beacon, this rank's included.
        closed: :meth:`close` was called; peers are then told nothing any more.
    """

    def __init__(self, *, rank: int, beacon: Beacon, addresses: Sequence[Address]) -> None:
        self.rank, self.beacon, self.addresses = rank, beacon, tuple(addresses)
        self.closed = False

    def enter(self) -> int:
        """Count a call of this rank, so that peers that ask learn how far it is. Returns its number, from 1."""
        self.beacon.call += 1
        return self.beacon.call

    @property
    def told(self) -> Failure | None:
        """The first failure that a peer has reported, or None."""
        return self.beacon.failure

    def blame(self, phase: str, call: int) -> Failure:
        """Call ``call`` failed: find the rank furthest behind, and tell the peers. Takes about half a second."""
        sightings = self._probe()
        # A peer that gave up first has told us whom it blames, and may be closed by now: its word comes before a
        # refused connection.
        if self.told is not None:
            return self.told
        peer, sighting = furthest_behind(sightings)
        return self._report(Failure(peer, phase, call, expected=call, got=sighting.reached), sightings)

    def confirm(self, suspicion: Failure) -> Failure:
        """``suspicion``, unless another peer's process is gone, or silent while the suspect answers. Tells the peers.

        A wait that expired accuses the peer whose signal is missing. That one may itself be waiting, in the call
        before, for a rank that died after it had sent to some and not to others.
        """
        if self.told is not None:
            return self.told
        sightings = self._probe()
        if self.told is not None:
            return self.told
        peer, sighting = furthest_behind(sightings)
        suspect = sightings.get(suspicion.peer)
        if sighting.reached >= 0:
            return self._report(suspicion, sightings)
        if suspect is not None and suspect.reached <= sighting.reached:
            peer, sighting = suspicion.peer, suspect
        call, expected = suspicion.call, suspicion.expected
        return self._report(Failure(peer, suspicion.phase, call, expected=expected, got=sighting.reached), sightings)

    def admit(self, phase: str, call: int) -> Failure:
        """This rank cannot finish call ``call``, which its peers are in: tell them."""
        if self.told is not None:
            return self.told
        return self._report(Failure(self.rank, phase, call, expected=call, got=call - 1), self._probe())

    def _report(self, failure: Failure, sightings: Mapping[int, Sighting]) -> Failure:
        """Tell every peer. Those that do not answer get it when they do; nobody waits for them."""
        for answers in (False, True):
            peers = [rank for rank, sighting in sightings.items() if (sighting.reached >= 0) == answers]
            report = threading.Thread(target=probe_all, args=(self.addresses, peers, failure), daemon=True)
            report.start()
        report.join(_REPORT_SECONDS)
        return failure

    def _probe(self) -> dict[int, Sighting]:
        # Itself, too: beacons answer in turn, so what peers told this rank before, say while it was stopped, is known.
        sightings = probe_all(self.addresses, range(len(self.addresses)))
        del sightings[self.rank]
        return sightings

    def close(self) -> None:
        """Stop answering. Safe to call twice."""
        self.closed = True
        self.beacon.close()
