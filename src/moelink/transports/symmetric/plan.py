"""What a dispatch notes for combine: the caller owns it with the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelink.workspace import Workspace


@dataclass(frozen=True)
class SymmetricPlan:
    """Where the rows of one call are. ``W`` ranks that exchange (1 in allreduce mode), ``T`` max_tokens_per_rank.

    Attributes:
        slot_of: [num_tokens, W] int32, the own token's message slot at each rank, -1 where it did not go.
        rows_of_message: [W, T, topk] int32 (layout "rank": [W, T, 1]), output row of each (source, slot, top-k slot):
            -1 where it is not for this rank, -2 where it did not fit. Undefined past a source's messages.
        message_token: [W, T] int32, source token of each (source, slot).
        received: [W + 1, 2] int32: messages and tokens of each source; then 1 if the call was refused or failed.
    """

    slot_of: Tensor
    rows_of_message: Tensor
    message_token: Tensor
    received: Tensor

    @classmethod
    def allocate(cls, workspace: Workspace, *, num_tokens: int, device: torch.device) -> SymmetricPlan:
        """Uninitialised tensors for a call with ``num_tokens`` own tokens."""
        shapes = workspace.note_shapes(num_tokens)
        return cls(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))
