"""Hold one communicator as its operators see it, and convert its outputs to flat tensors and back.

An operator takes and returns tensors, numbers and strings only. It therefore names its communicator, and
:data:`REGISTRY` finds the :class:`OperatorContext` of that name. A DispatchOutput crosses an operator as
:data:`NUM_OUTPUTS` tensors (:meth:`OperatorContext.flatten`, :meth:`~OperatorContext.assemble`), and later operators
read its *record*, the part of them that combine and ``routing=`` need (:data:`PLACE`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.control.group import World
from moelink.errors import ClosedError, ForeignHandleError
from moelink.ops.gradient_communicators import GradientCommunicators
from moelink.ops.record import MAX_PARTS, OWN_PARTS, PackedPlan, allocate, count_parts, pack, pack_call, unpack
from moelink.output import DispatchHandle, DispatchOutput, OutputShape
from moelink.routing import ExpertMap
from moelink.transports.base import CallRequest, DispatchRequest, Pending, Phase
from moelink.transports.collective.plan import CollectivePlan
from moelink.transports.session import Session

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
"""Fields of a DispatchOutput that an operator returns, in this order, before counts, carrier and the plan's parts."""

COUNTS, CARRIER, PLAN = len(FIELDS), len(FIELDS) + 1, len(FIELDS) + 2
NUM_OUTPUTS = PLAN + MAX_PARTS

PLACE = ("row_offsets", "src_info", "num_recv_tokens", "overflow")
"""A record: these fields, then counts and the plan's parts. Later operators read it, and the weights."""


@dataclass(frozen=True)
class StaticConfig:
    """The static configuration of a communicator, as plain values that a tracer treats as constants.

    Attributes:
        owner, rank: identity of the communicator and this rank, as handles carry them.
        transport: name of the transport.
        ranked: layout is "rank".
        quantised: rows have scales, so their gradients arrive at the carrier.
        first_id: as handles carry it.
        tiled: outputs have ``scales_offsets``.
        num_groups, topk: as in the configuration.
        weight_dtype, combine_dtype, accumulate_dtype: as in the configuration.
        parts: number of tensors of a plan.
    """

    owner: str
    rank: int
    transport: str
    ranked: bool
    quantised: bool
    first_id: int
    tiled: bool
    num_groups: int
    topk: int
    weight_dtype: torch.dtype
    combine_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    parts: int

    @classmethod
    def of(cls, session: Session) -> StaticConfig:
        """Read the static configuration of a session with one local rank."""
        config, transport = session.configs[0], session.transport.name
        ranked, layout = config.layout == "rank", config.format.scale_layout
        offsets = torch.zeros(config.num_groups + 1, dtype=torch.int32, device="cpu")
        return cls(
            owner=session.identity,
            rank=config.rank,
            transport=transport,
            ranked=ranked,
            quantised=config.format.scale_dtype is not None,
            first_id=ExpertMap(config.num_experts, config.world_size).first(config.rank) if config.global_ids else 0,
            tiled=not ranked and layout is not None and layout.scales_offsets(offsets) is not None,
            num_groups=config.num_groups,
            topk=config.topk,
            weight_dtype=config.weight_dtype,
            combine_dtype=config.combine_dtype,
            accumulate_dtype=config.accumulate_dtype,
            parts=count_parts(config, transport=transport),
        )

    def merge(self, plan: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Replace, in the parts ``plan`` of a reused routing, this call's own parts by those in ``outputs``."""
        return [outputs[PLAN + i] if i in OWN_PARTS else part for i, part in enumerate(plan)]


def record_of(outputs: Sequence[Tensor], routing: Sequence[Tensor], static: StaticConfig) -> list[Tensor]:
    """Build a dispatch's record from its operator's ``outputs`` and, for a reused routing, that routing's record."""
    place = [outputs[FIELDS.index(name)] for name in PLACE]
    if not routing:
        return [*place, outputs[COUNTS], *outputs[PLAN : PLAN + static.parts]]
    counts, *plan = routing[len(PLACE) :]
    return [*place, counts, *static.merge(plan, outputs)]


class OperatorContext:
    """One rank of an open communicator, as its operators see it.

    Attributes:
        session: makes the communicator's own calls.
        gradients: the communicators that gradients travel over.
        static: the fixed values, as constants for a tracer.
        world: this rank among its peers.
        has_nodes: calls without options may record gradients by :mod:`moelink.ops.nodes`.
        name: the name by which operators find it in :data:`REGISTRY`, another one after each change of the ranks.
        slots: [topk] int64, the numbers of a token's slots.
        order: the tensor that its operators declare to write (:mod:`moelink.ops.library`).
    """

    def __init__(self, session: Session, world: World) -> None:
        self.session, self.gradients, self.static = (
            session,
            GradientCommunicators(session, world),
            StaticConfig.of(session),
        )
        self.world = world
        self.order = REGISTRY.order(session.devices[0])
        # Made here: a call that is captured into a CUDA graph would make a tensor that has values once the graph runs.
        self.slots = torch.arange(self.static.topk, device=session.devices[0])
        self.name = REGISTRY.add(self, self.config)
        self.has_nodes = self.config.layout == "expert" and not self.config.zero_copy
        self._started: dict[Phase, Pending[Any]] = {}

    @property
    def config(self) -> EPConfig:
        """The validated configuration."""
        return self.session.configs[0]

    @contextmanager
    def finishing(self, phase: Phase, operation: Pending[Any] | None) -> Iterator[None]:
        """Make the next operator of ``phase`` in the block finish ``operation`` instead of starting a call."""
        if operation is None:
            yield
            return
        self._started[phase] = operation
        try:
            yield
        finally:
            # Selective checkpointing may take the operator's result from a cache. Its call must be finished even so.
            if self._started.pop(phase, None) is not None:
                operation.wait()

    def started(self, phase: Phase) -> Pending[Any] | None:
        """Take the operation that an operator of ``phase`` has to finish, or None."""
        return self._started.pop(phase, None)

    def flatten(self, output: DispatchOutput, *, with_plan: bool) -> tuple[Tensor, ...]:
        """Flatten ``output`` to :data:`NUM_OUTPUTS` tensors, an empty one for each that is None.

        ``with_plan`` is False for a call that reuses a routing: counts are then left out, and all parts of the plan but
        the call's own.
        """
        fields = [getattr(output, name) for name in FIELDS]
        counts = output.handle.counts if with_plan else None
        made, plan = output.handle.routing, []
        if not with_plan and isinstance(made, CollectivePlan):  # without a copy of the rest
            plan = [None, pack_call(made)]
        else:
            plan = [part if with_plan or i in OWN_PARTS else None for i, part in enumerate(pack(made, self.config))]
        carrier = self.carrier(output.src_info.shape[0], output.src_info.device) if self.static.quantised else None
        return self._padded(output, [*fields, counts, carrier, *plan])

    def allocate(
        self, *, num_tokens: int, rows: int | torch.SymInt, weighted: bool, with_plan: bool, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Allocate uninitialised tensors like those of :meth:`flatten`."""
        config = self.config
        counts = torch.empty(config.num_local_experts, config.world_size, dtype=torch.int32, device=device)
        plan = allocate(
            config, transport=self.static.transport, num_tokens=num_tokens, device=device, again=not with_plan
        )
        handle = DispatchHandle(self.static.owner, self.static.rank, num_tokens, counts, None, counts, PackedPlan(plan))
        output = OutputShape.of(config, rows=rows, weighted=weighted).allocate(handle, device)  # type: ignore[arg-type]
        return self.flatten(output, with_plan=with_plan)

    def carrier(self, rows: int | torch.SymInt, device: torch.device) -> Tensor:
        """Make the ``carrier`` of a handle, on ``device``."""
        zero = torch.zeros(1, 1, dtype=self.static.combine_dtype, device=device)
        return zero.expand(rows, self.config.hidden_size)

    @cached_property
    def zero(self) -> Tensor:
        """The number that all carriers of eager calls are."""
        return torch.zeros(1, 1, dtype=self.static.combine_dtype, device=self.session.devices[0])

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
        """Assemble the tensors that :meth:`flatten` returned, for a call with these arguments (the caller's
        ``topk_weights``)."""
        static = self.static
        weighted = topk_weights is not None
        present = {
            "scales": static.quantised,
            "scales_offsets": static.tiled,
            "weights": weighted and not static.ranked,
            "topk_ids": static.ranked,
            "topk_weights": weighted and static.ranked,
        }
        fields: dict[str, Any] = {
            name: tensor if present.get(name, True) else None
            for name, tensor in zip(FIELDS, flat[: len(FIELDS)], strict=True)
        }
        handle = DispatchHandle(
            owner=static.owner,
            rank=static.rank,
            num_tokens=num_tokens,
            topk_ids=topk_ids,
            topk_weights=None if topk_weights is None else topk_weights.detach().to(static.weight_dtype),
            counts=flat[COUNTS] if routing is None else routing.handle.counts,
            routing=self._plan(flat, routing),
            first_id=static.first_id,
            absent=self._absent_on(topk_ids.device),
            carrier=flat[CARRIER] if static.quantised else None,
        )
        ids = None if static.ranked else torch.arange(static.num_groups, dtype=torch.int32, device=topk_ids.device)
        return DispatchOutput(expert_ids=ids, handle=handle, **fields)

    def _absent_on(self, device: torch.device) -> Tensor | None:
        """Return what handles carry; None under a compiler, whose graph would keep it."""
        return None if torch.compiler.is_compiling() else self.session.transport.absent_on(device)

    def change(self, world: World) -> None:
        """Go on with the ranks of ``world``, with whom the session has changed. Gradients meet anew when needed."""
        self.gradients.close()
        self.world, self.gradients = world, GradientCommunicators(self.session, world)
        self.static = dataclasses.replace(self.static, owner=self.session.identity)
        self.name = REGISTRY.add(self, self.config)

    def _plan(self, flat: Sequence[Tensor], routing: DispatchOutput | None) -> Any:
        static = self.static
        if routing is None:
            return PackedPlan(tuple(flat[PLAN : PLAN + static.parts]))
        plan = routing.handle.routing
        if isinstance(plan, CollectivePlan) and not torch.compiler.is_compiling():  # without a copy of it
            return dataclasses.replace(plan, call=int(flat[PLAN + OWN_PARTS[0]]))
        return PackedPlan(tuple(static.merge(pack(plan, self.config), flat)))

    def record(self, recv: DispatchOutput) -> list[Tensor]:
        """Build the record (see :data:`PLACE`) of ``recv``."""
        place = [getattr(recv, name) for name in PLACE]
        return [*place, recv.handle.counts, *pack(recv.handle.routing, self.config)]

    def restore(
        self,
        record: Sequence[Tensor],
        *,
        topk_ids: Tensor,
        weights: Tensor | None = None,
        home_weights: Tensor | None = None,
        session: Session | None = None,
    ) -> DispatchOutput:
        """Rebuild from a record the part of a DispatchOutput that combine and ``routing=`` read, as an output of
        ``session``."""
        row_offsets, src_info, num_recv_tokens, overflow, counts, *plan = record
        handle = DispatchHandle(
            owner=(session or self.session).identity,
            rank=self.static.rank,
            num_tokens=topk_ids.shape[0],
            topk_ids=topk_ids,
            topk_weights=home_weights,
            counts=counts,
            routing=unpack(tuple(plan), self.config, transport=self.static.transport),
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

    def direct(self, request: CallRequest) -> CallRequest:
        """Replace an operator's packed plan in ``request`` by the transport's own.

        A request over an output of another communicator is returned as it is; the session refuses it.
        """
        recv = self.unpacked(request.over)
        if recv is request.over:
            return request
        if isinstance(request, DispatchRequest):
            return dataclasses.replace(request, routing=recv)
        return dataclasses.replace(request, recv=recv)

    def unpacked(self, recv: Any) -> Any:
        """Return ``recv`` with the transport's own plan in place of an operator's packed one.

        An output of another communicator, or without a packed plan, is returned as it is.
        """
        if not isinstance(recv, DispatchOutput) or recv.handle.owner != self.static.owner:
            return recv
        plan = recv.handle.routing
        if not isinstance(plan, PackedPlan):
            return recv
        plan = unpack(plan.tensors, self.config, transport=self.static.transport)
        return dataclasses.replace(recv, handle=dataclasses.replace(recv.handle, routing=plan))


def earlier_forward(what: str) -> ForeignHandleError:
    """Return the error of a backward over a forward that was made before the ranks changed.

    Peers are not told of it: those that made the forward raise the same error, and newcomers make no such backward.
    """
    return ForeignHandleError(
        f"{what}: expected a forward with the ranks that take part now, got one of before mask or admit; repeat the "
        "step from its first dispatch"
    )


class Registry:
    """Contexts of open communicators by name, and the tensor that orders their operators.

    A compiled graph outlives the Python objects that existed when it was traced, so it holds a name and finds the
    communicator here. The registry keeps no communicator alive.

    A name is the communicator's number in this process and a digest of its configuration. It is part of compiled
    graphs. It must be the same when a program runs again, or no compilation cache would hit; and it must differ when
    sizes differ, or a cached graph for other sizes would hit. When the ranks change (:mod:`moelink.ops.changes`) a
    context gets a further name: a backward has the name of its forward, so one of before the change is found out.
    """

    def __init__(self) -> None:
        self._contexts: weakref.WeakValueDictionary[str, OperatorContext] = weakref.WeakValueDictionary()
        self._orders: weakref.WeakValueDictionary[torch.device, Tensor] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, context: OperatorContext, config: EPConfig) -> str:
        """Enter ``context`` and return its name, like ``"0:9f86d081"``."""
        text = f"{config.shared_fields()} {config.rank}"
        name = f"{next(self._numbers)}:{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        self._contexts[name] = context
        return name

    def find(self, name: str, what: str) -> OperatorContext:
        """Find the context called ``name``; raise ClosedError naming ``what`` when its communicator is gone."""
        context = self._contexts.get(name)
        if context is None:
            raise ClosedError(what)
        return context

    def find_latest(self, name: str, what: str) -> OperatorContext:
        """Find as :meth:`find`; raise ForeignHandleError if its ranks have changed since ``name`` was given."""
        context = self.find(name, what)
        if context.name != name:
            raise earlier_forward(what)
        return context

    def order(self, device: torch.device) -> Tensor:
        """Return the tensor that every operator on ``device`` declares to write (:mod:`moelink.ops.library`)."""
        order = self._orders.get(device)
        if order is None:
            order = self._orders[device] = torch.zeros(1, device=device)
        return order


REGISTRY = Registry()
