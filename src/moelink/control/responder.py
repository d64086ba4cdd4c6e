"""Answer probes for a rank from a process of its own, which the rank's interpreter cannot hold up.

A thread of the rank would answer only when it gets the interpreter's lock, so a rank in a long call of C code, or in a
loop of pure Python, would look stopped. This file is the program of a small process beside each rank. It imports the
standard library only, and :class:`~moelink.control.probe.ProbeServer` starts it. Both share:

* a block of shared memory without a name (:class:`Blackboard`): the rank writes its progress and its proposal, this
  process writes the first failure that a peer reports. Each word has one writer;
* the listening socket, which only this process keeps, so the port closes when it ends;
* a pipe whose writing end the rank holds.

States of the rank, before every answer:

* *dead*: the pipe is at its end, or the kernel's handle of the process says that it has ended (children that the rank
  has forked may hold the pipe open), or the kernel is taking it down (flag PF_EXITING). Then this process ends at once,
  with all connections.
* *stopped*: the kernel says so twice, 30 ms apart, because a profiler stops a process for less. The answer is STOPPED.
* busy or idle: the answer is the rank's progress.

One loop serves all connections and waits for none. It drops a client that says nothing after two seconds, and the
oldest one earlier if there are too many.
"""

from __future__ import annotations

import mmap
import os
import resource
import secrets
import selectors
import signal
import socket
import struct
import sys
import time
from hashlib import blake2b

ASK, TELL, READ = b"?", b"!", b"r"
TOKEN_BYTES = 16
MAX_PROPOSAL = 1 << 18
STOPPED = -3
"""In place of its progress: the rank's process is stopped."""
STOPPED_LENGTH = 0xFFFFFFFF
"""In place of a proposal's length, likewise."""

LENGTH = struct.Struct("<I")
PROGRESS = struct.Struct("<q")
FAILURE = struct.Struct("<qqqqq")
NUM_PHASES = 3
PROOF_BYTES = 8

_PROGRESS, _SLOT, _FAILED, _FAILURE, _TOKEN, _SIZES, _WORLD_SIZE, _MASKED, _WORDS = 0, 1, 2, 3, 8, 10, 12, 13, 16
MASKED = -6
"""In place of a call number in a report: the rank that ``expected`` names has masked this rank."""
MISMATCHED = -7
"""In place of a call number: the rank made a mismatched call, and ``expected`` holds both values."""
_LARGEST_WORLD, _LEAST_GOT = 1 << 20, MISMATCHED
_IDLE_SECONDS = 2.0
_LOOK_AGAIN_SECONDS = 0.03
_MOST_CONNECTIONS = 4096
_PF_EXITING = 0x4


def proof_of(token: bytes) -> bytes:
    """Return the first bytes of each answer of the server with this token. They do not reveal the token."""
    return blake2b(token, digest_size=PROOF_BYTES, person=b"moelink-answer").digest()


class Blackboard:
    """The shared block. ``words`` are aligned int64, so a reader sees each one before or after a write of it."""

    BYTES = 8 * _WORDS + 2 * MAX_PROPOSAL

    def __init__(self, fd: int) -> None:
        """Map the file ``fd`` of BYTES bytes."""
        self._memory = mmap.mmap(fd, self.BYTES)
        self.words = memoryview(self._memory)[: 8 * _WORDS].cast("q")

    @property
    def progress(self) -> int:
        """The call that the rank has reached, times NUM_PHASES, plus its phase: one word, so they belong together."""
        return int(self.words[_PROGRESS])

    @progress.setter
    def progress(self, word: int) -> None:
        self.words[_PROGRESS] = word

    @property
    def token(self) -> bytes:
        """The first bytes of each request."""
        return bytes(self._memory[8 * _TOKEN : 8 * _TOKEN + TOKEN_BYTES])

    @token.setter
    def token(self, token: bytes) -> None:
        self._memory[8 * _TOKEN : 8 * _TOKEN + TOKEN_BYTES] = token

    @property
    def world_size(self) -> int:
        """Number of ranks, 0 if that is not known."""
        return int(self.words[_WORLD_SIZE])

    @world_size.setter
    def world_size(self, ranks: int) -> None:
        self.words[_WORLD_SIZE] = ranks

    @property
    def proposal(self) -> bytes:
        """The proposal that peers read in a recovery."""
        slot = self.words[_SLOT]
        begin = 8 * _WORDS + slot * MAX_PROPOSAL
        return bytes(self._memory[begin : begin + self.words[_SIZES + slot]])

    @proposal.setter
    def proposal(self, data: bytes) -> None:
        slot = 1 - self.words[_SLOT]  # the half that is not read
        begin = 8 * _WORDS + slot * MAX_PROPOSAL
        self._memory[begin : begin + len(data)] = data
        self.words[_SIZES + slot] = len(data)
        self.words[_SLOT] = slot

    @property
    def failure(self) -> tuple[int, ...] | None:
        """The first failure reported: peer, phase, call, expected, got."""
        return tuple(self.words[_FAILURE : _FAILURE + 5]) if self.words[_FAILED] else None

    @property
    def masked(self) -> tuple[int, int] | None:
        """The first rank that has said that it masked this one, and its call then; None if none has."""
        by = int(self.words[_MASKED])
        return (by - 1, int(self.words[_MASKED + 1])) if by else None

    def report(self, failure: tuple[int, ...]) -> None:
        """Keep ``failure`` if it is the first, and plausible."""
        peer, phase, call, expected, got = failure
        known = -1 <= peer < (self.world_size or _LARGEST_WORLD) and 0 <= phase < NUM_PHASES
        if got == MASKED:
            if not self.words[_MASKED] and known and call >= 0 and 0 <= expected < _LARGEST_WORLD:
                self.words[_MASKED + 1] = call
                self.words[_MASKED] = expected + 1
            return
        if not self.words[_FAILED] and known and min(call, expected) >= 0 and got >= _LEAST_GOT:
            for place, value in enumerate(failure):
                self.words[_FAILURE + place] = value
            self.words[_FAILED] = 1


class Owner:
    """The process of the rank, as the kernel sees it."""

    def __init__(self, pid: int, pipe: int) -> None:
        """``pid`` is this process's parent; ``pipe`` the reading end of the pipe that it holds."""
        self.handles = [pipe]
        self._stat = -1
        if hasattr(os, "pidfd_open"):
            self.handles.append(os.pidfd_open(pid))
        if os.path.exists(f"/proc/{pid}/stat"):
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # of this process, and of no later one
        if os.getppid() != pid:
            sys.exit()

    def look(self) -> str:
        """Return "dead", "stopped" or "lives"."""
        if self._stat < 0:
            return "lives"
        try:
            fields = os.pread(self._stat, 4096, 0).rpartition(b")")[2].split()
        except ProcessLookupError:
            return "dead"
        if fields[0] in b"ZX" or int(fields[6]) & _PF_EXITING:
            return "dead"
        return "stopped" if fields[0] in b"Tt" else "lives"


class Client:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.since = connection, time.monotonic()
        self.received, self.unsent = b"", b""

    def request(self, token: bytes) -> bytes | None:
        """Return the kind of the request once it is complete, b"" before that, None if it is malformed."""
        data = self.received
        if len(data) <= TOKEN_BYTES:
            return b""
        kind = data[TOKEN_BYTES : TOKEN_BYTES + 1]
        if not secrets.compare_digest(data[:TOKEN_BYTES], token) or kind not in (ASK, TELL, READ):
            return None
        return b"" if kind == TELL and len(data) < TOKEN_BYTES + 1 + FAILURE.size else kind


class Responder:
    """The loop."""

    def __init__(self, listener: socket.socket, board: Blackboard, owner: Owner) -> None:
        self._listener, self._board, self._owner = listener, board, owner
        self._proof = proof_of(board.token)
        self._clients: dict[int, Client] = {}
        self._held: list[tuple[float, Client, bytes]] = []
        self._events = selectors.DefaultSelector()
        listener.setblocking(False)
        self._events.register(listener, selectors.EVENT_READ)
        for handle in owner.handles:
            self._events.register(handle, selectors.EVENT_READ)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MOST_CONNECTIONS + 64
        soft = wanted if hard == resource.RLIM_INFINITY else max(soft, min(wanted, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self._most = min(_MOST_CONNECTIONS, max(soft - 64, 16))

    def run(self) -> None:
        """Serve until the rank's process ends."""
        while True:
            ready = self._events.select(_LOOK_AGAIN_SECONDS if self._held else 0.5)
            if any(key.fileobj in self._owner.handles for key, _ in ready):
                return
            for key, event in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._clients and not self._serve(self._clients[key.fd], event):
                    return
            now = time.monotonic()
            due = [held for held in self._held if held[0] <= now]
            self._held = [held for held in self._held if held[0] > now]
            for _, client, kind in due:
                self._reply(client, kind, stopped=self._owner.look() == "stopped")
            for client in list(self._clients.values()):  # in the order in which they came
                if now - client.since < _IDLE_SECONDS:
                    break
                self._drop(client)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # no client is waiting
            connection.setblocking(False)
            if len(self._clients) >= self._most:
                self._drop(next(iter(self._clients.values())))
            self._clients[connection.fileno()] = Client(connection)
            self._events.register(connection, selectors.EVENT_READ)

    def _serve(self, client: Client, event: int) -> bool:
        """Serve one client. False if the rank's process has ended."""
        if event & selectors.EVENT_WRITE:
            self._send(client)
            return True
        try:
            data = client.connection.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        client.received += data
        kind = client.request(self._board.token) if data else None
        if kind is None or len(client.received) > 4096:
            self._drop(client)
        elif kind:
            state = self._owner.look()
            if state == "dead":
                return False
            if kind == TELL:
                begin = TOKEN_BYTES + 1
                self._board.report(FAILURE.unpack(client.received[begin : begin + FAILURE.size]))
            self._events.unregister(client.connection)
            if state == "stopped":
                self._held.append((time.monotonic() + _LOOK_AGAIN_SECONDS, client, kind))
            else:
                self._reply(client, kind, stopped=False)
        return True

    def _reply(self, client: Client, kind: bytes, *, stopped: bool) -> None:
        if client.connection.fileno() < 0:
            return  # dropped meanwhile
        if kind == READ:
            proposal = b"" if stopped else self._board.proposal
            answer = LENGTH.pack(STOPPED_LENGTH if stopped else len(proposal)) + proposal
        else:
            answer = PROGRESS.pack(STOPPED if stopped else self._board.progress)
        client.unsent = self._proof + answer
        self._events.register(client.connection, selectors.EVENT_WRITE)
        self._send(client)

    def _send(self, client: Client) -> None:
        try:
            client.unsent = client.unsent[client.connection.send(client.unsent) :]
        except BlockingIOError:
            return
        except OSError:
            client.unsent = b""
        if not client.unsent:
            self._drop(client)

    def _drop(self, client: Client) -> None:
        self._clients.pop(client.connection.fileno(), None)
        if client.connection in self._events.get_map():
            self._events.unregister(client.connection)
        client.connection.close()


def main(listener: int, memory: int, pipe: int, owner: int) -> None:
    """Serve the rank of process ``owner``, over these file descriptors."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGTSTP", "SIGPIPE"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # meant for the rank, whose end also ends this process
    Responder(socket.socket(fileno=listener), Blackboard(memory), Owner(owner, pipe)).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
