"""Drive all ranks from one process: ``moelink.init_devices``. Methods take and return lists, one entry per device."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.group import plain_device
from moelink.errors import ArgumentError, ConfigError
from moelink.hooks import Hook
from moelink.output import DispatchOutput
from moelink.transports.base import CombineRequest, DispatchRequest, Traffic, ids_of
from moelink.transports.build import build_in_process
from moelink.transports.session import PendingOperation, Session

V = TypeVar("V")


def init_devices(devices: Sequence[torch.device | str], **fields: Any) -> DeviceCommunicator:
    """Make a communicator whose ranks are ``devices`` of this process, rank i on ``devices[i]``.

    ``fields`` are those of :func:`moelink.init` except ``group`` and ``device``. A GPU may be there more than once, for
    instance to try several ranks where there is one. Its ranks run one after the other, in the current stream. Capture
    both halves of a call in one stream then.

    Raises:
        ConfigError: a field is not acceptable.

    Example:
        >>> import torch, moelink
        >>> ep = moelink.init_devices(["cpu"] * 2, num_experts=4, topk=1, hidden_size=8, max_tokens_per_rank=2)
        >>> xs = [torch.ones(2, 8, dtype=torch.bfloat16) * rank for rank in (1, 2)]
        >>> recvs = ep.dispatch(xs, [torch.tensor([[0], [3]]), torch.tensor([[1], [2]])])
        >>> [recv.row_offsets.tolist() for recv in recvs]
        [[0, 1, 2], [0, 1, 2]]
        >>> [out[:, 0].tolist() for out in ep.combine([recv.tokens for recv in recvs], recvs)]
        [[1.0, 1.0], [2.0, 2.0]]
        >>> ep.close()
    """
    if not devices:
        raise ConfigError("devices", "at least one device", devices)
    for name in ("group", "device"):
        if name in fields:
            raise ConfigError(name, "nothing with init_devices, which is given its devices", fields[name])
    if fields.get("two_level") == "auto":  # impossible in one process
        fields["two_level"] = False
    places = [plain_device(device) for device in devices]
    configs = [EPConfig(**fields, world_size=len(places), rank=rank) for rank in range(len(places))]
    identity = secrets.token_hex(8)
    with torch.inference_mode(False):  # calls in any mode write to the tensors that are made here
        transport = build_in_process(configs, places, identity)
    return DeviceCommunicator(Session(configs, places, transport, identity))


class DeviceCommunicator:
    """Dispatch and combine for all ranks of one process. Made by :func:`moelink.init_devices`; also a context manager.

    Arguments mean what they mean in :class:`moelink.Communicator`; every tensor argument is a list, one entry per rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def configs(self) -> tuple[EPConfig, ...]:
        """One validated configuration per rank."""
        return self._session.configs

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each rank."""
        return self._session.devices

    def dispatch(
        self,
        x: Sequence[Tensor],
        topk_ids: Sequence[Tensor] | None,
        topk_weights: Sequence[Tensor | Hook] | None = None,
        *,
        scales: Sequence[Tensor] | None = None,
        input_scale: Sequence[Tensor | Hook] | None = None,
        routing: Sequence[DispatchOutput] | None = None,
        max_tokens: int | None = None,
        num_sms: int | None = None,
        host_counts: bool = False,
        out: Sequence[DispatchOutput] | None = None,
    ) -> list[DispatchOutput]:
        """Dispatch on every rank; see :meth:`moelink.Communicator.dispatch`."""
        requests = self._dispatch_requests(
            x, topk_ids, topk_weights, scales=scales, input_scale=input_scale, routing=routing, max_tokens=max_tokens,
            num_sms=num_sms, host_counts=host_counts, out=out,
        )  # fmt: skip
        return self._session.dispatch(requests, fused=True).wait()

    def dispatch_async(
        self,
        x: Sequence[Tensor],
        topk_ids: Sequence[Tensor] | None,
        topk_weights: Sequence[Tensor | Hook] | None = None,
        *,
        scales: Sequence[Tensor] | None = None,
        input_scale: Sequence[Tensor | Hook] | None = None,
        routing: Sequence[DispatchOutput] | None = None,
        max_tokens: int | None = None,
        num_sms: int | None = None,
        host_counts: bool = False,
        out: Sequence[DispatchOutput] | None = None,
    ) -> PendingOperation[list[DispatchOutput]]:
        """Start a dispatch on every rank; ``.wait()`` gives the list."""
        requests = self._dispatch_requests(
            x, topk_ids, topk_weights, scales=scales, input_scale=input_scale, routing=routing, max_tokens=max_tokens,
            num_sms=num_sms, host_counts=host_counts, out=out,
        )  # fmt: skip
        return self._session.dispatch(requests)  # type: ignore[return-value]  # not fused

    def combine(
        self,
        y: Sequence[Tensor],
        recv: Sequence[DispatchOutput],
        topk_weights: Sequence[Tensor | Hook] | None = None,
        *,
        reduce: bool = True,
        epilogue: Sequence[Tensor | Hook] | None = None,
        shared: Sequence[Tensor] | None = None,
        out: Sequence[Tensor] | None = None,
        weigh: bool = True,
        num_sms: int | None = None,
    ) -> list[Tensor]:
        """Combine on every rank; see :meth:`moelink.Communicator.combine`."""
        requests = self._combine_requests(y, recv, topk_weights, reduce, epilogue, shared, out, weigh, num_sms)
        return self._session.combine(requests, fused=True).wait()

    def combine_async(
        self,
        y: Sequence[Tensor],
        recv: Sequence[DispatchOutput],
        topk_weights: Sequence[Tensor | Hook] | None = None,
        *,
        reduce: bool = True,
        epilogue: Sequence[Tensor | Hook] | None = None,
        shared: Sequence[Tensor] | None = None,
        out: Sequence[Tensor] | None = None,
        weigh: bool = True,
        num_sms: int | None = None,
    ) -> PendingOperation[list[Tensor]]:
        """Start a combine on every rank; ``.wait()`` gives the list."""
        requests = self._combine_requests(y, recv, topk_weights, reduce, epilogue, shared, out, weigh, num_sms)
        return self._session.combine(requests)  # type: ignore[return-value]  # not fused

    def _dispatch_requests(
        self,
        x: Sequence[Tensor],
        topk_ids: Sequence[Tensor] | None,
        topk_weights: Sequence[Tensor | Hook] | None,
        *,
        scales: Sequence[Tensor] | None,
        input_scale: Sequence[Tensor | Hook] | None,
        routing: Sequence[DispatchOutput] | None,
        max_tokens: int | None,
        num_sms: int | None,
        host_counts: bool,
        out: Sequence[DispatchOutput] | None,
    ) -> list[DispatchRequest]:
        return [
            DispatchRequest(
                x_i, ids_of(ids_i, routing_i), weights_i, scales_i, scale_i, routing_i, host_counts, out_i, max_tokens,
                num_sms,
            )
            for x_i, ids_i, weights_i, scales_i, scale_i, routing_i, out_i in zip(
                self._spread("x", x),
                self._spread("topk_ids", topk_ids),
                self._spread("topk_weights", topk_weights),
                self._spread("scales", scales),
                self._spread("input_scale", input_scale),
                self._spread("routing", routing),
                self._spread("out", out),
                strict=True,
            )
        ]  # fmt: skip

    def _combine_requests(
        self,
        y: Sequence[Tensor],
        recv: Sequence[DispatchOutput],
        topk_weights: Sequence[Tensor | Hook] | None,
        reduce: bool,
        epilogue: Sequence[Tensor | Hook] | None,
        shared: Sequence[Tensor] | None,
        out: Sequence[Tensor] | None,
        weigh: bool,
        num_sms: int | None,
    ) -> list[CombineRequest]:
        return [
            CombineRequest(y_i, recv_i, weights_i, reduce, epilogue_i, shared_i, out_i, weigh, num_sms)  # type: ignore[arg-type]
            for y_i, recv_i, weights_i, epilogue_i, shared_i, out_i in zip(
                self._spread("y", y),
                self._spread("recv", recv),
                self._spread("topk_weights", topk_weights),
                self._spread("epilogue", epilogue),
                self._spread("shared", shared),
                self._spread("out", out),
                strict=True,
            )
        ]

    def _spread(self, name: str, values: Sequence[V] | None) -> list[Any]:
        """Return one entry per rank; None stands for None on every rank."""
        count = len(self._session.configs)
        if values is None:
            return [None] * count
        if not isinstance(values, (list, tuple)) or len(values) != count:
            got = f"{len(values)} entries" if isinstance(values, (list, tuple)) else type(values).__name__
            raise ArgumentError(name, f"a list of {count} entries, one per device", got)
        return list(values)

    def warmup(self, *, num_sms: Sequence[int] = ()) -> None:
        """Compile everything before the first call; see :meth:`moelink.Communicator.warmup`."""
        self._session.warmup(num_sms)

    def check(self) -> None:
        """Synchronise and raise the first error of any rank."""
        self._session.check()

    def traffic(self) -> Traffic:
        """Return the bytes of rows and their metadata that went from one rank to another."""
        return self._session.traffic()

    @property
    def dev_ptrs(self) -> list[Tensor]:
        """Per rank the value of :attr:`moelink.Communicator.dev_ptrs`."""
        return self._session.dev_ptrs()

    @property
    def atomic_counters(self) -> list[tuple[Tensor, Tensor]]:
        """Per rank the value of :attr:`moelink.Communicator.atomic_counters`."""
        return self._session.atomic_counters()

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        self._session.close()

    def __enter__(self) -> DeviceCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._session.closed else ""
        return (
            f"DeviceCommunicator(devices={[str(d) for d in self.devices]}, config={self.configs[0]!r}, "
            f"transport={self._session.transport.name!r}{state})"
        )
