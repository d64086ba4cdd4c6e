"""Launch a compiled kernel through the CUDA driver, with parameters in one buffer.

Triton's launcher takes every argument of a kernel as a Python object, parses them all, and asks the driver about
addresses of host memory. Kernels here have about 50 arguments, most of which are the same at every launch. So this
module keeps the bytes of all parameters of a kernel, and writes only what changes before it calls
``cuLaunchKernelEx``. The driver copies the buffer before the call returns, so the next launch may overwrite it.

The call takes four arguments, which are made once: :mod:`ctypes` needs 0.4 microseconds for these, and 1.9 for the
eleven integers of ``cuLaunchKernel``.

The parameters of a kernel are the leaves of its signature in order, then two addresses of scratch memory, which these
kernels do not use. Each has its natural alignment, as the members of a C struct have. :meth:`DirectKernel.of` compares
this with what the driver says of the loaded kernel. It returns None where they differ: then Triton launches the kernel.

Example: two addresses, an int32 and an int64 lie at bytes 0, 8, 16 and 24, the scratch addresses at 32 and 40.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton

from moelink.memory.driver import check_status

_CODES = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
_ADDRESS = "Q"
_SCRATCH = 2
_DEVICE_POINTER = 3
"""CU_POINTER_ATTRIBUTE_DEVICE_POINTER."""
_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the launch may start before the one before it has ended."""
_WAITS = "griddepcontrol.wait"
"""The instruction with which a kernel waits for the launch before it (``kernels.sync.dependent_launch``)."""
_DEPENDENT_IN_GRAPHS = 12030
"""The first version of the driver that captures such launches into CUDA graphs."""


def leaves(signature: Any) -> Iterator[str]:
    """Return the types of a signature in order: records are tuples, and a dict has them by argument.

    >>> list(leaves({"peers": ("*i64", "*i64"), "numbers": ("i32", ("i64",)), "S": "constexpr"}))
    ['*i64', '*i64', 'i32', 'i64']
    """
    if isinstance(signature, dict):
        signature = tuple(kind for kind in signature.values() if kind != "constexpr")
    if isinstance(signature, tuple):
        for kind in signature:
            yield from leaves(kind)
    else:
        yield signature


@dataclass(frozen=True)
class ParameterLayout:
    """Where the parameters of a kernel are.

    Attributes:
        addresses: how many addresses come first.
        numbers: the numbers behind them, as codes of :mod:`struct`.
    """

    addresses: int
    numbers: str

    @classmethod
    def of(cls, signature: Any) -> ParameterLayout | None:
        """Return the layout of kernels with this signature, or None if it is not addresses and then integers.

        >>> ParameterLayout.of({"x": "*bf16", "numbers": ("i32", "i64")})
        ParameterLayout(addresses=1, numbers='iq')
        >>> ParameterLayout.of({"scale": "fp32", "x": "*bf16"}) is None
        True
        """
        kinds = list(leaves(signature))
        addresses = next((i for i, kind in enumerate(kinds) if not kind.startswith("*")), len(kinds))
        numbers = kinds[addresses:]
        if any(kind not in _CODES for kind in numbers):
            return None
        return cls(addresses, "".join(_CODES[kind] for kind in numbers))

    @property
    def format(self) -> str:
        """All parameters, as :mod:`struct` packs them with natural alignment."""
        return f"@{_ADDRESS * self.addresses}{self.numbers}{_ADDRESS * _SCRATCH}"

    @property
    def places(self) -> list[tuple[int, int]]:
        """Offset and size of each parameter.

        >>> ParameterLayout(1, "iq").places
        [(0, 8), (8, 4), (16, 8), (24, 8), (32, 8)]
        """
        places, format_ = [], self.format
        for end in range(2, len(format_) + 1):
            size = struct.calcsize(format_[end - 1])
            places.append((struct.calcsize(format_[:end]) - size, size))
        return places


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the CUDA driver: its name, and a value of up to 64 bytes whose first integer counts."""

    _fields_ = [("name", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the CUDA driver: grid, block, stream and attributes of a launch."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")],
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


class Driver:
    """The functions of the CUDA driver that launches need."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.launch = library.cuLaunchKernelEx  # without argtypes: the arguments are objects of ctypes already
        self._parameter = getattr(library, "cuFuncGetParamInfo", None)
        self.encode_map = getattr(library, "cuTensorMapEncodeTiled", None)

    def parameters(self, function: int) -> list[tuple[int, int]] | None:
        """Return offset and size of each parameter of a loaded kernel, or None where the driver cannot say."""
        if self._parameter is None:
            return None
        offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), []
        place = ctypes.byref(offset), ctypes.byref(size)
        while not self._parameter(ctypes.c_void_p(function), ctypes.c_size_t(len(found)), *place):
            found.append((offset.value, size.value))
        return found

    def has_dependent_launches(self) -> bool:
        """Return whether launches may start before the one before them has ended, also in CUDA graphs."""
        version = ctypes.c_int()
        self.check(self._library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        return version.value >= _DEPENDENT_IN_GRAPHS

    def device_address(self, address: int) -> int:
        """Return the address by which the device reaches pinned host memory."""
        found = ctypes.c_uint64()
        self.check(
            self._library.cuPointerGetAttribute(ctypes.byref(found), _DEVICE_POINTER, ctypes.c_uint64(address)),
            "cuPointerGetAttribute",
        )
        return found.value

    def check(self, status: int, what: str) -> None:
        """Raise RuntimeError with the driver's own words unless ``status`` is 0."""
        check_status(self._library, status, what)


@cache
def cuda_driver() -> Driver:
    """Return the driver of this process."""
    return Driver(ctypes.CDLL("libcuda.so.1"))


def launches_directly(metadata: Any) -> bool:
    """Return whether a kernel with this metadata of Triton's compiler needs nothing but its parameters to be launched:
    neither clusters, nor attributes, nor scratch memory."""
    attributes = metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl
    return not (attributes or metadata.global_scratch_size or metadata.profile_scratch_size)


def config_of(loaded: Any, driver: Driver) -> LaunchConfig:
    """Return the configuration of launches of a loaded kernel. They may start before the one before them has ended if
    the kernel waits for it."""
    num_warps, _, shared = loaded.packed_metadata
    early = LaunchAttribute(_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
    dependent = _WAITS in loaded.asm["ptx"] and driver.has_dependent_launches()
    return LaunchConfig(1, 1, 1, 32 * num_warps, 1, 1, shared, None, ctypes.pointer(early), int(dependent))


class DirectKernel:
    """A loaded kernel and the buffer of its parameters.

    Attributes:
        addresses: the addresses in the buffer, which may be written one by one.
    """

    def __init__(self, loaded: Any, layout: ParameterLayout, driver: Driver) -> None:
        self._loaded, self._layout = loaded, layout  # the former keeps the device's copy of the kernel
        self._driver, self._launch = driver, driver.launch
        self._addresses = struct.Struct(f"={_ADDRESS * layout.addresses}")
        begin = self._addresses.size
        # Numbers start at a multiple of 8 bytes, so their alignment is that of a struct of their own.
        self._numbers, self._begin = struct.Struct(f"@{layout.numbers}"), begin
        size = struct.calcsize(layout.format)
        self._buffer = ctypes.create_string_buffer(size)
        self.addresses = memoryview(self._buffer).cast("B")[:begin].cast(_ADDRESS)
        self._size = ctypes.c_size_t(size)
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self._buffer), 2, ctypes.addressof(self._size), 0)
        self._config = config_of(loaded, driver)
        function = ctypes.c_void_p(int(loaded.function))
        self._arguments = ctypes.byref(self._config), function, ctypes.c_void_p(), extra
        self._latest: Any = None

    @classmethod
    def of(cls, loaded: Any, driver: Driver) -> DirectKernel | None:
        """Return the direct form of a kernel that Triton has loaded, or None where only Triton can launch it.

        Warns:
            UserWarning: the driver names other parameters than this release of Triton is known to make.
        """
        metadata = loaded.metadata
        layout = ParameterLayout.of(loaded.src.signature)
        if layout is None or not launches_directly(metadata):
            return None
        if (found := driver.parameters(int(loaded.function))) != layout.places:
            if found is not None:
                warnings.warn(
                    f"parameters of {metadata.name}: expected {layout.places} as offsets and sizes, got {found} with "
                    f"Triton {triton.__version__}; its own launcher launches this kernel, which takes more host time",
                    stacklevel=2,
                )
            return None
        return cls(loaded, layout, driver)

    def copy(self) -> DirectKernel:
        """Return another direct form of the kernel, with a buffer of its own that begins with the same parameters."""
        other = DirectKernel(self._loaded, self._layout, self._driver)
        other._buffer.raw = self._buffer.raw
        return other

    def pack(self, addresses: Sequence[int], numbers: Any) -> None:
        """Write the parameters of the launches that follow. A record of numbers that was the last one is not written
        again."""
        self._addresses.pack_into(self._buffer, 0, *addresses)
        if numbers is not self._latest:
            self._numbers.pack_into(self._buffer, self._begin, *numbers)
            self._latest = numbers

    def launch(self, count: int, stream: int) -> None:
        """Launch ``count`` CTAs on ``stream`` with the parameters that are in the buffer.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        config = self._config
        config.grid_x, config.stream = count, stream
        status = self._launch(*self._arguments)
        if status:
            self._driver.check(status, "launch")
