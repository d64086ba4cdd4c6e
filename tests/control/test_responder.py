"""A probe server answers while its rank is busy, says when it is stopped, and ends when it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import moelink
from moelink.control.probe import GONE, NO_ANSWER, Address, Failure, ProbeServer, probe, read_proposal
from moelink.control.responder import NUM_PHASES, PROGRESS, TOKEN_BYTES, proof_of
from moelink.testing import run_ranks
from tests.support.fault_ranks import FIELDS, check_round_trip
from tests.support.starving import Starved

REPORT = Failure(peer=1, phase="dispatch", call=5, expected=5, got=4)
OWNER = """
import os, subprocess, sys, time
from moelink.control.probe import ProbeServer
server = ProbeServer()
server.progress = 7, "combine"
if sys.argv[1] == "forked" and os.fork() == 0:
    time.sleep(8)  # holds all descriptors of its parent
    os._exit(0)
print(server.address.encode().hex(), server.pid, flush=True)
{busy}
"""
IDLE = "time.sleep(60)"
IN_C = "sum(range(10**12))"
IN_PYTHON = "import sys\nsys.setswitchinterval(1000)\nwhile True: pass"


@contextmanager
def owner(busy: str = IDLE, *, forked: bool = False) -> Iterator[tuple[int, Address, int]]:
    """A process with a probe server, doing ``busy``: (its number, the address, the number of the server's process)."""
    command = [sys.executable, "-c", OWNER.format(busy=busy), "forked" if forked else "alone"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, pid = process.stdout.readline().split()
        try:
            yield process.pid, Address.decode(bytes.fromhex(address)), int(pid)
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def until(condition: object, seconds: float = 3.0) -> float:
    """Seconds until ``condition`` holds."""
    start = time.monotonic()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < start + seconds
        time.sleep(0.002)
    return time.monotonic() - start


@pytest.mark.quick("each case holds the interpreter's lock in another way")
@pytest.mark.parametrize("busy", [IN_C, IN_PYTHON, IDLE], ids=["c", "python", "idle"])
def test_a_busy_rank_answers(busy: str) -> None:
    with owner(busy) as (_, address, _pid):
        time.sleep(0.2)
        for _ in range(5):
            assert probe(address).call == 7
        assert read_proposal(address) == b""


def test_a_stopped_rank_is_said_to_be_stopped() -> None:
    with owner() as (pid, address, _):
        os.kill(pid, signal.SIGSTOP)
        for _ in range(5):
            result = probe(address)
            assert (result.call, result.stopped, result.lost) == (None, True, False)
        assert probe(address, REPORT).stopped
        assert read_proposal(address) == -1
        os.kill(pid, signal.SIGCONT)
        until(lambda: probe(address).call == 7)


def test_a_rank_that_a_profiler_stops_for_a_moment_answers() -> None:
    with owner() as (pid, address, _):
        assert probe(address).call == 7
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.01, os.kill, (pid, signal.SIGCONT)).start()
        assert probe(address).call == 7


def test_a_client_that_was_held_up_does_not_take_its_peer_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's lock is held between connecting and asking, for longer than a server waits for a client."""
    connect, held = socket.create_connection, []

    def connect_and_be_held_up(*where: Any, **how: Any) -> socket.socket:
        connection = connect(*where, **how)
        if not held:
            held.append(time.sleep(3.0))
        return connection

    with owner() as (_, address, _pid):
        monkeypatch.setattr(socket, "create_connection", connect_and_be_held_up)
        assert probe(address).call == 7
        assert held


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
        assert until(lambda: probe(address).lost) < 0.5
        until(lambda: not is_running(server))


def test_idle_clients_block_nobody(starved: Starved) -> None:
    server = ProbeServer()
    try:
        where = (server.address.host, server.address.port)
        idle = [socket.create_connection(where) for _ in range(20)]
        for connection in idle[:10]:
            connection.sendall(b"x")
        server.progress = 3, "dispatch"
        for _ in range(20):
            start = time.monotonic()
            assert probe(server.address).call == 3
            assert time.monotonic() - start < 0.2 + starved()
        for connection in idle:  # and they are let go
            connection.settimeout(4)
            assert connection.recv(1) == b""
            connection.close()
    finally:
        server.close()


def test_a_thousand_at_once_are_answered(starved: Starved) -> None:
    server = ProbeServer()
    server.progress = 9, "dispatch"
    connections = []
    try:
        for _ in range(1000):
            connections.append(socket.create_connection((server.address.host, server.address.port), timeout=5))
        start = time.monotonic()
        for connection in connections:
            connection.sendall(server.address.token + b"?")
        answer = proof_of(server.address.token) + PROGRESS.pack(9 * NUM_PHASES)
        assert {connection.recv(16) for connection in connections} == {answer}
        assert time.monotonic() - start < 2 + starved()
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


def busy_or_late(rank: int, world_size: int) -> int:
    """Rank 1 holds the interpreter's lock in a call of C code, after its call; rank 2 is late."""
    ep = moelink.init(**FIELDS, timeout=1.0, transport="collective")
    check_round_trip(ep, rank)
    if rank == 2:
        time.sleep(3)
        return 2
    if rank == 1:
        pending = ep.dispatch_async(*_arguments())
        sum(range(10**8))
        with pytest.raises(moelink.PeerTimeoutError) as caught:
            pending.wait()
        return caught.value.peer
    with pytest.raises(moelink.PeerTimeoutError) as caught:
        ep.dispatch(*_arguments())
    return caught.value.peer


def _arguments() -> tuple[object, object]:
    from tests.support.fault_ranks import data

    given = data(0)
    return given.x, given.topk_ids


def test_the_late_rank_is_named_and_not_the_busy_one() -> None:
    assert run_ranks(busy_or_late, 3) == [2, 2, 2]
