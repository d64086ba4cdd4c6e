"""Make calls of one kind for the fast path: their common part is decided when the kind is learnt.

A call of a kind has two steps. *prepare* makes its tensors and may fail, for want of memory. *launch* hands the kernel
to the device.

On CUDA a kind (:class:`DirectDispatch`, :class:`DirectCombine`) has a buffer of the kernel's parameters of its own.
prepare writes into it the addresses that may have changed since the kind's call before: those of the caller's tensors
and of the output. Everything else stays there. Most addresses are those of tensors inside the arena. They are written
again only where the allocator returned another arena than last time, which it seldom does in a loop.

On a CPU, where kernels are interpreted, a kind (:class:`InterpretedDispatch`, :class:`InterpretedCombine`) makes the
ordinary objects of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelink.kernels.launch.direct import DirectKernel
from moelink.kernels.launch.launcher import OWN_ADDRESSES
from moelink.kernels.records import CachedRouting, CombineInputs, DispatchInputs, DispatchOutputs, RoutingNotes
from moelink.lease import RowsInPlace
from moelink.output import Blank, DispatchOutput, made
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.symmetric import combine, dispatch, plans
from moelink.transports.symmetric.rank import Rank
from moelink.transports.symmetric.received import Received

DISPATCH_ADDRESSES = (*DispatchInputs._fields, *DispatchOutputs._fields, *RoutingNotes._fields, *CachedRouting._fields)
"""Addresses of the kernel of a dispatch's both roles, behind the launcher's own."""

COMBINE_ADDRESSES = (*CombineInputs._fields, "out", "hook", *RoutingNotes._fields)
"""The same of a combine."""

_X, _IDS, _WEIGHTS = (OWN_ADDRESSES + DISPATCH_ADDRESSES.index(name) for name in ("x", "topk_ids", "topk_weights"))
_Y, _HOME_WEIGHTS, _HOME_IDS, _OUT = (
    OWN_ADDRESSES + COMBINE_ADDRESSES.index(name) for name in ("y", "home_weights", "topk_ids", "out")
)
_OUTPUTS = OWN_ADDRESSES + len(DispatchInputs._fields)
_SMALL = _OUTPUTS + DispatchOutputs._fields.index("row_offsets")
_PLACES = {name: _OUTPUTS + i for i, name in enumerate(DispatchOutputs._fields)}
_PLACES["topk_weights"] = _PLACES["weights"]


Launch = Callable[[int], None]


def _maker(blank: Blank, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that makes tensors of a blank.

    A method of a tensor takes a fifth less time than ``torch.empty_strided``, which gets dtype and device as well.
    """
    like = torch.empty(0, dtype=blank.dtype, device=device)
    return partial(like.new_empty_strided, blank.shape, blank.strides)


class _Direct:
    """Calls of one kind on CUDA.

    Attributes:
        direct, count: the kernel of both roles, its parameters, and its CTAs.
        launch: launches what was prepared on a stream.
        makers: what makes the tensors of a call.
    """

    makers: tuple[Callable[[], Tensor], ...]

    def __init__(self, direct: DirectKernel, count: int, inside: Iterable[tuple[int, int]]) -> None:
        """``inside``: places of addresses that lie inside the arena, and their distance from its begin."""
        self.direct, self.count, self._inside, self._arena_at = direct, count, tuple(inside), -1
        self.launch: Launch = partial(direct.launch, count)

    def _follow(self, at: int) -> None:
        """Write the addresses inside the arena, which now begins at ``at``."""
        addresses = self.direct.addresses
        self._arena_at = -1  # until all are written: an exception may come between
        for place, begin in self._inside:
            addresses[place] = at + begin
        self._arena_at = at


class DirectDispatch(_Direct):
    """Dispatches of one kind on CUDA."""

    def __init__(self, rank: Rank, plan: plans.LaunchPlan, direct: DirectKernel, owner: str) -> None:
        inside = [(_SMALL + i, begin) for i, begin in enumerate(plan.in_arena) if begin >= 0]
        super().__init__(direct, plan.both.count, inside)
        self._plan, self._owner, self._calls = plan, owner, rank.calls
        self._arena = _maker(Blank.of(plan.arena.words), rank.device)
        self._large = tuple((name, _PLACES[name], _maker(blank, rank.device)) for name, blank in plan.large)
        self.makers = (self._arena, *[make for *_, make in self._large])

    def prepare(
        self, x: Tensor, x_at: int, ids: Tensor, ids_at: int, weights: Tensor | None, weights_at: int,
        version: int | None,
    ) -> DispatchOutput:  # fmt: skip
        """Make the output of a call and write its addresses."""
        addresses, memory = self.direct.addresses, self._arena()
        at = memory.data_ptr()
        fields: dict[str, Any] = {"_source": Received(self._plan, self._owner, memory, at, ids, weights, version)}
        for name, place, make in self._large:
            fields[name] = tensor = make()
            addresses[place] = tensor.data_ptr()
        if self._calls is not None:
            fields["_rows"] = RowsInPlace(self._calls, self._plan.in_place)  # type: ignore[arg-type]
        addresses[_X], addresses[_IDS] = x_at, ids_at
        if weights is not None:
            addresses[_WEIGHTS] = weights_at
        if at != self._arena_at:
            self._follow(at)
        return made(DispatchOutput, fields)


class DirectCombine(_Direct):
    """Combines of one kind on CUDA, of rows of one kind of dispatch."""

    def __init__(self, rank: Rank, plan: combine.LaunchPlan, rows: plans.LaunchPlan, direct: DirectKernel) -> None:
        inside = {"row_weights": rows.arena.places["weights"][0]} if "weights" in rows.arena.places else {}
        inside.update(zip(RoutingNotes._fields, rows.notes_layout.first_bytes, strict=True))
        places = [(OWN_ADDRESSES + COMBINE_ADDRESSES.index(name), begin) for name, begin in inside.items()]
        super().__init__(direct, plan.both.count, places)
        self._out = _maker(plan.out, rank.device)
        self.makers = (self._out,)

    def prepare(
        self, y: Tensor, y_at: int, recv: DispatchOutput, ids_at: int, weights_at: int, received: Received
    ) -> Tensor:
        """Make the result of a call and write its addresses."""
        addresses, out = self.direct.addresses, self._out()
        addresses[_Y], addresses[_HOME_IDS], addresses[_OUT] = y_at, ids_at, out.data_ptr()
        if received.weights is not None:
            addresses[_HOME_WEIGHTS] = weights_at
        at = received.at
        if at != self._arena_at:
            self._follow(at)
        return out


class InterpretedDispatch:
    """Dispatches of one kind on a CPU."""

    def __init__(self, rank: Rank, owner: str, max_tokens: int | None) -> None:
        self._rank, self._owner, self._max_tokens = rank, owner, max_tokens
        self._call: dispatch.Dispatch | None = None

    def prepare(
        self, x: Tensor, x_at: int, ids: Tensor, ids_at: int, weights: Tensor | None, weights_at: int,
        version: int | None,
    ) -> DispatchOutput:  # fmt: skip
        """Make the output of a call."""
        request = DispatchRequest(x, ids, weights, max_tokens=self._max_tokens)
        self._call = dispatch.Dispatch(self._rank, request, self._owner)
        return self._call.output

    def launch(self, stream: int) -> None:
        """Launch what was prepared."""
        call, self._call = self._call, None
        assert call is not None
        call.send_and_receive()


class InterpretedCombine:
    """Combines of one kind on a CPU."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._call: combine.Combine | None = None

    def prepare(
        self, y: Tensor, y_at: int, recv: DispatchOutput, ids_at: int, weights_at: int, received: Received
    ) -> Tensor:
        """Make the result of a call."""
        self._call = combine.Combine(self._rank, CombineRequest(y, recv))
        return self._call.out

    def launch(self, stream: int) -> None:
        """Launch what was prepared."""
        call, self._call = self._call, None
        assert call is not None
        call.send_and_receive(0)
