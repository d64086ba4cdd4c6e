"""Map blocks of CUDA devices anew at their addresses, when ranks are masked or admitted.

Every member makes new physical memory, fills it, and gives it to the others (:mod:`moelink.memory.driver`). In the
commit each maps the new memory of all members at the addresses at which their blocks were, so kernels, captured graphs
and bound calls find it. A rank that is not a member keeps its mappings of the old memory, in which its late stores end.
Stores *to* it end in one small piece of memory of this process, which is mapped over and over in that rank's range.

The file descriptor of a rank's memory goes through a Unix socket without a file. Its name is random, and either side
asks the kernel for the other's user before it gives or takes one. A socket of a process that has died refuses at once.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from torch import Tensor

from moelink.arith import align_up
from moelink.errors import UnsupportedError
from moelink.memory.blocks import Renewal, SymmetricMemory
from moelink.memory.driver import DEVICE, Driver, refuse_shared_devices, refuse_unreachable
from moelink.memory.setup import MACHINE, NUMBER, Exchange, Schema, machine_id, refuse_other_places, set_up

_SCHEMA: Schema = {"nbytes": NUMBER, "machine": MACHINE, "device": DEVICE, "socket": re.compile(r"[0-9a-f]{32}")}
_TAKE_SECONDS = 10.0
"""Longest wait for the descriptor of a peer, which offered it before the first exchange was over."""


class CudaMemory(SymmetricMemory):
    """Blocks on the CUDA devices of one machine that can be mapped anew; ``pointers`` on this rank's device."""

    def __init__(
        self, rank: int, blocks: Sequence[Tensor], driver: Callable[[], Driver], places: Sequence[Place] = ()
    ) -> None:
        """View ``blocks``. ``driver``: makes that of this rank's device, when it is needed. ``places``: of the blocks;
        if there are none, another library has mapped these."""
        super().__init__(rank, blocks)
        self._driver, self._places = driver, list(places)

    @classmethod
    def create_with(
        cls, nbytes: int, *, driver: Callable[[], Driver], rank: int, world_size: int, members: Sequence[int],
        exchange: Exchange, fill: Callable[[Tensor], None],
    ) -> CudaMemory:  # fmt: skip
        """Make this rank's block and map those of ``members``. Collective over them, with the others' :meth:`renew`.

        Args:
            nbytes: bytes of each block, at least 1.
            driver: makes that of this rank's device, another for each rank.
            exchange: over the members, called exactly twice, also on failure.
            fill: writes what the own block begins with, before any peer maps it.

        Raises:
            ConfigMismatchError, UnsupportedError, ProtocolError: as for CPU ranks
                (:meth:`moelink.memory.PosixMemory.create`).
        """

        def reserve() -> tuple[Driver, list[Place]]:
            own = driver()
            size = align_up(nbytes, own.granularity)
            return own, [Place(own, own.reserve(size), size) for _ in range(world_size)]

        new = _exchanged(reserve, nbytes, fill, rank, members, exchange)
        new.commit()
        made = new.driver
        blocks = [made.view(place.address, nbytes, place) for place in new.places]
        return CudaMemory(rank, blocks, lambda: made, new.places)

    def renew(self, members: Sequence[int], exchange: Exchange, fill: Callable[[Tensor], None]) -> Renewal:
        """Prepare new memory for ``members``, to be mapped where the old blocks are."""

        def find() -> tuple[Driver, list[Place]]:
            driver = self._driver()
            if not self._places:
                size = align_up(self.nbytes, driver.granularity)
                addresses = [self.peer(rank).data_ptr() for rank in range(self.world_size)]
                self._places.extend([Place.found(driver, address, size) for address in addresses])
            return driver, self._places

        return _exchanged(find, self.nbytes, fill, self.rank, members, exchange)

    def close(self) -> None:
        """Unmap all blocks; waits for this device's kernels, for no peer. Safe to call twice."""
        self._places.clear()  # of this very list, which a renewal may have as well
        super().close()


class Place:
    """A range of addresses at which one block is mapped after another. It is given back with its last reference, and
    views of its block hold one.

    Attributes:
        address, nbytes: where it begins, and the bytes of a block, a multiple of the granularity.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int, first: tuple[int, int] | None = None) -> None:
        """Take over a range for blocks of ``nbytes``: one that was reserved for it, or, with ``first``, one in which
        another library has mapped a block. That block's handle and bytes are ``first``. It is put back in the end, as
        that library is going to unmap it."""
        self.address, self.nbytes, self._driver = address, nbytes, driver
        self._first = first
        self._mapped = (first[1] if first else 0, 1)

    @classmethod
    def found(cls, driver: Driver, address: int, nbytes: int) -> Place:
        """Take over the range of another library that begins at ``address``."""
        return cls(driver, address, nbytes, (driver.retain(address), driver.size_at(address)))

    def put(self, handle: int, pieces: int = 1) -> None:
        """Map this memory in the place of the former, ``pieces`` times over."""
        self._clear()
        self._driver.map(self.address, self.nbytes, handle, pieces)
        self._mapped = (self.nbytes, pieces)

    def _clear(self) -> None:
        if self._mapped[0]:
            self._driver.unmap(self.address, *self._mapped)
        self._mapped = (0, 1)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        self._driver.synchronize()  # a kernel of the last user may be under way
        self._clear()
        if self._first is None:
            self._driver.free(self.address, self.nbytes)
            return
        handle, nbytes = self._first
        self._driver.map(self.address, nbytes, handle)
        self._driver.release(handle)


class _NewMemory:
    """Memory of a new generation (:class:`moelink.memory.blocks.Renewal`).

    Attributes:
        driver, places: of this device, and of the blocks of all ranks.
        handles: by rank; -1 has that in which stores to ranks without memory end.
    """

    def __init__(self, driver: Driver, places: Sequence[Place], handles: dict[int, int]) -> None:
        self.driver, self.places, self.handles = driver, places, handles

    def commit(self) -> None:
        """Map it in the place of the old, between two kernels."""
        self.driver.synchronize()
        try:
            for rank, place in enumerate(self.places):
                if rank in self.handles:
                    place.put(self.handles[rank])
                else:
                    place.put(self.handles[-1], pieces=place.nbytes // self.driver.granularity)
        finally:
            self.discard()

    def discard(self) -> None:
        """Give up the handles. Memory that was mapped stays."""
        while self.handles:
            self.driver.release(self.handles.popitem()[1])


def _exchanged(
    start: Callable[[], tuple[Driver, list[Place]]], nbytes: int, fill: Callable[[Tensor], None], rank: int,
    members: Sequence[int], exchange: Exchange,
) -> _NewMemory:  # fmt: skip
    """Make this rank's memory and take that of all ``members``. ``start`` returns the driver and the places.

    All members have the memory of all, or all raise.
    """
    with ExitStack() as given, ExitStack() as held:
        new = _NewMemory(None, [], {})  # type: ignore[arg-type]
        held.callback(new.discard)

        def prepare() -> dict[str, str]:
            with _told():
                new.driver, new.places = start()
                new.handles[rank] = new.driver.create(align_up(nbytes, new.driver.granularity))
                if len(members) < len(new.places):
                    new.handles[-1] = new.driver.create(new.driver.granularity)
                _fill(new.driver, new.handles[rank], nbytes, fill)
                fd = new.driver.export(new.handles[rank])
                given.callback(os.close, fd)
                name = given.enter_context(_offered(fd))
            return {"nbytes": str(nbytes), "machine": machine_id(), "device": new.driver.uuid, "socket": name}

        def accept(records: list[dict[str, str]]) -> None:
            refuse_other_places(records)
            uuids = {peer: fields["device"] for peer, fields in zip(members, records, strict=True)}
            refuse_shared_devices(uuids)
            refuse_unreachable(uuids)
            for peer, fields in zip(members, records, strict=True):
                if peer != rank:
                    with _taken(peer, fields["socket"]) as fd, _told():
                        new.handles[peer] = new.driver.adopt(fd)

        set_up(
            exchange, kind="cuda", rank=rank, world_size=len(members), schema=_SCHEMA, prepare=prepare, accept=accept,
            members=members,
        )  # fmt: skip
        held.pop_all()
        return new


def _fill(driver: Driver, handle: int, nbytes: int, fill: Callable[[Tensor], None]) -> None:
    """Write what new memory begins with: zeros and ``fill``."""
    size = align_up(nbytes, driver.granularity)
    place = Place(driver, driver.reserve(size), size)
    place.put(handle)
    block = driver.view(place.address, nbytes, place)
    block.zero_()
    fill(block)
    driver.synchronize()


@contextmanager
def _told() -> Iterator[None]:
    """Name a failure of the driver, or of the system, as one of this rank, which the others are told of."""
    try:
        yield
    except UnsupportedError:
        raise
    except (OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"expected the CUDA driver to make a block that other processes can map, got this error: {error}; "
            "lower max_tokens_per_rank, free memory, or use transport='collective'"
        ) from error


@contextmanager
def _offered(fd: int) -> Iterator[str]:
    """Give a copy of ``fd`` to every process of this user that connects, in a thread. Yields the name of the socket."""
    name = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(_address(name))
        server.listen()
        thread = threading.Thread(target=_give, args=(server, fd), name="moelink memory", daemon=True)
        thread.start()
        try:
            yield name
        finally:
            server.shutdown(socket.SHUT_RDWR)  # accept ends
            thread.join()


def _give(server: socket.socket, fd: int) -> None:
    with suppress(OSError):  # the end of the offer
        while True:
            with server.accept()[0] as connection, suppress(OSError):
                if _user_of(connection) == os.geteuid():
                    socket.send_fds(connection, [b"1"], [fd])


@contextmanager
def _taken(peer: int, name: str) -> Iterator[int]:
    """Take the descriptor that rank ``peer`` offers, open within the block."""
    with ExitStack() as fds:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_TAKE_SECONDS)
                connection.connect(_address(name))
                if _user_of(connection) != os.geteuid():
                    raise PermissionError("its process belongs to another user")
                found = socket.recv_fds(connection, 1, 1)[1]
                if not found:
                    raise PermissionError("it gave nothing, as to a process of another user")
                fds.callback(os.close, found[0])
        except OSError as error:
            raise UnsupportedError(
                f"the memory of rank {peer} cannot be mapped: expected a live process of this user in this container, "
                f"got {error}; start all ranks as one user in one container, or use transport='collective'"
            ) from error
        yield found[0]


def _address(name: str) -> str:
    """Return the address of a socket without a file (Linux)."""
    return f"\0moelink-{name}"


def _user_of(connection: socket.socket) -> int:
    """Return the number of the user whose process is at the other end, as the kernel says."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
