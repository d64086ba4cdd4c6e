"""Repeat eager calls of a known kind with little host time: the fast path of the symmetric transport.

An eager call costs the host far more than its launch: checks, objects that stand for the call, records of arguments.
Most calls differ from an earlier one only in the addresses and values of their tensors. For these, the *kind* of the
call (shapes and dtypes) says that it passes the checks, which kernel runs, and where each address stands in the
parameters of the kernel. The fast path keeps a *prepared call* of each kind. A call on this path looks it up, makes its
output, writes the addresses, and launches.

A prepared call has two steps. *prepare* makes the tensors of a call and may fail, for want of memory. *launch* hands
the kernel to the device. On CUDA (:class:`PreparedDispatch`, :class:`PreparedCombine`) it has a buffer of the kernel's
parameters of its own. prepare writes into it the addresses that may have changed since its call before: those of the
caller's tensors and of the output. Everything else stays there. Most addresses are those of tensors inside the arena.
They are written again only where the allocator returned another arena than last time, which it seldom does in a loop.
On a CPU, where kernels are interpreted, it makes the ordinary objects of a call (:class:`PreparedForInterpreter`).

The fast path takes plain requests whose tensors need no gradient, while nothing is traced. It answers None to any
other, before anything has happened, and the caller makes the call in the ordinary way. It learns a kind from the first
ordinary call of that kind. It takes the steps of the session and the transport in their order: up
to its launch an exception, such as that there is no memory for the output, is told to the peers as a refusal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from moelink.kernels.launch.direct import DirectKernel
from moelink.kernels.launch.launcher import OWN_ADDRESSES, has_hooks
from moelink.kernels.records import CombineInputs, DispatchInputs, RoutingNotes
from moelink.memory.layout import ALIGNMENT
from moelink.output import DispatchOutput, is_captured
from moelink.transports.base import CallRequest, CombineRequest, DispatchRequest, Phase
from moelink.transports.session import Session
from moelink.transports.symmetric import combine, plans
from moelink.transports.symmetric.combine import Combine
from moelink.transports.symmetric.dispatch import ADDRESSES, PLACES, SMALL, Dispatch
from moelink.transports.symmetric.plans import Received
from moelink.transports.symmetric.rank import Rank

COMBINE_ADDRESSES = (*CombineInputs._fields, "out", "hook", *RoutingNotes._fields)
"""Addresses of the kernel of a combine's both roles, behind the launcher's own."""

_X, _IDS, _WEIGHTS = (
    OWN_ADDRESSES + ADDRESSES.index((DispatchInputs, name)) for name in ("x", "topk_ids", "topk_weights")
)
_Y, _HOME_WEIGHTS, _HOME_IDS, _OUT = (
    OWN_ADDRESSES + COMBINE_ADDRESSES.index(name) for name in ("y", "home_weights", "topk_ids", "out")
)

MOST_KINDS = 4096
"""Kinds that are kept. A program with more, such as one whose token count is never the same, is not slower for it."""

At = tuple[int, int, int]
"""Addresses of a call: of x or y, of ids, and of router weights, 0 where there are none."""


class Transport(Protocol):
    """The parts of a symmetric transport that the fast path needs."""

    partly_sent: bool

    def raise_error(self) -> None:
        """Raise the error of the error records, without waiting."""

    def launch_quick(self, phase: Phase, rank: Rank, stream: int, launch: Callable[[int], None]) -> None:
        """Count a call of one local rank and launch it."""


class Prepared(Protocol):
    """A prepared call."""

    def prepare(self, request: Any, at: At, stream: int) -> Any:
        """Make the output of a call and write its addresses. ``stream``: :meth:`Rank.stream_to_go_on`."""

    @property
    def launch(self) -> Callable[[int], None]:
        """A function that launches the prepared call on a stream."""


class _Direct:
    """Calls of one kind on CUDA.

    Attributes:
        direct, count: the kernel of both roles, its parameters, and its CTAs.
        launch: launches the prepared call on a stream.
    """

    def __init__(self, direct: DirectKernel, count: int, inside: Iterable[tuple[int, int]]) -> None:
        """``inside``: places of addresses that lie inside the arena, and their distance from its begin."""
        self.direct, self.count, self._inside, self._arena_at = direct, count, tuple(inside), -1
        self.launch: Callable[[int], None] = partial(direct.launch, count)

    def _follow(self, at: int) -> None:
        """Write the addresses inside the arena, which now begins at ``at``."""
        addresses = self.direct.addresses
        self._arena_at = -1  # until all are written: an exception may come between
        for place, begin in self._inside:
            addresses[place] = at + begin
        self._arena_at = at


class PreparedDispatch(_Direct):
    """Dispatches of one kind on CUDA."""

    def __init__(self, rank: Rank, plan: plans.LaunchPlan, direct: DirectKernel, owner: str) -> None:
        first = OWN_ADDRESSES + SMALL
        super().__init__(
            direct, plan.both.count, [(first + i, begin) for i, begin in enumerate(plan.in_arena) if begin >= 0]
        )
        self._plan, self._owner, self._calls = plan, owner, rank.calls
        self._large = tuple((name, OWN_ADDRESSES + PLACES[name]) for name, _ in plan.large)

    def prepare(self, request: DispatchRequest, at: At, stream: int) -> DispatchOutput:
        """Make the output of a call and write its addresses."""
        addresses, plan, ids = self.direct.addresses, self._plan, request.topk_ids
        # Of a handle that is 0, the default stream, nothing is captured.
        unknown = ids.is_inference() or (stream != 0 and is_captured(ids))
        version = None if unknown else ids._version
        received = Received(plan, self._owner, plan.make_arena(), ids, request.topk_weights, version)  # type: ignore[arg-type]
        output = received.output(self._calls)
        fields = output.__dict__
        for name, place in self._large:
            addresses[place] = fields[name].data_ptr()
        addresses[_X], addresses[_IDS], weights_at = at
        if weights_at:
            addresses[_WEIGHTS] = weights_at
        if received.at != self._arena_at:
            self._follow(received.at)
        return output


class PreparedCombine(_Direct):
    """Combines of one kind on CUDA, of rows of one kind of dispatch."""

    def __init__(self, rank: Rank, plan: combine.LaunchPlan, rows: plans.LaunchPlan, direct: DirectKernel) -> None:
        inside = {"row_weights": rows.arena.places["weights"][0]} if "weights" in rows.arena.places else {}
        inside.update(zip(RoutingNotes._fields, rows.notes_layout.first_bytes, strict=True))
        places = [(OWN_ADDRESSES + COMBINE_ADDRESSES.index(name), begin) for name, begin in inside.items()]
        super().__init__(direct, plan.both.count, places)
        self._make_out = plans.maker(plan.out, rank.device)

    def prepare(self, request: CombineRequest, at: At, stream: int) -> Tensor:
        """Make the result of a call and write its addresses."""
        addresses, out = self.direct.addresses, self._make_out()
        addresses[_Y], addresses[_HOME_IDS], weights_at = at
        addresses[_OUT] = out.data_ptr()
        if weights_at:
            addresses[_HOME_WEIGHTS] = weights_at
        arena = request.recv.__dict__["_source"].at
        if arena != self._arena_at:
            self._follow(arena)
        return out


class PreparedForInterpreter:
    """Calls of one kind on a CPU. ``make``: makes an ordinary call of a request."""

    def __init__(self, make: Callable[[Any], Dispatch | Combine]) -> None:
        self._make = make
        self._call: Dispatch | Combine | None = None

    def prepare(self, request: CallRequest, at: At, stream: int) -> Any:
        """Make the output of a call."""
        self._call = self._make(request)
        return self._call.output

    def launch(self, stream: int) -> None:
        """Launch the prepared call."""
        call, self._call = self._call, None
        assert call is not None
        call.send_and_receive(0)


class SymmetricFastPath:
    """The fast path of a session with one local rank, which ``transport`` makes for ``rank``."""

    def __init__(self, session: Session, transport: Transport, rank: Rank) -> None:
        self._session, self._transport, self._rank = session, transport, rank
        self._most_id = session.configs[0].num_experts - 1
        self._on_cpu = rank.device.type == "cpu"
        self._device = -1 if self._on_cpu else rank.device.index
        self._prepared: dict[Any, Prepared | None] = {}

    def make(self, request: CallRequest) -> Any:
        """Make a call of a known kind and return its result, or do nothing and return None."""
        # Prepared calls are those of kernels that do not stamp.
        if self._rank.trace is not None:
            return None
        prepared = self._prepared.get(kind_of_call(request))
        if prepared is None or has_hooks():
            return None
        gradients = torch.is_grad_enabled()
        if type(request) is DispatchRequest:
            at = self._addresses_of_dispatch(request, gradients)
        else:
            at = self._addresses_of_combine(request, gradients)  # type: ignore[arg-type]
        if at is None:
            return None
        return self._session.within(request.phase, self._launch, (prepared, request, at), lambda: request.over)

    def _launch(self, known: tuple[Prepared, CallRequest, At]) -> Any:
        """Make a call, which is within a call of the session."""
        prepared, request, at = known
        transport, rank = self._transport, self._rank
        if rank.has_error():
            # It is that of an earlier call. No rank makes this one: the peers raise the same error.
            transport.partly_sent = self._session.complete = True
            transport.raise_error()
        stream = rank.stream_to_go_on()
        made = prepared.prepare(request, at, stream)
        transport.partly_sent = self._session.complete = True
        transport.launch_quick(request.phase, rank, stream, prepared.launch)
        if rank.calls is not None and type(made) is DispatchOutput:
            made.rows_in_place.renew()  # type: ignore[union-attr]
        return made

    def _addresses_of_dispatch(self, request: DispatchRequest, gradients: bool) -> At | None:
        """Return the addresses of a dispatch's tensors, or None where kernels cannot take them as they are."""
        ids, weights = request.topk_ids, request.topk_weights
        x_at, ids_at = self._address(request.x, gradients), self._address(ids, False)
        weights_at = 0 if weights is None else self._address(weights, gradients)  # type: ignore[arg-type]
        if x_at < 0 or ids_at < 0 or weights_at < 0 or (self._on_cpu and not self._in_range(ids)):
            return None
        return x_at, ids_at, weights_at

    def _addresses_of_combine(self, request: CombineRequest, gradients: bool) -> At | None:
        """Return the same of a combine, or None also where the session would refuse it or its rows need a gradient."""
        fields = request.recv.__dict__
        received: Received = fields["_source"]
        ids, weights = received.ids, received.weights
        if received.version is not None and ids._version != received.version:
            return None
        if ("_rows" in fields and not fields["_rows"].is_latest) or (gradients and _any_requires_grad(fields)):
            return None
        y_at, ids_at = self._address(request.y, gradients), ids.data_ptr()
        weights_at = 0 if weights is None else weights.data_ptr()
        if y_at < 0 or ids_at % ALIGNMENT or weights_at % ALIGNMENT:
            return None
        return y_at, ids_at, weights_at

    def _address(self, tensor: Tensor, gradients: bool) -> int:
        """Return the address of a tensor that kernels take as it is, or -1 of any other."""
        at = tensor.data_ptr()
        if at % ALIGNMENT or tensor.get_device() != self._device or not tensor.is_contiguous():
            return -1
        return -1 if gradients and tensor.requires_grad else at

    def _in_range(self, ids: Tensor) -> bool:
        """Return whether all ids are in range. On a GPU the kernels find out, as the host would have to wait."""
        return not ids.numel() or (int(ids.min()) >= -1 and int(ids.max()) <= self._most_id)

    def learn(self, request: CallRequest, result: Any) -> None:
        """Note the kind of an ordinary plain call that was made, with its result."""
        key = kind_of_call(request)
        if key is None or key in self._prepared or len(self._prepared) >= MOST_KINDS or self._rank.trace is not None:
            return
        if isinstance(request, DispatchRequest):
            weights = request.topk_weights
            if weights is not None and weights.dtype != self._rank.weight_dtype:  # type: ignore[union-attr]
                return
            given = [tensor for tensor in (request.x, request.topk_ids, weights) if tensor is not None]
            if all(self._address(tensor, True) >= 0 for tensor in given):  # type: ignore[arg-type]
                self._prepared[key] = self._prepare_dispatch(request, given)  # type: ignore[arg-type]
            return
        call = Combine(self._rank, dataclasses.replace(request, out=result))
        if all(self._address(tensor, True) >= 0 for tensor in call.given):
            self._prepared[key] = self._prepare_combine(request, call)

    def _prepare_dispatch(self, request: DispatchRequest, given: list[Tensor]) -> Prepared | None:
        rank, plan, owner = self._rank, Dispatch.plan_of(self._rank, request), self._session.identity
        if plan.layout is not None:
            return None
        if self._on_cpu:
            return PreparedForInterpreter(lambda request: Dispatch(rank, request, owner))
        direct = rank.launcher.direct_form(plan.both, given, [rank.nothing_at] * len(ADDRESSES), plan.fused)
        return None if direct is None else PreparedDispatch(rank, plan, direct, owner)

    def _prepare_combine(self, request: CombineRequest, call: Combine) -> Prepared | None:
        rank, rows = self._rank, request.recv.__dict__["_source"].plan
        if len(call.passes) > 1:
            return None
        if self._on_cpu:
            return PreparedForInterpreter(partial(Combine, rank))
        ((both, _, numbers, given),) = call.launches()
        direct = rank.launcher.direct_form(both, given, [rank.nothing_at] * len(COMBINE_ADDRESSES), numbers)
        return None if direct is None else PreparedCombine(rank, call.launch_plan, rows, direct)


def kind_of_call(request: CallRequest) -> Any:
    """Return the key that calls of one kind have in common, or None if the call of ``request``, which is plain, has no
    kind."""
    if type(request) is DispatchRequest:
        x, ids, weights, bound = request.x, request.topk_ids, request.topk_weights, request.max_tokens
        if type(x) is not Tensor or type(ids) is not Tensor or not (bound is None or type(bound) is int):
            return None
        if weights is None:
            return x.shape, x.dtype, ids.shape, ids.dtype, bound
        if type(weights) is not Tensor:
            return None
        return x.shape, x.dtype, ids.shape, ids.dtype, bound, weights.shape, weights.dtype
    y, recv = request.y, request.recv  # type: ignore[union-attr]
    if type(recv) is not DispatchOutput or type(y) is not Tensor:
        return None
    received: Received | None = recv.__dict__.get("_source")
    if received is None or received.again is not None:
        return None
    # A plan belongs to one rank of one communicator, so no kind is found for the output of another.
    return received.plan, y.shape, y.dtype, received.ids.dtype


def _any_requires_grad(fields: dict[str, Any]) -> bool:
    """Return whether a tensor of an output requires grad. Fields that nobody has looked at do not."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in fields.values())
