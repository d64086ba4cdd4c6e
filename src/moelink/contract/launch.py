"""The common part of the launchers: specs relative to the caller's pointers, and the launch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

import torch
import triton.language as tl
from torch import Tensor

from moelink.contract.tensors import EPRouting
from moelink.kernels.launch.grid import Launch
from moelink.kernels.records import CreditNumbers, Peers, RoutingNotes
from moelink.kernels.sync.credit import ep_grant_credits_kernel
from moelink.memory.workspace import RECV

if TYPE_CHECKING:
    from moelink.contract.buffers import EPBuffers


@lru_cache(maxsize=256)
def relative_to(spec: Any, start: int) -> Any:
    """``spec`` for a table of addresses of a region that begins at byte ``start`` of each block, instead of blocks."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    values = {name: value.value if isinstance(value, tl.constexpr) else value for name, value in values.items()}
    moved = {name: value - start if name.startswith("OFFSET_") else value for name, value in values.items()}
    return type(spec)(**moved)


def or_dummy(tensor: Tensor | None, dummy: Tensor) -> Tensor:
    """``tensor``, or in place of None some pointer that the kernel will not follow."""
    return dummy if tensor is None else tensor


def notes_of(ep: EPBuffers, routing: EPRouting) -> RoutingNotes:
    """The caller's tensors, as kernels know them, without the part that only a dispatch over a cached routing would
    read."""
    return RoutingNotes(routing.rows_of_message, routing.message_token, routing.received, ep.spare, routing.slot_of)


P = ParamSpec("P")


class Prepared(Protocol):
    """A launch whose arguments are checked, but not yet against those of an earlier half. Calling it launches."""

    def __call__(self, *, in_turn: bool = False) -> None:
        """Launch. ``in_turn``: ranks share a GPU, and run one after the other."""


class Launching(Protocol[P]):
    """A launcher. Its ``prepare`` takes the same arguments, checks them, and returns a function that launches."""

    prepare: Callable[P, Prepared]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Check the arguments and launch."""


def launching(prepare: Callable[P, Prepared]) -> Launching[P]:
    """Make a launcher of a function that checks its arguments and returns a function that launches."""

    @wraps(prepare)
    def launcher(*args: P.args, **kwargs: P.kwargs) -> None:
        prepare(*args, **kwargs)()

    launcher.prepare = prepare  # type: ignore[attr-defined]
    launcher.__signature__ = inspect.signature(prepare).replace(return_annotation=None)  # type: ignore[attr-defined]
    return launcher  # type: ignore[return-value]


def grant_credits(
    ep: EPBuffers, pointers: Tensor, atomic_counters: Tensor, spec: Any, *, in_turn: bool = False
) -> None:
    """After a receiving half on a device whose ranks run one after the other (CPUs, and with ``in_turn`` GPUs): say
    that it has read. Elsewhere the next launch that sends says so (``kernels.sync.credit``)."""
    if (in_turn or ep.device.type == "cpu") and not spec.ALLREDUCE:
        launch(ep, ep_grant_credits_kernel, pointers, atomic_counters, (), CreditNumbers(ep.me, 1), None, S=spec)


def launch(
    ep: EPBuffers,
    function: Any,
    pointers: Tensor,
    atomic_counters: Tensor,
    records: tuple[Any, ...],
    numbers: Any,
    how: Launch | None,
    **options: Any,
) -> None:
    """Launch ``function`` as ``how`` says on the current stream of ep's device, with ``records`` of the caller's
    tensors."""
    kernel = ep.launcher.kernel(function, numbers.programs, launch=how, **options)
    given = [tensor for record in records for tensor in _tensors(record)]
    with nullcontext() if ep.device.type == "cpu" else torch.cuda.device(ep.device):
        peers = Peers(pointers[RECV], ep.record, atomic_counters)
        ep.launcher.launch(kernel, lambda _: records, numbers, [*given, pointers], peers=peers)


def _tensors(record: Any) -> Iterator[Tensor]:
    """The tensors in a record, tuples of them included."""
    if isinstance(record, Tensor):
        yield record
    else:
        for part in record:
            yield from _tensors(part)
