"""Create the fields of a dispatch's output lazily, and the record that its combine needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moelink.lease import CallCount, RowsInPlace
from moelink.output import DispatchHandle, DispatchOutput, made
from moelink.transports.symmetric.notes import SymmetricNotes
from moelink.transports.symmetric.plans import LaunchPlan

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
    """

    __slots__ = ("again", "at", "ids", "memory", "owner", "plan", "version", "weights")

    def __init__(
        self,
        plan: LaunchPlan,
        owner: str,
        memory: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        version: int | None,
        again: SymmetricNotes | None = None,
    ) -> None:
        self.plan, self.owner, self.memory, self.at = plan, owner, memory, memory.data_ptr()
        self.ids, self.weights, self.version, self.again = ids, weights, version, again

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
            ids_version=self.version, first_id=plan.first_id,
        )  # fmt: skip

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
