"""Read words of a rank's block beside its calls, and from them the choices that ranks made in a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moelink.memory.driver import beside_captures
from moelink.memory.protocol import MASKED_CALL, PHASE_DISPATCH
from moelink.memory.workspace import Workspace

LL_CALL, LL_VALUE = 0x7FFFFFFF, 0xFFFFFFFF
"""Of an LL word (``kernels.sync.ll_words``): its call, above 32 bits, and its value."""
_OPTIONS, _ORIGIN = 5, 6
"""Words of a row of ``counts`` (``protocol.COUNT_HEADER``)."""


class BlockReader:
    """Reads parts of a rank's block, by one thread at a time.

    On CUDA a look is a small copy of each part on a stream of its own, which waits for no other and for which none
    waits. Only the thread that looks waits.
    """

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        """``parts``: views of one block, read in this order."""
        self._parts = dict(parts)
        self._device = next(iter(self._parts.values())).device
        if self._device.type == "cuda":
            with beside_captures():
                self._stream = torch.cuda.Stream(self._device)
                self._host = {
                    name: torch.empty_like(t, device="cpu", pin_memory=True) for name, t in self._parts.items()
                }

    def look(self) -> dict[str, Any]:
        """Return the parts as they are now, as arrays of NumPy."""
        if self._device.type != "cuda":
            return {name: part.numpy().copy() for name, part in self._parts.items()}
        with beside_captures(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for name, part in self._parts.items():
                self._host[name].copy_(part, non_blocking=True)
            self._stream.synchronize()
        return {name: host.numpy() for name, host in self._host.items()}


def choices_in(block: Tensor, workspace: Workspace, *, phase: int, call: int, origin: bool) -> dict[int, int]:
    """Return by rank the options of call ``call``, or with ``origin`` the dispatch that it is over, without masked
    ranks.

    It is empty if the words of a rank are of another call.

    Example: of a dispatch that rank 1 of 2 makes without weights they are 2 and 1.
    """
    names = ("counts",) if phase == PHASE_DISPATCH else ("combine_head", "combine_status")
    words = BlockReader({name: workspace.regions[name].view(block) for name in names}).look()
    if phase == PHASE_DISPATCH:
        column = words["counts"][:, _ORIGIN if origin else _OPTIONS]
        here, calls, values = column >> 32 != MASKED_CALL, column >> 32 & LL_CALL, column & LL_VALUE
        call &= LL_CALL
    else:
        status = words["combine_status"]
        here, calls, values = status >= 0, words["combine_head"], status >> 32 if origin else (status & 7) >> 1
    if (calls[here] != call).any():
        return {}
    return {rank: int(values[rank]) for rank in range(len(values)) if here[rank]}
