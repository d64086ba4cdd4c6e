"""Play the CUDA driver's memory with files and mappings of the host, between processes and with its rules."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

_FIXED, _EMPTY = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""Linux: MAP_FIXED, and MAP_NORESERVE."""


class PlayedDriver:
    """:class:`moelink.memory.driver.Driver` of a device that this process alone has. A handle is the descriptor of a
    file.

    Attributes:
        mapped: what is mapped, by address: its bytes, and the file.
        waits: how often this process has waited for the device.
    """

    granularity = 4096

    def __init__(self) -> None:
        self.uuid = f"played-{os.getpid()}"
        self.mapped: dict[int, tuple[int, int]] = {}
        self.ranges: dict[int, int] = {}
        self.waits = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        long = ctypes.c_size_t
        self._libc.mmap.argtypes = (ctypes.c_void_p, long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)

    def create(self, nbytes: int) -> int:
        handle = os.memfd_create("played", os.MFD_CLOEXEC)
        os.ftruncate(handle, self._whole(nbytes))
        # Memory of a device is not zero at first.
        os.pwrite(handle, b"\xa5" * nbytes, 0)
        return handle

    def export(self, handle: int) -> int:
        return os.dup(handle)

    def adopt(self, fd: int) -> int:
        return os.dup(fd)

    def retain(self, address: int) -> int:
        return os.dup(self.mapped[address][1])

    def release(self, handle: int) -> None:
        os.close(handle)

    def reserve(self, nbytes: int) -> int:
        address = self._map(None, self._whole(nbytes), 0, _EMPTY, -1)
        self.ranges[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        assert self.ranges.pop(address) == nbytes
        assert not [at for at in self.mapped if address <= at < address + nbytes]
        self._libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))

    def map(self, address: int, nbytes: int, handle: int, pieces: int = 1) -> None:
        piece = self._whole(nbytes // pieces)
        for at in range(address, address + nbytes, piece):
            assert not [a for a, (n, _) in self.mapped.items() if a < at + piece and at < a + n]
            self._map(at, piece, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, handle)
            self.mapped[at] = (piece, os.dup(handle))

    def unmap(self, address: int, nbytes: int, pieces: int = 1) -> None:
        piece = nbytes // pieces
        for at in range(address, address + nbytes, piece):
            size, file = self.mapped.pop(at)
            assert size == piece
            os.close(file)
            self._map(at, piece, 0, _EMPTY | _FIXED, -1)

    def size_at(self, address: int) -> int:
        return self.ranges[address]

    def view(self, address: int, nbytes: int, owner: object) -> Tensor:
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        array.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.waits += 1

    def _whole(self, nbytes: int) -> int:
        assert nbytes > 0
        assert nbytes % self.granularity == 0
        return nbytes

    def _map(self, at: int | None, nbytes: int, protection: int, flags: int, file: int) -> int:
        got: int = self._libc.mmap(at, nbytes, protection, flags, file, 0)
        assert at in (None, got)
        return got
