"""Decide the common part of all dispatches of one kind once, and make their outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelink.kernels.dispatch import kernel as kernels
from moelink.kernels.dispatch.scales import ep_lay_out_scales_kernel
from moelink.kernels.launch.constants import COPY, ENCODE, dispatch_spec
from moelink.kernels.launch.grid import (
    TokenSplit,
    dispatch_launch,
    dispatch_numbers,
    layout_launch,
    tokens_of_kernels,
)
from moelink.kernels.launch.launcher import CompiledKernel
from moelink.kernels.records import DispatchNumbers, DispatchOutputs, RoutingNotes
from moelink.lease import IN_PLACE, CallCount, RowsInPlace
from moelink.output import (
    ArenaLayout,
    Blank,
    DispatchHandle,
    DispatchOutput,
    OutputShape,
    made,
    shape_of_outputs,
    version_of,
)
from moelink.transports.symmetric.notes import NotesLayout, SymmetricNotes
from moelink.transports.symmetric.rank import Rank


@dataclass(frozen=True, eq=False)  # two plans are never equal, and to hash one is to hash its address
class LaunchPlan:
    """All that dispatches of one kind have in common, decided once. To decide it at each call would take most of the
    call's host time.

    Attributes:
        send, receive, both, layout: the compiled kernels; the last one is the scale kernel, where a call has one.
        sending, receiving, fused, laying: the numbers that each of them gets.
        copies: whether the kernels move rows as bytes.
        rows: rows of the output (layout "masked": of each expert), unless the call is over an earlier routing.
        notes, counts, outputs: the blanks of the tensors that a call makes.
        arena: where the small ones of them are in one allocation, the notes first.
        in_arena: of the kernels' addresses from :data:`~moelink.transports.symmetric.dispatch.SMALL` on, the first byte
            in the arena, -1 where the call has none there.
        large: the tensors that are not in the arena.
        make_arena, make_large: functions that make these tensors.
        in_place: with ``zero_copy``, the views of rows and scales that stay where they arrive; else None.
        lazy: the fields of an output that are made at the first look, beside its handle.
        notes_layout: where the parts of the notes are.
        rank, first_id: the handle's ``rank`` and ``first_id``.
    """

    send: CompiledKernel
    receive: CompiledKernel
    both: CompiledKernel
    layout: CompiledKernel | None
    sending: DispatchNumbers
    receiving: DispatchNumbers
    fused: DispatchNumbers
    laying: DispatchNumbers
    copies: bool
    rows: int
    notes: Blank
    counts: Blank
    outputs: OutputShape
    arena: ArenaLayout
    in_arena: tuple[int, ...]
    large: tuple[tuple[str, Blank], ...]
    make_arena: Callable[[], Tensor]
    make_large: tuple[tuple[str, Callable[[], Tensor]], ...]
    in_place: dict[str, Tensor] | None
    lazy: frozenset[str]
    notes_layout: NotesLayout
    rank: int
    first_id: int

    @classmethod
    def of(
        cls, rank: Rank, *, num_tokens: int, dtype: torch.dtype, quantized: bool, weights: bool, input_scale: bool,
        cached: bool, max_tokens: int | None, num_sms: int | None,
    ) -> LaunchPlan:  # fmt: skip
        """Return the launch plan of ``rank`` for ``num_tokens`` rows of ``dtype``, and at most ``max_tokens`` on any
        rank, within ``num_sms`` SMs; the others are as in :func:`dispatch_spec`."""
        device = rank.device
        config, workspace, kernel = rank.within(num_sms)
        spec = dispatch_spec(
            workspace, device, input_dtype=dtype, quantized=quantized, weights=weights, input_scale=input_scale,
            cached=cached, tokens=tokens_of_kernels(config, device, max_tokens),
        )  # fmt: skip
        spec = rank.in_form(spec)
        launch = dispatch_launch(
            config, device, num_tokens, encodes=bool(spec.SOURCE == ENCODE), max_tokens=max_tokens,
            forwarders=spec.FORWARDERS,
        )  # fmt: skip
        later = layout_launch(config, device)
        cut = TokenSplit.of(num_tokens, programs=launch.send, world_size=workspace.world_size)
        senders = 1 + cut.programs + spec.FORWARDERS
        rows = config.output_rows(max_tokens)
        outputs = shape_of_outputs(config, rows=rows, weighted=weights)
        numbers = dispatch_numbers(
            rank, num_tokens, cut=cut, senders=senders, rows=rows,
            scale_rows=scale_rows_of(dict(outputs.present).get("scales")),
        )  # fmt: skip
        send = kernel(kernels.ep_dispatch_async_kernel, senders, S=spec, launch=launch)
        receive = kernel(kernels.ep_dispatch_wait_kernel, launch.receive, S=spec, launch=launch)
        both = kernel(kernels.ep_fused_dispatch_kernel, senders + launch.receive, S=spec, launch=launch)
        notes = Blank.of(workspace.note_words(num_tokens))
        counts = Blank.of(config.num_local_experts, config.world_size)
        arena = ArenaLayout.of([*([] if cached else [("notes", notes)]), ("counts", counts), *outputs.small])
        small = tuple(arena.places[name][0] if name in arena.places else -1 for name in DispatchOutputs._fields[2:])
        noted, stay = rank.notes.first_bytes, config.zero_copy
        large = tuple((name, blank) for name, blank in outputs.large if not (stay and name in IN_PLACE))
        received, counted = noted[RoutingNotes._fields.index("received")], small[-1]
        return cls(
            send=send,
            receive=receive,
            both=both,
            layout=kernel(ep_lay_out_scales_kernel, later.receive, S=spec, launch=later) if spec.SCALES_LATER else None,
            sending=numbers._replace(programs=send.programs),
            receiving=numbers._replace(programs=receive.programs),
            fused=numbers._replace(programs=both.programs),
            laying=numbers._replace(programs=later.receive),
            copies=bool(spec.SOURCE == COPY),
            rows=rows,
            notes=notes,
            counts=counts,
            outputs=outputs,
            arena=arena,
            in_arena=(*small, *noted, received, counted),
            large=large,
            make_arena=maker(Blank.of(arena.words), device),
            make_large=tuple((name, maker(blank, device)) for name, blank in large),
            in_place=rank.rows_in_place(rows) if stay else None,
            lazy=frozenset([*dict(outputs.small), *outputs.absent]),
            notes_layout=rank.notes,
            rank=config.rank,
            first_id=rank.first_expert if config.global_ids else 0,
        )


def scale_rows_of(scales: Blank | Tensor | None) -> int:
    """Return the rows of a column of scales, where they are in columns."""
    return 0 if scales is None else scales.shape[-1]


def maker(blank: Blank, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that makes tensors of a blank.

    A method of a tensor takes a fifth less time than ``torch.empty_strided``, which gets dtype and device as well.
    """
    like = torch.empty(0, dtype=blank.dtype, device=device)
    return partial(like.new_empty_strided, blank.shape, blank.strides)


def _part(plan: LaunchPlan, owner: str, memory: Tensor, ids: Tensor) -> Received:
    return Received(plan, owner, memory, ids, None, None)


_HANDLE = "handle"


class Received:
    """The source of one output's fields (:class:`moelink.output.Source`).

    An eager call makes only one such object and one output: each further object costs the host a microsecond.

    Attributes:
        plan: the launch plan of the dispatch, which calls of its kind share. It is that of one rank of one
            communicator.
        owner: identity of the communicator.
        memory: the arena, [plan.arena.words] int32, and ``at``, its address.
        ids, weights: [num_tokens, topk] of the home rank; weights are None where none went into dispatch.
        version: ``ids_version`` of the handle.
        again: the notes of a call over an earlier routing; None where they are in the arena.
        absent: of the handle.
        carrier: of the handle.
    """

    __slots__ = ("absent", "again", "at", "carrier", "ids", "memory", "owner", "plan", "version", "weights")

    def __init__(
        self,
        plan: LaunchPlan,
        owner: str,
        memory: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        version: int | None,
        again: SymmetricNotes | None = None,
        absent: Tensor | None = None,
    ) -> None:
        self.plan, self.owner, self.memory, self.at = plan, owner, memory, memory.data_ptr()
        self.ids, self.weights, self.version, self.again = ids, weights, version, again
        self.absent = absent
        self.carrier: Tensor | None = None

    def has(self, name: str) -> bool:
        """Return whether the output has a field of this name, which is to be made."""
        return name == _HANDLE or name in self.plan.lazy

    def field(self, name: str) -> Any:
        """Make a field."""
        plan = self.plan
        if name != _HANDLE:
            return None if name in plan.outputs.absent else plan.arena.tensor(self.memory, name)
        return DispatchHandle(
            owner=self.owner, rank=plan.rank, num_tokens=plan.fused.num_tokens, topk_ids=self.ids,
            topk_weights=self.weights, counts=plan.arena.tensor(self.memory, "counts"), routing=self.notes,
            ids_version=self.version, first_id=plan.first_id, absent=self.absent,
            carrier=self.carrier,
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Received:
        """Return a source of the same plan with tensors of its own, of ids that are as unchanged as these are."""
        memory, ids, weights, again, carrier = copy.deepcopy(
            (self.memory, self.ids, self.weights, self.again, self.carrier), memo
        )
        version = self.version
        if version is not None:
            version = version_of(ids) if version_of(self.ids) == version else -1  # which is no tensor's
        other = type(self)(self.plan, self.owner, memory, ids, weights, version, again, self.absent)
        other.carrier = carrier
        return other

    @property
    def part(self) -> Callable[[Tensor, Tensor], Received]:
        """A function of ``memory`` and ``ids``, which it does not hold: what calls over the routing read of this."""
        return partial(_part, self.plan, self.owner)

    @property
    def notes(self) -> SymmetricNotes:
        """The notes of the routing."""
        if self.again is not None:
            return self.again
        return SymmetricNotes(self.plan.notes_layout, self.memory, words=self.plan.notes.shape[0])

    def output(self, calls: CallCount | None) -> DispatchOutput:
        """Return the output, with the tensors that are not in the arena. ``calls``: counts calls where rows stay where
        they arrive."""
        fields: dict[str, Any] = {"_source": self}
        for name, make in self.plan.make_large:
            fields[name] = make()
        if calls is not None:
            fields["_rows"] = RowsInPlace(calls, self.plan.in_place)  # type: ignore[arg-type]
        return made(DispatchOutput, fields)
