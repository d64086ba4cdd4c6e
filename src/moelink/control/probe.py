"""Probe peers: each rank runs a small server that says which call the rank has reached, even while the rank waits.

When a collective fails, its error names an address, or a neighbour that is not at fault. So the rank that gives up
probes every peer: a killed process refuses the connection at once, a stopped one does not answer, a late one says which
call it has reached. The rank furthest behind is the one at fault. The same server accepts reports of failures, and
shows the proposal of a rank that recovers (:mod:`moelink.control.recovery`).

Messages are structs of bounded size behind a secret token that ranks exchange at init; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moelink import env
from moelink.errors import PeerLostError, PeerTimeoutError

_TOKEN_BYTES = 16
_ASK, _TELL, _READ = b"?", b"!", b"r"
_LENGTH = struct.Struct("<I")
_PROGRESS = struct.Struct("<q")
_FAILURE = struct.Struct("<qqqqq")
_PHASES = ("dispatch", "combine", "init")
_MAX_PROPOSAL = 1 << 18
_PROBE_SECONDS = 0.4

NO_ANSWER, GONE = -1, -2
"""In place of a call number: the peer did not answer, or its process is gone."""

GONE_IN_WORDS = "its process is gone: nothing listens at the address of its probe server"


@dataclass(frozen=True)
class Address:
    """Address of a rank's probe server, and the token without which it does not answer."""

    host: str
    port: int
    token: bytes

    def encode(self) -> bytes:
        """Encode as bytes, for the handshake at init."""
        return self.token + struct.pack("<H", self.port) + self.host.encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Decode what :meth:`encode` returned. Raises ValueError for anything else."""
        if not _TOKEN_BYTES + 2 < len(data) <= _TOKEN_BYTES + 2 + 255:
            raise ValueError(
                f"expected an address of {_TOKEN_BYTES + 3} to {_TOKEN_BYTES + 257} bytes, got {len(data)}"
            )
        (port,) = struct.unpack_from("<H", data, _TOKEN_BYTES)
        return cls(host=data[_TOKEN_BYTES + 2 :].decode("ascii"), port=port, token=data[:_TOKEN_BYTES])


@dataclass(frozen=True)
class Failure:
    """The first error of a communicator, as ranks report it to peers.

    ``peer`` is the rank at fault, ``expected`` the call that it had to reach, ``got`` the one that it had reached,
    NO_ANSWER, or GONE.
    """

    peer: int
    phase: str
    call: int
    expected: int
    got: int

    def error(self, rank: int, detail: str = "") -> PeerTimeoutError:
        """The exception that ``rank`` raises for this failure."""
        kind = PeerLostError if self.got == GONE else PeerTimeoutError
        detail = GONE_IN_WORDS if self.got == GONE else detail
        got = None if self.got < 0 else self.got
        return kind(
            rank=rank, peer=self.peer, phase=self.phase, call=self.call, expected=self.expected, got=got, detail=detail
        )


@dataclass(frozen=True)
class ProbeResult:
    """The result of probing one peer: ``call``, the call it has reached (None: no answer); ``lost``, its process is
    gone."""

    call: int | None
    lost: bool = False

    @property
    def reached(self) -> int:
        """The call number, or NO_ANSWER, or GONE: the lower, the further behind."""
        if self.lost:
            return GONE
        return NO_ANSWER if self.call is None else self.call


class ProbeServer:
    """Answer probes with this rank's progress, and keep the first failure that a peer reports.

    Attributes:
        address: the address of this server.
        call: number of the last call this rank has entered; set by the transport.
        failure: the first failure reported by a peer, or None.
        proposal: what peers read in a recovery (:mod:`moelink.control.recovery`); empty for no proposal.
    """

    def __init__(self) -> None:
        self.call = 0
        self.failure: Failure | None = None
        self.proposal = b""
        self._server = socket.create_server((_own_host(), 0), backlog=128)
        host, port = self._server.getsockname()[:2]
        self.address = Address(host, port, secrets.token_bytes(_TOKEN_BYTES))
        self._thread = threading.Thread(target=self._serve, name="moelink-probe-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            with connection:
                connection.settimeout(_PROBE_SECONDS)
                try:
                    self._answer(connection)
                except OSError:
                    continue  # the client went away

    def _answer(self, connection: socket.socket) -> None:
        token = _receive(connection, _TOKEN_BYTES)
        if not secrets.compare_digest(token, self.address.token):
            return
        kind = _receive(connection, 1)
        if kind == _READ:
            proposal = self.proposal
            connection.sendall(_LENGTH.pack(len(proposal)) + proposal)
            return
        if kind == _TELL:
            peer, phase, call, expected, got = _FAILURE.unpack(_receive(connection, _FAILURE.size))
            if self.failure is None and 0 <= phase < len(_PHASES) and peer >= 0:
                self.failure = Failure(peer, _PHASES[phase], call, expected, got)
        connection.sendall(_PROGRESS.pack(self.call))

    def close(self, after: float = 0.0) -> None:
        """Stop answering, ``after`` seconds from now. Safe to call twice."""
        if after > 0:
            timer = threading.Timer(after, self.close)
            timer.daemon = True
            timer.start()
            return
        # shutdown wakes the thread out of accept; close alone would leave it there.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def probe(address: Address, report: Failure | None = None) -> ProbeResult:
    """Report ``report`` to one peer, if given, and ask for its progress. Takes at most about half a second."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS) as connection:
            connection.sendall(address.token + (_ASK if report is None else _TELL))
            if report is not None:
                phase = _PHASES.index(report.phase)
                connection.sendall(_FAILURE.pack(report.peer, phase, report.call, report.expected, report.got))
            return ProbeResult(call=_PROGRESS.unpack(_receive(connection, _PROGRESS.size))[0])
    except (ConnectionRefusedError, ConnectionResetError):
        return ProbeResult(call=None, lost=True)
    except OSError:
        return ProbeResult(call=None)


def probe_all(
    addresses: Sequence[Address], ranks: Sequence[int], report: Failure | None = None
) -> dict[int, ProbeResult]:
    """Probe ``ranks`` concurrently; results by rank."""
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(ranks)))) as pool:
        return dict(zip(ranks, pool.map(lambda rank: probe(addresses[rank], report), ranks), strict=True))


def read_proposal(address: Address) -> bytes | int:
    """Read a peer's proposal (empty: none yet), or NO_ANSWER, or GONE. Takes at most about half a second."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS) as connection:
            connection.sendall(address.token + _READ)
            (size,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
            return _receive(connection, size) if size <= _MAX_PROPOSAL else NO_ANSWER
    except (ConnectionRefusedError, ConnectionResetError):
        return GONE
    except OSError:
        return NO_ANSWER


def furthest_behind(results: dict[int, ProbeResult]) -> tuple[int, ProbeResult]:
    """Choose the peer at fault: one whose process is gone, else one without an answer, else the lowest call."""
    peer = min(results, key=lambda rank: (results[rank].reached, rank))
    return peer, results[peer]


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 16))
        if not piece:
            raise ConnectionResetError(f"expected {count} bytes, got {len(data)} before the peer closed")
        data += piece
    return data


def _own_host() -> str:
    """Host part of this rank's address: as configured, or of the interface that leads to MASTER_ADDR."""
    configured = env.PROBE_HOST.read()
    if configured:
        return configured
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        try:
            probe_socket.connect((master, 9))
            return str(probe_socket.getsockname()[0])
        except OSError:
            return "127.0.0.1"
