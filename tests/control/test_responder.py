"""A probe server answers while its rank is busy, says when it is stopped, and ends when it dies."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moelink
from moelink.control import responder
from moelink.control.probe import GONE, NO_ANSWER, Address, Failure, ProbeServer, probe, read_proposal
from moelink.control.responder import NUM_PHASES, PROGRESS, TOKEN_BYTES, Blackboard, Responder, proof_of
from moelink.testing import run_ranks
from tests.support.fault_ranks import FIELDS, check_round_trip, data
from tests.support.patience import ROOMY, Mark, hurry, join, meet, state_of, until

REPORT = Failure(peer=1, phase="dispatch", call=5, expected=5, got=4)
KINDS = ("idle", "c", "python")
"""What a process does beside its probe server: the last two hold the interpreter's lock."""


pytestmark = pytest.mark.usefixtures("patient")


def own(pipe: Any, busy: str, forked: bool) -> None:
    """What the process of :func:`owner` does."""
    server = ProbeServer()
    server.progress = 7, "combine"
    if forked and os.fork() == 0:
        time.sleep(ROOMY)  # holds all descriptors of its parent
        os._exit(0)
    pipe.send((os.getpid(), server.address.encode(), server.pid))
    if busy == "c":
        ctypes.PyDLL(None).sleep(1000)
    elif busy == "python":
        sys.setswitchinterval(1000)
        while True:
            pass
    time.sleep(1000)


@contextmanager
def owner(busy: str = "idle", *, forked: bool = False) -> Iterator[tuple[int, Address, int]]:
    """A process with a probe server, doing ``busy``: (its number, the address, the number of the server's process)."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=own, args=(theirs, busy, forked), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(ROOMY)
    pid, address, server = ours.recv()
    try:
        yield pid, Address.decode(address), server
    finally:
        process.kill()
        process.join()
        ours.close()


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


@pytest.mark.quick("each case holds the interpreter's lock in another way")
@pytest.mark.parametrize("busy", KINDS)
def test_a_busy_rank_answers(busy: str) -> None:
    with owner(busy) as (_, address, _pid):
        for _ in range(5):
            time.sleep(0.02)
            assert probe(address).call == 7
        assert read_proposal(address) == b""


def test_a_stopped_rank_is_said_to_be_stopped() -> None:
    with owner() as (pid, address, _):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T")
        for _ in range(5):
            result = probe(address)
            assert (result.call, result.stopped, result.lost) == (None, True, False)
        assert probe(address, REPORT).stopped
        assert read_proposal(address) == -1
        os.kill(pid, signal.SIGCONT)
        until(lambda: probe(address).call == 7)


class PretendedOwner:
    """The process of a rank, which the kernel says to be in each state of a list in turn, and to live then."""

    def __init__(self) -> None:
        self.states: list[str] = []
        reading, self._writing = os.pipe()
        self.handles = [reading]

    def look(self) -> str:
        return self.states.pop(0) if self.states else "lives"

    def end(self) -> None:
        os.close(self._writing)


@contextmanager
def server_of(rank: PretendedOwner) -> Iterator[tuple[Address, Responder]]:
    """A probe server in a thread of this process, whose rank has entered call 7."""
    memory = os.memfd_create("test")
    os.ftruncate(memory, Blackboard.BYTES)
    board = Blackboard(memory)
    os.close(memory)
    board.token, board.progress = os.urandom(TOKEN_BYTES), 7 * NUM_PHASES
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        address = Address(*listener.getsockname()[:2], board.token)
        server = Responder(listener, board, rank)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield address, server
        finally:
            rank.end()
            thread.join()
            for client in list(server._clients.values()):
                server._drop(client)
            server._events.close()
    os.close(rank.handles[0])


def test_a_rank_that_a_profiler_stops_for_a_moment_answers() -> None:
    """The kernel is asked twice. A server of its own process would be asked again after 30 ms, whatever that takes."""
    rank = PretendedOwner()
    with server_of(rank) as (address, _):
        assert probe(address).call == 7
        rank.states[:] = ["stopped", "lives"]
        assert probe(address).call == 7
        rank.states[:] = ["stopped", "stopped"]
        assert probe(address).stopped
        assert rank.states == []
        assert probe(address).call == 7


def test_a_client_that_was_held_up_does_not_take_its_peer_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's lock is held between connecting and asking, for longer than a server waits for a client."""
    connect, held = socket.create_connection, []

    def connect_and_be_held_up(*where: Any, **how: Any) -> socket.socket:
        connection = connect(*where, **how)
        if not held:
            held.append(connection.recv(1, socket.MSG_PEEK))  # until the server closes the connection
        return connection

    with owner() as (_, address, _pid):
        monkeypatch.setattr(socket, "create_connection", connect_and_be_held_up)
        assert probe(address).call == 7
        assert held == [b""]


def test_a_server_that_closes_every_connection_is_silent_and_not_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], bytes(TOKEN_BYTES))
        accepted = 0

        def close_all() -> None:
            nonlocal accepted
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                accepted += 1
                connection.close()

        threading.Thread(target=close_all, daemon=True).start()
        result = probe(address)
        assert (result.call, result.lost, result.reached) == (None, False, NO_ANSWER)
        assert read_proposal(address) == NO_ANSWER
        assert accepted == 6, "three connections each"
        listener.shutdown(socket.SHUT_RDWR)
    assert probe(address).lost
    assert read_proposal(address) == GONE


@pytest.mark.quick("a child that a rank has forked holds its pipe open")
@pytest.mark.parametrize("forked", [False, True], ids=["alone", "forked"])
def test_a_probe_server_ends_with_its_rank(forked: bool) -> None:
    with owner(forked=forked) as (pid, address, server):
        assert probe(address).call == 7
        os.kill(pid, signal.SIGKILL)
        until(lambda: probe(address).lost)
        until(lambda: not is_running(server))


def test_idle_clients_block_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are still there when others have been answered, and let go when their time is over."""
    monkeypatch.setattr(responder, "_IDLE_SECONDS", 1000.0)
    with server_of(PretendedOwner()) as (address, _):
        idle = [socket.create_connection((address.host, address.port), timeout=ROOMY) for _ in range(20)]
        for connection in idle[:10]:
            connection.sendall(b"x")
        for _ in range(20):
            assert probe(address).call == 7
        assert select.select(idle, [], [], 0) == ([], [], []), "none is closed"
        monkeypatch.setattr(responder, "_IDLE_SECONDS", 0.0)
        for connection in idle:
            assert connection.recv(1) == b""
            connection.close()


def test_a_thousand_at_once_are_answered() -> None:
    server = ProbeServer()
    server.progress = 9, "dispatch"
    connections = []
    try:
        for _ in range(1000):
            connections.append(socket.create_connection((server.address.host, server.address.port), timeout=ROOMY))
        answered = 0
        for connection in connections:
            with contextlib.suppress(ConnectionError):  # the server waits for two seconds
                connection.sendall(server.address.token + b"?")
        answer = proof_of(server.address.token) + PROGRESS.pack(9 * NUM_PHASES)
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                answered += connection.recv(16) == answer
        assert answered
        with ThreadPoolExecutor(32) as pool:
            assert {result.call for result in pool.map(lambda _: probe(server.address), range(200))} == {9}
    finally:
        for connection in connections:
            connection.close()
        server.close()


def test_what_rank_and_server_write_is_seen_at_once() -> None:
    server = ProbeServer()
    for proposal in (b"", b"one", b"x" * (1 << 18), b"two"):
        server.proposal = proposal
        assert (server.proposal, read_proposal(server.address)) == (proposal, proposal)
    probe(server.address, REPORT)
    probe(server.address, replace(REPORT, peer=2))
    assert server.failure == REPORT
    pid = server.pid
    server.close()
    server.close()
    assert not is_running(pid)
    assert probe(server.address).lost


def test_the_token_is_not_in_the_list_of_processes() -> None:
    server = ProbeServer()
    with open(f"/proc/{server.pid}/cmdline", "rb") as file:
        line = file.read()
    assert server.address.token not in line
    assert server.address.token.hex().encode() not in line
    server.close()


def busy_or_late(rank: int, world_size: int, folder: str) -> int:
    """Rank 1 holds the interpreter's lock in a call of C code, after its call; rank 2 is late."""
    ep = join(**FIELDS, transport="collective")
    check_round_trip(ep, rank)
    given, told, byte = data(0), Mark(folder, "told"), ctypes.create_string_buffer(1)
    fifo = os.open(Path(folder, "fifo"), os.O_RDWR)
    meet()
    hurry(ep)
    if rank == 2:
        told.wait()
        meet()
        return 2
    if rank == 1:
        pending = ep.dispatch_async(given.x, given.topk_ids)
        ctypes.PyDLL(None).read(fifo, byte, 1)  # with the lock, until rank 0 has been told
        with pytest.raises(moelink.PeerTimeoutError) as caught:
            pending.wait()
    else:
        with pytest.raises(moelink.PeerTimeoutError) as caught:
            ep.dispatch(given.x, given.topk_ids)
        told.set()
        os.write(fifo, b"x")
    meet()
    return caught.value.peer


def test_the_late_rank_is_named_and_not_the_busy_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert run_ranks(busy_or_late, 3, str(tmp_path)) == [2, 2, 2]
