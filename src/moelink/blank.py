"""Tensors still to be made, their sizes worked out once: making them is a good part of the host time of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blank:
    """An uninitialised, contiguous tensor, but for the device it is made on.

    ``torch.empty_strided`` is told the strides; to have ``torch.empty`` find them costs more (``tensors`` in the
    results of ``benchmarks/host_time.py``).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, *shape: int, dtype: torch.dtype = torch.int32) -> Blank:
        """One of ``shape``."""
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * torch.sym_max(shape[i], 1)  # a tracer's sizes are not numbers
        return cls(shape, tuple(strides), dtype)

    def on(self, device: torch.device) -> Tensor:
        """A new tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
