"""First weights of layers, and parameters and buffers under casts and moves of a whole model.

First weights depend on a seed and on the number of a matrix, never on the number of ranks. Each matrix has a random
stream of its own, drawn on the CPU. So a rank draws its own experts and nothing else, and a layer on any number of
ranks, on any device, starts as the layer on one rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROUTER = 0
SHARED = 1
EXPERTS = 4
"""Streams: the router's, the shared expert's first, the first expert's. Each expert takes two."""


def draw(weight: Tensor, *, seed: int, stream: int) -> None:
    """Fill ``weight`` [..., fan_in] in place, uniform in +-1 / sqrt(fan_in), as ``torch.nn.Linear`` does.

    A tensor on the meta device stays as it is.
    """
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed * 1_000_003 + stream)
    bound = weight.shape[-1] ** -0.5
    with torch.no_grad():
        values = torch.rand(weight.shape, generator=generator, dtype=torch.float32, device=generator.device)
        weight.copy_(values.mul_(2 * bound).sub_(bound))


def part_of(module: torch.nn.Module, parts: dict[str, Any], name: str) -> Any:
    """Return the parameter, buffer or module ``name`` of ``parts``, a dictionary of ``module``, or its attribute if it
    is parametrised. As an attribute, a module looks for each of them at length."""
    return parts[name] if name in parts else getattr(module, name)


class KeepsBuffers(torch.nn.Module):
    """A module whose buffers ``kept`` are changed by their owner alone.

    ``Module.to``, ``half``, ``bfloat16`` and ``to_empty`` apply a function to each buffer of a model. A correction bias
    that is rounded to bf16 chooses other experts, and a table of ids without values names experts that do not exist.
    Such a function changes only the device of kept buffers. A buffer from the meta device has no values, so
    :meth:`reset_buffers` gives all of them their first values.

    Attributes:
        kept: names of buffers.
    """

    kept: tuple[str, ...] = ()

    def reset_buffers(self) -> None:
        """Give the kept buffers their values in a new module."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: buffer for name in self.kept if (buffer := self._buffers.get(name)) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        empty = False
        for name, buffer in before.items():
            device = getattr(self, name).device
            if buffer.is_meta and device.type != "meta":
                self._buffers[name], empty = torch.empty_like(buffer, device=device), True
            else:
                self._buffers[name] = buffer.to(device)
        if empty:
            self.reset_buffers()
        return self


class KnowsRows(torch.nn.Module):
    """Experts whose rows travel in a fixed dtype; a cast of their weights to a wider one warns.

    Attributes:
        row_dtype: the communicator's ``combine_dtype``, whose precision rows keep on their way.
    """

    row_dtype: torch.dtype = torch.float64

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = next((p.dtype for p in self.parameters()), None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = next((p.dtype for p in self.parameters()), None)
        if before is not None and after is not None and before != after and after.itemsize > self.row_dtype.itemsize:
            warnings.warn(
                f"{type(self).__name__}: expected weights of {self.row_dtype} or less, as rows travel, got a cast to "
                f"{after}: rows go on to travel as before; cast the model first, or make the communicator with "
                f"combine_dtype={after} and a dispatch_format that carries it",
                stacklevel=2,
            )
        return self
