"""Bring the arguments of a launch into the form that Triton's launcher, or the driver, takes without asking the driver
about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.errors import InterpreterError

from moelink.kernels.records import Peers

_ANY_NUMBER, _ANY_WIDE_NUMBER = 3, (1 << 40) + 3
"""Numbers that no kernel is specialised for: neither 1 nor a multiple of 16, of 32 and of 64 bits."""
_WIDE = ("limit", "call", "expected", "got")
"""Fields of 64 bits: nanoseconds, numbers of calls, and the counts or the mismatch that describe a failure."""


def innermost(error: BaseException) -> BaseException:
    """Return what a kernel raised, without the error that Triton's interpreter puts around it at each level."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def addresses_of(record: Any) -> Any:
    """Return the addresses of tensors: of one, or of those in a (nested) tuple. An address is returned unchanged."""
    if isinstance(record, tuple):
        # The most frequent types are tested first; the call below handles subclasses of Tensor.
        return tuple([t.data_ptr() if type(t) is Tensor else t if type(t) is int else addresses_of(t) for t in record])
    return record.data_ptr() if isinstance(record, Tensor) else record


def flat_addresses(records: Sequence[Any]) -> list[int]:
    """Return the addresses of the tensors in ``records``, in order and without their nesting.

    >>> flat_addresses([(1, (2, 3)), 4, (5,)])
    [1, 2, 3, 4, 5]
    """
    flat: list[int] = []
    for part in records:
        if type(part) is int:
            flat.append(part)
        elif isinstance(part, tuple):
            flat += flat_addresses(part)
        else:
            flat.append(part.data_ptr())
    return flat


def peer_arguments(peers: Peers) -> tuple[int, Tensor, int]:
    """``peers`` as the driver's launcher takes them: it must ask about the record, which is host memory."""
    return peers.table.data_ptr(), peers.record, peers.control.data_ptr()


def key_of(given: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for, of the caller's tensors."""
    return (*[t.dtype for t in given], *[t.data_ptr() % 16 for t in given])


def has_hooks() -> bool:
    """Return whether a profiler wants to hear of launches. If Triton has no chain of hooks there, Triton launches."""
    hooks = knobs.runtime
    try:
        return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)  # type: ignore[union-attr]
    except AttributeError:
        return True


def of_any_value(numbers: Any) -> Any:
    """Return ``numbers`` with values that no kernel is specialised for.

    Triton 3.6 specialises the integers of a tuple for their values and ignores ``do_not_specialize`` for them. A call
    with other values would compile again.
    """
    return type(numbers)(*[_ANY_WIDE_NUMBER if name in _WIDE else _ANY_NUMBER for name in numbers._fields])
