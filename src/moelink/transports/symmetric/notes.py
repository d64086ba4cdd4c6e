"""What a dispatch notes for combine, and for dispatches over the same routing: the caller owns it with the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelink.memory.workspace import Workspace


class Parts(NamedTuple):
    """What is noted, as tensors or as their addresses. ``W`` ranks that exchange (1 in allreduce mode), ``T``
    max_tokens_per_rank.

    Attributes:
        rows_of_message: [W, T, topk] int32 (layout "rank": [W, T, 1]), output row of each (source, slot, top-k slot):
            -1 where it is not for this rank, -2 where it did not fit. Undefined past a source's messages.
        message_token: [W, T] int32, source token of each (source, slot).
        received: [W + 1, 2] int32: messages and tokens of each source; then 1 if the call was refused or failed.
        sent: [W + 1] int32: messages that went to each rank; then the number of the call that found all this out, of
            which 31 bits are kept. By it ranks notice that they use the routings of different calls again.
        slot_of: [num_tokens, W] int32, the own token's message slot at each rank, -1 where it did not go.
    """

    rows_of_message: Any
    message_token: Any
    received: Any
    sent: Any
    slot_of: Any


@dataclass(frozen=True)
class NotesLayout:
    """Where the parts are in the one int32 tensor that holds them all: making five costs more host time than all that
    is done with them.

    Attributes:
        shapes: of the parts; the last has a row for each token, however many these are. begins: of the parts, in words.
    """

    shapes: tuple[tuple[int, ...], ...]
    begins: tuple[int, ...]

    @classmethod
    def of(cls, workspace: Workspace) -> NotesLayout:
        """That of all dispatches of a communicator."""
        return cls((*workspace.note_shapes(1)[:-1], (-1, workspace.world_size)), workspace.note_begins)


class SymmetricPlan:
    """Where the rows of one call are.

    Attributes:
        notes: all parts in one tensor. own: ``received`` of a call over an earlier one's routing, which fills in that
            much for itself; it shares the rest, and only reads. None where that, too, is in ``notes``.
    """

    __slots__ = ("_layout", "notes", "own")

    def __init__(self, layout: NotesLayout, notes: Tensor, own: Tensor | None = None) -> None:
        self._layout, self.notes, self.own = layout, notes, own

    @property
    def parts(self) -> Parts:
        """The parts as tensors, which share memory with :attr:`notes`."""
        shapes, begins = self._layout.shapes, self._layout.begins
        ends = (*[begin + math.prod(shape) for begin, shape in zip(begins[:-1], shapes[:-1], strict=True)], None)
        parts = Parts._make(
            self.notes[begin:end].view(shape) for begin, end, shape in zip(begins, ends, shapes, strict=True)
        )
        return parts if self.own is None else parts._replace(received=self.own)

    @property
    def addresses(self) -> Parts:
        """Those of the parts."""
        start = self.notes.data_ptr()
        parts = Parts._make([start + 4 * begin for begin in self._layout.begins])
        return parts if self.own is None else parts._replace(received=self.own.data_ptr())

    def given(self, typed: bool) -> Parts:
        """The parts as a launch asks for them (:meth:`Rank.launch`): as tensors, or their addresses."""
        return self.parts if typed else self.addresses

    def brought_nothing(self) -> bool:
        """Whether the call was refused or failed. Synchronises on CUDA."""
        return int(self.parts.received[-1, 0]) != 0

    def again(self) -> SymmetricPlan:
        """The plan of another call over this routing."""
        return SymmetricPlan(self._layout, self.notes, torch.empty_like(self.parts.received))
