"""What a dispatch notes for combine, and for dispatches over the same routing: the caller owns it with the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moelink.blank import Blank


@dataclass(frozen=True)
class SymmetricPlan:
    """Where the rows of one call are. ``W`` ranks that exchange (1 in allreduce mode), ``T`` max_tokens_per_rank.

    Attributes:
        slot_of: [num_tokens, W] int32, the own token's message slot at each rank, -1 where it did not go.
        rows_of_message: [W, T, topk] int32 (layout "rank": [W, T, 1]), output row of each (source, slot, top-k slot):
            -1 where it is not for this rank, -2 where it did not fit. Undefined past a source's messages.
        message_token: [W, T] int32, source token of each (source, slot).
        received: [W + 1, 2] int32: messages and tokens of each source; then 1 if the call was refused or failed.
        sent: [W + 1] int32: messages that went to each rank; then the number of the call that found all this out, of
            which 31 bits are kept. By it ranks notice that they use the routings of different calls again.
    """

    OWN: ClassVar[tuple[str, ...]] = ("received",)
    """Tensors that a call over an earlier one's routing fills in for itself; it shares the others, and only reads."""

    slot_of: Tensor
    rows_of_message: Tensor
    message_token: Tensor
    received: Tensor
    sent: Tensor

    @classmethod
    def allocate(cls, blanks: Iterable[Blank], device: torch.device) -> SymmetricPlan:
        """Uninitialised tensors, of :meth:`moelink.workspace.Workspace.notes`."""
        return cls(*[blank.on(device) for blank in blanks])

    def brought_nothing(self) -> bool:
        """Whether the call was refused or failed. Synchronises on CUDA."""
        return int(self.received[-1, 0]) != 0

    def again(self) -> SymmetricPlan:
        """The plan of another call over this routing: the same tensors, but for uninitialised ones in place of OWN."""
        return dataclasses.replace(self, **{name: torch.empty_like(getattr(self, name)) for name in self.OWN})
