"""Make memory of a CUDA device, give it to other processes, and map it at chosen addresses, by the CUDA driver.

*Physical memory* has a handle and no address. It is *mapped* at an address of a range that was *reserved* before, and
may be mapped at several; it is freed when no process maps it and none holds a handle. A process gives a file descriptor
of it to another one, which makes a handle of its own of that. Source: the chapter "Virtual Memory Management" of the
CUDA programming guide. Torch makes its symmetric memory in this way, and keeps handles and addresses to itself.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from moelink.errors import UnsupportedError

_PINNED, _ON_DEVICE, _DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
_RANGE_SIZE = 12
"""Of cuPointerGetAttribute: the bytes of the range to which an address belongs."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

DEVICE = re.compile(r"[0-9a-zA-Z-]{1,64}")
"""The form of :attr:`Driver.uuid`."""


class Driver(Protocol):
    """The memory of one device. All sizes are multiples of :attr:`granularity`. Each method raises RuntimeError with
    the driver's own words when the driver fails.

    Attributes:
        uuid: of the device.
    """

    granularity: int
    uuid: str

    def create(self, nbytes: int) -> int:
        """Return a handle of new physical memory."""

    def export(self, handle: int) -> int:
        """Return a file descriptor that another process may :meth:`adopt`; the caller closes it."""

    def adopt(self, fd: int) -> int:
        """Return a handle of the memory of another process; the caller closes ``fd``."""

    def retain(self, address: int) -> int:
        """Return another handle of the memory that is mapped at ``address``."""

    def release(self, handle: int) -> None:
        """Give a handle up. Memory that is mapped stays."""

    def reserve(self, nbytes: int) -> int:
        """Return the address of a new range, in which nothing is mapped."""

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back in which nothing is mapped."""

    def map(self, address: int, nbytes: int, handle: int, pieces: int = 1) -> None:
        """Map the first ``nbytes / pieces`` of physical memory, ``pieces`` times one behind the other, for reading and
        writing by this device."""

    def unmap(self, address: int, nbytes: int, pieces: int = 1) -> None:
        """Undo :meth:`map`."""

    def size_at(self, address: int) -> int:
        """Return the bytes of the range that begins at ``address``."""

    def view(self, address: int, nbytes: int, owner: object) -> Tensor:
        """Return mapped memory, [nbytes] uint8, which keeps ``owner`` alive."""

    def synchronize(self) -> None:
        """Wait for all that this device does for this process."""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Interface:
    """Memory as CuPy and Numba describe it, of which torch makes a tensor."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2, "strides": None,
        }  # fmt: skip


class CudaDriver:
    """:class:`Driver` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Raises UnsupportedError on ROCm, OSError where there is no driver."""
        if torch.version.hip is not None:
            raise UnsupportedError(
                "mask, admit: expected NVIDIA GPUs, whose driver maps blocks anew, got ROCm; use transport='collective'"
            )
        torch.cuda.init()
        self._device, self._library = device, ctypes.CDLL("libcuda.so.1")
        place = _Location(_ON_DEVICE, torch.cuda.current_device() if device.index is None else device.index)
        self._access = _Access(place, _READ_WRITE)
        self.uuid = device_uuid(device)
        self._properties = _Properties(_PINNED, _DESCRIPTOR, place)
        self.granularity = self._made(ctypes.c_size_t, "cuMemGetAllocationGranularity", self._properties, 0)

    def create(self, nbytes: int) -> int:
        return self._made(ctypes.c_uint64, "cuMemCreate", ctypes.c_size_t(nbytes), self._properties, _long(0))

    def export(self, handle: int) -> int:
        return self._made(ctypes.c_int, "cuMemExportToShareableHandle", _long(handle), _DESCRIPTOR, _long(0))

    def adopt(self, fd: int) -> int:
        return self._made(ctypes.c_uint64, "cuMemImportFromShareableHandle", ctypes.c_void_p(fd), _DESCRIPTOR)

    def retain(self, address: int) -> int:
        return self._made(ctypes.c_uint64, "cuMemRetainAllocationHandle", ctypes.c_void_p(address))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", _long(handle))

    def reserve(self, nbytes: int) -> int:
        size, anywhere = ctypes.c_size_t(nbytes), _long(0)
        return self._made(ctypes.c_uint64, "cuMemAddressReserve", size, ctypes.c_size_t(0), anywhere, _long(0))

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", _long(address), ctypes.c_size_t(nbytes))

    def map(self, address: int, nbytes: int, handle: int, pieces: int = 1) -> None:
        piece = nbytes // pieces
        for at in range(address, address + nbytes, piece):
            self._call("cuMemMap", _long(at), ctypes.c_size_t(piece), ctypes.c_size_t(0), _long(handle), _long(0))
        access = ctypes.byref(self._access)
        self._call("cuMemSetAccess", _long(address), ctypes.c_size_t(nbytes), access, ctypes.c_size_t(1))

    def unmap(self, address: int, nbytes: int, pieces: int = 1) -> None:
        piece = nbytes // pieces
        for at in range(address, address + nbytes, piece):
            self._call("cuMemUnmap", _long(at), ctypes.c_size_t(piece))

    def size_at(self, address: int) -> int:
        return self._made(ctypes.c_size_t, "cuPointerGetAttribute", _RANGE_SIZE, _long(address))

    def view(self, address: int, nbytes: int, owner: object) -> Tensor:
        return torch.as_tensor(_Interface(address, nbytes, owner), device=self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _made(self, kind: Any, name: str, *arguments: Any) -> int:
        """Call a function whose first argument is the place of its result."""
        result = kind()
        given = (ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
        self._call(name, ctypes.byref(result), *given)
        return int(result.value)

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            check_status(self._library, getattr(self._library, name)(*arguments), name)


_long = ctypes.c_uint64


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread use the device while another one captures a CUDA graph, whose capture it would else end."""
    if torch.version.hip is None:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    else:
        exchange = ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def check_status(library: Any, status: int, what: str) -> None:
    """Raise RuntimeError with the driver's own words unless ``status`` is 0. ``library``: the driver."""
    if status:
        words = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(words))
        text = (words.value or b"an unknown error").decode()
        raise RuntimeError(f"{what}: expected the CUDA driver to succeed, got error {status}: {text}")


def device_uuid(device: torch.device) -> str:
    """Return the device's own id: processes that see different sets of devices have different indices for one."""
    return str(torch.cuda.get_device_properties(device).uuid)


def refuse_shared_devices(uuids: Mapping[int, str]) -> None:
    """Raise UnsupportedError naming two ranks that use the same device. ``uuids``: of the devices, by rank."""
    first: dict[str, int] = {}
    for b, uuid in uuids.items():
        if (a := first.setdefault(uuid, b)) != b:
            raise UnsupportedError(
                f"expected a device of its own for each rank, got {uuid} on ranks {a} and {b}; give each rank its own"
            )


def refuse_unreachable(uuids: Mapping[int, str]) -> None:
    """Raise UnsupportedError naming two ranks whose devices cannot access each other.

    ``uuids``: of the devices, by rank. Pairs that this process does not see (CUDA_VISIBLE_DEVICES) are left to the
    driver.
    """
    index = {device_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    for a, b in itertools.combinations(uuids, 2):
        ours, theirs = index.get(uuids[a]), index.get(uuids[b])
        if ours is None or theirs is None:
            continue
        for source, target in ((ours, theirs), (theirs, ours)):
            if not torch.cuda.can_device_access_peer(source, target):
                raise UnsupportedError(
                    f"expected ranks {a} and {b} to have devices that access each other's memory, got "
                    "no peer access (NVLink or PCIe); use transport='collective'"
                )
