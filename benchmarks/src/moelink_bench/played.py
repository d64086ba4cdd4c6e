"""Play a CUDA device on a CPU: the host does all that it does there in a call, and the driver does nothing.

On a CPU kernels are interpreted, and a call is made otherwise than on a GPU. Here the communicator takes the path of a
GPU: it looks at the stream and the device, finds the direct form of its kernels, and writes their parameters. Only what
it reaches then is played: a launch is a C function that returns at once, and a look at the stream or the device is a
function that returns 0. Tensors are made on the CPU.

What that leaves out: the driver, torch's allocator of device memory, and that caches hold other things on a machine
where a program runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import moelink
from moelink.kernels.launch import constants, row_launch
from moelink.kernels.launch.arguments import flat_addresses, key_of
from moelink.kernels.launch.direct import DirectKernel, Driver, ParameterLayout
from moelink.kernels.launch.launcher import OWN_ADDRESSES, CompiledKernel, Launcher
from moelink.kernels.launch.row_launch import PreparedRows, RowLauncher
from moelink.ops import gradient_communicators
from moelink.rows import common_kernel, eager
from moelink.transports import session, validation
from moelink.transports.build import open_session
from moelink.transports.session import Session
from moelink.transports.symmetric import plans
from moelink.transports.symmetric.fast_path import SymmetricFastPath


def _nothing() -> Any:
    """Return a C function that takes what a launch takes and returns 0: whether its first two arguments are equal."""
    return ctypes.CDLL(None).pthread_equal


class PlayedDriver:
    """libcuda, as far as launches need it."""

    def __init__(self) -> None:
        self.cuLaunchKernelEx = self.cuTensorMapEncodeTiled = _nothing()


class PlayedRowsDriver(Driver):
    """The driver of a kernel on rows, whose parameters have ``sizes``."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(PlayedDriver())
        self.encode_map = lambda *_: 0
        self._sizes = sizes

    def parameters(self, function: int) -> list[tuple[int, int]]:
        return [(0, size) for size in self._sizes]


def prepared_rows(arguments: Sequence[Any]) -> PreparedRows:
    """Return the prepared form of a kernel on rows that was compiled for ``arguments``."""
    kinds: dict[str, str] = {}
    sizes: list[int] = []
    maps = []
    for number, argument in enumerate(arguments):
        if isinstance(argument, row_launch.Block):
            kinds[f"a{number}"] = "tensordesc<fp8e4nv[64,128]>"
            sizes += (128, 4, 4, 8, 8)
            maps.append({"swizzle": 3, "elem_size": 1, "elem_type": 0, "block_size": [64, 128], "fp4_padded": False})
        else:
            kinds[f"a{number}"] = "i32" if isinstance(argument, int) else "*i8"
            sizes.append(4 if isinstance(argument, int) else 8)
    metadata = SimpleNamespace(
        num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0,
        name="played", tensordesc_meta=maps,
    )  # fmt: skip
    source = SimpleNamespace(signature=kinds)
    loaded = SimpleNamespace(metadata=metadata, src=source, packed_metadata=(4, 1, 0), function=7, asm={"ptx": ""})
    made = PreparedRows.of(loaded, arguments, PlayedRowsDriver([*sizes, 8, 8]))
    assert made is not None
    return made


CARD = torch.device("cuda", 0)
ROW_LAUNCH = RowLauncher.launch


def _launch_rows(launcher: RowLauncher, *given: Any, device: torch.device, **options: Any) -> None:
    """Stand for :meth:`RowLauncher.launch`, with the device that is played."""
    ROW_LAUNCH(launcher, *given, device=CARD, **options)


def _place_of(launcher: RowLauncher, tensor: Tensor) -> tuple[int, int] | None:
    """Stand for :meth:`RowLauncher.place_of`."""
    return None if torch.cuda.current_device() or launcher._preparing else (0, abs(0))


def _direct(records: Any, numbers: Any) -> DirectKernel:
    """Return the direct form of a kernel with these arguments."""
    codes = "".join("q" if name == "limit" else "i" for name in numbers._fields)
    layout = ParameterLayout(OWN_ADDRESSES + len(flat_addresses(records(False))), codes)
    return DirectKernel(
        SimpleNamespace(packed_metadata=(4, 1, 0), function=7, asm={"ptx": ""}), layout, Driver(PlayedDriver())
    )


def _launch(
    launcher: Launcher, kernel: CompiledKernel, records: Any, numbers: Any, given: Sequence[Tensor] = ()
) -> None:
    """Stand for :meth:`Launcher.launch`: note the kernel as loaded, and gather a call's addresses."""
    addresses = flat_addresses(records(False))
    loaded = kernel.loaded.get(key_of(given))
    if loaded is None:
        loaded = kernel.loaded[key_of(given)] = None, _direct(records, numbers)
    loaded[1].pack([*launcher._own_addresses, *addresses], numbers)


def _current_device() -> int:
    """Stand for ``torch.cuda.current_device``, which looks first whether CUDA is initialised."""
    return 0 if not torch.cuda.is_initialized() else -1


def _preparing(launcher: Launcher, *, load: bool = True) -> AbstractContextManager[None]:
    """Stand for :meth:`Launcher.preparing`."""
    return nullcontext()


def _takes_kernels(tensor: Tensor) -> bool:
    return True


def _as_on_a_gpu(config: moelink.EPConfig, ids: Tensor) -> None:
    """Stand for ``check_ids``: a router's kernel that is played stores no ids, and on a GPU the host looks at none."""


@contextmanager
def played(**options: Any) -> Iterator[moelink.Communicator]:
    """Return a context with a communicator of one rank, made with ``options``, whose device is played."""
    spec = constants.dispatch_spec

    def at_once(*args: Any, **kind: Any) -> Any:  # as for few tokens on a GPU, where no second launch lays out scales
        return dataclasses.replace(spec(*args, **kind), SCALES_LATER=False)

    launcher = cache(RowLauncher)
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(plans, "dispatch_spec", at_once),
            mock.patch.object(validation, "check_ids", _as_on_a_gpu),
            mock.patch.object(session, "check_ids", _as_on_a_gpu),
            mock.patch.object(Launcher, "launch", _launch),
            mock.patch.object(Launcher, "preparing", _preparing),
            mock.patch.object(torch.cuda, "current_device", _current_device),
            mock.patch.object(eager, "takes_kernels", _takes_kernels),
            mock.patch.object(row_launch, "is_interpreted", bool),
            mock.patch.object(row_launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=abs))),
            mock.patch.object(RowLauncher, "launch", _launch_rows),
            mock.patch.object(RowLauncher, "place_of", _place_of),
            mock.patch.object(RowLauncher, "_prepare", lambda _, kernel, given, *options: prepared_rows(given)),
            mock.patch.object(common_kernel, "row_launcher", launcher),
            mock.patch.object(row_launch, "row_launcher", launcher),
            mock.patch.object(eager, "_launcher", launcher),
        ):
            stack.enter_context(patch)
        ep = stack.enter_context(moelink.init(**options, transport="symmetric", device="cpu"))
        ep._fast_path = _play(ep._session)
        stack.enter_context(mock.patch.object(gradient_communicators, "open_session", _open_played))
        stack.enter_context(mock.patch.object(Session, "fast_path", _play))
        yield ep


def _play(session: Any) -> SymmetricFastPath:
    """Let a session's device be played, and return the fast path of its calls."""
    transport = session.transport
    (rank,) = transport.ranks
    rank.stream, rank._latest_handle, rank._index = SimpleNamespace(synchronize=lambda: None), 0, 0
    rank.launcher._index, rank.launcher._interpreted = 0, False
    rank.launcher._stream_of = abs  # of the device's index, 0
    rank.launcher._own_addresses = [rank.table.data_ptr(), rank.record.data_ptr(), rank.control.data_ptr()]
    transport._on_cpu = False
    quick = SymmetricFastPath(session, transport, rank)
    quick._on_cpu = False
    return quick


def _open_played(*given: Any) -> Session:
    """Stand for ``open_session`` of the communicators of gradients."""
    session = open_session(*given)
    _play(session)
    return session
