"""What a probe makes of answers that no probe server gives: byte by byte, another program's, impossible reports."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from moelink.control.probe import NO_ANSWER, Address, probe, read_proposal
from moelink.control.responder import FAILURE, LENGTH, MAX_PROPOSAL, PROGRESS, Blackboard, proof_of

TOKEN = bytes(range(16))


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[Address]:
    """A server that treats every connection with ``answer`` once a request has come."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(64)
                    answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1], TOKEN)
        finally:
            over.set()
            thread.join()


@pytest.mark.quick("each reads the answer in its own way")
@pytest.mark.parametrize("ask", [read_proposal, probe])
def test_an_answer_byte_by_byte_is_no_answer_after_the_time_of_a_probe(ask: Callable[[Address], object]) -> None:
    """Closes over: a deadline of each read, under which this answer takes hours."""

    def drip(connection: socket.socket) -> None:
        connection.sendall(proof_of(TOKEN))
        if ask is read_proposal:
            connection.sendall(LENGTH.pack(MAX_PROPOSAL))
        while not over.wait(0.05):
            connection.sendall(b"x" if ask is read_proposal else b"")

    found: list[object] = []
    over = threading.Event()
    with answering(drip) as address:
        thread = threading.Thread(target=lambda: found.append(ask(address)), daemon=True)
        thread.start()
        thread.join(60)
        over.set()
        assert len(found) == 1
    (result,) = found
    assert getattr(result, "reached", result) == NO_ANSWER


@pytest.mark.quick("an answer of each kind")
@pytest.mark.parametrize("ask", [read_proposal, probe])
@pytest.mark.parametrize("word", [PROGRESS.pack(3), b"HTTP/1.1 400 Bad Request\r\n\r\n", proof_of(bytes(16)) * 2])
def test_the_answer_of_another_program_is_none(ask: Callable[[Address], object], word: bytes) -> None:
    """Closes over: any eight bytes, which were a call number."""
    with answering(lambda connection: connection.sendall(word)) as address:
        result = ask(address)
    assert getattr(result, "reached", result) == NO_ANSWER


def test_a_call_number_below_zero_is_no_answer() -> None:
    with answering(lambda connection: connection.sendall(proof_of(TOKEN) + PROGRESS.pack(-7))) as address:
        assert probe(address).reached == NO_ANSWER


def test_a_report_of_a_rank_that_does_not_exist_is_dropped_and_the_next_one_kept() -> None:
    memory = os.memfd_create("test")
    os.ftruncate(memory, Blackboard.BYTES)
    board = Blackboard(memory)
    os.close(memory)
    board.world_size = 4
    for wrong in ((1 << 62, 0, 5, 5, 4), (4, 0, 5, 5, 4), (-2, 0, 5, 5, 4), (1, 9, 5, 5, 4), (1, 0, -1, 5, 4),
                  (1, 0, 5, -2, 4), (1, 0, 5, 5, -(1 << 40))):  # fmt: skip
        assert struct.calcsize(FAILURE.format) == len(wrong) * 8
        board.report(wrong)
        assert board.failure is None, wrong
    board.report((3, 1, 5, 5, -5))
    assert board.failure == (3, 1, 5, 5, -5)
    board.report((2, 1, 5, 5, 4))
    assert board.failure == (3, 1, 5, 5, -5)
