"""Drive all ranks from one process: ``moelink.init_devices``. Methods take and return lists, one entry per device."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.group import plain_device
from moelink.errors import ArgumentError, ConfigError
from moelink.hooks import Hook
from moelink.output import DispatchOutput
from moelink.transports.base import CallRequest, CombineRequest, DispatchRequest, Traffic
from moelink.transports.build import build_in_process
from moelink.transports.pending import PendingOperation
from moelink.transports.session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OF_ALL_RANKS = ("max_tokens", "num_sms", "host_counts", "reduce", "weigh")
"""Options that are no lists."""


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
    if fields.get("on_failure", "raise") != "raise":
        raise ConfigError("on_failure", "'raise' with init_devices, whose ranks fail together", fields["on_failure"])
    places = [plain_device(device) for device in devices]
    configs = [EPConfig(**fields, world_size=len(places), rank=rank) for rank in range(len(places))]
    identity = secrets.token_hex(8)
    with torch.inference_mode(False):  # calls in any mode write to the tensors that are made here
        transport = build_in_process(configs, places, identity)
    return DeviceCommunicator(Session(configs, places, transport, identity))


class DispatchLists(TypedDict, total=False):
    """The keywords of :meth:`DeviceCommunicator.dispatch`."""

    scales: Sequence[Tensor] | None
    input_scale: Sequence[Tensor | Hook] | None
    routing: Sequence[DispatchOutput] | None
    max_tokens: int | None
    num_sms: int | None
    host_counts: bool
    out: Sequence[DispatchOutput] | None


class CombineLists(TypedDict, total=False):
    """The keywords of :meth:`DeviceCommunicator.combine`."""

    reduce: bool
    epilogue: Sequence[Tensor | Hook] | None
    shared: Sequence[Tensor] | None
    out: Sequence[Tensor] | None
    weigh: bool
    num_sms: int | None


class DeviceCommunicator:
    """Dispatch and combine for all ranks of one process. Made by :func:`moelink.init_devices`; also a context manager.

    Arguments are those of :class:`moelink.Communicator`; every tensor argument is a list, one entry per rank.
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
        self, x: Sequence[Tensor], topk_ids: Sequence[Tensor] | None,
        topk_weights: Sequence[Tensor | Hook] | None = None, **options: Unpack[DispatchLists],
    ) -> list[DispatchOutput]:  # fmt: skip
        """Dispatch on every rank; see :meth:`moelink.Communicator.dispatch`."""
        requests = self._dispatches(x=x, topk_ids=topk_ids, topk_weights=topk_weights, **options)
        return self._session.call(requests, fused=True).wait()

    def dispatch_async(
        self, x: Sequence[Tensor], topk_ids: Sequence[Tensor] | None,
        topk_weights: Sequence[Tensor | Hook] | None = None, **options: Unpack[DispatchLists],
    ) -> PendingOperation[list[DispatchOutput]]:  # fmt: skip
        """Start a dispatch on every rank; ``.wait()`` gives the list."""
        requests = self._dispatches(x=x, topk_ids=topk_ids, topk_weights=topk_weights, **options)
        return self._session.call(requests)  # type: ignore[return-value]  # not fused

    def combine(
        self, y: Sequence[Tensor], recv: Sequence[DispatchOutput],
        topk_weights: Sequence[Tensor | Hook] | None = None, **options: Unpack[CombineLists],
    ) -> list[Tensor]:  # fmt: skip
        """Combine on every rank; see :meth:`moelink.Communicator.combine`."""
        requests = self._combines(y=y, recv=recv, topk_weights=topk_weights, **options)
        return self._session.call(requests, fused=True).wait()

    def combine_async(
        self, y: Sequence[Tensor], recv: Sequence[DispatchOutput],
        topk_weights: Sequence[Tensor | Hook] | None = None, **options: Unpack[CombineLists],
    ) -> PendingOperation[list[Tensor]]:  # fmt: skip
        """Start a combine on every rank; ``.wait()`` gives the list."""
        requests = self._combines(y=y, recv=recv, topk_weights=topk_weights, **options)
        return self._session.call(requests)  # type: ignore[return-value]  # not fused

    def _dispatches(self, **given: Any) -> list[CallRequest]:
        requests = [DispatchRequest(**fields) for fields in self._by_rank(given)]
        for request in requests:
            request.fill_in()
        return requests  # type: ignore[return-value]

    def _combines(self, **given: Any) -> list[CallRequest]:
        return [CombineRequest(**fields) for fields in self._by_rank(given)]

    def _by_rank(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the arguments of each rank."""
        count = len(self._session.configs)
        lists = [
            [value] * count if name in _OF_ALL_RANKS else self._spread(name, value) for name, value in given.items()
        ]
        return [dict(zip(given, values, strict=True)) for values in zip(*lists, strict=True)]

    def _spread(self, name: str, values: Sequence[object] | None) -> list[Any]:
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
