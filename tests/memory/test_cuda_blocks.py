"""Blocks of CUDA devices that are mapped anew at their addresses, over a driver that is played on the host."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from moelink.errors import UnsupportedError
from moelink.memory import cuda_blocks
from moelink.memory.cuda_blocks import CudaMemory
from tests.memory.played_driver import PlayedDriver

NBYTES = 10_000


class Meeting:
    """An exchange between threads: each passes a record and gets those of all."""

    def __init__(self, ranks: int) -> None:
        self._records: dict[int, list[bytes]] = {}
        self._barrier, self._lock = threading.Barrier(ranks, timeout=20), threading.Lock()
        self._ranks, self.seen = ranks, []

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        rounds: list[int] = []

        def exchange(record: bytes) -> list[bytes]:
            number = len(rounds)
            rounds.append(number)
            with self._lock:
                self._records.setdefault(number, [b""] * self._ranks)[rank] = record
                self.seen.append(record)
            self._barrier.wait()
            return list(self._records[number])

        return exchange


def together(count: int, fn: Callable[[int, Any], Any]) -> list[Any]:
    """Call ``fn(rank, exchange)`` for each rank in a thread of its own; return results, or errors."""
    meeting = Meeting(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(fn, rank, meeting.of(rank)) for rank in range(count)]
    return [future.exception() or future.result() for future in futures]


def driver_of(rank: int) -> PlayedDriver:
    driver = PlayedDriver()
    driver.uuid = f"device-{rank}"
    return driver


def made(rank: int, exchange: Any, world_size: int = 2, members: Any = (0, 1)) -> CudaMemory:
    return CudaMemory.create_with(
        NBYTES, driver=partial(driver_of, rank), rank=rank, world_size=world_size, members=members, exchange=exchange,
        fill=lambda block: block[:2].fill_(rank + 1),
    )  # fmt: skip


def files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_each_rank_reaches_the_blocks_of_all() -> None:
    a, b = together(2, made)
    assert a.pointers.tolist() == [a.peer(r).data_ptr() for r in range(2)]
    assert [int(a.peer(r)[0]) for r in range(2)] == [1, 2]
    assert int(b.peer(0)[2:].sum()) == 0, "new memory of a device is not zero"
    a.local[5], b.peer(0)[6] = 7, 8
    assert b.peer(0)[5:7].tolist() == a.local[5:7].tolist() == [7, 8]
    a.close()
    b.close()


def test_new_memory_is_where_the_old_was_and_late_writes_miss_it() -> None:
    """Rank 1 is left out: its stores end in the old memory, and those to it in memory of rank 0 alone."""
    a, b = together(2, made)
    before, view, late = a.pointers.tolist(), a.local[:4], b.peer(0)
    driver = a._driver()
    assert isinstance(driver, PlayedDriver)
    renewal = a.renew([0], lambda record: [record], lambda block: block[1:3].fill_(5))
    waits = driver.waits
    assert view.tolist() == [1, 1, 0, 0]  # nothing has changed
    renewal.commit()
    assert driver.waits == waits + 1, "kernels may have been under way"
    assert view.tolist() == [0, 5, 5, 0]
    late.fill_(9)
    assert view.tolist() == [0, 5, 5, 0]
    a.peer(1).fill_(3)
    assert b.local[:3].tolist() == [2, 2, 0]
    assert a.peer(1)[driver.granularity] == 3
    assert a.pointers.tolist() == before
    assert view.tolist() == [0, 5, 5, 0]
    a.close()
    b.close()


def test_a_newcomer_meets_members_whose_addresses_stay() -> None:
    a, b = together(2, made)
    b.close()
    a.renew([0], lambda record: [record], lambda block: None).commit()
    before = a.pointers.tolist()

    def change(rank: int, exchange: Any) -> Any:
        return made(1, exchange) if rank else a.renew([0, 1], exchange, lambda block: block.fill_(6))

    renewal, c = together(2, change)
    renewal.commit()
    assert a.pointers.tolist() == before
    c.peer(0)[3] = 4
    a.peer(1)[3] = 5
    assert (a.local[:4].tolist(), c.local[:4].tolist()) == ([6, 6, 6, 4], [2, 2, 0, 5])
    a.close()
    c.close()


def test_memory_that_is_given_up_is_given_back() -> None:
    count = files()
    a, b = together(2, made)
    held = files()
    renewal = a.renew([0], lambda record: [record], lambda block: block.fill_(9))
    renewal.discard()
    assert files() == held
    assert a.local[:3].tolist() == [1, 1, 0]
    drivers = [a._driver(), b._driver()]
    view = a.local[:2]
    del renewal
    a.close()
    b.close()
    assert view.tolist() == [1, 1], "a view keeps its block"
    del view
    assert files() == count
    assert not any(driver.mapped or driver.ranges for driver in drivers)  # type: ignore[attr-defined]


def test_blocks_of_another_library_are_put_back_before_it_unmaps_them() -> None:
    count = files()
    a, b = together(2, made)
    driver = a._driver()
    borrowed = CudaMemory(0, [a.peer(r) for r in range(2)], lambda: driver)
    borrowed.renew([0], lambda record: [record], lambda block: block.fill_(9)).commit()
    assert a.local[0] == 9
    assert a.peer(1)[0] == 0xA5, "memory that nobody else maps"
    borrowed.close()
    assert [int(a.peer(r)[0]) for r in range(2)] == [1, 2]
    del borrowed
    a.close()
    b.close()
    gc.collect()
    assert files() == count


def test_two_ranks_of_one_device_and_sizes_that_differ_are_refused() -> None:
    def one_device(rank: int, exchange: Any) -> Any:
        return CudaMemory.create_with(
            NBYTES, driver=partial(driver_of, 0), rank=rank, world_size=2, members=[0, 1], exchange=exchange,
            fill=lambda block: None,
        )  # fmt: skip

    def other_size(rank: int, exchange: Any) -> Any:
        return CudaMemory.create_with(
            NBYTES + rank, driver=partial(driver_of, rank), rank=rank, world_size=2, members=[0, 1], exchange=exchange,
            fill=lambda block: None,
        )  # fmt: skip

    count = files()
    for error in together(2, one_device):
        assert "expected a device of its own for each rank, got device-0 on ranks 0 and 1" in str(error)
    for error in together(2, other_size):
        assert "nbytes" in str(error)
    assert files() == count


def test_every_rank_hears_of_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(driver: PlayedDriver, fd: int) -> int:
        raise RuntimeError(f"cuMemImportFromShareableHandle: no {driver.uuid}")

    monkeypatch.setattr(PlayedDriver, "adopt", fail)
    count = files()
    for rank, error in enumerate(together(2, made)):
        assert isinstance(error, UnsupportedError)
        assert f"no device-{rank}" in str(error)
    assert files() == count


def test_a_rank_whose_process_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record says a socket that nobody has any more."""
    real = cuda_blocks._address
    monkeypatch.setattr(socket.socket, "connect", lambda self, to: (_ for _ in ()).throw(ConnectionRefusedError("no")))
    assert real("a") == "\0moelink-a"
    for rank, error in enumerate(together(2, made)):
        assert f"the memory of rank {1 - rank} cannot be mapped: expected a live process" in str(error)


def test_what_fails_before_the_exchange_is_told_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the driver, while blocks of another library are found, and of the system, while memory is offered."""
    a, b = together(2, made)
    borrowed = CudaMemory(0, [a.peer(r) for r in range(2)], a._driver)
    held = files()

    def fail(*_: object) -> int:
        raise RuntimeError("cuMemRetainAllocationHandle: no")

    monkeypatch.setattr(a._driver(), "retain", fail)
    told: list[bytes] = []
    with pytest.raises(UnsupportedError, match="cuMemRetainAllocationHandle: no"):
        borrowed.renew([0], lambda record: told.append(record) or [record], lambda block: None)  # type: ignore[func-returns-value]
    assert len(told) == 2
    assert files() == held
    monkeypatch.undo()
    monkeypatch.setattr(cuda_blocks, "_offered", lambda fd: (_ for _ in ()).throw(OSError("too many files")))
    with pytest.raises(UnsupportedError, match="too many files"):
        a.renew([0], lambda record: [record], lambda block: None)
    assert files() == held
    del borrowed
    a.close()
    b.close()


def test_a_commit_that_fails_keeps_no_memory_and_views_are_unmapped_behind_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = files()
    a, b = together(2, made)
    driver = a._driver()
    assert isinstance(driver, PlayedDriver)
    renewal = a.renew([0], lambda record: [record], lambda block: None)

    def fail(*_: object) -> None:
        raise RuntimeError("cuMemMap: no")

    monkeypatch.setattr(driver, "map", fail)
    with pytest.raises(RuntimeError, match="cuMemMap"):
        renewal.commit()
    monkeypatch.undo()
    del renewal
    view, waits = a.peer(1)[:2], driver.waits
    a.close()
    waited = driver.waits
    del view
    gc.collect()
    assert driver.waits > waited >= waits
    b.close()
    assert files() == count


@pytest.mark.quick("milliseconds, each another check")
@pytest.mark.parametrize("side", ["giver", "taker"])
def test_processes_of_another_user_get_and_give_nothing(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("secret")
    with cuda_blocks._offered(fd) as name:
        me, main = os.geteuid(), threading.main_thread()
        with cuda_blocks._taken(1, name) as got:
            assert os.fstat(got).st_ino == os.fstat(fd).st_ino

        def user_of(connection: socket.socket) -> int:
            return me + ((threading.current_thread() is main) == (side == "giver"))

        monkeypatch.setattr(cuda_blocks, "_user_of", user_of)
        with (
            pytest.raises(UnsupportedError, match="rank 1 cannot be mapped.*another user"),
            cuda_blocks._taken(1, name),
        ):
            pass
    os.close(fd)


def test_a_socket_says_whose_it_is() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert cuda_blocks._user_of(ours) == os.geteuid()
