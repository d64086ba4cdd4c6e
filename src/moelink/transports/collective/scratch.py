"""Keep staging memory between calls, because fresh pages cost more than the copies into them.

A buffer may be taken again when the call that took it has ended; calls of one rank never overlap on this transport.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers of one rank, which only grow."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """[rows, row_bytes] uint8, uninitialised, contiguous. The previous content of ``name`` is lost."""
        size = rows * row_bytes
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            with torch.inference_mode(False):  # a later call may not be in inference mode
                buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[:size].view(rows, row_bytes)
