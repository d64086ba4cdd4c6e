"""Bind a call to its tensors: validate and prepare once, then only launch.

To its peers a bound call is an ordinary call: it has the next number, it may meet eager calls or replays of a graph,
and it fails as they do. It reads the values of its tensors at that time, and overwrites the output of its call before,
as the replay of a CUDA graph does.

An argument that would be copied at binding is refused, because a later change would not be noticed: router weights of
another dtype, rows that begin within 16 bytes, hooks that are evaluated on the host.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moelink.errors import ArgumentError, StateError, UnsupportedError
from moelink.hooks import Hook
from moelink.memory.layout import ALIGNMENT
from moelink.output import DispatchOutput, take_over
from moelink.transports.base import CombineRequest, DispatchRequest
from moelink.transports.session import Session
from moelink.transports.validation import check_combine, check_dispatch, check_num_sms


class BoundCombine:
    """A combine of the rows of a bound dispatch. Made by :meth:`BoundDispatch.combine`; call it."""

    def __init__(self, session: Session, request: CombineRequest) -> None:
        self._session = session
        self._again, self._request = partial(session.repeat, session.transport.bind(request)), request

    def __call__(self) -> Tensor:
        """Make the combine, of the rows that the latest call of its dispatch received. Collective.

        Returns:
            [num_tokens, hidden_size] of combine_dtype, the same tensor at every call.

        Raises: as :meth:`moelink.Communicator.combine`.
        """
        return self._session.within("combine", self._again, self._request, lambda: self._request.recv)  # type: ignore[no-any-return]


class BoundDispatch:
    """A dispatch that is bound to its tensors. Made by :meth:`moelink.Communicator.bind`; call it.

    Raises:
        ArgumentError, UnsupportedError: as ``bind`` says. Peers are not told, as nothing was called.
    """

    def __init__(self, session: Session, request: DispatchRequest) -> None:
        config, device = session.configs[0], session.devices[0]
        check_dispatch(config, request, identity=session.identity, device=device)
        check_num_sms(config, request.num_sms, transport=session.transport.name, device=device)
        _check_bindable(config.weight_dtype, request)
        self._session, self._request = session, request
        self._again = partial(session.repeat, session.transport.bind(request))
        self._recv: DispatchOutput | None = None
        self._combines: list[BoundCombine] = []

    @property
    def recv(self) -> DispatchOutput:
        """The output of the latest call. Its tensors are the same at every call.

        Raises:
            StateError: it was never called.
        """
        if self._recv is None:
            raise StateError("recv: expected a bound dispatch that was called, got one that was not; call it first")
        return self._recv

    def __call__(self) -> DispatchOutput:
        """Make the dispatch with the current values of its tensors. Collective.

        Raises: as :meth:`moelink.Communicator.dispatch`.
        """
        recv = take_over(self._request.out, self._session.within("dispatch", self._again, self._request))
        self._recv = recv
        for combine in self._combines:
            combine._request.recv = recv
        return recv

    def combine(
        self,
        y: Tensor,
        *,
        epilogue: Tensor | Hook | None = None,
        shared: Tensor | None = None,
        out: Tensor | None = None,
        num_sms: int | None = None,
    ) -> BoundCombine:
        """Bind a combine of this dispatch's rows to ``y``, and to the other arguments, which are those of
        :meth:`moelink.Communicator.combine`.

        Raises:
            ClosedError: the communicator is closed.
            StateError: the dispatch was never called.
            ArgumentError: an argument is not acceptable.
            UnsupportedError: a tensor requires grad, ``epilogue`` is a hook, or the transport has no SM limit.
        """
        self._session.require_open("combine")
        config, device = self._session.configs[0], self._session.devices[0]
        if isinstance(epilogue, Hook) and epilogue.triton_fn is None:
            raise UnsupportedError(
                "epilogue: expected a tensor or a hook with a triton_fn in a bound call, got one in torch only; call "
                "combine"
            )
        if out is None and not (isinstance(epilogue, Hook) and epilogue.tensors):
            out = torch.empty(
                self.recv.handle.num_tokens, config.hidden_size, dtype=config.combine_dtype, device=device
            )
        request = CombineRequest(y, self.recv, epilogue=epilogue, shared=shared, out=out, num_sms=num_sms)
        check_combine(config, request, identity=self._session.identity, device=device)
        check_num_sms(config, num_sms, transport=self._session.transport.name, device=device)
        if past := request.y.data_ptr() % 4:  # a call would copy it
            raise ArgumentError("y", "memory that begins at a multiple of 4 bytes", f"{past} bytes past one")
        _refuse_gradients(request.y, request.epilogue, request.shared)
        made = BoundCombine(self._session, request)
        self._combines.append(made)
        return made


def _check_bindable(weight_dtype: torch.dtype, request: DispatchRequest) -> None:
    """Refuse arguments that a call would copy or evaluate: a bound call would not see later values of them."""
    for name in ("topk_weights", "input_scale"):
        if isinstance(getattr(request, name), Hook):
            raise UnsupportedError(f"{name}: expected a tensor in a bound call, got a Hook; call dispatch")
    if request.host_counts:
        raise ArgumentError("host_counts", "False in a bound call, whose tensors have fixed sizes", "True")
    weights = request.topk_weights
    if isinstance(weights, Tensor) and weights.dtype != weight_dtype:
        raise ArgumentError("topk_weights", f"dtype {weight_dtype} in a bound call", weights.dtype)
    if request.x.data_ptr() % ALIGNMENT:
        past = request.x.data_ptr() % ALIGNMENT
        raise ArgumentError("x", f"memory that begins at a multiple of {ALIGNMENT} bytes", f"{past} bytes past one")
    _refuse_gradients(request.x, request.topk_weights, request.input_scale)


def _refuse_gradients(*given: object) -> None:
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in given):
        raise UnsupportedError(
            "bind: expected tensors without gradients, got one that requires grad; call dispatch and combine, which "
            "have gradients, or bind under torch.no_grad()"
        )
