"""Bounds of kernels interpreted on a CPU: an access outside every known range raises instead of corrupting memory.

Triton's interpreter copies from and to any address: a wrong one is a segmentation fault or, worse, a silent write into
a neighbour. While :func:`guard_accesses` is entered, every load, store and atomic is checked: each address must lie,
with the whole element, in a named range or in a tensor passed to the kernel, and be a multiple of the element's size.

For debugging (``MOELINK_DEBUG=1``) and tests; import it only then, and only with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from moelink.errors import MoelinkError, UnsupportedError

if TYPE_CHECKING:
    from moelink.memory.blocks import SymmetricMemory
    from moelink.memory.layout import RegionTable

_ENTRY_POINTS = {
    "create_masked_load": "load",
    "create_masked_store": "store",
    "create_atomic_rmw": "atomic",
    "create_atomic_cas": "atomic",
    "create_atomic_load": "load",  # newer versions of Triton
    "create_atomic_store": "store",
    "create_atomic_poll": "load",
}


@dataclass(frozen=True)
class AccessRange:
    """``nbytes`` bytes from ``address`` on that kernels may touch: array ``name`` of ``rank`` (None: of no rank)."""

    name: str
    rank: int | None
    address: int
    nbytes: int

    @property
    def end(self) -> int:
        """First address after the range."""
        return self.address + self.nbytes

    def __str__(self) -> str:
        owner = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.name!r}{owner} [{self.address:#x}, {self.end:#x})"


def region_ranges(table: RegionTable, memory: SymmetricMemory) -> list[AccessRange]:
    """Return every region of ``table`` in every block that this process can address; padding is in no range."""
    pointers = memory.pointers.tolist()
    return [
        AccessRange(region.name, rank, base + region.offset, region.nbytes)
        for rank, base in enumerate(pointers) if base
        for region in table if region.nbytes
    ]  # fmt: skip


@contextmanager
def guard_accesses(ranges: Iterable[AccessRange]) -> Iterator[None]:
    """Check every access of interpreted kernels of this process against ``ranges`` until the block ends.

    Guards add up: ranges of every entered guard are legal, so each communicator of a process can have its own. Tensors
    passed to a kernel are legal during its launch, except for a tensor that overlaps a named range (a whole block). The
    last guard to leave restores the interpreter.

    Raises:
        UnsupportedError: kernels are compiled, not interpreted.
        MoelinkError: from the launch; names kernel, program, kind of access, address and the nearest range.

    Example: with one range ``AccessRange("counts", 1, 0x1000, 16)``, a store of int32 at 0x1010 by program (2, 0, 0) of
    kernel ``send`` raises "store by program (2, 0, 0) of send: expected addresses in known ranges, got 1 of 1 addresses
    outside every known range, the first, 0x1010 (4 bytes), 0 bytes after the end of 'counts' of rank 1 [0x1000,
    0x1010); correct the kernel's offset or mask".
    """
    if not isinstance(tl.sum, interpreter.InterpretedFunction):  # so are this process's kernels, then
        raise UnsupportedError(
            "guard_accesses: expected interpreted kernels, got compiled ones, whose accesses cannot be checked; set "
            "TRITON_INTERPRET=1 before anything imports triton"
        )
    token = object()
    _known[token] = tuple(r for r in ranges if r.nbytes)
    _install()
    try:
        yield
    finally:
        del _known[token]
        if not _known:
            _uninstall()


# Triton's interpreter is one object per process, and so are its patches and the legal ranges.
_known: dict[object, tuple[AccessRange, ...]] = {}
_arguments: dict[object, tuple[AccessRange, ...]] = {}
_originals: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
_kernel: ContextVar[str] = ContextVar("moelink_kernel", default="a kernel")


def _install() -> None:
    """Patch the interpreter's entry points, unless they are patched."""
    if _originals:
        return
    for name, kind in _ENTRY_POINTS.items():
        if hasattr(interpreter.InterpreterBuilder, name):
            _patch(interpreter.InterpreterBuilder, name, functools.partial(_checked, kind))
    _patch(interpreter.GridExecutor, "__call__", _with_arguments)


def _patch(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    replacement = make(original)
    _originals[owner, name] = (original, replacement)
    setattr(owner, name, replacement)


def _uninstall() -> None:
    """Put the entry points back. A patch that other code has wrapped stays, and checks nothing."""
    for (owner, name), (original, replacement) in _originals.items():
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)
    _originals.clear()


def _checked(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original``, an entry point of the interpreter, behind a check of its addresses."""
    names = list(inspect.signature(original).parameters)
    at_pointers = names.index("ptrs" if "ptrs" in names else "ptr")
    at_mask = names.index("mask") if "mask" in names else None

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        def argument(index: int) -> Any:
            return args[index] if index < len(args) else kwargs.get(names[index])

        if _known:
            _check(kind, args[0], argument(at_pointers), None if at_mask is None else argument(at_mask))
        return original(*args, **kwargs)

    return call


def _check(kind: str, builder: Any, pointers: Any, mask: Any) -> None:
    """Raise MoelinkError unless every unmasked address is aligned and inside a known range."""
    addresses = np.asarray(pointers.data).astype(np.uint64).ravel()
    if mask is not None:
        addresses = addresses[np.broadcast_to(np.asarray(mask.data, dtype=bool), np.shape(pointers.data)).ravel()]
    if not addresses.size:
        return
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    known = [r for ranges in (*_known.values(), *_arguments.values()) for r in ranges]
    # Subtracting from below wraps around to a huge number, so that one comparison checks both ends.
    legal = np.zeros(addresses.shape, dtype=bool)
    for r in known:
        if r.nbytes >= size:
            legal |= addresses - np.uint64(r.address) <= np.uint64(r.nbytes - size)
        if legal.all():
            break
    who = f"{kind} by program {tuple(builder.grid_idx)} of {_kernel.get()}"
    if not legal.all():
        first = int(addresses[~legal][0])
        raise MoelinkError(
            f"{who}: expected addresses in known ranges, got {int((~legal).sum())} of {addresses.size} addresses "
            f"outside every known range, the first, {first:#x} ({size} bytes), {_nearest(first, size, known)}; "
            "correct the kernel's offset or mask"
        )
    crooked = addresses[addresses % np.uint64(size) != 0]
    if crooked.size:
        raise MoelinkError(
            f"{who}: expected addresses that are multiples of the element's {size} bytes, got {int(crooked[0]):#x}; "
            "correct the kernel's offset"
        )


def _nearest(address: int, size: int, known: list[AccessRange]) -> str:
    """Describe the place of ``address`` relative to the closest range."""
    if not known:
        return "with no range known"
    nearest = min(known, key=lambda r: max(r.address - address, address - r.end, 0))
    if address < nearest.address:
        return f"{nearest.address - address} bytes before the start of {nearest}"
    if address >= nearest.end:
        return f"{address - nearest.end} bytes after the end of {nearest}"
    return f"{address + size - nearest.end} bytes of it past the end of {nearest}"


def _with_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original``, the launch of a grid, with its tensors legal, and moelink's errors unwrapped of Triton's."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = object()
        _arguments[key] = tuple(_tensor_ranges([*args, *kwargs.values()]))
        reset = _kernel.set(getattr(self.fn, "__name__", "a kernel"))
        try:
            return original(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            inner: BaseException = error
            while isinstance(inner, interpreter.InterpreterError) and inner.__cause__ is not None:
                inner = inner.__cause__
            if isinstance(inner, MoelinkError):
                raise inner from None
            raise
        finally:
            _kernel.reset(reset)
            del _arguments[key]

    return call


def _tensor_ranges(arguments: Iterable[Any]) -> Iterator[AccessRange]:
    """Yield the bytes of each tensor among ``arguments``, also in tuples and descriptors, that overlaps no named
    range."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _tensor_ranges(argument)
        elif isinstance(getattr(argument, "base", None), torch.Tensor):
            yield from _tensor_ranges([argument.base])
        elif isinstance(argument, torch.Tensor) and argument.numel():
            last = sum((n - 1) * abs(s) for n, s in zip(argument.shape, argument.stride(), strict=True))
            r = AccessRange("a tensor argument", None, argument.data_ptr(), (last + 1) * argument.element_size())
            named = (n for ranges in _known.values() for n in ranges)
            if not any(n.address < r.end and r.address < n.end for n in named):
                yield r
