"""What operators know of one communicator, and how its outputs become flat tensors and back."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.group import World
from moelink.errors import ClosedError
from moelink.ops.gradient_communicators import Lanes
from moelink.ops.record import MAX_PARTS, PackedPlan, allocate, count_parts, own_parts, pack, unpack
from moelink.output import DispatchHandle, DispatchOutput, OutputShape
from moelink.transports.base import CombineRequest, DispatchRequest, Pending, Phase
from moelink.transports.session import Session

Request = TypeVar("Request", DispatchRequest, CombineRequest)

FIELDS = (
    "tokens",
    "scales",
    "row_offsets",
    "src_info",
    "scales_offsets",
    "weights",
    "num_recv_tokens",
    "overflow",
    "topk_ids",
    "topk_weights",
)
"""Fields of a DispatchOutput that an operator returns, in this order; then counts, carrier, and the plan's parts."""

COUNTS, CARRIER, PLAN = len(FIELDS), len(FIELDS) + 1, len(FIELDS) + 2
NUM_OUTPUTS = PLAN + MAX_PARTS

PLACE = ("row_offsets", "src_info", "num_recv_tokens", "overflow")
"""A record, what later operators need of a dispatch besides its weights, is these fields, counts, the plan's parts."""


@dataclass(frozen=True)
class Traits:
    """What is fixed about a communicator, as plain values that a tracer can follow.

    Attributes:
        owner, rank: identity that handles carry.
        transport: its name.
        ranked: layout "rank".
        quantised: rows have scales, so their gradients arrive at the carrier.
        tiled: there are ``scales_offsets``.
        num_groups, topk: as in the configuration.
        weight_dtype, combine_dtype, accumulate_dtype: as in the configuration.
        parts: tensors of a plan. own: which of them are a call's own even if it reuses a routing.
    """

    owner: str
    rank: int
    transport: str
    ranked: bool
    quantised: bool
    tiled: bool
    num_groups: int
    topk: int
    weight_dtype: torch.dtype
    combine_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    parts: int
    own: tuple[int, ...]

    @classmethod
    def of(cls, session: Session) -> Traits:
        """Those of a session with one local rank."""
        config, transport = session.configs[0], session.transport.name
        ranked, layout = config.layout == "rank", config.format.scale_layout
        offsets = torch.zeros(config.num_groups + 1, dtype=torch.int32, device="cpu")
        return cls(
            owner=session.identity,
            rank=config.rank,
            transport=transport,
            ranked=ranked,
            quantised=config.format.scale_dtype is not None,
            tiled=not ranked and layout is not None and layout.scales_offsets(offsets) is not None,
            num_groups=config.num_groups,
            topk=config.topk,
            weight_dtype=config.weight_dtype,
            combine_dtype=config.combine_dtype,
            accumulate_dtype=config.accumulate_dtype,
            parts=count_parts(config, transport=transport),
            own=own_parts(transport=transport),
        )

    def merge(self, plan: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """The parts ``plan`` of a reused routing, with this call's own ones, from what its operator returned."""
        return [outputs[PLAN + i] if i in self.own else part for i, part in enumerate(plan)]


def record_of(outputs: Sequence[Tensor], routing: Sequence[Tensor], traits: Traits) -> list[Tensor]:
    """The record of a dispatch from what its operator returned and, if it reused a routing, that routing's record."""
    place = [outputs[FIELDS.index(name)] for name in PLACE]
    if not routing:
        return [*place, outputs[COUNTS], *outputs[PLAN : PLAN + traits.parts]]
    counts, *plan = routing[len(PLACE) :]
    return [*place, counts, *traits.merge(plan, outputs)]


class Endpoint:
    """One rank of an open communicator.

    Attributes:
        name: what operators call it.
        order: the tensor that its operators declare to write.
        session: where its own calls go. lanes: where those of gradients go.
    """

    def __init__(self, session: Session, world: World) -> None:
        self.session, self.lanes, self.traits = session, Lanes(session, world), Traits.of(session)
        self.order = REGISTRY.order(session.devices[0])
        self.name = REGISTRY.add(self, self.config)
        self._started: dict[Phase, Pending[Any]] = {}

    @property
    def config(self) -> EPConfig:
        """The validated configuration."""
        return self.session.configs[0]

    @contextmanager
    def finishing(self, phase: Phase, operation: Pending[Any] | None) -> Iterator[None]:
        """Inside, the next operator of ``phase`` finishes ``operation`` instead of starting a call of its own."""
        if operation is None:
            yield
            return
        self._started[phase] = operation
        try:
            yield
        finally:
            # An operator whose result was cached (selective checkpointing) has not run; its call has to end even so.
            if self._started.pop(phase, None) is not None:
                operation.wait()

    def started(self, phase: Phase) -> Pending[Any] | None:
        """The operation that an operator of ``phase`` is to finish, once."""
        return self._started.pop(phase, None)

    def flatten(self, output: DispatchOutput, *, with_plan: bool) -> tuple[Tensor, ...]:
        """``output`` as :data:`NUM_OUTPUTS` tensors, an empty one for each that is None.

        Without ``with_plan`` (a routing is reused) counts are left out, and of the plan all but the call's own parts.
        """
        fields = [getattr(output, name) for name in FIELDS]
        counts = output.handle.counts if with_plan else None
        plan: list[Tensor | None] = []
        if with_plan or self.traits.own:
            parts = pack(output.handle.plan, self.config)
            plan += [part if with_plan or i in self.traits.own else None for i, part in enumerate(parts)]
        return self._padded(output, [*fields, counts, self._carrier(output), *plan])

    def allocate(
        self, *, num_tokens: int, rows: int | torch.SymInt, weighted: bool, with_plan: bool, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Tensors like those of :meth:`flatten`, uninitialised."""
        config = self.config
        counts = torch.empty(config.num_local_experts, config.world_size, dtype=torch.int32, device=device)
        plan = allocate(
            config, transport=self.traits.transport, num_tokens=num_tokens, device=device, again=not with_plan
        )
        handle = DispatchHandle(self.traits.owner, self.traits.rank, num_tokens, counts, None, counts, PackedPlan(plan))
        output = OutputShape.of(config, rows=rows, weighted=weighted).allocate(handle, device)  # type: ignore[arg-type]
        return self.flatten(output, with_plan=with_plan)

    def _carrier(self, output: DispatchOutput) -> Tensor | None:
        if not self.traits.quantised:
            return None
        zero = torch.zeros(1, 1, dtype=self.traits.combine_dtype, device=output.src_info.device)
        return zero.expand(output.src_info.shape[0], self.config.hidden_size)

    @staticmethod
    def _padded(output: DispatchOutput, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
        tensors += [None] * (NUM_OUTPUTS - len(tensors))
        return tuple(output.row_offsets.new_empty(0) if tensor is None else tensor for tensor in tensors)

    def assemble(
        self,
        flat: Sequence[Tensor],
        *,
        num_tokens: int,
        topk_ids: Tensor,
        topk_weights: Tensor | None,
        routing: DispatchOutput | None,
    ) -> DispatchOutput:
        """The inverse of :meth:`flatten`, for a call with these arguments (``topk_weights`` as given by the caller)."""
        traits = self.traits
        weighted = topk_weights is not None
        present = {
            "scales": traits.quantised,
            "scales_offsets": traits.tiled,
            "weights": weighted and not traits.ranked,
            "topk_ids": traits.ranked,
            "topk_weights": weighted and traits.ranked,
        }
        fields: dict[str, Any] = {
            name: tensor if present.get(name, True) else None
            for name, tensor in zip(FIELDS, flat[: len(FIELDS)], strict=True)
        }
        handle = DispatchHandle(
            owner=traits.owner,
            rank=traits.rank,
            num_tokens=num_tokens,
            topk_ids=topk_ids,
            topk_weights=None if topk_weights is None else topk_weights.detach().to(traits.weight_dtype),
            counts=flat[COUNTS] if routing is None else routing.handle.counts,
            plan=self._plan(flat, routing),
            carrier=flat[CARRIER] if traits.quantised else None,
        )
        ids = None if traits.ranked else torch.arange(traits.num_groups, dtype=torch.int32, device=topk_ids.device)
        return DispatchOutput(expert_ids=ids, handle=handle, **fields)

    def _plan(self, flat: Sequence[Tensor], routing: DispatchOutput | None) -> Any:
        traits = self.traits
        if routing is None:
            return PackedPlan(tuple(flat[PLAN : PLAN + traits.parts]))
        if not traits.own:
            return routing.handle.plan
        return PackedPlan(tuple(traits.merge(pack(routing.handle.plan, self.config), flat)))

    def record(self, recv: DispatchOutput) -> list[Tensor]:
        """The record (see :data:`PLACE`) of ``recv``."""
        place = [getattr(recv, name) for name in PLACE]
        return [*place, recv.handle.counts, *pack(recv.handle.plan, self.config)]

    def restore(
        self,
        record: Sequence[Tensor],
        *,
        topk_ids: Tensor,
        weights: Tensor | None = None,
        home_weights: Tensor | None = None,
        session: Session | None = None,
    ) -> DispatchOutput:
        """The part of a DispatchOutput that combine and ``routing=`` read, as if ``session`` had returned it."""
        row_offsets, src_info, num_recv_tokens, overflow, counts, *plan = record
        handle = DispatchHandle(
            owner=(session or self.session).identity,
            rank=self.traits.rank,
            num_tokens=topk_ids.shape[0],
            topk_ids=topk_ids,
            topk_weights=home_weights,
            counts=counts,
            plan=unpack(tuple(plan), self.config, transport=self.traits.transport),
        )
        return DispatchOutput(
            tokens=src_info,  # only its length counts
            scales=None,
            row_offsets=row_offsets,
            expert_ids=None,
            src_info=src_info,
            scales_offsets=None,
            weights=weights,
            num_recv_tokens=num_recv_tokens,
            overflow=overflow,
            handle=handle,
        )

    def direct(self, request: Request) -> Request:
        """``request`` as the transport takes it: with the plan it made itself in place of an operator's. One over an
        output of another communicator, which will be refused, is returned as it is."""
        recv = request.over
        if not isinstance(recv, DispatchOutput) or recv.handle.owner != self.traits.owner:
            return request
        plan = recv.handle.plan
        if not isinstance(plan, PackedPlan):
            return request
        plan = unpack(plan.tensors, self.config, transport=self.traits.transport)
        recv = dataclasses.replace(recv, handle=dataclasses.replace(recv.handle, plan=plan))
        if isinstance(request, DispatchRequest):
            return dataclasses.replace(request, routing=recv)
        return dataclasses.replace(request, recv=recv)


class Registry:
    """Endpoints of open communicators by name, and what orders their operators.

    An operator's arguments are tensors, numbers and strings, so it names its communicator. Like the budget of SMs this
    registry is not reached from a communicator: a compiled graph outlives every Python object that was around when it
    was traced. It holds nothing alive.

    A name counts the communicators of this process and ends in a digest of the configuration. It is part of compiled
    graphs, so it must be the same when a program runs again (or no compilation cache would ever hit), and another when
    sizes differ (or a cached graph for other sizes would).
    """

    def __init__(self) -> None:
        self._endpoints: weakref.WeakValueDictionary[str, Endpoint] = weakref.WeakValueDictionary()
        self._orders: weakref.WeakValueDictionary[torch.device, Tensor] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, endpoint: Endpoint, config: EPConfig) -> str:
        """Enter ``endpoint`` and return its name, like ``"0:9f86d081"``."""
        text = f"{config.shared_fields()} {config.rank}"
        name = f"{next(self._numbers)}:{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        self._endpoints[name] = endpoint
        return name

    def find(self, name: str, what: str) -> Endpoint:
        """The endpoint called ``name``; ClosedError naming ``what`` when its communicator is gone."""
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            raise ClosedError(what)
        return endpoint

    def order(self, device: torch.device) -> Tensor:
        """The tensor that every operator on ``device`` declares to write: see :mod:`moelink.ops.library`."""
        order = self._orders.get(device)
        if order is None:
            order = self._orders[device] = torch.zeros(1, device=device)
        return order


REGISTRY = Registry()
