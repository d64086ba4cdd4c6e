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

The fast path takes calls without options while nothing is traced, and records no gradient of them. To any other call
it answers None, before anything has happened, and the caller makes the call in the ordinary way. It learns a kind from
the first ordinary call of that kind. It takes the steps of the session and the transport in their order: up to its
launch an exception, such as that there is no memory for the output, is told to the peers as a refusal. Its calls have
the work of :meth:`Session.within` in their lines and make no request, because each further function and object costs
host time.

Gradients travel over the routing of a dispatch that another communicator may have made (:mod:`moelink.ops.nodes`): rows
that are summed without weights, and rows of a dispatch again. Calls of every kind of these take this path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import forward_ad

from moelink.kernels.launch.arguments import has_hooks
from moelink.kernels.launch.direct import DirectKernel
from moelink.kernels.launch.launcher import OWN_ADDRESSES
from moelink.kernels.records import CachedRouting, CombineInputs, DispatchInputs, DispatchOutputs, RoutingNotes
from moelink.lease import RowsInPlace
from moelink.memory.layout import ALIGNMENT
from moelink.output import Blank, DispatchOutput, is_captured, made
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
_TOKENS = OWN_ADDRESSES + PLACES["tokens"]
_Y, _HOME_WEIGHTS, _HOME_IDS, _OUT = (
    OWN_ADDRESSES + COMBINE_ADDRESSES.index(name) for name in ("y", "home_weights", "topk_ids", "out")
)

MOST_KINDS = 4096
"""Kinds that are kept. A program with more, such as one whose token count is never the same, is not slower for it."""


class Transport(Protocol):
    """The parts of a symmetric transport that the fast path needs."""

    partly_sent: bool

    def raise_error(self) -> None:
        """Raise the error of the error records, without waiting."""

    def launch_quick(self, phase: Phase, rank: Rank, stream: int, launch: Callable[[int], None]) -> None:
        """Count a call of one local rank and launch it."""


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
        self._plan, self._owner, self._calls, self._absent = plan, owner, rank.calls, rank.absent
        self._large = tuple((name, OWN_ADDRESSES + PLACES[name], make) for name, make in plan.make_large)

    def prepare(
        self, x: Tensor, x_at: int, ids: Tensor, ids_at: int, weights: Tensor | None, weights_at: int,
        version: int | None,
    ) -> DispatchOutput:  # fmt: skip
        """Make the output of a call and write its addresses."""
        addresses, plan = self.direct.addresses, self._plan
        received = Received(plan, self._owner, plan.make_arena(), ids, weights, version, absent=self._absent)
        fields: dict[str, Any] = {"_source": received}
        for name, place, make in self._large:
            fields[name] = tensor = make()
            addresses[place] = tensor.data_ptr()
        if self._calls is not None:
            fields["_rows"] = RowsInPlace(self._calls, plan.in_place)  # type: ignore[arg-type]
        addresses[_X], addresses[_IDS] = x_at, ids_at
        if weights is not None:
            addresses[_WEIGHTS] = weights_at
        if received.at != self._arena_at:
            self._follow(received.at)
        return made(DispatchOutput, fields)


class PreparedRowsAgain(_Direct):
    """Dispatches of one kind on CUDA over the routing of one kind of dispatch, of which the rows alone are kept."""

    def __init__(self, call: Dispatch, earlier: plans.LaunchPlan, direct: DirectKernel) -> None:
        begins = dict(zip(RoutingNotes._fields, earlier.notes_layout.first_bytes, strict=True))
        read: dict[Any, int] = {(RoutingNotes, name): begin for name, begin in begins.items() if name != "received"}
        read[CachedRouting, "received"] = begins["received"]
        read[CachedRouting, "counts"] = earlier.arena.places["counts"][0]
        plan, device = call.launch_plan, call.rank.device
        super().__init__(
            direct, plan.both.count, [(OWN_ADDRESSES + ADDRESSES.index(each), begin) for each, begin in read.items()]
        )
        small, own = plan.in_arena[: len(DispatchOutputs._fields) - 2], 4 * plan.arena.words
        self._written = [(OWN_ADDRESSES + SMALL + i, begin) for i, begin in enumerate(small) if begin >= 0]
        self._written.append((OWN_ADDRESSES + ADDRESSES.index((RoutingNotes, "received")), own))
        self._make_arena = plans.maker(Blank.of(plan.arena.words + call.notes.parts.received.numel()), device)
        rows = call.output.tokens
        self._make_rows = plans.maker(Blank.of(*rows.shape, dtype=rows.dtype), device)

    def prepare(self, x: Tensor, x_at: int, received: Received, ids_at: int) -> tuple[Tensor, Tensor]:
        """Make the rows of a call and write its addresses. Returns the rows, and what must live until the launch."""
        addresses, rows, arena = self.direct.addresses, self._make_rows(), self._make_arena()
        at = arena.data_ptr()
        for place, begin in self._written:
            addresses[place] = at + begin
        addresses[_X], addresses[_IDS], addresses[_TOKENS] = x_at, ids_at, rows.data_ptr()
        if received.at != self._arena_at:
            self._follow(received.at)
        return rows, arena


class PreparedCombine(_Direct):
    """Combines of one kind on CUDA, of rows of one kind of dispatch."""

    def __init__(
        self, rank: Rank, plan: combine.LaunchPlan, rows: plans.LaunchPlan, direct: DirectKernel, weigh: bool
    ) -> None:
        weighed = weigh and "weights" in rows.arena.places
        inside = {"row_weights": rows.arena.places["weights"][0]} if weighed else {}
        inside.update(zip(RoutingNotes._fields, rows.notes_layout.first_bytes, strict=True))
        places = [(OWN_ADDRESSES + COMBINE_ADDRESSES.index(name), begin) for name, begin in inside.items()]
        super().__init__(direct, plan.both.count, places)
        self._make_out = plans.maker(plan.out, rank.device)

    def prepare(
        self, y: Tensor, y_at: int, recv: DispatchOutput, ids_at: int, weights_at: int, received: Received
    ) -> Tensor:
        """Make the result of a call and write its addresses."""
        addresses, out = self.direct.addresses, self._make_out()
        addresses[_Y], addresses[_HOME_IDS], addresses[_OUT] = y_at, ids_at, out.data_ptr()
        if weights_at:
            addresses[_HOME_WEIGHTS] = weights_at
        if received.at != self._arena_at:
            self._follow(received.at)
        return out


class PreparedForInterpreter:
    """Calls of one kind on a CPU. ``make``: makes an ordinary call of its tensors. ``rows``: of a dispatch over an
    earlier routing, as :class:`PreparedRowsAgain`."""

    def __init__(self, make: Callable[..., Dispatch | Combine], rows: bool = False) -> None:
        self._make, self._rows = make, rows
        self._call: Dispatch | Combine | None = None

    def prepare(self, first: Tensor, _: int, second: Any, __: int, third: Any = None, *rest: Any) -> Any:
        """Make the output of a call, whose tensors stand between addresses."""
        self._call = self._make(first, second, third)
        output: Any = self._call.output
        return (output.tokens, output) if self._rows else output

    def launch(self, stream: int) -> None:
        """Launch the prepared call."""
        call, self._call = self._call, None
        assert call is not None
        call.send_and_receive(0)


class SymmetricFastPath:
    """The fast path of a session with one local rank, which ``transport`` makes for ``rank``."""

    def __init__(self, session: Session, transport: Transport, rank: Rank) -> None:
        self._session, self._transport, self._rank = session, transport, rank
        self._owner = session.identity
        self._most_id = session.configs[0].num_experts - 1
        self._on_cpu = rank.device.type == "cpu"
        self._device = -1 if self._on_cpu else rank.device.index
        self._prepared: dict[Any, Any] = {}

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor | None, max_tokens: int | None) -> DispatchOutput | None:
        """Make a dispatch of a known kind and return its output, or do nothing and return None."""
        prepared = self._prepared.get(_kind_of_dispatch(x, ids, weights, max_tokens))
        # Prepared calls are those of kernels that do not stamp.
        if prepared is None or has_hooks() or self._rank.trace is not None:
            return None
        x_at, ids_at = self._address(x), self._address(ids)
        weights_at = 0 if weights is None else self._address(weights)
        if x_at < 0 or ids_at < 0 or weights_at < 0 or (self._on_cpu and not self._in_range(ids)):
            return None
        session, transport, rank = self._session, self._transport, self._rank
        try:
            session.begin("dispatch")
            if rank.has_error():
                self._raise_error()
            stream = rank.stream_to_go_on()
            # Of a handle that is 0, the default stream, nothing is captured.
            unknown = ids.is_inference() or (stream != 0 and is_captured(ids))
            version = None if unknown else ids._version
            output: DispatchOutput = prepared.prepare(x, x_at, ids, ids_at, weights, weights_at, version)
            transport.partly_sent = session.complete = True
            transport.launch_quick("dispatch", rank, stream, prepared.launch)
            if rank.calls is not None:
                output.rows_in_place.renew()  # type: ignore[union-attr]
            return output
        except BaseException as error:
            session.unwind("dispatch", error)
            raise
        finally:
            session.guard.leave()

    def combine(self, y: Tensor, recv: DispatchOutput) -> Tensor | None:
        """Make a combine of a known kind and return its result, or do nothing and return None."""
        if type(recv) is not DispatchOutput or type(y) is not Tensor or self._rank.trace is not None:
            return None
        fields = recv.__dict__
        received: Received | None = fields.get("_source")
        # Plans outlive a change of membership, outputs do not.
        if received is None or received.again is not None or received.owner != self._owner:
            return None
        ids, weights = received.ids, received.weights
        prepared = self._prepared.get(_kind_of_combine(y, received, True))
        if prepared is None or has_hooks() or ("_rows" in fields and not fields["_rows"].is_latest):
            return None
        if received.version is not None and ids._version != received.version:
            return None
        y_at, ids_at, weights_at = self._address(y), ids.data_ptr(), 0
        if weights is not None:
            weights_at = weights.data_ptr()
        if y_at < 0 or ids_at % ALIGNMENT or weights_at % ALIGNMENT:
            return None
        return self._make("combine", recv, prepared, (y, y_at, recv, ids_at, weights_at, received))  # type: ignore[no-any-return]

    def sum_rows(self, y: Tensor, received: Received) -> Tensor:
        """Make a combine of rows without weights over the routing of a dispatch of the same ranks."""
        prepared = self._prepared.get(_kind_of_combine(y, received, False))
        y_at, ids_at = self._address(y), self._address(received.ids)
        if prepared is not None and y_at >= 0 and ids_at >= 0 and self._is_quick():
            return self._make("combine", received, prepared, (y, y_at, received, ids_at, 0, received))  # type: ignore[no-any-return]
        return self.ordinary(CombineRequest(y, self._over(received), weigh=False))  # type: ignore[no-any-return]

    def rows_again(self, x: Tensor, received: Received) -> Tensor:
        """Make a dispatch of tokens over the routing of a dispatch of the same ranks, and return its rows."""
        prepared = self._prepared.get(_kind_of_rows(x, received))
        x_at, ids_at = self._address(x), self._address(received.ids)
        if prepared is not None and x_at >= 0 and ids_at >= 0 and self._is_quick():
            rows, _ = self._make("dispatch", received, prepared, (x, x_at, received, ids_at))
            return rows  # type: ignore[no-any-return]
        return self.ordinary(DispatchRequest(x, received.ids, routing=self._over(received))).tokens  # type: ignore[no-any-return]

    def _is_quick(self) -> bool:
        # Prepared calls are those of kernels that do not stamp, and of tensors without tangents.
        return not has_hooks() and self._rank.trace is None and forward_ad._current_level < 0

    def _make(self, phase: Phase, over: DispatchOutput | Received, prepared: Any, given: tuple[Any, ...]) -> Any:
        """Make a call of a known kind over an earlier output, or its source."""
        session, transport, rank = self._session, self._transport, self._rank
        try:
            session.begin(phase)
            if rank.has_error():
                self._raise_error()
            out = prepared.prepare(*given)
            transport.partly_sent = session.complete = True
            transport.launch_quick(phase, rank, rank.stream_to_go_on(), prepared.launch)
            return out
        except BaseException as error:
            session.unwind(phase, error, lambda: self._over(over) if isinstance(over, Received) else over)
            raise
        finally:
            session.guard.leave()

    def ordinary(self, request: CallRequest) -> Any:
        """Make an ordinary call without options, and learn its kind."""
        (out,) = self._session.call([request], fused=True).wait()
        self.learn(request, out)
        return out

    def _over(self, received: Received) -> DispatchOutput:
        """Return the part of an output that calls over its routing read, as an output of this communicator."""
        source = Received(received.plan, self._owner, received.memory, received.ids, None, None)
        # Of rows only their number counts.
        return made(DispatchOutput, {"_source": source, "tokens": source.field("src_info")})

    def _raise_error(self) -> None:
        """Raise the error of an earlier call. No rank makes this call: the peers raise the same error."""
        self._transport.partly_sent = self._session.complete = True
        self._transport.raise_error()

    def _address(self, tensor: Tensor) -> int:
        """Return the address of a tensor that kernels take as it is, or -1 of any other."""
        at = tensor.data_ptr()
        if at % ALIGNMENT or tensor.get_device() != self._device or not tensor.is_contiguous():
            return -1
        return at

    def _in_range(self, ids: Tensor) -> bool:
        """Return whether all ids are in range. On a GPU the kernels find out, as the host would have to wait."""
        return not ids.numel() or (int(ids.min()) >= -1 and int(ids.max()) <= self._most_id)

    def learn(self, request: CallRequest, result: Any) -> None:
        """Note the kind of an ordinary call that was made, with its result."""
        if self._rank.trace is not None or len(self._prepared) >= MOST_KINDS:
            return
        if isinstance(request, DispatchRequest) and request.routing is not None:
            self._learn_rows(request)
            return
        if isinstance(request, DispatchRequest):
            given = [t for t in (request.x, request.topk_ids, request.topk_weights) if t is not None]
            key = _kind_of_dispatch(request.x, request.topk_ids, request.topk_weights, request.max_tokens)
            if key is None or key in self._prepared or given[2:] and given[2].dtype != self._rank.weight_dtype:  # type: ignore[union-attr]
                return
            if all(self._address(tensor) >= 0 for tensor in given):  # type: ignore[arg-type]
                self._prepared[key] = self._prepare_dispatch(request, given)  # type: ignore[arg-type]
            return
        received = request.recv.__dict__.get("_source")
        if received is None or received.again is not None or type(request.y) is not Tensor:
            return
        key = _kind_of_combine(request.y, received, request.weigh)
        if key in self._prepared:
            return
        call = Combine(self._rank, dataclasses.replace(request, out=result))
        if all(self._address(tensor) >= 0 for tensor in call.given):
            self._prepared[key] = self._prepare_combine(received.plan, call)

    def _learn_rows(self, request: DispatchRequest) -> None:
        """Note the kind of an ordinary dispatch over an earlier routing."""
        rank, owner = self._rank, self._owner
        received: Received = request.routing.__dict__["_source"]
        key = _kind_of_rows(request.x, received)
        if key in self._prepared:
            return
        call = Dispatch(rank, request, owner)
        plan = call.launch_plan
        if plan.layout is not None or any(self._address(tensor) < 0 for tensor in call.given):
            return
        if self._on_cpu:

            def make(x: Tensor, received: Received, _: None) -> Dispatch:
                return Dispatch(rank, DispatchRequest(x, received.ids, routing=self._over(received)), owner)

            self._prepared[key] = PreparedForInterpreter(make, rows=True)
            return
        ((both, _, numbers, given),) = call.launches()
        direct = rank.launcher.direct_form(both, given, [rank.nothing_at] * len(ADDRESSES), numbers)
        self._prepared[key] = None if direct is None else PreparedRowsAgain(call, received.plan, direct)

    def _prepare_dispatch(self, request: DispatchRequest, given: list[Tensor]) -> Any:
        rank, plan, owner = self._rank, Dispatch.plan_of(self._rank, request), self._owner
        if plan.layout is not None:
            return None
        if self._on_cpu:
            bound = request.max_tokens
            return PreparedForInterpreter(
                lambda x, ids, weights: Dispatch(rank, DispatchRequest(x, ids, weights, max_tokens=bound), owner)
            )
        direct = rank.launcher.direct_form(plan.both, given, [rank.nothing_at] * len(ADDRESSES), plan.fused)
        return None if direct is None else PreparedDispatch(rank, plan, direct, owner)

    def _prepare_combine(self, rows: plans.LaunchPlan, call: Combine) -> Any:
        rank = self._rank
        if len(call.passes) > 1:
            return None
        weigh = call.request.weigh
        if self._on_cpu:
            if weigh:
                return PreparedForInterpreter(lambda y, recv, _: Combine(rank, CombineRequest(y, recv)))
            return PreparedForInterpreter(
                lambda y, received, _: Combine(rank, CombineRequest(y, self._over(received), weigh=False))
            )
        ((both, _, numbers, given),) = call.launches()
        direct = rank.launcher.direct_form(both, given, [rank.nothing_at] * len(COMBINE_ADDRESSES), numbers)
        return None if direct is None else PreparedCombine(rank, call.launch_plan, rows, direct, weigh)


def _kind_of_dispatch(x: Any, ids: Any, weights: Any, max_tokens: Any) -> Any:
    """Return the key of a dispatch's kind, or None if it has no kind."""
    if type(x) is not Tensor or type(ids) is not Tensor or not (max_tokens is None or type(max_tokens) is int):
        return None
    if weights is None:
        return x.shape, x.dtype, ids.shape, ids.dtype, max_tokens
    if type(weights) is not Tensor:
        return None
    return x.shape, x.dtype, ids.shape, ids.dtype, max_tokens, weights.shape, weights.dtype


def _kind_of_combine(y: Tensor, received: Received, weigh: bool) -> Any:
    """Return the key of a combine's kind. A plan belongs to one rank of one communicator, so no kind is found for the
    output of another."""
    return received.plan, y.shape, y.dtype, received.ids.dtype, weigh


def _kind_of_rows(x: Tensor, received: Received) -> Any:
    """Return the key of the kind of a dispatch over the routing of another."""
    return received.plan, x.shape, x.dtype, received.ids.dtype
