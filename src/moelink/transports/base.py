"""The interface between the communicator and the ways to move bytes.

A process drives one rank, or (``init_devices``) all of them; so every method takes and returns one entry per local
rank. Arguments have been validated; a transport only moves data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypedDict, TypeVar

from torch import Tensor

from moelink.config import EPConfig
from moelink.control.probe import Failure
from moelink.errors import PeerError
from moelink.hooks import Hook
from moelink.output import DispatchOutput
from moelink.transports.counters import Counters

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Phase = Literal["dispatch", "combine"]


Half = Literal["fused", "split"]


@dataclass(frozen=True)
class Rehearsal:
    """The calls whose kernels a warmup prepares.

    Attributes:
        dispatch, combine: "fused" for calls in one launch, "split" for those of ``dispatch_async``, ``combine_async``.
        weighted: with router weights, and without.
        shared: combines add ``shared``, or not.
        bounds: values of ``max_tokens`` of dispatches, None for a call without; () for calls with any.
    """

    dispatch: tuple[Half, ...] = ("fused", "split")
    combine: tuple[Half, ...] = ("fused", "split")
    weighted: tuple[bool, ...] = (True, False)
    shared: tuple[bool, ...] = (False,)
    bounds: tuple[int | None, ...] = ()


EVERY_CALL = Rehearsal()


class DispatchOptions(TypedDict, total=False):
    """The keywords of :meth:`moelink.Communicator.dispatch`, which documents them."""

    scales: Tensor | None
    input_scale: Tensor | Hook | None
    routing: DispatchOutput | None
    max_tokens: int | None
    num_sms: int | None
    host_counts: bool
    out: DispatchOutput | None


class CombineOptions(TypedDict, total=False):
    """The keywords of :meth:`moelink.Communicator.combine`, which documents them."""

    reduce: bool
    epilogue: Tensor | Hook | None
    shared: Tensor | None
    out: Tensor | None
    weigh: bool
    num_sms: int | None


@dataclass(slots=True, eq=False)  # not frozen: to make such an object takes seven times as long
class DispatchRequest:
    """Arguments of one rank's dispatch.

    Attributes:
        x: [num_tokens, hidden_size] activations, or quantised rows [num_tokens, payload_width] when ``scales`` is set.
        topk_ids: [num_tokens, topk] int32 or int64. None with ``routing``, whose ids :meth:`fill_in` puts here.
        topk_weights: [num_tokens, topk], a Hook, or None.
        scales: [num_tokens, scale_width] row-major scales of quantised rows, or None.
        input_scale: one fp32 element, a Hook, or None.
        routing: an earlier output whose routing is reused, or None.
        host_counts: exact-size outputs.
        out: an earlier output whose tensors are overwritten, or None.
        max_tokens: a bound on the tokens of every rank, which sizes the output, or None.
        num_sms: SMs that the kernels of this call may occupy, or None for the communicator's.
        separate: each tensor of the output has memory of its own, as a compiler demands of an operator's results.
    """

    x: Tensor
    topk_ids: Tensor  # None until :meth:`fill_in`
    topk_weights: Tensor | Hook | None = None
    scales: Tensor | None = None
    input_scale: Tensor | Hook | None = None
    routing: DispatchOutput | None = None
    host_counts: bool = False
    out: DispatchOutput | None = None
    max_tokens: int | None = None
    num_sms: int | None = None
    separate: bool = False
    phase: ClassVar[Phase] = "dispatch"

    @property
    def over(self) -> DispatchOutput | None:
        """The earlier output that this call goes over, if there is one."""
        return self.routing

    @property
    def differentiable(self) -> tuple[Tensor | Hook | None, ...]:
        """The arguments that may require grad."""
        return self.x, self.topk_weights, self.scales, self.input_scale

    def fill_in(self) -> None:
        """Take the ids of ``routing`` where ``topk_ids`` are None. Any other value is refused later."""
        if self.topk_ids is None and isinstance(self.routing, DispatchOutput):
            self.topk_ids = self.routing.handle.topk_ids

    def output_rows(self, config: EPConfig) -> int:
        """Return the rows of the output (layout "masked": of each expert) before ``host_counts`` cuts it; over an
        earlier routing as many as that output has, so that the same rows fit."""
        return config.output_rows(self.max_tokens) if self.routing is None else self.routing.src_info.shape[-2]


@dataclass(slots=True, eq=False)
class CombineRequest:
    """Arguments of one rank's combine.

    Attributes:
        y: [rows, hidden_size] of combine_dtype (layout "masked": [num_groups, rows, hidden_size]); row i belongs to
            row i of ``recv.tokens``.
        recv: the dispatch output.
        topk_weights: [num_tokens, topk] of the home rank, a Hook, or None (only without pre-reduction).
        reduce: sum over slots, or return [num_tokens, topk, hidden_size].
        epilogue: a Hook that stores for itself, a bias [hidden_size] or residual [num_tokens, hidden_size] to add
            before rounding, or None.
        shared: [num_tokens, hidden_size] to add before rounding, or None.
        out: where the result goes, or None.
        weigh: multiply by the router weights that went into dispatch; False where the caller has done so.
        num_sms: SMs that the kernels of this call may occupy, or None for the communicator's.
    """

    y: Tensor
    recv: DispatchOutput
    topk_weights: Tensor | Hook | None = None
    reduce: bool = True
    epilogue: Tensor | Hook | None = None
    shared: Tensor | None = None
    out: Tensor | None = None
    weigh: bool = True
    num_sms: int | None = None
    phase: ClassVar[Phase] = "combine"

    @property
    def over(self) -> DispatchOutput:
        """The earlier output that this call goes over."""
        return self.recv

    @property
    def differentiable(self) -> tuple[Tensor | Hook | None, ...]:
        """The arguments that may require grad, without those of ``recv``."""
        return self.y, self.topk_weights, self.shared, self.epilogue

    def fill_in(self) -> None:
        """Do nothing: no argument stands for another."""

    @property
    def row_weights(self) -> Tensor | None:
        """[rows] router weights that the expert's rank multiplies by, or None."""
        return self.recv.weights if self.weigh else None

    @property
    def home_weights(self) -> Tensor | Hook | None:
        """[num_tokens, topk] router weights that the home rank multiplies by where it sums slots, or None."""
        if self.topk_weights is not None:
            return self.topk_weights
        return self.recv.handle.topk_weights if self.weigh else None


CallRequest = DispatchRequest | CombineRequest


@dataclass(frozen=True)
class Traffic:
    """Bytes that left this process for other ranks (rows and their metadata; not headers), since ``init``."""

    dispatch: int = 0
    combine: int = 0


class Pending(Protocol[T_co]):
    """An operation under way.

    Attributes:
        over: whether :meth:`wait` must not be called again after it has raised: the call has ended, or was interrupted
            in its second half.
    """

    @property
    def over(self) -> bool:
        """Whether the call has ended."""

    def wait(self) -> T_co:
        """Finish the operation (a device's current stream waits; the host does so only where the transport must) and
        return its result, or raise its error."""


class Finished(Generic[T]):
    """A call that is over, or on a device completely launched."""

    __slots__ = ("_result",)
    over = True

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        """Return the result."""
        return self._result


class FastPath(Protocol):
    """A way to make calls of kinds that were made before with little host time, for one local rank.

    ``dispatch`` and ``combine`` return None, and do nothing, for a call that they do not know.
    """

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor | None, max_tokens: int | None) -> DispatchOutput | None:
        """Make a dispatch without other options."""

    def combine(self, y: Tensor, recv: DispatchOutput) -> Tensor | None:
        """Make a combine without options."""

    def ordinary(self, request: CallRequest) -> Any:
        """Make an ordinary call without options, and learn its kind."""

    def learn(self, request: CallRequest, result: Any) -> None:
        """Note the kind of an ordinary call without options that was made, with its result."""

    def sum_rows(self, y: Tensor, received: Any) -> Tensor:
        """Make a combine of rows without weights over the routing of a dispatch of the same ranks, whose output has the
        source ``received``."""

    def rows_again(self, x: Tensor, received: Any) -> Tensor:
        """Make a dispatch of tokens over such a routing, and return its rows."""


class Transport(Protocol):
    """A way to move rows between ranks.

    Attributes:
        partly_sent: an exception that comes now leaves a call partly sent: peers wait for rows that this rank has
            not sent. The session sets it when it hands a call over. The transport clears it as soon as the call is
            over, goes on by itself, or waits for its second half, so that the next call would be in step.
    """

    name: str
    partly_sent: bool

    def dispatch(self, requests: Sequence[DispatchRequest], *, fused: bool = False) -> Pending[list[DispatchOutput]]:
        """Start a dispatch, one request per local rank. ``fused``: the caller waits right away."""

    def combine(self, requests: Sequence[CombineRequest], *, fused: bool = False) -> Pending[list[Tensor]]:
        """Start a combine, one request per local rank. ``fused``: the caller waits right away."""

    def bind(self, request: CallRequest) -> Callable[[CallRequest], Any]:
        """Return a function that makes this call of the only local rank, each time into the same tensors.

        It takes ``request`` again, whose ``recv`` may have changed. Making it communicates nothing.
        """

    def refuse(self, phase: Phase, *, over: DispatchOutput | None = None) -> None:
        """Take part in a call whose arguments were refused here: tell the peers, move nothing. Returns at once.

        ``over``: the earlier output of this communicator that the call was to go over, where that much is known. Over
        one of a call that brought nothing there is no call.

        Raises ProtocolError if an earlier call was mismatched, whose error has not been raised: then there is no call.
        """

    def abandon(self, failure: Failure) -> PeerError:
        """Poison this rank and its peers at once, and return the error that its later calls raise.

        ``failure`` names this rank after an exception that left a call half done or the ``with`` block, the rank that
        another transport of the same communicator has found at fault, or that of a mismatched call. The first report
        of a peer counts.
        """

    def warmup(self, num_sms: Sequence[int] = (), calls: Rehearsal = EVERY_CALL, *, load: bool = True) -> None:
        """Compile and allocate for the first of these calls, also for one with each of these SM limits. Without
        ``load``, kernels are only asked for (:mod:`moelink.transports.ahead`)."""

    def begin_without(self, masked: Sequence[int]) -> None:
        """Know that ranks are ``masked``, before the first call."""

    def absent_on(self, device: Any) -> Tensor:
        """Return which experts are on masked ranks, [num_experts] bool, of one local rank."""

    def check(self) -> None:
        """Wait for all pending work and raise the first error of this communicator, if there was one."""

    def traffic(self) -> Traffic:
        """Bytes sent so far."""

    def counters(self) -> list[Counters]:
        """Per local rank its counters, for one thread at a time, which may be any. Calls do not wait for it."""

    def dev_ptrs(self) -> list[Tensor]:
        """Per local rank [2, 3] int64 on the host: [dispatch, combine] x [send, recv, recv_count] addresses."""

    def atomic_counters(self) -> list[tuple[Tensor, Tensor]]:
        """Per local rank the on-device counters of both groups."""

    def open_trace(self) -> None:
        """Let calls of the local ranks stamp their phases; UnsupportedError where they cannot."""

    def close_trace(self) -> list[Tensor]:
        """Let calls stamp nothing more; return each local rank's buffer (``tracing.device.layout``) on the host."""

    def compare_clocks(self) -> list[tuple[int, int]] | None:
        """Per rank, on rank 0: ticks that its clock is ahead of rank 0's, and by how much that may be wrong. None when
        a rank did not answer. Collective."""

    def close(self) -> None:
        """Release everything. Waits for nobody once an error has poisoned the communicator."""
