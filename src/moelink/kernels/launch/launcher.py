"""Launch the kernels of one rank. All that saves host time in a launch is here and nowhere else.

The communicator, ``init_devices`` and the launchers of the contract all launch through it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.errors import InterpreterError

from moelink.kernels.launch.arguments import (
    addresses_of,
    flat_addresses,
    has_hooks,
    innermost,
    key_of,
    of_any_value,
    peer_arguments,
)
from moelink.kernels.launch.cache_keys import settle_cache_key
from moelink.kernels.launch.direct import DirectKernel, cuda_driver
from moelink.kernels.launch.grid import Launch, grid
from moelink.kernels.records import Peers
from moelink.memory import Network

OWN_ADDRESSES = len(Peers._fields)
"""Addresses of a kernel that are the launcher's own: they come first."""


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel, with all that does not depend on a call's tensors.

    Attributes:
        function: the ``@triton.jit`` function.
        programs: CTAs that work.
        count: CTAs to launch for that (:func:`moelink.kernels.launch.grid.grid`).
        S: its launch constants.
        options: options of the compiler.
        loaded: the kernel on the device, by the types and alignments of the caller's tensors, and its direct form.
    """

    function: Any
    programs: int
    count: int
    S: Any
    options: dict[str, Any]
    loaded: dict[Any, Any] = field(default_factory=dict)


class Launcher:
    """Launches of one rank: compiles each kernel once, and passes it a call's records.

    Attributes:
        peers: the record that every kernel gets first.
    """

    def __init__(
        self,
        peers: Peers,
        device: torch.device,
        *,
        network: Network,
        num_sms: int = 0,
        available: int = 1,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``num_sms``: the SM limit, 0 for none, of ``available`` SMs. ``guard``: a context that interpreted kernels
        run in."""
        self.peers, self._device, self._network = peers, device, network
        self._num_sms, self._available, self._guard = num_sms, available, guard
        self._index, self._interpreted = device.index, device.type == "cpu"
        self._own = peer_arguments(peers)
        self._own_addresses: list[int] = []
        self._loaded: dict[Any, Any] = {}
        self._preparing, self._loading = False, True

    def kernel(
        self, function: Any, programs: int, *, S: Any, launch: Launch | None = None, num_sms: int | None = None,
        **options: Any,
    ) -> CompiledKernel:  # fmt: skip
        """Prepare ``function`` with ``programs`` working CTAs, compiled as ``launch`` and ``options`` say, within an SM
        limit: ``num_sms``, where S has another than this launcher's, 0 for none.

        On a CPU, and for a refused call, ``launch`` may be None. Products are rounded before they are added, so that
        kernels and torch compute the same bits. Triton up to 3.9 would contract them to FMAs by default.
        """
        budget = self._num_sms if num_sms is None else num_sms
        resident = 1
        if launch is not None:
            options, resident = {**launch.options, **options}, launch.resident
        count = grid(programs, budget, resident=resident, available=self._available)
        return CompiledKernel(function, programs, count, S, {"enable_fp_fusion": False, **options})

    def current_stream(self) -> int:
        """Return the handle of the device's current stream, as launches take it. torch would make an object of it."""
        return self._stream_of(self._index)  # type: ignore[no-any-return]

    @cached_property
    def _stream_of(self) -> Callable[[int], int]:
        """The function that returns the handle of a device's current stream; None without a GPU."""
        return driver.active.get_current_stream  # type: ignore[no-any-return]

    @contextmanager
    def preparing(self, *, load: bool = True) -> Iterator[None]:
        """On CUDA: make launches inside only compile their kernel and load it onto the device, each kernel once.

        Compiling and loading may synchronise a device. That must not happen while a kernel there waits for a peer that
        this process has not launched yet. Without ``load``, launches only ask for their kernel to be compiled
        (:mod:`moelink.transports.ahead`).
        """
        self._preparing, self._loading = not self._interpreted, load
        try:
            with torch.cuda.device(self._device) if self._preparing else nullcontext():
                yield
        finally:
            self._preparing, self._loading = False, True

    def launch(
        self,
        kernel: CompiledKernel,
        records: Callable[[bool], Sequence[Any]],
        numbers: Any,
        given: Sequence[Tensor] = (),
        *,
        peers: Peers | None = None,
    ) -> None:
        """Launch ``kernel`` on the current stream.

        Triton looks a kernel up by the type and alignment of every argument, which costs more than a launch. Here only
        the caller's tensors can differ from call to call, so they alone are the key of a faster look-up. Triton's
        launcher also asks the driver about every tensor, but takes addresses as they are; so tensors are passed as
        addresses (except the error record, which is host memory).

        Args:
            kernel: what :meth:`kernel` returned.
            records: returns the kernel's records between ``peers`` and ``numbers``. With True: tensors of the types
                that the kernel is compiled for. With False: any objects with the same addresses, or the addresses
                themselves.
            numbers: the kernel's record of numbers, which includes the number of CTAs.
            given: those of the records' tensors that are the caller's.
            peers: a record in place of this launcher's own. With another error record, Triton launches the kernel.
        """
        peers = self.peers if peers is None else peers
        if self._interpreted:
            try:
                with self._guard():
                    kernel.function[(kernel.count,)](peers, *records(True), numbers, S=kernel.S)
            except InterpreterError as error:
                raise innermost(error) from None
            return
        key = key_of(given)
        loaded = kernel.loaded.get(key)
        if loaded is None:
            arguments = peers, *records(True), of_any_value(numbers)
            if not self._loading:
                self._compile(kernel, arguments)
                return
            loaded = kernel.loaded[key] = self._load(kernel, arguments, key)
        if self._preparing:
            return
        triton_kernel, direct = loaded
        stream, hooked = self.current_stream(), has_hooks()
        if direct is not None and not hooked and peers.record is self.peers.record:
            direct.pack([*self._addresses_of(peers), *flat_addresses(records(False))], numbers)
            direct.launch(kernel.count, stream)
            return
        where = self._own if peers is self.peers else peer_arguments(peers)
        args = (where, *map(addresses_of, records(False)), numbers, kernel.S)
        if hooked:
            triton_kernel[(kernel.count, 1, 1)](*args, stream=stream)
            return
        # The same as the line above, without the objects that it makes for hooks.
        function, metadata = triton_kernel.function, triton_kernel.packed_metadata
        triton_kernel.run(kernel.count, 1, 1, stream, function, metadata, None, None, None, *args)

    def _addresses_of(self, peers: Peers) -> Sequence[int]:
        """The addresses of ``peers``, whose error record is this launcher's, so the driver need not be asked for it."""
        if peers is self.peers:
            return self._own_addresses
        return peers.table.data_ptr(), self._own_addresses[1], peers.control.data_ptr()

    def direct_form(
        self, kernel: CompiledKernel, given: Sequence[Tensor], addresses: Sequence[int], numbers: Any
    ) -> DirectKernel | None:
        """Return a direct form, with a buffer of its own, of a kernel that was launched with these tensors of the
        caller's, or None where only Triton can launch it.

        Its buffer has the launcher's own addresses (:data:`OWN_ADDRESSES`), then ``addresses``, then ``numbers``.
        """
        _, direct = kernel.loaded.get(key_of(given), (None, None))
        if direct is None:
            return None
        direct = direct.copy()
        direct.pack([*self._own_addresses, *addresses], numbers)
        return direct  # type: ignore[no-any-return]

    def bind(
        self,
        kernel: CompiledKernel,
        records: Callable[[bool], Sequence[Any]],
        numbers: Any,
        given: Sequence[Tensor] = (),
    ) -> Callable[[int], None]:
        """Return a function that launches ``kernel`` with these arguments (:meth:`launch`) on the current stream, whose
        handle it takes, however often it is called.

        On CUDA the kernel is compiled and loaded now. The caller keeps the tensors.
        """

        def again(_: int) -> None:
            self.launch(kernel, records, numbers, given)

        if self._interpreted:
            return again
        with self.preparing():
            again(0)
        direct = self.direct_form(kernel, given, flat_addresses(records(False)), numbers)
        if direct is None:
            return again

        def launch(stream: int) -> None:
            if has_hooks():
                again(stream)
            else:
                direct.launch(kernel.count, stream)

        return launch

    def _load(self, kernel: CompiledKernel, arguments: Sequence[Any], given: Hashable) -> Any:
        """Compile the kernel and load it onto the device; return it with its direct form. Launches that differ only in
        their number of CTAs share both."""
        key = (kernel.function.__name__, kernel.S, *kernel.options.values(), given)
        if key not in self._loaded:
            loaded = self._compile(kernel, arguments)
            loaded._init_handles()
            self._network.load(loaded)
            self._loaded[key] = loaded, self._direct(loaded)
        return self._loaded[key]

    def _compile(self, kernel: CompiledKernel, arguments: Sequence[Any]) -> Any:
        return settle_cache_key(kernel.function).warmup(
            *arguments, grid=(kernel.programs,), S=kernel.S, **kernel.options, **self._network.options
        )

    def _direct(self, loaded: Any) -> DirectKernel | None:
        """Return the direct form of a loaded kernel, or None where Triton must launch it."""
        if torch.version.hip is not None or self._network.options:
            return None
        driver_ = cuda_driver()
        if not self._own_addresses:
            record = driver_.device_address(self.peers.record.data_ptr())
            self._own_addresses = [self.peers.table.data_ptr(), record, self.peers.control.data_ptr()]
        return DirectKernel.of(loaded, driver_)

    def forget(self) -> None:
        """Drop all kernels, and the memory that they hold, and the guard, which refers to the rank."""
        self._loaded, self.peers, self._own = {}, Peers(None, None, None), (0, torch.empty(0), 0)
        self._own_addresses, self._guard = [], nullcontext
