"""Name the rank at fault when a call fails: one rank's probe server, its peers' addresses, and their reports."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from moelink.control.probe import (
    INTERRUPTED,
    MASKED,
    UNDELIVERED,
    Address,
    Failure,
    ProbeResult,
    ProbeServer,
    furthest_behind,
    probe_all,
)
from moelink.errors import PeerError, PeerTimeoutError, RankMaskedError

_REPORT_SECONDS = 0.3
_PAUSE_SECONDS = 0.005


class FailureDetector:
    """The failure detector of one rank. It outlives the transport, so that peers can still probe a rank that raised.

    Attributes:
        rank: this rank.
        probe_server: this rank's own.
        addresses: the address of every rank's probe server, this rank's included; None for a rank that is masked.
        ranks_per_node: ranks of a node if there are several nodes; else None.
        closed: :meth:`close` was called. Peers' probes of this rank are refused from then on.
        left_out: the error of a recovery in which the others had gone on without this rank, or None.
    """

    def __init__(
        self,
        *,
        rank: int,
        probe_server: ProbeServer,
        addresses: Sequence[Address | None],
        ranks_per_node: int | None = None,
    ) -> None:
        self.rank, self.probe_server, self.addresses = rank, probe_server, tuple(addresses)
        self.ranks_per_node = ranks_per_node
        self.closed = False
        self.left_out: PeerTimeoutError | None = None

    @property
    def _reachable(self) -> Mapping[int, Address]:
        """The addresses of the ranks that take part."""
        return {rank: address for rank, address in enumerate(self.addresses) if address is not None}

    def address_of(self, rank: int) -> Address:
        """Return the address of a rank that takes part."""
        address = self.addresses[rank]
        assert address is not None
        return address

    def enter(self, phase: str) -> int:
        """Count a call of this rank, so that probes see its progress. Returns the call's number, from 1."""
        return self.probe_server.enter(phase)

    def about(self, error: PeerError) -> PeerError:
        """Return ``error``, or if peers have masked this rank, the error that says so."""
        told = self.probe_server.masked
        if told is None:
            return error
        return RankMaskedError(rank=self.rank, by=told[0], phase=error.phase, call=told[1])

    @property
    def masked(self) -> bool:
        """Whether a peer has said that this rank is masked."""
        return self.probe_server.masked is not None

    @property
    def reported(self) -> Failure | None:
        """The first failure that a peer has reported, or None."""
        return self.probe_server.failure

    def blame(self, phase: str, call: int) -> Failure:
        """Find the rank furthest behind call ``call``, which failed, and report it. Takes about half a second.

        If all ranks answer that they are in the call, because a late one has come, it names none (-1).
        """
        results = self.probe()
        # A peer that gave up first has reported a rank at fault, and may have closed since. So its report counts before
        # its refused connection.
        if self.reported is not None:
            return self.reported
        peer, result = furthest_behind(results, call)
        peer = -1 if result.reached >= call else peer
        return self._report(Failure(peer, phase, call, expected=call, got=result.reached), results)

    def confirm(self, suspicion: Failure) -> Failure:
        """Check ``suspicion``, report the failure and return it.

        An expired wait suspects the peer whose signal is missing. That peer may itself wait, one call behind, for a
        rank that died after it had sent to some ranks and not to others. So the failure names another peer if that
        one's process is gone or stopped, or if it does not answer and the suspect does, from a call as late as this
        rank's. If all have entered a call of this number, but one a dispatch and the others a combine, that one has
        left out a call, or made one too many: the failure names it, even if it is this rank.

        If the suspect is of another node, and all ranks have entered this call, the network is at fault, or its kernels
        do not run: the failure says UNDELIVERED. A rank that knows less waits a moment for reports of its peers: one
        that is itself the suspect, and one with a live peer in an earlier call, which may wait for a lost put. If that
        peer reports nothing, it is blamed before a suspect that is not late.
        """
        if suspicion.peer == self.rank:
            self._await_report()
        if self.reported is not None:
            return self.reported
        results = self.probe()
        if self.reported is not None:
            return self.reported
        here = self.probe_server.call
        peer, result = furthest_behind(results, here)
        if 0 <= result.reached < here:
            self._await_report()
            if self.reported is not None:
                return self.reported
            if self.ranks_per_node is not None and here <= self._reached(results, suspicion.peer):
                behind = Failure(peer, suspicion.phase, here, expected=here, got=result.reached)
                return self._report(behind, results)
        odd = _odd_rank({**results, self.rank: ProbeResult(*self.probe_server.progress)}, here)
        if result.reached >= here and odd is not None:
            return self._report(Failure(odd, suspicion.phase, here, expected=here, got=here - 1), results)
        suspect = results.get(suspicion.peer)
        if result.reached >= here and self._is_far(suspicion.peer) and suspicion.got >= 0:
            return self._report(dataclasses.replace(suspicion, got=UNDELIVERED), results)
        if result.reached >= 0 or (suspect is not None and 0 <= suspect.reached < here and not result.known):
            return self._report(suspicion, results)
        if suspect is not None and suspect.call is None and suspect.known >= result.known and not result.lost:
            peer, result = suspicion.peer, suspect
        call, expected = suspicion.call, suspicion.expected
        return self._report(Failure(peer, suspicion.phase, call, expected=expected, got=result.reached), results)

    def _reached(self, results: Mapping[int, ProbeResult], rank: int) -> int:
        """Return the call that ``rank`` has reached; for this rank itself -1."""
        return results[rank].reached if rank in results else -1

    def _is_far(self, peer: int) -> bool:
        """Return whether ``peer`` is of another node."""
        size = self.ranks_per_node
        return size is not None and peer // size != self.rank // size

    def _await_report(self) -> None:
        """Wait between nodes until a peer has reported a failure, a moment at most."""
        end = time.monotonic() + (0 if self.ranks_per_node is None else _REPORT_SECONDS)
        while self.reported is None and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)

    def admit(self, phase: str, call: int) -> Failure:
        """Report this rank: it cannot finish call ``call``, in which its peers wait for it."""
        return self.declare(Failure(self.rank, phase, call, expected=call, got=INTERRUPTED))

    def declare(self, failure: Failure) -> Failure:
        """Report ``failure``, which this rank knows of without a probe, and return it, or a peer's report."""
        if self.reported is not None:
            return self.reported
        return self._report(failure, self.probe())

    def _report(self, failure: Failure, results: Mapping[int, ProbeResult]) -> Failure:
        """Report ``failure`` to every peer, without waiting for stopped ones, which read it when they continue."""
        for answers in (False, True):
            peers = [rank for rank, result in results.items() if (result.reached >= 0) == answers]
            report = self._tell(peers, failure)
        report.join(_REPORT_SECONDS)
        return failure

    def _tell(self, peers: Sequence[int], failure: Failure) -> threading.Thread:
        report = threading.Thread(target=probe_all, args=(self._reachable, peers, failure), daemon=True)
        report.start()
        return report

    def tell_masked(self, peers: Sequence[int]) -> None:
        """Tell ``peers``, stopped ones too, that this rank has masked them. Waits a moment at most."""
        call, phase = self.probe_server.progress
        for peer in peers:
            self._tell([peer], Failure(peer, phase, call, expected=self.rank, got=MASKED)).join(_REPORT_SECONDS)

    def probe(self) -> dict[int, ProbeResult]:
        """Probe every peer; results by rank."""
        # This rank also probes itself. Its server answers in order, so it has read all earlier reports, of a time when
        # this process was stopped for example, before it answers the probe.
        results = probe_all(self._reachable, [rank for rank, address in enumerate(self.addresses) if address])
        del results[self.rank]
        return results

    def close(self, after: float = 0.0) -> None:
        """Stop answering probes, ``after`` seconds from now. Safe to call twice."""
        self.closed = True
        self.probe_server.close(after)


def _odd_rank(results: Mapping[int, ProbeResult], call: int) -> int | None:
    """Return the first rank whose call ``call`` has another phase than that of most ranks in it, or None.

    Example: ranks 0 and 2 are in a combine, which is their call 4, and rank 1 in a dispatch, its call 4: rank 1.
    """
    phases = {rank: result.phase for rank, result in results.items() if result.call == call}
    (usual, most), *others = Counter(phases.values()).most_common()
    if not others or others[0][1] == most:
        return None
    return min(rank for rank, phase in phases.items() if phase != usual)
