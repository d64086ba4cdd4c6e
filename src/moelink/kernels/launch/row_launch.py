"""Launch kernels on rows through the CUDA driver, as :mod:`moelink.kernels.launch.direct` launches the transport's.

A kernel on rows takes tensors, integers that no kernel is specialised for, and its launch constants. Triton's launcher
parses them all at every launch, and makes tensor descriptors anew. Here a kernel is *prepared* once for what Triton
compiles for: its constants and options, and of each tensor the dtype and whether the address is a multiple of 16. All
else may differ from launch to launch: addresses, numbers of rows, the number of programs. They are written into the
parameters only if they are not those of the launch before.

The driver takes an address of each parameter (``kernelParams`` of ``cuLaunchKernelEx``), so a parameter may be anywhere
in memory: here each integer and each address is a word of 8 bytes, of which the driver reads as many as it needs. A
tensor descriptor is five parameters, one of which, the tensor map, the driver encodes (``cuTensorMapEncodeTiled``).

Example: a kernel of a tensor descriptor, an address and an int32 has the words [address, rows, address, int32, columns,
stride, 1] and a tensor map; its parameters are the map, words 1, 4, 5 and 6, then words 2 and 3.

Nothing here keeps a tensor but counters of tiles. A prepared launch has a lock, as threads may launch the same kernel.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from moelink.kernels.launch.arguments import has_hooks
from moelink.kernels.launch.cache_keys import settle_cache_key
from moelink.kernels.launch.device import is_interpreted
from moelink.kernels.launch.direct import Driver, config_of, cuda_driver, launches_directly
from moelink.kernels.launch.replay import Note, Replays
from moelink.kernels.launch.tile_counters import WORDS, TileCounters

_PLAIN = (Tensor, Parameter)
_LARGEST = (1 << 31) - 1
_BYTES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAP_FIELDS = {"swizzle", "elem_size", "elem_type", "block_size", "fp4_padded", "is_im2col"}
"""The fields by which Triton's compiler describes a descriptor; 3.8 added ``is_im2col``."""
_L2_128B = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B, which Triton takes."""


class Block(NamedTuple):
    """A contiguous tensor [R, C] that a kernel loads through a tensor descriptor, and the shape of what it loads.

    A kernel in Gluon names the ``layout`` of a block in shared memory; else Triton's compiler chooses it.
    """

    tensor: Tensor
    shape: tuple[int, int]
    layout: Any = None


def typed(argument: Any) -> Any:
    """Return an argument as Triton takes it."""
    if type(argument) is not Block:
        return argument
    if argument.layout is None:
        return TensorDescriptor.from_tensor(argument.tensor, list(argument.shape))
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor.from_tensor(argument.tensor, list(argument.shape), argument.layout)


class TensorMap:
    """The tensor map of a :class:`Block`.

    Attributes:
        address: of its 128 bytes.
    """

    def __init__(self, block: Block, metadata: dict[str, Any], data_type: int, driver_: Driver) -> None:
        """``metadata``: of Triton's compiler. ``data_type``: CUtensorMapDataType of an element."""
        self._memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self._driver = driver_
        # The driver counts dimensions from the innermost one.
        self._at, self._sizes = ctypes.c_uint64(), (ctypes.c_uint64 * 2)(block.tensor.shape[1], 0)
        strides = (ctypes.c_uint64 * 1)(block.tensor.stride(0) * metadata["elem_size"])
        box, steps = (ctypes.c_uint32 * 2)(*reversed(metadata["block_size"])), (ctypes.c_uint32 * 2)(1, 1)
        self._arguments = (
            ctypes.c_void_p(self.address), data_type, 2, self._at, self._sizes, strides, box, steps, 0,
            metadata["swizzle"], _L2_128B, 0,
        )  # fmt: skip
        self._latest = (0, 0)

    def follow(self, at: int, rows: int) -> None:
        """Describe ``rows`` rows at address ``at``."""
        if self._latest == (at, rows):
            return
        self._latest = (0, 0)
        self._at.value, self._sizes[1] = at, rows
        self._driver.check(self._driver.encode_map(*self._arguments), "cuTensorMapEncodeTiled")
        self._latest = (at, rows)


class PreparedRows:
    """A loaded kernel on rows and its parameters."""

    def __init__(
        self, loaded: Any, driver_: Driver, words: Sequence[int], maps: Sequence[tuple[int, TensorMap]],
        parameters: Sequence[int], values: int,
    ) -> None:  # fmt: skip
        """``words``: of 8 bytes, the first ``values`` of which :meth:`launch` writes. ``maps``: each with the word of
        its address, behind which the number of its rows is. ``parameters``: the word of each, or the map -1 - i."""
        self._loaded, self._driver, self._launch = loaded, driver_, driver_.launch
        self._words, self._values = (ctypes.c_int64 * len(words))(*words), struct.Struct(f"{values}q")
        self._maps = tuple(maps)
        begin = ctypes.addressof(self._words)
        places = [maps[-1 - i][1].address if i < 0 else begin + 8 * i for i in parameters]
        self._config = config_of(loaded, driver_)
        function = ctypes.c_void_p(int(loaded.function))
        self._arguments = (
            ctypes.byref(self._config), function, (ctypes.c_void_p * len(places))(*places), ctypes.c_void_p()
        )  # fmt: skip
        self._lock = threading.Lock()
        self._latest: Sequence[int] | None = None

    @classmethod
    def of(cls, loaded: Any, arguments: Sequence[Any], driver_: Driver) -> PreparedRows | None:
        """Return the prepared form of a loaded kernel that was compiled for ``arguments``, or None where only Triton
        can launch it.

        Warns:
            UserWarning: this release of Triton makes other parameters or descriptors than those known here.
        """
        kinds = [kind for kind in loaded.src.signature.values() if kind != "constexpr"]
        if not launches_directly(loaded.metadata) or len(kinds) != len(arguments):
            return None  # an integer is 1, for which this kernel was specialised
        described = iter(loaded.metadata.tensordesc_meta or ())
        words: list[int] = []
        parameters: list[list[int]] = []
        sizes, maps, constant = [], [], []
        for kind, argument in zip(kinds, arguments, strict=True):
            place = len(words)
            if type(argument) is not Block:
                words.append(0)
                parameters.append([place])
                sizes.append(8 if kind.startswith("*") else _BYTES[kind])
                continue
            made = _map_of(argument, next(described, None), driver_)
            if made is None:
                return None
            words += (0, 0)
            parameters.append([-1 - len(maps), place + 1])
            maps.append((place, made))
            constant.append((parameters[-1], (argument.tensor.shape[1], *argument.tensor.stride())))
            sizes += (_MAP_BYTES, 4, 4, 8, 8)
        values = len(words)
        for parameter, numbers in constant:
            parameter += range(len(words), len(words) + len(numbers))
            words += numbers
        places = [place for parameter in parameters for place in parameter]
        words += (0, 0)  # scratch memory, which these kernels do not use
        places += (len(words) - 2, len(words) - 1)
        found = driver_.parameters(int(loaded.function))
        if found is None or [size for _, size in found] != [*sizes, 8, 8]:
            if found is not None:
                warnings.warn(
                    f"parameters of {loaded.metadata.name}: expected the sizes {[*sizes, 8, 8]}, got {found} with "
                    f"Triton {triton.__version__}; its own launcher launches this kernel, which takes more host time",
                    stacklevel=2,
                )
            return None
        return cls(loaded, driver_, words, maps, places, values)

    def launch(self, values: Sequence[int], count: int, stream: int) -> None:
        """Launch ``count`` programs on ``stream``. ``values``: of each argument the address or the number; of a block
        its address and rows.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        with self._lock:
            if values != self._latest:
                self._latest = None  # until all is written: an exception may come between
                self._values.pack_into(self._words, 0, *values)
                for place, made in self._maps:
                    made.follow(values[place], values[place + 1])
                self._latest = values
            config = self._config
            config.grid_x, config.stream = count, stream
            status = self._launch(*self._arguments)
        if status:
            self._driver.check(status, "launch")


def _map_of(block: Block, metadata: dict[str, Any] | None, driver_: Driver) -> TensorMap | None:
    """Return the map of a block, or None for one that this release of Triton describes in another way.

    Warns:
        UserWarning: it does.
    """
    from triton.backends.nvidia import driver as nvidia  # no other backend has tensor maps

    types, fields = getattr(nvidia, "TMA_DTYPE_DEVICE_TO_HOST", None), {"is_im2col": False, **(metadata or {})}
    if types is None or fields.keys() != _MAP_FIELDS or fields["fp4_padded"] or fields["is_im2col"]:
        warnings.warn(
            f"tensor descriptors: expected the fields {sorted(_MAP_FIELDS)} of a plain one and a table of types, got "
            f"{metadata} and {types} with Triton {triton.__version__}; its own launcher launches this kernel, which "
            "takes more host time",
            stacklevel=2,
        )
        return None
    return TensorMap(block, fields, types[fields["elem_type"]], driver_)


class RowLauncher:
    """Launches of kernels on rows by this process: prepares each once."""

    def __init__(self) -> None:
        self._prepared: dict[Any, PreparedRows | None] = {}
        self._preparing: dict[int, bool] = {}
        self._noting: dict[int, list[Note]] = {}
        self.tile_counters = TileCounters()
        self.replays = Replays()

    @contextmanager
    def preparing(self, *, load: bool = True) -> Iterator[None]:
        """On CUDA: make launches of this thread inside only compile their kernel and load it, as those of a
        :class:`~moelink.kernels.launch.launcher.Launcher` do."""
        self._preparing[threading.get_ident()] = load
        try:
            yield
        finally:
            del self._preparing[threading.get_ident()]

    @contextmanager
    def noting(self) -> Iterator[list[Note]]:
        notes = self._noting[threading.get_ident()] = []
        try:
            yield notes
        finally:
            del self._noting[threading.get_ident()]

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        if is_interpreted() or torch.version.hip is not None or not tensor.is_cuda or self._preparing:
            return None
        index = tensor.get_device()
        return None if torch.cuda.current_device() != index else (index, driver.active.get_current_stream(index))

    def launch(
        self, kernel: Any, arguments: Sequence[Any], S: Any, count: int, *, device: torch.device, fused: bool,
        options: dict[str, Any], counted: bool = False,
    ) -> None:  # fmt: skip
        """Launch ``count`` programs of ``kernel`` on the current stream of ``device``.

        Args:
            kernel: a ``@triton.jit`` function of tensors or descriptors, integers with ``do_not_specialize``, and S.
            arguments: tensors, each a :class:`Block` if the kernel takes a descriptor, and integers.
            fused: products and sums become FMAs.
            options: of the compiler.
            counted: programs take tiles by a counter, the kernel's argument behind these
                (:mod:`moelink.kernels.launch.tile_counters`).
        """
        # None for a launch; else whether its kernel is loaded.
        preparing = self._preparing.get(threading.get_ident()) if self._preparing else None
        given = arguments
        if counted:
            asks = preparing is False
            counter = torch.empty(WORDS, dtype=torch.int32, device=device) if asks else self.tile_counters.of(device)
            arguments = (*arguments, counter)
        plain = is_interpreted() or torch.version.hip is not None or has_hooks()
        call = None if plain else _values_of(arguments)
        if call is not None:
            key, values = call
            where: Any = device.index
            if torch.cuda.current_device() != where:
                with torch.cuda.device(where):
                    self.launch(kernel, given, S, count, device=device, fused=fused, options=options, counted=counted)
                return
            key += (kernel, S, where, fused, *options.items())
            try:
                prepared = self._prepared[key]
            except KeyError:
                if preparing is False:
                    _compile(kernel, arguments, S, fused, options)
                    return
                prepared = self._prepared[key] = self._prepare(kernel, arguments, S, fused, options)
            if preparing is not None:
                return
            if prepared is not None:
                prepared.launch(values, count, driver.active.get_current_stream(where))
                if self._noting:
                    self._note(Note(prepared, values, count, counted))
                return
        if preparing is not None:
            _compile(kernel, arguments, S, fused, options)
            return
        self._note(Note(None, (), count))
        settle_cache_key(kernel)[(count,)](*map(typed, arguments), S=S, enable_fp_fusion=fused, **options)

    def _note(self, note: Note) -> None:
        if (notes := self._noting.get(threading.get_ident())) is not None:
            notes.append(note)

    def _prepare(
        self, kernel: Any, arguments: Sequence[Any], S: Any, fused: bool, options: dict[str, Any]
    ) -> PreparedRows | None:
        """Compile and load a kernel on the current device. Return its prepared form, or None where Triton must launch
        it."""
        for parameter, argument in zip(kernel.params, arguments, strict=False):
            specialised = type(argument) is int and not parameter.do_not_specialize
            assert not specialised, f"{kernel.__name__}: name {parameter.name} in do_not_specialize"
        loaded = _compile(kernel, arguments, S, fused, options)
        loaded._init_handles()
        return PreparedRows.of(loaded, arguments, cuda_driver())


def _compile(kernel: Any, arguments: Sequence[Any], S: Any, fused: bool, options: dict[str, Any]) -> Any:
    """Let Triton compile a kernel."""
    given = map(typed, arguments)
    return settle_cache_key(kernel).warmup(*given, grid=(1,), S=S, enable_fp_fusion=fused, **options)


def _values_of(arguments: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]] | None:
    """Return what a kernel is compiled for, of these arguments, and the words of a launch; None for arguments that only
    Triton knows, such as tensors without memory."""
    key: list[Any] = []
    values: list[int] = []
    for argument in arguments:
        kind = type(argument)
        if kind in _PLAIN:
            at = argument.data_ptr()
            values.append(at)
            key += (argument.dtype, at & 15)
        elif kind is int and 0 <= argument <= _LARGEST:
            values.append(argument)
        elif kind is Block and type(argument.tensor) in _PLAIN:
            tensor = argument.tensor
            at, (rows, columns) = tensor.data_ptr(), tensor.shape
            values += (at, rows)
            # A kernel has one layout of a block, so the key leaves it out.
            key += (tensor.dtype, at & 15, argument.shape, columns, tensor.stride())
        else:
            return None
    return tuple(key), values


@cache
def row_launcher() -> RowLauncher:
    """Return the launcher of this process."""
    return RowLauncher()
