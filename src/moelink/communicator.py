"""Dispatch and combine for one rank: the Communicator, which ``moelink.init`` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moelink import ops
from moelink.config import EPConfig
from moelink.control.group import World
from moelink.hooks import Hook
from moelink.lifetime import Lifetime
from moelink.ops import nodes
from moelink.ops.lanes import Lanes
from moelink.output import DispatchOutput
from moelink.transports.base import (
    CallRequest,
    CombineOptions,
    CombineRequest,
    DispatchOptions,
    DispatchRequest,
)
from moelink.transports.bound import BoundDispatch
from moelink.transports.pending import PendingSingle

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


def open_communicator(config: EPConfig, device: torch.device, world: World) -> Communicator:
    """Make the communicator of this rank of ``world``, with all its lanes. Collective over it."""
    return Communicator._over(Lanes.open(config, device, world))


class Communicator(Lifetime):
    """Dispatch and combine for one rank. Made by :func:`moelink.init`; also a context manager.

    Every call is collective: all ranks make the same calls in the same order, each with any number of tokens up to
    ``max_tokens_per_rank``, 0 included. If a rank's arguments are refused, that rank raises ArgumentError, its peers
    raise PeerAbortedError, and the next call works. If ranks make different calls, all of them raise ProtocolError, and
    if a peer does not arrive within ``timeout``, PeerTimeoutError; both end the communicator.
    """

    def dispatch(
        self,
        x: Tensor,
        topk_ids: Tensor | None,
        topk_weights: Tensor | Hook | None = None,
        *,
        scales: Tensor | None = None,
        input_scale: Tensor | Hook | None = None,
        routing: DispatchOutput | None = None,
        max_tokens: int | None = None,
        num_sms: int | None = None,
        host_counts: bool = False,
        out: DispatchOutput | None = None,
    ) -> DispatchOutput:
        """Send every token to the ranks that own its experts; return this rank's rows, grouped by expert.

        Args:
            x: [num_tokens, hidden_size] activations (bf16, fp16 or fp32; fp64 for format fp64), contiguous. They are
                rounded to the dispatch format: fp32 arrives as bf16 with format bf16, and as it is with format fp32.
            topk_ids: [num_tokens, topk] int32 or int64 expert ids, -1 where not routed; None with ``routing``.
                They must not change until combine, which reads them again. Those of a dispatch that a CUDA graph has
                captured may change between combine and the next replay.
            topk_weights: [num_tokens, topk] router weights that travel with the rows, a Hook, or None.
            scales: [num_tokens, scale_width] row-major scales; ``x`` is then already quantised (payload rows).
            input_scale: fp32, one element (or a Hook): the global scale of format nvfp4.
            routing: an earlier output whose routing is used again: its ids and its counts, which are neither counted
                nor exchanged then. All ranks give one of the same earlier call, or none does. The output has as many
                rows as that one.
            max_tokens: a bound on the tokens of every rank in this call, from this rank's to ``max_tokens_per_rank``:
                the output has room for the worst case of so many tokens (or ``capacity``) in place of the worst case of
                the communicator, and few tokens take a kernel for few. Rows that do not fit, as another rank sends
                more, are dropped and counted as those over ``capacity``. Not with ``routing``.
            num_sms: SMs that the kernels of this call may occupy, at most the communicator's; symmetric transport
                only. Ranks need not pass the same. The first call with another number compiles, unless :meth:`warmup`
                has done so.
            host_counts: return exact-size tensors instead of worst-case ones, and the rows of each expert as a list
                (``recv.host_counts``), for one host synchronisation. Layout "masked": the list alone.
            out: an earlier output, of a call with or without router weights as this one. Its tensors are overwritten,
                and it is returned as the output of this call.

        When x or topk_weights requires grad, so do ``recv.tokens`` (of a format with scales: its dequantised rows, see
        :func:`moelink.ops.dequantize`, straight through the rounding) and ``recv.weights``. More in docs/pytorch.md.

        On CUDA devices the symmetric transport reports a peer's failure at the next call or ``check()``, because
        nothing synchronises; the output of the failed call itself must not be used then.

        Raises:
            ArgumentError, ForeignHandleError: refused here, before any data moves.
            UnsupportedError: likewise; an option without a gradient when one is asked for, or that cannot be traced.
            PeerAbortedError, PeerTimeoutError, ProtocolError: a peer is the cause.
            PendingError, ClosedError: the communicator's state does not allow the call.
        """
        plain = scales is None and input_scale is None and routing is None and out is None and num_sms is None
        # Only torch knows the level of forward-mode AD; to ask a tensor for its tangent takes 0.4 us.
        plain = plain and host_counts is False and forward_ad._current_level < 0
        if plain and self._fast_path is not None and not torch.compiler.is_compiling():
            if nodes.records(x, topk_weights):
                made = nodes.dispatch(self._context, self._fast_path, x, topk_ids, topk_weights, max_tokens)
            else:
                made = self._fast_path.dispatch(x, topk_ids, topk_weights, max_tokens)  # type: ignore[arg-type]
            if made is not None:
                return made
        request = DispatchRequest(
            x, topk_ids, topk_weights, scales, input_scale, routing, host_counts, out, max_tokens, num_sms  # type: ignore[arg-type]
        )  # fmt: skip
        return self._call(request, plain)  # type: ignore[no-any-return]

    def dispatch_async(
        self, x: Tensor, topk_ids: Tensor | None, topk_weights: Tensor | Hook | None = None,
        **options: Unpack[DispatchOptions],
    ) -> PendingSingle[DispatchOutput]:  # fmt: skip
        """Start a dispatch and return at once; ``.wait()`` gives the result of :meth:`dispatch`, whose keywords this
        method takes."""
        return self._start(DispatchRequest(x, topk_ids, topk_weights, **options))  # type: ignore[arg-type]

    def combine(
        self,
        y: Tensor,
        recv: DispatchOutput,
        topk_weights: Tensor | Hook | None = None,
        *,
        reduce: bool = True,
        epilogue: Tensor | Hook | None = None,
        shared: Tensor | None = None,
        out: Tensor | None = None,
        weigh: bool = True,
        num_sms: int | None = None,
    ) -> Tensor:
        """Bring expert outputs home and sum them: [num_tokens, hidden_size] of ``combine_dtype``.

        Args:
            y: [rows, hidden_size] of combine_dtype; row i is the expert's output for row i of ``recv.tokens``. Layout
                "masked": [num_local_experts, rows_per_expert, hidden_size].
            recv: the output of :meth:`dispatch` on this rank.
            topk_weights: [num_tokens, topk] of this rank's own tokens (or a Hook); only with ``pre_reduce=False`` and
                when none went into dispatch.
            reduce: False returns the rows as they are, [num_tokens, topk, hidden_size], zero where no row came.
            epilogue: a bias [hidden_size] or residual [num_tokens, hidden_size] added in fp32 before rounding, or a
                Hook that stores for itself.
            shared: [num_tokens, hidden_size] added in fp32 before rounding (a shared expert's output).
            out: where the result goes; with a Hook of kernels one of its tensors.
            weigh: False leaves the router weights that went into dispatch to the caller, who has multiplied y by
                ``recv.weights``: rows are then summed unweighted, as they are where no weights went into dispatch. With
                ``pre_reduce=True`` all ranks pass the same. Layout "rank" has nothing to weigh.
            num_sms: as of :meth:`dispatch`.

        Gradients flow to y, ``recv``, topk_weights, shared, and a bias or residual; their backward is a dispatch.

        Raises: as :meth:`dispatch`.
        """
        plain = topk_weights is None and epilogue is None and shared is None and out is None
        plain = plain and reduce is True and weigh is True and num_sms is None and forward_ad._current_level < 0
        if plain and self._fast_path is not None and not torch.compiler.is_compiling():
            if nodes.records_combine(y, recv):
                made = nodes.combine(self._context, self._fast_path, y, recv)
            else:
                made = self._fast_path.combine(y, recv)
            if made is not None:
                return made
        request = CombineRequest(y, recv, topk_weights, reduce, epilogue, shared, out, weigh, num_sms)
        return self._call(request, plain)  # type: ignore[no-any-return]

    def combine_async(
        self, y: Tensor, recv: DispatchOutput, topk_weights: Tensor | Hook | None = None,
        **options: Unpack[CombineOptions],
    ) -> PendingSingle[Tensor]:  # fmt: skip
        """Start a combine and return at once; ``.wait()`` gives the result of :meth:`combine`, whose keywords this
        method takes. Until then the arguments must not change: kernels of both halves read them."""
        return self._start(CombineRequest(y, recv, topk_weights, **options))

    def _call(self, request: CallRequest, plain: bool) -> Any:
        """Make a call and return its result, by an operator under a compiler. The fast path learns of a ``plain`` one,
        which is without options."""
        if torch.compiler.is_compiling():
            request.fill_in()
            return ops.call(self._context, request)
        made, ordinary = self._within(self._make, request)
        if plain and ordinary and self._fast_path is not None:
            self._fast_path.learn(request, made)
        return made

    def _make(self, request: CallRequest) -> tuple[Any, bool]:
        """Make a call and return its result, and whether it was made without an operator."""
        request.fill_in()
        if ops.needs_operator(request):
            return ops.call(self._context, request), False
        (made,) = self._session.start([self._context.direct(request)], fused=True).wait()
        return made, True

    def _start(self, request: CallRequest) -> PendingSingle[Any]:
        """Start a call."""
        if torch.compiler.is_compiling():
            request.fill_in()
            return PendingSingle(ops.start(self._context, request))
        return PendingSingle(self._within(self._begun, request))

    def _begun(self, request: CallRequest) -> Callable[[], Any]:
        """Start a call and return a function that finishes it."""
        request.fill_in()
        if ops.needs_operator(request):
            return ops.start(self._context, request)
        operation = self._session.start([self._context.direct(request)], fused=False)
        return lambda: operation.wait()[0]

    def _within(self, call: Callable[[CallRequest], T], request: CallRequest) -> T:
        """Do the work of :meth:`Session.within`, which would call back to this room."""
        session = self._session
        try:
            session.begin(request.phase)
            return call(request)
        except BaseException as error:
            session.unwind(request.phase, error, lambda: self._context.unpacked(request.over))
            raise
        finally:
            session.guard.leave()

    def bind(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        scales: Tensor | None = None,
        input_scale: Tensor | None = None,
        max_tokens: int | None = None,
        num_sms: int | None = None,
        out: DispatchOutput | None = None,
    ) -> BoundDispatch:
        """Bind a dispatch to its tensors, for less host time a call. Not collective: nothing is sent before it is
        called.

        The arguments are those of :meth:`dispatch`. They are checked here, once. Each call reads what the tensors hold
        then, on the stream that is current, and overwrites the output of the call before, as a CUDA graph would.
        Change them in place between calls: rows and weights after the dispatch, ids after the combine.

        Args:
            topk_weights: of the dtype of ``config.weight_dtype``.
            out: an earlier output. Its tensors are overwritten, and each call returns it as its own output.

        Returns:
            A function without arguments that makes the dispatch and returns its output. Its method ``combine`` binds a
            combine.

        Raises:
            ArgumentError, UnsupportedError: an argument is not acceptable, is a hook, or requires grad.
            ClosedError: after :meth:`close`.

        Example:
            >>> import torch, moelink
            >>> with moelink.init(num_experts=4, topk=1, hidden_size=8, max_tokens_per_rank=3) as ep:
            ...     x, ids = torch.ones(3, 8, dtype=torch.bfloat16), torch.tensor([[0], [1], [3]])
            ...     dispatch = ep.bind(x, ids)
            ...     recv = dispatch()
            ...     y = torch.empty_like(recv.tokens)
            ...     combine = dispatch.combine(y)
            ...     for value in (1.0, 2.0):
            ...         _ = x.fill_(value)
            ...         _ = dispatch()
            ...         _ = y.copy_(recv.tokens)
            ...         print(combine()[:, 0].tolist())
            [1.0, 1.0, 1.0]
            [2.0, 2.0, 2.0]
        """
        self._session.require_open("bind")
        request = DispatchRequest(
            x, topk_ids, topk_weights, scales, input_scale, out=out, max_tokens=max_tokens, num_sms=num_sms
        )
        return BoundDispatch(self._session, request)
