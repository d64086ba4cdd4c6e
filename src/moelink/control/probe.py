"""Probe peers: beside each rank a small server says at any time which call the rank has reached.

The error of a failed collective names an address, or a neighbour that is not at fault. So the rank that gives up probes
every peer: the port of a killed process refuses the connection, the server of a stopped one says so, and a late one is
at an earlier call. The same server accepts reports of failures, and shows the proposal of a rank that recovers
(:mod:`moelink.control.recovery`). It is a process of its own (:mod:`moelink.control.responder`), which answers while
the rank holds the interpreter's lock, and ends when the rank does.

Messages are structs of bounded size behind a secret token that ranks exchange at init; nothing is unpickled.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from moelink import env
from moelink.control import responder
from moelink.control.mismatch import Mismatch
from moelink.control.responder import (
    ASK,
    FAILURE,
    LENGTH,
    MAX_PROPOSAL,
    NUM_PHASES,
    PROGRESS,
    PROOF_BYTES,
    READ,
    TELL,
    TOKEN_BYTES,
    proof_of,
)  # fmt: skip
from moelink.control.stores import listen
from moelink.errors import (
    ConfigError,
    PeerError,
    PeerLeftError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    UndeliveredError,
    UnsupportedError,
)

T = TypeVar("T")
_PHASES = ("dispatch", "combine", "init")
_PROBE_SECONDS = 0.4
_TRIES, _PAUSE_SECONDS = 3, 0.01
"""Tries of a probe if the server closes the connection, and the pause between them."""
_BACKLOG = 4096

NO_ANSWER, GONE = -1, -2
"""In place of a call number: the peer did not answer, or its process is gone."""

LEFT, INTERRUPTED = -3, -4
"""In place of a call number: an exception left the rank's ``with`` block, or entered a call under way."""

MASKED = responder.MASKED
"""In place of a call number: the rank ``expected`` has masked the rank that reads the report."""

UNDELIVERED = -5
"""In place of a call number: the rank is in the call, but its data did not arrive over the network."""

MISMATCHED = responder.MISMATCHED
"""In place of a call number: the rank made a mismatched call, whose field and values ``expected`` holds
(:attr:`~moelink.control.mismatch.Mismatch.packed`)."""

GONE_IN_WORDS = "its process is gone: nothing listens at the address of its probe server"


@dataclass(frozen=True)
class Address:
    """Address of a rank's probe server, and the token without which it does not answer."""

    host: str
    port: int
    token: bytes

    @property
    def is_loopback(self) -> bool:
        """Whether it leads each machine to itself."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def encode(self) -> bytes:
        """Encode as bytes, for the handshake at init."""
        return self.token + struct.pack("<H", self.port) + self.host.encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Decode the result of :meth:`encode`. Raises ValueError for other bytes."""
        if not TOKEN_BYTES + 2 < len(data) <= TOKEN_BYTES + 2 + 255:
            raise ValueError(f"expected an address of {TOKEN_BYTES + 3} to {TOKEN_BYTES + 257} bytes, got {len(data)}")
        (port,) = struct.unpack_from("<H", data, TOKEN_BYTES)
        host = data[TOKEN_BYTES + 2 :].decode("ascii")
        if not host.isprintable() or not host.encode("idna"):  # which raises for labels that cannot be looked up
            raise ValueError(f"expected the name of a host, got {host!r}")
        return cls(host=host, port=port, token=data[:TOKEN_BYTES])


@dataclass(frozen=True)
class Failure:
    """The first error of a communicator, as ranks report it to peers.

    ``peer`` is the rank at fault (-1: not known), ``expected`` the call that it had to reach, ``got`` its own call, or
    NO_ANSWER, GONE, LEFT, INTERRUPTED, UNDELIVERED or MISMATCHED.
    """

    peer: int
    phase: str
    call: int
    expected: int
    got: int

    @classmethod
    def of(cls, error: PeerError) -> Failure:
        """Return the failure of ``error``, which ends a communicator."""
        if isinstance(error, ProtocolError):
            mismatch = error.mismatch
            assert isinstance(mismatch, Mismatch)
            return cls(mismatch.peer, error.phase, error.call, expected=mismatch.packed, got=MISMATCHED)
        assert isinstance(error, PeerTimeoutError)
        got = NO_ANSWER if error.got is None else error.got
        if isinstance(error, PeerLeftError):
            got = INTERRUPTED if error.interrupted else LEFT
        elif isinstance(error, PeerLostError):
            got = GONE
        elif isinstance(error, UndeliveredError):
            got = UNDELIVERED
        return cls(error.peer, error.phase, error.call, expected=error.expected, got=got)

    def error(self, rank: int, detail: str = "", *, ranks_per_node: int | None = None) -> PeerError:
        """Return the exception that ``rank`` raises for this failure.

        ``ranks_per_node``: ranks of a node, by which the exception names the node of the peer; None on one node.
        """
        if self.got == MISMATCHED:
            return Mismatch.unpacked(self.peer, self.expected).error(rank=rank, phase=self.phase, call=self.call)
        node = None if ranks_per_node is None else self.peer // ranks_per_node
        where: dict[str, Any] = {"rank": rank, "peer": self.peer, "phase": self.phase, "call": self.call, "node": node}
        if self.got in (LEFT, INTERRUPTED):
            return PeerLeftError(**where, interrupted=self.got == INTERRUPTED)
        if self.got == UNDELIVERED:
            return UndeliveredError(**where, expected=self.expected)
        kind = PeerLostError if self.got == GONE else PeerTimeoutError
        detail = GONE_IN_WORDS if self.got == GONE else detail
        if self.peer < 0 and self.got >= self.expected:
            detail = "all ranks are in the call now: one came late, or what it sent did not arrive"
        got = None if self.got < 0 else self.got
        return kind(**where, expected=self.expected, got=got, detail=detail)


@dataclass(frozen=True)
class ProbeResult:
    """The result of probing one peer: its ``call`` (None: no answer) in ``phase``; ``lost``, its process is gone;
    ``stopped``, the operating system says that it is stopped."""

    call: int | None
    phase: str = _PHASES[0]
    lost: bool = False
    stopped: bool = False

    @property
    def known(self) -> bool:
        """The process is known to be gone or stopped."""
        return self.lost or self.stopped

    @property
    def reached(self) -> int:
        """The call number, or NO_ANSWER, or GONE: a lower number is further behind."""
        if self.lost:
            return GONE
        return NO_ANSWER if self.call is None else self.call


class ProbeServer:
    """This rank's probe server: it answers with the rank's progress, and keeps the first failure that a peer reports.

    Attributes:
        address: the address of this server.
        pid: its process.
    """

    def __init__(self, world_size: int = 0) -> None:
        """Start it. Probes that come before it runs wait for it.

        Args:
            world_size: reports that blame a rank out of range are dropped. 0: not known.

        Raises:
            ConfigError: MOELINK_PROBE_HOST is no address of one interface.
            UnsupportedError: this process has no Python interpreter to run it, or this machine no such address.
        """
        memory = _anonymous_file()
        try:
            reading, writing = os.pipe()
        except OSError:
            os.close(memory)
            raise
        try:
            os.ftruncate(memory, responder.Blackboard.BYTES)
            self._board = responder.Blackboard(memory)
            self._board.token = secrets.token_bytes(TOKEN_BYTES)
            self._board.world_size = world_size
            with listen(_own_host(), _BACKLOG) as listener:
                host, port = listener.getsockname()[:2]
                self.address = Address(host, port, self._board.token)
                # The socket is also closed here, because a child that this process forks must not keep the port.
                handed = (listener.fileno(), memory, reading)
                process = _start(handed)
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(memory)
            os.close(reading)
        self.pid = process.pid
        self._stop = weakref.finalize(self, _stop, process, writing, os.getpid())

    def expect_ranks(self, world_size: int) -> None:
        """Accept reports that blame ranks below ``world_size``, of whom some do not take part."""
        self._board.world_size = world_size

    @property
    def progress(self) -> tuple[int, str]:
        """The last call that this rank has entered: its number, and "dispatch" or "combine"."""
        call, phase = divmod(self._board.progress, NUM_PHASES)
        return call, _PHASES[phase]

    @progress.setter
    def progress(self, progress: tuple[int, str]) -> None:
        call, phase = progress
        self._board.progress = call * NUM_PHASES + _PHASES.index(phase)

    @property
    def call(self) -> int:
        """The number in ``progress``."""
        return self.progress[0]

    def enter(self, phase: str) -> int:
        """Note that this rank has entered its next call, and return its number."""
        call = self._board.progress // NUM_PHASES + 1
        self.progress = call, phase
        return call

    @property
    def failure(self) -> Failure | None:
        """The first failure reported by a peer, or None."""
        failure = self._board.failure
        if failure is None:
            return None
        peer, phase, call, expected, got = failure
        return Failure(peer, _PHASES[phase], call, expected, got)

    @property
    def masked(self) -> tuple[int, int] | None:
        """The rank that has masked this one, and its call then; None if none has said so."""
        return self._board.masked

    @property
    def proposal(self) -> bytes:
        """The proposal that peers read in a recovery (:mod:`moelink.control.recovery`); empty for none."""
        return self._board.proposal

    @proposal.setter
    def proposal(self, proposal: bytes) -> None:
        self._board.proposal = proposal

    def close(self, after: float = 0.0) -> None:
        """Stop answering, ``after`` seconds from now. Safe to call twice."""
        if after > 0:
            timer = threading.Timer(after, self._stop)
            timer.daemon = True
            timer.start()
        else:
            self._stop()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("moelink-probe")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _start(descriptors: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    """Start the responder, which inherits ``descriptors``."""
    if not sys.executable:
        raise UnsupportedError(
            "init: expected a Python interpreter that can run the probe server, got an empty sys.executable; set it"
        )
    command = [sys.executable, "-I", "-S", responder.__file__, *map(str, descriptors), str(os.getpid())]
    none = subprocess.DEVNULL
    return subprocess.Popen(command, pass_fds=descriptors, stdin=none, stdout=none, stderr=none, cwd="/")


def _stop(process: subprocess.Popen[bytes], pipe: int, owner: int) -> None:
    """End the responder, unless this is a process that the rank has forked."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
        os.close(pipe)


def probe(address: Address, report: Failure | None = None) -> ProbeResult:
    """Report ``report`` to one peer, unless None, and ask for its progress.

    Takes at most about half a second, or three times that if the server closes connections.
    """
    request = ASK
    if report is not None:
        phase = _PHASES.index(report.phase)
        request = TELL + FAILURE.pack(report.peer, phase, report.call, report.expected, report.got)
    try:
        word: int = _ask(address, request, lambda receive: PROGRESS.unpack(receive(PROGRESS.size))[0])
    except ConnectionRefusedError:
        return ProbeResult(call=None, lost=True)
    except OSError:
        return ProbeResult(call=None)
    if word == responder.STOPPED:
        return ProbeResult(call=None, stopped=True)
    if word < 0:
        return ProbeResult(call=None)
    call, phase = divmod(word, NUM_PHASES)
    return ProbeResult(call, _PHASES[phase])


def probe_all(
    addresses: Sequence[Address] | Mapping[int, Address], ranks: Sequence[int], report: Failure | None = None
) -> dict[int, ProbeResult]:
    """Probe ``ranks`` concurrently; results by rank."""
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(ranks)))) as pool:
        return dict(zip(ranks, pool.map(lambda rank: probe(addresses[rank], report), ranks), strict=True))


def read_proposal(address: Address) -> bytes | int:
    """Read a peer's proposal (empty: none yet), or NO_ANSWER, or GONE. Takes at most as long as :func:`probe`."""

    def proposal(receive: Callable[[int], bytes]) -> bytes | int:
        (size,) = LENGTH.unpack(receive(LENGTH.size))
        return receive(size) if size <= MAX_PROPOSAL else NO_ANSWER

    try:
        return _ask(address, READ, proposal)
    except ConnectionRefusedError:
        return GONE
    except OSError:
        return NO_ANSWER


def furthest_behind(results: dict[int, ProbeResult], call: int) -> tuple[int, ProbeResult]:
    """Choose the peer at fault for the failure of ``call``: first one whose process is gone, then one that is stopped,
    one that is at an earlier call (the lowest first), one that does not answer.
    """

    def fault(rank: int) -> tuple[int, int, int]:
        result = results[rank]
        if result.lost:
            return 0, 0, rank
        if result.stopped:
            return 1, 0, rank
        if result.call is None:
            return 3, 0, rank
        return (2 if result.call < call else 4), result.call, rank

    peer = min(results, key=fault)
    return peer, results[peer]


def _ask(address: Address, request: bytes, read: Callable[[Callable[[int], bytes]], T]) -> T:
    """Send ``request`` to a probe server, and return the result of ``read`` for its answer.

    ``read`` gets a function that receives a number of bytes. A whole try has one deadline, also if a peer answers byte
    by byte. An answer begins with a proof that its sender knows the token: the port of a rank that is gone may belong
    to another program by now.

    Only a refused connection shows that a rank's process is gone. A live server closes the connection of a client that
    has said nothing for two seconds, because another thread held the lock of its interpreter; so this asks again.

    Raises:
        ConnectionRefusedError: nothing listens at the address.
        OSError: the server did not answer, or closed every connection.
    """
    for _ in range(_TRIES):
        deadline = time.monotonic() + _PROBE_SECONDS
        try:
            with socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS) as connection:
                connection.sendall(address.token + request)
                if _receive(connection, PROOF_BYTES, deadline) != proof_of(address.token):
                    raise OSError(f"expected a probe server at {address.host}:{address.port}, got another program")
                return read(lambda count: _receive(connection, count, deadline))  # noqa: B023 - called at once
        except (ConnectionResetError, BrokenPipeError):
            time.sleep(_PAUSE_SECONDS)
    raise TimeoutError(f"expected an answer, got {_TRIES} connections that the server closed")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receive ``count`` bytes by ``deadline`` of the monotonic clock. Raises OSError."""
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"expected {count} bytes in time, got {len(data)}")
        connection.settimeout(left)
        piece = connection.recv(min(count - len(data), 1 << 16))
        if not piece:
            raise ConnectionResetError(f"expected {count} bytes, got {len(data)} before the peer closed")
        data += piece
    return data


def _own_host() -> str:
    """Return the host of this rank's address: as configured, or of the interface that leads to MASTER_ADDR."""
    configured = env.PROBE_HOST.read()
    if configured in ("0.0.0.0", "::"):
        raise ConfigError(env.PROBE_HOST.name, "the address of one interface, for peers to reach it at", configured)
    if configured:
        return configured
    try:
        places = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, place in places:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe_socket:
            probe_socket.connect(place)
            return str(probe_socket.getsockname()[0])
    return "127.0.0.1"


def gone_in_words(address: Address, *, asked_from: Address) -> tuple[str, bool]:
    """Say that nothing listens at ``address``, and whether that shows that its rank's process is gone.

    It does not if the address is a loopback and that of the asking rank is not: they may be on two machines.
    """
    if address.is_loopback and not asked_from.is_loopback:
        hint = f"nothing listens at {address.host}, which is its own machine's alone: set {env.PROBE_HOST.name} there"
        return hint, False
    return GONE_IN_WORDS, True
