"""Keep the routing notes of a dispatch, for combine and for later dispatches over the same routing.

They belong to the caller, together with the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.kernels.records import RoutingNotes
from moelink.memory.workspace import Workspace


@dataclass(frozen=True)
class NotesLayout:
    """Where the parts are in the one int32 tensor that holds them all. To make five tensors costs more host time than
    all work with them.

    Attributes:
        shapes: shapes of the parts; the last part has a row for each token, however many there are.
        begins, first_bytes: first word, and first byte, of each part.
    """

    shapes: tuple[tuple[int, ...], ...]
    begins: tuple[int, ...]
    first_bytes: tuple[int, ...]

    @classmethod
    def of(cls, workspace: Workspace) -> NotesLayout:
        """Return the layout for all dispatches of a communicator."""
        shapes, begins = workspace.note_shapes(1), workspace.note_begins
        return cls((*shapes[:-1], (-1, workspace.world_size)), begins, tuple(4 * begin for begin in begins))


class SymmetricNotes:
    """Where the rows of one call are.

    Attributes:
        own: ``received`` of a call over cached routing. Such a call writes only this part for itself; it shares and
            only reads the others. None if ``notes`` also holds this part.
    """

    __slots__ = ("_layout", "_memory", "_words", "own")

    def __init__(
        self, layout: NotesLayout, memory: Tensor, own: Tensor | None = None, words: int | None = None
    ) -> None:
        """``memory`` begins with the notes: its first ``words`` elements, or all."""
        self._layout, self._memory, self._words, self.own = layout, memory, words, own

    @property
    def notes(self) -> Tensor:
        """All parts in one tensor."""
        return self._memory if self._words is None else self._memory[: self._words]

    @property
    def parts(self) -> RoutingNotes:
        """The parts as tensors, which share memory with :attr:`notes`."""
        shapes, begins, notes = self._layout.shapes, self._layout.begins, self.notes
        ends = (*[begin + math.prod(shape) for begin, shape in zip(begins[:-1], shapes[:-1], strict=True)], None)
        parts = RoutingNotes._make(
            notes[begin:end].view(shape) for begin, end, shape in zip(begins, ends, shapes, strict=True)
        )
        return parts if self.own is None else parts._replace(received=self.own)

    @property
    def addresses(self) -> RoutingNotes:
        """The addresses of the parts."""
        start = self._memory.data_ptr()
        rows, token, received, sent, slot = self._layout.begins
        own = start + 4 * received if self.own is None else self.own.data_ptr()
        return RoutingNotes(start + 4 * rows, start + 4 * token, own, start + 4 * sent, start + 4 * slot)

    def brought_nothing(self) -> bool:
        """Return whether the call was refused or failed. Synchronises on CUDA."""
        return int(self.parts.received[self._layout.shapes[-1][1], 0]) != 0

    def again(self) -> SymmetricNotes:
        """Return the notes of another call over this routing."""
        return SymmetricNotes(self._layout, self._memory, torch.empty_like(self.parts.received), self._words)
